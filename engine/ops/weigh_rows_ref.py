"""Row weights on a loss's input gradient, the definition: dh_r <- scale_r * weight_r * dh_r, and 0 where weight_r is 0."""

from __future__ import annotations

import torch
from torch import Tensor


def weigh_rows_ref(dh_RD: Tensor, scale_R: Tensor | None, weight_R: Tensor) -> None:
    """dh [R, D], written in place; scale fp32 [R] or None for 1; weight fp32 [R].

    where, not a product: a row of weight 0 may hold anything, and 0 * NaN is NaN. The factor stays fp32: rounded to bf16 the
    decay would be off by up to 0.3 %.
    """
    factor = weight_R if scale_R is None else weight_R * scale_R
    dh_RD.copy_(torch.where(weight_R[:, None] > 0, dh_RD * factor[:, None], 0.0))
