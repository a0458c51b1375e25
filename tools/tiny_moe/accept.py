"""Measure mean tokens per round of the MTP block or a DFlash drafter with the engine (design section 10).

Mean tokens per round = emitted tokens / verify rounds, bonus token included; prompts are 128 held-out tokens,
128 are generated; a round whose last 16 tokens occurred before in its text is left out and counted.
Must not know: torch, training. Needs draftwood and the `tokenizers` package.
Usage: python -m tools.tiny_moe.accept [MODEL.gguf] [--drafter DRAFTER.gguf]; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tools.tiny_moe.corpus import MODEL, read_heldout
from tools.tiny_moe.text import CATEGORIES

PROMPT, NEW, PROMPTS, DEPTH = 128, 128, 24, 5
BLOCK_DEPTHS = (4, 8, 15)  # of a DFlash drafter
TEMPERATURES = (0.0, 0.8)


def heldout_ids(tokenizer: Tokenizer) -> dict[str, list[list[int]]]:
    """Return the token ids of every held-out record, by category."""
    out: dict[str, list[list[int]]] = {c: [] for c in CATEGORIES}
    for record in read_heldout():
        out[record["category"]].append(tokenizer.encode(record["text"]).ids)
    return out


def prompts(records: list[list[int]]) -> list[list[int]]:
    """Return the first PROMPT tokens of the first PROMPTS records that are long enough."""
    chosen = [r[:PROMPT] for r in records if len(r) >= PROMPT + NEW][:PROMPTS]
    if len(chosen) < PROMPTS:
        raise ValueError(f"found {len(chosen)} records of {PROMPT + NEW} tokens or more, expected {PROMPTS}")
    return chosen


def measure(model: Path, drafter: Path | None = None) -> dict[str, Any]:
    """Return, by category and temperature, mean tokens and repeat share at 1..DEPTH drafts.

    With a drafter it drafts, at BLOCK_DEPTHS drafts, in place of the MTP block.
    """
    from draftwood import Llama
    from draftwood.bench.rounds import generate_rounds, mean_tokens

    held = heldout_ids(Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    out: dict[str, Any] = {
        c: {str(t): {"mean_tokens": [], "repeat_share": []} for t in TEMPERATURES} for c in held
    }
    how: dict[str, Any] = {"speculation": "dflash", "drafter": drafter} if drafter else {"speculation": "mtp"}
    for depth in BLOCK_DEPTHS if drafter else range(1, DEPTH + 1):
        # one thread: as fast at this size, less noise
        llm = Llama(str(model), **how, draft_tokens=depth, n_ctx=512, n_threads=1, verbose=False)
        for category, records in held.items():
            for temperature in TEMPERATURES:
                llm.set_seed(0)
                options = {"temp": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
                texts = [generate_rounds(llm, p, NEW, **options) for p in prompts(records)]
                for name, value in zip(("mean_tokens", "repeat_share"), mean_tokens(texts), strict=True):
                    out[category][str(temperature)][name].append(value)
            print(f"{depth} drafts, {category}: {out[category]['0.0']['mean_tokens'][-1]}", file=sys.stderr)
        llm.close()
    return out


def main() -> None:
    """Run from the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, nargs="?", default=MODEL / "tiny-moe-f16.gguf")
    p.add_argument("--drafter", type=Path)
    a = p.parse_args()
    print(json.dumps(measure(a.model, a.drafter)))


if __name__ == "__main__":
    main()
