"""train --check: the promises of the steady state, looked at in every step of a run; the first one that is broken stops it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

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

_WHAT_TO_DO = "the run was stopped, without a checkpoint of this step; report this, or train without --check"


class CheckFailed(RuntimeError):
    """A promise that a step broke: which step, which promise, where."""


class StepChecks:
    """Between begin() and end() a step waits for nothing, allocates nothing and compiles nothing; end() looks too whether every
    buffer is where it was, and whether NaN has come from the padding into gradients or metrics. Every every() steps the step's
    last batch is replayed and compared with the eager step, and with itself under other padding. 0: nothing of all that."""

    def __init__(self, engine: Engine, every: Callable[[], int]) -> None:
        self._engine, self._every = engine, every
        self.aside = Counters(0, 0)  # what looking itself took
        self._generation, self._places = 0, Fingerprint.of({})
        self._active = False
        self._watching = ExitStack()
        self._used, self._syncs = Counters(0, 0), list[str]()
        self._metrics_finite = True
        self.steps = self.compared = 0  # looked at so far, and of those compared

    def begin(self) -> None:
        """A step begins."""
        self._active = self._every() > 0
        self._used, self._syncs = Counters(0, 0), []
        if self._active:
            # NaN from before somebody looked is not this step's.
            with self._aside():
                self._metrics_finite = self._finite_metrics()

    def arrived(self, batch: Batch, inputs: InputPipeline) -> None:
        """A batch stands in the static inputs: its padding is poisoned."""
        if self._active:
            with self._aside():
                poison_padding(inputs.inputs(batch.bucket))

    def end(self, step: int, batches: Sequence[Batch], inputs: InputPipeline) -> None:
        """The step of this number was queued over these batches. Waits for the device. Raises CheckFailed."""
        if not self._active:
            return
        self.close()
        self._active = False
        before = Counters.read(self._engine.device)
        with stage("check", f"step {step}"):
            self._refuse_waits(step, batches)
            self._refuse_moved(step, inputs)
            self._refuse_nan(step)
            if step % self._every() == 0:
                self._compare(step, batches[-1], inputs)
                self.compared += 1
        self.steps += 1
        self.aside += Counters.read(self._engine.device) - before

    def close(self) -> None:
        """Stops looking, also in the middle of a step."""
        self._watching.close()

    def figures(self) -> dict[str, int]:
        """Steps looked at, and how many of them were compared with the eager step."""
        return {"steps": self.steps, "compared": self.compared}

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

    def _refuse_nan(self, step: int) -> None:
        engine = self._engine
        bad = [name for name, gradient in engine.gradients().items() if not torch.isfinite(gradient).all()]
        if self._metrics_finite and not self._finite_metrics():
            bad.append("metrics")
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            why = "--check poisons the padding, so a step read it, or the training diverges and does so without --check too"
            raise _failed(step, "finite numbers", f"NaN or infinity in {bad[0]}{more}: {why}")

    def _finite_metrics(self) -> bool:
        return bool(torch.isfinite(self._engine.metrics.sums).all())

    def _compare(self, step: int, batch: Batch, inputs: InputPipeline) -> None:
        """The batch's replay with its eager twin, and with a replay over poisoned padding."""
        engine = self._engine
        with engine.untouched(), compilation_allowed():
            if engine.executor.how_of(f"train {batch.bucket.name}") == "replayed":
                try:
                    verify_batch(engine, batch, inputs.load)
                except Mismatch as error:
                    raise CheckFailed(f"step {step}: {error}") from error
            inputs.load(batch)
            change = engine.verify_inputs(batch.bucket, lambda: poison_padding(inputs.inputs(batch.bucket)))
            if change is None:
                return
            try:
                judged(engine, batch.bucket, change)
            except Mismatch as error:
                what = f"{change.name} off by {change.relative:.1e} of its largest value in {batch.bucket.name}"
                raise _failed(step, "the same numbers whatever padding holds", what) from error


def _failed(step: int, expected: str, found: str) -> CheckFailed:
    return CheckFailed(f"step {step}: expected {expected}, found {found}; {_WHAT_TO_DO}")
