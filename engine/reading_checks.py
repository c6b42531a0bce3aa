"""What the numbers in a dataset say of how it was recorded: the final norm, the layer ids, the tokenizer.

A target predicts its own data: head(norm(last_hidden)) gives the next token a cross entropy far below ln V when the
norm is read as it was recorded, and a worse one otherwise. The residual stream after the last layer is last_hidden before
the norm, so a tap of that layer can be compared with it; of other layers nothing in the data tells the number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from buffers.dataset import SampleSource, folder_names
from engine.ops.rms_norm_ref import normalise

# Positions that are looked at: a head of 150,000 rows takes seconds on a CPU for so many.
POSITIONS = 256
_SAMPLES = 32
_VOCAB_ROWS = 8192
# Differences that two runs of one target in bf16 may show, as a part of the value; and nats that make one reading better.
_SAME = 0.02
_NATS = 0.02


@dataclass(frozen=True)
class Positions:
    """P positions from all over a dataset: next_ids int64[P], taps [P, L, D] and last [P, D] or None, in fp32; ids int64[P]."""

    ids: Tensor
    next_ids: Tensor
    taps: Tensor
    last: Tensor | None


def some_positions(dataset: SampleSource) -> Positions:
    """Positions that have a next token, evenly spread over samples and within them. Raises ValueError when there are none."""
    usable = np.flatnonzero(dataset.lengths >= 2)
    if not len(usable):
        raise ValueError(
            f"{folder_names(dataset)}: expected a sample of two tokens, found none in {len(dataset)}. Extract longer ones."
        )
    chosen = usable[np.unique(np.linspace(0, len(usable) - 1, min(_SAMPLES, len(usable))).astype(int))]
    each = -(-POSITIONS // len(chosen))
    parts: list[tuple[Tensor, ...]] = []
    for i in chosen.tolist():
        sample = dataset.sample(i)
        at = torch.from_numpy(np.unique(np.linspace(0, len(sample.input_ids) - 2, each).astype(np.int64)))
        hidden = [sample.hidden_states, *([] if sample.last_hidden is None else [sample.last_hidden])]
        parts.append((sample.input_ids[at].long(), sample.input_ids[at + 1].long(), *(h[at].float() for h in hidden)))
    ids, next_ids, taps, *last = (torch.cat(column) for column in zip(*parts, strict=True))
    L, D = dataset.info.num_taps, dataset.info.hidden_size
    return Positions(ids, next_ids, taps.view(-1, L, D), last[0] if last else None)


def cross_entropy(states: Tensor, next_ids: Tensor, head: Tensor) -> float:
    """Mean of -log softmax(head @ states)[next_ids] in nats: states [P, D], head [V, D]; a slice of the vocabulary at a time."""
    best = torch.full((len(states),), -math.inf)
    total = torch.zeros(len(states))
    for first in range(0, len(head), _VOCAB_ROWS):
        logits = states @ head[first : first + _VOCAB_ROWS].float().T
        highest = torch.maximum(best, logits.max(dim=1).values)
        total = total * (best - highest).exp() + (logits - highest[:, None]).exp().sum(dim=1)
        best = highest
    chosen = (states * head[next_ids].float()).sum(dim=1)
    return float((best + total.log() - chosen).mean())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, in fp32."""
    return normalise(x, eps) * weight.float()


def check_norm(positions: Positions, tensors: dict[str, Tensor], eps: float, recorded: str | None) -> dict[str, Any]:
    """Which reading of last_hidden predicts the next token: {"pre": nats, "post": nats, "guessing": ln V, "fits": ...} and a
    "warning", "" when the recorded one fits. recorded None: nothing is recorded yet."""
    last, head = positions.last, tensors["lm_head.weight"]
    assert last is not None, "positions without last_hidden"
    nats = {
        "pre": cross_entropy(rms_norm(last, tensors["norm.weight"], eps), positions.next_ids, head),
        "post": cross_entropy(last, positions.next_ids, head),
    }
    guessing = math.log(len(head))
    other = {"pre": "post", "post": "pre"}
    fits = min(nats, key=lambda reading: nats[reading])
    numbers = f"next token {nats['pre']:.3f} nats read as pre, {nats['post']:.3f} as post, {guessing:.3f} by guessing"
    warning = ""
    if not nats[fits] < guessing - 0.5:
        fits = "neither"
        warning = f"last_hidden does not predict the next token ({numbers}): another target, tokenizer or head than the data's"
    elif nats[other[fits]] - nats[fits] < _NATS:
        fits = "either"
    elif recorded is not None and recorded != fits:
        warning = f"last_hidden is recorded as {recorded} and fits {fits} ({numbers}): set last_hidden_norm to {fits}"
    return {**nats, "guessing": guessing, "fits": fits, "warning": warning}


def check_layer_ids(
    positions: Positions,
    tensors: dict[str, Tensor],
    eps: float,
    *,
    norm: str | None,
    layer_ids: Sequence[int],
    num_layers: int,
) -> dict[str, Any]:
    """Whether the taps are those of the recorded layers, as far as the data tells: {"verdict": ..., "warning": "" or why not}.

    norm: how last_hidden is to be read (pre or post), None without it.
    """
    embedded = tensors["embed_tokens.weight"][positions.ids].float()
    last, weight = positions.last, tensors["norm.weight"]
    found: dict[int, str] = {}
    for index, layer in enumerate(layer_ids):
        tap = positions.taps[:, index]
        if _differs(tap, embedded) < _SAME:
            found[layer] = "the embedding, before layer 0"
        elif last is not None and norm is not None:
            normed = last if norm == "post" else rms_norm(last, weight, eps)
            # Post-norm states are compared after the norm, which only the residual stream still needs.
            residual = _differs(tap, last) if norm == "pre" else _differs(rms_norm(tap, weight, eps), last)
            if _differs(tap, normed) < _SAME and _differs(tap, normed) < residual:
                found[layer] = "the last layer after the final norm"
            elif residual < _SAME:
                found[layer] = f"layer {num_layers - 1}"
    wrong = {layer: what for layer, what in found.items() if what != f"layer {layer}"}
    final = num_layers - 1
    if final in layer_ids and final not in found and last is not None and norm is not None:
        wrong[final] = "not the last layer's, which last_hidden is"
    if wrong:
        told = ", ".join(f"recorded as layer {layer} is {what}" for layer, what in wrong.items())
        hint = "target_layer_ids count from 0 and name the residual stream after the layer"
        return {"verdict": "wrong", "warning": f"the tap {told}: {hint}"}
    if found:
        return {"verdict": f"the tap of layer {final} is the last layer's", "warning": ""}
    return {
        "verdict": "cannot be told from the numbers: no tap is of the last layer, or there is no last_hidden; see --recompute",
        "warning": "",
    }


def _differs(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, as a part of that of the expected values."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp_min(1e-30))
