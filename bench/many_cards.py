#!/usr/bin/env python3
"""Spread a model over all cards of a machine in several ways: what loads, how fast, whether text is the same.

    python bench/many_cards.py --model 35b-a3b [--way WAY]... [--tokens 96] [--seconds 115] [--results FILE]

Ways: `one` card (split_mode=0), `layer` (1), `row` (2) and `tensor` (3) over all cards with flash attention,
and `rpc`: a ggml-rpc-server of the package for each card, whose client sees no card itself. Without a card
the same runs on the CPU, with two such servers.

Each way loads the weights once, in a process of its own, for contexts that draft in four modes: off, mtp,
tree (16 rows) and auto. If the process dies or hangs, its mode failed and another process does the rest. A
mode's text is held against that of `off` of its way, and that of `off` against the first way's: `differs_at`
is the first token that differs, null for the same text. On cards texts differ where two tokens are nearly as
likely. Weights of a preset are random, so nearly no draft is accepted: tokens a second with drafts are no
claim there. `card_bytes` is what each card holds more than before.

A line a cell; the last line is one JSON object, also added to --results. Exit status 0 whatever was found.
Must not know: what should work. Test: tests/model/test_many_cards.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click
import draftwood
from draftwood import Llama
from draftwood.bench import results as rows_of_results
from draftwood.cli.serve import program
from draftwood.engine.engine import probe_model
from draftwood.load.devices import cards, describe

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # last: what lies there must not shadow what is installed
from bench import models  # noqa: E402
from bench.gpu.ours import shared_weights  # noqa: E402
from bench.gpu.stamp import origin  # noqa: E402

SCHEMA = 1
WAYS: dict[str, dict[str, Any]] = {
    "one": {"split_mode": 0, "main_gpu": 0},
    "layer": {"split_mode": 1},
    "row": {"split_mode": 2},
    "tensor": {"split_mode": 3},
    "rpc": {"rpc_servers": None},  # those that are started
}
MODES: dict[str, dict[str, Any]] = {
    "mtp": {"speculation": "mtp"},  # first: a Llama that drafts decides where token embeddings lie
    "off": {"speculation": "off"},
    "tree": {"speculation": "tree", "tree_budget": 16},
    "auto": {"speculation": "auto"},
}
COUNTERS = ("rounds", "drafted", "accepted", "tree_rounds", "paused_rounds", "failed_drafts", "row_limit")
CELL_SECONDS = 45  # that a process may be silent
RPC_SECONDS = 150  # the same over RPC, where a load sends all weights
TEXT = "def fibonacci(n):\n    if n < 2:\n        return n\n"


def cell(
    way: dict[str, Any], mode: str, model: str, n_tokens: int, keep: contextlib.ExitStack
) -> dict[str, Any]:
    """Load one mode and return its figures and tokens. `keep` closes it: weights and servers are shared."""
    flash: dict[str, Any] = {} if "rpc_servers" in way else {"flash_attn": True}
    begin = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        llm = Llama(model, n_gpu_layers=-1, n_ctx=512, verbose=True, **flash, **way, **MODES[mode])
        keep.callback(llm.close)
        loaded = time.perf_counter() - begin
        prompt = llm.tokenize(TEXT.encode())
        for n in (n_tokens // 3, n_tokens):  # the first text warms up
            llm.reset()
            llm.reset_speculation_stats()
            stream = llm.generate(prompt, temp=0.0)
            tokens = [next(stream)]
            begin = time.perf_counter()
            tokens += islice(stream, n - 1)
            took = time.perf_counter() - begin
            stream.close()
    stats = llm.speculation_stats
    assert stats is not None
    return {
        "load_s": round(loaded, 1),
        "tok_s": round((len(tokens) - 1) / took, 1),
        **{name: getattr(stats, name) for name in COUNTERS},
        "speculation": llm.speculation,
        "snapshots": llm.context_params.n_rs_seq,
        "tree_refusal": llm.tree_refusal,
        "said": [str(each.message) for each in said],
        "tokens": tokens,
    }


def worker(job: dict[str, Any]) -> None:
    """Run the modes of a job, a line of JSON each: the cell, or what refused it."""
    with shared_weights(), contextlib.ExitStack() as keep:
        for mode in job["modes"]:
            try:
                found = cell(job["way"], mode, job["model"], job["n_tokens"], keep)
            except Exception as error:
                found = {"refused": _without_paths(f"{type(error).__name__}: {error}", job["model"])}
            print(json.dumps({"mode": mode, **found}), flush=True)


def _without_paths(text: str, model: str) -> str:
    """Return a text without folders of this machine, for rows that are committed."""
    for path in (Path(model).parent, ROOT, Path(draftwood.__file__).parents[1], Path(sys.prefix)):
        text = text.replace(f"{path}/", "")
    return text


def run_way(
    way: dict[str, Any], model: str, n_tokens: int, end: float, n_cards: int
) -> Iterator[dict[str, Any]]:
    """Yield a cell for each mode, in worker processes that may die. None goes on after `end`."""
    left = list(MODES)
    while left and time.monotonic() < end:
        environment = {key: text for key, text in os.environ.items() if key != "PYTHONSAFEPATH"}
        environment["GGML_NO_BACKTRACE"] = "1"  # its addresses would hide what an abort says
        with contextlib.ExitStack() as stack:
            if "rpc_servers" in way:  # new ones for each process: a client that died may have ended them
                way = {"rpc_servers": stack.enter_context(rpc_servers(n_cards))}
                environment["CUDA_VISIBLE_DEVICES"] = ""
            job = {"way": way, "modes": left, "model": model, "n_tokens": n_tokens}
            command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(job)]
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = stack.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
            )
            stack.callback(process.kill)
            for line in _lines(process, "rpc_servers" in way, end):
                found = json.loads(line)
                left.remove(found["mode"])
                yield found
            status = process.poll()
            errors.seek(0)
            said = _without_paths(errors.read()[-4000:].strip(), model)
        if left:
            how = "no answer in time" if status is None else f"the process ended with status {status}"
            yield {"mode": left.pop(0), "refused": how, "log": said}
    for mode in left:
        yield {"mode": mode, "refused": "not run: no time was left"}


def _lines(process: subprocess.Popen[str], over_rpc: bool, end: float) -> Iterator[str]:
    """Yield what a process prints, until it ends, is silent for too long, or `end` has come."""
    lines: queue.Queue[str | None] = queue.Queue()
    assert process.stdout is not None
    output = process.stdout

    def read() -> None:
        for line in output:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()

    def left() -> float:
        return max(0.0, min(RPC_SECONDS if over_rpc else CELL_SECONDS, end - time.monotonic()))

    with contextlib.suppress(queue.Empty, subprocess.TimeoutExpired):
        while (line := lines.get(timeout=left())) is not None:
            yield line
        process.wait(10)


@contextlib.contextmanager
def rpc_servers(n_cards: int) -> Iterator[str]:
    """Start a server for each card, or two on the CPU; yield their addresses as `Llama` takes them."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = shown if shown != [""] else [str(i) for i in range(n_cards)]
    with contextlib.ExitStack() as stack:
        addresses = []
        for i in range(n_cards or 2):
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            own = {"CUDA_VISIBLE_DEVICES": names[i]} if n_cards else {"OMP_WAIT_POLICY": "passive"}
            process = subprocess.Popen(
                [str(program("ggml-rpc-server")), "-p", str(port), *([] if n_cards else ["-t", "1"])],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **own},
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.kill)
            addresses.append(f"127.0.0.1:{port}")
            _await(process, port)
        yield ",".join(addresses)


