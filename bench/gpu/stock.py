"""Stock llama.cpp beside us: the bundled llama-server, whose process attaches no engine, so no hook acts.

That it is as fast as one built from the unpatched pin is bench/off_speed.py's to show. Drafts are its own
(--spec-type), accepted by the case's schedule (--spec-synth-rates). Must not know: our library, results.
Test: tests/model/test_bench_run.py.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from draftwood.engine.engine import probe_model

from bench.gpu.cases import SAMPLING, Case
from bench.gpu.child import tail
from bench.gpu.work import BenchError


def common_flags(case: Case, model: Path, n_ctx: int) -> list[str]:
    """Return the flags of a server for plain decode: all on the card, no copies of states.

    n_ctx: of a slot. One slot, unless the case has more clients.
    """
    slots = max(1, case.clients)
    threads = ["--threads", str(case.threads)] if case.threads else []
    layers = 99 if case.n_gpu_layers < 0 else case.n_gpu_layers
    cache = case.cache.lower()
    moe = ["--n-cpu-moe", str(cpu_layers(case, model))] if case.experts < 1.0 else []
    return [
        *("--model", str(model), "--parallel", str(slots), "--ctx-size", str(slots * n_ctx)),
        *("--gpu-layers", str(layers)),
        *("--flash-attn", "on", "--fit", "off", "--cache-ram", "0", "--ctx-checkpoints", "0", "--no-webui"),
        *("--cache-type-k", cache, "--cache-type-v", cache),
        *moe,
        *threads,
    ]


def serves(flags: Sequence[str], case: Case, model: Path) -> bool:
    """Tell whether a server with these flags is the case's own for plain decode, but for a longer context."""
    at = flags.index("--ctx-size") + 1
    slots = max(1, case.clients)
    return int(flags[at]) >= slots * case.n_ctx and list(flags) == common_flags(
        case, model, int(flags[at]) // slots
    )


def cpu_layers(case: Case, model: Path) -> int:
    """Return how many layers keep their experts in host memory, so that the rest takes the case's bytes."""
    return round((1.0 - case.experts) * probe_model(str(model)).n_expert_layers)


def drafting_flags(case: Case, drafter: Path | None, *, ours: bool = False) -> list[str]:
    """Return the flags that make it draft chains of as many nodes, accepted as the schedule has it.

    ours: with draftwood's engine. Names: common/arg.cpp at the pin.
    """
    rates = ",".join(f"{rate:.9g}" for rate in case.stock_schedule)
    own = ["--spec-type", case.drafter if ours else f"draft-{case.drafter}"]
    if case.drafter == "dflash":
        own += ["--spec-draft-model", str(drafter), "--spec-draft-ngl", "all"]
    return [*own, "--spec-draft-n-max", str(case.nodes - 1), "--spec-synth-rates", rates]


class Server:
    """One llama-server. It loads as soon as it is made; wait for `ready`."""

    def __init__(self, flags: Sequence[str], log: Path) -> None:
        from draftwood.cli.serve import program

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.flags = list(flags)
        self._log = log
        self._address = f"http://127.0.0.1:{port}"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "DRAFTWOOD_"))}
        with log.open("ab") as out:
            command = [str(program("llama-server")), "--host", "127.0.0.1", "--port", str(port), *flags]
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)

    def ready(self, limit: float) -> None:
        """Wait until it answers. Errors: BenchError where it ended or took longer than `limit` seconds."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise BenchError(
                    f"llama-server ended with status {self._process.returncode}\n{tail(self._log)}"
                )
            try:
                with urllib.request.urlopen(f"{self._address}/health", timeout=5):
                    return
            except OSError:  # not listening yet, or 503 while it loads
                time.sleep(0.1)
        raise BenchError(f"llama-server did not answer within {limit:.0f} s\n{tail(self._log)}")

    def complete(
        self, case: Case, prompt: Sequence[int], n_tokens: int, seed: int, limit: float
    ) -> dict[str, Any]:
        """Generate n_tokens after the prompt; return its own timings, and tokens a second as the stream came.

        Errors: BenchError where it fails or takes longer than `limit` seconds.
        """
        sampling = {
            "temperature" if name == "temp" else name: v for name, v in SAMPLING[case.sampler].items()
        }
        asked = {
            "prompt": list(prompt), "n_predict": n_tokens, "ignore_eos": True, "cache_prompt": False,
            "stream": True, "seed": seed, **sampling,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self._address}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=limit) as reply:
                return _read_stream(reply, time.monotonic() + limit)
        except (OSError, KeyError, ValueError) as error:
            raise BenchError(f"llama-server failed in a request: {error!r}\n{tail(self._log)}") from error

    def serve(
        self, case: Case, prompts: Sequence[Sequence[int]], n_tokens: int, seed: int, limit: float
    ) -> list[dict[str, Any]]:
        """Return what `complete` does for clients that ask together, each with its prompt and a seed."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [
                pool.submit(self.complete, case, prompt, n_tokens, seed + i, limit)
                for i, prompt in enumerate(prompts)
            ]
            return [each.result() for each in asked]

    def close(self) -> None:
        """End it, by force if it must be."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def together(replies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the timings of replies that came at the same time, as those of one.

    Speeds are of the time in which all of them were written. Errors: BenchError if there is none.
    """
    if len(replies) == 1:
        return {name: value for name, value in replies[0].items() if name != "seen"}
    begin = max(reply["seen"][0][0] for reply in replies)
    end = min(reply["seen"][-1][0] for reply in replies)
    if end <= begin:
        raise BenchError("the clients' replies came one after the other", hint="--set rounds=N, with more")
    n_tokens = sum(_until(reply["seen"], end) - _until(reply["seen"], begin) for reply in replies)
    speed = n_tokens / (end - begin)
    total = sum(reply["predicted_n"] - 1 for reply in replies)
    return {
        "predicted_n": total + 1,
        "predicted_ms": 1000 * total / speed,
        "predicted_per_second": speed,
        "stream_per_second": speed,
        "draft_n": sum(reply.get("draft_n", 0) for reply in replies),
        "draft_n_accepted": sum(reply.get("draft_n_accepted", 0) for reply in replies),
        "clients": len(replies),
    }


def _until(seen: Sequence[tuple[float, int]], end: float) -> int:
    return max((n for when, n in seen if when <= end), default=0)


def _read_stream(reply: Any, end: float) -> dict[str, Any]:
    seen: list[tuple[float, int]] = []
    for line in reply:
        if time.monotonic() > end:
            raise TimeoutError("the stream took too long")
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line[6:])
        if event.get("stop"):
            # none where all tokens were held back, as parts of a letter that never came
            (begin, first), (done, last) = (seen[0], seen[-1]) if seen else ((0.0, 0), (0.0, 0))
            speed = (last - first) / max(done - begin, 1e-9)
            return {**event["timings"], "stream_per_second": speed, "seen": seen or [(0.0, 0)]}
        seen.append((time.perf_counter(), event["tokens_predicted"]))
    raise ValueError("the stream ended without its last event")
