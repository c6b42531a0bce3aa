"""Which implementation of each operation runs. Decided once, when an engine is built; nothing falls back later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.mask import DraftMask
from engine.ops.adamw_arenas import AdamWArenas
from engine.ops.row_loss import RowLoss
from engine.ops.weight import Weight

# q [B, Q, H, E], context k, v [B, S, G, E], draft k, v [B, Q, G, E] -> o [B, Q, H, E]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class AttentionFactory(Protocol):
    """Makes the attention of all layers that share a window and a causality, once a step."""

    def __call__(self, mask: DraftMask, S: int, *, window: int | None, causal: bool) -> Attend: ...


@dataclass(frozen=True)
class Ops:
    """One implementation of each operation; the signatures are those of engine/ops/*_ref.py."""

    name: str
    linear: Callable[[Tensor, Weight], Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    qkv_rope: Callable[..., tuple[Tensor, Tensor, Tensor]]
    mlp: Callable[[Tensor, Weight, Weight], Tensor]
    frozen_head: Callable[..., RowLoss]
    adamw: Callable[[AdamWArenas, Tensor], None]
    attention: AttentionFactory


def _reference_attention(mask: DraftMask, S: int, *, window: int | None, causal: bool) -> Attend:
    from engine.ops.attention_ref import attention_ref

    return partial(attention_ref, mask=mask, window=window, causal=causal)


def _flex_attention(mask: DraftMask, S: int, *, window: int | None, causal: bool) -> Attend:
    from engine.ops.attention_flex import attention_flex, block_mask

    return partial(attention_flex, tiles=block_mask(mask, S, window=window, causal=causal))


def _triton_attention(mask: DraftMask, S: int, *, window: int | None, causal: bool) -> Attend:
    from engine.ops.attention import attention

    return partial(attention, mask=mask, window=window, causal=causal)


ATTENTIONS: dict[str, AttentionFactory] = {
    "reference": _reference_attention,
    "flex": _flex_attention,
    "triton": _triton_attention,
}


def reference_ops() -> Ops:
    """Plain torch throughout: the definition, and what runs on the CPU."""
    from engine.ops.adamw_ref import adamw_ref
    from engine.ops.frozen_head_ref import frozen_head_ref
    from engine.ops.linear_ref import linear_ref
    from engine.ops.mlp_ref import mlp_ref
    from engine.ops.qkv_rope_ref import qkv_rope_ref
    from engine.ops.rms_norm_ref import add_rms_norm_ref

    return Ops(
        "reference",
        linear_ref,
        add_rms_norm_ref,
        qkv_rope_ref,
        mlp_ref,
        frozen_head_ref,
        adamw_ref,
        _reference_attention,
    )


def fused_ops(attention: str) -> Ops:
    """cuBLAS and Triton; `attention` is a key of ATTENTIONS."""
    from engine.ops.adamw import adamw
    from engine.ops.frozen_head import frozen_head
    from engine.ops.linear import linear
    from engine.ops.mlp import mlp
    from engine.ops.qkv_rope import qkv_rope
    from engine.ops.rms_norm import add_rms_norm

    return Ops(attention, linear, add_rms_norm, qkv_rope, mlp, frozen_head, adamw, ATTENTIONS[attention])


def select_ops(device: torch.device, attention: str = "auto") -> Ops:
    """attention: auto | flex | triton | reference. Raises ValueError where the request cannot be met on this device."""
    if attention not in ("auto", *ATTENTIONS):
        raise ValueError(f'expected attention "auto" or one of {sorted(ATTENTIONS)}, found "{attention}"')
    if device.type == "cpu":
        if attention not in ("auto", "reference"):
            raise ValueError(
                f'attention = "{attention}" needs a CUDA device, found cpu; set model.attention = "auto" or run on a GPU'
            )
        return reference_ops()
    return fused_ops("triton" if attention == "auto" else attention)
