"""y = x W^T with all three matmuls in fp8, the weight's gradient added to the gradient arena. See fp8_rows.py."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.fp8_matmul import Fp8Operand, add_weight_gradient_, input_gradient, operand, product
from engine.ops.fp8_rows import quantise_rows
from engine.ops.weight import Weight


class _LinearFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, value: Tensor, grad: Tensor) -> Tensor:
        x8, weight8 = quantise_rows(x), quantise_rows(value)
        of_x, of_weight = operand(x8), operand(weight8)
        ctx.save_for_backward(of_x.turned, of_x.scale, of_weight.turned, of_weight.scale)
        ctx.grad = grad
        return product(x8, weight8, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, None, None]:
        x_turned, x_scale, weight_turned, weight_scale = ctx.saved_tensors
        dy8 = quantise_rows(dy, weight_scale)
        add_weight_gradient_(ctx.grad, dy8, weight_scale, Fp8Operand(x_turned, x_scale), dy.dtype)
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return input_gradient(dy8, Fp8Operand(weight_turned, weight_scale), dy.dtype), None, None


def linear_fp8(x_RI: Tensor, weight: Weight) -> Tensor:
    """[R, I] and W [O, I] -> [R, O], bf16; I and O multiples of 16. See linear_fp8_ref.py."""
    return _LinearFp8.apply(x_RI, weight.value, weight.grad)
