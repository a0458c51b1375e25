"""Muon for the weight matrices, Adam for the rest, with learning rates as device scalars.

Must not know: the model, the data. Every operation keeps its shapes, so a CUDA graph can hold a step.
Source: Jordan et al. 2024, Muon (Newton-Schulz iteration); Liu et al. 2025, Muon is scalable (RMS 0.2).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

STEPS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonal(g: Tensor) -> Tensor:
    """Replace each matrix of g [N, m, n] by about its nearest semi-orthogonal one, in bf16."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for a, b, c in STEPS:
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x.mT if tall else x


def is_hidden_matrix(name: str, p: Tensor) -> bool:
    """Tell whether Muon owns the parameter: matrices but the embedding, convolutions and few-row gates."""
    few = ("mlp.gate.weight", "shared_expert_gate.weight", "in_proj_a.weight", "in_proj_b.weight")
    return p.dim() >= 2 and "conv1d" not in name and "embed_tokens" not in name and not name.endswith(few)


class Optimizer:
    """Step all parameters of a model; set `lr` (one device scalar) before each step."""

    def __init__(
        self,
        model: nn.Module,
        *,
        decay: float = 0.1,
        momentum: float = 0.95,
        adam_scale: float = 1.0,
        muon: bool = True,
    ) -> None:
        self.decay, self.momentum, self.adam_scale = decay, momentum, adam_scale
        named = list(model.named_parameters())
        device = named[0][1].device
        on_gpu = device.type == "cuda"
        self.lr = torch.zeros((), device=device)
        groups: dict[torch.Size, list[nn.Parameter]] = {}
        rest = []
        for name, p in named:
            if muon and is_hidden_matrix(name, p):
                groups.setdefault(p.shape, []).append(p)
            else:
                rest.append(p)
        self.groups = [(ps, torch.zeros(len(ps), *s, device=device)) for s, ps in groups.items()]
        self.rest = rest
        self.adam = torch.optim.AdamW(
            [{"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.01},
             {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0}],
            lr=torch.zeros((), device=device), betas=(0.9, 0.95), eps=1e-10, fused=on_gpu, capturable=on_gpu,
        )  # fmt: skip
        self.orthogonal = torch.compile(orthogonal, dynamic=False) if on_gpu else orthogonal

    @torch.no_grad()
    def step(self) -> None:
        """Apply one step from the gradients and clear them."""
        for group in self.adam.param_groups:
            group["lr"].copy_(self.lr * self.adam_scale)
        torch.nn.utils.clip_grad_norm_(self.rest, 1.0, foreach=True)
        self.adam.step()
        for params, buf in self.groups:
            grad = torch.stack([p.grad for p in params if p.grad is not None])
            buf.lerp_(grad, 1 - self.momentum)
            update = grad.lerp(buf, self.momentum)  # Nesterov
            # The two halves of gate_up_proj are separate matrices, as are the experts.
            m, n = update.shape[-2:]
            rows = m // 2 if update.dim() == 4 and m < n else m
            flat = self.orthogonal(update.reshape(-1, rows, n)).float() * (
                self.lr * 0.2 * max(rows, n) ** 0.5
            )
            torch._foreach_mul_(params, 1 - self.lr * self.decay)
            torch._foreach_sub_(params, list(flat.view_as(update).unbind(0)))
        for p in [*self.rest, *(p for ps, _ in self.groups for p in ps)]:
            if p.grad is not None:
                p.grad.zero_()

    def state(self) -> dict[str, object]:
        """Return what a resumed run needs."""
        return {"adam": self.adam.state_dict(), "muon": [b for _, b in self.groups]}

    def load(self, state: dict[str, object]) -> None:
        """Take over a state that `state` returned."""
        self.adam.load_state_dict(state["adam"])  # type: ignore[arg-type]
        for (_, b), saved in zip(self.groups, state["muon"], strict=True):  # type: ignore[call-overload]
            b.copy_(saved)
