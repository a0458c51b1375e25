"""The DFlash drafter for tiny-moe in torch, with the semantics of src/models/dflash.cpp at the pin.

A context position is the target's rows at a few layer inputs, fused by `fc` and `enc_norm` to one row; each
layer takes keys and values from it. A block is [last token, mask, mask, ...] at the positions that come next:
its rows attend to every context position and to the whole block, and row i guesses the token at its own
position. Embedding and output matrix are the target's.
Must not know: the corpus, the optimiser, GGUF. Arrays are row-major, batch first.
Test: tests/model/test_dflash_parity.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.tiny_moe.model import Trunk, rope_table, rotate
from tools.tiny_moe.yarn import Yarn, frequencies

MASK = 3  # <|mask|> of tokenizer.json


@dataclass(frozen=True)
class DraftShape:
    """Hold the sizes of a drafter; the defaults are the committed one's."""

    width: int = 256  # the target's
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ff: int = 512
    block: int = 16  # the last token and 15 drafts
    taps: tuple[int, ...] = (1, 4, 7, 9, 11)  # target layers whose inputs are read
    rope_theta: float = 1e4
    yarn: Yarn | None = None
    eps: float = 1e-6
    context: int = 4096


DRAFT = DraftShape()


class Norm(nn.Module):
    """Normalise the last axis; the stored weight is the factor itself."""

    def __init__(self, n: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., n] to f32 of the same shape."""
        f = x.float()
        return f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class DraftLayer(nn.Module):
    """One block of the drafter: attention over context and block, then a gated MLP."""

    def __init__(self, s: DraftShape) -> None:
        super().__init__()
        e, d = s.width, s.head_dim
        self.s = s
        self.attn_norm, self.ffn_norm = Norm(e, s.eps), Norm(e, s.eps)
        self.q_norm, self.k_norm = Norm(d, s.eps), Norm(d, s.eps)
        self.q_proj = nn.Linear(e, s.heads * d, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(e, s.kv_heads * d, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(s.heads * d, e, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(e, s.ff, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(s.ff, e, bias=False)

    def key_value(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return k and v [B, kv_heads, T, D] of rows [B, T, width]; context rows come here unnormed."""
        k, v = (p(x).unflatten(-1, (self.s.kv_heads, -1)).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(k), rope).to(v.dtype), v

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], keep: Tensor
    ) -> Tensor:
        """Map block rows f32 [B, R, width] to the next rows.

        context: k and v [B, kv_heads, T, D]; keep bool [B, 1, R, T + R]: which context positions and block
        rows each row attends to.
        """
        y = self.attn_norm(x)
        q = self.q_norm(self.q_proj(y).unflatten(-1, (self.s.heads, -1)).transpose(1, 2))
        k, v = (torch.cat(pair, 2) for pair in zip(context, self.key_value(y, rope), strict=True))
        many = self.s.heads // self.s.kv_heads
        k, v = (z.repeat_interleave(many, 1) for z in (k, v))
        o = F.scaled_dot_product_attention(rotate(q, rope).to(v.dtype), k, v, attn_mask=keep)
        x = x + self.o_proj(o.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class DFlash(nn.Module):
    """The drafter; it borrows embedding and output matrix of the target at each call."""

    def __init__(self, s: DraftShape = DRAFT) -> None:
        super().__init__()
        self.s = s
        inverse, self.magnitude = frequencies(s.head_dim, s.rope_theta, s.yarn)
        self.inverse: Tensor
        self.register_buffer("inverse", torch.from_numpy(inverse), persistent=False)
        self.fc = nn.Linear(len(s.taps) * s.width, s.width, bias=False)
        self.enc_norm, self.norm = Norm(s.width, s.eps), Norm(s.width, s.eps)
        self.layers = nn.ModuleList(DraftLayer(s) for _ in range(s.layers))
        residual = (2 * s.layers) ** -0.5
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.dim() == 2:
                    out = name.endswith(("o_proj.weight", "down_proj.weight"))
                    p.normal_(0, (residual if out else 1.0) * p.shape[-1] ** -0.5)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin f32 [B, 1, T, head_dim/2] of positions [B, T], YaRN's magnitude in them."""
        angle = positions.double()[:, None, :, None] * self.inverse
        return (angle.cos() * self.magnitude).float(), (angle.sin() * self.magnitude).float()

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's k and v of features [B, T, taps*width] at positions [B, T]."""
        g, at = self.enc_norm(self.fc(features)), self.rope(positions)
        return [layer.key_value(g, at) for layer in self.layers]

    def rows(
        self, x: Tensor, positions: Tensor, context: list[tuple[Tensor, Tensor]], keep: Tensor
    ) -> Tensor:
        """Map embedded block rows f32 [B, R, width] to normed rows for the output matrix.

        positions [B, R]; context as `context` returns it; keep bool [B, 1, R, T + R].
        """
        at = self.rope(positions)
        for layer, kv in zip(self.layers, context, strict=True):
            x = layer(x, at, kv, keep)
        return self.norm(x)

    def blocks(
        self,
        features: Tensor,
        ids: Tensor,
        anchors: Tensor,
        lengths: Tensor,
        embed: Tensor,
        start: int = 0,
    ) -> Tensor:
        """Run a block at every anchor of known texts; return rows [B, A, block, width].

        features f32 [B, T, taps*width] and ids i64 [B, T] of the texts; anchors i64 [B, A]: the position of
        the block's first token, which sees the context before it only; lengths i64 [B, A]: rows of each block
        (later rows have no meaning). embed [vocab, width]. start: position of the texts' first token.
        """
        n, device = self.s.block, ids.device
        b, t = ids.shape
        slot = torch.arange(n, device=device)
        first = ids.gather(1, anchors).unsqueeze(-1)
        tokens = torch.where(slot == 0, first, MASK).flatten(1)
        positions = (start + anchors.unsqueeze(-1) + slot).flatten(1)
        keep = attention_mask(anchors, lengths, n, t)
        x = F.embedding(tokens, embed).float()
        past = torch.arange(start, start + t, device=device).expand(b, t)
        return self.rows(x, positions, self.context(features, past), keep).unflatten(1, (-1, n))

    @torch.no_grad()
    def draft(self, features: Tensor, last: Tensor, depth: int, embed: Tensor, start: int = 0) -> Tensor:
        """Return logits [B, depth + 1, vocab] of one block after features [B, T, taps*width].

        last i64 [B]: the token at position start + T. Row i >= 1 guesses the token at position start + T + i.
        """
        b, t = features.shape[:2]
        anchors = torch.full((b, 1), t, device=last.device)
        ids = F.pad(last.unsqueeze(1), (t, 0))
        padded = F.pad(features, (0, 0, 0, 1))
        rows = self.blocks(padded, ids, anchors, torch.full_like(anchors, depth + 1), embed, start)
        return F.linear(rows[:, 0, : depth + 1], embed)


def attention_mask(anchors: Tensor, lengths: Tensor, n: int, t: int) -> Tensor:
    """Return bool [B, 1, A*n, t + A*n]: a row sees the context before its anchor and its own block's rows."""
    b, a = anchors.shape
    device = anchors.device
    row = torch.arange(a * n, device=device)
    before = torch.arange(t, device=device) < anchors.repeat_interleave(n, 1).unsqueeze(-1)
    own = row // n == (row // n).unsqueeze(-1)
    # A row past its block's length would see nothing else, so it may see itself: no row of NaN.
    used = (row % n) < lengths.repeat_interleave(n, 1)
    inside = own & used.unsqueeze(1) | (row == row.unsqueeze(-1))
    return torch.cat([before, inside.expand(b, -1, -1)], -1).unsqueeze(1)


def read(trunk: Trunk, ids: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return features f32 [B, T, taps*width], the inputs of the trunk's layers `taps`, and normed rows."""
    x, at = trunk.embed_tokens(ids).float(), rope_table(trunk.s, ids.shape[1], ids.device)
    inputs = {}
    for i, layer in enumerate(trunk.layers):
        inputs[i] = x
        x, _ = layer(x, at)
    return torch.cat([inputs[i] for i in taps], -1), trunk.norm(x)
