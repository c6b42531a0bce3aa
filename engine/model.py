"""The DFlash drafter's forward pass over a training batch (arXiv 2602.06036).

Many blocks of one row are drafted at once: slot 0 of block n holds the token at its anchor, the other slots the mask token.
All of them attend to the context of target hidden states and to their own block.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.drafter_config import DrafterConfig
from engine.kernels import Attend, Ops
from engine.mask import DraftMask
from engine.ops.weight import Weight
from engine.params import ParamArena
from engine.rope import rope_attention_scaling, rope_inv_freq

Recompute = Literal["none", "mlp", "layer"]


class Drafter:
    """Weights, tables and operations of a drafter; call it with a batch's static inputs."""

    def __init__(
        self,
        config: DrafterConfig,
        params: ParamArena,
        embedding_VD: Tensor,
        ops: Ops,
        *,
        max_positions: int,
        recompute: Recompute = "none",
    ) -> None:
        """embedding: the target's, frozen, in compute precision. max_positions: positions the RoPE tables cover (S + K).
        recompute: what the backward pass forms again instead of keeping it: nothing, the MLP's hidden values, whole layers."""
        self.config, self.ops, self.embedding, self.recompute = config, ops, embedding_VD, recompute
        self.gradient_sums = params.gradient_sums
        self.fc = params.fused("fc.weight")
        self.hidden_norm, self.norm = params.fused("hidden_norm.weight"), params.fused("norm.weight")
        self.layers = [_layer_weights(params, f"layers.{i}.") for i in range(config.num_hidden_layers)]
        device = embedding_VD.device
        angles = torch.arange(max_positions, device=device)[:, None] * rope_inv_freq(
            config.rope, config.head_dim, device
        )
        scaling = rope_attention_scaling(config.rope)
        self.cos_PE, self.sin_PE = angles.cos() * scaling, angles.sin() * scaling

    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        """batch: the tensors of buffers.filling.batch_specs. Returns the final-normed hidden states of the slots that
        predict, 1..K-1: [B, N, K - 1, D].

        Slot 0 holds the anchor, which is known: after the last attention nothing of it is needed. In the first layer all other
        slots hold the same embedding, so they share one row of the projections.

        Writes zeros over whatever lies in the padding of batch["target_hidden"]: a weight gradient would take 0 * NaN in.
        """
        config, ops = self.config, self.ops
        B, S, _ = batch["target_hidden"].shape
        N, K = batch["anchor_positions"].shape[1], config.block_size
        mask = DraftMask(batch["anchor_positions"], batch["block_keep_mask"], batch["context_start"], K)
        attends = self._attends(mask, S)

        ops.zero_padding(batch["target_hidden"], batch["row_lengths"])
        context = ops.linear(rearrange(batch["target_hidden"], "b s f -> (b s) f"), self.fc)
        _, context = ops.add_rms_norm(context, None, self.hidden_norm, config.rms_norm_eps)
        tokens = ops.draft_tokens(
            batch["input_ids"],
            batch["position_ids"],
            batch["row_lengths"],
            batch["anchor_positions"],
            batch["block_keep_mask"],
            block_size=K,
            mask_token_id=config.mask_token_id,
        )
        # One row for slot 0 of every block and a last one for all mask slots, which layer 0 projects once.
        shared, stream, delta = self.embedding[tokens.shared_ids], self.embedding[tokens.ids], None
        for i, attend in enumerate(attends):
            layer = partial(self._layer, i, attend, B, tokens.context_positions, tokens.positions)
            if self.recompute == "layer" and torch.is_grad_enabled():
                layer = partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=False)
            stream, delta = layer(context, stream, delta, shared if i == 0 else None)
        _, x = ops.add_rms_norm(stream, delta, self.norm, config.rms_norm_eps)
        return rearrange(x, "(b n slots) d -> b n slots d", b=B, n=N)

    def _layer(
        self,
        i: int,
        attend: Attend,
        batch_rows: int,
        context_positions: Tensor,
        draft_positions: Tensor,
        context: Tensor,
        stream: Tensor,
        delta: Tensor | None,
        shared: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(stream, what the next norm adds to it), both [B * Q, D], behind layer i; without slot 0 behind the last.

        shared: the rows from which layer 0 takes its queries, keys and values; elsewhere they come from the stream itself.
        """
        config, ops, layer, eps = self.config, self.ops, self.layers[i], self.config.rms_norm_eps
        K, B = config.block_size, batch_rows
        norms = (layer["self_attn.q_norm"], layer["self_attn.k_norm"], self.cos_PE, self.sin_PE)
        shape = {"num_kv_heads": config.num_key_value_heads, "head_dim": config.head_dim, "eps": eps}
        # The context first: backward, its part of [q | k | v]'s gradient then comes after the whole (ops/weight.py).
        _, k_context, v_context = ops.qkv_rope(
            ops.linear(context, layer["kv"]), *norms, context_positions, num_heads=0, **shape
        )
        if shared is None:
            stream, qkv = ops.norm_linear(stream, delta, layer["input_layernorm"], eps, layer["qkv"])
        else:
            _, qkv = ops.norm_linear(shared, None, layer["input_layernorm"], eps, layer["qkv"])
        H, slots = config.num_attention_heads, 0 if shared is None else K
        q, k, v = ops.qkv_rope(qkv, *norms, draft_positions, num_heads=H, shared_slots=slots, **shape)
        q, k, v, k_context, v_context = (
            rearrange(t, "(b t) h e -> b t h e", b=B) for t in (q, k, v, k_context, v_context)
        )
        o = attend(q, k_context, v_context, k, v)
        return ops.norm_mlp(
            stream,
            ops.draft_linear(rearrange(o, "b q h e -> (b q) (h e)"), layer["self_attn.o_proj"]),
            layer["post_attention_layernorm"],
            eps,
            layer["gate_up"],
            layer["mlp.down_proj"],
            drop_first_of=K if layer is self.layers[-1] else 0,
            recompute=self.recompute == "mlp",
        )

    def _attends(self, mask: DraftMask, S: int) -> list[Attend]:
        """One attention a layer; layers of one kind share it, so its mask is built once a step."""
        kinds = [(self.config.layer_window(i), self.config.layer_causal(i)) for i in range(len(self.layers))]
        made = {kind: self.ops.attention(mask, S, window=kind[0], causal=kind[1]) for kind in dict.fromkeys(kinds)}
        return [made[kind] for kind in kinds]


def _layer_weights(params: ParamArena, prefix: str) -> dict[str, Weight]:
    names = [f"{prefix}self_attn.{part}_proj.weight" for part in "qkv"]
    weights = {"qkv": params.fused(*names), "kv": params.fused(*names[1:])}
    weights["gate_up"] = params.fused(f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight")
    singles = (
        "self_attn.o_proj",
        "mlp.down_proj",
        "self_attn.q_norm",
        "self_attn.k_norm",
        "input_layernorm",
        "post_attention_layernorm",
    )
    return weights | {name: params.fused(f"{prefix}{name}.weight") for name in singles}
