"""train --check: the promises of the steady state, looked at in every step of a run; the first one that is broken stops it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from buffers.batching import Batch
from buffers.poison import poison_padding
from buffers.stages import stage
from buffers.staging import InputPipeline
from engine.engine import Engine
from engine.engine_buffers import engine_buffers
from engine.verification import Mismatch, judged, verify_batch
from graphs.compile_ban import compilation_allowed
from graphs.fingerprint import Fingerprint, addresses
from graphs.guards import Counters, noting_host_syncs
from graphs.pool_poison import CLEAN, POISON

_WHAT_TO_DO = "the run was stopped, without a checkpoint of this step; report this, or train without --check"


class CheckFailed(RuntimeError):
    """A promise that a step broke: which step, which promise, where."""


class StepChecks:
    """Between begin() and end() a step waits for nothing, allocates nothing and compiles nothing; end() looks too whether every
    buffer is where it was, and whether NaN has come into gradients, metrics or weights: from the padding, or from memory of
    the graphs' pool that a replay has not written. Every every() steps the step's last batch is replayed and compared with the
    eager step, and with itself under other padding. 0: nothing of all that."""

    def __init__(self, engine: Engine, every: Callable[[], int]) -> None:
        self._engine, self._every = engine, every
        self.aside = Counters(0, 0)  # what looking itself took
        self._generation, self._places = 0, Fingerprint.of({})
        self.active = False  # whether this step is looked at
        self._watching = ExitStack()
        self._used, self._syncs = Counters(0, 0), list[str]()
        self._bad_before = 0
        self.steps = self.compared = 0  # looked at so far, and of those compared
        self.poisoned_mib = 0.0  # of the graphs' pool, before each replay; the most there was

    def begin(self) -> None:
        """A step begins."""
        self.active = self._every() > 0
        self._engine.executor.pool_fill = POISON if self.active else None
        self._used, self._syncs = Counters(0, 0), []
        if self.active:
            with self._aside():
                self._bad_before = self._engine.metrics.bad_micro_batches()

    def arrived(self, batch: Batch, inputs: InputPipeline) -> None:
        """A batch stands in the static inputs: its padding is poisoned."""
        if self.active:
            with self._aside():
                poison_padding(inputs.inputs(batch.bucket))

    def end(self, step: int, batches: Sequence[Batch], inputs: InputPipeline) -> None:
        """The step of this number was queued over these batches. Waits for the device. Raises CheckFailed."""
        if not self.active:
            return
        self.close()
        self.active = False
        before = Counters.read(self._engine.device)
        try:
            with stage("check", f"step {step}"):
                self._refuse_waits(step, batches)
                self._refuse_moved(step, inputs)
                self._refuse_nan(step, batches, inputs)
                if step % self._every() == 0:
                    self._compare(step, batches[-1], inputs)
                    self.compared += 1
        finally:
            self._engine.executor.pool_fill = None
        self.steps += 1
        self.poisoned_mib = max(self.poisoned_mib, self._engine.executor.filled_mib)
        self.aside += Counters.read(self._engine.device) - before

    def close(self) -> None:
        """Stops looking, also in the middle of a step."""
        self._watching.close()

    def figures(self) -> dict[str, float]:
        """Steps looked at, how many of them were compared with the eager step, MiB of the pool that replays began with as NaN."""
        return {"steps": self.steps, "compared": self.compared, "poisoned_mib": self.poisoned_mib}

    def _watch(self) -> None:
        start = Counters.read(self._engine.device)

        def note() -> None:
            self._used += Counters.read(self._engine.device) - start

        with ExitStack() as watching:
            watching.callback(note)
            watching.enter_context(noting_host_syncs(self._syncs))
            self._watching = watching.pop_all()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        self.close()
        before = Counters.read(self._engine.device)
        yield
        self.aside += Counters.read(self._engine.device) - before
        self._watch()

    def _refuse_waits(self, step: int, batches: Sequence[Batch]) -> None:
        if self._syncs:
            raise _failed(step, "no wait of the host for the device", f"{len(self._syncs)}, first at {self._syncs[0]}")
        executor = self._engine.executor
        names = [f"train {batch.bucket.name}" for batch in batches]
        # A step that is called because it could not be captured allocates as every eager step does.
        called = executor.how != "called" and any(executor.how_of(name) == "called" for name in names)
        if self._used.device_allocations and not called:
            raise _failed(step, "no allocation on the device", str(self._used.device_allocations))
        if self._used.compilations:
            raise _failed(step, "nothing to be compiled", f"{self._used.compilations} compilations")

    def _refuse_moved(self, step: int, inputs: InputPipeline) -> None:
        static = [(table, views) for table, views in inputs.named_buffers() if table.startswith("static inputs")]
        now = addresses(static + engine_buffers(self._engine))
        if self._generation != self._engine.generation:
            self._generation, self._places = self._engine.generation, now
        moved = now.changes(self._places)
        if moved:
            raise _failed(step, "every buffer where it was", "; ".join(map(str, moved[:3])))

    def _refuse_nan(self, step: int, batches: Sequence[Batch], inputs: InputPipeline) -> None:
        engine, why = self._engine, ""
        bad = self._bad_gradients()
        if engine.metrics.bad_micro_batches() > self._bad_before:
            bad.append("metrics")
        if bad:
            why = self._whence(batches, inputs)
        elif engine.optimizer is not None:
            # Of a step without weight the norm is 0 / 0.
            if engine.optimizer.grad_norm.isnan() and engine.params.grad.any():
                bad.append("the gradients' norm")
            if not engine.params.weight.isfinite().all():
                bad.append("the weights")
            why = "the gradients are finite, so the update diverges or reads memory of its pool that it has not written"
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise _failed(step, "finite numbers", f"NaN or infinity in {bad[0]}{more}: {why}")

    def _bad_gradients(self) -> list[str]:
        return [name for name, tensor in self._engine.gradients().items() if not tensor.isfinite().all()]

    def _whence(self, batches: Sequence[Batch], inputs: InputPipeline) -> str:
        """Where the NaN is from: the step's batches once more, with poison in one place at a time."""
        engine = self._engine
        with engine.untouched(), compilation_allowed():
            for padding, pool_fill, told in (
                (False, CLEAN, "the same without --check's own NaN: the training diverges"),
                (True, CLEAN, "--check's NaN from the padding of the inputs, so a step reads it"),
                (False, POISON, "--check's NaN from the graphs' pool, so a step reads memory that it has not written"),
            ):
                engine.zero_()
                engine.executor.pool_fill = pool_fill
                for batch in batches:
                    inputs.load(batch)
                    if padding:
                        poison_padding(inputs.inputs(batch.bucket))
                    engine.micro_step(batch.bucket)
                if self._bad_gradients() or engine.metrics.bad_micro_batches():
                    return told
        return "it does not come again"

    def _compare(self, step: int, batch: Batch, inputs: InputPipeline) -> None:
        """The batch's replay with its eager twin, and with a replay over poisoned padding."""
        engine = self._engine
        with engine.untouched(), compilation_allowed():
            if engine.executor.how_of(f"train {batch.bucket.name}") == "replayed":
                try:
                    verify_batch(engine, batch, inputs.load)
                except Mismatch as error:
                    raise CheckFailed(f"step {step}: {error}{self._pool_told(batch, inputs)}") from error
            inputs.load(batch)
            change = engine.verify_inputs(batch.bucket, lambda: poison_padding(inputs.inputs(batch.bucket)))
            if change is None:
                return
            try:
                judged(engine, batch.bucket, change)
            except Mismatch as error:
                what = f"{change.name} off by {change.relative:.1e} of its largest value in {batch.bucket.name}"
                raise _failed(step, "the same numbers whatever padding holds", what) from error

    def _pool_told(self, batch: Batch, inputs: InputPipeline) -> str:
        """Whether the replay is the eager step as long as the pool is clean."""
        executor = self._engine.executor
        executor.pool_fill = CLEAN
        try:
            verify_batch(self._engine, batch, inputs.load)
        except Mismatch:
            return ""
        finally:
            executor.pool_fill = POISON
        return "; only with NaN in free memory of the graphs' pool, so the replay reads what it has not written"


def _failed(step: int, expected: str, found: str) -> CheckFailed:
    return CheckFailed(f"step {step}: expected {expected}, found {found}; {_WHAT_TO_DO}")
