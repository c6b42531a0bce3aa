"""`python -m bench.reliability checkpoint`: how long a checkpoint holds up the training loop, and when it is on disk.

A workload's whole steps run from disk as in training; now and then a checkpoint is begun between two of them. First one is
written and compared with the engine, bit for bit: what belongs to one layer and what belongs to none. What it costs is the time
of all steps from its beginning until it is on disk, over what as many steps take without one: the copies that the next update
waits for, and what the writer takes from the loop.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from safetensors import safe_open

from bench.options import workload_option
from bench.ratios import CPU_NOTE
from bench.subjects import DatasetSubjects, trained_from_disk
from bench.temporary_data import samples_that_fit, temporary_samples
from bench.timing import provenance, write_result
from bench.whole_step import LR, batches_for_ever
from bench.workloads import Workload, chosen_workloads
from buffers.host_memory import HostMemory
from engine.assemble import resolve_device
from engine.checkpoint import TRAINING_FILE, DataIdentity, Position, checkpoint_folder
from engine.checkpoint_writer import CheckpointWriter
from engine.settings import Settings, load_settings
from engine.snapshot import Snapshot, training_tensors
from graphs.guards import Counters

SAVE_EVERY = 500  # run.save_every's default, for the share of the time
_QUIET_STEPS = {"cuda": 10, "cpu": 3}  # before a checkpoint and after it


@click.command()
@workload_option
@click.option(
    "--checkpoints",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Checkpoints to time; the median counts.",
)
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="A setting; may be repeated.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON file for the record.")
def checkpoint(workloads: tuple[str, ...], checkpoints: int, overrides: tuple[str, ...], out: Path | None) -> None:
    """How long a checkpoint holds up the training loop, and when it is on disk."""
    settings = load_settings(None, list(overrides))
    device = resolve_device(settings.run.device)
    rows = [
        _measured(workload, settings, device, checkpoints)
        for workload in chosen_workloads(workloads, device, default=("W2",))
    ]
    figures: dict[str, Any] = {"where": provenance(), "checkpoints": rows, "table": [_shown(row) for row in rows]}
    if device.type == "cpu":
        figures["note"] = CPU_NOTE
    write_result(figures, out)
    print(json.dumps(figures))


def _measured(workload: Workload, settings: Settings, device: torch.device, checkpoints: int) -> dict[str, Any]:
    config = workload.config()
    began_s = time.perf_counter()
    memory = HostMemory(Snapshot.nbytes(config), device)
    nbytes = memory.bytes.numel()  # waits until it is pinned
    pinned_s = time.perf_counter() - began_s
    try:
        with (
            temporary_samples(workload, [workload.S] * samples_that_fit(workload), device) as data,
            tempfile.TemporaryDirectory(prefix="dflash-checkpoints-") as root,
            trained_from_disk(data, workload, settings, device) as subjects,
        ):
            snapshot = Snapshot(subjects.engine, memory)
            writer = CheckpointWriter(Path(root), snapshot, config)
            steps = _Steps(subjects)
            steps.take(steps.quiet)
            _compare(subjects, writer, Path(root), steps)
            copy_s = statistics.median(_copy_s(snapshot, device) for _ in range(3))
            before = Counters.read(device)
            timed = [_one(steps, writer, number) for number in range(checkpoints)]
            allocations = (Counters.read(device) - before).device_allocations
            steps.close()
    finally:
        memory.close()
    median = {name: statistics.median(one[name] for one in timed) for name in timed[0]}
    return {
        "workload": workload.name,
        "host_gib": nbytes / 2**30,
        "why_not_pinned": memory.why_not_locked,
        "pinned_s": pinned_s,
        "equals_engine": True,
        "copy_s": copy_s,
        "copy_gb_per_s": nbytes / copy_s / 1e9,
        "device_allocations": allocations,
        **median,
        "disk_gb_per_s": nbytes / median["on_disk_s"] / 1e9,
        "share_of_time": median["held_up_ms"] / (SAVE_EVERY * median["step_ms"]),
        "all": timed,
    }


class _Steps:
    """Whole steps from the loader, with a mark on the device after each."""

    def __init__(self, subjects: DatasetSubjects) -> None:
        self.engine, self.inputs = subjects.engine, subjects.inputs
        self.quiet = _QUIET_STEPS[self.engine.device.type]
        self.engine.zero_()
        self.inputs.start(batches_for_ever(subjects.batches))

    def take(self, count: int) -> list[Any]:
        """So many steps are queued; their marks."""
        return [self._one() for _ in range(count)]

    def while_writing(self, writer: CheckpointWriter) -> Iterator[Any]:
        """Steps until nothing is being written; their marks."""
        while writer.under_way is not None:
            yield self._one()

    def close(self) -> None:
        """Ends the loader."""
        self.inputs.stop()

    def _one(self) -> Any:
        batch = self.inputs.next()
        assert batch is not None, "the batches never end"
        self.engine.micro_step(batch.bucket)
        self.engine.update(LR)
        if self.engine.device.type == "cpu":
            return time.perf_counter() * 1e3
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark


def _one(steps: _Steps, writer: CheckpointWriter, number: int) -> dict[str, float]:
    """A checkpoint among steps: median milliseconds of a step without one, milliseconds that it held up the steps until it was on
    disk (at least the quiet ones), those that the loop's thread was in save(), seconds until it was on disk."""
    before = steps.take(steps.quiet)
    began_s = time.perf_counter()
    writer.save(_position(number + 2), {}, keep=1)
    save_ms = (time.perf_counter() - began_s) * 1e3
    beside = list(steps.while_writing(writer))
    on_disk_s = time.perf_counter() - began_s
    writer.wait()
    after = steps.take(steps.quiet)
    marks = before + beside + after
    if steps.engine.device.type == "cuda":
        torch.cuda.synchronize()
    ms = [b - a if isinstance(a, float) else a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]
    quiet = statistics.median(ms[: len(before) - 1] + ms[-(len(after) - 1) :])
    # Queued steps are ahead of the host: the first that the copies hold up is the one after the save.
    held_up_ms = sum(ms[len(before) - 1 :]) - quiet * (len(ms) - len(before) + 1)
    return {
        "step_ms": quiet,
        "held_up_ms": held_up_ms,
        "longest_step_ms": max(ms[len(before) - 1 :]),
        "save_ms": save_ms,
        "on_disk_s": on_disk_s,
    }


