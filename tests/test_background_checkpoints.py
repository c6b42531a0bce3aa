"""Checkpoints that are written beside the training: what they hold, who waits for whom, and what a failure comes to."""

import errno
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from buffers.host_memory import HostMemory
from engine.data_feed import Progress
from engine.run import TrainingRun
from engine.tensor_file import WrittenFile, write_tensors
from tests.drafter_helpers import assert_same_bits
from tests.run_helpers import (
    checkpoint_tensors,
    files_under,
    interrupt,
    metrics,
    run,
    run_settings,
    steps_of,
    training_dataset,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return training_dataset(tmp_path / "data")


class SlowDisk:
    """Stands in for write_tensors: every write begins with a wait for `free`."""

    def __init__(self) -> None:
        self.free, self.begun = threading.Event(), threading.Event()
        self.at_work, self.most = 0, 0

    def __call__(self, file: Path, tensors: Any, between: Callable[[], None]) -> WrittenFile:
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        self.begun.set()
        try:
            while not self.free.wait(0.01):
                between()
            return write_tensors(file, tensors, between)
        finally:
            self.at_work -= 1


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk()
    monkeypatch.setattr("engine.checkpoint_writer.write_tensors", disk)
    yield disk
    disk.free.set()


def test_a_checkpoint_holds_its_step_though_the_training_went_on(
    data: Path, tmp_path: Path, slow_disk: SlowDisk, after_step: Any
) -> None:
    def let_go() -> None:
        assert slow_disk.begun.is_set(), "that of step 8 is under way"
        assert steps_of(tmp_path / "slow") == []
        slow_disk.free.set()

    (tmp_path / "slow" / "checkpoints").mkdir(parents=True)
    after_step(14, let_go)  # before the next save
    changes = ("run.save_every=8", "run.keep=9", "optimizer.lr=3e-2")
    run(data, tmp_path / "slow", *changes)
    run(data, tmp_path / "plain", *changes)
    for step in (8, 16, 20):
        slow, plain = (checkpoint_tensors(tmp_path / name, step) for name in ("slow", "plain"))
        assert_same_bits(slow, plain)
    assert metrics(tmp_path / "slow") == metrics(tmp_path / "plain")


def test_there_are_never_two_at_once_and_none_is_left_out(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk()
    disk.free.set()
    monkeypatch.setattr("engine.checkpoint_writer.write_tensors", disk)
    run(data, tmp_path / "run", "run.save_every=1", "run.keep=99")
    assert steps_of(tmp_path / "run") == list(range(1, 21))
    assert disk.most == 1


def test_what_a_write_fails_with_ends_the_run_at_the_next_step(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = iter([OSError(errno.ENOSPC, "No space left on device")])
    at_step_5 = threading.Event()

    def full_once(*args: Any) -> WrittenFile:
        for error in failures:
            at_step_5.wait()
            raise error
        return write_tensors(*args)

    took = Progress.took

    def waits(self: Progress, batches: Any) -> None:
        took(self, batches)
        if self.step == 5:
            at_step_5.set()
            for thread in threading.enumerate():
                if thread.name == "checkpoint-writer":
                    thread.join()

    monkeypatch.setattr(Progress, "took", waits)
    monkeypatch.setattr("engine.checkpoint_writer.write_tensors", full_once)
    with pytest.raises(OSError, match="No space left on device"):
        run(data, tmp_path / "run")
    # There is room again, by then: nothing is lost.
    assert steps_of(tmp_path / "run") == [5]
    assert "checkpoint of step 5 saved before the error below" in capsys.readouterr().err
    assert run(data, tmp_path / "run")["steps"] == 20


def test_a_first_interrupt_waits_for_the_disk_and_a_second_one_does_not(
    data: Path, tmp_path: Path, slow_disk: SlowDisk, after_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = threading.Thread.join

    def interrupted_while_waiting(self: threading.Thread, timeout: float | None = None) -> None:
        if self.name == "checkpoint-writer" and timeout is None:
            monkeypatch.setattr(threading.Thread, "join", wait)
            slow_disk.begun.wait()
            interrupt()
        wait(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted_while_waiting)
    after_step(6, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "run", "run.save_every=0")
    assert not slow_disk.free.is_set(), "the disk never let go"
    assert files_under(tmp_path / "run" / "checkpoints") == {}
    slow_disk.free.set()
    assert run(data, tmp_path / "run")["steps"] == 20


def test_an_interrupt_waits_for_the_checkpoint_that_is_under_way(
    data: Path, tmp_path: Path, slow_disk: SlowDisk, after_step: Any
) -> None:
    def interrupt_and_free_the_disk() -> None:
        interrupt()
        slow_disk.begun.wait()
        slow_disk.free.set()

    after_step(6, interrupt_and_free_the_disk)
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "run", "run.save_every=4")
    assert steps_of(tmp_path / "run") == [4, 6]


def test_a_new_generation_is_made_while_a_checkpoint_is_under_way(
    data: Path, tmp_path: Path, slow_disk: SlowDisk
) -> None:
    with TrainingRun(run_settings(data, tmp_path / "run"), resume=True) as under_way:
        for batches in under_way.steps():
            for batch in under_way.arrivals(batches):
                under_way.engine.micro_step(batch.bucket)
            under_way.engine.update(under_way.schedule(under_way.progress.step))
            under_way.took(batches)
            if under_way.progress.step == 4:
                under_way.save()
                slow_disk.begun.wait()
                under_way.reconfigure(run_settings(data, tmp_path / "run", "buckets.lengths=256"))
                assert under_way.engine.generation == 2 and steps_of(tmp_path / "run") == []
                slow_disk.free.set()
        under_way.finish()
    plain = tmp_path / "plain"
    run(data, plain, "run.keep=9")
    found, expected = (checkpoint_tensors(output, 4) for output in (tmp_path / "run", plain))
    assert_same_bits(found, expected)


def test_a_checkpoint_tells_schedule_seed_settings_and_fingerprints(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", "run.seed=5", "optimizer.warmup_ratio=0.25")
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000020" / "state.json").read_text())
    assert state["seed"] == 5 and state["settings"]["model"]["block_size"] == 4
    assert state["schedule"]["total_steps"] == 20 and state["schedule"]["warmup_steps"] == 5
    assert set(state["fingerprints"]) == {"1x128x32", "1x256x32"}
    assert state["fingerprints"]["1x128x32"]["torch"] == torch.__version__


def test_other_software_than_the_checkpoints_is_told(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(data, tmp_path / "run", "run.max_steps=4")
    monkeypatch.setattr("engine.fingerprints._triton_version", lambda: "99.1")
    capsys.readouterr()
    run(data, tmp_path / "run", "run.max_steps=8")
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("settings changed"))
    assert "run.max_steps 4 -> 8; made with triton: " in line and " -> 99.1: numbers from here on may be" in line


def test_the_update_behind_a_snapshot_waits_for_its_copies_on_the_device_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[Any] = []

    class Stream:
        def wait_event(self, event: object) -> None:
            order.append(event)

    copied: Any = object()
    with TrainingRun(run_settings(data, tmp_path / "run"), resume=True) as under_way:
        engine = under_way.engine
        run_step = engine.executor.run

        def noted(name: str) -> None:
            order.append(name)
            run_step(name)

        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
        monkeypatch.setattr(engine.executor, "run", noted)
        engine.hold_update(copied)
        engine.update(lr=0.0)
        engine.update(lr=0.0)
    assert order == [copied, "update", "update"]


def test_on_the_gpu_a_snapshot_begins_behind_all_that_is_queued_and_the_update_waits_for_it(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[Any] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            order.append(("waits for", other))

    class Event:
        def record(self, stream: object) -> None:
            order.append(("recorded on", stream))

    @contextmanager
    def on(stream: object) -> Iterator[None]:
        order.append(("on", stream))
        yield
        order.append("as before")

    def counters(engine: object) -> dict[str, Any]:
        order.append("counters")
        return {}

    ours, the_runs, copied = Stream(), Stream(), Event()
    with TrainingRun(run_settings(data, tmp_path / "run"), resume=True) as under_way:
        snapshot: Any = under_way.saving.snapshot
        snapshot._stream, snapshot.copied = ours, copied
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: the_runs)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr("engine.snapshot._counters", counters)
        monkeypatch.setattr(snapshot, "_copy_arenas", lambda: order.append("masters and moments"))
        monkeypatch.setattr(under_way.engine, "hold_update", lambda read: order.append(("update held by", read)))
        snapshot.take()
    # The counters on the run's own stream: the next micro-batch adds to them.
    assert order == [
        "counters",
        ("waits for", the_runs),
        ("on", ours),
        "masters and moments",
        ("recorded on", ours),
        "as before",
        ("update held by", copied),
    ]


def test_memory_on_the_host_is_zero_of_the_size_asked_for_and_not_a_childs() -> None:
    memory = HostMemory(10_000_001, torch.device("cpu"))
    assert memory.bytes.shape == (10_000_001,) and int(memory.bytes.sum()) == 0
    assert memory.why_not_locked == ""
    memory.close()
    with pytest.raises(MemoryError):
        HostMemory(2**62, torch.device("cpu"))
