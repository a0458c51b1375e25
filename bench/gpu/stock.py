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
from pathlib import Path
from typing import Any

from draftwood.engine.engine import probe_model

from bench.gpu.cases import SAMPLING, Case
from bench.gpu.child import tail
from bench.gpu.work import BenchError


def common_flags(case: Case, model: Path, n_ctx: int) -> list[str]:
    """Return the flags of a server for plain decode: one slot, all on the card, no copies of states."""
    threads = ["--threads", str(case.threads)] if case.threads else []
    layers = 99 if case.n_gpu_layers < 0 else case.n_gpu_layers
    moe = ["--n-cpu-moe", str(cpu_layers(case, model))] if case.experts < 1.0 else []
    return [
        *("--model", str(model), "--parallel", "1", "--ctx-size", str(n_ctx), "--gpu-layers", str(layers)),
        *("--flash-attn", "on", "--fit", "off", "--cache-ram", "0", "--ctx-checkpoints", "0", "--no-webui"),
        *moe,
        *threads,
    ]


def cpu_layers(case: Case, model: Path) -> int:
    """Return how many layers keep their experts in host memory, so that the rest takes the case's bytes."""
    return round((1.0 - case.experts) * probe_model(str(model)).n_expert_layers)


def drafting_flags(case: Case, drafter: Path | None) -> list[str]:
    """Return the flags that make it draft chains of as many nodes, accepted as the schedule has it.

    Names: common/arg.cpp at the pin.
    """
    rates = ",".join(f"{rate:.9g}" for rate in case.stock_schedule)
    own = ["--spec-type", f"draft-{case.drafter}"]
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

    def close(self) -> None:
        """End it, by force if it must be."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


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
            return {**event["timings"], "stream_per_second": (last - first) / max(done - begin, 1e-9)}
        seen.append((time.perf_counter(), event["tokens_predicted"]))
    raise ValueError("the stream ended without its last event")
