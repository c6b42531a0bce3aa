"""A DFlash drafter in plain torch, with the names through which SpecForge's is used. Not SpecForge's code."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Config(SimpleNamespace):
    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Config":
        return cls(**values)


class Rotary(nn.Module):
    inv_freq: Tensor

    def __init__(self, theta: float, head_dim: int) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.register_buffer("inv_freq", theta**-exponents, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, heads, E] turned by its positions [T]."""
        angles = positions[:, None].float() * self.inv_freq.float()
        cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        H, G, E, D = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_size
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(D, heads * E, bias=False) for heads in (H, G, G))
        self.o_proj = nn.Linear(H * E, D, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(E, c.rms_norm_eps), nn.RMSNorm(E, c.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, rope: Rotary, mask: Tensor) -> Tensor:
        E, both = self.q_norm.normalized_shape[0], torch.cat([context, x])
        q = rope(self.q_norm(self.q_proj(x).unflatten(-1, (-1, E))), positions[len(context) :])
        k = rope(self.k_norm(self.k_proj(both).unflatten(-1, (-1, E))), positions)
        v = self.v_proj(both).unflatten(-1, (-1, E))
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(o[0].transpose(0, 1).flatten(1))


class Mlp(nn.Module):
    def __init__(self, D: int, inter: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, inter, bias=False), nn.Linear(D, inter, bias=False)
        self.down_proj = nn.Linear(inter, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c.hidden_size, c.intermediate_size)
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, *attention: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDraftModel(nn.Module):
    config_class = Config

    def __init__(self, c: Config) -> None:
        super().__init__()
        D, taps = c.hidden_size, len(c.dflash_config["target_layer_ids"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.fc = nn.Linear(taps * D, D, bias=False)
        self.norm, self.hidden_norm = nn.RMSNorm(D, c.rms_norm_eps), nn.RMSNorm(D, c.rms_norm_eps)
        self.rotary_emb = Rotary(getattr(c, "rope_theta", 10000.0), c.head_dim)

    def forward(self, x: Tensor, target_hidden: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """x [Q, D], target_hidden [S, L * D], positions [S + Q], mask [Q, S + Q]."""
        context = self.hidden_norm(self.fc(target_hidden))
        for layer in self.layers:
            x = layer(x, context, positions, self.rotary_emb, mask)
        return self.norm(x)
