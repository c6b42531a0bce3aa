"""The gated MLP, the definition: y = (silu(x W_gate^T) * (x W_up^T)) W_down^T."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.ops.weight import Weight, accumulated


def mlp_ref(x_RD: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """x [R, D], gate_up [2I, D] (gate's rows first), down [D, I] -> [R, D]."""
    gate, up = F.linear(x_RD, accumulated(gate_up)).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, accumulated(down))
