"""`draftwood doctor`: what is installed, what it was built from, which paths are in force, what is broken.

Gathers facts first (`examine`), judges them (`problems`, `paths`, which are pure), then prints them
(doctor_words.py). Test: tests/unit/test_cli.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from draftwood.cli import llama_flags, shared
from draftwood.cli.doctor_words import describe
from draftwood.cli.failure import in_options
from draftwood.load.programs import program

Facts = dict[str, Any]

_REINSTALL = "pip install --force-reinstall --no-cache-dir PATH   (of draftwood's checkout, or of its wheel)"
_OVERRIDE = "DRAFTWOOD_LIB_PATH"
_LAYERS = "layers on a GPU"


@click.command("doctor", cls=llama_flags.Command)
@click.argument("model", required=False)
@shared.drafter
@shared.n_card_layers
@shared.rpc
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, /, model: str | None, as_json: bool, **wishes: Any) -> None:
    """Show this installation and its fast paths; with MODEL, what would run.

    If something is broken, it says how to mend it, and the exit code is 1.
    """
    if model is None and wishes["drafter"] is not None:
        raise click.UsageError("found --drafter without MODEL; expected the model that it drafts for")
    facts = examine({"model": model, **wishes})
    facts["paths"] = paths(facts)
    facts["problems"] = [
        {name: in_options(text, ctx.command) for name, text in problem.items()} for problem in problems(facts)
    ]
    click.echo(json.dumps(facts, indent=1) if as_json else describe(facts))
    if facts["problems"]:
        ctx.exit(1)


# ---- facts ----


def examine(wishes: Facts) -> Facts:
    """Return all facts, with the arguments of native.facts. `library` is {"error": ...} if it is unusable."""
    library = _library(wishes)
    return {
        "draftwood": metadata.version("draftwood"),
        "python": f"{platform.python_version()} at {sys.executable}",
        "platform": platform.platform(),
        "n_gpu_layers": library.pop("n_gpu_layers", wishes["n_gpu_layers"] or 0),
        "library": library,
        "library_override": os.environ.get(_OVERRIDE),
        "llama_cpp": _llama_cpp(),
        "server": _server(),
        "rpc_server": _executable("ggml-rpc-server"),
    }


def _library(wishes: Facts) -> Facts:
    command = [sys.executable, "-m", "draftwood.cli.native", json.dumps(wishes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        facts: Facts = json.loads(done.stdout.splitlines()[-1])
        return facts
    if done.returncode < 0:
        return {"error": f"loading it ended the process with {signal.Signals(-done.returncode).name}"}
    # a traceback, whose last paragraph may be a message of ours with a hint
    trace = done.stderr.strip().splitlines()
    last = max((i for i, line in enumerate(trace) if line and line[0].isalpha()), default=0)
    last = next((i for i, line in enumerate(trace) if "Error: " in line and line[0].isalpha()), last)
    return {"error": "\n".join(trace[last:]) or f"exit code {done.returncode}"}


def _llama_cpp() -> Facts:
    """Say what `import llama_cpp` gives in this environment, without importing it."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return {"kind": "absent"}
    folder = Path(spec.origin).parent
    if folder.parent.name == "_alias":
        return {"kind": "ours", "path": str(folder)}
    try:
        version = metadata.version("llama_cpp_python")
    except metadata.PackageNotFoundError:
        version = None
    return {"kind": "stock", "path": str(folder), "version": version}


def _executable(name: str) -> str | None:
    path = program(name)
    return str(path) if os.access(path, os.X_OK) else None


def _server() -> Facts:
    path = _executable("llama-server")
    facts: Facts = {"path": path, "runs": False}
    if path:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        facts["runs"] = done.returncode == 0
        facts["said"] = (done.stderr or done.stdout).strip()
    return facts


# ---- judgement ----


def problems(facts: Facts) -> list[dict[str, str]]:
    """Return what is broken: [{"found": ..., "fix": ...}]."""
    found = [*_library_problems(facts), *_server_problems(facts)]
    model = facts["library"].get("model")
    if model and "error" in model:
        found.append(_problem(model["error"], model["hint"] or "another file"))
    return [*found, *(model or {}).get("refused", [])]


def _problem(found: str, fix: str) -> dict[str, str]:
    return {"found": found, "fix": fix}


def _library_problems(facts: Facts) -> list[dict[str, str]]:
    library, override = facts["library"], facts["library_override"]
    reinstall = f"unset {_OVERRIDE}" if override else _REINSTALL
    if "error" in library:
        fix = reinstall
        if "SIGILL" in library["error"]:
            fix = f"it was built for another CPU: {_REINSTALL}"
        return [_problem(f"the library cannot be used: {library['error']}", fix)]
    found = []
    build, python_files = library["build"], library["python_files_version"]
    if build["pin_version"] != python_files:
        expected = f"expected {python_files}, as its Python files are"
        found.append(
            _problem(
                f"the library was built from llama-cpp-python {build['pin_version']}, {expected}", reinstall
            )
        )
    if build["rpc"] and not library["rpc"]:
        found.append(_problem("the RPC backend was built, but its library does not load", reinstall))
    cuda = library["cuda"]
    if cuda["error"] and not cuda["error"].startswith("libcuda.so"):  # a machine without a card has no driver
        found.append(_problem(f"the CUDA backend does not load: {cuda['error']}", cuda["fix"]))
    return [*found, *library["refused"]]


