"""Show the promise on the trained tiny model: the same text with MTP drafting as without, and faster.

    make demo

Plain decode and drafting take turns in this process, on the same number of threads (all cores). A turn is a
few tokens long. It is compared with the turn of the other beside it, for the same tokens, so that whatever
else runs on the machine slows both. The ratio is the median of these pairs. Prompts are the first 128 tokens
of held-out documents, unseen in training. Mean tokens per round as in draftwood/bench/rounds.py: loops are
left out. Writes build/demo.json. Exit status 1 if the texts differ; no speed is a failure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from draftwood import Llama
from draftwood.bench.intervals import paired
from draftwood.bench.rounds import generate_rounds, mean_tokens
from draftwood.engine.engine import build_info
from draftwood.load.cores import usable_cores
from rich.console import Console
from rich.progress import Progress

import models

N_PROMPT = 128
N_TOKENS = 128
TURN = 32
PER_CATEGORY, REPEATS = 2, 3


def take(tokens: Iterator[int], count: int) -> tuple[list[int], float]:
    """Return the next tokens and the seconds that they took."""
    started = time.perf_counter()
    taken = list(islice(tokens, count))
    return taken, time.perf_counter() - started


def in_turns(plain: Llama, spec: Llama, prompt: list[int], spec_first: bool) -> dict[str, Any]:
    """Generate N_TOKENS greedy tokens with both, a turn of each at a time; who begins alternates."""
    texts: list[list[int]] = []
    streams = []
    for llm in (plain, spec):
        llm.reset()
        streams.append(llm.generate(prompt, temp=0.0))
        texts.append([next(streams[-1])])  # the prompt is evaluated: what follows is decoding
    seconds: list[list[float]] = [[], []]
    counts = [min(TURN, N_TOKENS - start) for start in range(1, N_TOKENS, TURN)]
    for turn, count in enumerate(counts):
        for which in (1, 0) if (turn % 2 == 0) == spec_first else (0, 1):
            taken, elapsed = take(streams[which], count)
            texts[which] += taken
            seconds[which].append(elapsed)
    for stream in streams:
        stream.close()
    return {"texts": texts, "counts": counts, "plain": seconds[0], "spec": seconds[1]}


def compare(plain: Llama, spec: Llama, prompt: list[int]) -> dict[str, Any]:
    """Run both on one prompt, several times; `turns` are (tokens, plain seconds, drafted seconds)."""
    runs = [in_turns(plain, spec, prompt, repeat % 2 == 1) for repeat in range(REPEATS)]
    rounds = generate_rounds(spec, prompt, N_TOKENS, temp=0.0)
    stats = spec.speculation_stats
    assert stats is not None
    texts = [text for run in runs for text in run["texts"]]
    turns = [turn for run in runs for turn in zip(run["counts"], run["plain"], run["spec"], strict=True)]
    return {
        "same_text": all(tokens == texts[0] for tokens in texts) and rounds[0][len(prompt) :] == texts[0],
        **speeds(turns),
        "all_rounds": stats.tokens_per_round,
        "rounds": rounds,
        "turns": turns,
    }


def speeds(turns: list[tuple[int, float, float]]) -> dict[str, Any]:
    """Return medians over turns: both speeds, and the ratio of turns side by side with its interval."""
    ratio, _ = paired([slow for _, slow, _ in turns], [fast for _, _, fast in turns])
    return {
        "plain_tps": statistics.median(count / slow for count, slow, _ in turns),
        "spec_tps": statistics.median(count / fast for count, _, fast in turns),
        "ratio": ratio.median,
        "ratio_interval": (ratio.low, ratio.high),
    }


def measure(kind: str, draft_tokens: int | None) -> dict[str, Any]:
    """Run every prompt and return the report."""
    threads = usable_cores()
    common = {"n_ctx": 512, "verbose": False, "n_threads": threads, "n_threads_batch": threads}
    drafting = {} if draft_tokens is None else {"draft_tokens": draft_tokens}
    path = str(models.tiny_moe(kind))
    plain = Llama(path, speculation="off", **common)
    spec = Llama(path, speculation="mtp", **common, **drafting)
    rows: list[dict[str, Any]] = []
    prompts = models.heldout_prompts(plain, PER_CATEGORY, N_PROMPT)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for category, prompt in progress.track(prompts, description="plain and MTP"):
            rows.append({"category": category, **compare(plain, spec, prompt)})
    ids = rows[0]["rounds"][0]
    sample = plain.detokenize(ids[N_PROMPT:]).decode("utf-8", "replace")
    plain.close()
    spec.close()
    setup = {"model": f"tiny-moe {kind}", "repeats": REPEATS, "threads": threads, "sample": sample}
    return {**summary(rows), **setup, "rows": rows}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the totals: speeds over all prompts' turns, tokens per round over all rounds."""
    length, left_out = mean_tokens(row["rounds"] for row in rows)
    return {
        "same_text": all(row["same_text"] for row in rows),
        **speeds([turn for row in rows for turn in row["turns"]]),
        "mean_length": length,
        "repeated_rounds_left_out": left_out,
    }


def verdict(result: dict[str, Any]) -> str:
    """Return in words whether all texts were equal."""
    return "same text" if result["same_text"] else "TEXT DIFFERS"


def show(report: dict[str, Any]) -> None:
    """Print the report for people."""
    print(f"a held-out prompt, continued by {report['model']}:\n\n{report['sample']}\n")
    for row in report["rows"]:
        print(
            f"{row['category']:7} plain {row['plain_tps']:6.0f} tok/s, MTP {row['spec_tps']:6.0f} tok/s, "
            f"{row['ratio']:.2f}x, {row['all_rounds']:.2f} tokens a round, {verdict(row)}"
        )
    low, high = report["ratio_interval"]
    pairs = sum(len(row["turns"]) for row in report["rows"])
    print(
        f"\nmedians of {pairs} turns of {TURN} tokens in pairs, on {report['threads']} threads: "
        f"plain {report['plain_tps']:.0f} tok/s, with MTP {report['spec_tps']:.0f} tok/s; "
        f"{report['mean_length']:.2f} tokens a round "
        f"({report['repeated_rounds_left_out']:.0%} of rounds repeat earlier text and are not counted in it)"
    )
    print(
        f"{verdict(report)}, with MTP {report['ratio']:.2f}x as fast "
        f"(95 % interval {low:.2f}x to {high:.2f}x; wide if other programs use these cores)"
    )


def main() -> int:
    """Measure, print, write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", default="F16", choices=("F16", *models.QUANTISED), help="weight type")
    parser.add_argument("--draft-tokens", type=int, help="longest draft of a round")
    parser.add_argument(
        "--report", type=Path, default=models.ROOT / "build" / "demo.json", help="JSON to write"
    )
    args = parser.parse_args()
    report = {**measure(args.kind, args.draft_tokens), **build_info()}
    for row in report["rows"]:
        del row["rounds"]
    args.report.parent.mkdir(parents=True, exist_ok=True)
    args.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show(report)
    return 0 if report["same_text"] else 1


if __name__ == "__main__":
    sys.exit(main())
