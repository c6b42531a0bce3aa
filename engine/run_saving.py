"""A run's checkpoints: when one is made, what it tells of the run, and how another run goes on from it."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffers.host_memory import HostMemory
from engine.checkpoint import Position, load_checkpoint, read_state
from engine.checkpoint_choice import Found, set_aside
from engine.checkpoint_writer import CheckpointWriter
from engine.data_feed import beginning, carried_over
from engine.failures import leaves_steps_whole
from engine.graphs_ready import lasting_addresses, refuse_moved
from engine.run_records import table
from engine.snapshot import Snapshot
from graphs.fingerprint import BUFFERS, Fingerprint

if TYPE_CHECKING:
    from engine.run import TrainingRun

GIB = 2**30


class RunSaving:
    """Makes the run's checkpoints in the background, and waits for them where the run ends."""

    def __init__(self, run: TrainingRun, memory: HostMemory) -> None:
        """memory: Snapshot.nbytes of the drafter, the run's own."""
        self._run, self._memory = run, memory
        self.snapshot = Snapshot(run.engine, memory)
        self.writer = CheckpointWriter(run.folder / "checkpoints", self.snapshot, run.engine.config)

    def say_size(self) -> None:
        """How much host memory the snapshot takes, and of what kind."""
        gib = self._memory.bytes.numel() / GIB
        if self._run.engine.device.type == "cpu":
            return
        kind = "pinned host memory"
        if self._memory.why_not_locked:
            kind = f"host memory that could not be pinned ({self._memory.why_not_locked}), so each makes the run wait longer"
        self._run.say(f"checkpoints are written beside the training, from a snapshot in {gib:.2f} GiB of {kind}")

    def save(self) -> None:
        """Begins a checkpoint of the step that the run is at, unless there is one."""
        run = self._run
        step = run.progress.step
        if step in (self.writer.on_disk, self.writer.under_way):
            return
        run.run_log.write()  # a line that waits for its numbers would be lost with the process
        with run.watch.aside("checkpoints"):
            position = run.progress.position(run.run_log.sums)
            self.writer.save(position, self._about(), keep=run.settings.run.keep)

    def save_now(self) -> None:
        """The same, and waits until it is on disk."""
        self.save()
        with self._run.watch.aside("checkpoints"):
            self.writer.wait()

    def end(self, error: BaseException | None) -> None:
        """Where the run ends with this error: whatever is under way gets on disk, but for who asked a second time to end; and
        where data, a disk, memory or the graphs came to grief in the middle of the run, the steps before it do too."""
        run, step = self._run, self._run.progress.step
        if isinstance(error, KeyboardInterrupt):
            self.writer.abandon()
            return
        try:
            self.writer.wait()
        except (OSError, ValueError) as failed:
            run.say(f"the last checkpoint was not written: {failed}")
        if leaves_steps_whole(error) and max(self.writer.on_disk, 0) < step < run.total_steps:
            with suppress(OSError, ValueError):
                self.save_now()
                run.say(f"checkpoint of step {step} saved before the error below")

    def _about(self) -> dict[str, Any]:
        run = self._run
        return {
            "schedule": asdict(run.schedule),
            "seed": run.settings.run.seed,
            "settings": asdict(run.settings),
            "fingerprints": _fingerprints(run),
        }


def go_on_from(run: TrainingRun, found: Found | None) -> Position:
    """Puts the checkpoint's content into the run and says so; where the run begins from there, or from the beginning without
    one. Raises ValueError for a checkpoint of other data or another drafter."""
    data, batches = run.data.training, run.intake.plan.batches
    if found is None:
        return beginning(data, batches)
    captured = lasting_addresses(run.engine)
    position = load_checkpoint(found.folder, run.engine)
    refuse_moved(run.engine, captured)
    start = carried_over(position, data, batches, run.settings.data.too_long)
    run.saving.writer.on_disk = start.step
    for folder, why in found.passed_over:
        run.say(f"{folder} is passed over and set aside: {why}")
    set_aside(found)
    if run.intake.held_out is not None:
        run.intake.held_out.go_on()
    ignored = "; model.init is not read: the weights are the checkpoint's" if run.settings.model.init else ""
    run.say(f"going on from {found.folder}{ignored}")
    changed = changed_since(found.folder, run)
    if changed:
        run.say(changed)
    return start


def changed_since(folder: Path, run: TrainingRun) -> str:
    """What the run is otherwise than when the checkpoint was made, for people; "" where nothing is, or nothing was noted."""
    state = read_state(folder)
    told: list[str] = []
    before, now = table(state, "settings"), json.loads(json.dumps(asdict(run.settings)))
    for section, values in now.items():
        old = table(before, section)
        told += [
            f"{section}.{name} {json.dumps(old[name])} -> {json.dumps(value)}"
            for name, value in values.items()
            if name in old and old[name] != value and (section, name) != ("run", "output")
        ]
    fields = _changed_fields(table(state, "fingerprints"), _fingerprints(run))
    words = f"settings changed since then: {', '.join(told)}" if told else ""
    if fields:
        kept = "numbers from here on may be rounded otherwise than those of an uninterrupted run"
        words += f"{'; ' if words else ''}made with {', '.join(fields)}: {kept}"
    return words


def _fingerprints(run: TrainingRun) -> dict[str, dict[str, str]]:
    found = run.intake.plan.fingerprints
    return {
        bucket.name: {name: value for name, value in fingerprint.fields if name != BUFFERS}
        for bucket, fingerprint in found.items()
    }


def _changed_fields(before: dict[str, Any], now: dict[str, dict[str, str]]) -> list[str]:
    """Of the buckets that there were before too."""
    changes: dict[str, str] = {}
    for name, fields in now.items():
        old = table(before, name)
        for change in Fingerprint.of(fields).changes(Fingerprint.of(old)) if old else ():
            changes[change.field] = str(change)
    return list(changes.values())
