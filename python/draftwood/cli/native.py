"""What the library says about itself and about a model file, as JSON, for `draftwood doctor`.

Runs as a process of its own (`python -m draftwood.cli.native [MODEL]`): a library that cannot be loaded, or
that ends its process (wheels built for another CPU do), is then a finding like any other.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftwood import _capi
from draftwood._llama_cpp import __version__ as python_files_version
from draftwood._llama_cpp import llama_cpp as native
from draftwood.devices import devices
from draftwood.engine import build_info, probe_model
from draftwood.errors import ModelFileError
from draftwood.options import Options, needed_batch, plan


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


def model_facts(path: str) -> dict[str, Any]:
    """Return a GGUF's header, what would draft and why not, what a draft needs; or {"error": ...}."""
    options = Options()
    try:
        info = probe_model(path)
    except ModelFileError as error:
        return {"path": path, "error": error.message, "hint": error.hint}
    planned = plan(options, info, {})
    return {
        "path": path,
        **asdict(info),
        "drafter": planned.drafter,
        "reason": planned.reason,
        "draft_tokens": options.draft_tokens,
        "smallest_n_batch": needed_batch(options.draft_tokens) if planned.drafter != "none" else 1,
        "recurrent_snapshots": planned.n_rs_seq,
    }


def facts(model: str | None) -> dict[str, Any]:
    """Return everything that only the loaded library can tell."""
    return {
        "build": build_info(),
        "api_version": _capi.API_VERSION,
        "python_files_version": python_files_version,
        "library": _capi.lib._name,
        "loaded": loaded_files(),
        "devices": devices(),
        "features": features(),
        "rpc": bool(native.llama_supports_rpc()),
        "model": model_facts(model) if model else None,
    }


if __name__ == "__main__":
    print(json.dumps(facts(sys.argv[1] if len(sys.argv) > 1 else None)))
