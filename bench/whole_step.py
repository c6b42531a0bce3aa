"""The whole training step - a batch from disk, forward and backward, clip, AdamW - against forward and backward alone, and the
update alone against the copy bandwidth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from bench.subjects import DatasetSubjects, Subject
from bench.timed_step import check_replay
from bench.timing import copy_gb_per_s, spread, times_ms
from buffers.batching import Batch
from engine.engine import Engine
from engine.work import update_bytes
from graphs.parity import worst_difference

# Small enough that random data never makes a gradient infinite: the update of a skipped step moves fewer bytes.
LR = 1e-6
_PROBES = 1 << 20


def batches_for_ever(batches: tuple[Batch, ...]) -> Iterator[Batch]:
    """The batches again and again."""
    while True:
        yield from batches


def check_update(subject: Subject) -> None:
    """Raises ValueError when a replayed update differs in a bit from the eager one, after the same step from the same weights.

    A million elements of every arena are compared: two copies of all would not fit beside a large drafter.
    """
    eager = _updated(subject, subject.engine.executor.call)
    replayed = _updated(subject, subject.engine.executor.run)
    difference = worst_difference(replayed, eager)
    if difference is not None:
        raise ValueError(
            f"update: the replay differs from the eager update in {difference.name} by {difference.relative:.1e} of its largest "
            "value; no speed is shown"
        )
    assert int(_optimizer(subject.engine).skipped) == 0, "the update was skipped: nothing was compared"


def whole_step(subjects: DatasetSubjects, subject: Subject, *, repeats: int) -> dict[str, Any]:
    """Milliseconds of whole steps on the subject's bucket, of its forward and backward and of the update, in one run.

    Steps are queued as training does. Raises ValueError when a replay differs from its eager twin, or a step was skipped.
    """
    engine, inputs, device = subject.engine, subjects.inputs, subject.engine.device
    optimizer = _optimizer(engine)
    check_replay(subject)
    check_update(subject)

    def forward_backward() -> None:
        # As the first micro-batch of a step: the others add to its gradients.
        engine.executor.run(subject.step)

    def step() -> None:
        inputs.next()
        engine.micro_step(subject.bucket)
        engine.update(LR)

    def update() -> None:
        # An update without weight skips itself; this one moves all its bytes, with gradients of zero.
        optimizer.denominator.fill_(1.0)
        engine.update(LR)

    engine.zero_()
    subject.fill()
    # A chip that grows warm grows slow: forward and backward are timed on both sides of the whole step.
    alone = times_ms(forward_backward, device, repeats=repeats)
    engine.zero_()
    inputs.start(batches_for_ever(tuple(batch for batch in subjects.batches if batch.bucket == subject.bucket)))
    before_ms = inputs.wait_ms
    whole = times_ms(step, device, repeats=repeats)
    wait_ms = (inputs.wait_ms - before_ms) / (repeats + 3)
    inputs.stop()
    subject.fill()
    alone += times_ms(forward_backward, device, repeats=repeats)
    engine.zero_()
    alone_update = times_ms(update, device, repeats=repeats)
    if int(optimizer.skipped):
        raise ValueError(
            f"bucket {subject.bucket.name}: expected every step to learn, found {int(optimizer.skipped)} skipped; no speed is "
            "shown"
        )
    ms = {name: spread(times)["median"] for name, times in (("w", whole), ("a", alone), ("u", alone_update))}
    moved = update_bytes(engine.params)
    update_gb_per_s, copy = moved / ms["u"] / 1e6, copy_gb_per_s(device, 2**31 if device.type == "cuda" else 2**26)
    return {
        "whole_step_ms": ms["w"],
        "whole_step_spread": spread(whole),
        "same_run_forward_backward_ms": ms["a"],
        "whole_over_forward_backward": ms["w"] / ms["a"],
        "loader_wait_ms": wait_ms,
        "update_ms": ms["u"],
        "update_spread": spread(alone_update),
        "update_equals_eager": True,
        "update_gb": moved / 1e9,
        "update_gb_per_s": update_gb_per_s,
        "copy_gb_per_s": copy,
        "update_over_copy_bandwidth": update_gb_per_s / copy,
    }


def _updated(subject: Subject, run: Any) -> dict[str, Tensor]:
    """Elements of every arena after one step from the seed's weights; `run` is how the executor runs a named step."""
    engine, optimizer = subject.engine, _optimizer(subject.engine)
    p = engine.params
    p.draw_(seed=1)
    for state in (p.exp_avg, p.exp_avg_sq, optimizer.step, optimizer.skipped):
        state.zero_()
    engine.zero_()
    subject.fill()
    engine.micro_step(subject.bucket)
    optimizer.lr.fill_(1e-3)
    run("update")
    assert p.master is not None
    arenas = {"weight": p.weight, "grad": p.grad, "master": p.master, "exp_avg": p.exp_avg, "exp_avg_sq": p.exp_avg_sq}
    stride = max(1, p.size // _PROBES)
    return {name: arena[::stride].clone() for name, arena in arenas.items()} | {"step": optimizer.step.clone()}


def _optimizer(engine: Engine) -> Any:
    assert engine.optimizer is not None, "the engine was built without an optimizer"
    return engine.optimizer
