"""Before the first step: is every bucket's replay the eager step, on a batch of its own?"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from buffers.batching import Batch
from buffers.shapes import Bucket
from engine.engine import Engine
from graphs.executor import CaptureError
from graphs.fingerprint import BUFFERS, Fingerprint
from graphs.parity import Difference
from graphs.record import Record

EQUAL = "equal bits"
CALLED = "called: nothing to compare"
NEVER = ""
HELD_OUT = ", held-out"
NOT_AGAIN = "called: it could not be captured again when another bucket had to be called"
DOES_NOT_FIT = "not verified: the eager step of one row does not fit beside the pool"
# max|replay - eager| / max|eager| of a tensor when the eager step has fewer rows: its matmuls then sum in another order.
ROWS_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp8": 0.25}


class Mismatch(CaptureError):
    """A replay is not the eager step."""


@dataclass(frozen=True)
class Feed:
    """Batches in the order in which they will be used, and what puts one of them into the static inputs."""

    batches: Iterable[Batch]
    load: Callable[[Batch], None]


@dataclass(frozen=True)
class Verified:
    """how: in words, "" for a bucket that was not compared. seconds: what it took. refused: the replay was not the eager step,
    and the bucket is called instead. held_out: the same of its evaluation, "" where there is none or it was not compared."""

    how: str
    seconds: float = 0.0
    refused: bool = False
    held_out: str = NEVER
    held_out_refused: bool = False


def verify_buckets(
    engine: Engine,
    batches: Iterable[Batch],
    load: Callable[[Batch], None],
    *,
    policy: str,
    fingerprints: Mapping[Bucket, Fingerprint],
    known: Record | None,
    say: Callable[[str], None],
    held_out: Feed | None = None,
) -> dict[Bucket, Verified]:
    """Replays every bucket on the first of its `batches` and compares with its eager twin; and its evaluation on the first
    of its held-out batches, where it has one. Gradients and metrics are forgotten afterwards and the eager twins' memory is
    given back.

    policy: always; changed, which leaves out a bucket whose very fingerprint `known` says was verified; never. Raises
    Mismatch naming the bucket and the tensor that differs most; with run.on_capture_failure = "eager" that bucket is called
    instead, the others are captured anew and compared again.
    """
    executor = engine.executor
    found = dict.fromkeys(engine.buckets, Verified(NEVER))
    firsts: dict[_Step, tuple[Batch, Callable[[Batch], None]]] = {}
    for of_held_out, feed in ((False, Feed(batches, load)), (True, held_out)):
        if feed is None or not (of_held_out or engine.options.training):
            continue
        steps = [_Step(bucket, of_held_out) for bucket in engine.buckets]
        for step in steps:
            before = known.verified_before(*step.key, fingerprints[step.bucket], ignore=(BUFFERS,)) if known else ""
            if executor.how_of(step.name) == "called":
                found[step.bucket] = step.noted(found[step.bucket], CALLED)
            elif policy == "changed" and _holds(before):
                found[step.bucket] = step.noted(found[step.bucket], before)
        wanted = {step.bucket for step in steps if policy != "never" and step.how(found[step.bucket]) == NEVER}
        first_of = _first_of_each(feed.batches, wanted)
        firsts |= {_Step(bucket, of_held_out): (batch, feed.load) for bucket, batch in first_of.items()}
        if not of_held_out:
            for bucket in sorted(wanted - first_of.keys()):
                say(f"bucket {bucket.name}: not verified, the data have no batch of it")
    left = dict(firsts)
    while left:
        step, (batch, put) = left.popitem()
        if executor.how_of(step.name) == "called":  # captured once, but not again beside another that is called by now
            firsts.pop(step)
            found[step.bucket] = step.noted(found[step.bucket], NOT_AGAIN, refused=True)
            say(f"bucket {step.bucket.name}{step.words}: {NOT_AGAIN}")
            continue
        start = time.perf_counter()
        try:
            how, refused = verify_batch(engine, batch, put, held_out=step.held_out), False
        except Mismatch as error:
            if executor.on_failure == "stop":
                raise
            how, refused = f"called: {error}", True
            executor.call_instead(step.name, str(error))
            firsts.pop(step)
            left = dict(firsts)  # of the new captures
        found[step.bucket] = step.noted(found[step.bucket], how, time.perf_counter() - start, refused)
        if how != EQUAL:
            say(f"bucket {step.bucket.name}{step.words}: replay and eager step compared: {how}")
    executor.times.clear()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()  # what comparing took beside the graphs' pool
    return found


@dataclass(frozen=True)
class _Step:
    """What is compared: a bucket's training or its evaluation."""

    bucket: Bucket
    held_out: bool

    @property
    def name(self) -> str:
        """The executor's; of the two that train, the first, which is of one group with the other."""
        return f"{'eval' if self.held_out else 'train'} {self.bucket.name}"

    @property
    def words(self) -> str:
        return HELD_OUT if self.held_out else ""

    @property
    def key(self) -> tuple[str, bool]:
        return self.bucket.name, self.held_out

    def how(self, found: Verified) -> str:
        return found.held_out if self.held_out else found.how

    def noted(self, found: Verified, how: str, seconds: float = 0.0, refused: bool = False) -> Verified:
        if self.held_out:
            return replace(found, held_out=how, held_out_refused=refused, seconds=found.seconds + seconds)
        return replace(found, how=how, refused=refused, seconds=found.seconds + seconds)


