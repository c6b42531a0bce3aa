"""Labels and weights of every slot that predicts, in one launch (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.draft_inputs import Supervision

_BLOCK = 1024


@triton.jit
def _supervise(
    input_ids_ptr,
    loss_mask_ptr,
    anchors_ptr,
    keep_ptr,
    context_end_ptr,
    gamma_ptr,
    labels_ptr,
    w_ptr,
    decayed_ptr,
    blocks,
    S,
    N,
    SLOTS: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot, block = i % SLOTS, i // SLOTS
    ok = block < blocks
    at = tl.load(anchors_ptr + block, ok, 0) + slot + 1
    inside = ok & (at < tl.load(context_end_ptr + block, ok, 0)) & (tl.load(keep_ptr + block, ok, 0) > 0) & (at < S)
    source = block // N * S + at
    supervised = inside & (tl.load(loss_mask_ptr + source, inside, 0) > 0)
    tl.store(labels_ptr + i, tl.load(input_ids_ptr + source, supervised, 0).to(tl.int64), ok)
    w = supervised.to(tl.float32)
    tl.store(w_ptr + i, w, ok)
    if HAS_GAMMA:
        tl.store(decayed_ptr + i, w * tl.exp(-slot.to(tl.float32) / tl.load(gamma_ptr)), ok)


def supervision(
    input_ids_BS: Tensor,
    loss_mask_BS: Tensor,
    anchor_positions_BN: Tensor,
    block_keep_mask_BN: Tensor,
    context_end_BN: Tensor,
    gamma: Tensor | None,
    *,
    block_size: int,
) -> Supervision:
    """Same contract as supervision_ref; everything contiguous."""
    B, N = anchor_positions_BN.shape
    shape, device = (B, N, block_size - 1), input_ids_BS.device
    labels = torch.empty(shape, dtype=torch.int64, device=device)
    w = torch.empty(shape, dtype=torch.float32, device=device)
    decayed = w if gamma is None else torch.empty_like(w)
    _supervise[(triton.cdiv(w.numel(), _BLOCK),)](
        input_ids_BS,
        loss_mask_BS,
        anchor_positions_BN,
        block_keep_mask_BN,
        context_end_BN,
        w if gamma is None else gamma,
        labels,
        w,
        decayed,
        B * N,
        input_ids_BS.shape[1],
        N,
        SLOTS=block_size - 1,
        HAS_GAMMA=gamma is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return Supervision(labels, w, decayed)
