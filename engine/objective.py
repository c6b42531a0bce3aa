"""What a draft is trained for: labels, weights and the sums from which loss and metrics are made.

Slot k = 1..K-1 of the block at anchor a predicts x[a + k]. The loss of a step is the weighted sum over all its micro-batches
over the summed weight; here only sums are formed, and the input gradient of this micro-batch's sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import Ops
from engine.ops.rms_norm_ref import normalise
from engine.ops.row_loss import RowLoss, Teacher


@dataclass(frozen=True)
class Objective:
    """weighting, uses_kl, dpace_alpha and post_norm are baked into a captured step; the tensors are 0-D fp32 on the device
    and may be written between steps."""

    weighting: str
    uses_kl: bool
    dpace_alpha: float
    ce_weight: Tensor
    kl_weight: Tensor
    gamma: Tensor


@dataclass(frozen=True)
class TargetHead:
    """The frozen end of the target: lm_head [V, D]; for soft labels its final norm [D] or None if last_hidden is normed."""

    weight: Tensor
    norm: Tensor | None = None
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class BlockSums:
    """Sums over one micro-batch, all 0-D or [K - 1] fp64 on the device, and dh [B, N, K - 1, D]: d(loss)/d(hidden).

    blocks_by_accepted [K]: kept blocks in which 0..K-1 drafts stand; formed where no gradient is, for evaluation alone.
    """

    loss: Tensor
    weight: Tensor
    ce: Tensor
    kl: Tensor
    supervised_k: Tensor
    correct_k: Tensor
    accepted: Tensor
    blocks: Tensor
    blocks_by_accepted: Tensor | None
    dh: Tensor | None


def labels_and_weights(batch: Mapping[str, Tensor], block_size: int) -> tuple[Tensor, Tensor]:
    """(labels int64, w fp32), both [B, N, K - 1]: x[a + k] and keep * m[a + k] * [a + k in the anchor's document].

    Labels of weight 0 are token 0, whatever the padding holds.
    """
    anchors, S = batch["anchor_positions"], batch["input_ids"].shape[1]
    slot = torch.arange(1, block_size, device=anchors.device, dtype=anchors.dtype)
    at = anchors[..., None] + slot
    inside = (at < batch["context_end"][..., None]) & (batch["block_keep_mask"][..., None] > 0)
    index = at.clamp(max=S - 1).long().flatten(1)
    supervised = inside & (batch["loss_mask"].gather(1, index).view_as(at) > 0)
    labels = torch.where(supervised, batch["input_ids"].gather(1, index).view_as(at), 0)
    return labels.long(), supervised.float()


def dpace_weights(ce: Tensor, w: Tensor, alpha: float) -> Tensor:
    """omega_j = sum_{i >= j} w_i prod_{l <= i} ((1 - alpha) exp(-ce_l) + alpha), slots without label counting as certain
    (arXiv 2605.18810). ce, w: [..., K - 1]."""
    q = torch.where(w > 0, (1 - alpha) * (-ce).exp() + alpha, 1.0)
    return (q.cumprod(-1) * w).flip(-1).cumsum(-1).flip(-1)


def block_loss(
    h_BNKD: Tensor,
    batch: Mapping[str, Tensor],
    head: TargetHead,
    objective: Objective,
    ops: Ops,
    *,
    gradient: bool,
    chunk_rows: int,
) -> BlockSums:
    """h: hidden states of slots 1..K-1 [B, N, K - 1, D], detached. Forms the input gradient here; nothing of size V stays."""
    B, N, slots, D = h_BNKD.shape
    labels, w = labels_and_weights(batch, slots + 1)
    teacher = _teacher(batch, head, slots + 1, D) if objective.uses_kl else None
    rows: RowLoss = ops.frozen_head(
        h_BNKD.reshape(-1, D),
        head.weight,
        labels.flatten(),
        ce_weight=objective.ce_weight,
        kl_weight=objective.kl_weight,
        teacher=teacher,
        gradient=gradient,
        chunk_rows=chunk_rows,
    )
    ce, kl, correct = (t.view(B, N, slots) for t in (rows.ce, rows.kl, rows.correct))
    if objective.weighting == "dpace":
        weight = w * dpace_weights(ce, w, objective.dpace_alpha)
        total_weight = _supervised_documents(batch, w)
    else:
        k = torch.arange(slots, device=w.device)
        weight = w * torch.exp(-k / objective.gamma) if objective.weighting == "decay" else w
        total_weight = weight.double().sum()
    row_loss = objective.ce_weight * ce
    if objective.uses_kl:
        row_loss = row_loss + objective.kl_weight * kl
    right = correct & (w > 0)
    accepted = ((right | (w == 0)).cumprod(-1) * (w > 0)).sum(-1)
    kept = batch["block_keep_mask"] > 0

    def weighted(x: Tensor) -> Tensor:
        # where, not a product: a row of weight 0 may hold anything, and 0 * NaN is NaN.
        return torch.where(weight > 0, x * weight, 0.0).double().sum()

    dh = None
    if rows.dh is not None:
        ops.weigh_rows(rows.dh, rows.dh_scale, weight.flatten())
        dh = rows.dh.view(B, N, slots, D)
    return BlockSums(
        loss=weighted(row_loss),
        weight=total_weight.double(),
        ce=weighted(ce),
        kl=weighted(kl),
        supervised_k=w.double().sum((0, 1)),
        correct_k=right.double().sum((0, 1)),
        accepted=accepted.double().sum(),
        blocks=kept.double().sum(),
        blocks_by_accepted=None if gradient else _histogram(accepted, kept, slots + 1),
        dh=dh,
    )


def _histogram(accepted_BN: Tensor, kept_BN: Tensor, size: int) -> Tensor:
    """fp64[size]: kept blocks by accepted drafts. Compared, not scattered: the same sum in every replay."""
    equal = accepted_BN[..., None] == torch.arange(size, device=accepted_BN.device)
    return (equal & kept_BN[..., None]).double().sum((0, 1))


def _supervised_documents(batch: Mapping[str, Tensor], w: Tensor) -> Tensor:
    """Documents with a slot that counts: SpecForge's rows, where each is a row, and the same number where they share rows.
    w: [B, N, K - 1]."""
    B, S = batch["input_ids"].shape
    # Where a document starts names it; blocks that nothing supervises all name the place after the row.
    start_BN = torch.where(w.amax(-1) > 0, batch["context_start"], S)
    seen = w.new_zeros(B, S + 1).scatter_(1, start_BN.long(), 1.0)
    return seen[:, :S].sum()


def _teacher(batch: Mapping[str, Tensor], head: TargetHead, block_size: int, D: int) -> Teacher:
    """The target's distribution for slot k comes from its last hidden state at a + k - 1."""
    last_BSD = batch["last_hidden"]
    B, S, _ = last_BSD.shape
    if head.norm is not None:
        last_BSD = (normalise(last_BSD, head.norm_eps) * head.norm).to(last_BSD.dtype)
    slot = torch.arange(block_size - 1, device=last_BSD.device)
    at = (batch["anchor_positions"][..., None] + slot).clamp(max=S - 1)
    row = at + S * torch.arange(B, device=at.device)[:, None, None]
    return Teacher(last_BSD.reshape(-1, D), row.flatten().int())
