"""The way of a batch to the device: loader thread -> pinned slot -> staging arena -> static inputs.

On CUDA the copy stream fills the staging arena while the step before still runs on the static inputs; `next` then
needs one device copy. Three orders keep this right, each held by an event:
  a slot is filled again only after its copy to the device is done        (the loader waits for slot.copied),
  staging is read only after its copy from the slot is done               (the caller's stream waits for slot.copied),
  staging is written again only after the copy into the static inputs     (the copy stream waits for staging_read).
The static inputs themselves are read and written on the caller's stream alone, whose order suffices. On the CPU the
slot is copied straight into the static inputs.
"""

import queue
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor

from buffers.arena import Arena, BufferSpec, packed_size
from buffers.batching import Batch, Document
from buffers.dataset import Sample, SampleSource, folder_names
from buffers.filling import NonFiniteSample, batch_specs, clear_row, fill_row
from buffers.planner import check_ascending
from buffers.shapes import Bucket
from buffers.stages import stage

# Of a slot's tensors those that are most of its bytes, with their names in a sample.
_READ_IN_PLACE = {"target_hidden": "hidden_states", "last_hidden": "last_hidden"}

# How often a caller that waits looks whether there still is a loader to wait for.
_LOOK_S = 1.0


class LoaderEnded(RuntimeError):
    """The loader's thread came to an end that is no ordinary error, or without a word."""


