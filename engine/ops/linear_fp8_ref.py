"""y = x W^T with all three matmuls on e4m3 numbers, the definition: quantised and back, then multiplied in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.fp8_rows_ref import quantise_rows_ref, turned_ref
from engine.ops.weight import Weight


class _LinearFp8Ref(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, value: Tensor, weight: Weight) -> Tensor:
        x8, x_scale = quantise_rows_ref(x)
        weight8, weight_scale = quantise_rows_ref(value)
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        ctx.weight = weight
        return ((x8.float() @ weight8.float().t()) * x_scale * weight_scale.t()).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        dy8, dy_scale = quantise_rows_ref(dy)
        weight_IO, one_weight_scale = turned_ref(weight8, weight_scale)
        dx = (dy8.float() @ weight_IO.float()[:, : dy.shape[1]].t()) * (dy_scale * one_weight_scale)
        (dy_OR, one_dy_scale), (x_IR, one_x_scale) = turned_ref(dy8, dy_scale), turned_ref(x8, x_scale)
        dweight = (dy_OR.float() @ x_IR.float().t()) * (one_dy_scale * one_x_scale)
        ctx.weight.take(dweight.to(dy.dtype))
        return dx.to(dy.dtype), None, None


def linear_fp8_ref(x_RI: Tensor, weight: Weight) -> Tensor:
    """[R, I] and W [O, I] -> [R, O]. The gradient of W is added to weight.grad."""
    return _LinearFp8Ref.apply(x_RI, weight.value, weight)
