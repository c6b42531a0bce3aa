"""Residual addition and RMSNorm that leave e4m3 rows behind: the same numbers as quantise_rows of norm_forward's, which are
never written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.fp8_rows import FP8, SMALLEST_EXPONENT, Fp8Rows, row_scale


@triton.jit(do_not_specialize=["R"])
def _norm(
    residual_ptr,
    delta_ptr,
    weight_ptr,
    total_ptr,
    out_ptr,
    scale_ptr,
    rstd_ptr,
    R,
    D,
    eps,
    HAS_DELTA: tl.constexpr,
    DROP: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = row
    if DROP > 0:
        source = row + row // (DROP - 1) + 1
    d = tl.arange(0, BLOCK_D)
    ok = d < D
    dtype = residual_ptr.dtype.element_ty
    x = tl.load(residual_ptr + source * D + d, ok, 0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + source * D + d, ok, 0.0).to(tl.float32)
    if HAS_DELTA or DROP > 0:
        stored = x.to(dtype)
        tl.store(total_ptr + row * D + d, stored, ok)
        x = stored.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    weight = tl.load(weight_ptr + d, ok, 0.0).to(tl.float32)
    tl.store(rstd_ptr + row, rstd)
    normed = (x * rstd * weight).to(dtype).to(tl.float32)
    scale, inverse = row_scale(tl.max(tl.abs(normed), 0), SMALLEST)
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * D + d, (normed * inverse).to(out_ptr.dtype.element_ty), ok)


def norm_rows(
    residual: Tensor, delta: Tensor | None, value: Tensor, eps: float, drop: int = 0
) -> tuple[Tensor, Fp8Rows, Tensor]:
    """(total [R', D], the normed and weighted rows quantised, rstd fp32 [R']): see norm_forward in rms_norm.py."""
    R, D = residual.shape
    residual = residual.contiguous()
    kept = R // drop * (drop - 1) if drop else R
    total = residual.new_empty(kept, D) if delta is not None or drop else residual
    values = torch.empty(kept, D, device=residual.device, dtype=FP8)
    scale, rstd = (torch.empty(kept, n, device=residual.device, dtype=torch.float32) for n in (1, 1))
    block = triton.next_power_of_2(D)
    _norm[(kept,)](
        residual,
        residual if delta is None else delta.contiguous(),
        value,
        total,
        values,
        scale,
        rstd,
        kept,
        D,
        eps,
        HAS_DELTA=delta is not None,
        DROP=drop,
        SMALLEST=SMALLEST_EXPONENT,
        BLOCK_D=block,
        num_warps=max(1, min(16, block // 512)),
    )
    return total, Fp8Rows(values, scale), rstd.view(kept)
