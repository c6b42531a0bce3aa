"""A training run's parts and its housekeeping: what stands before, beside and after the loop of train.py."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from buffers.batching import Batch
from buffers.host_memory import HostMemory
from buffers.stages import stage
from engine.assemble import (
    drafter_config,
    engine_options,
    frozen_target,
    resolve_device,
    resolve_precision,
    weights_aside,
)
from engine.bad_steps import BadSteps
from engine.checking import StepChecks
from engine.checkpoint import Position, check_config, save_drafter
from engine.checkpoint_choice import Found, newest_whole
from engine.compile_cache import use_compile_cache
from engine.config_file import ConfigFile
from engine.data_feed import Progress, count_steps
from engine.data_source import open_training_data
from engine.engine import Engine
from engine.graphs_ready import make_ready
from engine.held_out import open_held_out
from engine.intake import Intake, RunData, plan_intake
from engine.interrupts import Interrupts
from engine.laps import Laps
from engine.left_out import named_samples
from engine.memory_budget import budget_for
from engine.optimizer import Schedule
from engine.profiling import StepProfile
from engine.progress import Display
from engine.reconfigure import follow, reconfigure
from engine.reports import MetricsLog, make_console
from engine.run_files import restore_run_folder, write_description, write_what_is_left_out
from engine.run_folder import alone_in, prepare_output
from engine.run_log import RunLog
from engine.run_saving import RunSaving, go_on_from
from engine.run_tally import RunTally
from engine.run_words import say_end, say_plan
from engine.settings import Settings
from engine.sinks import Sinks, require_sinks
from engine.snapshot import Snapshot
from engine.turns import short_turns
from engine.watch import Watch
from engine.watchdog import Watchdog
from graphs.compile_ban import no_compilation
from graphs.guards import Counters
from graphs.steps import BuildReport


class TrainingRun:
    """Owns all parts of one run. Use as a context manager: graphs, threads and files are closed whatever happens."""

    def __init__(
        self,
        settings: Settings,
        *,
        resume: bool,
        config: ConfigFile | None = None,
        quiet: bool = False,
        profile: Path | None = None,
    ) -> None:
        """config: the file that the settings come from, whose changes the run takes over between two steps. quiet: nothing is
        said on the terminal. profile: a file for the trace of some steps."""
        self.settings, self.folder = settings, Path(settings.run.output)
        self.console = make_console(stderr=True, quiet=quiet)
        self.display = Display(self.console, live=not quiet and self.console.is_terminal and sys.stderr.isatty())
        self._began_s = time.perf_counter()
        self.laps = Laps()
        self._profile = StepProfile(profile, self.say) if profile is not None else None
        with ExitStack() as parts:
            self._assemble(parts)
            prepare_output(self.folder, resume=resume)
            parts.enter_context(alone_in(self.folder))
            saved = newest_whole(self.folder / "checkpoints")
            if saved is not None:
                check_config(saved.folder, self.engine.config)
            say_plan(self)
            self.make_ready(self.intake, self.laps)
            self.saving.say_size()  # its pages were locked meanwhile
            self.laps.end("snapshot")
            self.begin_at(go_on_from(self, saved))
            self.tally = RunTally()
            self._open_logs(parts, saved)
            self.watch = Watch()
            self.bad_steps = BadSteps(
                self.engine, self.data.training, self.folder, lambda: self.settings.run.max_bad_steps
            )
            self.checks = StepChecks(self.engine, lambda: self.settings.run.check_every)
            parts.callback(self.checks.close)
            if self._profile is not None:
                parts.callback(self._profile.close)
            self._parts = parts.pop_all()
        self.config = config
        self.thread: threading.Thread | None = None  # that takes the steps
        self.interrupts = Interrupts(self.say, rereads=config is not None)
        self.counters = Counters.read(self.engine.device)
        self.laps.end("rest")
        self.say(f"ready after {self.laps}; kernels compiled anew: {self.graphs.kernels_compiled}")

    def steps(self) -> Iterator[tuple[Batch, ...]]:
        """The batches of each step that is left; the loader runs ahead over the same ones. Where the settings change between two
        steps, what is left changes."""
        self.thread = threading.current_thread()
        while self.progress.step < self.total_steps:
            start = self.start
            for batches in self.intake.start(start, self.total_steps, self.settings.run.accumulation):
                with self._recorded():
                    yield batches
                self.saving.writer.raise_failure()
                self.display.step(self.progress.step, self.total_steps)
                if self.start is not start:
                    break

    def arrivals(self, batches: tuple[Batch, ...]) -> Iterator[Batch]:
        """The step's batches, each as it stands in the static inputs: its bytes came over while the step before ran, and one
        device copy puts them in place."""
        self.checks.begin()
        for expected in batches:
            batch = self.intake.inputs.next()
            assert batch == expected, f"the loader delivered {batch}, the loop is at {expected}"
            self.tally.add(batch)
            self.checks.arrived(batch, self.intake.inputs)
            yield batch

    def took(self, batches: tuple[Batch, ...]) -> None:
        """The step over these batches was queued. Raises CheckFailed where run.check_every looks, and TooManyBadSteps."""
        self.progress.took(batches)
        if self.checks.active:
            self.checks.close()
            with self.watch.aside("checks", after=self.engine.device):
                self.checks.end(self.progress.step, batches, self.intake.inputs)
        self.bad_steps.took(self.progress.step, batches)

    def due(self, every: int) -> bool:
        """Whether something done every so many steps is due now; 0 is never, the end does everything anyway."""
        return bool(every) and self.progress.step % every == 0 and self.progress.step < self.total_steps

    @stage("log")
    def log(self) -> None:
        """Asks for the metrics as they stand in the queue and writes those asked for before, which have arrived."""
        step = self.progress.step
        self.run_log.ask(step=step, epoch=self.progress.epoch, lr=self.schedule(step - 1))

    @stage("evaluate")
    def evaluate(self) -> None:
        """Held-out loss and acceptance, into metrics.jsonl; the best drafter so far goes to best/."""
        held_out = self.intake.held_out
        if held_out is None:
            return
        self.run_log.write()  # the lines stand in the order of their steps
        with self.watch.aside("evaluation", after=self.engine.device):
            self._evaluation = record = held_out.evaluate(self.engine, self.progress.step)
        self.metrics_file.write(record)
        self.say(
            f"step {record['step']}: held-out loss {record['eval_loss']:.4f}, accuracy {record['eval_accuracy']:.3f}, "
            f"accepted length {record['eval_accept_len']:.3f}"
        )

    @stage("checkpoint")
    def save(self) -> None:
        """Begins a checkpoint of everything, unless there is one of this step; it is written while the training goes on."""
        self.saving.save()

    @stage("checkpoint")
    def save_now(self) -> None:
        """The same, and waits until it is on disk."""
        self.saving.save_now()

    def follow_config(self) -> None:
        """Takes over what the settings file says by now, if it was changed, and otherwise says why not."""
        if self.config is not None:
            follow(self, self.config)

    def reconfigure(self, settings: Settings) -> None:
        """Between two steps, in the thread that takes them: goes on under these settings, from the same weights, moments and
        place in the data. Raises SettingsError for a change that no run can take over, and ValueError, CaptureError or what a
        full memory raises where the new generation of graphs cannot be made; the run then goes on as it was."""
        reconfigure(self, settings)

    def stop_if_interrupted(self) -> None:
        """After a first Ctrl-C or SIGTERM: a checkpoint, then KeyboardInterrupt. A second one ends at once."""
        if self.interrupts.seen:
            self.save_now()
            self.say(f"checkpoint of step {self.progress.step} saved: the same command goes on from it")
            raise KeyboardInterrupt

    def finish(self) -> dict[str, Any]:
        """Evaluates, saves, writes the drafter, prints the table of buckets; returns the figures of the run."""
        engine, step = self.engine, self.progress.step
        assert engine.optimizer is not None
        if self.run_log.step < step:
            self.log()
        self.run_log.write()
        if step and not int(engine.optimizer.step):
            raise ValueError(
                f"{self.folder}: expected a step that learned, found all {step} skipped (no finite gradient, or no supervised "
                "token in a batch); lower optimizer.lr, check data.target and the dataset, and train into another run.output"
            )
        counters = Counters.read(engine.device) - self.counters - self.checks.aside
        if self._evaluation.get("step") != step:
            self.evaluate()
        self.save_now()
        save_drafter(self.folder / "drafter", engine.config, engine.params.state())
        rows = self.tally.rows(engine)
        self.display.stop()
        skipped = named_samples(self.data.training, self.tally.skipped(self.intake))
        write_what_is_left_out(self, skipped)
        say_end(self, rows, skipped)
        return {
            "steps": step,
            "epoch": self.progress.epoch,
            "final": self.run_log.means,
            **{key: value for key, value in self._evaluation.items() if key != "step"},
            "buckets": rows,
            "skipped_steps": int(engine.optimizer.skipped),
            "skipped_samples": skipped,
            "too_long_samples": len(self.intake.plan.too_long),
            "input_wait_ms": self.tally.wait_ms(self.intake),
            "seconds": time.perf_counter() - self._began_s,
            "start_s": self.laps.seconds,
            "device_allocations": counters.device_allocations,
            "compilations": counters.compilations,
            "how": engine.executor.how,
            "attention": engine.ops.name,
            "recompute": engine.drafter.recompute,
            "reserved_mib": self.graphs.reserved_mib,
            "generation": engine.generation,
            "drafter": str(self.folder / "drafter"),
            **({"checks": self.checks.figures()} if self.checks.steps else {}),
            **({"sources": self.intake.plan.sources} if self.intake.plan.sources else {}),
        }

    def __enter__(self) -> Self:
        self._parts.enter_context(self.interrupts)
        self._parts.enter_context(short_turns(self.settings.run.switch_interval_ms))
        self._parts.enter_context(no_compilation())
        self._parts.enter_context(self._watchdog())
        self.display.start()
        self._parts.callback(self.display.stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.saving.end(error)
        finally:
            with suppress(OSError):  # the disk may be what came to grief
                self.run_log.ended(self.progress.step, error)
            # The loaders first: they copy to a device whose graphs are about to go.
            self.intake.stop()
            self._parts.close()

    def _recorded(self) -> AbstractContextManager[None]:
        if self._profile is None:
            return nullcontext()
        return self._profile.step(self.progress.step + 1, self.total_steps - self.progress.step)

    def _watchdog(self) -> Watchdog:
        return Watchdog(
            lambda: self.settings.run.watchdog_s,
            self.say,
            where=lambda: f"after step {self.progress.step}",
            device=lambda: self.engine.executor.times.unfinished(),
        )

    def _assemble(self, parts: ExitStack) -> None:
        """Data, plan, inputs and engine, from the cheapest check to the dearest."""
        settings = self.settings
        require_sinks(settings.run.sinks)
        device = resolve_device(settings.run.device)
        precision = resolve_precision(settings.run.precision, device)
        use_compile_cache(settings, device, self.say)
        data = open_training_data(settings.data.folders, settings)
        config = drafter_config(settings, data.info)
        memory = HostMemory(Snapshot.nbytes(config), device)
        parts.callback(memory.close)
        self.data = RunData(data, open_held_out(settings, data), config, device, precision)
        target = frozen_target(settings, data)
        self.laps.end("data")
        plan = plan_intake(self.data, settings, budget_for(settings, device))
        self.laps.end("plan")
        weights = weights_aside(settings, config)
        self.intake = Intake(self.data, plan)
        parts.callback(lambda: self.intake.close())
        options = engine_options(settings, device, precision) | self.intake.for_engine()
        self.engine = Engine(config, target, optimizer=settings.optimizer, **options)
        parts.callback(self.engine.close)
        self.saving = RunSaving(self, memory)
        self.laps.end("memory")
        self.engine.params.load_(weights.result())
        self.laps.end("weights")

    def begin_at(self, start: Position) -> None:
        """The steps that are left are those from `start` on, under today's plan and settings."""
        run = self.settings.run
        self.start = start
        self.progress: Progress = Progress(self.start)
        epochs_left = run.epochs - self.start.epoch
        if epochs_left > 100 and not (run.max_steps or self.intake.plan.batches.epochs_alike):
            self.say(
                f"counting the steps of {epochs_left:,} epochs, each of its own samples or rows; run.max_steps bounds them"
            )
        self.total_steps = count_steps(
            self.intake.plan.batches,
            start=self.start,
            epochs=run.epochs,
            accumulation=run.accumulation,
            max_steps=run.max_steps,
        )
        self.schedule_steps()

    def schedule_steps(self) -> None:
        """The learning rates of all steps, under today's settings."""
        o = self.settings.optimizer
        warmup_steps = int(o.warmup_ratio * self.total_steps)
        self.schedule = Schedule(o.schedule, o.lr, self.total_steps, warmup_steps, o.min_lr_ratio)

    def _open_logs(self, parts: ExitStack, saved: Found | None) -> None:
        write_description(self)
        start_step = self.start.step if saved else 0
        sinks = Sinks(self.folder, self.settings, start_step, self.say, quiet=self.console.quiet)
        parts.callback(sinks.close)
        self.metrics_file = MetricsLog(
            self.folder / "metrics.jsonl", resume_step=start_step, also=sinks.write, restored=self._restore_folder
        )
        parts.callback(self.metrics_file.close)
        self.run_log: RunLog = RunLog(
            self.engine,
            self.metrics_file,
            watch=lambda: self.watch.read(self.engine, self.tally.counts, self.tally.wait_ms(self.intake)),
            tell=lambda record: self.display.figures(record, self.total_steps),
            logged=self.start.logged,
        )
        why = "a new run" if saved is None else f"going on from {saved.folder.name}"
        self.run_log.started(self.start.step, self.total_steps, self.laps.seconds, why)
        self._evaluation = self.metrics_file.last("eval_loss")
        write_what_is_left_out(self, [])

    def _restore_folder(self) -> None:
        restore_run_folder(self, self._parts)

    def make_ready(self, intake: Intake, laps: Laps, reports: Sequence[BuildReport] | None = None) -> None:
        """Graphs compiled and captured, unless `reports` say that they are, and compared with the eager steps on the first real
        batch of each bucket."""
        plan, epochs = intake.plan, range(intake.plan.settings.run.epochs)
        self.graphs = make_ready(
            self.engine,
            chain.from_iterable(map(plan.batches.epoch, epochs)),
            intake.inputs.load,
            settings=plan.settings,
            fingerprints=plan.fingerprints,
            laps=laps,
            say=self.say,
            estimates_mib=plan.memory.grown_mib(),
            reports=reports,
            held_out=intake.held_out.feed if intake.held_out is not None else None,
        )

    def say(self, text: str) -> None:
        """A line for people."""
        self.display.say(text)
