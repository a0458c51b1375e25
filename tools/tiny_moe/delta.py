"""The gated delta rule as chunked matrix products, with an exact and cheap gradient.

Must not know: layers, weights. Arrays are row-major. Test: tests/model/test_parity.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def unit_lower_inverse(a: Tensor) -> Tensor:
    """Invert I + a for strictly lower `a` [..., n, n], n = 8 * 2**i, by doubling block inverses.

    Blocks of 8 use the finite Neumann product, whose terms stay small there; larger blocks merge by
    [[P, 0], [L, Q]]^-1 = [[P', 0], [-Q' L P', Q']].
    """
    n, s = a.shape[-1], 8

    def diagonal(size: int) -> Tensor:
        m = n // size
        return a.unflatten(-1, (m, size)).unflatten(-3, (m, size)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)

    d = diagonal(s)
    eye = torch.eye(s, device=a.device, dtype=a.dtype)
    d2 = d @ d
    inv = (eye - d) @ (eye + d2) @ (eye + d2 @ d2)
    while s < n:
        p, q = inv[..., 0::2, :, :], inv[..., 1::2, :, :]
        low = -(q @ diagonal(2 * s)[..., s:, :s] @ p)
        inv = torch.cat([torch.cat([p, torch.zeros_like(p)], -1), torch.cat([low, q], -1)], -2)
        s *= 2
    return inv.squeeze(-3)


class _Solve(torch.autograd.Function):
    """Solve (I + a) u = b with a cheap exact gradient instead of one through every merge."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
        t = unit_lower_inverse(a)
        u = t @ b
        ctx.save_for_backward(t, u)
        return u

    @staticmethod
    def backward(ctx: Any, du: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        t, u = ctx.saved_tensors
        db = t.mT @ du
        return -(db @ u.mT).tril(-1), db


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """Run S_t = e^g S_{t-1} (I - beta k k^T) + beta v k^T from zero and read it with q, chunk by chunk.

    q, k  [B, 1, T, D] unit rows (q scaled); v [B, H, T, D]; g, beta f32 [B, H, T], g <= 0. Returns f32
    [B, H, T, D]. Source: Yang et al. 2024, Gated Delta Networks, section 3.
    """
    return scan(q, k, v, g, beta, chunk)[0]


def scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 64) -> tuple[Tensor, Tensor]:
    """Run the rule as `gated_delta_rule` does; return its rows and the last state [B, H, D of k, D of v].

    T is padded to the chunk with rows that leave the state as it is.
    """
    t = q.shape[2]
    pad = -t % chunk
    if pad:
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        g, beta = F.pad(g, (0, pad)), F.pad(beta, (0, pad))
    q, k, v = (x.unflatten(2, (-1, chunk)) for x in (q, k, v))
    c = g.unflatten(2, (-1, chunk)).cumsum(-1)
    b = beta.unflatten(2, (-1, chunk)).unsqueeze(-1)
    keep = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = (c.unsqueeze(-1) - c.unsqueeze(-2)).masked_fill(~keep, -math.inf).exp()
    gain, last = c.exp().unsqueeze(-1), c[..., -1:]
    with torch.autocast(q.device.type, enabled=False):
        a = ((k @ k.mT).float() * decay * b).tril(-1)
        u, w = _Solve.apply(a, torch.cat([v.float() * b, k.float() * (b * gain)], -1)).chunk(2, -1)
    scores = ((q @ k.mT) * decay).to(q.dtype)
    q_in, k_out = (q * gain).to(q.dtype), (k * (last.unsqueeze(-1) - c.unsqueeze(-1)).exp()).to(q.dtype)
    w, carry = w.to(q.dtype), last.exp().unsqueeze(-1)
    state, out = None, []
    for i in range(q.shape[2]):
        if state is None:
            new = u[:, :, i]
            read = scores[:, :, i] @ new.to(q.dtype)
            state = k_out[:, :, i].mT @ new.to(q.dtype)
        else:
            s = state.to(q.dtype)
            new = (u[:, :, i] - w[:, :, i] @ s).to(q.dtype)
            read = scores[:, :, i] @ new + q_in[:, :, i] @ s
            state = state * carry[:, :, i] + k_out[:, :, i].mT @ new
        out.append(read)
    assert state is not None
    return torch.cat(out, 2)[:, :, :t].float(), state