def _compare(subjects: DatasetSubjects, writer: CheckpointWriter, root: Path, steps: _Steps) -> None:
    """Raises ValueError when a checkpoint, with steps behind it in the queue, has other bits than the engine had."""
    expected = {name: tensor.clone() for name, tensor in training_tensors(subjects.engine).items() if _small(name)}
    writer.save(_position(1), {}, keep=1)
    steps.take(3)
    writer.wait()
    with safe_open(checkpoint_folder(root, 1) / TRAINING_FILE, "pt") as file:
        for name, tensor in expected.items():
            if not torch.equal(file.get_tensor(name), tensor.cpu()):
                raise ValueError(f"{name}: the checkpoint has other bits than the engine had; no speed is shown")


def _small(name: str) -> bool:
    """One layer's and all that is not a layer's: copies of all would not fit beside a large drafter."""
    return "layers." not in name or "layers.0." in name


def _copy_s(snapshot: Snapshot, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began_s = time.perf_counter()
    snapshot.take()
    snapshot.wait()
    return time.perf_counter() - began_s


def _position(step: int) -> Position:
    return Position(step, 0, (), DataIdentity(1, 1, "", 1))


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "workload": row["workload"],
        "pinned on the host, GiB": f"{row['host_gib']:.2f}" + (" (not pinned)" if row["why_not_pinned"] else ""),
        "pinned in, s": f"{row['pinned_s']:.1f}",
        "a step, ms": f"{row['step_ms']:.1f}",
        "the loop's thread in save(), ms": f"{row['save_ms']:.2f}",
        "copies alone, ms (GB/s)": f"{row['copy_s'] * 1e3:.0f} ({row['copy_gb_per_s']:.1f})",
        "held up in all, ms": f"{row['held_up_ms']:.0f}",
        f"of the time, one in {SAVE_EVERY} steps": f"{row['share_of_time']:.2%}",
        "on disk after, s (GB/s)": f"{row['on_disk_s']:.1f} ({row['disk_gb_per_s']:.2f})",
        "allocations on the device": row["device_allocations"],
    }
