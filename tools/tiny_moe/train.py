"""Train tiny-moe on one GPU within a time budget: the trunk on text, the MTP block on the trunk itself.

Learning rates follow elapsed time, so any machine ends on schedule. Checkpoints: OUT/resume.pt (everything,
for --resume) and OUT/part-N.safetensors (weights as the GGUF holds them, parts under 16 MiB).
Must not know: GGUF, how the corpus was made.
Usage: python -m tools.tiny_moe.train TOKENS.npy OUT --minutes 18
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tools.tiny_moe import training
from tools.tiny_moe.checkpoint import save_state
from tools.tiny_moe.corpus import MODEL
from tools.tiny_moe.evaluate import report
from tools.tiny_moe.model import TinyMoe
from tools.tiny_moe.optim import Optimizer
from tools.tiny_moe.training import WARM, as_stored, load_tokens, parser, prepare, run, write_report


@dataclass(frozen=True)
class Plan:
    """What a run does; times in minutes."""

    minutes: float = 18.0
    batch: int = 64
    length: int = 512
    depth: int = 5  # unrolled draft steps
    draft_rows: int = 32  # sequences of a batch that train the MTP block
    lr: float = 4e-3
    muon: bool = True
    graph: bool = True
    steps: int = 10**9
    seed: int = 0


DepthLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def draft_loss(row: Tensor, target: Tensor, head: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted cross entropy of a draft depth against the trunk, part soft, part its first choice.

    row f32 [B, T, width]; target [B, T, vocab] trunk logits of the same token; weight f32 [B, T].
    """
    log_q = F.linear(row, head).float().log_softmax(-1)
    p = target.float().softmax(-1)
    soft = -(p * log_q).sum(-1)
    hard = -log_q.gather(-1, target.argmax(-1, keepdim=True)).squeeze(-1)
    return ((0.7 * soft + 0.3 * hard) * weight).sum() / weight.sum()


def losses(model: TinyMoe, ids: Tensor, plan: Plan, depth_loss: DepthLoss) -> tuple[Tensor, Tensor]:
    """Return the total loss and a f32 [2 + depth] report: trunk loss, balance, each depth's agreement.

    The MTP block sees detached rows, embedding and head: it follows the trunk and never pulls it.
    """
    h, balance = model.model(ids)
    logits = model.logits(h)
    trunk = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
    n = plan.draft_rows
    target, some = logits[:n].detach(), ids[:n]
    choice = target.argmax(-1)
    agree = F.pad((choice[:, :-1] == some[:, 1:]).float(), (0, 1))[:, :-1]
    rows, draft_balance = model.draft_rows(some, h[:n].detach(), plan.depth)
    head = model.model.embed_tokens.weight.detach()
    weight, total, rates = torch.ones_like(agree), trunk + 0.01 * (balance + draft_balance), []
    for d, row in enumerate(rows):
        if d:  # text that the trunk itself would have written is what a chain meets when it is used
            weight = F.pad(weight, (1, 0))[:, :-1] * agree
        reached = (torch.arange(agree.shape[1], device=ids.device) >= d).float()
        total = total + 0.8**d * depth_loss(row, target[:, 1:], head, (0.2 + 0.8 * weight) * reached)
        with torch.no_grad():
            same = (F.linear(row.detach(), head).argmax(-1) == choice[:, 1:]).float()
            rates.append((same * weight).sum() / weight.sum())
    return total, torch.stack([trunk.detach(), balance.detach(), *rates])


class Step(training.Step):
    """One step of trunk and MTP block together, compiled by parts."""

    def __init__(self, model: TinyMoe, optimizer: Optimizer, plan: Plan, device: torch.device) -> None:
        super().__init__(optimizer, 2 + plan.depth, device, capture=plan.graph)
        self.model, self.plan = model, plan
        self.ids = torch.zeros(plan.batch, plan.length, dtype=torch.long, device=device)
        self.depth_loss: DepthLoss = draft_loss
        if device.type == "cuda":
            compile_parts(model)
            self.depth_loss = torch.compile(draft_loss, dynamic=False)

    def once(self) -> Tensor:
        """Run forward, backward and update on `self.ids`."""
        with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
            total, stats = losses(self.model, self.ids, self.plan, self.depth_loss)
        total.backward()
        self.optimizer.step()
        return stats

    def __call__(self, ids: Tensor, lr: float) -> None:
        """Train on ids i64 [batch, length] at a learning rate."""
        self.ids.copy_(ids)
        self.advance(lr)


def compile_parts(model: TinyMoe) -> None:
    """Compile each kind of block once instead of the whole model, which takes minutes."""
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    model.mtp.step = torch.compile(model.mtp.step, dynamic=False)  # type: ignore[method-assign]


def save(out: Path, step: Step, seconds: float) -> None:
    """Write weights in parts and the state that --resume reads."""
    weights = step.model.state_dict()
    save_state(weights, out)
    count = step.before + step.count
    state = {"model": weights, "optimizer": step.optimizer.state(), "seconds": seconds, "count": count}
    torch.save(state, out / "resume.tmp")
    (out / "resume.tmp").rename(out / "resume.pt")


def restore(out: Path, step: Step) -> float:
    """Load OUT/resume.pt into the step, its model and optimiser; return the seconds already spent."""
    state = torch.load(out / "resume.pt", map_location=step.device)
    step.model.load_state_dict(state["model"])
    step.optimizer.load(state["optimizer"])
    step.before = state["count"]
    return float(state["seconds"])


def train(tokens: Path, out: Path, plan: Plan, resume: bool) -> None:
    """Run the plan and write the final weights and report.json."""
    device = prepare(out, plan.seed)
    data = load_tokens(tokens, device)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    model = TinyMoe().to(device)
    step = Step(model, Optimizer(model, muon=plan.muon), plan, device)
    spent = restore(out, step) if resume else 0.0
    offsets = torch.arange(plan.length, device=device)

    def go(share: float) -> None:
        at = torch.randint(len(data) - plan.length, (plan.batch, 1), device=device)
        step(data[at + offsets].long(), plan.lr * share)

    def say(figures: list[float], seconds: float) -> str:
        speed = (step.count - WARM) * step.ids.numel() / seconds
        stats = [round(x, 3) for x in figures]
        return f"{seconds:5.0f}s step {step.count} {speed:,.0f} tok/s; loss, balance, agree {stats}"

    keep = partial(save, out, step)
    run(step, plan.minutes, plan.steps, go, say, keep, say_every=100, save_every=120, spent=spent)
    finish(out, step, tokenizer)


def finish(out: Path, step: Step, tokenizer: Tokenizer) -> None:
    """Round the weights as the GGUF will hold them and measure exactly those."""
    final = as_stored(TinyMoe().to(step.device), step.model.state_dict())
    steps = step.before + step.count
    write_report(out, {"steps": steps, "tokens": steps * step.ids.numel(), **report(final, tokenizer)})


def main() -> None:
    """Run from the command line."""
    p = parser(__doc__, Plan())
    p.add_argument("--resume", action="store_true")
    a = vars(p.parse_args())
    tokens, out, resume = (a.pop(k) for k in ("tokens", "out", "resume"))
    train(tokens, out, Plan(**a), resume)


if __name__ == "__main__":
    main()
