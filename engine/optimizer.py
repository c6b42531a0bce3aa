"""The update: global-norm clip, AdamW on fp32 masters and the skip of bad steps, all on device values, captured as its own
graph. lr, weight decay and the clip are written between steps; nothing here waits for the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import Ops
from engine.ops.adamw_arenas import SCALARS
from engine.params import ParamArena
from engine.settings import OptimizerSettings


@dataclass(frozen=True)
class Schedule:
    """lr of step t of total: linear warm-up from 0 over warmup_steps, then cosine down to min_ratio * lr, or constant."""

    kind: str
    lr: float
    total_steps: int
    warmup_steps: int
    min_ratio: float = 0.0

    def __call__(self, step: int) -> float:
        """step counts from 0; the first update already moves (lr / warmup_steps)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.lr
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return self.lr * (self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * done)))


class AdamW:
    """Owns the update's device scalars. `denominator` is the step's summed loss weight, added to by the micro-batches."""

    def __init__(self, params: ParamArena, ops: Ops, settings: OptimizerSettings) -> None:
        self._arenas, self._ops = params.arenas(), ops
        device = params.grad.device

        def scalar(dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros((), dtype=dtype, device=device)

        self.lr, self.weight_decay, self.clip_norm = scalar(), scalar(), scalar()
        self.beta1, self.beta2, self.eps = scalar(), scalar(), scalar()
        self.denominator, self.grad_norm = scalar(), scalar()
        self.step, self.skipped, self.bad_in_row = scalar(torch.int64), scalar(torch.int64), scalar(torch.int64)
        self._scalars = torch.zeros(len(SCALARS), dtype=torch.float32, device=device)
        self.write(settings)

    def write(self, settings: OptimizerSettings) -> None:
        """The settings that are device values, on the stream: updates queued from here on read them, captured or not. The
        schedule's lr is written before each update."""
        for name in ("weight_decay", "clip_norm", "beta1", "beta2", "eps"):
            getattr(self, name).fill_(getattr(settings, name))

    def update(self) -> None:
        """One step from the gradient sums. Zeroes the denominator. The function that is captured.

        A denominator of 0 or a gradient that is not finite leaves weights, moments and the step count as they are and
        raises `skipped`; the latter `bad_in_row` too, which a step that is taken sets to 0. clip_norm 0 does not clip; the
        factor is torch.nn.utils.clip_grad_norm_'s.
        """
        norm = torch.linalg.vector_norm(self._arenas.grad, dtype=torch.float32).double() / self.denominator
        ok = norm.isfinite() & (self.denominator > 0)
        clip = torch.where(self.clip_norm > 0, (self.clip_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
        scale = torch.where(ok, clip / self.denominator, 0.0)
        self.step += ok
        self.skipped += ~ok
        # Without weight there is no gradient to speak of: such a step neither adds to the bad ones nor ends them.
        self.bad_in_row += ~ok & (self.denominator != 0)
        self.bad_in_row *= ~ok
        self.grad_norm.copy_(norm)
        count = self.step.clamp(min=1).double()
        bias1, bias2 = 1 - self.beta1**count, 1 - self.beta2**count
        values = [self.lr, self.weight_decay, self.beta1, self.beta2, self.eps, scale, bias1, bias2.sqrt(), ok.double()]
        self._scalars.copy_(torch.stack(values))
        self._ops.adamw(self._arenas, self._scalars)
        self.denominator.zero_()

    def scalars(self) -> dict[str, Tensor]:
        """The device values by which the update is steered, by name; views."""
        names = (
            "lr",
            "weight_decay",
            "clip_norm",
            "beta1",
            "beta2",
            "eps",
            "denominator",
            "step",
            "skipped",
            "bad_in_row",
            "grad_norm",
        )
        return {name: getattr(self, name) for name in names} | {"kernel scalars": self._scalars}

    def state(self) -> dict[str, Tensor]:
        """What an update changes besides masters and weights; views."""
        return {
            "exp_avg": self._arenas.exp_avg,
            "exp_avg_sq": self._arenas.exp_avg_sq,
            "step": self.step,
            "skipped": self.skipped,
        }
