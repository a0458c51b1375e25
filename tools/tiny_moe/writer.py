"""Let the trunk of tiny-moe write many texts at once, a token a step, with recurrent state and caches.

States and caches are kept in half precision: the texts are what the trunk would write but for near ties.
Must not know: drafters, the optimiser. Arrays are row-major, batch first.
Test: tests/model/test_dflash_parity.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny_moe.delta import scan
from tools.tiny_moe.model import Attention, DeltaNet, Layer, TinyMoe, rope_table

Memory = tuple[Tensor, Tensor]  # of one layer: (last inputs of the convolution, state) or (keys, values)


def _unit(y: Tensor, scale: float) -> Tensor:
    f = y.float()
    return f * (torch.rsqrt(f.pow(2).sum(-1, keepdim=True) + 1e-6) * scale)


def _split(net: DeltaNet, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d = net.s.delta_dim
    q, k, v = F.silu(mixed).split([d, d, net.s.delta_heads * d], -1)
    return _unit(q, d**-0.5), _unit(k, 1.0), v.unflatten(-1, (net.s.delta_heads, d))


def _gates(net: DeltaNet, x: Tensor) -> tuple[Tensor, Tensor]:
    g = -net.A_log.exp() * F.softplus(net.in_proj_a(x).float() + net.dt_bias)
    return g, net.in_proj_b(x).float().sigmoid()


def delta_prefill(net: DeltaNet, x: Tensor, memory: Memory) -> Tensor:
    """Read normed rows [B, P, width] from the start of the text; fill the layer's memory."""
    mixed = net.in_proj_qkv(x)
    memory[0].copy_(mixed[:, 1 - net.s.conv :])
    padded = F.pad(mixed, (0, 0, net.s.conv - 1, 0))
    taps = net.conv1d.weight[:, 0].to(mixed.dtype)
    q, k, v = _split(net, sum(padded[:, i : i + x.shape[1]] * taps[:, i] for i in range(net.s.conv)))
    g, beta = _gates(net, x)
    q, k = (y.to(mixed.dtype).unsqueeze(1) for y in (q, k))
    o, state = scan(q, k, v.transpose(1, 2), g.mT, beta.mT)
    memory[1].copy_(state)
    z = net.in_proj_z(x).unflatten(-1, (net.s.delta_heads, -1))
    return net.out_proj(net.norm(o.transpose(1, 2), z).flatten(2))


def delta_step(net: DeltaNet, x: Tensor, memory: Memory) -> Tensor:
    """Read one normed row [B, 1, width] of each text; update the layer's memory in place."""
    mixed = net.in_proj_qkv(x)
    window = torch.cat([memory[0], mixed.to(memory[0].dtype)], 1)
    memory[0].copy_(window[:, 1:])
    q, k, v = _split(net, (window * net.conv1d.weight[:, 0].mT.to(window.dtype)).sum(1, keepdim=True))
    g, beta = _gates(net, x)
    decayed = memory[1].float() * g.exp()[:, 0, :, None, None]  # [B, H, D of k, D of v]
    k, q = (y[:, 0, None, :, None] for y in (k, q))
    u = beta[:, 0, :, None] * (v[:, 0].float() - (decayed * k).sum(-2))
    state = decayed + k * u.unsqueeze(-2)
    memory[1].copy_(state)
    o = (state * q).sum(-2).unsqueeze(1)
    z = net.in_proj_z(x).unflatten(-1, (net.s.delta_heads, -1))
    return net.out_proj(net.norm(o, z).flatten(2))


def attend_prefill(net: Attention, x: Tensor, memory: Memory) -> Tensor:
    """Read normed rows [B, P, width] from the start of the text; fill the layer's memory."""
    q, k, v, gate = net.project(x, rope_table(net.s, x.shape[1], x.device))
    for cache, y in zip(memory, (k, v), strict=True):
        cache[:, : x.shape[1]].copy_(y[:, 0])
    k, v = k.expand_as(q), v.expand_as(q)
    return net.finish(F.scaled_dot_product_attention(q, k, v, is_causal=True), gate)


