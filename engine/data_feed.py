"""The order of training: which batches make up which optimizer step, from where the last checkpoint left off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from buffers.batching import Batch, BatchPlan
from buffers.dataset import SampleSource, folder_names
from buffers.mixture import Mixture
from buffers.planner import TooLong
from engine.checkpoint import DataIdentity, Position
from engine.metrics import MetricSums


def beginning(dataset: SampleSource, plan: BatchPlan) -> Position:
    """Where a new run starts."""
    tokens = int(dataset.lengths.sum())
    return Position(0, 0, (), DataIdentity(len(dataset), tokens, dataset.digest, plan.longest))


def carried_over(saved: Position, dataset: SampleSource, plan: BatchPlan, too_long: TooLong) -> Position:
    """A checkpoint's position under today's plan.

    Pieces of split samples are counted in the plan's longest document. Under another one, a sample of which a piece was taken
    counts as taken whole: no token is served twice in the epoch. Raises ValueError when the checkpoint saw other data.
    """
    ours = beginning(dataset, plan).data
    if replace(saved.data, longest=ours.longest) != ours:
        content = "content or weights" if isinstance(dataset, Mixture) else "content"
        raise ValueError(
            f"data.path: {folder_names(dataset)} has {ours.num_samples} samples with {ours.num_tokens} tokens, the checkpoint "
            f"was trained on {saved.data.num_samples} with {saved.data.num_tokens}"
            f"{'' if ours.digest == saved.data.digest else f' of other {content}'}; point it back, or train into another "
            "run.output"
        )
    if too_long != "split" or saved.data.longest == ours.longest:
        return replace(saved, data=ours)
    pieces = {sample: -(-int(dataset.lengths[sample]) // ours.longest) for sample, _ in saved.consumed}
    whole = tuple((sample, piece) for sample, count in pieces.items() for piece in range(count))
    return replace(saved, data=ours, consumed=whole)


def training_steps(
    plan: BatchPlan, *, start: Position, total_steps: int, accumulation: int
) -> Iterator[tuple[Batch, ...]]:
    """The micro-batches of every step from start.step to total_steps; a step's are of one epoch, whose last step may have
    fewer. Depends on its arguments alone, so that the loader and the loop can each walk their own."""
    step, epoch = start.step, start.epoch
    batches = plan.epoch(epoch, set(start.consumed) or None)
    while step < total_steps:
        for first in range(0, len(batches), accumulation):
            if step == total_steps:
                return
            step += 1
            yield tuple(batches[first : first + accumulation])
        epoch += 1
        batches = plan.epoch(epoch)


def count_steps(plan: BatchPlan, *, start: Position, epochs: int, accumulation: int, max_steps: int = 0) -> int:
    """Optimizer steps that will have been done at the end, those before `start` included."""
    left = len(plan.epoch(start.epoch, set(start.consumed) or None)) if start.epoch < epochs else 0
    steps = start.step + -(-left // accumulation)
    if plan.epochs_alike:
        # At once, however many: somebody may mean "until Ctrl-C".
        steps += max(0, epochs - start.epoch - 1) * -(-plan.batch_count(start.epoch + 1) // accumulation)
        epochs = 0
    for epoch in range(start.epoch + 1, epochs):
        if max_steps and steps >= max_steps:
            break
        steps += -(-plan.batch_count(epoch) // accumulation)
    return max(start.step, min(steps, max_steps)) if max_steps else steps


class Progress:
    """Where the run is: what a checkpoint must know of the data."""

    def __init__(self, start: Position) -> None:
        self.step, self.epoch = start.step, start.epoch
        self._start = start
        self._consumed = list(start.consumed)

    def took(self, batches: tuple[Batch, ...]) -> None:
        """One optimizer step was queued over these batches."""
        if batches[0].epoch != self.epoch:
            self.epoch, self._consumed = batches[0].epoch, []
        self.step += 1
        for batch in batches:
            self._consumed += batch.keys

    def position(self, logged: MetricSums) -> Position:
        """For a checkpoint after the steps so far."""
        return replace(self._start, step=self.step, epoch=self.epoch, consumed=tuple(self._consumed), logged=logged)
