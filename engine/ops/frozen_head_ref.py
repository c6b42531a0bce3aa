"""Cross entropy and soft-label KL through a frozen vocabulary head, row by row, with the gradient of the input: the definition.

    z = h W^T;   ce = logsumexp(z) - z[label];   kl = KL(p || softmax(z)), p = softmax(teacher W^T)
    dh = d(ce_weight * ce + kl_weight * kl)/dh = ((ce_weight + kl_weight) softmax(z) - ce_weight onehot - kl_weight p) W

The head gets no gradient (it is the target's). Rows are independent, so a row's weight may be applied to its dh afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.row_loss import RowLoss, Teacher


def frozen_head_ref(
    h_RD: Tensor,
    head_VD: Tensor,
    labels_R: Tensor,
    *,
    ce_weight: Tensor,
    kl_weight: Tensor,
    teacher: Teacher | None = None,
    gradient: bool = True,
    chunk_rows: int = 4096,
) -> RowLoss:
    """h [R, D], head [V, D], labels int32 or int64 [R] in [0, V); the two weights are 0-D tensors on h's device.

    Logits exist for chunk_rows rows at a time.
    """
    ces, kls, corrects, dhs = [], [], [], []
    wide = torch.promote_types(h_RD.dtype, torch.float32)
    for start in range(0, h_RD.shape[0], chunk_rows):
        h, label = h_RD[start : start + chunk_rows], labels_R[start : start + chunk_rows].long()[:, None]
        logits = (h @ head_VD.t()).to(wide)
        logq = logits.log_softmax(-1)
        ces.append(-logq.gather(1, label)[:, 0])
        corrects.append(logits.argmax(-1) == label[:, 0])
        kl = torch.zeros_like(ces[-1])
        dlogits = logq.exp() * (ce_weight + kl_weight if teacher is not None else ce_weight)
        dlogits.scatter_add_(1, label, -ce_weight.to(wide).expand_as(label))
        if teacher is not None:
            rows = teacher.row[start : start + chunk_rows].long()
            logp = (teacher.hidden[rows] @ head_VD.t()).to(wide).log_softmax(-1)
            kl = (logp.exp() * (logp - logq)).sum(-1)
            dlogits -= kl_weight * logp.exp()
        kls.append(kl)
        if gradient:
            dhs.append(dlogits.to(h.dtype) @ head_VD)
    return RowLoss(torch.cat(ces), torch.cat(kls), torch.cat(corrects), torch.cat(dhs) if gradient else None)
