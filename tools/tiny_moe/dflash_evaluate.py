"""Measure mean tokens per round of a DFlash drafter on held-out text, with the torch modules.

Rounds and texts as in evaluate.py; drafts are greedy. Must not know: training, llama.cpp.
Usage: python -m tools.tiny_moe.dflash_evaluate [DRAFTER.gguf]; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from bench.rounds import mean_tokens
from tools.tiny_moe.accept import PROMPT, TEMPERATURES, heldout_ids, prompts
from tools.tiny_moe.corpus import MODEL
from tools.tiny_moe.dflash import DFlash, read
from tools.tiny_moe.evaluate import generate, rounds
from tools.tiny_moe.export import state_of
from tools.tiny_moe.model import TinyMoe

DEPTHS = (1, 2, 4, 8, 15)


def target(device: torch.device | str = "cpu") -> TinyMoe:
    """Return the committed target, frozen."""
    model = TinyMoe().eval().requires_grad_(False)
    state = state_of(MODEL / "tiny-moe-f16.gguf")
    model.load_state_dict({k: torch.from_numpy(v) for k, v in state.items()})
    return model.to(device)


@torch.no_grad()
def hits(model: TinyMoe, drafter: DFlash, ids: Tensor, depth: int, first: int = PROMPT) -> Tensor:
    """Return bool [B, T, depth]: is draft n of the block that starts with token t equal to token t+n.

    Blocks start at tokens from `first` on, wherever depth tokens follow; elsewhere all is false.
    """
    embed = model.model.embed_tokens.weight
    features, _ = read(model.model, ids, drafter.s.taps)
    out = torch.zeros(*ids.shape, depth, dtype=torch.bool, device=ids.device)
    drafts = torch.arange(1, depth + 1, device=ids.device)
    for at in torch.arange(first, ids.shape[1] - depth, device=ids.device).split(16):
        anchors = at.expand(len(ids), -1)
        rows = drafter.blocks(features, ids, anchors, torch.full_like(anchors, depth + 1), embed)
        guess = F.linear(rows[:, :, 1 : depth + 1], embed).argmax(-1)
        out[:, at] = guess == ids[:, at.unsqueeze(1) + drafts]
    return out


def acceptance(
    model: TinyMoe, drafter: DFlash, records: list[list[int]], temperature: float
) -> dict[str, list[float]]:
    """Return mean tokens per round and repeat share at DEPTHS drafts."""
    device = model.model.embed_tokens.weight.device
    ids = generate(model, torch.tensor(prompts(records), device=device), temperature)
    texts, figures = ids.tolist(), []
    for depth in DEPTHS:
        hit = hits(model, drafter, ids, depth).cpu()
        figures.append(mean_tokens((t, rounds(h, len(t), depth)) for h, t in zip(hit, texts, strict=True)))
    return {"mean_tokens": [m for m, _ in figures], "repeat_share": [s for _, s in figures]}


def report(model: TinyMoe, drafter: DFlash, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return mean tokens per round by category and temperature."""
    drafter.eval()
    return {
        c: {str(t): acceptance(model, drafter, records, t) for t in TEMPERATURES}
        for c, records in heldout_ids(tokenizer).items()
    }


def main() -> None:
    """Run from the command line."""
    from tools.tiny_moe.dflash_export import load

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("drafter", type=Path, nargs="?", default=MODEL / "dflash-f16.gguf")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = p.parse_args()
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    print(json.dumps({"depths": DEPTHS, **report(target(a.device), load(a.drafter).to(a.device), tokenizer)}))


if __name__ == "__main__":
    main()
