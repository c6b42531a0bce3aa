"""Which implementation of each operation runs. Decided once, when an engine is built; nothing falls back later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.mask import DraftMask
from engine.ops.adamw_arenas import AdamWArenas
from engine.ops.draft_inputs import DraftTokens, Supervision
from engine.ops.row_loss import RowLoss
from engine.ops.weight import Weight
from engine.precision import check_fp8_device
from engine.settings_fields import SettingsError

# q [B, Q, H, E], context k, v [B, S, G, E], draft k, v [B, Q, G, E] -> o [B, Q, H, E]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class AttentionFactory(Protocol):
    """Makes the attention of all layers that share a window and a causality, once a step."""

    def __call__(self, mask: DraftMask, S: int, *, window: int | None, causal: bool) -> Attend: ...


@dataclass(frozen=True)
class Ops:
    """One implementation of each operation; the signatures are those of engine/ops/*_ref.py."""

    name: str
    draft_tokens: Callable[..., DraftTokens]
    linear: Callable[[Tensor, Weight], Tensor]
    draft_linear: Callable[[Tensor, Weight], Tensor]  # over all draft positions
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    norm_linear: Callable[[Tensor, Tensor | None, Weight, float, Weight], tuple[Tensor, Tensor]]
    norm_mlp: Callable[..., tuple[Tensor, Tensor]]
    qkv_rope: Callable[..., tuple[Tensor, Tensor, Tensor]]
    supervision: Callable[..., Supervision]
    frozen_head: Callable[..., RowLoss]
    block_sums: Callable[..., tuple[Tensor, Tensor]]
    weigh_rows: Callable[[Tensor, Tensor | None, Tensor], None]
    zero_padding: Callable[[Tensor, Tensor], None]
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
    from engine.ops.block_sums_ref import block_sums_ref
    from engine.ops.draft_tokens_ref import draft_tokens_ref
    from engine.ops.frozen_head_ref import frozen_head_ref
    from engine.ops.linear_ref import linear_ref
    from engine.ops.norm_linear_ref import norm_linear_ref
    from engine.ops.norm_mlp_ref import norm_mlp_ref
    from engine.ops.qkv_rope_ref import qkv_rope_ref
    from engine.ops.rms_norm_ref import add_rms_norm_ref
    from engine.ops.supervision_ref import supervision_ref
    from engine.ops.weigh_rows_ref import weigh_rows_ref
    from engine.ops.zero_padding_ref import zero_padding_ref

    return Ops(
        name="reference",
        draft_tokens=draft_tokens_ref,
        linear=linear_ref,
        draft_linear=linear_ref,
        add_rms_norm=add_rms_norm_ref,
        norm_linear=norm_linear_ref,
        norm_mlp=norm_mlp_ref,
        qkv_rope=qkv_rope_ref,
        supervision=supervision_ref,
        frozen_head=frozen_head_ref,
        block_sums=block_sums_ref,
        weigh_rows=weigh_rows_ref,
        zero_padding=zero_padding_ref,
        adamw=adamw_ref,
        attention=_reference_attention,
    )


def fused_ops(attention: str, precision: str = "bf16") -> Ops:
    """cuBLAS and Triton; `attention` is a key of ATTENTIONS. precision "fp8": in the matmuls over draft positions."""
    from engine.ops.adamw import adamw
    from engine.ops.block_sums import block_sums
    from engine.ops.draft_tokens import draft_tokens
    from engine.ops.frozen_head import frozen_head
    from engine.ops.linear import linear
    from engine.ops.norm_linear import norm_linear
    from engine.ops.norm_mlp import norm_mlp
    from engine.ops.qkv_rope import qkv_rope
    from engine.ops.rms_norm import add_rms_norm
    from engine.ops.supervision import supervision
    from engine.ops.weigh_rows import weigh_rows
    from engine.ops.zero_padding import zero_padding

    ops = Ops(
        name=attention,
        draft_tokens=draft_tokens,
        linear=linear,
        draft_linear=linear,
        add_rms_norm=add_rms_norm,
        norm_linear=norm_linear,
        norm_mlp=norm_mlp,
        qkv_rope=qkv_rope,
        supervision=supervision,
        frozen_head=frozen_head,
        block_sums=block_sums,
        weigh_rows=weigh_rows,
        zero_padding=zero_padding,
        adamw=adamw,
        attention=ATTENTIONS[attention],
    )
    if precision != "fp8":
        return ops
    from engine.ops.linear_fp8 import linear_fp8
    from engine.ops.norm_linear_fp8 import norm_linear_fp8
    from engine.ops.norm_mlp_fp8 import norm_mlp_fp8

    return replace(ops, draft_linear=linear_fp8, norm_linear=norm_linear_fp8, norm_mlp=norm_mlp_fp8)


def select_ops(device: torch.device, attention: str = "auto", precision: str = "bf16") -> Ops:
    """attention: auto | flex | triton | reference. precision: bf16 and fp32 have the same operations, fp8 its own. Raises
    ValueError where the request cannot be met on this device."""
    if attention not in ("auto", *ATTENTIONS):
        raise ValueError(f'expected attention "auto" or one of {sorted(ATTENTIONS)}, found "{attention}"')
    if precision == "fp8":
        check_fp8_device(device)
    if device.type == "cpu":
        if attention not in ("auto", "reference"):
            raise SettingsError(
                f'attention = "{attention}" needs a CUDA device, found cpu; set model.attention = "auto" or run on a GPU'
            )
        return reference_ops()
    return fused_ops("triton" if attention == "auto" else attention, precision)


def reserve_compilations(ops: Ops, shapes: int) -> None:
    """Makes room for so many more shapes where an operation is compiled for each."""
    if ops.name == "flex":
        from engine.ops import attention_flex

        attention_flex.reserve_compilations(shapes)
