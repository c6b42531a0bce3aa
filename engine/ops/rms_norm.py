"""Residual addition and RMSNorm in one pass each way (Triton). One program a row forward; fixed runs of rows backward, so
that the weight's gradient is summed in a fixed order. D is a run-time number: one compile serves every bucket."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.card import pipeline_stages
from engine.ops.column_sums import add_sums
from engine.ops.weight import Weight

# Swept on an H200 at D = 1024, 4096 and 5120: three rows on their way hide the memory behind the reductions.
_BACKWARD_PROGRAMS = 528
_BACKWARD_STAGES = 3


@triton.jit(do_not_specialize=["R"])
def _forward(
    residual_ptr,
    delta_ptr,
    weight_ptr,
    total_ptr,
    out_ptr,
    rstd_ptr,
    R,
    D,
    eps,
    HAS_DELTA: tl.constexpr,
    DROP: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = row
    if DROP > 0:
        source = row + row // (DROP - 1) + 1
    d = tl.arange(0, BLOCK_D)
    ok = d < D
    x = tl.load(residual_ptr + source * D + d, ok, 0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + source * D + d, ok, 0.0).to(tl.float32)
    if HAS_DELTA or DROP > 0:
        stored = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * D + d, stored, ok)
        x = stored.to(tl.float32)  # the norm sees the stream as it is stored, as in plain torch
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    weight = tl.load(weight_ptr + d, ok, 0.0).to(tl.float32)
    tl.store(rstd_ptr + row, rstd)
    tl.store(out_ptr + row * D + d, (x * rstd * weight).to(out_ptr.dtype.element_ty), ok)


@triton.jit(do_not_specialize=["R", "rows_per_program"])
def _backward(
    dout_ptr,
    dtotal_ptr,
    total_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_ptr,
    R,
    rows_per_program,
    D,
    HAS_DTOTAL: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    REFORM: tl.constexpr,
    DROP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    ok = d < D
    weight = tl.load(weight_ptr + d, ok, 0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK_D], tl.float32)
    first = program.to(tl.int64) * rows_per_program
    for i in tl.range(0, tl.minimum(rows_per_program, R - first), num_stages=STAGES):
        row = first + i
        result = row
        kept = ok
        if DROP > 0:
            result = tl.maximum(row - row // DROP - 1, 0)
            kept = d < tl.where(row % DROP > 0, D, 0)  # a dropped row reads zeros, so its gradient is 0
        at = result * D + d
        rstd = tl.load(rstd_ptr + result)
        normed = tl.load(total_ptr + at, kept, 0.0).to(tl.float32) * rstd
        dout = tl.load(dout_ptr + at, kept, 0.0).to(tl.float32)
        dweight += dout * normed
        if NEEDS_DX:
            dnormed = dout * weight
            dx = (dnormed - normed * (tl.sum(dnormed * normed, 0) / D)) * rstd
            if HAS_DTOTAL:
                dx += tl.load(dtotal_ptr + at, kept, 0.0).to(tl.float32)
            tl.store(dx_ptr + row * D + d, dx.to(dx_ptr.dtype.element_ty), ok)
        if REFORM:
            if not NEEDS_DX:
                tl.debug_barrier()  # no reduction has kept this row's writers behind its readers
            tl.store(dout_ptr + at, (normed * weight).to(dout_ptr.dtype.element_ty), kept)
    tl.store(dweight_ptr + program * D + d, dweight, ok)


def norm_forward(
    residual: Tensor, delta: Tensor | None, value: Tensor, eps: float, drop: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """(total [R', D], normed and weighted [R', D], rstd fp32 [R']); total is `residual` itself where nothing changes it."""
    R, D = residual.shape
    residual = residual.contiguous()
    kept = R // drop * (drop - 1) if drop else R
    copies = delta is not None or drop > 0
    total = residual.new_empty(kept, D) if copies else residual
    out = residual.new_empty(kept, D)
    rstd = torch.empty(kept, device=residual.device, dtype=torch.float32)
    block = triton.next_power_of_2(D)
    _forward[(kept,)](
        residual,
        residual if delta is None else delta.contiguous(),
        value,
        total,
        out,
        rstd,
        kept,
        D,
        eps,
        HAS_DELTA=delta is not None,
        DROP=drop,
        BLOCK_D=block,
        num_warps=_warps(block),
    )
    return total, out, rstd


def norm_backward(
    dout: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Weight,
    rstd: Tensor,
    *,
    drop: int = 0,
    needs_dx: bool = True,
    reform: bool = False,
) -> Tensor | None:
    """d(residual) = d(delta), or None if not needed; the weight's gradient goes to its arena.

    reform: the normed and weighted values of the forward pass are written over dout, which must then be the caller's own.
    """
    kept, D = total.shape
    R = kept // (drop - 1) * drop if drop else kept
    dout = dout.contiguous()
    rows_per_program = triton.cdiv(R, min(R, _BACKWARD_PROGRAMS))
    programs = triton.cdiv(R, rows_per_program)
    dx = total.new_empty(R, D) if needs_dx else total
    partial = torch.empty(programs, D, device=total.device, dtype=torch.float32)
    block = triton.next_power_of_2(D)
    _backward[(programs,)](
        dout,
        dout if dtotal is None else dtotal.contiguous(),
        total,
        weight.value,
        rstd,
        dx,
        partial,
        R,
        rows_per_program,
        D,
        HAS_DTOTAL=dtotal is not None,
        NEEDS_DX=needs_dx,
        REFORM=reform,
        DROP=drop,
        BLOCK_D=block,
        STAGES=pipeline_stages(_BACKWARD_STAGES, 3 * block * total.element_size(), total.device),
        num_warps=_warps(block),
    )
    add_sums(weight.grad, partial, add=weight.adds())
    return dx if needs_dx else None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, residual: Tensor, delta: Tensor | None, value: Tensor, weight: Weight, eps: float, drop: int
    ) -> tuple[Tensor, Tensor]:
        total, out, rstd = norm_forward(residual, delta, value, eps, drop)
        ctx.save_for_backward(total, rstd)
        ctx.weight, ctx.has_delta, ctx.drop = weight, delta is not None, drop
        ctx.set_materialize_grads(False)
        return (residual.view_as(residual) if total is residual else total), out

    @staticmethod
    def backward(
        ctx, dtotal: Tensor | None, dout: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        total, rstd = ctx.saved_tensors
        assert dout is not None, "the normed output of add_rms_norm is always used"
        needs_dx = ctx.needs_input_grad[0] or (ctx.has_delta and ctx.needs_input_grad[1])
        dx = norm_backward(dout, dtotal, total, ctx.weight, rstd, drop=ctx.drop, needs_dx=needs_dx)
        return dx, (dx if ctx.has_delta else None), None, None, None, None


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


def add_rms_norm(
    residual_RD: Tensor, delta_RD: Tensor | None, weight: Weight, eps: float, *, drop_first_of: int = 0
) -> tuple[Tensor, Tensor]:
    """s = residual + delta (or the residual itself), y = RMSNorm(s) * w; both [R, D]. See rms_norm_ref.py.

    Both inputs receive the same gradient tensor: neither branch may write to it. drop_first_of = K: without the first row of
    every K, [R / K * (K - 1), D].
    """
    return _AddRMSNorm.apply(residual_RD, delta_RD, weight.value, weight, eps, drop_first_of)
