"""Show the promise on the trained tiny model: the same text with MTP drafting as without, and faster.

    make demo

Plain decode and drafting run interleaved, several times per prompt, in this process, with llama-cpp-python's
own defaults for threads; medians count. Prompts are held-out documents that training never saw. Writes
build/demo.json. Exit status 1 if the texts differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from draftwood import Llama
from draftwood.engine import build_info
from rich.console import Console
from rich.progress import Progress

import models

REPORT = models.ROOT / "build" / "demo.json"
N_PROMPT = 128
N_TOKENS = 128


def prompts(per_category: int) -> Iterator[tuple[str, str]]:
    """Yield (category, text) of held-out documents, the first of each category."""
    for file in sorted((models.TINY_MOE.parent / "heldout").glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines()[:per_category]:
            yield file.stem, json.loads(line)["text"]


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


def measure(per_category: int, repeats: int, kind: str, draft_tokens: int | None) -> dict[str, Any]:
    """Run both on every prompt, interleaved; return the report."""
    path = str(models.tiny_moe(kind))
    common: dict[str, Any] = {"n_ctx": 512, "verbose": False}
    drafting = {} if draft_tokens is None else {"draft_tokens": draft_tokens}
    plain = Llama(path, speculation="off", **common)
    spec = Llama(path, speculation="mtp", **common, **drafting)
    rows: list[dict[str, Any]] = []
    sample = ""
    chosen = list(prompts(per_category))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for category, text in progress.track(chosen, description="plain and drafting"):
            prompt = plain.tokenize(text.encode(), add_bos=False)[:N_PROMPT]
            texts, seconds = [], {"plain": [], "spec": []}
            spec.reset_speculation_stats()
            for repeat in range(repeats):
                order = [("plain", plain), ("spec", spec)]
                for name, llm in order if repeat % 2 == 0 else reversed(order):
                    tokens, elapsed = generate(llm, prompt)
                    texts.append(tokens)
                    seconds[name].append(elapsed)
            stats = spec.speculation_stats
            assert stats is not None
            rows.append(
                {
                    "category": category,
                    "same_text": all(tokens == texts[0] for tokens in texts),
                    "plain_tps": (N_TOKENS - 1) / statistics.median(seconds["plain"]),
                    "spec_tps": (N_TOKENS - 1) / statistics.median(seconds["spec"]),
                    "mean_length": stats.tokens_per_round,
                }
            )
            sample = sample or plain.detokenize(texts[0]).decode("utf-8", "replace")
    plain.close()
    spec.close()
    return {**summary(rows), "model": f"tiny-moe {kind}", "repeats": repeats, "rows": rows, "sample": sample}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the totals: speeds over all prompts' tokens, mean length over all rounds."""
    plain = len(rows) / sum(1 / row["plain_tps"] for row in rows)
    spec = len(rows) / sum(1 / row["spec_tps"] for row in rows)
    return {
        "same_text": all(row["same_text"] for row in rows),
        "plain_tps": plain,
        "spec_tps": spec,
        "ratio": spec / plain,
        "mean_length": len(rows) / sum(1 / row["mean_length"] for row in rows),
    }


def main() -> int:
    """Measure, print, write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--long", action="store_true", help="more prompts and repeats")
    parser.add_argument("--kind", default="F16", choices=("F16", *models.QUANTISED), help="weight type")
    parser.add_argument("--draft-tokens", type=int, help="longest draft of a round")
    args = parser.parse_args()
    per_category, repeats = (8, 5) if args.long else (2, 3)
    report = {**measure(per_category, repeats, args.kind, args.draft_tokens), **build_info()}
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    print(f"a held-out prompt, continued by {report['model']}:\n\n{report['sample']}\n")
    for row in report["rows"]:
        print(
            f"{row['category']:8} plain {row['plain_tps']:7.1f} tok/s, with MTP {row['spec_tps']:7.1f} tok/s, "
            f"{row['mean_length']:.2f} tokens a round   {'same text' if row['same_text'] else 'TEXT DIFFERS'}"
        )
    print(
        f"\n{'same text' if report['same_text'] else 'TEXT DIFFERS'}: plain {report['plain_tps']:.1f} tok/s, "
        f"with MTP {report['spec_tps']:.1f} tok/s ({report['ratio']:.2f}x), "
        f"{report['mean_length']:.2f} tokens a round; written to {REPORT.relative_to(models.ROOT)}"
    )
    return 0 if report["same_text"] else 1


if __name__ == "__main__":
    sys.exit(main())
