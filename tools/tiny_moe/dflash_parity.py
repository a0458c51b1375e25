"""Hold a DFlash drafter's logits in llama.cpp against the torch module on held-out text.

Both sides run target and drafter themselves, so errors of the features count. Bounds as in parity.py.
Must not know: training. Usage: python -m tools.tiny_moe.dflash_parity [DRAFTER.gguf]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tools.tiny_moe.corpus import MODEL
from tools.tiny_moe.dflash import DRAFT, DFlash, DraftShape, read
from tools.tiny_moe.dflash_evaluate import target
from tools.tiny_moe.dflash_export import load
from tools.tiny_moe.dflash_native import Drafter
from tools.tiny_moe.model import TinyMoe
from tools.tiny_moe.parity import Sum, texts

FIRST, LENGTH = 3, 252  # a block starts at the third token and every so often after it


def anchors(depth: int) -> range:
    """Return where blocks of `depth` drafts start in a text of LENGTH tokens, one after the other."""
    return range(FIRST, LENGTH - depth, depth + 1)


@torch.no_grad()
def expected(model: TinyMoe, drafter: DFlash, ids: list[int], depth: int, first: int = 0) -> torch.Tensor:
    """Return the torch drafter's logits of drafts 1..depth at every anchor, [anchors * depth, vocab].

    first: the position of the text's first token, as the drafter sees it.
    """
    text, at = torch.tensor([ids]), torch.tensor([list(anchors(depth))])
    features, _ = read(model.model, text, drafter.s.taps)
    embed = model.model.embed_tokens.weight
    rows = drafter.blocks(features, text, at, torch.full_like(at, depth + 1), embed, first)
    return F.linear(rows[0, :, 1 : depth + 1], embed).flatten(0, 1)


def found(native: Drafter, ids: list[int], depth: int, first: int = 0) -> torch.Tensor:
    """Return llama.cpp's logits for the same, features injected as a round of drafting would."""
    native.clear()
    features, _ = native.read(ids)
    out, fed = [], 0
    for at in anchors(depth):
        native.inject(features[fed:at], np.arange(first + fed, first + at))
        fed = at
        out.append(native.logits(ids[at], first + at, depth)[1:])
    return torch.from_numpy(np.concatenate(out))


def compare(
    drafter: Path,
    positions: int = 2000,
    depth: int = DRAFT.block - 1,
    shape: DraftShape = DRAFT,
    first: int = 0,
    reference_of: Path | None = None,
    **native_settings: Any,
) -> dict[str, float]:
    """Return l2, differ and kl of the drafter's logits over at least that many drafts.

    The reference has the weights of the GGUF `reference_of`, by default of the drafter itself, and `shape`;
    texts begin at position `first`. native_settings: of `Drafter`.
    """
    model, module, total = target(), load(reference_of or drafter, shape), Sum()
    with Drafter(MODEL / "tiny-moe-f16.gguf", drafter, **native_settings) as native:
        for ids in texts(-(-positions // (depth * len(anchors(depth)))) * LENGTH):
            total.add(found(native, ids, depth, first), expected(model, module, ids, depth, first), True)
    return total.result(True) | {"drafts": total.n}


def main() -> None:
    """Run from the command line; the last line is one JSON object."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("drafter", type=Path, nargs="?", default=MODEL / "dflash-f16.gguf")
    p.add_argument("--positions", type=int, default=2000)
    a = p.parse_args()
    print(json.dumps({k: float(f"{v:.3g}") for k, v in compare(a.drafter, a.positions).items()}))


if __name__ == "__main__":
    main()
