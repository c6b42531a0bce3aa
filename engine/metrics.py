"""Counters that live on the device and only ever grow; the host reads a copy, later, without stopping the queue."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.objective import BlockSums
from engine.ops.block_sums_ref import SUMS

_SUMS = (*SUMS, "useful_tokens", "slot_tokens", "micro_batches", "bad_micro_batches")


class Metrics:
    """fp64 sums over all micro-batches since the start; addresses fixed, written inside the captured steps."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self.slots = torch.zeros(2, block_size - 1, dtype=torch.float64, device=device)
        # Grows in evaluation alone, so no checkpoint holds it.
        self.blocks_by_accepted = torch.zeros(block_size, dtype=torch.float64, device=device)

    def add(self, sums: BlockSums, row_lengths_B: Tensor, slot_tokens: int) -> None:
        """One micro-batch. A sum that is not finite is left out and counted: one bad batch must not hide all that follow."""
        finite = sums.totals.isfinite().all()
        of_blocks, useful, slots, batches, bad = self.sums.split([len(sums.totals), 1, 1, 1, 1])
        of_blocks += torch.where(finite, sums.totals, 0.0)
        self.slots += torch.where(finite, sums.slots, 0.0)
        useful += torch.where(finite, row_lengths_B.sum(), 0)
        slots += slot_tokens
        batches += 1
        bad += ~finite
        if sums.blocks_by_accepted is not None:
            self.blocks_by_accepted += torch.where(finite, sums.blocks_by_accepted, 0.0)

    def tensors(self) -> tuple[Tensor, ...]:
        """All counters; views."""
        return self.sums, self.slots, self.blocks_by_accepted

    def bad_micro_batches(self) -> int:
        """Micro-batches whose sums were left out so far. Waits for the device."""
        return int(self.sums[_SUMS.index("bad_micro_batches")])

    def zero_(self) -> None:
        """Back to nothing seen."""
        for tensor in self.tensors():
            tensor.zero_()

    def snapshot(self, *beside: Tensor) -> MetricsSnapshot:
        """Starts a copy to the host on the current stream, of other 0-D tensors too, and returns at once."""
        return MetricsSnapshot(self.sums, self.slots, *beside)


class MetricsSnapshot:
    """The counters as they stood at one point of the stream."""

    def __init__(self, *tensors: Tensor) -> None:
        pinned = tensors[0].is_cuda
        self._host = [
            torch.empty(t.shape, dtype=t.dtype, pin_memory=pinned).copy_(t, non_blocking=pinned) for t in tensors
        ]
        self._copied = torch.cuda.Event() if pinned else None
        if self._copied is not None:
            # The copy is on its own device's stream, whichever device is the calling thread's.
            self._copied.record(torch.cuda.current_stream(tensors[0].device))

    def ready(self) -> bool:
        """Whether reading would return without waiting."""
        return self._copied is None or self._copied.query()

    def read(self) -> MetricSums:
        """Waits for the copy (not for what was queued after it)."""
        sums, slots = self._values()[:2]
        return MetricSums(dict(zip(_SUMS, sums, strict=True)), correct=slots[0], supervised=slots[1])

    def beside(self) -> list[float]:
        """The other tensors given to snapshot(); waits as read() does."""
        return self._values()[2:]

    def _values(self) -> list[Any]:
        if self._copied is not None:
            self._copied.synchronize()
        return [t.tolist() for t in self._host]


@dataclass(frozen=True)
class MetricSums:
    """Sums as plain numbers; means() makes them readable, `a - b` the sums of the steps between two snapshots."""

    sums: dict[str, float]
    correct: list[float]
    supervised: list[float]

    def __post_init__(self) -> None:
        # They may come from a checkpoint's JSON. A sum too large for a float is no sum of ours.
        if not (isinstance(self.sums, dict) and isinstance(self.correct, list) and isinstance(self.supervised, list)):
            raise ValueError("sums that are no numbers by name and by slot")
        numbers = [*self.sums.values(), *self.correct, *self.supervised]
        if self.sums.keys() != set(_SUMS) or len(self.correct) != len(self.supervised):
            raise ValueError(f"sums of {len(self.sums)} metrics, not of {len(_SUMS)}, or of slots of two counts")
        if not all(type(number) in (int, float) and abs(number) < 2**1000 for number in numbers):
            raise ValueError("sums that are no numbers")

    def __sub__(self, earlier: MetricSums) -> MetricSums:
        return MetricSums(
            {name: value - earlier.sums[name] for name, value in self.sums.items()},
            [a - b for a, b in zip(self.correct, earlier.correct, strict=True)],
            [a - b for a, b in zip(self.supervised, earlier.supervised, strict=True)],
        )

    def means(self) -> dict[str, Any]:
        """loss, ce, kl per unit of weight, NaN where there was none; accuracy over supervised slots and per slot; accept_len
        per kept block and tokens_per_verification = accept_len + 1 (the bonus token); useful tokens and the share of
        padding."""
        s = self.sums
        per_weight = {name: s[name] / s["weight"] if s["weight"] else math.nan for name in ("loss", "ce", "kl")}
        accept_len = _ratio(s["accepted"], s["blocks"])
        return per_weight | {
            "accuracy": _ratio(sum(self.correct), sum(self.supervised)),
            "accuracy_per_slot": [_ratio(c, n) for c, n in zip(self.correct, self.supervised, strict=True)],
            "accept_len": accept_len,
            "tokens_per_verification": accept_len + 1,
            "useful_tokens": s["useful_tokens"],
            "padding": 1 - _ratio(s["useful_tokens"], s["slot_tokens"]),
            "micro_batches": s["micro_batches"],
            "bad_micro_batches": s["bad_micro_batches"],
        }


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
