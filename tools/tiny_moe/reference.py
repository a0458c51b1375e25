"""transformers' own modules with tiny-moe weights: the float32 reference that parity compares against.

Must not know: our compact model's forward pass. transformers has the text trunk; the MTP block is assembled
here from its decoder layer and norms, as `graph_mtp` of src/models/qwen35moe.cpp at the pin orders them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.qwen3_5_moe import configuration_qwen3_5_moe as configuration
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

from tools.tiny_moe.model import Shape


def config(s: Shape) -> configuration.Qwen3_5MoeTextConfig:
    """Express a Shape as transformers' text configuration."""
    return configuration.Qwen3_5MoeTextConfig(
        vocab_size=s.vocab, hidden_size=s.width, num_hidden_layers=s.layers, num_attention_heads=s.heads,
        num_key_value_heads=1, head_dim=s.head_dim, moe_intermediate_size=s.expert_ff,
        shared_expert_intermediate_size=s.shared_ff, num_experts=s.experts, num_experts_per_tok=s.top_k,
        linear_conv_kernel_dim=s.conv, linear_key_head_dim=s.delta_dim, linear_value_head_dim=s.delta_dim,
        linear_num_key_heads=1, linear_num_value_heads=s.delta_heads, max_position_embeddings=s.context,
        rms_norm_eps=s.eps, tie_word_embeddings=True, full_attention_interval=s.interval,
        layer_types=["full_attention" if s.is_full(i) else "linear_attention" for i in range(s.layers)],
        rope_parameters=dict(
            rope_type="default", rope_theta=s.rope_theta, partial_rotary_factor=s.rotary / s.head_dim,
            mrope_section=[11, 11, 10], mrope_interleaved=True,
        ),
    )  # fmt: skip


class Block(nn.Module):
    """The MTP block out of transformers' parts, with the `mtp.*` parameter names."""

    def __init__(self, c: configuration.Qwen3_5MoeTextConfig, full_layer: int) -> None:
        super().__init__()
        n = c.hidden_size
        self.fc = nn.Linear(2 * n, n, bias=False)
        self.layers = nn.ModuleList([modeling.Qwen3_5MoeDecoderLayer(c, full_layer)])
        norm = modeling.Qwen3_5MoeRMSNorm
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (
            norm(n, c.rms_norm_eps) for _ in range(3)
        )

    def forward(self, emb: Tensor, h: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Map a token embedding and the row before it, both [B, T, width], to the next row."""
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(emb), self.pre_fc_norm_hidden(h)], -1))
        return self.norm(self.layers[0](x, position_embeddings=rope, attention_mask=None))


class Reference(nn.Module):
    """transformers' Qwen3_5MoeForCausalLM and the MTP block over it."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        c = config(s)
        self.trunk = modeling.Qwen3_5MoeForCausalLM(c)
        self.mtp = Block(c, next(i for i in range(s.layers) if s.is_full(i)))

    @torch.no_grad()
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Map ids i64 [B, T] to rows [B, T, width], logits, and the MTP block's [B, T-1, ...] of both."""
        embed, head = self.trunk.model.embed_tokens, self.trunk.lm_head
        h = self.trunk.model(input_ids=ids).last_hidden_state
        # Token t+1 with row t sits at position t+1; only distances matter, so positions may start at zero.
        at = torch.arange(ids.shape[1] - 1).view(1, 1, -1).expand(3, ids.shape[0], -1)
        rope = self.trunk.model.rotary_emb(h, at)
        m = self.mtp(embed(ids[:, 1:]), h[:, :-1], rope)
        return h, head(h), m, head(m)


def reference(state: dict[str, Tensor], s: Shape) -> Reference:
    """Build the reference with the weights of a TinyMoe state dict, every one used."""
    r = Reference(s).eval()
    trunk = {k: v for k, v in state.items() if k.startswith("model.")}
    r.trunk.load_state_dict(trunk | {"lm_head.weight": state["model.embed_tokens.weight"]})
    r.mtp.load_state_dict({k.removeprefix("mtp."): v for k, v in state.items() if k.startswith("mtp.")})
    return r