def _await(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise click.ClickException(f"ggml-rpc-server on port {port} did not start")


def differs_at(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """Return the first place where two texts differ; None for the same text."""
    pairs = enumerate(zip(tokens, others, strict=False))
    first = next((i for i, (one, other) in pairs if one != other), None)
    return first if first is not None or len(tokens) == len(others) else min(len(tokens), len(others))


def measure(
    names: Sequence[str], model: str, n_tokens: int, end: float, way_seconds: float
) -> list[dict[str, Any]]:
    """Return the cells of all ways, and print each as it comes."""
    found: list[dict[str, Any]] = []
    first_off, devices = None, cards()
    before = [describe(card)["memory_free"] for card in devices]
    for name in names:
        cells = {}
        way_end = min(end, time.monotonic() + way_seconds)
        for each in run_way(WAYS[name], model, n_tokens, way_end, len(devices)):
            free = [describe(card)["memory_free"] for card in devices]
            held = [old - new for old, new in zip(before, free, strict=True)]
            cells[each["mode"]] = {"way": name, **each, "card_bytes": held}
        off = cells["off"].get("tokens")
        first_off = first_off or off
        for mode, each in cells.items():
            tokens, other = each.pop("tokens", None), first_off if mode == "off" else off
            if tokens and other:
                each["differs_at"] = differs_at(tokens, other)
            click.echo(_line(each))
            found.append(each)
    return found


def _line(each: dict[str, Any]) -> str:
    head = f"{each['way']:7} {each['mode']:5}"
    if "refused" in each:
        words = each["refused"].splitlines()[0] + " " + each.get("log", "").rpartition("\n")[2]
        return f"{head} refused: {words[:200]}"
    chain = f"chain: {each['tree_refusal'][:70]}" if each["tree_refusal"] else f"{each['tree_rounds']} trees"
    at = each.get("differs_at", -1)
    same = {None: "same text", -1: "nothing to compare"}.get(at, f"differs at {at}")
    gib = "+".join(f"{n / 2**30:.1f}" for n in each["card_bytes"])
    return (
        f"{head} {each['tok_s']:8.1f} tok/s, load {each['load_s']:5.1f} s, {each['rounds']} rounds, "
        f"{each['drafted']} drafted, {each['accepted']} accepted, {same}, {gib and gib + ' GiB, '}"
        f"{'plain' if each['speculation'] == 'off' else chain}"
    )


def _model(name: str, layers: int | None) -> Path:
    if Path(name).exists() and layers is None:
        return Path(name)
    from synth_gguf import PRESETS

    if name not in PRESETS:
        raise click.UsageError(
            f"--model is {name!r}; expected a file without --layers, or one of {', '.join(PRESETS)}"
        )
    if layers is None:
        return models.synthetic(name)
    return models.synthetic_of(f"{name}-{layers}", dataclasses.replace(PRESETS[name], layers=layers))


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option(
    "--model", default="moe-mtp", show_default=True, help="A GGUF, or a preset of tools/synth_gguf.py."
)
@click.option("--layers", type=click.IntRange(4), help="Of a preset, in place of its own.")
@click.option("--way", "names", multiple=True, type=click.Choice(list(WAYS)), default=tuple(WAYS))
@click.option("--tokens", type=click.IntRange(8, 400), default=96, show_default=True, help="Of a text.")
@click.option("--seconds", type=click.FloatRange(1), default=115.0, show_default=True, help="For everything.")
@click.option("--way-seconds", type=click.FloatRange(1), default=60.0, show_default=True, help="For one way.")
@click.option("--results", type=click.Path(path_type=Path, dir_okay=False), help="File to add the row to.")
@click.option("--worker", "job", hidden=True)
def main(
    model: str,
    layers: int | None,
    names: tuple[str, ...],
    tokens: int,
    seconds: float,
    way_seconds: float,
    results: Path | None,
    job: str | None,
) -> None:
    """Measure all ways, or be the process of one."""
    if job:
        worker(json.loads(job))
        return
    if results:
        rows_of_results.check_writable("--results", results)
    path = _model(model, layers)
    end = time.monotonic() + seconds
    cells = measure(names, str(path), tokens, end, way_seconds)
    row = {
        "schema": SCHEMA,
        **origin(),
        "model": path.name,
        "bytes": probe_model(str(path)).file_bytes,
        "tokens": tokens,
        "cells": cells,
    }
    if results:
        rows_of_results.append(results, row)
    click.echo(json.dumps(row))


if __name__ == "__main__":
    main()