def attend_step(net: Attention, x: Tensor, memory: Memory, at: Tensor) -> Tensor:
    """Read one normed row [B, 1, width] of each text at position `at` (a device scalar)."""
    keys, values = memory
    cos, sin = rope_table(net.s, keys.shape[1], x.device)
    q, k, v, gate = net.project(x, (cos[at.view(1)], sin[at.view(1)]))
    for cache, y in ((keys, k), (values, v)):
        cache.index_copy_(1, at.view(1), y[:, 0].to(cache.dtype))
    scores = (q[:, :, 0] @ keys.mT.to(q.dtype)).float() * net.s.head_dim**-0.5
    seen = torch.arange(keys.shape[1], device=x.device) <= at
    p = scores.masked_fill(~seen, -1e30).softmax(-1).to(values.dtype)
    return net.finish((p @ values).unsqueeze(2).to(q.dtype), gate)


class Writer:
    """Hold the memory of `batch` texts of `length` tokens, of which the first `prompt` are given."""

    def __init__(self, model: TinyMoe, batch: int, prompt: int, length: int, dtype: torch.dtype) -> None:
        s, device = model.s, model.model.embed_tokens.weight.device
        self.model, self.prompt, self.length = model, prompt, length
        self.ids = torch.zeros(batch, length, dtype=torch.long, device=device)
        self.at = torch.zeros((), dtype=torch.long, device=device)
        self.temperature = torch.zeros(batch, 1, device=device)
        channels = (2 + s.delta_heads) * s.delta_dim

        def empty(*shape: int) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        self.memory: list[Memory] = [
            (empty(length, s.head_dim), empty(length, s.head_dim))
            if layer.full
            else (empty(s.conv - 1, channels), empty(s.delta_heads, s.delta_dim, s.delta_dim))
            for layer in model.model.layers
        ]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.layer = self._layer
        if device.type == "cuda":
            self.layer = torch.compile(self._layer, dynamic=False)  # type: ignore[method-assign]

    def _layer(self, layer: Layer, x: Tensor, memory: Memory, at: Tensor) -> Tensor:
        y = layer.input_layernorm(x)
        mixer = layer.self_attn if layer.full else layer.linear_attn
        x = x + (attend_step(mixer, y, memory, at) if layer.full else delta_step(mixer, y, memory))
        return x + layer.mlp(layer.post_attention_layernorm(x))[0]

    def _prefill(self, part: slice) -> None:
        x = self.model.model.embed_tokens(self.ids[part, : self.prompt - 1]).float()
        for layer, whole in zip(self.model.model.layers, self.memory, strict=True):
            memory = (whole[0][part], whole[1][part])
            y = layer.input_layernorm(x)
            if layer.full:
                x = x + attend_prefill(layer.self_attn, y, memory)
            else:
                x = x + delta_prefill(layer.linear_attn, y, memory)
            x = x + layer.mlp(layer.post_attention_layernorm(x))[0]

    def _step(self) -> None:
        x = self.model.model.embed_tokens(self.ids.index_select(1, self.at.view(1))).float()
        for layer, memory in zip(self.model.model.layers, self.memory, strict=True):
            x = self.layer(layer, x, memory, self.at)
        logits = self.model.logits(self.model.model.norm(x[:, 0])).float()
        # Gumbel noise times the temperature: greedy rows have none.
        noise = -torch.empty_like(logits).exponential_().log() * self.temperature
        self.at += 1
        self.ids.index_copy_(1, self.at.view(1), (logits + noise).argmax(-1, keepdim=True))

    @torch.no_grad()
    def write(self, prompts: Tensor, temperature: Tensor) -> Tensor:
        """Continue prompts i64 [batch, prompt]; temperature f32 [batch, 1]. Return ids [batch, length]."""
        self.ids[:, : self.prompt] = prompts
        self.temperature.copy_(temperature)
        device = self.ids.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            for first in range(0, len(prompts), 512):
                self._prefill(slice(first, first + 512))
            self.at.fill_(self.prompt - 1)
            for i in range(self.length - self.prompt):
                if device.type == "cuda" and self.graph is None and i == 3:
                    torch.cuda.synchronize()
                    self.graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(self.graph):
                        self._step()
                    # Capturing runs nothing: the replay below is this step.
                if self.graph is not None:
                    self.graph.replay()
                else:
                    self._step()
        return self.ids.clone()
