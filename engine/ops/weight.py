"""A trainable tensor as the ops see it: its value in compute precision and the place where its gradient is summed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class GradientSums:
    """Whether a gradient that arrives begins its sum or adds to it.

    The first micro-batch of a step overwrites what the arena holds: nothing is zeroed, and a matmul does not read what it
    would only add to. Decided while a backward pass is traced, so a captured step always does the same.
    """

    first: bool = False
    _written: list[tuple[int, int]] = field(default_factory=list)

    def begin(self, first: bool) -> None:
        """Before a backward pass; first: of an optimizer step."""
        self.first = first
        self._written.clear()

    def adds(self, grad: Tensor) -> bool:
        """Whether what arrives for this part of the arena is to be added. A part may lie within one that was written before
        ([k | v] of [q | k | v]); the other way round would lose its gradient, and is an error."""
        if not self.first:
            return True
        start, end = grad.data_ptr(), grad.data_ptr() + grad.nbytes
        overlap = [(a, b) for a, b in self._written if a < end and start < b]
        assert all(a <= start and end <= b for a, b in overlap), "a part's gradient came before that of the whole"
        if not overlap:
            self._written.append((start, end))
        return bool(overlap)


@dataclass(frozen=True)
class Weight:
    """value: compute dtype, requires_grad. grad: same shape, gradient dtype, a view of the gradient arena.

    Backward passes add to `grad` themselves (or begin it: `sums`) and hand autograd None: no temporary the size of the
    weight, no AccumulateGrad node that remembers a stream, and a gradient dtype that may differ from the weight's.
    """

    value: Tensor
    grad: Tensor
    sums: GradientSums = field(default_factory=GradientSums)

    def adds(self) -> bool:
        """Whether the gradient that arrives now is to be added; to be asked once for each."""
        return self.sums.adds(self.grad)

    def take(self, gradient: Tensor) -> None:
        """A whole gradient, [*value.shape] in any dtype: begins the sum, or is added to it."""
        if self.adds():
            self.grad.add_(gradient)
        else:
            self.grad.copy_(gradient)


class _Accumulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: Tensor, weight: Weight) -> Tensor:
        ctx.weight = weight
        return value.view_as(value)

    @staticmethod
    def backward(ctx, dvalue: Tensor) -> tuple[None, None]:
        ctx.weight.take(dvalue)
        return None, None


def accumulated(weight: Weight) -> Tensor:
    """The weight's value for a plain torch expression; what autograd computes for it goes to `weight.grad`."""
    return _Accumulated.apply(weight.value, weight)


def add_outer(weight: Weight, dy_RO: Tensor, x_RI: Tensor) -> None:
    """The gradient [O, I] dy^T x, straight into the arena: beta = 0 or 1 in the matmul when the dtypes agree; fp32 sums in an
    fp32 arena."""
    grad = weight.grad
    if grad.dtype != dy_RO.dtype:
        if dy_RO.is_cuda:
            weight.take(torch.mm(dy_RO.t(), x_RI, out_dtype=grad.dtype))
        else:
            weight.take(dy_RO.t().to(grad.dtype) @ x_RI.to(grad.dtype))
    elif weight.adds():
        torch.addmm(grad, dy_RO.t(), x_RI, out=grad)
    else:
        torch.mm(dy_RO.t(), x_RI, out=grad)
