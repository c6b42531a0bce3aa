"""y = x W^T with all three matmuls on e4m3 numbers, the definition: quantised and back, then multiplied in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.fp8_rows_ref import quantise_rows_ref, turned_ref
from engine.ops.weight import Weight


class _LinearFp8Ref(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, value: Tensor, grad: Tensor) -> Tensor:
        x8, x_scale = quantise_rows_ref(x)
        weight8, weight_scale = quantise_rows_ref(value)
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        ctx.grad = grad
        return ((x8.float() @ weight8.float().t()) * x_scale * weight_scale.t()).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        dx, dweight = linear_backward_ref(dy, *ctx.saved_tensors)
        ctx.grad.add_(dweight)
        return dx, None, None


def linear_backward_ref(
    dy: Tensor, x8: Tensor, x_scale: Tensor, weight8: Tensor, weight_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """dx [R, I] and dW [O, I] from dy [R, O] and the quantised x [R, I] and W [O, I]."""
    # The weight's scales lie inside the sum over O, x's inside the sum over R: dy takes both.
    dy8, dy_scale = quantise_rows_ref(dy, weight_scale.flatten())
    dx = (dy8.float() @ weight8.float()) * dy_scale
    scale = dy_scale * x_scale
    dy8_OR = turned_ref(dy8, scale / scale.amax())[:, : len(dy)]
    dweight = (dy8_OR.float() @ x8.float()) * (scale.amax() / weight_scale)
    return dx.to(dy.dtype), dweight.to(dy.dtype)


def linear_fp8_ref(x_RI: Tensor, weight: Weight) -> Tensor:
    """[R, I] and W [O, I] -> [R, O]. The gradient of W is added to weight.grad."""
    return _LinearFp8Ref.apply(x_RI, weight.value, weight.grad)
