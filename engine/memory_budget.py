"""A plan that does not fit is refused before anything is allocated, with the smallest change that would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from buffers.shapes import Bucket
from engine.gpu_holders import held_on
from engine.memory_estimate import Estimate
from engine.settings import Settings
from engine.settings_fields import SettingsError

GIB = 2**30
_SMALLEST_CHUNK = 256
# Of the token budget that is in use; a plan under one of them is tried before the next.
_PARTS = (3 / 4, 1 / 2, 3 / 8, 1 / 4, 3 / 16, 1 / 8)

Replan = Callable[[Settings], Sequence[Bucket]]
Reckon = Callable[[Settings, Sequence[Bucket]], Estimate]


@dataclass(frozen=True)
class Budget:
    """Bytes, and where the number comes from, in words. held: tells who holds the rest, asked only when it matters."""

    nbytes: int
    source: str
    held: Callable[[], str] | None = None


def budget_for(settings: Settings, device: torch.device) -> Budget | None:
    """run.memory_budget_gib, or what the device has free now; None where there is neither."""
    if settings.run.memory_budget_gib:
        return Budget(int(settings.run.memory_budget_gib * GIB), "run.memory_budget_gib")
    if device.type != "cuda":
        return None
    # What torch holds and nobody uses is free to us as well.
    spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    source = f"what {torch.cuda.get_device_name(device)} has free"
    return Budget(torch.cuda.mem_get_info(device)[0] + spare, source, partial(held_on, device))


def check_budget(
    settings: Settings, buckets: Sequence[Bucket], budget: Budget | None, *, reckon: Reckon, replan: Replan
) -> Estimate:
    """The estimate of this plan. reckon: settings and buckets to an estimate; replan: settings to buckets, ValueError where
    there is no plan. Raises SettingsError when the plan needs more than the budget, naming the smallest change that fits."""
    found = reckon(settings, buckets)
    if budget is None or found.total <= budget.nbytes:
        return found
    largest = max(found.steps, key=lambda bucket: found.steps[bucket].most)
    fixed = sum(found.fixed.values())
    held = f"; {budget.held()}: end what should not run there, or take another GPU" if budget.held is not None else ""
    raise SettingsError(
        f"buckets: expected a plan within {_gib(budget.nbytes)} GiB ({budget.source}), found one estimated to need "
        f"{_gib(found.total)} GiB: {_gib(fixed)} for weights, optimizer, target and inputs, {_gib(found.pool)} for "
        f"the graphs' pool (largest: {largest.name}), {_gib(found.executables)} for the graphs; "
        f"{_advice(settings, budget, reckon, replan)}{held}"
    )


def _advice(settings: Settings, budget: Budget, reckon: Reckon, replan: Replan) -> str:
    least: int | None = None
    for changes in _changes(settings, max(bucket.tokens for bucket in replan(settings))):
        changed = _with(settings, changes)
        try:
            needed = reckon(changed, replan(changed)).total
        except ValueError:
            continue  # the longest sample does not fit such a budget
        if needed <= budget.nbytes:
            told = " and ".join(f"{name} = {_toml(value)}" for name, value in changes.items())
            return f"set {told} ({_gib(needed)} GiB)"
        least = needed if least is None else min(least, needed)
    lowest = f", the least is {_gib(least)} GiB" if least is not None else ""
    return (
        f"no recompute, head_chunk or token_budget fits{lowest}: free memory, plan shorter samples or a smaller drafter"
    )


def _changes(settings: Settings, tokens: int) -> Iterator[dict[str, str | int]]:
    """From what costs nothing to what costs most: smaller chunks of logits, recomputing, fewer rows; then all of them."""
    chunks = [settings.model.head_chunk >> halvings for halvings in range(1, 16)]
    chunks = [chunk for chunk in chunks if chunk >= _SMALLEST_CHUNK]
    modes = ["none", "mlp", "layer"]
    later = modes[modes.index(settings.model.recompute) + 1 :]
    budgets = [int(part * tokens) for part in _PARTS]
    for chunk in chunks:
        yield {"model.head_chunk": chunk}
    for mode in later:
        yield {"model.recompute": mode}
    for budget in budgets:
        yield {"buckets.token_budget": budget}
    strongest: dict[str, str | int] = {"model.recompute": "layer"} if later else {}
    if chunks and strongest:
        yield strongest | {"model.head_chunk": chunks[-1]}
    if chunks:
        strongest["model.head_chunk"] = chunks[-1]
    if strongest:
        for budget in budgets:
            yield strongest | {"buckets.token_budget": budget}


def _with(settings: Settings, changes: dict[str, str | int]) -> Settings:
    for name, value in changes.items():
        section, _, key = name.partition(".")
        settings = replace(settings, **{section: replace(getattr(settings, section), **{key: value})})  # type: ignore[arg-type]
    return settings


def _toml(value: str | int) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _gib(nbytes: int) -> str:
    """With one digit, and below 1 with two: a tiny plan is not within 0.0 GiB."""
    return f"{nbytes / GIB:.1f}" if nbytes >= GIB else f"{nbytes / GIB:.2f}"
