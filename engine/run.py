"""A training run's parts and its housekeeping: what stands before, beside and after the loop of train.py."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from buffers.batching import Batch
from buffers.mixture import Mixture
from buffers.shapes import Bucket
from buffers.staging import InputPipeline
from engine.assemble import (
    drafter_config,
    engine_options,
    frozen_target,
    initial_weights,
    make_batch_plan,
    make_plan,
    pipeline_options,
    resolve_device,
    resolve_precision,
)
from engine.checkpoint import check_config, load_checkpoint, save_checkpoint, save_drafter
from engine.compile_cache import use_compile_cache
from engine.data_feed import Progress, beginning, carried_over, count_steps, training_steps
from engine.data_source import open_training_data
from engine.engine import Engine
from engine.engine_buffers import engine_buffers
from engine.fingerprints import bucket_fingerprints
from engine.graphs_ready import lasting_addresses, make_ready, refuse_moved
from engine.held_out import HeldOut, open_held_out
from engine.interrupts import Interrupts
from engine.laps import Laps
from engine.left_out import named_lengths, named_samples, spoken_lengths, spoken_samples, write_left_out
from engine.memory_budget import budget_for
from engine.memory_report import check_plan
from engine.mixture_report import print_sources, source_rows
from engine.optimizer import Schedule
from engine.reports import BucketCount, MetricsLog, bucket_rows, make_console, print_bucket_table, write_buffers
from engine.run_folder import alone_in, prepare_output
from engine.run_log import RunLog
from engine.settings import Settings
from engine.turns import short_turns
from graphs.guards import Counters
from graphs.record import write_record


class TrainingRun:
    """Owns all parts of one run. Use as a context manager: graphs, threads and files are closed whatever happens."""

    def __init__(self, settings: Settings, *, resume: bool) -> None:
        self.settings, self.folder = settings, Path(settings.run.output)
        self.console = make_console(stderr=True)
        self._began_s = time.perf_counter()
        self._saved_step = -1
        self.laps = Laps()
        with ExitStack() as parts:
            self._assemble(parts)
            saved = prepare_output(self.folder, resume=resume)
            parts.enter_context(alone_in(self.folder))
            if saved is not None:
                check_config(saved, self.engine.config)
            self._say_plan()
            self._build_graphs()
            self._find_start(saved)
            self._open_logs(parts, resumed=saved is not None)
            self._parts = parts.pop_all()
        self.counts: dict[Bucket, BucketCount] = defaultdict(BucketCount)
        self._interrupts = Interrupts(self._say)
        self._counters = Counters.read(self.engine.device)
        self.laps.end("rest")
        self._say(f"ready after {self.laps}; kernels compiled anew: {self.graphs.kernels_compiled}")

    def steps(self) -> Iterator[tuple[Batch, ...]]:
        """The batches of each step that is left; the loader runs ahead over the same ones."""
        arguments: dict[str, Any] = {
            "start": self.start,
            "total_steps": self.total_steps,
            "accumulation": self.settings.run.accumulation,
        }
        self.inputs.start(batch for step in training_steps(self.batch_plan, **arguments) for batch in step)
        return training_steps(self.batch_plan, **arguments)

    def arrivals(self, batches: tuple[Batch, ...]) -> Iterator[Batch]:
        """The step's batches, each as it stands in the static inputs: its bytes came over while the step before ran, and one
        device copy puts them in place."""
        for expected in batches:
            batch = self.inputs.next()
            assert batch == expected, f"the loader delivered {batch}, the loop is at {expected}"
            self.counts[batch.bucket].add(batch)
            yield batch

    def due(self, every: int) -> bool:
        """Whether something done every so many steps is due now; 0 is never, the end does everything anyway."""
        return bool(every) and self.progress.step % every == 0 and self.progress.step < self.total_steps

    def log(self) -> None:
        """Asks for the metrics as they stand in the queue and writes those asked for before, which have arrived."""
        step = self.progress.step
        self.run_log.ask(step=step, epoch=self.progress.epoch, lr=self.schedule(step - 1))

    def evaluate(self) -> None:
        """Held-out loss and acceptance, into metrics.jsonl; the best drafter so far goes to best/."""
        if self.held_out is None:
            return
        self.run_log.write()  # the lines stand in the order of their steps
        self._evaluation = record = self.held_out.evaluate(self.engine, self.progress.step)
        self.metrics_file.write(record)
        self._say(
            f"step {record['step']}: held-out loss {record['eval_loss']:.4f}, accuracy {record['eval_accuracy']:.3f}, "
            f"accepted length {record['eval_accept_len']:.3f}"
        )

    def save(self) -> None:
        """A checkpoint of everything, unless there is one of this step."""
        if self.progress.step == self._saved_step:
            return
        self.run_log.write()  # a line that waits for its numbers would be lost with the process
        position = self.progress.position(self.run_log.sums)
        save_checkpoint(self.folder / "checkpoints", self.engine, position, keep=self.settings.run.keep)
        self._saved_step = self.progress.step

    def stop_if_interrupted(self) -> None:
        """After a first Ctrl-C or SIGTERM: a checkpoint, then KeyboardInterrupt. A second one ends at once."""
        if self._interrupts.seen:
            self.save()
            self._say(f"checkpoint of step {self.progress.step} saved: the same command goes on from it")
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
        counters = Counters.read(engine.device) - self._counters
        if self._evaluation.get("step") != step:
            self.evaluate()
        self.save()
        save_drafter(self.folder / "drafter", engine.config, engine.params.state())
        rows = bucket_rows(engine.buckets, self.counts, engine.executor.times.read(wait=True), engine.executor.how)
        print_bucket_table(rows, self.console)
        best = f"; best so far by accepted length: {self.folder / 'best'}" if self.held_out is not None else ""
        self._say(f"drafter of the last step: {self.folder / 'drafter'}{best}")
        skipped = named_samples(self.data, sorted(set(self.inputs.skipped)))
        self._write_left_out(skipped)
        if skipped:
            self._say(f"{len(skipped)} samples with NaN or infinity were left out: {spoken_samples(skipped)}")
        return {
            "steps": step,
            "epoch": self.progress.epoch,
            "final": self.run_log.means,
            **{key: value for key, value in self._evaluation.items() if key != "step"},
            "buckets": rows,
            "skipped_steps": int(engine.optimizer.skipped),
            "skipped_samples": skipped,
            "too_long_samples": len(self._too_long),
            "input_wait_ms": self.inputs.wait_ms,
            "seconds": time.perf_counter() - self._began_s,
            "start_s": self.laps.seconds,
            "device_allocations": counters.device_allocations,
            "compilations": counters.compilations,
            "how": engine.executor.how,
            "drafter": str(self.folder / "drafter"),
            **({"sources": self._sources} if self._sources else {}),
        }

    def __enter__(self) -> Self:
        self._parts.enter_context(self._interrupts)
        self._parts.enter_context(short_turns(self.settings.run.switch_interval_ms))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        step = self.progress.step
        if isinstance(error, ValueError | OSError) and max(self._saved_step, self.start.step) < step < self.total_steps:
            # In the middle of the run what came to grief is data or a disk; the steps before it are whole.
            with suppress(OSError, ValueError):
                self.save()
                self._say(f"checkpoint of step {self.progress.step} saved before the error below")
        # The loaders first: they copy to a device whose graphs are about to go.
        self.inputs.stop()
        if self.held_out is not None:
            self.held_out.inputs.stop()
        self._parts.close()

    def _assemble(self, parts: ExitStack) -> None:
        """Data, plan, inputs and engine, from the cheapest check to the dearest."""
        settings = self.settings
        device = resolve_device(settings.run.device)
        precision = resolve_precision(settings.run.precision, device)
        use_compile_cache(settings, device, self._say)
        data = self.data = open_training_data(settings.data.folders, settings)
        config = drafter_config(settings, data.info)
        pipeline = pipeline_options(settings, data, device, precision)
        held_out = open_held_out(settings, data)
        target = frozen_target(settings, data)
        self.laps.end("data")
        buckets = make_plan(settings, data, config, device).buckets
        self.batch_plan = make_batch_plan(settings, data, buckets)
        self._too_long = named_lengths(data, self.batch_plan.too_long)
        self._sources = source_rows(data, self.batch_plan) if isinstance(data, Mixture) else []
        self.memory = check_plan(settings, data, config, buckets, device, budget_for(settings, device))
        self.fingerprints = bucket_fingerprints(settings, config, data.info, buckets, device, precision)
        self.laps.end("plan")
        weights = initial_weights(settings, config)
        self.laps.end("weights")
        self.inputs = parts.enter_context(InputPipeline(data, buckets, **pipeline))
        self.held_out = None
        if held_out is not None:
            self.held_out = HeldOut(held_out, buckets, settings, folder=self.folder, pipeline=pipeline)
            parts.enter_context(self.held_out.inputs)
        self.engine = Engine(
            config,
            target,
            buckets,
            self.inputs.inputs,
            optimizer=settings.optimizer,
            eval_inputs=self.held_out.inputs.inputs if self.held_out is not None else None,
            **engine_options(settings, device, precision),
        )
        parts.callback(self.engine.close)
        self.engine.params.load_(weights)
        self.laps.end("memory")

    def _find_start(self, saved: Path | None) -> None:
        """The step and place in the data to start from, the checkpoint's content with it, and how many steps there will be."""
        run, o = self.settings.run, self.settings.optimizer
        self.start = beginning(self.data, self.batch_plan)
        if saved is not None:
            captured = lasting_addresses(self.engine)
            position = load_checkpoint(saved, self.engine)
            refuse_moved(self.engine, captured)
            self.start = carried_over(position, self.data, self.batch_plan, self.settings.data.too_long)
            self._saved_step = self.start.step
            if self.held_out is not None:
                self.held_out.go_on()
            self._say(f"going on from {saved}")
        self.progress: Progress = Progress(self.start)
        epochs_left = run.epochs - self.start.epoch
        if epochs_left > 100 and not (run.max_steps or self.batch_plan.epochs_alike):
            self._say(
                f"counting the steps of {epochs_left:,} epochs, each of its own samples or rows; run.max_steps bounds them"
            )
        self.total_steps = count_steps(
            self.batch_plan,
            start=self.start,
            epochs=run.epochs,
            accumulation=run.accumulation,
            max_steps=run.max_steps,
        )
        warmup_steps = int(o.warmup_ratio * self.total_steps)
        self.schedule = Schedule(o.schedule, o.lr, self.total_steps, warmup_steps, o.min_lr_ratio)

    def _open_logs(self, parts: ExitStack, *, resumed: bool) -> None:
        (self.folder / "settings.toml").write_text(self.settings.to_toml())
        write_record(self.folder, self.graphs)
        held_out = self.held_out.inputs.named_buffers() if self.held_out is not None else []
        held_out = [(f"held-out {name}", tensors) for name, tensors in held_out]
        write_buffers(self.folder / "buffers.txt", self.inputs.named_buffers() + held_out + engine_buffers(self.engine))
        self.metrics_file = MetricsLog(self.folder / "metrics.jsonl", resume_step=self.start.step if resumed else 0)
        parts.callback(self.metrics_file.close)
        self.run_log: RunLog = RunLog(
            self.engine, self.metrics_file, self._say, logged=self.start.logged, total_steps=self.total_steps
        )
        self._evaluation = self.metrics_file.last("eval_loss")
        self._write_left_out([])

    def _write_left_out(self, not_finite: Sequence[Any]) -> None:
        write_left_out(
            self.folder / "left_out.json",
            too_long=self.settings.data.too_long,
            training=self._too_long,
            held_out=self.held_out.too_long if self.held_out is not None else [],
            not_finite=not_finite,
            bad_files=self.data.bad_files,
        )

    def _build_graphs(self) -> None:
        """Compiled, captured, and compared with the eager steps on the first real batch of each bucket."""
        epochs = range(self.settings.run.epochs)
        self.graphs = make_ready(
            self.engine,
            chain.from_iterable(map(self.batch_plan.epoch, epochs)),
            self.inputs.load,
            settings=self.settings,
            fingerprints=self.fingerprints,
            laps=self.laps,
            say=self._say,
            estimates_mib=self.memory.grown_mib(),
        )

    def _say_plan(self) -> None:
        engine, too_long = self.engine, self.settings.data.too_long
        names = ", ".join(bucket.name for bucket in engine.buckets)
        how = "replaying CUDA graphs" if engine.executor.how == "replayed" else "calling the steps (no GPU)"
        if self._sources:
            print_sources(self._sources, self.console)
        self._say(f"{engine.device}, {engine.precision}, {how}; buckets (rows x tokens x blocks): {names}")
        what = {"skip": "left out", "truncate": "cut off", "split": "split"}[too_long]
        for kind, found in (
            ("samples", self._too_long),
            ("held-out samples", self.held_out.too_long if self.held_out is not None else []),
        ):
            if found:
                self._say(f"{len(found)} {kind} longer than the largest bucket are {what}: {spoken_lengths(found)}")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)
