"""y = x W^T, the definition."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.ops.weight import Weight, accumulated


def linear_ref(x_RI: Tensor, weight: Weight) -> Tensor:
    """[R, I] and W [O, I] -> [R, O]. The gradient of W is added to weight.grad."""
    return F.linear(x_RI, accumulated(weight))
