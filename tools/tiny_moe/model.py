"""The tiny-moe model for training: the Qwen3.5-MoE text trunk and one MTP block in compact torch.

Parameter names and shapes are those of transformers' `Qwen3_5MoeForCausalLM` plus its `mtp.*` names, so a
state dict moves between the two unchanged (tests/model/test_parity.py holds them equal). Experts run as one
masked dense layer and the delta rule as chunked matrix products: thousands of tiny kernels would dominate.
Must not know: the corpus, the optimiser, GGUF. All arrays are row-major, batch first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.tiny_moe.delta import gated_delta_rule


@dataclass(frozen=True)
class Shape:
    """Hold the sizes of one tiny-moe; the defaults are the committed model's."""

    vocab: int = 4096
    width: int = 256
    layers: int = 12
    interval: int = 4  # every interval-th trunk layer has full attention
    heads: int = 2
    head_dim: int = 256
    rotary: int = 64
    rope_theta: float = 1e7
    experts: int = 16
    top_k: int = 4
    expert_ff: int = 32
    shared_ff: int = 64
    delta_heads: int = 2  # value heads; there is one key head
    delta_dim: int = 128
    conv: int = 4
    eps: float = 1e-6
    context: int = 4096

    def is_full(self, layer: int) -> bool:
        """Tell whether trunk layer `layer` (0-based) has full attention."""
        return (layer + 1) % self.interval == 0


TINY = Shape()


