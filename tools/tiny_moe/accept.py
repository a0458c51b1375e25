"""Measure mean tokens per round of the MTP block with the engine, as design section 10 defines it.

Mean tokens per round = emitted tokens / verify rounds, bonus token included; prompts are 128 held-out tokens,
128 are generated; a round whose last 16 tokens occurred before in its text is left out and counted.
Must not know: torch, training. Needs draftwood and the `tokenizers` package.
Usage: python -m tools.tiny_moe.accept [MODEL.gguf]; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.rounds import generate_rounds, mean_tokens
from tools.tiny_moe.corpus import MODEL, read_heldout
from tools.tiny_moe.text import CATEGORIES

PROMPT, NEW, PROMPTS, DEPTH = 128, 128, 24, 5
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


def measure(model: Path) -> dict[str, Any]:
    """Return, by category and temperature, mean tokens and repeat share at 1..DEPTH drafts."""
    from draftwood import Llama

    held = heldout_ids(Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    out: dict[str, Any] = {
        c: {str(t): {"mean_tokens": [], "repeat_share": []} for t in TEMPERATURES} for c in held
    }
    for depth in range(1, DEPTH + 1):
        # one thread: as fast at this size, less noise
        llm = Llama(str(model), speculation="mtp", draft_tokens=depth, n_ctx=512, n_threads=1, verbose=False)
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
    print(json.dumps(measure(p.parse_args().model)))


if __name__ == "__main__":
    main()
