"""One AdamW update in one pass over the arenas (Triton): 28 bytes a parameter with bf16 weights and gradients."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.ops.adamw_arenas import AdamWArenas

_BLOCK = 2048


@triton.jit
def _update(
    weight_ptr, grad_ptr, master_ptr, exp_avg_ptr, exp_avg_sq_ptr, scalars_ptr, num_decayed, size, BLOCK: tl.constexpr
):
    lr = tl.load(scalars_ptr)
    weight_decay = tl.load(scalars_ptr + 1)
    beta1 = tl.load(scalars_ptr + 2)
    beta2 = tl.load(scalars_ptr + 3)
    eps = tl.load(scalars_ptr + 4)
    scale = tl.load(scalars_ptr + 5)
    bias1 = tl.load(scalars_ptr + 6)
    bias2_sqrt = tl.load(scalars_ptr + 7)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # By the size alone, which is a multiple of 16: a mask that depends on values would take the loads apart word by word.
    inside = at < size
    if tl.load(scalars_ptr + 8) > 0:
        grad = tl.load(grad_ptr + at, inside, 0.0).to(tl.float32) * scale
        master = tl.load(master_ptr + at, inside, 0.0)
        exp_avg = tl.load(exp_avg_ptr + at, inside, 0.0)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + at, inside, 0.0)
        master = master * tl.where(at < num_decayed, 1.0 - lr * weight_decay, 1.0)
        exp_avg += (1.0 - beta1) * (grad - exp_avg)
        exp_avg_sq = beta2 * exp_avg_sq + (1.0 - beta2) * grad * grad
        master -= (lr / bias1) * exp_avg / (tl.sqrt(exp_avg_sq) / bias2_sqrt + eps)
        tl.store(exp_avg_ptr + at, exp_avg, inside)
        tl.store(exp_avg_sq_ptr + at, exp_avg_sq, inside)
        tl.store(master_ptr + at, master, inside)
        tl.store(weight_ptr + at, master.to(weight_ptr.dtype.element_ty), inside)


def adamw(arenas: AdamWArenas, scalars: Tensor) -> None:
    """Same contract as adamw_ref: scalars is fp32 [9] on the device, in the order of adamw_arenas.SCALARS."""
    size = arenas.master.numel()
    _update[(triton.cdiv(size, _BLOCK),)](
        arenas.weight,
        arenas.grad,
        arenas.master,
        arenas.exp_avg,
        arenas.exp_avg_sq,
        scalars,
        arenas.num_decayed,
        size,
        BLOCK=_BLOCK,
        num_warps=8,
    )
