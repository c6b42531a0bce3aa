"""y = x W^T with all three matmuls in fp8, the weight's gradient straight into the gradient arena. See fp8_rows.py."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.fp8_matmul import add_weight_gradient, input_gradient, product
from engine.ops.fp8_rows import Fp8Turned, quantise_rows, turned
from engine.ops.weight import Weight


class _LinearFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, value: Tensor, weight: Weight) -> Tensor:
        x8, weight8 = quantise_rows(x), quantise_rows(value)
        of_x, of_weight = turned(x8), turned(weight8)
        ctx.save_for_backward(of_x.values, of_x.scale, of_weight.values, of_weight.scale)
        ctx.weight = weight
        return product(x8, weight8, x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, None, None]:
        x, x_scale, value, value_scale = ctx.saved_tensors
        dy8 = quantise_rows(dy)
        add_weight_gradient(ctx.weight, turned(dy8), Fp8Turned(x, x_scale), dy.dtype)
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return input_gradient(dy8, Fp8Turned(value, value_scale), dy.dtype), None, None


def linear_fp8(x_RI: Tensor, weight: Weight) -> Tensor:
    """[R, I] and W [O, I] -> [R, O], bf16; I and O multiples of 16. See linear_fp8_ref.py."""
    return _LinearFp8.apply(x_RI, weight.value, weight)
