"""Whether attention's kernels compute the definition's output and gradients under a choice of tiles: before it is timed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.op_case import ROUNDING, Results, errors
from engine.kernels import ATTENTIONS
from engine.mask import DraftMask
from engine.ops.attention import attention_backward, attention_forward
from engine.ops.attention_tiles import Tiles

RESULTS = ("o", "dq", "dk_context", "dv_context", "dk_draft", "dv_draft")
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class TileCheck:
    """A call small enough for the definition. exact: its RESULTS in twice the precision; most: what each may be off by,
    relative in the 2-norm, which is twice what the definition is off by in the inputs' own precision, and a rounding."""

    inputs: Inputs
    do: Tensor
    mask: DraftMask
    exact: Results
    most: dict[str, float]

    def refuse(self, tiles: Tiles, splits: int | None = None) -> None:
        """Raises ValueError where a result under these tiles is off by more than it may."""
        o, lse = attention_forward(*self.inputs, self.mask, tiles=tiles)
        gradients = attention_backward(self.do, *self.inputs, o, lse, self.mask, tiles=tiles, splits=splits)
        for name, off in errors(dict(zip(RESULTS, (o, *gradients), strict=True)), self.exact).items():
            if not off <= self.most[name]:
                raise ValueError(
                    f"{name} is off by {off:.1e}, at most {self.most[name]:.1e} was allowed; no speed is shown"
                )


def tile_check(inputs: Inputs, do: Tensor, mask: DraftMask) -> TileCheck:
    """That of a call on bf16 or fp32 inputs (q, k_context, v_context, k_draft, v_draft) and the output's gradient do."""
    dtype = do.dtype
    twice = torch.float32 if dtype == torch.bfloat16 else torch.float64
    exact, rounded = (_definition(inputs, do, mask, precision) for precision in (twice, dtype))
    most = {name: 2 * off + ROUNDING[dtype] for name, off in errors(rounded, exact).items()}
    return TileCheck(inputs, do, mask, exact, most)


def _definition(inputs: Inputs, do: Tensor, mask: DraftMask, dtype: torch.dtype) -> Results:
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
    attend = ATTENTIONS["reference"](mask, leaves[1].shape[1], window=None, causal=False)
    o = attend(*leaves)
    return dict(zip(RESULTS, (o.detach(), *torch.autograd.grad(o, leaves, do.to(dtype))), strict=True))