class _Slot:
    """Host memory for one batch; `copied` is recorded after the last copy out of it (None on the CPU)."""

    def __init__(self, name: str, nbytes: int, specs: dict[Bucket, tuple[BufferSpec, ...]], cuda: bool, poison: bool):
        self.arena = Arena(name, nbytes, "cpu", pinned=cuda, poison=poison)
        self.views = {bucket: self.arena.views(bucket_specs) for bucket, bucket_specs in specs.items()}
        # Blocking: the loader sleeps while it waits, instead of spinning on a core.
        self.copied = torch.cuda.Event(blocking=True) if cuda else None

    def wait_until_copied(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


@dataclass(frozen=True)
class _Filled:
    """A slot that holds `batch`. From idle_from to idle_to (perf_counter) the loader had no slot to fill."""

    slot: _Slot
    batch: Batch
    idle_from: float
    idle_to: float


@dataclass(frozen=True)
class _End:
    """The last thing that a loader says: why it stopped early, or None after the last batch."""

    error: BaseException | None


class _Run:
    """One pass over an iterable of batches: a loader thread and the two queues between it and the caller."""

    def __init__(self, slots: Sequence[_Slot]) -> None:
        self.free: queue.SimpleQueue[_Slot | None] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[_Filled | _End] = queue.SimpleQueue()
        self.stopped = False
        self.thread: threading.Thread | None = None
        for slot in slots:
            self.free.put(slot)

    def wait(self) -> _Filled | _End:
        """What the loader says next. Raises LoaderEnded when it is gone and has said all."""
        while True:
            alive = self.thread is not None and self.thread.is_alive()
            try:
                return self.ready.get(timeout=_LOOK_S) if alive else self.ready.get(block=False)
            except queue.Empty:
                if not alive:
                    raise LoaderEnded("the loader's thread is gone, and the batches that it had left with it") from None

    def stop(self) -> None:
        self.stopped = True
        self.free.put(None)
        if self.thread is not None:
            self.thread.join()


class InputPipeline:
    """Owns the static input buffers of all buckets and keeps them fed. One caller thread.

    The buckets share one static arena, one staging arena and `slots` pinned slots, each as large as the largest
    bucket's inputs; a bucket's inputs are one run of bytes, so each move is one copy. `dtype` is that of the hidden
    states in the buffers. `on_nonfinite`: a sample with NaN or infinity stops the pipeline ("refuse") or is left out of
    its row, which without another has weight zero, and listed in `skipped` ("skip"). `with_last_hidden` defaults to
    whether the dataset has it.

    `wait_ms` is the host time spent in `next` because the loader was behind (the device may have had work queued);
    time in which the loader itself waited for the device to free a slot does not count. Capture graphs before `start`:
    the loader waits for events, which another thread's capture may forbid. Raises ValueError for a dataset that has no
    last_hidden where it is asked for.
    """

    def __init__(
        self,
        dataset: SampleSource,
        buckets: Sequence[Bucket],
        *,
        seed: int,
        device: torch.device | str,
        dtype: torch.dtype,
        slots: int = 3,
        on_nonfinite: Literal["refuse", "skip"] = "refuse",
        with_last_hidden: bool | None = None,
        poison: bool = False,
        copy_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """copy_stream: of a pipeline whose place this one takes; torch has 32 streams, and then hands out the first again."""
        check_ascending(buckets)
        if slots < 2:
            raise ValueError(f"expected at least 2 slots, found {slots}. One is filled while another is copied.")
        if on_nonfinite not in ("refuse", "skip"):
            raise ValueError(f"expected on_nonfinite to be refuse or skip, found {on_nonfinite!r}. Choose one.")
        info = dataset.info
        has_last_hidden = info.last_hidden_norm is not None
        if with_last_hidden and not has_last_hidden:
            raise ValueError(
                f"expected last_hidden in the dataset {folder_names(dataset)}, found none. Extract it with the last hidden "
                "state, or train without soft labels."
            )
        self.dataset, self.seed, self.on_nonfinite, self.poison = dataset, seed, on_nonfinite, poison
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        if self.cuda and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.skipped: list[int] = []
        self.wait_ms = 0.0
        self._specs = {
            bucket: batch_specs(
                bucket,
                num_taps=info.num_taps,
                hidden_size=info.hidden_size,
                dtype=dtype,
                with_last_hidden=has_last_hidden if with_last_hidden is None else with_last_hidden,
            )
            for bucket in buckets
        }
        self._sizes = {bucket: packed_size(specs) for bucket, specs in self._specs.items()}
        self._nbytes = max(self._sizes.values())
        self._static = Arena("static inputs", self._nbytes, self.device, poison=poison)
        self._inputs = {bucket: self._static.views(specs) for bucket, specs in self._specs.items()}
        self._slots = [self._new_slot(f"slot {index}") for index in range(slots)]
        # Made by the first `load`, which must not take a slot from a running loader.
        self._spare: _Slot | None = None
        self._run: _Run | None = None
        self._upcoming: _Filled | _End | None = None
        self.copy_stream: torch.cuda.Stream | None = None
        if self.cuda:
            self._staging = Arena("staging", self._nbytes, self.device, poison=poison)
            self._staging_read = torch.cuda.Event()
            self.copy_stream = self._copy_stream = copy_stream or torch.cuda.Stream(self.device)
            self._caller_stream = torch.cuda.current_stream(self.device)
            # The arenas' memory, and their poison, belong to the current stream until here.
            self._copy_stream.wait_stream(self._caller_stream)

    def inputs(self, bucket: Bucket) -> dict[str, Tensor]:
        """The bucket's static inputs, at addresses that never change. The next `next` or `load` overwrites them."""
        self._check_bucket(bucket)
        return self._inputs[bucket]

    def named_buffers(self) -> list[tuple[str, dict[str, Tensor]]]:
        """All memory of the pipeline for `arena_table`; the buckets' inputs overlap, as they share the static arena."""
        tables = [(f"static inputs {bucket.name}", views) for bucket, views in self._inputs.items()]
        if self.cuda:
            tables.append((self._staging.name, {"bytes": self._staging.bytes}))
        spare = [self._spare] if self._spare else []
        return tables + [(slot.arena.name, {"bytes": slot.arena.bytes}) for slot in self._slots + spare]

    def start(self, batches: Iterable[Batch]) -> None:
        """Start loading `batches` ahead in a thread. What is left of an earlier start is dropped."""
        self.stop()
        run = _Run(self._slots)
        run.thread = threading.Thread(target=self._fill_ahead, args=(run, batches), name="input-loader", daemon=True)
        self._run = run
        run.thread.start()

    def next(self) -> Batch | None:
        """Put the next batch into the static inputs and return it; None after the last one.

        Ordered on the current stream, where the step must run too. The batch after it is on its way to the staging
        arena when this returns, if the loader has it. Raises what the loader raised, after the batches before it.
        """
        if self._run is None:
            raise ValueError("expected start(batches) before next(), found no batches under way. Call start first.")
        upcoming = self._upcoming or self._take(self._run, block=True)
        assert upcoming is not None, "a blocking take returned nothing"
        self._upcoming = upcoming
        if isinstance(upcoming, _End):
            error = upcoming.error
            if error is None:
                return None
            self.stop()
            if isinstance(error, Exception):
                raise error
            # As it is, a SystemExit of the loader's would end the process in silence, and a KeyboardInterrupt pass for Ctrl-C.
            raise LoaderEnded(
                f"the loader's thread ended with {error!r}, and the batches that it had left with it"
            ) from error
        with stage("stage", upcoming.batch.bucket.name):
            self._deliver(self._run, upcoming)
        # Never waits here: the caller has a step to launch first, and asks again long before the device is done.
        self._upcoming = self._take(self._run, block=False)
        return upcoming.batch

    def load(self, batch: Batch) -> None:
        """Put one batch into the static inputs now, in the calling thread and past any batches under way."""
        self._check_bucket(batch.bucket)
        if self._spare is None:
            self._spare = self._new_slot("slot for load")
        slot, nbytes = self._spare, self._sizes[batch.bucket]
        slot.wait_until_copied()
        self._fill(slot, batch)
        if slot.copied is not None:
            stream = self._join_streams()
            self._static.bytes[:nbytes].copy_(slot.arena.bytes[:nbytes], non_blocking=True)
            slot.copied.record(stream)
        else:
            self._static.bytes[:nbytes].copy_(slot.arena.bytes[:nbytes])

    def stop(self) -> None:
        """End the loader and drop what it has not delivered. The static inputs keep the last batch."""
        if self._run is not None:
            self._run.stop()
        self._run = None
        self._upcoming = None

    def close(self) -> None:
        """End the loader and wait for the copies under way, so that the memory can be freed. May be called twice."""
        self.stop()
        if self.cuda:
            self._copy_stream.synchronize()
            self._caller_stream.synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _new_slot(self, name: str) -> _Slot:
        return _Slot(name, self._nbytes, self._specs, self.cuda, self.poison)

    def _check_bucket(self, bucket: Bucket) -> None:
        if bucket not in self._specs:
            raise ValueError(
                f"expected one of the buckets {', '.join(known.name for known in self._specs)}, found {bucket.name}. "
                "Build the pipeline from the plan that the batches come from."
            )

    def _fill_ahead(self, run: _Run, batches: Iterable[Batch]) -> None:
        """The loader thread."""
        error: BaseException | None = None
        try:
            if self.cuda:
                torch.cuda.set_device(self.device)
            for batch in batches:
                idle_from = time.perf_counter()
                with stage("idle", "until a slot is free"):
                    slot = run.free.get()
                if slot is None or run.stopped:
                    break
                with stage("stage", "until a slot is copied to the device"):
                    slot.wait_until_copied()
                idle_to = time.perf_counter()
                with stage("read", f"{batch.bucket.name}, samples {', '.join(map(str, batch.sample_ids[:3]))}"):
                    self._fill(slot, batch)
                run.ready.put(_Filled(slot, batch, idle_from, idle_to))
        except BaseException as raised:
            error = raised
        run.ready.put(_End(error))

    def _fill(self, slot: _Slot, batch: Batch) -> None:
        bucket = batch.bucket
        self._check_bucket(bucket)
        if len(batch.rows) > bucket.B:
            raise ValueError(
                f"expected at most {bucket.B} rows for bucket {bucket.name}, found {len(batch.rows)}. Split the batch."
            )
        views = slot.views[bucket]
        for b, row in enumerate(batch.rows):
            self._fill_row(views, b, row, batch)
        for b in range(len(batch.rows), bucket.B):
            clear_row(views, b)

    def _fill_row(self, views: dict[str, Tensor], b: int, row: tuple[Document, ...], batch: Batch) -> None:
        """Row b without the documents that are not finite; they are few, so the row is simply begun again without each."""
        while row:
            samples = self._samples(row, {name: views[name][b] for name in _READ_IN_PLACE if name in views})
            try:
                fill_row(
                    views,
                    b,
                    samples,
                    bucket=batch.bucket,
                    seed=self.seed,
                    epoch=batch.epoch,
                    pieces=[d.piece for d in row],
                    max_blocks=[d.max_blocks for d in row],
                )
                return
            except NonFiniteSample as error:
                if self.on_nonfinite == "refuse":
                    raise
                if error.sample_id not in self.skipped:
                    self.skipped.append(error.sample_id)
                row = row[: error.place] + row[error.place + 1 :]
        clear_row(views, b)

    def _samples(self, row: tuple[Document, ...], memory: dict[str, Tensor]) -> list[Sample]:
        """The row's documents, where the buffers have the files' own type read straight to where they will lie."""
        samples, first = [], 0
        for document in row:
            place = slice(first, first + document.stop - document.start)
            first = place.stop
            where = document.sample_id, document.start, document.stop
            if memory["target_hidden"].dtype == torch.bfloat16:
                into = {_READ_IN_PLACE[name]: tensor[place] for name, tensor in memory.items()}
                samples.append(self.dataset.sample(*where, into))
            else:
                samples.append(self.dataset.sample(*where))
        return samples

    def _take(self, run: _Run, *, block: bool) -> _Filled | _End | None:
        """The loader's next item, its copy to the staging arena enqueued. None when not blocking and none is there."""
        try:
            asked = time.perf_counter()
            with stage("read", "until the loader delivers") if block else nullcontext():
                item = run.wait() if block else run.ready.get(block=False)
            got = time.perf_counter()
        except queue.Empty:
            return None
        if isinstance(item, _End):
            return item
        if block:
            loader_idle = max(0.0, min(got, item.idle_to) - max(asked, item.idle_from))
            self.wait_ms += (got - asked - loader_idle) * 1e3
        if item.slot.copied is not None:
            nbytes = self._sizes[item.batch.bucket]
            with torch.cuda.stream(self._copy_stream):
                self._copy_stream.wait_event(self._staging_read)
                self._staging.bytes[:nbytes].copy_(item.slot.arena.bytes[:nbytes], non_blocking=True)
                item.slot.copied.record(self._copy_stream)
            # Recorded before the loader can get the slot: its wait is for this copy.
            run.free.put(item.slot)
        return item

    def _deliver(self, run: _Run, item: _Filled) -> None:
        nbytes = self._sizes[item.batch.bucket]
        if item.slot.copied is not None:
            stream = self._join_streams()
            # Still the event of this batch: only `_take` records it, and it comes after this in the same thread.
            stream.wait_event(item.slot.copied)
            self._static.bytes[:nbytes].copy_(self._staging.bytes[:nbytes], non_blocking=True)
            self._staging_read.record(stream)
        else:
            self._static.bytes[:nbytes].copy_(item.slot.arena.bytes[:nbytes])
            run.free.put(item.slot)

    def _join_streams(self) -> torch.cuda.Stream:
        """The current stream, made to wait for the last one used if that was another: its steps read the inputs."""
        stream = torch.cuda.current_stream(self.device)
        if stream != self._caller_stream:
            stream.wait_stream(self._caller_stream)
            self._caller_stream = stream
        return stream