def _server_problems(facts: Facts) -> list[dict[str, str]]:
    found, server = [], facts["server"]
    if server["path"] is None:
        found.append(_problem("found no llama-server in the package", _REINSTALL))
    elif not server["runs"]:
        found.append(_problem(f"{server['path']} does not run: {server['said']}", _REINSTALL))
    if facts["rpc_server"] is None and facts["library"].get("rpc"):
        found.append(_problem("the RPC backend is there, but no ggml-rpc-server in the package", _REINSTALL))
    return found


def paths(facts: Facts) -> list[Facts]:
    """Return which fast paths are in force: [{"name": ..., "on": ..., "reason": ...}]."""
    library = facts["library"]
    if "error" in library:
        return []
    build = library["build"]
    backends = {d["name"]: d["backend"] for d in library["devices"] if "GPU" in d["type"]}
    gpus = list(backends)
    own = [name for name in gpus if backends[name] != "RPC"]
    cuda = [name for name in gpus if backends[name] == "CUDA"]
    exact = "on the CPU, with exact=True (default)"
    if gpus:
        exact += f"; of layers on {', '.join(gpus)} (n_gpu_layers) those parts that are one op (docs/ops.md)"
    cuda_reason = _cuda_reason(build["cuda"], cuda, library["cuda"])
    why_none = library.get("no_layers_because")
    layers = [_layers(gpus, cuda_reason)] if facts["n_gpu_layers"] != 0 else []
    layers += [_path(_LAYERS, False, why_none)] if why_none else []
    return [
        *layers,
        _path("row-exact kernels", any(d["type"] == "CPU" for d in library["devices"]), exact),
        _drafting(library["model"]),
        _trees(library["model"], library["without_tree_ops"]),
        *_flash(library["model"], facts["n_gpu_layers"], gpus, own),
        _path("CUDA", build["cuda"] and bool(cuda), cuda_reason),
        _path("RPC", library["rpc"], facts["rpc_server"] if library["rpc"] else "built with GGML_RPC=OFF"),
    ]


def _path(name: str, on: bool, reason: str | None) -> Facts:
    return {"name": name, "on": on, "reason": reason or ""}


def _drafting(model: Facts | None) -> Facts:
    if model is None:
        return _path(
            "drafting",
            True,
            "qwen35 and qwen35moe files by their MTP block or a DFlash drafter, all by n-grams",
        )
    if "error" in model:
        return _path("MTP drafting", False, "the model file cannot be used")
    name = "MTP drafting" if model["drafter_path"] is None else "DFlash drafting"
    return _path(name, model["drafter"] != "none", model["reason"])


def _trees(model: Facts | None, without_ops: list[str]) -> Facts:
    """Say how a round is verified: as a tree, or as a chain and why, such as layers on `without_ops`."""
    name = "draft trees"
    if model is None:
        devices = f" without layers on {', '.join(without_ops)}" if without_ops else ""
        return _path(name, True, f"for qwen35 and qwen35moe files{devices}")
    if "error" in model or model["drafter"] == "none":
        return _path(name, False, "nothing is drafted")
    if model["tree_refusal"]:
        chain = f"rounds are chains, with {model['recurrent_snapshots']} snapshots of the recurrent state"
        return _path(name, False, f"{chain}: {model['tree_refusal']}")
    return _path(
        name, True, "a verify only reads the recurrent state, and a commit applies what was accepted"
    )


def _flash(model: Facts | None, n_gpu_layers: int, gpus: list[str], own: list[str]) -> list[Facts]:
    """Say whether MODEL gets flash attention by default; own: those of `gpus` in this machine."""
    if model is None or "error" in model:
        return []
    name, insist = "flash attention", "flash_attn=True turns it on"
    if n_gpu_layers == 0 or not gpus:
        return [_path(name, False, f"every layer is on the CPU; {insist}")]
    if gpus != own:
        return [_path(name, False, f"RPC servers are not asked whether they can; {insist}")]
    reason = f"by llama.cpp's auto, which leaves it out where {', '.join(own)} has no kernel for the model"
    return [_path(name, True, reason)]


def _layers(gpus: list[str], cuda_reason: str) -> Facts:
    """Say where --n-gpu-layers puts layers: llama.cpp keeps them without a word where there is no GPU."""
    if gpus:
        return _path(_LAYERS, True, ", ".join(gpus))
    return _path(_LAYERS, False, f"all stay on the CPU: CUDA is {cuda_reason}")


def _cuda_reason(built: bool, gpus: list[str], cuda: Facts) -> str:
    if not built:
        return 'not built in: CMAKE_ARGS="-DGGML_CUDA=on" when installing'
    if cuda["error"]:
        return f"built in, but its library does not load: {cuda['error']} ({cuda['fix']})"
    return ", ".join(gpus) or "built in, but no device answers: see nvidia-smi and CUDA_VISIBLE_DEVICES"
