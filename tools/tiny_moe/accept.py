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
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tools.tiny_moe.corpus import MODEL, read_heldout
from tools.tiny_moe.text import CATEGORIES

PROMPT, NEW, PROMPTS, DEPTH, REPEAT = 128, 128, 24, 5, 16
TEMPERATURES = (0.0, 0.8)

Rounds = list[tuple[int, int]]  # (index of the newest token when the round starts, tokens it emitted)


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


def repeats(ids: list[int], t: int) -> bool:
    """Tell whether the REPEAT tokens that end with ids[t] already occurred earlier in ids."""
    tail = ids[t + 1 - REPEAT : t + 1]
    return any(ids[i : i + REPEAT] == tail for i in range(t + 1 - REPEAT))


def mean_tokens(texts: Iterable[tuple[list[int], Rounds]]) -> tuple[float, float]:
    """Return mean tokens per round over the texts and the share of rounds left out as repeats."""
    counted = [(emitted, repeats(ids, t)) for ids, rounds in texts for t, emitted in rounds]
    kept = [emitted for emitted, repeated in counted if not repeated]
    return round(sum(kept) / len(kept), 3), round(1 - len(kept) / len(counted), 3)


def run(llm: Any, prompt: list[int], temperature: float) -> tuple[list[int], Rounds]:
    """Generate NEW tokens and return all ids and the whole rounds, read off the engine's round counter."""
    llm.reset()
    llm.reset_speculation_stats()
    ids, seen = list(prompt), []
    options = {"temp": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
    for token in islice(llm.generate(prompt, **options), NEW):
        ids.append(token)
        seen.append(llm.speculation_stats.rounds)
    rounds = [(PROMPT + seen.index(n) - 1, seen.count(n)) for n in sorted(set(seen))]
    return ids, rounds[1:-1]  # the first token belongs to no round, and the last round may be cut short


def measure(model: Path) -> dict[str, Any]:
    """Return, by category and temperature, mean tokens and repeat share at 1..DEPTH drafts."""
    from draftwood import Llama

    held = heldout_ids(Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    out: dict[str, Any] = {
        c: {str(t): {"mean_tokens": [], "repeat_share": []} for t in TEMPERATURES} for c in held
    }
    for depth in range(1, DEPTH + 1):
        options = {
            "n_ctx": 512,
            "n_threads": 1,
            "verbose": False,
        }  # one thread: as fast at this size, less noise
        llm = Llama(str(model), speculation="mtp", draft_tokens=depth, **options)
        for category, records in held.items():
            for temperature in TEMPERATURES:
                llm.set_seed(0)
                texts = [run(llm, p, temperature) for p in prompts(records)]
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
