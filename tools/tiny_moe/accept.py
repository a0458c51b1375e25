"""Measure mean tokens per round of the MTP block and held-out loss, with the torch model.

Mean tokens per round = emitted tokens / verify rounds, bonus token included; 128 held-out tokens of prompt, 128
generated; a round whose last 16 tokens occurred before is left out and counted (design, section 10).
Must not know: training, GGUF.
Usage: python -m tools.tiny_moe.accept CHECKPOINT_FOLDER
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tools.tiny_moe.checkpoint import load_state
from tools.tiny_moe.corpus import MODEL, read_heldout
from tools.tiny_moe.model import TinyMoe
from tools.tiny_moe.text import CATEGORIES

PROMPT, NEW, PROMPTS, DEPTH, REPEAT = 128, 128, 24, 5, 16


def heldout_ids(tokenizer: Tokenizer) -> dict[str, list[list[int]]]:
    """Return the token ids of every held-out record, by category."""
    out: dict[str, list[list[int]]] = {c: [] for c in CATEGORIES}
    for r in read_heldout():
        out[r["category"]].append(tokenizer.encode(r["text"]).ids)
    return out


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
        each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(some), -1)
        keep = torch.arange(1, ids.shape[1], device=device) < lengths[:, None]
        total, n = total + float((each * keep).sum()), n + int(keep.sum())
    return total / n


@torch.no_grad()
def generate(model: TinyMoe, prompts: Tensor, temperature: float) -> Tensor:
    """Extend prompts i64 [B, PROMPT] by NEW tokens of the trunk; the whole text is read anew for each token."""
    g = torch.Generator(prompts.device).manual_seed(0)
    ids = F.pad(prompts, (0, NEW))
    for t in range(PROMPT, PROMPT + NEW):
        logits = model.logits(model.model(ids)[0][:, t - 1]).float()
        if temperature:
            ids[:, t] = torch.multinomial((logits / temperature).softmax(-1), 1, generator=g)[:, 0]
        else:
            ids[:, t] = logits.argmax(-1)
    return ids


@torch.no_grad()
def hits(model: TinyMoe, ids: Tensor) -> Tensor:
    """Return bool [B, T, DEPTH]: whether the depth-n draft started at token t (it read t, drafts t+n) equals the text.

    Reading the text instead of the drafts is exact for chains that are right so far, and the rest is not counted.
    """
    h, _ = model.model(ids)
    rows, _ = model.draft_rows(ids, h, DEPTH)
    out = torch.zeros(*ids.shape, DEPTH, dtype=torch.bool, device=ids.device)
    for n, row in enumerate(rows):  # row p is a chain that began at token p+1-n and guesses token p+2
        right = model.logits(row).argmax(-1)[:, n:-1] == ids[:, n + 2 :]
        out[:, 1 : 1 + right.shape[1], n] = right
    return out


def rounds(hit: Tensor, ids: list[int], depth: int) -> tuple[int, int, int]:
    """Walk one text's verify rounds; return emitted tokens, rounds, and rounds left out as repeats."""
    runs = [tuple(ids[i - REPEAT : i]) for i in range(REPEAT, len(ids) + 1)]
    emitted = count = skipped = 0
    first = {r: i for i, r in reversed(list(enumerate(runs)))}
    t = PROMPT  # the first new token; it is known and not yet in the cache when a round starts
    while t + depth + 1 < len(ids):
        accepted = int(hit[t, :depth].long().cumprod(0).sum())
        if first[runs[t + 1 - REPEAT]] < t + 1 - REPEAT:
            skipped += 1
        else:
            emitted, count = emitted + accepted + 1, count + 1
        t += accepted + 1
    return emitted, count, skipped


def mean_tokens(model: TinyMoe, records: list[list[int]], temperature: float) -> dict[str, object]:
    """Return mean tokens per round at 1..DEPTH drafts and the share of rounds left out, over PROMPTS prompts."""
    chosen = [r[:PROMPT] for r in records if len(r) >= PROMPT + NEW][:PROMPTS]
    if len(chosen) < PROMPTS:
        raise ValueError(f"found {len(chosen)} held-out records of {PROMPT + NEW} tokens, expected {PROMPTS}")
    ids = generate(model, torch.tensor(chosen, device=model.model.embed_tokens.weight.device), temperature)
    hit, texts = hits(model, ids).cpu(), ids.tolist()
    means, shares = [], []
    for depth in range(1, DEPTH + 1):
        sums = [sum(x) for x in zip(*(rounds(h, t, depth) for h, t in zip(hit, texts, strict=True)), strict=True)]
        means.append(round(sums[0] / max(sums[1], 1), 3))
        shares.append(round(sums[2] / (sums[1] + sums[2]), 3))
    return {"mean_tokens": means, "repeat_share": shares}


def report(model: TinyMoe, tokenizer: Tokenizer) -> dict[str, object]:
    """Return held-out loss and mean tokens per round of every category."""
    model.eval()
    out: dict[str, object] = {}
    for c, records in heldout_ids(tokenizer).items():
        by = {f"temperature_{t}": mean_tokens(model, records, t) for t in (0.0, 0.8)}
        out[c] = {"loss": round(loss(model, records), 4), **by}
    return out


def main() -> None:
    """Run from the command line; the last line is one JSON object."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint", type=Path)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = p.parse_args()
    model = TinyMoe()
    model.load_state_dict(load_state(a.checkpoint))
    print(json.dumps(report(model.to(a.device), Tokenizer.from_file(str(MODEL / "tokenizer.json")))))


if __name__ == "__main__":
    main()
