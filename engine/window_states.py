"""A window's samples through the target: batches of like length, their real tokens' states on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.chat_tokens import Tokens
from engine.extract_options import ExtractOptions
from engine.extract_tally import TargetLoss
from engine.hf_target import HfTarget
from engine.length_batches import batches_of_like_length

# Supervised tokens whose loss the target itself is asked for.
LOSS_TOKENS = 4096


@dataclass(frozen=True)
class States:
    """A sample's tokens with its hidden states [T, L*D] and last hidden [T, D] in bf16 on the CPU."""

    tokens: Tokens
    hidden: Tensor
    last: Tensor | None


@torch.inference_mode()
def run_window(
    target: HfTarget, samples: Sequence[Tokens], layers: Sequence[int], options: ExtractOptions, loss: TargetLoss
) -> tuple[list[States | None], int]:
    """The samples with their states, by length, None for one whose states are not finite; and the padded tokens run.

    `loss` takes up the target's own loss on the supervised tokens until it has LOSS_TOKENS.
    """
    device, slots = target.embed.device, 0
    parts: list[tuple[Tokens, Tensor, Tensor, Tensor | None]] = []
    for rows, width in batches_of_like_length([len(s.input_ids) for s in samples], options.token_budget):
        batch = [samples[row] for row in rows]
        lengths = [len(sample.input_ids) for sample in batch]
        real_BS = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
        ids_BS = torch.zeros((len(batch), width), dtype=torch.int64)
        ids_BS[real_BS] = torch.from_numpy(np.concatenate([s.input_ids for s in batch])).long()
        attention = None if bool(real_BS.all()) else _to_device(real_BS.long(), device)
        *taps, last = target.residuals(_to_device(ids_BS, device), attention, [*layers, len(target.layers) - 1])
        # Real tokens only, row after row.
        places = _to_device(real_BS.flatten().nonzero().flatten(), device)
        packed = torch.cat([tap.flatten(0, 1)[places].bfloat16() for tap in taps], dim=-1)
        pre = last.flatten(0, 1)[places]
        finite = packed.isfinite().all(-1) & pre.isfinite().all(-1)
        columns: list[Tensor | None] = [_to_host(packed), _to_host(finite), None]
        if options.last_hidden != "none":
            columns[2] = _to_host((pre if options.last_hidden == "pre" else target.norm(pre)).bfloat16())
        split = [[None] * len(batch) if c is None else list(c.split(lengths)) for c in columns]
        parts += zip(batch, *split, strict=True)
        for sample, states in zip(batch, pre.split(lengths), strict=True):
            if loss.tokens < LOSS_TOKENS and bool(states.isfinite().all()):
                _add_loss(target, sample, states, loss)
        slots += len(batch) * width
    if device.type == "cuda":
        # The copies to the host have not been waited for until here: a batch is launched while the one before runs.
        torch.cuda.synchronize(device)
    return [States(t, hidden, last) if bool(good.all()) else None for t, hidden, good, last in parts], slots


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _to_host(tensor: Tensor) -> Tensor:
    """On the CPU; from CUDA a copy under way into pinned memory, there after a synchronisation."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _add_loss(target: HfTarget, sample: Tokens, pre: Tensor, loss: TargetLoss) -> None:
    places = np.flatnonzero(sample.loss_mask[1:])[: LOSS_TOKENS - loss.tokens]
    where = torch.from_numpy(places).to(pre.device)
    labels = torch.from_numpy(sample.input_ids[1:][places]).to(pre.device).long()
    logits = F.linear(target.norm(pre[where]), target.head).float()
    loss.nats += float(F.cross_entropy(logits, labels, reduction="sum"))
    loss.tokens += len(places)
