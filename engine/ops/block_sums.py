"""A micro-batch's loss and metrics as sums over its blocks, in two launches and a fixed order (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCKS = 16  # draft blocks that one program sums


@triton.jit
def _partial_sums(
    ce_ptr,
    kl_ptr,
    correct_ptr,
    w_ptr,
    weight_ptr,
    keep_ptr,
    ce_weight_ptr,
    kl_weight_ptr,
    accepted_ptr,
    partial_ptr,
    blocks,
    HAS_KL: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    slot = tl.arange(0, WIDTH)[None]
    ok = (block[:, None] < blocks) & (slot < SLOTS)
    at = block[:, None] * SLOTS + slot
    w = tl.load(w_ptr + at, ok, 0.0)
    weight = tl.load(weight_ptr + at, ok, 0.0)
    counts = weight > 0
    ce = tl.load(ce_ptr + at, counts, 0.0)
    loss = tl.load(ce_weight_ptr) * ce
    kl = tl.zeros([BLOCKS, WIDTH], tl.float32)
    if HAS_KL:
        kl = tl.load(kl_ptr + at, counts, 0.0)
        loss += tl.load(kl_weight_ptr) * kl
    supervised = w > 0
    right = supervised & (tl.load(correct_ptr + at, ok, 0) != 0)
    # Accepted are the supervised slots before the first one that is wrong.
    first_wrong = tl.min(tl.where(supervised & (right == 0), slot, WIDTH), 1)[:, None]
    accepted = tl.sum((supervised & (slot < first_wrong)).to(tl.int32), 1)
    tl.store(accepted_ptr + block, accepted, block < blocks)
    kept = tl.load(keep_ptr + block, block < blocks, 0) > 0
    out = partial_ptr + tl.program_id(0) * (6 + 2 * SLOTS)
    tl.store(out, tl.sum(tl.sum((loss * weight).to(tl.float64), 1), 0))
    tl.store(out + 1, tl.sum(tl.sum(weight.to(tl.float64), 1), 0))
    tl.store(out + 2, tl.sum(tl.sum((ce * weight).to(tl.float64), 1), 0))
    tl.store(out + 3, tl.sum(tl.sum((kl * weight).to(tl.float64), 1), 0))
    tl.store(out + 4, tl.sum(accepted.to(tl.float64), 0))
    tl.store(out + 5, tl.sum(kept.to(tl.float64), 0))
    lane = tl.arange(0, WIDTH)
    tl.store(out + 6 + SLOTS + lane, tl.sum(w.to(tl.float64), 0), lane < SLOTS)
    tl.store(out + 6 + lane, tl.sum(right.to(tl.float64), 0), lane < SLOTS)


@triton.jit
def _total(partial_ptr, sums_ptr, programs, SUMS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    column = tl.arange(0, WIDTH)[None]
    total = tl.zeros([ROWS, WIDTH], tl.float64)
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        total += tl.load(partial_ptr + row * SUMS + column, (row < programs) & (column < SUMS), 0.0)
    tl.store(sums_ptr + tl.arange(0, WIDTH), tl.sum(total, 0), tl.arange(0, WIDTH) < SUMS)


def block_sums(
    ce: Tensor,
    kl: Tensor | None,
    correct: Tensor,
    w: Tensor,
    weight: Tensor,
    block_keep_mask_BN: Tensor,
    ce_weight: Tensor,
    kl_weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """Same contract as block_sums_ref; everything contiguous."""
    B, N, slots = ce.shape
    programs, count = triton.cdiv(B * N, _BLOCKS), 6 + 2 * slots
    partial = torch.empty(programs, count, dtype=torch.float64, device=ce.device)
    sums = torch.empty(count, dtype=torch.float64, device=ce.device)
    accepted = torch.empty(B, N, dtype=torch.int32, device=ce.device)
    _partial_sums[(programs,)](
        ce,
        ce if kl is None else kl,
        correct,
        w,
        weight,
        block_keep_mask_BN,
        ce_weight,
        kl_weight,
        accepted,
        partial,
        B * N,
        HAS_KL=kl is not None,
        SLOTS=slots,
        WIDTH=triton.next_power_of_2(slots),
        BLOCKS=_BLOCKS,
        num_warps=4,
    )
    width = triton.next_power_of_2(count)
    _total[(1,)](partial, sums, programs, SUMS=count, WIDTH=width, ROWS=max(1, 1024 // width), num_warps=4)
    return sums, accepted
