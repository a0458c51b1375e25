"""Measure what a verify of several rows takes on a CPU, in plain steps of the same model.

    python bench/verify_cpu.py [--kind 35b-a3b|F16|Q8_0|Q4_K_M]... [--rows N]... [--threads N]

Drafts are the model's own greedy text: rows choose the experts that real rows choose, and all are accepted.
In a repeat every number of rows has its turn, in a new order; a step is the verify of one row. What is
compared are the ratios within a repeat. Only the forward pass is timed, from the call until its result is
there. Without --threads a step runs on the package's default, and a verify on all cores, as for users.

A line a kind; the last line is one JSON object, also added to --results. Must not know: drafters.
Test: tests/model/test_verify_cpu.py.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from draftwood import Llama
from draftwood.bench import facts
from draftwood.bench import results as rows_of_results
from draftwood.bench.intervals import LEAST_PAIRS, paired
from draftwood.engine.engine import Engine, build_info
from stock_cpu import KINDS, N_VOCAB, SYNTHETIC, model_of

SCHEMA = 1
N_PROMPT = 64


class Verifies:
    """A `Llama` whose rounds verify what we give them, timed."""

    def __init__(self, model: Path, longest: int, n_ctx: int, threads: int | None) -> None:
        self._llm = Llama(
            str(model),
            n_ctx=n_ctx,
            speculation="ngram",
            draft_tokens=longest,
            n_threads=threads,
            verbose=False,
        )
        engine = self._llm._engine
        assert engine is not None
        self._engine: Engine = engine

    def text(self, prompt: Sequence[int], n: int) -> list[int]:
        """Return n tokens of greedy text after the prompt."""
        self._llm.reset()
        stream = self._llm.generate(list(prompt), temp=0.0)
        return [next(stream) for _ in range(n)]

    def run(self, prompt: Sequence[int], text: Sequence[int], sizes: Sequence[int]) -> list[float]:
        """Return the seconds of verifies of these sizes along the text, one after the other.

        Errors: RuntimeError where the text is not the model's own, or a draft from it is not accepted.
        """
        seconds: list[float] = []
        taken = 0
        verify = self._engine.verify

        def propose(last: int, _: int = 0) -> int:
            size = sizes[min(len(seconds), len(sizes) - 1)]
            self._engine.propose_given(last, text[taken : taken + size - 1])
            return size - 1

        def timed() -> None:
            begin = time.perf_counter()
            verify()
            seconds.append(time.perf_counter() - begin)

        self._engine.propose, self._engine.verify = propose, timed  # type: ignore[method-assign]
        try:
            self._llm.reset()
            stream = self._llm.generate(list(prompt), temp=0.0)
            for expected in text[: sum(sizes) + 1]:
                found = next(stream)
                if found != expected:
                    raise RuntimeError(f"token {taken} is {found}; plain decode said {expected}")
                taken += 1
            stream.close()
        finally:
            del self._engine.propose, self._engine.verify
        if len(seconds) != len(sizes):
            raise RuntimeError(f"{len(seconds)} verifies; expected {len(sizes)}, each accepted whole")
        return seconds

    def close(self) -> None:
        """Free the model."""
        self._llm.close()


def measure(model: Path, rows: Sequence[int], repeats: int, threads: int | None) -> dict[str, Any]:
    """Return the step in milliseconds, and by number of rows the median ratio to it with its interval."""
    sizes = [1, *rows]
    order: list[int] = []
    for i in range(repeats + 1):  # the first one warms up
        order += random.Random(i).sample(sizes, len(sizes))
    n_tokens = sum(order) + 2
    chance = random.Random("verify")
    prompt = [chance.randrange(10, N_VOCAB) for _ in range(N_PROMPT)]
    verifies = Verifies(model, max(rows) - 1, 64 * -(-(N_PROMPT + n_tokens + 64) // 64), threads)
    try:
        seconds = verifies.run(prompt, verifies.text(prompt, n_tokens), order)
    finally:
        verifies.close()
    by_size: dict[int, list[float]] = {size: [] for size in sizes}
    for size, took in zip(order, seconds, strict=True):
        by_size[size].append(took)
    steps = by_size[1][1:]
    found: dict[str, Any] = {"step_ms": round(1e3 * statistics.median(steps), 3)}
    for size in rows:
        over, _ = paired(by_size[size][1:], steps)
        found[str(size)] = over.figures()
    return found


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, help=f"{SYNTHETIC}, unless named.")
@click.option("--rows", type=click.IntRange(2, 16), multiple=True, help="2, 4 and 8, unless named.")
@click.option("--repeats", type=click.IntRange(min=LEAST_PAIRS), default=4 * LEAST_PAIRS, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="As Llama chooses, unless named.")
@click.option("--results", type=click.Path(path_type=Path, dir_okay=False), help="File to add the row to.")
def main(
    kinds: tuple[str, ...], rows: tuple[int, ...], repeats: int, threads: int | None, results: Path | None
) -> None:
    """Measure each kind and print the row."""
    if results:
        rows_of_results.check_writable("--results", results)
    found = {}
    for kind in kinds or (SYNTHETIC,):
        found[kind] = measure(model_of(kind), rows or (2, 4, 8), repeats, threads)
        ratios = [
            f"{n} rows {ratio[0]:.2f} [{ratio[1]:.2f}, {ratio[2]:.2f}]"
            for n, ratio in found[kind].items()
            if n != "step_ms"
        ]
        print(f"{kind:8} step {found[kind]['step_ms']:.2f} ms  " + "  ".join(ratios), flush=True)
    row = {"schema": SCHEMA, **facts.machine(build_info()), "repeats": repeats, "verify": found}
    if results:
        rows_of_results.append(results, row)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
