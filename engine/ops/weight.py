"""A trainable tensor as the ops see it: its value in compute precision and the place where its gradient is summed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Weight:
    """value: compute dtype, requires_grad. grad: same shape, gradient dtype, a view of the gradient arena.

    Backward passes add to `grad` themselves and hand autograd None: no temporary the size of the weight, no AccumulateGrad
    node that remembers a stream, and a gradient dtype that may differ from the weight's.
    """

    value: Tensor
    grad: Tensor


class _Accumulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return value.view_as(value)

    @staticmethod
    def backward(ctx, dvalue: Tensor) -> tuple[None, None]:
        ctx.grad.add_(dvalue)
        return None, None


def accumulated(weight: Weight) -> Tensor:
    """The weight's value for a plain torch expression; what autograd computes for it is added to `weight.grad`."""
    return _Accumulated.apply(weight.value, weight.grad)


def add_outer_(grad: Tensor, dy_RO: Tensor, x_RI: Tensor) -> None:
    """grad[O, I] += dy^T x, straight into the arena: beta = 1 in the matmul when the dtypes agree, fp32 sums otherwise."""
    if grad.dtype == dy_RO.dtype:
        torch.addmm(grad, dy_RO.t(), x_RI, out=grad)
    else:
        grad.add_(
            torch.mm(dy_RO.t(), x_RI, out_dtype=grad.dtype)
            if dy_RO.is_cuda
            else dy_RO.t().to(grad.dtype) @ x_RI.to(grad.dtype)
        )
