"""Measure how a GGUF's mixture of experts routes the text that it writes itself.

    python tools/routing.py model.gguf [--tokens 2048] [--temp 0.8] [--gpu-layers -1]
    python tools/routing.py model.gguf --draft 3 [--drafter dflash.gguf]

The text comes from plain decoding, greedy or drawn; with --draft N from rounds that keep N drafts each,
right or not, and one token of the target's, as timings with a schedule of acceptance do. Its tokens are then
decoded once more in batches with a callback that reads every layer's choice (`ffn_moe_argsort`).

The last line is one JSON object: distinct experts per layer in windows of 4, 8, 16 tokens and of a round;
which part of a token's experts the token before had; hits of the half of the experts that the first half of
the text used most, on the second half; hits of an LRU cache in each layer, by its size in parts of the
experts, after a quarter of the text; the part of the experts that was used at all.

Measured of Qwen3.6-35B-A3B by others (256 experts, top-8): 22.1, 35.9, 56.3 distinct in code, 20.7, 32.8,
51.0 in prose, 49 % hits of an LRU cache of 21 experts. Needs the built library only where it runs a model.
Test: tests/unit/test_synth_routing.py, tests/model/test_synth_routing.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np

WINDOWS = (4, 8, 16)
LRU = (21 / 256, 0.30, 0.50, 0.65)  # cache sizes in parts of the experts; the first is a published one
PROMPT = b"What experts does a model choose while it writes? "
BATCH = 512
PHRASE = 8  # tokens: how often some occur again tells whether greedy text loops


def figures(choices: np.ndarray, n_experts: int, per_round: int = 1) -> dict[str, Any]:
    """Return what the choices int [n_layers, n_tokens, top_k] of consecutive tokens come to."""
    windows = sorted({*WINDOWS, per_round} - {1})
    return {
        "distinct": {str(n): round(distinct(choices, n), 2) for n in windows},
        "repeated": round(repeated(choices), 3),
        "static_half": round(static_hits(choices, n_experts // 2, n_experts), 3),
        "lru": {f"{part:.2f}": round(lru_hits(choices, round(part * n_experts)), 3) for part in LRU},
        "used": round(float(np.mean([len(np.unique(layer)) for layer in choices])) / n_experts, 3),
    }


def distinct(choices: np.ndarray, window: int) -> float:
    """Return how many experts a layer needs for `window` consecutive tokens, on average."""
    n_layers, n_tokens, top_k = choices.shape
    whole = choices[:, : n_tokens // window * window].reshape(n_layers, -1, window * top_k)
    ordered = np.sort(whole, axis=2)
    return float((1 + (np.diff(ordered, axis=2) > 0).sum(axis=2)).mean())


def repeated(choices: np.ndarray) -> float:
    """Return which part of a token's experts the token before it had."""
    return float((choices[:, 1:, :, None] == choices[:, :-1, None, :]).any(axis=3).mean())


def static_hits(choices: np.ndarray, n_kept: int, n_experts: int) -> float:
    """Return which part of the second half's choices is among the `n_kept` that the first half used most."""
    half = choices.shape[1] // 2
    hits = []
    for layer in choices:
        counts = np.bincount(layer[:half].ravel(), minlength=n_experts)
        hits.append(np.isin(layer[half:], np.argsort(-counts, kind="stable")[:n_kept]).mean())
    return float(np.mean(hits))


def lru_hits(choices: np.ndarray, size: int) -> float:
    """Return the hit rate of an LRU cache of `size` experts in each layer, after a quarter of the tokens."""
    hits = total = 0
    for layer in choices.tolist():
        cache: OrderedDict[int, None] = OrderedDict()
        for t, experts in enumerate(layer):
            if t >= len(layer) // 4:
                hits += sum(expert in cache for expert in experts)
                total += len(experts)
            for expert in experts:
                cache[expert] = None
                cache.move_to_end(expert)
            while len(cache) > size:
                cache.popitem(last=False)
    return hits / total


