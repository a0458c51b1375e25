"""Measure mean tokens per round of a DFlash drafter through llama.cpp's C API alone, greedy text.

Rounds as design section 10 defines them, prompts and lengths as accept.py. The text is the target's own plain
greedy text, so a round only needs the features of what came before it.
Must not know: torch, training. Needs draftwood and the `tokenizers` package.
Usage: python -m tools.tiny_moe.dflash_accept [DRAFTER.gguf] [--prompts 24]; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from bench.rounds import Rounds, mean_tokens
from tools.tiny_moe.accept import NEW, heldout_ids, prompts
from tools.tiny_moe.corpus import MODEL
from tools.tiny_moe.dflash_native import Drafter
from tools.tiny_moe.native import Rows

DEPTHS = (4, 8, 15)


def write(native: Drafter, prompt: list[int]) -> tuple[list[int], Rows]:
    """Return the prompt and NEW greedy tokens of the target, and the features of all but the last of them."""
    native.clear()
    ids = list(prompt)
    features, logits = native.read(ids)
    rows = [features]
    while True:
        ids.append(int(logits[-1].argmax()))
        if len(ids) == len(prompt) + NEW:
            return ids, np.concatenate(rows)
        features, logits = native.read(ids[-1:], len(ids) - 1)
        rows.append(features)


def rounds(native: Drafter, ids: list[int], features: Rows, first: int, depth: int) -> Rounds:
    """Draft the text round by round from its token `first` on: (newest token's index, tokens emitted)."""
    native.cut(0)
    out, fed, t = [], 0, first
    while t + depth + 1 < len(ids):
        native.inject(features[fed:t], range(fed, t))  # what the round before has accepted
        fed = t
        drafts = native.draft(ids[t], t, depth)
        right = [d == ids[t + 1 + i] for i, d in enumerate(drafts)]
        emitted = 1 + (right.index(False) if False in right else depth)
        out.append((t, emitted))
        t += emitted
    return out


def measure(drafter: Path, n_prompts: int, threads: int = 1) -> dict[str, dict[str, list[float]]]:
    """Return, by category, mean tokens and repeat share at DEPTHS drafts."""
    from tokenizers import Tokenizer

    out = {}
    held = heldout_ids(Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    with Drafter(MODEL / "tiny-moe-f16.gguf", drafter, 512, threads) as native:
        for category, records in held.items():
            texts: dict[int, list[tuple[list[int], Rounds]]] = {d: [] for d in DEPTHS}
            for prompt in prompts(records)[:n_prompts]:
                ids, features = write(native, prompt)
                for depth in DEPTHS:
                    texts[depth].append((ids, rounds(native, ids, features, len(prompt), depth)))
            figures = [mean_tokens(texts[d]) for d in DEPTHS]
            out[category] = {"mean_tokens": [m for m, _ in figures], "repeat_share": [s for _, s in figures]}
            print(f"{category}: {out[category]}", file=sys.stderr)
    return out


def main() -> None:
    """Run from the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("drafter", type=Path, nargs="?", default=MODEL / "dflash-f16.gguf")
    p.add_argument("--prompts", type=int, default=24)
    a = p.parse_args()
    print(json.dumps({"depths": DEPTHS, **measure(a.drafter, a.prompts)}))


if __name__ == "__main__":
    main()
