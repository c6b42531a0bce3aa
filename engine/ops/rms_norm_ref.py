"""Residual addition followed by RMSNorm, the definition: s = r + x;  y = s / sqrt(mean(s^2) + eps) * w, norm in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.weight import Weight, accumulated


def normalise(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2, -1) + eps) in fp32 (fp64 stays fp64)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def add_rms_norm_ref(
    residual_RD: Tensor, delta_RD: Tensor | None, weight: Weight, eps: float, *, drop_first_of: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns (s, y), both [R, D] in the input's dtype; with delta None, s is the residual itself.

    drop_first_of = K takes the rows in groups of K and leaves the first of each out of the results: [R / K * (K - 1), D].
    """
    total = residual_RD if delta_RD is None else residual_RD + delta_RD
    if drop_first_of:
        total = total.unflatten(0, (-1, drop_first_of))[:, 1:].flatten(0, 1)
    normed = normalise(total, eps) * accumulated(weight)
    return total, normed.to(total.dtype)
