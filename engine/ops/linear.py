"""y = x W^T by cuBLAS, with the weight's gradient straight into the gradient arena."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.weight import Weight, add_outer


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, value: Tensor, weight: Weight) -> Tensor:
        ctx.save_for_backward(x, value)
        ctx.weight = weight
        return x @ value.t()

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, None, None]:
        x, value = ctx.saved_tensors
        add_outer(ctx.weight, dy, x)
        return (dy @ value if ctx.needs_input_grad[0] else None), None, None


def linear(x_RI: Tensor, weight: Weight) -> Tensor:
    """[R, I] and W [O, I] -> [R, O]. The gradient of W is added to weight.grad; x's is formed only if x needs one."""
    return _Linear.apply(x_RI, weight.value, weight)
