"""Hold the decode speed of draftwood switched off against a pristine llama.cpp: at least 0.99 of it.

    make off-speed        (or: python bench/off_speed.py [--runs N] [--turns N] [--threads N] [--control])

A run is two fresh processes, one per library (bench/pristine.py), which take short turns on the same prompt,
who begins alternating. A turn gives the median seconds per token; two turns side by side give a ratio, so
that what else the machine does falls on both; a run gives the median of its ratios. Fresh processes per run,
because where one happens to lie in memory can be worth a percent. The interval is the distribution-free one
of the median over runs. With one thread, the default, the clock is that thread's CPU time, so that waiting
for a core on a busy machine does not count; with more it is the wall's. --control holds the pristine build
against itself: what this machine can tell apart.

The last line is one JSON object; `ratio` is our speed over theirs. Exit status 1 if the interval stays
under the floor, or if the two generate different tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pristine
from turns import Worker

FLOOR = 0.99
LEAST_RUNS = 9
N_PROMPT, N_TOKENS = 32, 64  # a turn: 0.1 to 0.3 s on one core


# --- the two processes ------------------------------------------------------------------------------------


def work(side: str, package: str, model: str, threads: int) -> None:
    """Take a turn per line of stdin: decode N_TOKENS, answer with tokens and median seconds per token."""
    llama, own = pristine.llama_class(side, package)
    llm = llama(model, n_ctx=256, n_threads=threads, n_threads_batch=threads, verbose=False, **own)
    if side == "ours" and llm._engine is not None:
        raise RuntimeError("found an engine attached; expected draftwood off")
    clock = time.thread_time if threads == 1 else time.perf_counter
    prompt = [(7 * i * i + 3 * i) % 380 for i in range(N_PROMPT)]
    for _ in sys.stdin:
        llm.reset()
        stream = llm.generate(prompt, temp=0.0)
        tokens, times = [next(stream)], [clock()]
        for token in islice(stream, N_TOKENS):
            times.append(clock())
            tokens.append(token)
        stream.close()
        steps = [after - before for before, after in pairwise(times)]
        print(json.dumps({"tokens": tokens, "seconds": statistics.median(steps)}), flush=True)


def start(side: str, library: Path, folder: Path, model: Path, threads: int) -> Worker:
    """Start one library with the model in memory."""
    folder.mkdir(exist_ok=True)
    given = ["--worker", side, "--package", pristine.package(), "--model", model, "--threads", str(threads)]
    return Worker([sys.executable, __file__, *given], pristine.environment(side, library, folder))


# --- the figures ------------------------------------------------------------------------------------------


def run(sides: tuple[str, str], turns: int, **given: Any) -> tuple[list[float], list[float]]:
    """Return the seconds per token of each side, `turns` of each, from two fresh processes."""
    with tempfile.TemporaryDirectory(prefix="draftwood-") as folder:
        pair = [start(side, folder=Path(folder) / str(i), **given) for i, side in enumerate(sides)]
        try:
            texts = [worker.turn()["tokens"] for worker in pair]  # warm up
            if texts[0] != texts[1]:
                raise SystemExit("the two libraries generate different tokens; expected equal ones")
            seconds: tuple[list[float], list[float]] = ([], [])
            for i in range(turns):
                for which in (0, 1) if i % 2 == 0 else (1, 0):
                    seconds[which].append(pair[which].turn()["seconds"])
        finally:
            for worker in pair:
                worker.close()
    return seconds


def main() -> int:
    """Measure and print the verdict."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--runs", type=int, default=15, help=f"pairs of fresh processes, at least {LEAST_RUNS}"
    )
    parser.add_argument("--turns", type=int, default=16, help="turns of each process in a run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--control", action="store_true", help="pristine against pristine")
    parser.add_argument("--worker", choices=pristine.SIDES, help=argparse.SUPPRESS)
    for name in ("--package", "--model"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.package, args.model, args.threads)
        return 0
    if args.runs < LEAST_RUNS or args.turns < 1:
        parser.error(f"found {args.runs} runs of {args.turns} turns; expected at least {LEAST_RUNS} of 1")

    # not above: a pristine worker has a stub in draftwood's place
    from draftwood.bench.intervals import interval

    from models import TINY_MOE

    sides = ("pristine", "pristine") if args.control else ("ours", "pristine")
    given = {"library": pristine.library(), "model": TINY_MOE, "threads": args.threads}
    print(f"run  {sides[0]:>9}  {sides[1]:>9}   ratio  (ms per token, medians of {args.turns} turns)")
    ratios, spreads, medians = [], [], []
    for i in range(args.runs):
        ours, theirs = run(sides, args.turns, **given)
        of_turns = [b / a for a, b in zip(ours, theirs, strict=True)]
        ratios.append(statistics.median(of_turns))
        spreads.append(statistics.pstdev(of_turns))
        medians.append((statistics.median(ours), statistics.median(theirs)))
        print(
            f"{i + 1:3}  {medians[-1][0] * 1e3:9.3f}  {medians[-1][1] * 1e3:9.3f}  {ratios[-1]:6.4f}",
            flush=True,
        )
    low, high = interval(ratios)
    report = {
        "ratio": round(statistics.median(ratios), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "floor": FLOOR,
        "pairs": args.runs,
        "turns": args.turns,
        "threads": args.threads,
        "clock": "cpu" if args.threads == 1 else "wall",
        "ours_ms": round(statistics.median(ours for ours, _ in medians) * 1e3, 3),
        "pristine_ms": round(statistics.median(theirs for _, theirs in medians) * 1e3, 3),
        "spread_of_turns": round(statistics.median(spreads), 4),
        "control": args.control,
    }
    print(json.dumps(report))
    return 0 if high >= FLOOR else 1


if __name__ == "__main__":
    sys.exit(main())
