"""Row weights on a loss's input gradient, in place and in one pass (Triton), a program a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _weigh(dh_ptr, scale_ptr, weight_ptr, D, HAS_SCALE: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + row)
    factor = weight
    if HAS_SCALE:
        factor *= tl.load(scale_ptr + row)
    d = tl.arange(0, BLOCK_D)
    dh = tl.load(dh_ptr + row * D + d, d < tl.where(weight > 0, D, 0), 0.0).to(tl.float32)
    tl.store(dh_ptr + row * D + d, tl.where(weight > 0, dh * factor, 0.0).to(dh_ptr.dtype.element_ty), d < D)


def weigh_rows(dh_RD: Tensor, scale_R: Tensor | None, weight_R: Tensor) -> None:
    """Same contract as weigh_rows_ref; dh is contiguous."""
    R, D = dh_RD.shape
    block = triton.next_power_of_2(D)
    _weigh[(R,)](
        dh_RD,
        weight_R if scale_R is None else scale_R,
        weight_R,
        D,
        HAS_SCALE=scale_R is not None,
        BLOCK_D=block,
        num_warps=max(1, min(16, block // 512)),
    )
