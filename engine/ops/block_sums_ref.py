"""A micro-batch's loss and metrics as sums over its blocks, the definition.

accepted of a block: sum_k cumprod_k(correct or w = 0) * [w > 0], the drafts that a verification would take.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The first entries of the result; behind them correct [K - 1] and supervised [K - 1], by slot.
SUMS = ("loss", "weight", "ce", "kl", "accepted", "blocks")


def block_sums_ref(
    ce: Tensor,
    kl: Tensor | None,
    correct: Tensor,
    w: Tensor,
    weight: Tensor,
    block_keep_mask_BN: Tensor,
    ce_weight: Tensor,
    kl_weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """ce, kl, w, weight fp32 [B, N, K - 1] (kl None without soft labels); correct bool; the two loss weights 0-D.

    Returns fp64 [6 + 2 (K - 1)] in the order of SUMS, correct, supervised; and accepted int32 [B, N]. A slot of weight 0
    counts for nothing, whatever its ce holds.
    """
    row_loss = ce_weight * ce if kl is None else ce_weight * ce + kl_weight * kl
    right = correct & (w > 0)
    accepted_BN = ((right | (w == 0)).cumprod(-1) * (w > 0)).sum(-1)

    def weighted(x: Tensor) -> Tensor:
        # where, not a product: a row of weight 0 may hold anything, and 0 * NaN is NaN.
        return torch.where(weight > 0, x * weight, 0.0).double().sum()

    zero = torch.zeros((), dtype=torch.float64, device=ce.device)
    totals = [
        weighted(row_loss),
        weight.double().sum(),
        weighted(ce),
        zero if kl is None else weighted(kl),
        accepted_BN.double().sum(),
        (block_keep_mask_BN > 0).double().sum(),
    ]
    return torch.cat([torch.stack(totals), right.double().sum((0, 1)), w.double().sum((0, 1))]), accepted_BN.int()
