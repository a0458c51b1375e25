"""Hold text of models whose experts lie in a pool against text of the same model in one memory.

    make exact        (or: python bench/exact_experts.py [--tokens N] [--only NAME])

Plain decode of the model in one memory is generated once per prompt and sampling. Every way over a pool must
repeat it. Pools: as few slots as a pool may have, so that verifies read most experts in place; one more than
a verify of 9 rows can choose; a quarter and a half of the experts. Ways: plain decode, MTP chains, trees,
n-grams, an oracle whose drafts are right up to a chosen depth, "auto". On a CPU the slots are plain memory.
All but the smallest pool guess the next layer's experts, too. Every cell must have filled slots, and guessed
where it should. Nothing is excused. The last line is one JSON object; the exit status is 1 if a single token
differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood import Llama
from draftwood.engine.engine import ModelInfo, probe_model
from oracle import OracleLlama
from same_text import (
    LONGEST,
    SAMPLING,
    Tally,
    accepted_lengths,
    cases,
    generate,
    settings,
)

RANDOM_SHAPES = ("moe-mtp", "planted-moe")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to generate the text."""

    name: str
    speculation: str
    options: tuple[tuple[str, Any], ...] = ()
    llama: type[Llama] = Llama


WAYS = (
    Way("off", "off"),
    Way("mtp", "mtp", (("draft_tokens", LONGEST),)),
    Way("tree", "tree", (("tree_budget", 16),)),
    Way("ngram", "ngram"),
    Way("oracle", "mtp", (("draft_tokens", LONGEST),), OracleLlama),
    Way("auto", "auto"),
)


def pools(info: ModelInfo) -> list[int]:
    """Return slots of a layer."""
    verify = min((LONGEST + 1) * info.n_experts_used + 1, info.n_experts - 1)
    wanted = {info.n_experts_used, verify, info.n_experts // 4, info.n_experts // 2}
    return sorted({max(info.n_experts_used, slots) for slots in wanted})


def run_model(
    name: str, path: Path, prompts: list[list[int]], n_tokens: int, tally: Tally, threads: int
) -> None:
    """Compare every way over every pool with plain decode of the model in one memory."""
    common, info = settings(threads), probe_model(str(path))
    keys = [(kind, i) for kind in SAMPLING for i in range(len(prompts))]
    llm = Llama(str(path), speculation="off", **common)
    plain = {(kind, i): generate(llm, prompts[i], n_tokens, SAMPLING[kind]) for kind, i in keys}
    llm.close()
    for slots in pools(info):
        n_bytes = -(-slots * info.expert_bytes // info.n_experts)
        pool = {"expert_vram": n_bytes, "expert_guess": slots > info.n_experts_used}
        for way in WAYS:
            started = time.perf_counter()
            llm = way.llama(str(path), speculation=way.speculation, **pool, **dict(way.options), **common)
            wrong = 0
            for kind, i in keys:
                if isinstance(llm, OracleLlama):
                    llm.plan_drafts(plain[kind, i], len(prompts[i]), seed=i)
                tokens = generate(llm, prompts[i], n_tokens, SAMPLING[kind])
                wrong += sum(a != b for a, b in zip(tokens, plain[kind, i], strict=True))
            lengths, experts = accepted_lengths(llm), llm.expert_stats
            if experts is None or experts.slots != slots * info.n_expert_layers or experts.misses == 0:
                raise SystemExit(f"{name}, {way.name}: found {experts}; expected {slots} slots a layer")
            if (experts.guessed > 0) is not pool["expert_guess"]:
                raise SystemExit(f"{name}, {way.name}: found {experts.guessed} guesses")
            llm.close()
            tally.add(len(keys) * n_tokens, wrong, lengths)
            print(
                f"{name:16} {slots:3} slots {way.name:7} {len(keys) * n_tokens:5} tokens {wrong:4} differ  "
                f"hits {experts.hit_rate:.2f}  right {experts.right:6} of {experts.guessed:6} guesses  "
                f"{time.perf_counter() - started:5.1f} s",
                flush=True,
            )


def main() -> int:
    """Run everything and print the verdict."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=96, help="tokens a text")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", help="run only the models whose name holds this")
    args = parser.parse_args()

    tally = Tally()
    for name, path, _, prompts, n_tokens in cases(RANDOM_SHAPES, args.only, args.tokens):
        run_model(name, path, prompts, n_tokens, tally, args.threads)
    return tally.print_verdict_of_all(args.only)


if __name__ == "__main__":
    sys.exit(main())
