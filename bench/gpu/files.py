"""Which files a case runs on, how synthetic ones are written, and what a pass must read of them.

Must not know: clocks of rounds, processes of ours. Test: tests/unit/test_bench_run.py.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood.errors import OptionError

from bench.gpu import child
from bench.gpu.work import BenchError, Clock, Work

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
TINY = ROOT / "models" / "tiny-moe"
WRITE, ROUTING = 150.0, 180.0  # seconds


@dataclass(frozen=True, slots=True)
class Files:
    """A model and its DFlash drafter, if there is one."""

    model: Path
    drafter: Path | None


def of(model: str, work: Work) -> Files:
    """Return the files of "tiny-moe", of a preset of tools/synth_gguf.py, or of a GGUF's path.

    Errors: BenchError for a preset that was not written yet, OptionError for a path without a file and for a
    name that is none.
    """
    if model == "tiny-moe":
        return Files(TINY / "tiny-moe-f16.gguf", TINY / "dflash-f16.gguf")
    if model.endswith(".gguf"):
        if not Path(model).is_file():
            raise OptionError(f"found no file {model}; expected a GGUF", hint="--model tiny-moe")
        return Files(Path(model), None)
    path, drafter = written(model, work)
    if not path.exists() and model not in presets():
        known = ", ".join(sorted(presets()))
        raise OptionError(f"found the model {model!r}; expected tiny-moe, a GGUF's path, or one of {known}",
                          hint="--model tiny-moe")  # fmt: skip
    if not path.exists():
        raise BenchError(
            f"found no {path.name} in {path.parent}; expected it written", hint="bench/run.py run models"
        )
    return Files(path, drafter if drafter.exists() else None)


def written(preset: str, work: Work) -> tuple[Path, Path]:
    """Return where a preset's model and its DFlash drafter are, or would be."""
    folder = work.folder / "models"
    return folder / f"{preset}.gguf", folder / f"{preset}-dflash.gguf"


def presets() -> set[str]:
    """Return the names that tools/synth_gguf.py can write. Errors: BenchError without gguf."""
    _need_gguf()
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    import synth_gguf

    return set(synth_gguf.PRESETS)


def _need_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise BenchError(
            f"found no module gguf in {sys.executable}; expected it, as in the environment of `make dev`",
            hint=".venv/bin/python bench/run.py, or pip install gguf",
        ) from error


def write(preset: str, drafts: bool, work: Work, clock: Clock) -> float:
    """Write a preset, with a DFlash drafter if it `drafts`, where it is not there yet; return the seconds.

    Errors: BenchError where tools/synth_gguf.py fails or takes too long.
    """
    path, drafter = written(preset, work)
    path.parent.mkdir(exist_ok=True)
    begin = time.monotonic()
    missing = [] if path.exists() else [str(path)]
    if drafts and not drafter.exists():
        missing += ["--dflash", str(drafter)]
    if missing:
        _tool(work, clock.limit(WRITE), "synth_gguf.py", preset, *missing)
    return round(time.monotonic() - begin, 1)


def routing(path: Path, on_card: bool, work: Work, clock: Clock) -> dict[str, Any]:
    """Return what tools/routing.py says about the experts that a model chooses in text of its own.

    "unions": mean experts that so many consecutive tokens of a layer choose together. Errors: BenchError.
    """
    layers = ["--gpu-layers", "-1"] if on_card else []
    printed = _tool(work, clock.limit(ROUTING), "routing.py", str(path), *layers)
    found = child.answer("tools/routing.py", printed)
    return {"routing": found, "unions": found["distinct"]}


def _tool(work: Work, limit: float, script: str, *arguments: str) -> str:
    """Run a script of tools/ and return what it printed. Errors: BenchError with what it said."""
    name = " ".join([f"tools/{script}", *arguments])
    log = (work.logs / script).with_suffix(".log")
    # nothing that lies beside it shadows draftwood
    return child.run(name, [str(TOOLS / script), *arguments], log, limit, neighbours=True)


@dataclass(frozen=True, slots=True)
class Reads:
    """Bytes of a model, by when a pass reads them."""

    dense: int
    """By every pass: trunk without experts, and the output head."""
    experts: int
    """Of all experts of the trunk."""
    n_experts: int
    n_used: int
    head: int
    """Of the output head, by every draft of an MTP block too."""
    mtp: int
    """Of the MTP block, by every draft, with the experts it uses."""
    state: int
    """Recurrent state of a sequence, f32."""
    cell: int
    """K and V of a position, f16."""

    def forward(self, union: float, n_past: float) -> float:
        """Return what a pass reads whose rows choose `union` experts a layer: weights, state, n_past cells.

        The state is also written once; rows of the embedding are left out.
        """
        chosen = self.experts * union / self.n_experts if self.n_experts else 0.0
        return self.dense + chosen + 2 * self.state + self.cell * n_past


def reads(path: Path) -> Reads:
    """Count the bytes of a qwen35 or qwen35moe GGUF. Names: llama.cpp's src/models/qwen35moe.cpp.

    Errors: BenchError without gguf.
    """
    _need_gguf()
    from draftwood.load import header
    from gguf import GGUFReader

    reader = GGUFReader(path)

    def number(name: str) -> int:
        field = reader.get_field(f"{arch}.{name}")
        return 0 if field is None else int(field.contents())

    arch = reader.get_field("general.architecture").contents()
    trunk = number("block_count") - number("nextn_predict_layers")
    sums = dict.fromkeys(("dense", "experts", "mtp", "mtp_experts"), 0)
    readers = [reader, *map(GGUFReader, header.files(str(path))[1:])]
    sizes = {tensor.name: int(tensor.n_bytes) for each in readers for tensor in each.tensors}
    for name, size in sizes.items():
        block = re.match(r"blk\.(\d+)\.", name)
        drafts = block is not None and int(block[1]) >= trunk
        if name != "token_embd.weight" or "output.weight" not in sizes:
            kind = (
                ("mtp_experts" if drafts else "experts") if "_exps." in name else "mtp" if drafts else "dense"
            )
            sums[kind] += size
    n_experts, n_used = number("expert_count"), number("expert_used_count")
    recurrent = sum(re.fullmatch(r"blk\.\d+\.ssm_a", name) is not None for name in sizes)
    inner, size = number("ssm.inner_size"), number("ssm.state_size")
    channels = inner + 2 * number("ssm.group_count") * size
    state = inner * size + (number("ssm.conv_kernel") - 1) * channels
    head = number("attention.key_length") + number("attention.value_length")
    return Reads(
        dense=sums["dense"],
        experts=sums["experts"],
        n_experts=n_experts,
        n_used=n_used,
        head=sizes.get("output.weight", sizes["token_embd.weight"]),
        mtp=sums["mtp"] + (sums["mtp_experts"] * n_used // n_experts if n_experts else 0),
        state=4 * recurrent * state,
        cell=2 * (trunk - recurrent) * number("attention.head_count_kv") * head,
    )
