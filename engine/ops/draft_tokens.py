"""Tokens and positions of every draft slot, and of the context, in one launch (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.draft_inputs import DraftTokens

_BLOCK = 1024


@triton.jit
def _tokens(
    input_ids_ptr,
    position_ids_ptr,
    row_lengths_ptr,
    anchors_ptr,
    keep_ptr,
    ids_ptr,
    shared_ptr,
    positions_ptr,
    context_positions_ptr,
    rows,
    S,
    N,
    mask_token_id,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # As a position of the context.
    inside = i < rows * S
    real = inside & (i % S < tl.load(row_lengths_ptr + i // S, inside, 0))
    tl.store(context_positions_ptr + i, tl.load(position_ids_ptr + i, real, 0), inside)
    # As a slot of the draft.
    slot, block = i % K, i // K
    drafted = block < rows * N
    anchor = tl.load(anchors_ptr + block, drafted, 0)
    kept = drafted & (tl.load(keep_ptr + block, drafted, 0) > 0)
    at = block // N * S + anchor
    token = tl.load(input_ids_ptr + at, kept & (slot == 0), mask_token_id)
    tl.store(ids_ptr + i, token, drafted)
    tl.store(positions_ptr + i, tl.load(position_ids_ptr + at, kept, 0) + slot, drafted)
    tl.store(shared_ptr + block, token, drafted & (slot == 0))
    tl.store(shared_ptr + block, tl.full([BLOCK], mask_token_id, tl.int32), (block == rows * N) & (slot == 0))


def draft_tokens(
    input_ids_BS: Tensor,
    position_ids_BS: Tensor,
    row_lengths_B: Tensor,
    anchor_positions_BN: Tensor,
    block_keep_mask_BN: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
) -> DraftTokens:
    """Same contract as draft_tokens_ref; everything contiguous."""
    B, S = input_ids_BS.shape
    N = anchor_positions_BN.shape[1]
    ids, positions = (torch.empty(B * N * block_size, dtype=torch.int32, device=input_ids_BS.device) for _ in range(2))
    shared, context_positions = ids.new_empty(B * N + 1), ids.new_empty(B * S)
    # One slot more than there are: where the shared mask token is written.
    count = max(B * S, B * N * block_size + 1)
    _tokens[(triton.cdiv(count, _BLOCK),)](
        input_ids_BS,
        position_ids_BS,
        row_lengths_B,
        anchor_positions_BN,
        block_keep_mask_BN,
        ids,
        shared,
        positions,
        context_positions,
        B,
        S,
        N,
        mask_token_id,
        K=block_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return DraftTokens(ids, shared, positions, context_positions)
