"""A training run's parts and its housekeeping: what stands before, beside and after the loop of train.py."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from rich.console import Console

from buffers.batching import Batch, BatchPlan
from buffers.dataset import Dataset
from buffers.shapes import Bucket
from buffers.staging import InputPipeline
from engine.assemble import (
    drafter_config,
    frozen_target,
    initial_weights,
    make_plan,
    needs_last_hidden,
    resolve_device,
    resolve_precision,
)
from engine.checkpoint import Position, checkpoints, load_checkpoint, save_checkpoint, save_drafter
from engine.data_feed import Progress, count_steps, training_steps
from engine.engine import Engine
from engine.optimizer import Schedule
from engine.reports import BucketCount, MetricsLog, bucket_rows, print_bucket_table
from engine.settings import Settings
from engine.settings_fields import SettingsError
from graphs.executor import CaptureError
from graphs.guards import Counters


class TrainingRun:
    """Owns all parts of one run. Use as a context manager: graphs, threads and files are closed whatever happens."""

    def __init__(self, settings: Settings, *, resume: bool) -> None:
        self.settings = settings
        self.console = Console(stderr=True, highlight=False)
        self.folder = Path(settings.run.output)
        saved = checkpoints(self.folder / "checkpoints")
        if saved and not resume:
            raise SettingsError(
                f"run.output: {self.folder} holds a run with checkpoints; leave out --no-resume to go on with it, or choose "
                "another folder"
            )
        device = resolve_device(settings.run.device)
        precision = resolve_precision(settings.run.precision, device)
        data = Dataset(settings.data.path)
        eval_data = Dataset(settings.data.eval_path) if settings.data.eval_path else None
        with_last_hidden = all(needs_last_hidden(settings, d) for d in (data, eval_data) if d is not None)
        config = drafter_config(settings, data.info)
        self.plan = make_plan(settings, data, config, device)
        buckets = self.plan.buckets
        self.batch_plan = BatchPlan(data.lengths, buckets, too_long=settings.data.too_long, seed=settings.run.seed)
        shared: dict[str, Any] = {
            "seed": settings.run.seed,
            "device": device,
            "on_nonfinite": settings.data.on_nonfinite,
            "dtype": torch.bfloat16 if precision == "bf16" else torch.float32,
            "with_last_hidden": with_last_hidden,
        }
        self.inputs = InputPipeline(data, buckets, **shared)
        self.eval_inputs = InputPipeline(eval_data, buckets, **shared) if eval_data is not None else None
        if eval_data is not None:
            self.eval_plan = BatchPlan(
                eval_data.lengths, buckets, too_long=settings.data.too_long, seed=settings.run.seed
            )
        self.engine = Engine(
            config,
            frozen_target(settings, data),
            buckets,
            self.inputs.inputs,
            device=device,
            objective=settings.objective,
            optimizer=settings.optimizer,
            precision=precision,
            attention=settings.model.attention,
            chunk_rows=settings.model.head_chunk or 2048,
            eval_inputs=self.eval_inputs.inputs if self.eval_inputs is not None else None,
        )
        self.engine.params.load_(initial_weights(settings, config))
        self._say_plan(device, precision)
        self.reports = self.engine.build()
        self._verify()
        start = Position(0, 0, ())
        if saved:
            start = load_checkpoint(saved[-1], self.engine)
            self._say(f"going on from {saved[-1].name}")
        self.total_steps = count_steps(
            self.batch_plan,
            start=start,
            epochs=settings.run.epochs,
            accumulation=settings.run.accumulation,
            max_steps=settings.run.max_steps,
        )
        o = settings.optimizer
        self.schedule = Schedule(
            o.schedule, o.lr, self.total_steps, int(o.warmup_ratio * self.total_steps), o.min_lr_ratio
        )
        self.start, self.progress = start, Progress(start)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "settings.toml").write_text(settings.to_toml())
        self.log_file = MetricsLog(self.folder / "metrics.jsonl", resume_step=start.step)
        self.counts: dict[Bucket, BucketCount] = defaultdict(BucketCount)
        self._last = self.engine.metrics.snapshot().read()
        self._pending: dict[str, Any] | None = None
        self._means: dict[str, Any] = {}
        self._eval: dict[str, Any] = {}
        self._best = self._best_so_far()
        self._logged_s = self._began_s = time.perf_counter()
        self._interrupted = False
        self._handlers: dict[int, Any] = {}
        self._counters = Counters.read(device)

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
        self._write_pending()
        optimizer = self.engine.optimizer
        assert optimizer is not None
        snapshot = self.engine.metrics.snapshot(optimizer.grad_norm, optimizer.skipped)
        head = {"step": self.progress.step, "epoch": self.progress.epoch, "lr": self.schedule(self.progress.step - 1)}
        self._pending = {"head": head, "snapshot": snapshot, "at_s": time.perf_counter()}

    def evaluate(self) -> dict[str, Any]:
        """Held-out loss and acceptance with fixed anchors; the best drafter so far, by accepted length, goes to best/."""
        if self.eval_inputs is None:
            return {}
        self.engine.eval_metrics.zero_()
        batches = self.eval_plan.epoch(0)
        self.eval_inputs.start(batches[: self.settings.run.eval_batches or None])
        while (batch := self.eval_inputs.next()) is not None:
            self.engine.eval_step(batch.bucket)
        means = self.engine.eval_metrics.snapshot().read().means()
        self._eval = {f"eval_{key}": means[key] for key in ("loss", "accuracy", "accept_len", "accuracy_per_slot")}
        self.log_file.write({"step": self.progress.step, **self._eval})
        self._say(
            f"step {self.progress.step}: held-out loss {means['loss']:.4f}, accuracy {means['accuracy']:.3f}, "
            f"accepted length {means['accept_len']:.3f}"
        )
        if self._best is None or means["accept_len"] > self._best:
            self._best = means["accept_len"]
            record = {"step": self.progress.step, **self._eval}
            save_drafter(self.folder / "best", self.engine.config, self.engine.params.state(), record)
        return self._eval

    def save(self) -> None:
        """A checkpoint of everything."""
        save_checkpoint(self.folder / "checkpoints", self.engine, self.progress.position(), keep=self.settings.run.keep)

    def finish(self) -> dict[str, Any]:
        """Evaluates, saves, writes the drafter, prints the table of buckets; returns the figures of the run."""
        self.log()
        self._write_pending()
        counters = Counters.read(self.engine.device) - self._counters
        self.evaluate()
        self.save()
        save_drafter(self.folder / "drafter", self.engine.config, self.engine.params.state())
        rows = bucket_rows(
            self.engine.buckets, self.counts, self.engine.executor.times.read(wait=True), self.engine.executor.how
        )
        print_bucket_table(rows, self.console)
        optimizer = self.engine.optimizer
        assert optimizer is not None
        return {
            "steps": self.progress.step,
            "epoch": self.progress.epoch,
            "final": self._means,
            **self._eval,
            "buckets": rows,
            "skipped_steps": int(optimizer.skipped),
            "skipped_samples": sorted(set(self.inputs.skipped)),
            "too_long_samples": len(self.batch_plan.too_long),
            "input_wait_ms": self.inputs.wait_ms,
            "seconds": time.perf_counter() - self._began_s,
            "device_allocations": counters.device_allocations,
            "compilations": counters.compilations,
            "how": self.engine.executor.how,
            "drafter": str(self.folder / "drafter"),
        }

    def stop_if_interrupted(self) -> None:
        """After a first Ctrl-C or SIGTERM: a checkpoint, then KeyboardInterrupt. A second one ends at once."""
        if self._interrupted:
            self._write_pending()
            self.save()
            self._say(f"interrupted: checkpoint of step {self.progress.step} saved, the same command goes on from it")
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        # Only the main thread may set handlers; elsewhere whoever runs us handles interrupts.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.inputs.close()
        if self.eval_inputs is not None:
            self.eval_inputs.close()
        self.engine.close()
        self.log_file.close()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            signal.signal(number, self._handlers[number])
            raise KeyboardInterrupt
        self._interrupted = True

    def _write_pending(self) -> None:
        if self._pending is None:
            return
        head, snapshot, at_s = (self._pending[key] for key in ("head", "snapshot", "at_s"))
        self._pending = None
        sums = snapshot.read()
        grad_norm, skipped = snapshot.beside()
        means = self._means = (sums - self._last).means()
        self._last = sums
        tokens_per_s = means["useful_tokens"] / max(1e-9, at_s - self._logged_s)
        self._logged_s = at_s
        self.log_file.write(
            head | means | {"grad_norm": grad_norm, "skipped_steps": skipped, "tokens_per_s": tokens_per_s}
        )
        bad = f", {int(skipped)} steps skipped" if skipped else ""
        self._say(
            f"step {head['step']}/{self.total_steps}: loss {means['loss']:.4f}, accuracy {means['accuracy']:.3f}, "
            f"accepted length {means['accept_len']:.3f}, {tokens_per_s:,.0f} tokens/s{bad}"
        )

    def _verify(self) -> None:
        """Every bucket's replay against its eager twin, on the first real batch of the bucket."""
        if self.engine.executor.how != "replayed":
            return
        unseen = set(self.engine.buckets)
        for batch in self.batch_plan.epoch(0):
            if batch.bucket in unseen:
                unseen.remove(batch.bucket)
                self.inputs.load(batch)
                difference = self.engine.verify(batch.bucket)
                if difference is not None:
                    raise CaptureError(
                        f"bucket {batch.bucket.name}: the replay differs from the eager step in {difference.name} by "
                        f"{difference.relative:.1e} of its largest value; train on the CPU, or report this with dflash-engine's "
                        "version and the GPU's name"
                    )
        self.engine.executor.times.clear()

    def _best_so_far(self) -> float | None:
        file = self.folder / "best" / "best.json"
        return float(json.loads(file.read_text())["eval_accept_len"]) if file.is_file() else None

    def _say_plan(self, device: torch.device, precision: str) -> None:
        names = ", ".join(bucket.name for bucket in self.plan.buckets)
        how = "replaying CUDA graphs" if self.engine.executor.how == "replayed" else "calling the steps (no GPU)"
        self._say(f"{device}, {precision}, {how}; buckets (rows x tokens x blocks): {names}")
        if self.batch_plan.too_long:
            ids = ", ".join(f"{sample} ({length})" for sample, length in self.batch_plan.too_long[:5])
            more = " ..." if len(self.batch_plan.too_long) > 5 else ""
            what = {"skip": "left out", "truncate": "cut off", "split": "split"}[self.settings.data.too_long]
            self._say(f"{len(self.batch_plan.too_long)} samples longer than the largest bucket are {what}: {ids}{more}")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False)
