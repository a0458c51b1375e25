"""What `draftwood doctor` found, as lines for people.

Must not know: how facts are found or judged. Test: tests/unit/test_cli.py.
"""

from __future__ import annotations

from typing import Any

import click

from draftwood.cli import fused

Facts = dict[str, Any]


def describe(facts: Facts) -> str:
    """Return the facts as lines for people."""
    library = facts["library"]
    lines: list[str] = []
    for problem in facts["problems"]:
        lines += [click.style("broken: ", fg="red") + problem["found"], f"fix: {problem['fix']}", ""]
    lines += [_line("draftwood", facts["draftwood"]), _line("python", facts["python"])]
    lines.append(_line("platform", facts["platform"]))
    if "error" not in library:
        lines += _library_lines(library)
    lines.append(_line("llama_cpp", _llama_cpp_words(facts["llama_cpp"])))
    lines.append(_line("server", facts["server"]["path"] if facts["server"]["runs"] else "none that runs"))
    lines += ["", "in force:"] if facts["paths"] else []
    for path in facts["paths"]:
        mark = click.style("yes", fg="green") if path["on"] else click.style("no ", fg="yellow")
        lines.append(f"  {mark}  {path['name']}" + (f": {path['reason']}" if path["reason"] else ""))
    if library.get("model") and "error" not in library["model"]:
        lines += ["", *_model_lines(library)]
    return "\n".join(lines)


def _line(name: str, value: str) -> str:
    return f"{name:<12} {value}"


def _library_lines(library: Facts) -> list[str]:
    build = library["build"]
    lines = [
        _line("pin", f"llama-cpp-python {build['pin_version']}, llama.cpp {build['pin_commit']}"),
        _line("series", build["series_hash"]),
        _line("build", f"{build['build_type']}, {build['compiler']}, API version {library['api_version']}"),
        _line("library", library["library"]),
        _line("cpu code", _cpu_words(library["cpu"])),
    ]
    for device in library["devices"]:
        memory = f"{_gib(device['memory_free'])} of {_gib(device['memory_total'])} free"
        lines.append(
            _line("device", f"{device['name']}: {device['description']}, {device['type']}, {memory}")
        )
    lines += [_line("features", f"{name}: {' '.join(found)}") for name, found in library["features"].items()]
    return lines


def _cpu_words(cpu: Facts) -> str:
    """Say which variant of the CPU backend runs, and why not a better one."""
    if cpu["runs"] is None:
        return "none that runs here"
    if cpu["runs"] == "native":
        return f"native: compiled by a source install with {cpu['features']}"
    words = f"{cpu['runs']}, of {', '.join(cpu['variants'])}"
    if cpu["named"]:
        words += " (named by DRAFTWOOD_CPU)"
    for name, lacking in cpu["lacking"].items():
        words += f"; {name} needs {' '.join(lacking) or 'more than this CPU has'}"
    return f"{words}; a source install compiles for this CPU alone"


def _llama_cpp_words(found: Facts) -> str:
    if found["kind"] == "absent":
        return "absent: `import llama_cpp` fails here"
    if found["kind"] == "ours":
        return f"draftwood ({found['path']})"
    version = found["version"] or "of unknown version"
    return f"stock llama-cpp-python {version} ({found['path']}); draftwood.install() replaces it in a process"


def _model_lines(library: Facts) -> list[str]:
    model = library["model"]
    blocks = f"MTP blocks: {model['n_layer_nextn']}"
    size = _gib(model["file_bytes"]) + (f" in {model['n_files']} files" if model["n_files"] > 1 else "")
    lines = [
        _line("model", model["path"]),
        _line(
            "header",
            f"{model['architecture']}, {blocks}, {model['n_tensors']} tensors, {size}",
        ),
    ]
    drafter = model["drafter"] if model["drafter"] != "none" else f"none: {model['reason']}"
    drafter += f", {model['drafter_path']}" if model["drafter"] == "dflash" else ""
    lines.append(_line("drafter", drafter))
    if model["drafter"] != "none":
        needs = f"{model['recurrent_snapshots']} recurrent snapshots, n_batch and n_ubatch at least"
        lines.append(
            _line("needs", f"{needs} {model['smallest_n_batch']}, for {model['draft_tokens']} tokens")
        )
    first, *others = fused.lines(model["fused"])
    lines += [_line("fused layers", first), *(_line("", other) for other in others)]
    for device in library["devices"]:
        fits = "fit" if model["file_bytes"] < device["memory_free"] else "do not fit"
        lines.append(_line("memory", f"the weights {fits} in what is free on {device['name']}"))
    return lines


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