class RMSNorm(nn.Module):
    """Normalise the last axis; the stored weight is an offset from one."""

    def __init__(self, n: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(n)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., n] to f32 of the same shape."""
        f = x.float()
        return f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class _GatedNorm(nn.Module):
    def __init__(self, n: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        f = x.float()
        return (
            f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight * F.silu(gate.float())
        )


class DeltaNet(nn.Module):
    """Mix tokens with a short causal convolution and the gated delta rule."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        e, d, h = s.width, s.delta_dim, s.delta_heads
        self.s, c = s, 2 * d + h * d
        self.in_proj_qkv, self.in_proj_z = nn.Linear(e, c, bias=False), nn.Linear(e, h * d, bias=False)
        self.in_proj_b, self.in_proj_a = nn.Linear(e, h, bias=False), nn.Linear(e, h, bias=False)
        self.conv1d = nn.Conv1d(c, c, s.conv, groups=c, bias=False)
        # Slow and fast heads from the start: time steps log-uniform, decay rates spread evenly.
        dt = torch.exp(torch.rand(h) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.A_log = nn.Parameter(torch.log(torch.empty(h).uniform_(1, 8)))
        self.norm, self.out_proj = _GatedNorm(d, s.eps), nn.Linear(h * d, e, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map normed rows [B, T, width] to [B, T, width]."""
        s, d = self.s, self.s.delta_dim
        mixed, z = self.in_proj_qkv(x), self.in_proj_z(x)
        padded = F.pad(mixed, (0, 0, s.conv - 1, 0))
        taps = self.conv1d.weight[:, 0].to(mixed.dtype)
        mixed = F.silu(sum(padded[:, i : i + x.shape[1]] * taps[:, i] for i in range(s.conv)))
        q, k, v = mixed.split([d, d, s.delta_heads * d], -1)
        dtype = mixed.dtype

        def unit(y: Tensor, scale: float) -> Tensor:
            f = y.float()
            return (f * (torch.rsqrt(f.pow(2).sum(-1, keepdim=True) + 1e-6) * scale)).to(dtype).unsqueeze(1)

        beta = self.in_proj_b(x).float().sigmoid().mT
        g = (-self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)).mT
        v = v.unflatten(-1, (s.delta_heads, d)).transpose(1, 2)
        o = gated_delta_rule(unit(q, d**-0.5), unit(k, 1.0), v, g, beta)
        o = self.norm(o.transpose(1, 2), z.unflatten(-1, (s.delta_heads, d)))
        return self.out_proj(o.flatten(2))


def rope_table(s: Shape, n: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return cos and sin f32 [n, rotary/2]; text positions make every mrope section the same."""
    f = s.rope_theta ** (-torch.arange(0, s.rotary, 2, device=device).float() / s.rotary)
    a = torch.arange(n, device=device).float()[:, None] * f
    return a.cos(), a.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first `rotary` dims of x [..., n, head_dim] (half-split pairs)."""
    c, s = rope
    a, b, rest = x.split([c.shape[-1], c.shape[-1], x.shape[-1] - 2 * c.shape[-1]], -1)
    return torch.cat([a * c - b * s, b * c + a * s, rest], -1)


class Attention(nn.Module):
    """Attend with one key/value head, normed queries and keys, and an output gate."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        e, d, h = s.width, s.head_dim, s.heads
        self.s = s
        self.q_proj, self.o_proj = nn.Linear(e, 2 * h * d, bias=False), nn.Linear(h * d, e, bias=False)
        self.k_proj, self.v_proj = nn.Linear(e, d, bias=False), nn.Linear(e, d, bias=False)
        self.q_norm, self.k_norm = RMSNorm(d, s.eps), RMSNorm(d, s.eps)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q [B, H, T, D], k, v [B, 1, T, D] and gate [B, T, H*D], q and k normed and rotated."""
        q, gate = self.q_proj(x).unflatten(-1, (self.s.heads, -1)).chunk(2, -1)
        v = self.v_proj(x)
        q = rotate(self.q_norm(q).transpose(1, 2), rope).to(v.dtype)
        k = rotate(self.k_norm(self.k_proj(x)), rope).to(v.dtype)
        return q, k.unsqueeze(1), v.unsqueeze(1), gate.flatten(2)

    def finish(self, o: Tensor, gate: Tensor) -> Tensor:
        """Gate and project o [B, H, T, D] to [B, T, width]."""
        return self.o_proj(o.transpose(1, 2).flatten(2) * gate.sigmoid())

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Map normed rows [B, T, width] to [B, T, width]."""
        q, k, v, gate = self.project(x, rope)
        k, v = k.expand_as(q), v.expand_as(q)
        return self.finish(F.scaled_dot_product_attention(q, k, v, is_causal=True), gate)


class _Router(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(s.experts, s.width))


class _Experts(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(s.experts, 2 * s.expert_ff, s.width))
        self.down_proj = nn.Parameter(torch.zeros(s.experts, s.width, s.expert_ff))


class _Mlp(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(a, b, bias=False)
            for a, b in ((s.width, s.shared_ff), (s.width, s.shared_ff), (s.shared_ff, s.width))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Moe(nn.Module):
    """Mix top-k experts (as one dense layer whose unchosen parts are zeroed) and a gated shared expert."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.gate, self.experts, self.shared_expert = _Router(s), _Experts(s), _Mlp(s)
        self.shared_expert_gate = nn.Linear(s.width, 1, bias=False)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights [..., experts], zero where not chosen, and the load-balance loss (1 when even)."""
        with torch.autocast(x.device.type, enabled=False):
            p = F.linear(x.float(), self.gate.weight).softmax(-1)
        rank = (p.unsqueeze(-2) > p.unsqueeze(-1)).sum(-1)
        chosen = (rank < self.s.top_k).float()
        w = p * chosen
        flat = tuple(range(p.dim() - 1))
        load = chosen.mean(flat) / self.s.top_k
        return w / w.sum(-1, keepdim=True), (load * p.mean(flat)).sum() * self.s.experts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map normed rows [..., width] to [..., width], and the load-balance loss."""
        w, balance = self.route(x)
        e, ff = self.s.experts, self.s.expert_ff
        gate_up = F.linear(x, self.experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (e, 2 * ff))
        gate, up = gate_up.chunk(2, -1)
        inner = F.silu(gate) * up * w.unsqueeze(-1).to(gate.dtype)
        y = F.linear(inner.flatten(-2), self.experts.down_proj.permute(1, 0, 2).flatten(1))
        return y + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x), balance


class Layer(nn.Module):
    """One decoder block: token mixer, then experts, each on a normed input with a residual."""

    def __init__(self, s: Shape, full: bool) -> None:
        super().__init__()
        self.full = full
        if full:
            self.self_attn = Attention(s)
        else:
            self.linear_attn = DeltaNet(s)
        self.mlp = Moe(s)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(s.width, s.eps), RMSNorm(s.width, s.eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Map rows f32 [B, T, width] to the next rows, and the load-balance loss."""
        y = self.input_layernorm(x)
        x = x + (self.self_attn(y, rope) if self.full else self.linear_attn(y))
        y, balance = self.mlp(self.post_attention_layernorm(x))
        return x + y, balance


class Trunk(nn.Module):
    """Embedding, decoder blocks and final norm."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.embed_tokens = nn.Embedding(s.vocab, s.width)
        self.layers = nn.ModuleList(Layer(s, s.is_full(i)) for i in range(s.layers))
        self.norm = RMSNorm(s.width, s.eps)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Map ids i64 [B, T] to normed hidden rows f32 [B, T, width] and the mean balance loss."""
        x, rope = self.embed_tokens(ids).float(), rope_table(self.s, ids.shape[1], ids.device)
        total = x.new_zeros(())
        for layer in self.layers:
            x, balance = layer(x, rope)
            total = total + balance
        return self.norm(x), total / len(self.layers)


class Mtp(nn.Module):
    """The draft block: one full-attention block over a token embedding and the previous hidden row."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.fc = nn.Linear(2 * s.width, s.width, bias=False)
        self.layers = nn.ModuleList([Layer(s, True)])
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (
            RMSNorm(s.width, s.eps) for _ in range(3)
        )

    def step(
        self, emb: Tensor, h: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """Run draft depth len(past) + 1 at every position at once.

        emb f32 [B, T, width] of the token at each position; h f32 [B, T, width], the row of the position
        before it; past: (k, v) of the shallower depths, [B, 1, T, D]. A chain of depth n that ends at
        position p saw trunk rows up to p-n+1 and one row of each depth after that: just what the engine's
        draft cache holds. Positions p < n-1 have no chain and return rows of no meaning. Returns rows,
        (k, v), balance loss.
        """
        layer = self.layers[0]
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(emb), self.pre_fc_norm_hidden(h)], -1)).float()
        t, n = x.shape[1], len(past)
        q, k, v, gate = layer.self_attn.project(layer.input_layernorm(x), rope_table(self.s, t, x.device))
        keys = [*past, (k, v)]
        scale = self.s.head_dim**-0.5
        keep = torch.ones(t, t, dtype=torch.bool, device=x.device).tril(-n)
        main = (q @ keys[0][0].mT).float().masked_fill(~keep, -1e30)
        late = [(shift(kk, n - j), shift(vv, n - j)) for j, (kk, vv) in enumerate(keys) if j]
        extra = [(q.float() * kk.float()).sum(-1, keepdim=True) for kk, _ in late]
        p = (torch.cat([main, *extra], -1) * scale).softmax(-1).to(v.dtype)
        o = p[..., :t] @ keys[0][1]
        for j, (_, vv) in enumerate(late):
            o = o + p[..., t + j : t + j + 1] * vv
        x = x + layer.self_attn.finish(o, gate)
        y, balance = layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x + y), (k, v), balance


def shift(x: Tensor, n: int) -> Tensor:
    """Move x [..., T, D] n positions later, zeros first."""
    return F.pad(x, (0, 0, n, 0))[..., : x.shape[-2], :] if n else x


class TinyMoe(nn.Module):
    """Trunk and draft block; the output matrix is the embedding."""

    def __init__(self, s: Shape = TINY) -> None:
        super().__init__()
        self.s, self.model, self.mtp = s, Trunk(s), Mtp(s)
        self.apply_init()

    @torch.no_grad()
    def apply_init(self) -> None:
        """Draw weights: fan-in normal, residual outputs scaled down with depth, embedding small."""
        residual = (2 * self.s.layers) ** -0.5
        for name, p in self.named_parameters():
            if p.dim() < 2 or "conv1d" in name:
                continue
            scale = (
                residual
                if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "down_proj"))
                else 1.0
            )
            std = 0.02 if "embed_tokens" in name or "gate.weight" in name else scale * p.shape[-1] ** -0.5
            p.normal_(0, std)

    def logits(self, h: Tensor) -> Tensor:
        """Map normed rows [..., width] to logits [..., vocab]."""
        return F.linear(h, self.model.embed_tokens.weight)

    def draft_rows(self, ids: Tensor, h: Tensor, depth: int) -> tuple[list[Tensor], Tensor]:
        """Chain the draft block over known text.

        Row p of entry n-1 is depth n's guess at token p+2 of ids (it read tokens up to p+1), for p >= n-1;
        ids i64 [B, T], h the trunk's rows [B, T, width]. Returns `depth` arrays f32 [B, T-1, width] and the
        balance loss.
        """
        emb = F.embedding(ids[:, 1:], self.model.embed_tokens.weight.detach()).float()
        prev, past, rows, total = h[:, :-1], [], [], h.new_zeros(())
        for _ in range(depth):
            row, kv, balance = self.mtp.step(emb, prev, past)
            past, prev, total = [*past, kv], shift(row, 1), total + balance
            rows.append(row)
        return rows, total / depth
