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
from engine.ops.block_sums_ref import SUMS
from engine.ops.draft_inputs import Supervision
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
    """One micro-batch's numbers, fp64 on the device. totals [6]: loss, weight, ce, kl, accepted, blocks (block_sums_ref.SUMS);
    slots [2, K - 1]: correct and supervised by slot; blocks_by_accepted [K]: kept blocks in which 0..K-1 drafts stand, formed
    where no gradient is, for evaluation alone; dh [B, N, K - 1, D]: d(loss)/d(hidden), or None."""

    totals: Tensor
    slots: Tensor
    blocks_by_accepted: Tensor | None
    dh: Tensor | None

    @property
    def loss(self) -> Tensor:
        """The weighted sum, 0-D."""
        return self.totals[0]

    @property
    def weight(self) -> Tensor:
        """What the sum is over, 0-D."""
        return self.totals[1]


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
    s = supervision_of(batch, objective, ops, block_size=slots + 1)
    teacher = _teacher(batch, head, slots + 1, D) if objective.uses_kl else None
    rows: RowLoss = ops.frozen_head(
        h_BNKD.reshape(-1, D),
        head.weight,
        s.labels.flatten(),
        ce_weight=objective.ce_weight,
        kl_weight=objective.kl_weight,
        teacher=teacher,
        gradient=gradient,
        chunk_rows=chunk_rows,
    )
    ce, kl, correct = (t.view(B, N, slots) for t in (rows.ce, rows.kl, rows.correct))
    dpace = objective.weighting == "dpace"
    weight = s.w * dpace_weights(ce, s.w, objective.dpace_alpha) if dpace else s.decayed
    soft = kl if objective.uses_kl else None
    keep, loss_weights = batch["block_keep_mask"], (objective.ce_weight, objective.kl_weight)
    sums, accepted = ops.block_sums(ce, soft, correct, s.w, weight, keep, *loss_weights)
    if dpace:
        sums[1] = _supervised_documents(batch, s.w)
    dh = None
    if rows.dh is not None:
        ops.weigh_rows(rows.dh, rows.dh_scale, weight.flatten())
        dh = rows.dh.view(B, N, slots, D)
    return BlockSums(
        totals=sums[: len(SUMS)],
        slots=sums[len(SUMS) :].view(2, slots),
        blocks_by_accepted=None if gradient else _histogram(accepted, keep > 0, slots + 1),
        dh=dh,
    )


def supervision_of(batch: Mapping[str, Tensor], objective: Objective, ops: Ops, *, block_size: int) -> Supervision:
    """Labels, weights and their decay for every slot that predicts."""
    return ops.supervision(
        batch["input_ids"],
        batch["loss_mask"],
        batch["anchor_positions"],
        batch["block_keep_mask"],
        batch["context_end"],
        objective.gamma if objective.weighting == "decay" else None,
        block_size=block_size,
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
