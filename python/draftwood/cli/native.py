"""What the library says about itself and about a model file, as JSON, for `draftwood doctor`.

Runs as a process of its own (`python -m draftwood.cli.native JSON`, the arguments of `facts`): a library that
cannot be loaded, or that ends its process (wheels built for another CPU do), is a finding like any other.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftwood._llama_cpp import __version__ as python_files_version
from draftwood._llama_cpp import llama_cpp as native
from draftwood.cli import fused, shared
from draftwood.engine import _capi
from draftwood.engine.engine import build_info, probe_drafter
from draftwood.errors import DraftwoodError
from draftwood.load import cpu, header, rpc
from draftwood.load.card_layers import card_layers
from draftwood.load.devices import describe, devices, without_tree_ops
from draftwood.load.files import checked_model, need_drafter_file
from draftwood.options import Options, Plan, default_draft_tokens, needed_batch, plan


def features() -> dict[str, list[str]]:
    """Return what each backend was built with or finds in the hardware: {"CPU": ["AVX2", ...]}."""
    found: dict[str, list[str]] = {}
    backend = ""
    for item in native.llama_print_system_info().decode().split("|"):
        name, _, value = item.rpartition("=")
        if ":" in name:
            backend, _, name = name.partition(":")
        if name.strip() and value.strip() != "0":
            shown = name.strip() if value.strip() == "1" else f"{name.strip()}={value.strip()}"
            found.setdefault(backend.strip(), []).append(shown)
    return found


def loaded_files() -> list[str]:
    """Return the files of llama.cpp that this process has mapped; empty where /proc does not tell."""
    try:
        maps = Path("/proc/self/maps").read_text("utf-8")
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    return sorted(
        path for path in paths if Path(path).name.startswith(("libllama", "libdraftwood", "libggml"))
    )


def model_facts(
    path: str, *, drafter: str | None, n_gpu_layers: int, layer_devices: list[str]
) -> dict[str, Any]:
    """Return a GGUF's header, what would draft and why not, what a draft needs; or {"error": ...}.

    layer_devices: names of the devices without the tree ops that layers go to with n_gpu_layers.
    """
    options = Options(draft_tokens=default_draft_tokens("auto", None), drafter=drafter)
    try:
        info = checked_model(path)
    except DraftwoodError as error:
        return {"path": path, "error": error.message, "hint": error.hint}
    planned = plan(options, info, {"n_gpu_layers": n_gpu_layers}, without_tree_ops=bool(layer_devices))
    refused: list[dict[str, str]] = []
    if drafter is not None:
        with _noted(refused):
            need_drafter_file(drafter)
            if planned.drafter == "dflash":
                probe_drafter(drafter, path)
        planned = Plan("none", refused[0]["found"], 0) if refused else planned
    needed = needed_batch(options.draft_tokens, 0)  # trees of "auto" fit themselves to the batch
    return {
        "path": path,
        **asdict(info),
        "drafter": planned.drafter,
        "drafter_path": drafter,
        "reason": planned.reason,
        "refused": refused,
        "draft_tokens": options.draft_tokens,
        "smallest_n_batch": 1 if planned.drafter == "none" else needed,
        "recurrent_snapshots": planned.n_rs_seq,
        "tree_refusal": tree_refusal(planned.n_rs_seq, n_gpu_layers, layer_devices),
        "fused": fused.told(header.tensors(path), info),
    }


@contextmanager
def _noted(refused: list[dict[str, str]]) -> Iterator[None]:
    """Add what is refused in here as a problem: {"found": ..., "fix": ...}."""
    try:
        yield
    except DraftwoodError as error:
        refused.append({"found": error.message, "fix": error.hint or "leave the option out"})


def tree_refusal(snapshots: int, n_gpu_layers: int, layer_devices: list[str]) -> str:
    """Say why rounds of a context with these snapshots are chains; "" where they are trees.

    Told from the plan, before a model is loaded: a loaded one says it by `Engine.tree_refusal`.
    """
    if snapshots == 0:
        return ""
    return f"n_gpu_layers={n_gpu_layers} puts layers on {', '.join(layer_devices)}, without the tree ops"


def facts(
    model: str | None,
    drafter: str | None = None,
    n_gpu_layers: int | None = 0,
    rpc_servers: str | None = None,
) -> dict[str, Any]:
    """Return everything that only the loaded library can tell; arguments as those of `draftwood run`."""
    remote: list[dict[str, Any]] = []
    refused: list[dict[str, str]] = []
    notes: list[warnings.WarningMessage] = []
    if n_gpu_layers is None:
        wished = {"n_ctx": shared.N_CTX, "drafter": drafter, "rpc_servers": rpc_servers}
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            n_gpu_layers = card_layers(model, wished) if model else 0
    with _noted(refused):
        cpu.check()
    with _noted(refused):
        servers = rpc.connect(rpc_servers, n_gpu_layers)
        remote = [describe(device) for device in servers.devices] if servers else []
    names = [device["name"] for device in (*remote, *map(describe, without_tree_ops()))]
    return {
        "n_gpu_layers": n_gpu_layers,
        "no_layers_because": "; ".join(str(note.message) for note in notes),
        "build": build_info(),
        "api_version": _capi.API_VERSION,
        "python_files_version": python_files_version,
        "library": _capi.lib._name,
        "loaded": loaded_files(),
        "devices": [*devices(), *remote],
        "without_tree_ops": names,
        "refused": refused,
        "features": features(),
        "cpu": cpu.facts(),
        "cuda": {"error": _capi.cuda.error, "fix": _capi.cuda.fix},
        "rpc": bool(native.llama_supports_rpc()),
        "model": model_facts(model, drafter=drafter, n_gpu_layers=n_gpu_layers, layer_devices=names)
        if model
        else None,
    }


if __name__ == "__main__":
    print(json.dumps(facts(**json.loads(sys.argv[1]))))
