"""Show the promise on the trained tiny model: the same text with MTP drafting as without, and faster.

    make demo

Plain decode and drafting run interleaved in this process, on the same number of threads (all cores), several
times per prompt; medians count. Prompts are the first 128 tokens of held-out documents, unseen in training.
Mean tokens per round as in draftwood/bench/rounds.py: loops are left out. Writes build/demo.json.
Exit status 1 if the texts differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from draftwood import Llama
from draftwood.bench.rounds import generate_rounds, mean_tokens
from draftwood.engine.engine import build_info
from draftwood.load.cores import usable_cores
from rich.console import Console
from rich.progress import Progress

import models

N_PROMPT = 128
N_TOKENS = 128
PER_CATEGORY, REPEATS = 2, 3


def generate(llm: Llama, prompt: list[int]) -> tuple[list[int], float]:
    """Return N_TOKENS greedy tokens after the prompt and the seconds between the first and the last."""
    llm.reset()
    tokens: list[int] = []
    started = 0.0
    for token in llm.generate(prompt, temp=0.0):
        if not tokens:
            started = time.perf_counter()  # the prompt is evaluated: what follows is decoding
        tokens.append(token)
        if len(tokens) == N_TOKENS:
            break
    return tokens, time.perf_counter() - started


def compare(plain: Llama, spec: Llama, prompt: list[int]) -> dict[str, Any]:
    """Run both on one prompt, interleaved, the order alternating."""
    texts: list[list[int]] = []
    seconds: dict[str, list[float]] = {"plain": [], "spec": []}
    for repeat in range(REPEATS):
        order = [("plain", plain), ("spec", spec)]
        for name, llm in order if repeat % 2 == 0 else reversed(order):
            tokens, elapsed = generate(llm, prompt)
            texts.append(tokens)
            seconds[name].append(elapsed)
    rounds = generate_rounds(spec, prompt, N_TOKENS, temp=0.0)
    stats = spec.speculation_stats
    assert stats is not None
    return {
        "same_text": all(tokens == texts[0] for tokens in texts) and rounds[0][len(prompt) :] == texts[0],
        "plain_tps": (N_TOKENS - 1) / statistics.median(seconds["plain"]),
        "spec_tps": (N_TOKENS - 1) / statistics.median(seconds["spec"]),
        "all_rounds": stats.tokens_per_round,
        "rounds": rounds,
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
    """Return the totals: speeds over all prompts' tokens, tokens per round over all rounds."""
    plain = len(rows) / sum(1 / row["plain_tps"] for row in rows)
    spec = len(rows) / sum(1 / row["spec_tps"] for row in rows)
    length, left_out = mean_tokens(row["rounds"] for row in rows)
    return {
        "same_text": all(row["same_text"] for row in rows),
        "plain_tps": plain,
        "spec_tps": spec,
        "ratio": spec / plain,
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
            f"{row['all_rounds']:.2f} tokens a round, {verdict(row)}"
        )
    print(
        f"\n{verdict(report)}: plain {report['plain_tps']:.1f} tok/s, "
        f"with MTP {report['spec_tps']:.1f} tok/s ({report['ratio']:.2f}x) on {report['threads']} threads; "
        f"{report['mean_length']:.2f} tokens a round "
        f"({report['repeated_rounds_left_out']:.0%} of rounds repeat earlier text and are not counted in it)"
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
