"""Hold text with drafting against text without, token for token, on trained and random models.

    make exact        (or: python bench/exact.py [--tokens N] [--only NAME])

Plain decode (speculation="off", the same exact kernels) is generated once per model, prompt and sampling;
each way must then repeat it. Ways: the model's own MTP block at several draft lengths, and choosing among
few tokens; a DFlash drafter (tiny-moe); n-grams; an oracle that knows the plain text and plants a wrong
token at a chosen depth, so that every accepted length occurs also where random weights accept nothing;
"auto", whose draft lengths depend on measured times; steps that are queued before their token is known; a
context that held another text and went back to a checkpoint; and llama-cpp-python's own loop (its `generate`,
one `eval` and `sample` per token) on a Llama without and with a drafter attached.
Sampling: greedy, temperature 0.8, penalties, and on trained models a grammar. Nothing is excused. The
last line is one JSON object; the exit status is 1 if a single token differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood import Llama
from draftwood.generate.generation import Base
from oracle import OracleLlama
from queued import QueuedLlama
from same_text import (
    CACHES,
    LONGEST,
    SAMPLING,
    Tally,
    accepted_lengths,
    cases,
    generate,
    settings,
)

import models

RANDOM_SHAPES = ("moe-mtp", "dense-mtp", "odd", "gqa", "q4k", "q3k", "mix", "planted-moe", "planted-dense")
# words of a few letters, so that it binds at nearly every token
GRAMMAR = r"root ::= ([a-z] [a-z]? [a-z]? [ \n])*"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to generate the text that plain decode gave."""

    name: str
    speculation: str = "mtp"
    drafter: Path | None = None
    draft_tokens: int = LONGEST
    draft_vocab: int | None = None
    llama: type[Llama] = Llama
    goes_back: bool = False
    """The context does not start empty: it holds the prompt, and another text behind it."""
    loop: Callable[..., Generator[int, Any, None]] = Llama.generate


WAYS = (
    Way("mtp-1", draft_tokens=1),
    Way("mtp-3", draft_tokens=3),
    Way(f"mtp-{LONGEST}"),
    Way("mtp-few", draft_tokens=3, draft_vocab=64),
    Way("ngram", "ngram"),
    Way("auto", "auto"),
    Way("queued", "off", llama=QueuedLlama),
    Way("back", "off", goes_back=True),
    Way("back-queued", "off", llama=QueuedLlama, goes_back=True),
    Way("back-mtp", draft_tokens=3, goes_back=True),
    Way("oracle", llama=OracleLlama),
    Way("loop", "off", loop=Base.generate),
    Way("loop-mtp", loop=Base.generate),
)
# with the drafter that was trained for the model
TRAINED_WAYS = (
    Way("dflash-3", "dflash", models.DFLASH, draft_tokens=3),
    Way(f"dflash-{LONGEST}", "dflash", models.DFLASH),
    Way("auto-dflash", "auto", models.DFLASH),
    Way("back-dflash", "dflash", models.DFLASH, draft_tokens=3, goes_back=True),
)


def run_model(
    name: str,
    path: Path,
    prompts: list[list[int]],
    n_tokens: int,
    tally: Tally,
    *,
    trained: bool,
    common: dict[str, Any],
) -> None:
    """Compare every way with plain decode on one model and print a line per way; common: `settings`."""
    samplings = {**SAMPLING, "grammar": {"temp": 0.8, "grammar": GRAMMAR}} if trained else SAMPLING
    plain_llm = Llama(str(path), speculation="off", **common)
    keys = [(kind, i) for kind in samplings for i in range(len(prompts))]
    plain = {(kind, i): generate(plain_llm, prompts[i], n_tokens, samplings[kind]) for kind, i in keys}
    plain_llm.close()

    for way in (*WAYS, *TRAINED_WAYS) if trained else WAYS:
        if common["n_gpu_layers"] and way.loop is Base.generate:
            continue  # it takes a prompt in other pieces, and a card rounds a prompt's rows by their number
        drafting = {"speculation": way.speculation, "draft_tokens": way.draft_tokens, "drafter": way.drafter}
        llm = way.llama(str(path), **drafting, draft_vocab=way.draft_vocab, **common)
        wrong, started = 0, time.perf_counter()
        for kind, i in keys:
            if isinstance(llm, OracleLlama):
                llm.plan_drafts(plain[kind, i], len(prompts[i]), seed=i)
            tokens = generate(
                llm, prompts[i], n_tokens, samplings[kind], goes_back=way.goes_back, loop=way.loop
            )
            wrong += sum(a != b for a, b in zip(tokens, plain[kind, i], strict=True))
        lengths = accepted_lengths(llm)
        stats = llm.speculation_stats
        assert stats is not None
        if (stats.rounds == 0) != (way.loop is Base.generate):
            raise SystemExit(f"{name}, {way.name}: counted {stats.rounds} rounds; the wrong loop ran")
        if way.llama is QueuedLlama and stats.queued_steps == 0:
            raise SystemExit(f"{name}, {way.name}: no step was queued")
        if way.goes_back and stats.restored < len(keys):
            raise SystemExit(f"{name}, {way.name}: went back {stats.restored} times of {len(keys)}")
        llm.close()
        n = len(keys) * n_tokens
        tally.add(n, wrong, lengths)
        histogram = " ".join(f"{depth}:{count}" for depth, count in sorted(lengths.items()))
        print(
            f"{name:16} {way.name:11} {n:6} tokens {wrong:4} differ  {stats.tokens_per_round:5.2f} a round  "
            f"{time.perf_counter() - started:5.1f} s  accepted {histogram or 'nothing, no rounds'}",
            flush=True,
        )


def main() -> int:
    """Run everything and print the verdict."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128, help="tokens a text")
    parser.add_argument("--threads", type=int, help="default: llama-cpp-python's")
    parser.add_argument("--only", help="run only the models whose name holds this")
    parser.add_argument(
        "--gpu-layers",
        type=int,
        default=0,
        help="layers on a card; -1: all. Ways with llama-cpp-python's own loop are left out there",
    )
    parser.add_argument("--cache", choices=CACHES, default="F16", help="type of keys and values")
    args = parser.parse_args()

    tally = Tally()
    common = settings(args.threads, gpu_layers=args.gpu_layers, cache=args.cache)
    for name, path, trained, prompts, n_tokens in cases(RANDOM_SHAPES, args.only, args.tokens):
        run_model(name, path, prompts, n_tokens, tally, trained=trained, common=common)
    return tally.print_verdict_of_all(args.only)


if __name__ == "__main__":
    sys.exit(main())