def _holds(before: str) -> bool:
    """Whether words of an earlier comparison say that there was one and that it went well."""
    return before not in (NEVER, DOES_NOT_FIT) and not before.startswith("called")


def _first_of_each(batches: Iterable[Batch], buckets: Collection[Bucket]) -> dict[Bucket, Batch]:
    found: dict[Bucket, Batch] = {}
    if not buckets:
        return found
    for batch in batches:
        if batch.bucket in buckets:
            found.setdefault(batch.bucket, batch)
            if len(found) == len(buckets):
                break
    return found


def to_compare(
    engine: Engine,
    batches: Iterable[Batch],
    *,
    policy: str,
    fingerprints: Mapping[Bucket, Fingerprint],
    known: Record | None,
) -> dict[Bucket, Batch]:
    """Before anything is built: the batches that verify_buckets would compare the training steps of these buckets on."""
    wanted = set(engine.buckets) if engine.options.training and policy != "never" else set()
    if policy == "changed" and known is not None:
        wanted = {
            bucket
            for bucket in wanted
            if not _holds(known.verified_before(bucket.name, False, fingerprints[bucket], ignore=(BUFFERS,)))
        }
    return _first_of_each(batches, wanted)


def verify_batch(engine: Engine, batch: Batch, load: Callable[[Batch], None], *, held_out: bool = False) -> str:
    """Replays the batch's bucket, held_out: its evaluation, and compares with the eager twin; returns in words how the two
    compare.

    The whole batch; where the eager twin does not fit beside the graphs' pool, the same with its layers formed again in the
    backward pass, which computes the same bits; then with ever fewer rows. Raises Mismatch. Gradients and metrics are
    forgotten.
    """
    bucket, drafter = batch.bucket, engine.drafter
    load(batch)
    fits, difference = _compare(engine, lambda: engine.verify(bucket, held_out=held_out))
    if fits:
        return judged(engine, bucket, difference, held_out=held_out)
    own = drafter.recompute
    drafter.recompute = "layer"
    try:
        if not held_out:  # a forward pass alone keeps nothing
            fits, difference = _compare(engine, lambda: engine.verify(bucket))
            if fits:
                how = judged(engine, bucket, difference)
                return f"{how}, the eager step with its layers recomputed to fit beside the pool"
        rows = bucket.B
        while rows > 1:
            rows //= 2
            load(batch)
            fits, difference = _compare(
                engine,
                lambda rows=rows: engine.verify_rows(bucket, rows, held_out=held_out),  # type: ignore[misc]
            )
            if fits:
                break
    finally:
        drafter.recompute = own
    if not fits:
        return DOES_NOT_FIT
    tolerance = ROWS_TOLERANCE[engine.precision]
    if difference is not None and not difference.relative <= tolerance:
        raise mismatch(bucket, difference)
    apart = 0.0 if difference is None else difference.relative
    return (
        f"{rows} of {bucket.B} rows, more do not fit beside the pool: {apart:.1e} of the largest value apart, {tolerance:g} "
        "allowed"
    )


def _compare(engine: Engine, compare: Callable[[], Difference | None]) -> tuple[bool, Difference | None]:
    """(whether it fitted, the difference). The failed attempt's memory is given back: its traceback ends here."""
    try:
        return True, compare()
    except torch.OutOfMemoryError:
        pass
    engine.zero_()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
    return False, None


def judged(engine: Engine, bucket: Bucket, difference: Difference | None, *, held_out: bool = False) -> str:
    """Bits, or as close as two eager steps are to each other. Raises Mismatch for what is further off."""
    if difference is None:
        return EQUAL
    noise = engine.noise(bucket, held_out=held_out)
    if noise is None or not difference.relative <= 2 * noise.relative:
        raise mismatch(bucket, difference)
    return f"{difference.relative:.1e} of the largest value apart, two eager steps {noise.relative:.1e}"


def mismatch(bucket: Bucket, difference: Difference) -> Mismatch:
    """What to raise for a replay that is not the eager step."""
    return Mismatch(
        f"bucket {bucket.name}: the replay differs from the eager step in {difference.name} by "
        f"{difference.relative:.1e} of its largest value; train on the CPU, or report this with dflash-engine's "
        "version and the GPU's name"
    )
