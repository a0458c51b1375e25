"""Train the DFlash drafter on one GPU within a time budget, on texts that the frozen trunk wrote itself.

First the trunk continues prompts from the corpus, half of them greedily, half at temperature 0.8; then blocks
at random places of those texts learn the trunk's distribution (half soft, half its first choice).
Checkpoints: OUT/part-N.safetensors, weights as the GGUF holds them. Must not know: GGUF names, llama.cpp.
Usage: python -m tools.tiny_moe.dflash_train TOKENS.npy OUT [--minutes 7 --write-minutes 1.2]
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tools.tiny_moe import training
from tools.tiny_moe.checkpoint import save_state
from tools.tiny_moe.corpus import MODEL
from tools.tiny_moe.dflash import DFlash, read
from tools.tiny_moe.dflash_evaluate import report, target
from tools.tiny_moe.model import TinyMoe
from tools.tiny_moe.optim import Optimizer
from tools.tiny_moe.training import as_stored, load_tokens, parser, prepare, run, write_report
from tools.tiny_moe.writer import Writer


@dataclass(frozen=True)
class Plan:
    """What a run does; times in minutes, of writing and of the training after it."""

    minutes: float = 7.0
    write_minutes: float = 1.2
    batch: int = 128
    anchors: int = 32  # blocks of one text and step
    prompt: int = 192
    length: int = 384
    write_batch: int = 4096
    decay: float = 6.0  # drafts over which the weight of a position falls by e
    lr: float = 4e-3
    steps: int = 10**9
    seed: int = 0


LENGTHS = (5, 9, 16, 16)  # rows of a block, drawn evenly: drafters are asked for fewer drafts too


def write_texts(model: TinyMoe, data: Tensor, plan: Plan) -> Tensor:
    """Return texts i16 [N, length] whose tokens from `prompt` on are the trunk's; N as time allows."""
    device = data.device
    half = torch.float16 if device.type == "cuda" else torch.float32
    writer = Writer(model, plan.write_batch, plan.prompt, plan.length, half)
    offsets = torch.arange(plan.prompt, device=device)
    temperature = 0.8 * (torch.arange(plan.write_batch, device=device) % 2).float().unsqueeze(1)
    texts: list[Tensor] = []
    start = time.time()
    while not texts or time.time() - start < 60 * plan.write_minutes:
        at = torch.randint(len(data) - plan.prompt, (plan.write_batch, 1), device=device)
        texts.append(writer.write(data[at + offsets].long(), temperature).to(torch.int16).cpu())
        if len(texts) == 1:  # compiling is over: the clock starts here
            start = time.time()
    spent = max(time.time() - start, 1e-9)
    n = (len(texts) - 1) * plan.write_batch * (plan.length - plan.prompt)
    print(f"wrote {len(texts)} x {plan.write_batch} texts, {n / spent:,.0f} tok/s", flush=True)
    return torch.cat(texts).to(device)


def draft_loss(
    rows: Tensor, wanted: Tensor, labels: Tensor, head: Tensor, used: Tensor, decay: float
) -> tuple[Tensor, Tensor]:
    """Return the weighted cross entropy of all drafts against the trunk, and f32 [2]: it and mean tokens.

    rows, wanted f32 [B, A, N, width]: the drafter's and the trunk's normed rows for drafts 1..N; labels i64
    [B, A, N] the text's tokens; used bool [B, A, N]. A draft counts more where all before it are right.
    """
    log_q = F.linear(rows, head).float().log_softmax(-1)
    with torch.no_grad():
        logits = F.linear(wanted, head).float()
        p = 0.5 * logits.softmax(-1)
        right = (log_q.argmax(-1) == labels) & used
        chain = right.float().cumprod(-1)
        reached = F.pad(chain, (1, 0), value=1.0)[..., :-1]
        fall = torch.exp(-torch.arange(rows.shape[2], device=rows.device) / decay)
        weight = fall * (0.25 + 0.75 * reached) * used
        tokens = 1 + (chain.sum(-1) * used[..., -1]).sum() / used[..., -1].sum().clamp(min=1)
    hard = -log_q.gather(-1, logits.argmax(-1, keepdim=True)).squeeze(-1)
    loss = ((-(p * log_q).sum(-1) + 0.5 * hard) * weight).sum() / weight.sum()
    return loss, torch.stack([loss.detach(), tokens])


