"""Hold text with drafting against text without, token for token, on trained and random models.

    make exact        (or: python bench/exact.py [--tokens N] [--only NAME])

Plain decode (speculation="off", the same exact kernels) is generated once per model, prompt and sampling;
each way must then repeat it. Ways: the model's own MTP block at several draft lengths; a DFlash drafter
(tiny-moe); n-grams; an oracle that knows the plain text and plants a wrong token at a chosen depth, so
that every accepted length occurs also where random weights accept nothing; "auto", whose draft lengths
depend on measured times; a context that held another text and went back to a checkpoint; and
llama-cpp-python's own loop (its `generate`, one `eval` and `sample` per token) on a Llama without and with
a drafter attached.
Sampling: greedy, temperature 0.8, penalties, and on trained models a grammar. Nothing is excused. The
last line is one JSON object; the exit status is 1 if a single token differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwood import Llama
from draftwood._llama_cpp.llama_grammar import LlamaGrammar
from draftwood.generation import Base

import models

RANDOM_SHAPES = ("moe-mtp", "dense-mtp", "odd", "gqa", "q4k", "mix", "planted-moe", "planted-dense")
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temp": 0.0},
    "seeded": {"temp": 0.8, "top_k": 40, "top_p": 0.95},
    "penalties": {"temp": 0.6, "repeat_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.3},
}
# words of a few letters, so that it binds at nearly every token
GRAMMAR = r"root ::= ([a-z] [a-z]? [a-z]? [ \n])*"
SEED = 20260
LONGEST = 8


class OracleLlama(Llama):
    """A Llama whose drafts come from the known plain text, wrong from a depth that varies per round on."""

    def plan_drafts(self, plain: Sequence[int], n_prompt: int, seed: int) -> None:
        """Set what the next generation will draft: `plain` i32[n] are the tokens after n_prompt."""
        self._plain, self._n_prompt = list(plain), n_prompt
        self._dice = random.Random(seed)

    def _start_round(self, last: int) -> None:
        assert self._engine is not None
        done = self.n_tokens - self._n_prompt + 1  # tokens of the plain text emitted so far
        draft = self._plain[done : done + self._dice.randint(1, LONGEST)]
        wrong = self._dice.randint(0, len(draft)) if draft else 0
        if wrong < len(draft):
            draft[wrong:] = [(token + 1) % self._n_vocab for token in draft[wrong:]]
        self._engine.trim(self.n_tokens)
        self._engine.propose_given(last, draft)
        self._engine.verify()


@dataclass(frozen=True, slots=True)
class Way:
    """One way to generate the text that plain decode gave."""

    name: str
    speculation: str = "mtp"
    drafter: Path | None = None
    draft_tokens: int = LONGEST
    llama: type[Llama] = Llama
    goes_back: bool = False
    """The context does not start empty: it holds the prompt, and another text behind it."""
    loop: Callable[..., Generator[int, Any, None]] = Llama.generate


PLAIN = Way("plain", "off")
WAYS = (
    Way("mtp-1", draft_tokens=1),
    Way("mtp-3", draft_tokens=3),
    Way(f"mtp-{LONGEST}"),
    Way("ngram", "ngram"),
    Way("auto", "auto"),
    Way("back", "off", goes_back=True),
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


@dataclass(slots=True)
class Tally:
    """Sums over all cells."""

    tokens: int = 0
    mismatches: int = 0
    cells: int = 0
    accepted_lengths: Counter[int] = field(default_factory=Counter)


def accepted_lengths(llm: Llama) -> Counter[int]:
    """Return how many rounds accepted exactly 0, 1, 2... drafts."""
    stats = llm.speculation_stats
    assert stats is not None
    reached = [stats.rounds, *stats.accepted_by_depth, 0]
    return +Counter({depth: reached[depth] - reached[depth + 1] for depth in range(len(reached) - 1)})


def generate(
    llm: Llama, prompt: Sequence[int], n_tokens: int, sampling: dict[str, Any], way: Way
) -> list[int]:
    """Return n_tokens tokens after `prompt` with a fixed seed."""
    llm.reset()
    for other in (prompt, [*prompt, *prompt[:9]]) if way.goes_back else ():
        list(zip(llm.generate(other, temp=0.0), range(7), strict=False))
    llm.set_seed(SEED)
    if "grammar" in sampling:  # a grammar keeps its place in the text
        sampling = {**sampling, "grammar": LlamaGrammar.from_string(sampling["grammar"], verbose=False)}
    stream = way.loop(llm, prompt, **sampling)
    tokens = [token for token, _ in zip(stream, range(n_tokens), strict=False)]
    stream.close()
    return tokens


def run_model(
    name: str,
    path: Path,
    prompts: list[list[int]],
    n_tokens: int,
    tally: Tally,
    *,
    trained: bool,
    threads: int | None,
) -> None:
    """Compare every way with plain decode on one model and print a line per way."""
    common: dict[str, Any] = {
        "n_ctx": 1024,
        "verbose": False,
        "n_threads": threads,
        "n_threads_batch": threads,
    }
    samplings = {**SAMPLING, "grammar": {"temp": 0.8, "grammar": GRAMMAR}} if trained else SAMPLING
    plain_llm = Llama(str(path), speculation="off", **common)
    keys = [(kind, i) for kind in samplings for i in range(len(prompts))]
    plain = {(kind, i): generate(plain_llm, prompts[i], n_tokens, samplings[kind], PLAIN) for kind, i in keys}
    plain_llm.close()

    for way in (*WAYS, *TRAINED_WAYS) if trained else WAYS:
        drafting = {"speculation": way.speculation, "draft_tokens": way.draft_tokens, "drafter": way.drafter}
        llm = way.llama(str(path), **drafting, **common)
        wrong, started = 0, time.perf_counter()
        for kind, i in keys:
            if isinstance(llm, OracleLlama):
                llm.plan_drafts(plain[kind, i], len(prompts[i]), seed=i)
            tokens = generate(llm, prompts[i], n_tokens, samplings[kind], way)
            wrong += sum(a != b for a, b in zip(tokens, plain[kind, i], strict=True))
        lengths = accepted_lengths(llm)
        stats = llm.speculation_stats
        assert stats is not None
        if (stats.rounds == 0) != (way.loop is Base.generate):
            raise SystemExit(f"{name}, {way.name}: counted {stats.rounds} rounds; the wrong loop ran")
        if way.goes_back and stats.restored < len(keys):
            raise SystemExit(f"{name}, {way.name}: went back {stats.restored} times of {len(keys)}")
        llm.close()
        n = len(keys) * n_tokens
        tally.tokens += n
        tally.mismatches += wrong
        tally.cells += 1
        tally.accepted_lengths += lengths
        histogram = " ".join(f"{depth}:{count}" for depth, count in sorted(lengths.items()))
        print(
            f"{name:16} {way.name:8} {n:6} tokens {wrong:4} differ  {stats.tokens_per_round:5.2f} a round  "
            f"{time.perf_counter() - started:5.1f} s  accepted {histogram or 'nothing, no rounds'}",
            flush=True,
        )


def trained_prompts(path: Path) -> list[list[int]]:
    """Return a held-out prompt of 128 tokens of every category."""
    llm = Llama(str(path), vocab_only=True, verbose=False)
    prompts = [ids for _, ids in models.heldout_prompts(llm, 1, 128)]
    llm.close()
    return prompts


def random_prompts(count: int) -> list[list[int]]:
    """Return prompts of random tokens, of several lengths (one longer than the 64 exact rows)."""
    dice = random.Random(SEED)
    return [[dice.randrange(256) for _ in range(length)] for length in (7, 40, 130, 64)[:count]]


def main() -> int:
    """Run everything and print the verdict."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128, help="tokens a text")
    parser.add_argument("--threads", type=int, help="default: llama-cpp-python's")
    parser.add_argument("--only", help="run only the models whose name holds this")
    args = parser.parse_args()

    cases = [
        (f"tiny-moe-{kind}", lambda kind=kind: models.tiny_moe(kind)) for kind in ("F16", *models.QUANTISED)
    ]
    cases += [(shape, lambda shape=shape: models.synthetic(shape)) for shape in RANDOM_SHAPES]
    tally = Tally()
    for name, make in cases:
        if args.only and args.only not in name:
            continue
        path = make()
        trained = name.startswith("tiny-moe")
        prompts = trained_prompts(path) if trained else random_prompts(2)
        n_tokens = args.tokens if trained else args.tokens // 2
        run_model(name, path, prompts, n_tokens, tally, trained=trained, threads=args.threads)

    histogram = {str(depth): tally.accepted_lengths[depth] for depth in range(LONGEST + 1)}
    missing = [depth for depth, count in histogram.items() if count == 0]
    if missing:
        print(f"accepted lengths that never occurred: {', '.join(missing)}")
    print(
        json.dumps(
            {
                "tokens": tally.tokens,
                "mismatches": tally.mismatches,
                "excused": 0,
                "cells": tally.cells,
                "accepted_lengths": histogram,
            }
        )
    )
    return 1 if tally.mismatches or missing or not tally.cells else 0


if __name__ == "__main__":
    sys.exit(main())
