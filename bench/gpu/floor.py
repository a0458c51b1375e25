"""What the card can do at best: how fast it copies its own memory, measured. Must not know: models, engines.

Needs a card: no test here runs it.
"""

from __future__ import annotations

import statistics
import subprocess
from typing import Any

from bench.gpu.work import BenchError

_HINT = "leave stage floor out where there is no card: rows then have no limit_pct"
_FIELDS = ("name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.memory", "power.limit")


def card() -> dict[str, str]:
    """Return what nvidia-smi says about the first card. Errors: BenchError where there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(
            f"found no card: nvidia-smi cannot be run ({error}); expected an NVIDIA GPU", hint=_HINT
        ) from error
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise BenchError(
            f"found no card: nvidia-smi says {done.stdout or done.stderr}; expected an NVIDIA GPU",
            hint=_HINT,
        )
    return dict(zip(_FIELDS, (value.strip() for value in lines[0].split(",")), strict=True))


def copy_bandwidth(gib: float = 4.0, repeats: int = 30) -> dict[str, Any]:
    """Return bytes a second of a device-to-device copy, those read and those written both counted.

    The median of `repeats` copies of `gib`, timed by events on random data. Errors: BenchError without torch
    or a card that it sees.
    """
    try:
        import torch
    except ImportError as error:
        raise BenchError(
            "found no torch, with which the copy is timed; expected it in this Python",
            hint="pip install torch",
        ) from error
    if not torch.cuda.is_available():
        raise BenchError("found no card that torch can use; expected an NVIDIA GPU", hint=_HINT)
    n = int(gib * 2**30) // 4
    source = torch.randint(-(2**31), 2**31 - 1, (n,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    rates = []
    for i in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        if i >= 3:  # the first ones warm up
            rates.append(2 * 4 * n / (begin.elapsed_time(end) * 1e-3))
    if not torch.equal(source, target):
        raise BenchError("found a copy that differs from its source")
    return {
        "bytes_per_second": statistics.median(rates),
        "low": min(rates),
        "high": max(rates),
        "copied": 4 * n,
    }
