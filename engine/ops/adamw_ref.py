"""One AdamW update over flat arenas (Loshchilov and Hutter 2019, as in torch.optim.AdamW), the definition.

    g = sum * scale;  w = w (1 - lr wd);  m += (1 - b1)(g - m);  v = b2 v + (1 - b2) g^2
    w -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)

When `ok` is 0 nothing changes. The gradient sums stay: the next step's first micro-batch overwrites them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.adamw_arenas import AdamWArenas


def adamw_ref(arenas: AdamWArenas, scalars: Tensor) -> None:
    """scalars: fp32 [9] on the device, in the order of SCALARS; read when the kernels run, never by the host."""
    lr, weight_decay, beta1, beta2, eps, scale, bias1, bias2_sqrt, ok = scalars.unbind()
    grad = torch.where(ok > 0, arenas.grad.float() * scale, 0.0)
    decay = torch.ones_like(arenas.master)
    decay[: arenas.num_decayed] = 1 - lr * weight_decay
    exp_avg = arenas.exp_avg + (1 - beta1) * (grad - arenas.exp_avg)
    exp_avg_sq = beta2 * arenas.exp_avg_sq + (1 - beta2) * grad * grad
    master = arenas.master * decay - (lr / bias1) * exp_avg / (exp_avg_sq.sqrt() / bias2_sqrt + eps)
    for old, new in ((arenas.exp_avg, exp_avg), (arenas.exp_avg_sq, exp_avg_sq), (arenas.master, master)):
        old.copy_(torch.where(ok > 0, new, old))
    if arenas.weight.data_ptr() != arenas.master.data_ptr():
        arenas.weight.copy_(arenas.master)