class Step(training.Step):
    """One step of the drafter on texts of the frozen trunk."""

    def __init__(self, trunk: TinyMoe, drafter: DFlash, plan: Plan) -> None:
        super().__init__(Optimizer(drafter), 2, trunk.model.embed_tokens.weight.device)
        self.trunk, self.drafter, self.plan = trunk, drafter, plan
        self.gain = torch.ones(drafter.fc.in_features, device=self.device)
        self.ids = torch.zeros(plan.batch, plan.length, dtype=torch.long, device=self.device)
        self.anchors = torch.zeros(plan.batch, plan.anchors, dtype=torch.long, device=self.device)
        self.lengths = torch.full_like(self.anchors, drafter.s.block)
        self.loss, self.blocks = draft_loss, drafter.blocks
        if self.device.type == "cuda":
            for layer in trunk.model.layers:
                layer.compile(dynamic=False)
            self.loss = torch.compile(draft_loss, dynamic=False)
            self.blocks = torch.compile(drafter.blocks, dynamic=False)

    def draw(self, texts: Tensor) -> None:
        """Choose texts, block places (three of four in what the trunk wrote) and block lengths."""
        p, n = self.plan, self.drafter.s.block
        chosen = torch.randint(len(texts), (p.batch,), device=self.device)
        self.ids.copy_(texts[chosen])
        u = torch.rand(self.anchors.shape, device=self.device)
        first = torch.where(torch.rand_like(u) < 0.75, float(p.prompt - 1), 8.0)
        self.anchors.copy_(first + u * (p.length - n - first))
        lengths = torch.tensor(LENGTHS, device=self.device)
        self.lengths.copy_(lengths[torch.randint(len(LENGTHS), self.anchors.shape, device=self.device)])

    def measure(self) -> None:
        """Set the gain of each feature, so that `fc` sees inputs of the same size, from the texts drawn."""
        with torch.no_grad():
            features, _ = read(self.trunk.model, self.ids[:32], self.drafter.s.taps)
            self.gain.copy_(features.pow(2).mean((0, 1)).add(1e-6).rsqrt())

    def once(self) -> Tensor:
        """Run forward, backward and update on what was drawn."""
        embed, n = self.trunk.model.embed_tokens.weight, self.drafter.s.block
        with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
            with torch.no_grad():
                features, h = read(self.trunk.model, self.ids, self.drafter.s.taps)
                features = features * self.gain
                place = (self.anchors.unsqueeze(-1) + torch.arange(n - 1, device=self.device)).flatten(1)
                wanted = h.gather(1, place.unsqueeze(-1).expand(-1, -1, h.shape[-1]))
                labels = self.ids.gather(1, place + 1).unflatten(1, (-1, n - 1))
                used = torch.arange(1, n, device=self.device) < self.lengths.unsqueeze(-1)
            rows = self.blocks(features, self.ids, self.anchors, self.lengths, embed)[:, :, 1:]
            wanted = wanted.unflatten(1, (-1, n - 1))
            loss, stats = self.loss(rows, wanted, labels, embed, used, self.plan.decay)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return stats

    def __call__(self, texts: Tensor, lr: float) -> None:
        """Train on newly drawn blocks of texts at a learning rate."""
        self.draw(texts)
        self.advance(lr)

    def state(self) -> dict[str, Tensor]:
        """Return the drafter's weights with the gain of the features in `fc`."""
        state = dict(self.drafter.state_dict())
        state["fc.weight"] = state["fc.weight"] * self.gain
        return state


def train(tokens: Path, out: Path, plan: Plan) -> None:
    """Run the plan; write the final weights and report.json."""
    device = prepare(out, plan.seed)
    begun = time.time()
    texts = write_texts(target(device), load_tokens(tokens, device), plan)
    torch.cuda.empty_cache()
    trunk = target(device)
    step = Step(trunk, DFlash().to(device), plan)
    step.draw(texts)
    step.measure()

    def go(share: float) -> None:
        step(texts, plan.lr * share)

    def say(figures: list[float], seconds: float) -> str:
        loss, mean = figures
        return f"{seconds:4.0f}s step {step.count}; loss {loss:.3f}, tokens {mean:.2f}"

    def save(_: float) -> None:
        save_state(step.state(), out)

    def compiled() -> None:
        print(f"{time.time() - begun:.0f}s until the first step", flush=True)

    run(step, plan.minutes, plan.steps, go, say, save, say_every=50, save_every=60, compiled=compiled)
    final = as_stored(DFlash().to(device), step.state())
    figures = report(target(device), final, Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    write_report(out, {"steps": step.count, "texts": len(texts), **figures})


def main() -> None:
    """Run from the command line."""
    a = vars(parser(__doc__, Plan()).parse_args())
    tokens, out = a.pop("tokens"), a.pop("out")
    train(tokens, out, Plan(**a))


if __name__ == "__main__":
    main()
