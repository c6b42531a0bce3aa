"""A batch of samples through the target: the states of its real tokens, on their way to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.chat_tokens import Tokens
from engine.extract_tally import TargetLoss
from engine.hf_target import HfTarget


@dataclass(frozen=True)
class States:
    """A sample's hidden states [T, L*D] and last hidden [T, D] in bf16 on the host, and the target's loss on it, if asked.

    `finite` says whether they are numbers.
    """

    tokens: Tokens
    hidden: Tensor
    last: Tensor | None
    finite: bool
    loss: TargetLoss


@dataclass
class BatchStates:
    """States of a batch, its samples one behind the other: there when `ready` is."""

    samples: Sequence[Tokens]
    hidden: Tensor
    last: Tensor | None
    finite: Tensor
    ready: torch.cuda.Event | None
    losses: dict[int, TargetLoss] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        return len(self.hidden)

    def each(self) -> Iterator[States]:
        """Waits until they are there and hands out one sample after the other."""
        if self.ready is not None:
            self.ready.synchronize()
        stop = 0
        for i, sample in enumerate(self.samples):
            start, stop = stop, stop + len(sample.input_ids)
            last = None if self.last is None else self.last[start:stop]
            finite = bool(self.finite[start:stop].all())
            yield States(sample, self.hidden[start:stop], last, finite, self.losses.get(i, TargetLoss()))


@torch.inference_mode()
def run_batch(
    target: HfTarget,
    samples: Sequence[Tokens],
    width: int,
    layers: Sequence[int],
    last_hidden: str,
    *,
    loss_from: int,
    loss_tokens: int,
) -> BatchStates:
    """Run samples padded to `width`. On CUDA nothing is waited for, but for the target's own loss: it is taken on the samples
    from `loss_from` on, on at most `loss_tokens` supervised tokens."""
    device = target.embed.device
    lengths = [len(sample.input_ids) for sample in samples]
    real_BS = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    ids_BS = torch.zeros((len(samples), width), dtype=torch.int64)
    ids_BS[real_BS] = torch.from_numpy(np.concatenate([s.input_ids for s in samples])).long()
    attention = None if bool(real_BS.all()) else _to_device(real_BS.long(), device)
    *taps, last = target.residuals(_to_device(ids_BS, device), attention, [*layers, len(target.layers) - 1])
    # Real tokens only, row after row.
    places = _to_device(real_BS.flatten().nonzero().flatten(), device)
    packed = torch.cat([tap.flatten(0, 1)[places].bfloat16() for tap in taps], dim=-1)
    pre = last.flatten(0, 1)[places]
    finite = packed.isfinite().all(-1) & pre.isfinite().all(-1)
    stored = None
    if last_hidden != "none":
        stored = _to_host((pre if last_hidden == "pre" else target.norm(pre)).bfloat16())
    states = BatchStates(samples, _to_host(packed), stored, _to_host(finite), None)
    if device.type == "cuda":
        states.ready = torch.cuda.Event()
        states.ready.record(torch.cuda.current_stream(device))
    parts = pre.split(lengths)
    for i in range(loss_from, len(samples)):
        if loss_tokens > 0 and bool(parts[i].isfinite().all()):
            states.losses[i] = _loss(target, samples[i], parts[i], loss_tokens)
            loss_tokens -= states.losses[i].tokens
    return states


def _loss(target: HfTarget, sample: Tokens, pre: Tensor, most: int) -> TargetLoss:
    places = np.flatnonzero(sample.loss_mask[1:])[:most]
    where = torch.from_numpy(places).to(pre.device)
    labels = torch.from_numpy(sample.input_ids[1:][places]).to(pre.device).long()
    logits = F.linear(target.norm(pre[where]), target.head).float()
    return TargetLoss(float(F.cross_entropy(logits, labels, reduction="sum")), len(places))


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _to_host(tensor: Tensor) -> Tensor:
    """On the CPU; from CUDA a copy into pinned memory that is under way on the current stream."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
