"""Measure held-out loss and mean tokens per round of a checkpoint with the torch model.

Must not know: training, GGUF, the engine (accept.py measures that; both use its definition of a round).
Usage: python -m tools.tiny_moe.evaluate CHECKPOINT_FOLDER; the last line is JSON.
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

from bench.rounds import Rounds, mean_tokens
from tools.tiny_moe.accept import DEPTH, NEW, PROMPT, TEMPERATURES, heldout_ids, prompts
from tools.tiny_moe.checkpoint import load_state
from tools.tiny_moe.corpus import MODEL
from tools.tiny_moe.model import TinyMoe


@torch.no_grad()
def loss(model: TinyMoe, records: list[list[int]]) -> float:
    """Return mean nats per token over the records, each read from its start."""
    device, total, n = model.model.embed_tokens.weight.device, 0.0, 0
    for at in range(0, len(records), 16):
        some = records[at : at + 16]
        ids = torch.zeros(len(some), max(map(len, some)), dtype=torch.long)
        for i, r in enumerate(some):
            ids[i, : len(r)] = torch.tensor(r)
        ids = ids.to(device)
        lengths = torch.tensor([len(r) for r in some], device=device)
        logits = model.logits(model.model(ids)[0])[:, :-1].float()
        each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        keep = torch.arange(1, ids.shape[1], device=device) < lengths[:, None]
        total, n = total + float((each.view_as(keep) * keep).sum()), n + int(keep.sum())
    return total / n


@torch.no_grad()
def generate(model: TinyMoe, start: Tensor, temperature: float) -> Tensor:
    """Extend start i64 [B, PROMPT] by NEW tokens of the trunk, reading the whole text anew for each."""
    g = torch.Generator(start.device).manual_seed(0)
    ids = F.pad(start, (0, NEW))
    for t in range(PROMPT, PROMPT + NEW):
        logits = model.logits(model.model(ids)[0][:, t - 1]).float()
        if temperature:
            ids[:, t] = torch.multinomial((logits / temperature).softmax(-1), 1, generator=g)[:, 0]
        else:
            ids[:, t] = logits.argmax(-1)
    return ids


@torch.no_grad()
def hits(model: TinyMoe, ids: Tensor) -> Tensor:
    """Return bool [B, T, DEPTH]: is draft n of the chain that starts after token t equal to token t+1+n.

    The chain reads the text instead of its own drafts, which is the same while it is right; what follows
    the first miss is not counted.
    """
    h, _ = model.model(ids)
    rows, _ = model.draft_rows(ids, h, DEPTH)
    out = torch.zeros(*ids.shape, DEPTH, dtype=torch.bool, device=ids.device)
    for n, row in enumerate(rows):  # row p ends a chain that read token p+1-n first; it guesses token p+2
        right = model.logits(row).argmax(-1)[:, n:-1] == ids[:, n + 2 :]
        out[:, 1 : 1 + right.shape[1], n] = right
    return out


def rounds(hit: Tensor, n_ids: int, depth: int) -> Rounds:
    """Walk the verify rounds of one text of n_ids tokens; hit [T, DEPTH] as `hits` returns."""
    out, t = [], PROMPT  # the first new token comes from the prompt's evaluation
    while t + depth + 1 < n_ids:
        emitted = 1 + int(hit[t, :depth].long().cumprod(0).sum())
        out.append((t, emitted))
        t += emitted
    return out


def acceptance(model: TinyMoe, records: list[list[int]], temperature: float) -> dict[str, list[float]]:
    """Return mean tokens per round and repeat share at 1..DEPTH drafts."""
    device = model.model.embed_tokens.weight.device
    ids = generate(model, torch.tensor(prompts(records), device=device), temperature)
    hit, texts = hits(model, ids).cpu(), ids.tolist()
    figures = [
        mean_tokens((t, rounds(h, len(t), depth)) for h, t in zip(hit, texts, strict=True))
        for depth in range(1, DEPTH + 1)
    ]
    return {"mean_tokens": [m for m, _ in figures], "repeat_share": [s for _, s in figures]}


def report(model: TinyMoe, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return held-out loss and mean tokens per round of every category."""
    model.eval()
    return {
        c: {"loss": round(loss(model, records), 4)}
        | {str(t): acceptance(model, records, t) for t in TEMPERATURES}
        for c, records in heldout_ids(tokenizer).items()
    }


def main() -> None:
    """Run from the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint", type=Path)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = p.parse_args()
    model = TinyMoe()
    model.load_state_dict(load_state(a.checkpoint))
    print(json.dumps(report(model.to(a.device), Tokenizer.from_file(str(MODEL / "tokenizer.json")))))


if __name__ == "__main__":
    main()
