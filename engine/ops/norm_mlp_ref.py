"""Residual addition, RMSNorm and the gated MLP, the definition:

s = r + x;   [g | u] = RMSNorm(s) W_gate_up^T;   y = (silu(g) * u) W_down^T
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.ops.rms_norm_ref import add_rms_norm_ref
from engine.ops.weight import Weight, accumulated


def norm_mlp_ref(
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
    return total, mlp_ref(x, gate_up, down)


def mlp_ref(x_RD: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """The gated MLP alone, [R, D] -> [R, D]."""
    gate, up = F.linear(x_RD, accumulated(gate_up)).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, accumulated(down))
