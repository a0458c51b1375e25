"""Hold a tiny-moe GGUF in llama.cpp against transformers' modules in float32 on held-out text.

Bounds: normalised L2 <= 2e-2, same first choice >= 99.5 %, mean KL <= 1e-3. Must not know: training.
Usage: python -m tools.tiny_moe.parity [MODEL.gguf]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.tiny_moe.corpus import MODEL, read_heldout
from tools.tiny_moe.export import state_of
from tools.tiny_moe.model import TINY
from tools.tiny_moe.native import Native
from tools.tiny_moe.reference import reference

BOUNDS = {"l2": 2e-2, "differ": 5e-3, "kl": 1e-3}
LENGTH = 252  # tokens of one text


class Sum:
    """Add up the distance of one kind of array over texts."""

    def __init__(self) -> None:
        self.error = self.norm = self.kl = 0.0
        self.differ = self.n = 0

    def add(self, found: Tensor, expected: Tensor, choice: bool) -> None:
        """Count rows [n, m]; `choice` for logits, whose first choice and distribution count too."""
        self.error += float((found.double() - expected.double()).pow(2).sum())
        self.norm += float(expected.double().pow(2).sum())
        self.n += len(found)
        if choice:
            self.differ += int((found.argmax(-1) != expected.argmax(-1)).sum())
            p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
            self.kl += float((p.exp() * (p - q)).sum())

    def result(self, choice: bool) -> dict[str, float]:
        """Return the figures that BOUNDS names."""
        out = {"l2": (self.error / self.norm) ** 0.5}
        return out | ({"differ": self.differ / self.n, "kl": self.kl / self.n} if choice else {})


def texts(positions: int) -> list[list[int]]:
    """Return held-out texts of LENGTH tokens, categories in turn, until they hold that many positions."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    by: dict[str, list[list[int]]] = {}
    for r in read_heldout():
        ids = tokenizer.encode(r["text"]).ids
        if len(ids) >= LENGTH:
            by.setdefault(r["category"], []).append(ids[:LENGTH])
    turns = [ids for group in zip(*by.values(), strict=False) for ids in group]
    return turns[: -(-positions // LENGTH)]


def compare(
    model: Path, positions: int = 2000, reference_of: Path | None = None
) -> dict[str, dict[str, float]]:
    """Return l2, differ and kl of `target` and `mtp` logits and l2 of `rows` and `mtp_rows`.

    The reference has the weights of the GGUF `reference_of`, by default of the model itself.
    """
    state = state_of(reference_of or model)
    expected = reference({k: torch.from_numpy(v) for k, v in state.items()}, TINY)
    kinds = {"rows": False, "target": True, "mtp_rows": False, "mtp": True}
    sums = {k: Sum() for k in kinds}
    with Native(model) as native:
        for ids in texts(positions):
            pairs = zip(kinds.items(), native.read(ids), expected(torch.tensor([ids])), strict=True)
            for (kind, choice), found, wanted in pairs:
                sums[kind].add(torch.from_numpy(np.ascontiguousarray(found)), wanted[0], choice)
    return {k: s.result(kinds[k]) for k, s in sums.items()}


def main() -> None:
    """Run from the command line; the last line is one JSON object."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, nargs="?", default=MODEL / "tiny-moe-f16.gguf")
    p.add_argument("--positions", type=int, default=2000)
    a = p.parse_args()
    print(
        json.dumps(
            {
                k: {n: float(f"{x:.3g}") for n, x in v.items()}
                for k, v in compare(a.model, a.positions).items()
            }
        )
    )


if __name__ == "__main__":
    main()
