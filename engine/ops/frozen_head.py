"""The frozen-head loss: logits by cuBLAS for a chunk of rows, then one Triton program a row that takes loss and argmax from
them and writes their gradient over them, and a second matmul back to the hidden size. One chunk of logits is all that ever
exists. Factors of a whole row - softmax's, the loss weight - come after that matmul (weigh_rows.py), the normaliser with the
update."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.row_loss import RowLoss, Teacher

_BLOCK_V = 4096
# 2^80 times the vocabulary's size is far from fp32's end, and what is 2^-80 of the largest does not count.
_HEADROOM = tl.constexpr(80.0)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _cross_entropy(
    logits_ptr,
    label_ptr,
    ce_weight_ptr,
    ce_ptr,
    correct_ptr,
    scale_ptr,
    V,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One read and one write of the logits. Softmax has one factor a row, 1 / sum, which may as well come after the matmul:
    what is written is e^(z - reference), less the sum at the label, and ce_weight / sum goes to scale_ptr."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    dtype = logits_ptr.dtype.element_ty
    lanes = tl.arange(0, BLOCK)
    label = tl.load(label_ptr + row)
    # Read here: the reduction below keeps every warp behind it, and after it another warp may write there.
    label_logit = tl.load(logits_ptr + label).to(tl.float32)
    loaded = tl.load(logits_ptr + lanes, lanes < V, -float("inf"))
    reference = tl.max(loaded.to(tl.float32), 0) * _LOG2_E
    total = tl.zeros([BLOCK], tl.float32)
    beaten = 0
    for start in range(0, V, BLOCK):
        v = start + lanes
        z = loaded.to(tl.float32)
        loaded = tl.load(
            logits_ptr + BLOCK + v, BLOCK + v < V, -float("inf")
        )  # the next block's, on their way meanwhile
        block_top = tl.max(z, 0)
        if block_top >= label_logit:
            if block_top > label_logit:
                beaten = 1
            else:
                # Of equals the first wins.
                beaten = tl.maximum(beaten, tl.max(((z == label_logit) & (v < label)).to(tl.int32), 0))
        if block_top * _LOG2_E > reference + _HEADROOM:
            # The first block was no guide: what is written so far moves to the new reference.
            shrink = tl.exp2(reference - block_top * _LOG2_E)
            total *= shrink
            if GRADIENT:
                for done in range(0, start, BLOCK):
                    at = logits_ptr + done + lanes
                    tl.store(at, (tl.load(at).to(tl.float32) * shrink).to(dtype))
            reference = block_top * _LOG2_E
        e = tl.exp2(z * _LOG2_E - reference)
        total += e
        if GRADIENT:
            tl.store(logits_ptr + v, e.to(dtype), v < V)
    sum_e = tl.sum(total, 0)
    tl.store(ce_ptr + row, (reference + tl.log2(sum_e)) / _LOG2_E - label_logit)
    tl.store(correct_ptr + row, 1 - beaten)
    if GRADIENT:
        # Another thread may have written the label's e in the loop: it comes before this store, not after.
        tl.debug_barrier()
        tl.store(logits_ptr + label, (tl.exp2(label_logit * _LOG2_E - reference) - sum_e).to(dtype))
        tl.store(scale_ptr + row, tl.load(ce_weight_ptr) / sum_e)


@triton.jit
def _soft_labels(
    logits_ptr,
    label_ptr,
    teacher_ptr,
    teacher_row_ptr,
    ce_weight_ptr,
    kl_weight_ptr,
    ce_ptr,
    kl_ptr,
    correct_ptr,
    V,
    GATHER: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Two reads: the gradient mixes two distributions, and both sums are known at the end only."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    label = tl.load(label_ptr + row)
    # Read here: the loop's reductions keep every warp behind it, and after them another warp may write the gradient there.
    label_logit = tl.load(logits_ptr + label).to(tl.float32)
    top = -float("inf")
    total = 0.0
    best = 0
    if GATHER:
        teacher_ptr += tl.load(teacher_row_ptr + row).to(tl.int64) * V
    else:
        teacher_ptr += row * V
    t_top = -float("inf")
    t_total = 0.0
    t_self = 0.0  # sum of e^(t - t_top) t
    t_cross = 0.0  # sum of e^(t - t_top) z
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        ok = v < V
        z = tl.load(logits_ptr + v, ok, -float("inf")).to(tl.float32)
        block_top, block_best = tl.max(z, 0, return_indices=True, return_indices_tie_break_left=True)
        best = tl.where(block_top > top, start + block_best, best)
        new_top = tl.maximum(top, block_top)
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(z - new_top), 0)
        top = new_top
        t = tl.load(teacher_ptr + v, ok, -float("inf")).to(tl.float32)
        new_t_top = tl.maximum(t_top, tl.max(t, 0))
        shrink = tl.exp(t_top - new_t_top)
        e = tl.exp(t - new_t_top)
        t_total = t_total * shrink + tl.sum(e, 0)
        t_self = t_self * shrink + tl.sum(tl.where(ok, e * t, 0.0), 0)
        t_cross = t_cross * shrink + tl.sum(tl.where(ok, e * z, 0.0), 0)
        t_top = new_t_top
    lse = top + tl.log(total)
    t_lse = t_top + tl.log(t_total)
    tl.store(ce_ptr + row, lse - label_logit)
    tl.store(correct_ptr + row, (best == label).to(tl.int8))
    tl.store(kl_ptr + row, (t_self - t_cross) / t_total - t_lse + lse)
    if GRADIENT:
        ce_weight = tl.load(ce_weight_ptr)
        kl_weight = tl.load(kl_weight_ptr)
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            ok = v < V
            z = tl.load(logits_ptr + v, ok, -float("inf")).to(tl.float32)
            t = tl.load(teacher_ptr + v, ok, -float("inf")).to(tl.float32)
            dz = (ce_weight + kl_weight) * tl.exp(z - lse) - tl.where(v == label, ce_weight, 0.0)
            dz -= kl_weight * tl.exp(t - t_lse)
            tl.store(logits_ptr + v, dz.to(logits_ptr.dtype.element_ty), ok)


def frozen_head(
    h_RD: Tensor,
    head_VD: Tensor,
    labels_R: Tensor,
    *,
    ce_weight: Tensor,
    kl_weight: Tensor,
    teacher: Teacher | None = None,
    gradient: bool = True,
    chunk_rows: int = 4096,
) -> RowLoss:
    """Same contract as frozen_head_ref: h [R, D], head [V, D], labels int32 or int64 [R]; 0-D fp32 weights on the device.

    Teacher logits are formed once for whichever are fewer: the teacher's own rows (kept for the whole call) or the draft
    rows (a chunk at a time).
    """
    R, V = h_RD.shape[0], head_VD.shape[0]
    chunk_rows = min(chunk_rows, R)
    ce, kl = (torch.zeros(R, device=h_RD.device, dtype=torch.float32) for _ in range(2))
    correct = torch.empty(R, device=h_RD.device, dtype=torch.int8)
    dh = torch.empty_like(h_RD) if gradient else None
    scale = torch.empty_like(ce) if gradient and teacher is None else None
    logits_CV = h_RD.new_empty(chunk_rows, V)
    whole = teacher is not None and teacher.hidden.shape[0] <= R
    if teacher is not None:
        teacher_logits = teacher.hidden @ head_VD.t() if whole else h_RD.new_empty(chunk_rows, V)
    sizes = {"V": V, "GRADIENT": gradient, "BLOCK": _BLOCK_V}
    for start in range(0, R, chunk_rows):
        rows = slice(start, min(start + chunk_rows, R))
        logits = logits_CV[: rows.stop - start]
        torch.mm(h_RD[rows], head_VD.t(), out=logits)
        grid = (len(logits),)
        if teacher is None:
            scales = ce if scale is None else scale  # any valid pointer where no gradient is formed
            _cross_entropy[grid](
                logits, labels_R[rows], ce_weight, ce[rows], correct[rows], scales[rows], **sizes, num_warps=4
            )
        else:
            teacher_row = teacher.row[rows]
            if not whole:
                torch.mm(teacher.hidden[teacher_row], head_VD.t(), out=teacher_logits[: len(logits)])
            _soft_labels[grid](
                logits,
                labels_R[rows],
                teacher_logits,
                teacher_row,
                ce_weight,
                kl_weight,
                ce[rows],
                kl[rows],
                correct[rows],
                GATHER=whole,
                **sizes,
                num_warps=8,
            )
        if dh is not None:
            torch.mm(logits, head_VD, out=dh[rows])
    return RowLoss(ce, kl, correct.bool(), dh, scale)
