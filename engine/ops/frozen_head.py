"""The frozen-head loss: logits by cuBLAS for a chunk of rows, then one Triton program a row that reads them twice - online
log-sum-exp, argmax and label logit, then the gradient written over them - and a second matmul back to the hidden size.
One chunk of logits is all that ever exists. Row weights and the normaliser come later (objective.py, the update)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.row_loss import RowLoss, Teacher

_BLOCK_V = 4096


@triton.jit
def _row_loss(
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
    HAS_TEACHER: tl.constexpr,
    GATHER: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    label = tl.load(label_ptr + row)
    # Read here: the loop's reductions keep every warp behind it, and after them another warp may write the gradient there.
    label_logit = tl.load(logits_ptr + label).to(tl.float32)
    top = -float("inf")
    total = 0.0
    best = 0
    if HAS_TEACHER:
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
        if HAS_TEACHER:
            t = tl.load(teacher_ptr + v, ok, -float("inf")).to(tl.float32)
            new_t_top = tl.maximum(t_top, tl.max(t, 0))
            shrink = tl.exp(t_top - new_t_top)
            e = tl.exp(t - new_t_top)
            t_total = t_total * shrink + tl.sum(e, 0)
            t_self = t_self * shrink + tl.sum(tl.where(ok, e * t, 0.0), 0)
            t_cross = t_cross * shrink + tl.sum(tl.where(ok, e * z, 0.0), 0)
            t_top = new_t_top
    lse = top + tl.log(total)
    tl.store(ce_ptr + row, lse - label_logit)
    tl.store(correct_ptr + row, (best == label).to(tl.int8))
    if HAS_TEACHER:
        t_lse = t_top + tl.log(t_total)
        tl.store(kl_ptr + row, (t_self - t_cross) / t_total - t_lse + lse)
    if GRADIENT:
        ce_weight = tl.load(ce_weight_ptr)
        kl_weight = 0.0
        if HAS_TEACHER:
            kl_weight = tl.load(kl_weight_ptr)
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            ok = v < V
            z = tl.load(logits_ptr + v, ok, -float("inf")).to(tl.float32)
            dz = (ce_weight + kl_weight) * tl.exp(z - lse) - tl.where(v == label, ce_weight, 0.0)
            if HAS_TEACHER:
                t = tl.load(teacher_ptr + v, ok, -float("inf")).to(tl.float32)
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
    logits_CV = h_RD.new_empty(chunk_rows, V)
    whole = teacher is not None and teacher.hidden.shape[0] <= R
    teacher_logits = logits_CV  # any valid pointer when there is no teacher
    if teacher is not None:
        teacher_logits = teacher.hidden @ head_VD.t() if whole else h_RD.new_empty(chunk_rows, V)
    for start in range(0, R, chunk_rows):
        rows = slice(start, min(start + chunk_rows, R))
        logits = logits_CV[: rows.stop - start]
        torch.mm(h_RD[rows], head_VD.t(), out=logits)
        teacher_row = labels_R
        if teacher is not None:
            teacher_row = teacher.row[rows]
            if not whole:
                torch.mm(teacher.hidden[teacher_row], head_VD.t(), out=teacher_logits[: len(logits)])
        _row_loss[(len(logits),)](
            logits,
            labels_R[rows],
            teacher_logits,
            teacher_row,
            ce_weight,
            kl_weight,
            ce[rows],
            kl[rows],
            correct[rows],
            V,
            HAS_TEACHER=teacher is not None,
            GATHER=whole,
            GRADIENT=gradient,
            BLOCK=_BLOCK_V,
            num_warps=8,
        )
        if dh is not None:
            torch.mm(logits, head_VD, out=dh[rows])
    return RowLoss(ce, kl, correct.bool(), dh)
