"""Which of the target's residual streams the taps of a dataset are, found by running the target over a few samples again.

Where no tap is of the last layer nothing in the numbers alone tells a layer's id (reading_checks.py). This needs
transformers and the target's whole checkpoint, and time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from buffers.dataset import SampleSource, folder_names
from engine.assemble import resolve_device, resolve_precision
from engine.hf_target import HfTarget, load_hf_target

# Positions of a sample: states depend on what stands before them, so a beginning will do.
TOKENS = 256
# Two runs of one target differ by less, as a part of the state's length; and neighbouring layers by more than twice as much.
_SAME = 0.1
_CLEARLY = 2.0
EMBEDDING, NORMED = "the embedding, before layer 0", "the last layer after the final norm"


def recompute(dataset: SampleSource, name: str, samples: int, *, recorded_norm: str | None) -> dict[str, Any]:
    """Runs the target `name` (a folder or hub id) over `samples` samples from all over the dataset; see `compare`. Raises
    ValueError when the target cannot be loaded or is of other sizes than the data."""
    device = resolve_device("auto")
    dtype = torch.bfloat16 if resolve_precision("auto", device) == "bf16" else torch.float32
    return compare(dataset, load_hf_target(name, device, dtype), samples, recorded_norm=recorded_norm)


def compare(dataset: SampleSource, target: HfTarget, samples: int, *, recorded_norm: str | None) -> dict[str, Any]:
    """{"samples", "taps", "last_hidden", "warnings"}: for every tap the layer recorded, what it "is" and how far it is from
    both; for last_hidden its distance from the last layer's output before and after the final norm.

    A distance is |found - recomputed| / |recomputed|, the median over the positions looked at: first tokens, whose states are
    hundreds of times as long as others, must not decide.
    """
    info = dataset.info
    num_layers = len(target.layers)
    if (target.hidden_size, target.vocab_size) != (info.hidden_size, info.vocab_size) or max(
        info.target_layer_ids
    ) >= num_layers:
        raise ValueError(
            f"{folder_names(dataset)}: expected a target of hidden size {info.hidden_size} and vocabulary {info.vocab_size} with "
            f"layers {list(info.target_layer_ids)}, found {target.hidden_size}, {target.vocab_size} and {num_layers} layers in "
            f"{target.name}. Give the data's own target."
        )
    chosen = np.unique(np.linspace(0, len(dataset) - 1, min(samples, len(dataset))).astype(int)).tolist()
    labels: list[int | str] = [*range(num_layers), EMBEDDING, NORMED]
    taps: list[list[Tensor]] = [[] for _ in info.target_layer_ids]
    last: list[Tensor] = []
    for i in chosen:
        sample = dataset.sample(i, 0, min(TOKENS, int(dataset.lengths[i])))
        candidates = _candidates(target, sample.input_ids)
        for place, tap in enumerate(sample.hidden_states.float().chunk(info.num_taps, dim=1)):
            taps[place].append(_distances(tap, candidates))
        if sample.last_hidden is not None:
            last.append(_distances(sample.last_hidden.float(), [candidates[num_layers - 1], candidates[-1]]))
    warnings: list[str] = []
    found = [
        _judged(layer, _medians(parts), labels, warnings)
        for layer, parts in zip(info.target_layer_ids, taps, strict=True)
    ]
    norm = dict(zip(("pre", "post"), _medians(last), strict=True)) if last else None
    if norm is not None:
        warnings += _norm_warning(norm, recorded_norm)
    return {"samples": len(chosen), "taps": found, "last_hidden": norm, "warnings": warnings}


@torch.inference_mode()
def _candidates(target: HfTarget, input_ids: Tensor) -> list[Tensor]:
    """What a tap may be, each fp32[S, D] on the CPU: the residual stream after every layer, the embedding, the final norm."""
    ids = input_ids.long().to(target.embed.device)
    residuals = target.residuals(ids[None], None, range(len(target.layers)))
    states = [*(states[0] for states in residuals), target.embed[ids], target.norm(residuals[-1])[0]]
    return [one.float().cpu() for one in states]


def _distances(found: Tensor, candidates: Sequence[Tensor]) -> Tensor:
    """[candidates, S]"""
    return torch.stack([(found - one).norm(dim=1) / one.norm(dim=1).clamp_min(1e-30) for one in candidates])


def _medians(parts: Sequence[Tensor]) -> list[float]:
    medians: list[float] = torch.cat(list(parts), dim=1).median(dim=1).values.tolist()
    return medians


def _judged(
    recorded: int, distances: Sequence[float], labels: Sequence[int | str], warnings: list[str]
) -> dict[str, Any]:
    nearest = min(range(len(labels)), key=lambda place: distances[place])
    best, own = distances[nearest], distances[recorded]
    what: int | str | None = recorded if own <= _CLEARLY * best else labels[nearest]
    told = f"layer {what}" if isinstance(what, int) else str(what)
    if best > _SAME:
        what = None
        warnings.append(
            f"the tap recorded as layer {recorded} is of no layer of this target (the nearest, {told}, is {best:.3f} of its "
            "length away): another target's, or of other tokens than these"
        )
    elif what != recorded:
        warnings.append(
            f"the tap recorded as layer {recorded} is {told} ({best:.3f} of its length away; layer {recorded} is {own:.3f} "
            "away): correct target_layer_ids, which count from 0"
        )
    return {"recorded": recorded, "is": what, "distance": best, "distance_of_recorded": own}


def _norm_warning(norm: dict[str, float], recorded: str | None) -> list[str]:
    nearest = "pre" if norm["pre"] <= norm["post"] else "post"
    numbers = (
        f"{norm['pre']:.3f} of its length from the last layer's output, {norm['post']:.3f} from that after the norm"
    )
    if norm[nearest] > _SAME:
        return [f"last_hidden is neither before nor after the final norm of this target ({numbers})"]
    if recorded is not None and recorded != nearest and norm[recorded] > _CLEARLY * norm[nearest]:
        return [
            f"last_hidden is recorded as {recorded} and is {nearest} ({numbers}): set last_hidden_norm to {nearest}"
        ]
    return []