def recorder_of(llm: Any) -> Any:
    """Return what reads the choices of a Llama's model. Errors: SystemExit for a dense one."""
    from draftwood.engine.routing import RoutingRecorder

    return RoutingRecorder(
        llm.model,
        n_experts=number(llm, "expert_count"),
        n_experts_used=number(llm, "expert_used_count"),
        n_threads=llm.n_threads,
    )


def number(llm: Any, key: str) -> int:
    """Return a number of the model's metadata. Errors: SystemExit where it has none."""
    arch = llm.metadata["general.architecture"]
    try:
        return int(llm.metadata[f"{arch}.{key}"])
    except KeyError:
        raise SystemExit(f"the model's metadata has no {arch}.{key}: expected a mixture of experts") from None


def plain_text(llm: Any, n_tokens: int, temp: float) -> list[int]:
    """Return tokens that the model writes, greedy at `temp` 0, else drawn from its whole vocabulary."""
    written = llm.generate(llm.tokenize(PROMPT), temp=temp, top_k=0, top_p=1.0, min_p=0.0)
    with closing(written):
        return [int(token) for token in islice(written, n_tokens)]


def scheduled_text(llm: Any, n_tokens: int, n_accepted: int) -> list[int]:
    """Return the tokens of rounds that keep so many drafts each, whatever the target says, and its next."""
    from draftwood._llama_cpp import llama_cpp as api

    def greedy() -> int:
        logits = np.ctypeslib.as_array(api.llama_get_logits_ith(llm.ctx, -1), shape=(llm.n_vocab(),))
        return int(logits.argmax())

    llm.reset()
    llm.eval(llm.tokenize(PROMPT))
    tokens: list[int] = []
    while len(tokens) < n_tokens:
        newest = greedy()
        llm._engine.propose(newest, n_accepted)
        drafted = llm._engine.draft()[:n_accepted]
        if len(drafted) < n_accepted:
            raise SystemExit(f"{len(drafted)} tokens were drafted, expected {n_accepted}")
        tokens += [newest, *drafted]
        llm.eval([newest, *drafted])
    return tokens


def repeats(tokens: Sequence[int]) -> float:
    """Return which part of the phrases of eight tokens occurs again in the text."""
    phrases = list(zip(*(tokens[i:] for i in range(PHRASE)), strict=False))
    seen = Counter(phrases)
    return sum(n for n in seen.values() if n > 1) / len(phrases)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model", help="a GGUF with experts")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the text")
    parser.add_argument("--temp", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--seed", type=int, default=1, help="of the text, if it is drawn")
    parser.add_argument(
        "--draft", type=int, default=0, metavar="N", help="write in rounds that keep N drafts"
    )
    parser.add_argument("--drafter", metavar="GGUF", help="a DFlash drafter; else the MTP block drafts")
    parser.add_argument("--gpu-layers", type=int, default=0, metavar="N", help="-1: all")
    args = parser.parse_args(arguments)
    from draftwood import Llama
    from draftwood.options import MAX_DRAFT_VOCAB

    drafting = {"drafter": args.drafter, "speculation": "dflash" if args.drafter else "mtp"}
    drafting["draft_vocab"] = MAX_DRAFT_VOCAB  # text of random weights uses all tokens alike
    began = time.perf_counter()
    llm = Llama(
        args.model,
        n_ctx=args.tokens + BATCH,
        n_gpu_layers=args.gpu_layers,
        exact=False,
        seed=args.seed,
        verbose=False,
        draft_tokens=max(args.draft, 1),
        **(drafting if args.draft else {"speculation": "off"}),
    )
    with closing(llm):
        loaded = time.perf_counter()
        if args.draft:
            tokens = scheduled_text(llm, args.tokens, args.draft)
        else:
            tokens = plain_text(llm, args.tokens, args.temp)
        written = time.perf_counter()
        found = figures(recorder_of(llm).choices(tokens), number(llm, "expert_count"), args.draft + 1)
    ended = time.perf_counter()
    text = {"tokens": len(tokens), "kinds": len(set(tokens)), "repeats": round(repeats(tokens), 3)}
    took = {"load": loaded - began, "write": written - loaded, "record": ended - written}
    seconds = {name: round(value, 1) for name, value in took.items()}
    print(json.dumps({"text": text, "seconds": seconds, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
