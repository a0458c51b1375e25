"""Train tiny-moe on one GPU within a time budget: the trunk on text, the MTP block on the trunk itself.

Learning rates follow elapsed time, so any machine ends on schedule. Checkpoints: OUT/resume.pt (everything,
for --resume) and OUT/part-N.safetensors (weights as the GGUF holds them, parts under 16 MiB).
Must not know: GGUF, how the corpus was made.
Usage: python -m tools.tiny_moe.train TOKENS.npy OUT --minutes 18
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tools.tiny_moe.checkpoint import rounded, save_state
from tools.tiny_moe.corpus import MODEL
from tools.tiny_moe.evaluate import report
from tools.tiny_moe.model import TinyMoe
from tools.tiny_moe.optim import Optimizer


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


class Step:
    """One training step, compiled by parts and, if asked, captured whole as a CUDA graph."""

    def __init__(self, model: TinyMoe, optimizer: Optimizer, plan: Plan, device: torch.device) -> None:
        self.model, self.optimizer, self.plan, self.device = model, optimizer, plan, device
        self.ids = torch.zeros(plan.batch, plan.length, dtype=torch.long, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stats = torch.zeros(2 + plan.depth, device=device)
        self.count = self.before = 0  # steps of this run, and of the runs it resumes
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
        self.optimizer.lr.fill_(lr)
        if self.graph is not None:
            self.graph.replay()
        elif self.device.type == "cuda" and self.plan.graph:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # type: ignore[no-untyped-call]
                self.stats.copy_(self.once())
            torch.cuda.current_stream().wait_stream(side)
            if self.count == 5:
                self.capture()
        else:
            self.stats.copy_(self.once())
        self.count += 1

    def capture(self) -> None:
        """Record the step once; replays then cost no Python time."""
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.stats.copy_(self.once())


def compile_parts(model: TinyMoe) -> None:
    """Compile each kind of block once instead of the whole model, which takes minutes."""
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    model.mtp.step = torch.compile(model.mtp.step, dynamic=False)  # type: ignore[method-assign]


def rate(done: float, step: int) -> float:
    """Return the share of the peak learning rate at a share of the time: warm up, hold, fall to 1 %."""
    return min(1.0, step / 200) * min(1.0, max(0.01, (1 - done) / 0.6))


def load_tokens(path: Path, device: torch.device) -> Tensor:
    """Read u16 tokens of a .npy, .npy.xz to the device as i32."""
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as f:
        return torch.from_numpy(np.load(f).astype(np.int32)).to(device)


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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(plan.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    out.mkdir(parents=True, exist_ok=True)
    data = load_tokens(tokens, device)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    model = TinyMoe().to(device)
    step = Step(model, Optimizer(model, muon=plan.muon), plan, device)
    spent = restore(out, step) if resume else 0.0
    offsets = torch.arange(plan.length, device=device)
    start = said = saved = time.time()
    while step.count < plan.steps:
        done = (spent + (time.time() - start) * (step.count >= 6)) / (60 * plan.minutes)
        if done >= 1:
            break
        at = torch.randint(len(data) - plan.length, (plan.batch, 1), device=device)
        step(data[at + offsets].long(), plan.lr * rate(done, step.before + step.count))
        if step.count == 6:  # compiling is over: the schedule's clock starts here
            step.stats.tolist()
            start = time.time()
        if step.count % 100 == 0 and time.time() - said > 10:
            said = time.time()
            say(step, said - start)
        if time.time() - saved > 120:
            save(out, step, spent + time.time() - start)
            saved = time.time()
    save(out, step, spent + time.time() - start)
    finish(out, step, tokenizer)


def say(step: Step, seconds: float) -> None:
    """Print speed and the newest figures; a loss that is not finite ends the run."""
    stats = [round(x, 3) for x in step.stats.tolist()]
    speed = (step.count - 6) * step.ids.numel() / seconds
    print(f"{seconds:5.0f}s step {step.count} {speed:,.0f} tok/s; loss, balance, agree {stats}", flush=True)
    if not math.isfinite(stats[0]):
        raise FloatingPointError("the loss is not finite")


def finish(out: Path, step: Step, tokenizer: Tokenizer) -> None:
    """Round the weights as the GGUF will hold them and measure exactly those."""
    final = TinyMoe().to(step.device)
    final.load_state_dict({k: v.float() for k, v in rounded(step.model.state_dict()).items()})
    steps = step.before + step.count
    result = {"steps": steps, "tokens": steps * step.ids.numel(), **report(final, tokenizer)}
    (out / "report.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result), flush=True)


def main() -> None:
    """Run from the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("tokens", type=Path)
    p.add_argument("out", type=Path)
    d = Plan()
    for name in ("minutes", "lr"):
        p.add_argument(f"--{name}", type=float, default=getattr(d, name))
    for name in ("batch", "length", "depth", "draft_rows", "steps", "seed"):
        p.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(d, name))
    for name in ("muon", "graph"):
        p.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--resume", action="store_true")
    a = vars(p.parse_args())
    tokens, out, resume = (a.pop(k) for k in ("tokens", "out", "resume"))
    train(tokens, out, Plan(**a), resume)


if __name__ == "__main__":
    main()
