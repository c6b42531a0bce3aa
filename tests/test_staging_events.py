"""The events of the CUDA path, tried without a device: streams that run as late, and in as odd an order, as allowed.

Copies, event records and waits are put into queues instead of being done. A scheduler then executes the queues' heads
in random order, and only when somebody has to wait. What the events do not forbid happens sooner or later.
"""

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from buffers.arena import Arena
from buffers.batching import Batch, BatchPlan
from buffers.staging import InputPipeline, _Slot
from tests.dataset_helpers import write_dataset
from tests.test_staging import BUCKETS, SEED, assert_holds, filled_directly


class Device:
    """Queues of operations; an operation returns False while it must wait."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.current = threading.local()

    def advance(self) -> bool:
        """Execute one operation of a stream that can go on. False when none can."""
        with self.lock:
            for stream in self.random.sample(self.streams, len(self.streams)):
                if stream.queue and stream.queue[0]():
                    stream.queue.popleft()
                    return True
            return False


class Stream:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.queue: deque[Callable[[], bool]] = deque()
        device.streams.append(self)

    def put(self, operation: Callable[[], object]) -> None:
        with self.device.lock:
            self.queue.append(lambda: (operation(), True)[1])

    def wait_event(self, event: "Event") -> None:
        with self.device.lock:
            wanted = event.recorded
            self.queue.append(lambda: event.reached >= wanted)

    def wait_stream(self, other: "Stream") -> None:
        event = Event(self.device)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        while self.queue:
            self.device.advance()


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.recorded = self.reached = 0

    def record(self, stream: Stream) -> None:
        with self.device.lock:
            self.recorded += 1
            number = self.recorded
            stream.put(lambda: setattr(self, "reached", number))

    def synchronize(self) -> None:
        wanted = self.recorded
        while self.reached < wanted:
            self.device.advance()


class Bytes:
    """Memory whose copies are enqueued on the calling thread's current stream."""

    def __init__(self, device: Device, real: torch.Tensor) -> None:
        self.device, self.real = device, real

    def __getitem__(self, part: slice) -> "Bytes":
        return Bytes(self.device, self.real[part])

    def copy_(self, source: "Bytes", non_blocking: bool = False) -> None:
        assert non_blocking
        self.device.current.stream.put(lambda: self.real.copy_(source.real))


def device_for(monkeypatch: pytest.MonkeyPatch, seed: int) -> Device:
    """A device that torch.cuda's streams are taken from."""
    device = Device(seed)

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, device.current.stream = device.current.stream, stream
        yield
        device.current.stream = before

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device.current.stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    return device


def pipeline_on(device: Device, path: Path, slots: int) -> Any:
    """A pipeline with the CUDA path's parts in place, made of the classes above."""
    dataset = write_dataset(path, np.random.default_rng(0).integers(1, 57, 80).tolist())
    pipeline: Any = InputPipeline(
        dataset, BUCKETS, seed=SEED, device="cpu", dtype=torch.float32, slots=slots, poison=True
    )

    def with_event(slot: Any) -> Any:
        slot.copied = Event(device)
        slot.arena.bytes = Bytes(device, slot.arena.bytes)
        return slot

    pipeline._new_slot = lambda name: with_event(_Slot(name, pipeline._nbytes, pipeline._specs, False, True))
    pipeline._slots = [with_event(slot) for slot in pipeline._slots]
    pipeline._static.bytes = Bytes(device, pipeline._static.bytes)
    pipeline._staging = Arena("staging", pipeline._nbytes, "cpu", poison=True)
    pipeline._staging.bytes = Bytes(device, pipeline._staging.bytes)
    pipeline._staging_read = Event(device)
    pipeline._copy_stream = Stream(device)
    pipeline._caller_stream = device.current.stream = Stream(device)
    pipeline.cuda = True
    return pipeline


class Reader:
    """Steps that read the static inputs when the stream gets to them, which may be much later."""

    def __init__(self, device: Device, pipeline: Any) -> None:
        self.device, self.pipeline = device, pipeline
        self.seen: list[tuple[Batch, dict[str, torch.Tensor]]] = []

    def step(self, batch: Batch) -> None:
        inputs = self.pipeline.inputs(batch.bucket)
        self.device.current.stream.put(
            lambda: self.seen.append((batch, {name: tensor.clone() for name, tensor in inputs.items()}))
        )

    def check(self, expected: list[Batch]) -> None:
        while self.device.advance():
            pass
        assert [batch for batch, _ in self.seen] == expected
        for batch, tensors in self.seen:
            assert_holds(tensors, filled_directly(self.pipeline.dataset, batch))


def read_all(device: Device, path: Path, slots: int = 3) -> None:
    """One epoch, a step on each batch."""
    pipeline = pipeline_on(device, path, slots)
    batches = BatchPlan(pipeline.dataset.lengths, BUCKETS, seed=0).epoch(0)
    reader = Reader(device, pipeline)
    with pipeline:
        pipeline.start(batches)
        while (batch := pipeline.next()) is not None:
            reader.step(batch)
    reader.check(batches)


def read_with_changes(device: Device, path: Path) -> None:
    """Steps on changing streams, with batches loaded in between and restarts that drop what was under way."""
    pipeline = pipeline_on(device, path, 2)
    batches = BatchPlan(pipeline.dataset.lengths, BUCKETS, seed=0).epoch(0)
    reader = Reader(device, pipeline)
    expected = []
    streams = [Stream(device) for _ in range(3)]
    with pipeline:
        for first in range(0, len(batches), 6):
            pipeline.start(batches[first:])
            for index in range(first, min(first + 5, len(batches))):
                device.current.stream = streams[index % 3]
                assert pipeline.next() == batches[index]
                reader.step(batches[index])
                expected.append(batches[index])
                if index % 2:
                    pipeline.load(batches[-index])
                    reader.step(batches[-index])
                    expected.append(batches[-index])
    reader.check(expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slots", [2, 3])
def test_every_step_reads_its_own_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, slots: int) -> None:
    read_all(device_for(monkeypatch, seed), tmp_path, slots)


@pytest.mark.parametrize("seed", range(4))
def test_every_step_does_so_on_changing_streams_and_with_loads_and_restarts_in_between(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    read_with_changes(device_for(monkeypatch, seed), tmp_path)


@pytest.mark.parametrize("missing", ["slot copied", "staging filled", "staging read", "streams joined"])
def test_the_simulation_notices_when_any_one_wait_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    wait_event = Stream.wait_event

    def without(stream: Stream, event: Event) -> None:
        # The device's first stream is the copy stream: what it waits for is that staging was read.
        is_copy_stream = stream is stream.device.streams[0]
        if is_copy_stream != (missing == "staging read"):
            wait_event(stream, event)

    if missing == "slot copied":
        monkeypatch.setattr(_Slot, "wait_until_copied", lambda _: None)
    elif missing == "streams joined":
        monkeypatch.setattr(Stream, "wait_stream", lambda *_: None)
    else:
        monkeypatch.setattr(Stream, "wait_event", without)
    read = read_with_changes if missing == "streams joined" else read_all

    def notice() -> None:
        for seed in range(10):
            read(device_for(monkeypatch, seed), tmp_path / str(seed))

    with pytest.raises(AssertionError):
        notice()
