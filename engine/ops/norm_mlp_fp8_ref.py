"""Residual addition, RMSNorm and the gated MLP in fp8, the definition: as norm_mlp_ref.py, its linear maps on e4m3 numbers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.ops.linear_fp8_ref import linear_fp8_ref
from engine.ops.rms_norm_ref import add_rms_norm_ref
from engine.ops.weight import Weight


def norm_mlp_fp8_ref(
    residual_RD: Tensor,
    delta_RD: Tensor | None,
    norm: Weight,
    eps: float,
    gate_up: Weight,
    down: Weight,
    *,
    drop_first_of: int = 0,
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """gate_up [2I, D] (gate's rows first), down [D, I]. Returns (s, y), [R, D], or [R / K * (K - 1), D] with drop_first_of = K
    (see rms_norm_ref.py). recompute changes what is kept for the backward pass, not what comes out; nothing here."""
    total, x = add_rms_norm_ref(residual_RD, delta_RD, norm, eps, drop_first_of=drop_first_of)
    return total, mlp_fp8_ref(x, gate_up, down)


def mlp_fp8_ref(x_RD: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """The gated MLP alone, [R, D] -> [R, D]. The activation is rounded to x's dtype, then quantised."""
    gate, up = linear_fp8_ref(x_RD, gate_up).chunk(2, dim=-1)
    return linear_fp8_ref((F.silu(gate.float()) * up.float()).to(x_RD.dtype), down)
