"""The flat memory one optimizer update works on, and the device scalars that steer it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AdamWArenas:
    """Flat tensors of one length. weight: what the drafter computes with (may be the master itself); grad: sums over the
    step's micro-batches; master, exp_avg, exp_avg_sq: fp32. The first num_decayed entries get weight decay."""

    weight: Tensor
    grad: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    num_decayed: int


SCALARS = ("lr", "weight_decay", "beta1", "beta2", "eps", "scale", "bias1", "bias2_sqrt", "ok")
