"""A drafter as a server runs it, written from config.json and model.safetensors alone with transformers' Qwen3 parts.

Nothing of the engine is imported: two readings of one checkpoint that agree are a proof, one reading twice is none. As in
vLLM (qwen3_dflash.py) the context's keys and values are projected when its tokens are accepted and stay in a cache; a
block's queries then see the cache and the block's own keys. Who sees whom is decided by positions, as z-lab's own model does.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)


def read_config(folder: Path) -> Any:
    """config.json as vLLM makes a draft's config of it: z-lab's as it stands, speculators' by its update_dflash."""
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if "speculators_model_type" not in raw:
        return Qwen3Config.from_pretrained(folder)
    layers = dict(raw["transformer_layer_config"])
    layers["dflash_config"] = {
        "mask_token_id": raw["mask_token_id"],
        "target_layer_ids": [i - 1 for i in raw["aux_hidden_state_layer_ids"]],
    }
    return Qwen3Config(**layers | {"block_size": raw["block_size"]})


class ServedDrafter(nn.Module):
    """One sequence: `accept` what the target took, `draft` the next block. In fp32."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        config = read_config(folder)
        self.config = config
        dflash = config.dflash_config
        self.block_size, self.mask_token_id = int(config.block_size), int(dflash["mask_token_id"])
        self.target_layer_ids = list(dflash["target_layer_ids"])
        D = config.hidden_size
        self.fc = nn.Linear(len(self.target_layer_ids) * D, D, bias=False)
        self.hidden_norm = Qwen3RMSNorm(D, eps=config.rms_norm_eps)
        self.norm = Qwen3RMSNorm(D, eps=config.rms_norm_eps)
        # Any: what a module holds has no type of its own.
        self.layers: Any = nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        stored = load_file(folder / "model.safetensors")
        own = {name: tensor for name, tensor in stored.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
        self.load_state_dict(own, strict=True)
        self.float().eval().requires_grad_(False)
        self.rotary = Qwen3RotaryEmbedding(config)
        self.forget()

    def forget(self) -> None:
        """An empty context."""
        self.length = 0
        self.keys: list[list[Tensor]] = [[] for _ in self.layers]
        self.values: list[list[Tensor]] = [[] for _ in self.layers]

    def accept(self, taps: Tensor) -> None:
        """taps [T, L*D]: the target's hidden states at the next T accepted tokens, appended to every layer's cache."""
        context = self.hidden_norm(self.fc(taps.float()))[None]
        cos, sin = self._angles(context, self.length, len(taps))
        for i, layer in enumerate(self.layers):
            keys, values = _keys_values(layer.self_attn, context)
            self.keys[i].append(apply_rotary_pos_emb(keys, keys, cos, sin)[1])
            self.values[i].append(values)
        self.length += len(taps)

    def draft(self, anchor_embedding: Tensor, mask_embedding: Tensor) -> Tensor:
        """Hidden states [K, D] after the final norm of the block whose slot 0 follows the accepted tokens."""
        K = self.block_size
        x = torch.cat([anchor_embedding[None], mask_embedding.expand(K - 1, -1)]).float()[None]
        cos, sin = self._angles(x, self.length, K)
        for i, layer in enumerate(self.layers):
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            queries = attention.q_norm(attention.q_proj(normed).unflatten(-1, (-1, attention.head_dim))).transpose(1, 2)
            keys, values = _keys_values(attention, normed)
            queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
            seen = torch.zeros(K, self.length + K).masked_fill(~self._visible(i), float("-inf"))[None, None]
            out, _ = eager_attention_forward(
                attention,
                queries,
                torch.cat([*self.keys[i], keys], dim=2),
                torch.cat([*self.values[i], values], dim=2),
                seen,
                scaling=attention.scaling,
            )
            x = x + attention.o_proj(out.flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        hidden: Tensor = self.norm(x)[0]
        return hidden

    def _visible(self, i: int) -> Tensor:
        """bool [K, length + K] by positions alone; the flag at the top, then dflash_config's, then the layer's kind."""
        config = self.config
        sliding = config.layer_types[i] == "sliding_attention"
        causal = getattr(config, "is_causal", None)
        if causal is None:
            causal = config.dflash_config.get("causal")
        if causal is None:
            causal = sliding
        key = torch.arange(self.length + self.block_size)[None]
        query = self.length + torch.arange(self.block_size)[:, None]
        visible = torch.ones_like(key - query, dtype=torch.bool)
        if causal:
            visible &= key <= query
        if sliding:
            visible &= (query - key).abs() < config.sliding_window
        return visible

    def _angles(self, like: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(like, torch.arange(start, start + count)[None])
        return cos, sin


def _keys_values(attention: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """[1, G, T, E], normed but not yet turned."""
    shape = (-1, attention.head_dim)
    keys = attention.k_norm(attention.k_proj(x).unflatten(-1, shape)).transpose(1, 2)
    return keys, attention.v_proj(x).unflatten(-1, shape).transpose(1, 2)
