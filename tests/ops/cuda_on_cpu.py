"""Our CUDA kernels on a CPU, thread by thread.

`launch` runs a node's kernels, `takes` says whether a card would. The sources of src/ops are compiled as
C++ against tests/cuda_on_cpu, which stands in for CUDA and ggml-cuda. Two things that are no C++ are
rewritten first: launches in triple angle brackets, and shared memory. Built once for each state of the
sources, in build/cuda_on_cpu, within seconds. Needs a C++ compiler with _Float16.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from draftwood._llama_cpp import llama_cpp

ROOT = Path(__file__).resolve().parents[2]
STANDINS = ROOT / "tests" / "cuda_on_cpu"
OUT = ROOT / "build" / "cuda_on_cpu"
UNITS = ("copies/*.cu", "layer-parts/*.cu", "top-rows/*.cu", "tree-delta-net/*.cu")
UNITS += ("expert-slots/expert-slots.cu", "expert-slots/guess.cu", "probes.cu")
_LAUNCH = re.compile(r"([\w:]+(?:<[\w: ,<>]*>)?)<<<(.*?)>>>\(", re.DOTALL)
_DYNAMIC = re.compile(r"extern __shared__(?: __align__\(\d+\))? (\w+) (\w+)\[\];")
_SHARED = re.compile(r"__shared__ +[\w:]+(?:<[^;]+>)? +(\w+)(?:\[[^];]+\])*;")


def _arguments(text: str) -> list[str]:
    """Split at the commas that are in no brackets."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _rewritten(text: str) -> str:
    def launch(found: re.Match[str]) -> str:
        grid, block, shared, stream = _arguments(found[2])
        return f"ggml_cuda_kernel_launch({found[1]}, {{ dim3({grid}), dim3({block}), {shared}, {stream} }}, "

    text = _DYNAMIC.sub(r"\1 * const \2 = (\1 *) cuda_on_cpu::dynamic_memory();", _LAUNCH.sub(launch, text))
    assert len(_SHARED.findall(text)) == len(re.findall(r"^ *__shared__", text, re.MULTILINE)), text
    return _SHARED.sub(r"\g<0> cuda_on_cpu::poison(&\1, sizeof(\1));", text)


def _sources() -> dict[Path, str]:
    """Return what is rewritten: its path under OUT / "src", text."""
    found = {OUT / "src" / "ops" / "probes.cu": _rewritten((STANDINS / "probes.cu").read_text("utf-8"))}
    for path in sorted((ROOT / "src" / "ops").rglob("*")):
        if path.suffix in (".cu", ".cuh", ".h"):
            found[OUT / "src" / path.relative_to(ROOT / "src")] = _rewritten(path.read_text("utf-8"))
    return found


@functools.cache
def compiler() -> str | None:
    """Return the path of a C++ compiler that has _Float16; None: there is none."""
    found = shutil.which(os.environ.get("CXX", "c++"))
    probe = [found, "-x", "c++", "-fsyntax-only", "-"]
    return (
        found if found and not subprocess.run(probe, input=b"_Float16 x;", check=False).returncode else None
    )


@functools.cache
def library() -> ctypes.CDLL:
    """Build what is not built, one process at a time, and load it."""
    import source  # of _build, which scripts beside the tests do not have

    found = compiler()
    assert found, "no C++ compiler with _Float16"
    llama = source.ensure_source(ROOT).llama_cpp
    texts = _sources()
    others = [Path(__file__), *sorted(path for path in STANDINS.rglob("*") if path.is_file())]
    files = [*texts.values(), *(x.read_text("utf-8") for x in others)]
    all_of = [os.path.realpath(llama), found, *_level(), *files]
    state = hashlib.sha256("".join(all_of).encode())
    built = OUT / f"{state.hexdigest()[:16]}.so"
    OUT.parent.mkdir(exist_ok=True)
    with OUT.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            shutil.rmtree(OUT, ignore_errors=True)
            for path, text in texts.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, "utf-8")
            _build(found, [STANDINS, OUT / "src", *(llama / "ggml" / x for x in ("include", "src"))], built)
        return ctypes.CDLL(str(built))


def _level() -> list[str]:
    """Return the options of a CPU with AVX2, where this is one: a third faster. Sums round as without."""
    from tests.ops.cpus import features  # it needs pytest, which scripts beside the tests lack

    has_it = {"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"} <= features()
    return ["-march=x86-64-v3", "-ffp-contract=off"] if has_it else []


def _build(compiler: str, folders: list[Path], built: Path) -> None:
    units = [path for pattern in UNITS for path in sorted((OUT / "src" / "ops").glob(pattern))]
    units += sorted(STANDINS.glob("*.cpp"))
    options = ["-std=c++17", "-O2", *_level(), "-fPIC", "-w", "-U_FORTIFY_SOURCE"]
    options += ["-include", "common.cuh"]  # nvcc knows its words without a header
    options += [f"-I{folder}" for folder in folders]

    def compiled(unit: Path) -> Path:
        made = OUT / f"{unit.name}.o"
        subprocess.run([compiler, *options, "-x", "c++", "-c", unit, "-o", made], check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(compiled, units))
    whole = built.with_suffix(".part")
    base = llama_cpp._base_path / "libdraftwood-ggml-base.so"
    subprocess.run([compiler, "-shared", *made, base, "-o", whole], check=True)
    whole.replace(built)


def takes(node: Any) -> bool:
    """Return whether a card would run the node."""
    return bool(_function("cuda_on_cpu_takes")(node))


def launch(node: Any) -> None:
    """Run the node's kernels on its operands in host memory, and wait."""
    assert _function("cuda_on_cpu_launch")(node), "the node is not taken"


def launches(part: str) -> int:
    """Return how many launches until now were of kernels whose mangled names have this part."""
    return library().cuda_on_cpu_launches(part.encode())


@functools.cache
def _function(name: str) -> Any:
    found = getattr(library(), name)
    found.restype, found.argtypes = ctypes.c_bool, [ctypes.c_void_p]
    return found


def copy(pieces: Sequence[tuple[int, int, int]]) -> None:
    """Copy pieces (to, from, bytes) as a card does."""
    flat = (ctypes.c_void_p * (3 * len(pieces)))(*(value for piece in pieces for value in piece))
    library().cuda_on_cpu_copy(flat, len(pieces))


def complete(memory: int) -> None:
    """Give a CPU's dw::slot_memory what launchers of expert slots need beside plain memory."""
    library().cuda_on_cpu_complete(ctypes.c_void_p(memory))
