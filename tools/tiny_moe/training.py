"""What training the target and training its drafter share: clock, captured step, check points, final figures.

Learning rates follow elapsed time, so any machine ends on schedule; the first `WARM` steps, which compile, do
not count. Must not know: which model is trained, and on what.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tools.tiny_moe.checkpoint import rounded
from tools.tiny_moe.optim import Optimizer

WARM = 6  # steps until all is compiled and captured
Model = TypeVar("Model", bound=nn.Module)


class Step(ABC):
    """One training step over fixed buffers, captured as a CUDA graph where there is one and it is wanted."""

    def __init__(
        self, optimizer: Optimizer, n_stats: int, device: torch.device, *, capture: bool = True
    ) -> None:
        self.optimizer, self.device = optimizer, device
        self.stats = torch.zeros(n_stats, device=device)  # of the newest step, its loss first
        self.captures = capture and device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.count = self.before = 0  # steps of this run, and of the runs it resumes

    @abstractmethod
    def once(self) -> Tensor:
        """Run forward, backward and update on what the buffers hold; return the figures of it."""

    def advance(self, lr: float) -> None:
        """Train on what the buffers hold at a learning rate."""
        self.optimizer.lr.fill_(lr)
        if self.graph is not None:
            self.graph.replay()
        elif self.captures:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # type: ignore[no-untyped-call]
                self.stats.copy_(self.once())
            torch.cuda.current_stream().wait_stream(side)
            if self.count == WARM - 1:
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


def prepare(out: Path, seed: int) -> torch.device:
    """Make the output folder, seed the draws and return the device to train on."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    out.mkdir(parents=True, exist_ok=True)
    return device


def load_tokens(path: Path, device: torch.device) -> Tensor:
    """Read u16 tokens of a .npy, .npy.xz to the device as i32."""
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as f:
        return torch.from_numpy(np.load(f).astype(np.int32)).to(device)


def rate(done: float, step: int) -> float:
    """Return the share of the peak learning rate at a share of the time: warm up, hold, fall to 1 %."""
    return min(1.0, step / 200) * min(1.0, max(0.01, (1 - done) / 0.6))


def run(
    step: Step,
    minutes: float,
    steps: int,
    go: Callable[[float], None],
    say: Callable[[list[float], float], str],
    save: Callable[[float], None],
    *,
    say_every: int,
    save_every: float,
    spent: float = 0.0,
    compiled: Callable[[], None] = lambda: None,
) -> None:
    """Step until the minutes or the steps are over, and save then and every `save_every` seconds.

    go(share of the peak learning rate) draws and steps; say(figures, seconds) is the line printed after a
    multiple of `say_every` steps, at most one in ten seconds; save(seconds) gets those of the runs before,
    `spent`, too. A loss that is not finite raises FloatingPointError.
    """
    start = said = saved = time.time()
    while step.count < steps:
        done = (spent + (time.time() - start) * (step.count >= WARM)) / (60 * minutes)
        if done >= 1:
            break
        go(rate(done, step.before + step.count))
        if step.count == WARM:  # the schedule's clock starts here
            step.stats.tolist()
            start = time.time()
            compiled()
        if step.count % say_every == 0 and time.time() - said > 10:
            said = time.time()
            figures = step.stats.tolist()
            print(say(figures, said - start), flush=True)
            if not math.isfinite(figures[0]):
                raise FloatingPointError("the loss is not finite")
        if time.time() - saved > save_every:
            save(spent + time.time() - start)
            saved = time.time()
    save(spent + time.time() - start)


def as_stored(model: Model, state: dict[str, Tensor]) -> Model:
    """Load a state into the model rounded as the GGUF will hold it, so that exactly that is measured."""
    model.load_state_dict({k: v.float() for k, v in rounded(state).items()})
    return model


def write_report(out: Path, result: dict[str, Any]) -> None:
    """Write OUT/report.json and print it as one line."""
    (out / "report.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result), flush=True)


def parser(doc: str | None, plan: Any) -> argparse.ArgumentParser:
    """Return a parser of TOKENS, OUT and an option for each field of the dataclass `plan`."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("tokens", type=Path)
    p.add_argument("out", type=Path)
    for f in fields(plan):
        default = getattr(plan, f.name)
        kind: dict[str, Any] = {"type": type(default)}
        if isinstance(default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        p.add_argument(f"--{f.name.replace('_', '-')}", default=default, **kind)
    return p
