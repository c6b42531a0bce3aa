"""The windows of a file through the target and onto the disk, one thread reading, one running, one writing.

A window's samples run by rising length, and their states are written in that order as they come: memory holds the states of
a shard that fills, of one that is being written and of what waits for it, whatever the file's size. With every shard it is
recorded which sample of which window comes next: after a kill the same command goes on there and makes the same files.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from buffers.dataset_writer import DatasetWriter
from engine.extract_options import ExtractOptions
from engine.extract_reader import Progress, Reader, Window
from engine.extract_tally import TargetLoss
from engine.hf_target import HfTarget
from engine.length_batches import batches_of_like_length
from engine.window_states import BatchStates, run_batch

# Supervised tokens whose loss the target itself is asked for.
LOSS_TOKENS = 4096
PROGRESS_S = 5.0


class Work:
    """`tokens` real ones in `slots` padded ones ran in `seconds`, of which it waited for reading and for writing.

    `loss` and `not_finite`, the samples left out for it, are those of all shards, earlier runs' included.
    """

    def __init__(
        self,
        target: HfTarget,
        layers: Sequence[int],
        options: ExtractOptions,
        writer: DatasetWriter,
        progress: Progress,
        say: Callable[[str], None],
    ) -> None:
        self._target, self._layers, self._options = target, layers, options
        self._writer, self._progress, self._say = writer, progress, say
        self.loss = TargetLoss(**progress.state.get("loss", {}))
        self.not_finite: int = progress.state.get("not_finite", 0)
        self.tokens = self.slots = 0
        self.seconds = self.reading_s = self.writing_s = 0.0
        self._pending_tokens = 0
        self._failed = False
        self._waiting: deque[tuple[Future[None], int]] = deque()

    def run(self, reader: Reader) -> None:
        """All windows from where the progress stands; the last shard is written."""
        began = self._shown = time.perf_counter()
        self._began = began
        size = self._options.data.stat().st_size
        windows = reader.windows(self._progress.state.get("offset", 0))
        done = self._progress.state.get("done", 0)
        # The loss is taken on a sample when it runs, and counted when it is written.
        loss_left = LOSS_TOKENS - self.loss.tokens
        with ThreadPoolExecutor(1) as reading, ThreadPoolExecutor(1) as writing:
            coming = reading.submit(next, windows, None)
            while (window := self._next(coming)) is not None:
                coming = reading.submit(next, windows, None)
                first = 0
                lengths = [len(sample.input_ids) for sample in window.samples]
                for rows, width in batches_of_like_length(lengths, self._options.token_budget):
                    first, behind = first + len(rows), first
                    if first <= done:
                        continue
                    skipped = max(0, done - behind)
                    states = run_batch(
                        self._target,
                        [window.samples[row] for row in rows],
                        width,
                        self._layers,
                        self._options.last_hidden,
                        loss_from=skipped,
                        loss_tokens=loss_left,
                    )
                    loss_left -= sum(loss.tokens for loss in states.losses.values())
                    self.slots += len(rows) * width
                    self.tokens += states.num_tokens
                    # More states than a shard's in waiting, and memory would grow with the file.
                    self._wait_until(self._options.shard_tokens)
                    job = writing.submit(self._write, window, states, behind, skipped)
                    self._waiting.append((job, states.num_tokens))
                    self._show(window.start + (window.stop - window.start) * first // len(lengths), size)
                done = 0
            self._wait_until(0)
            self._end_shard({"offset": reader.end, "done": 0, "tally": reader.tally.to_json()})
        self.seconds = time.perf_counter() - began

    def _next(self, coming: Future[Window | None]) -> Window | None:
        began = time.perf_counter()
        window = coming.result()
        self.reading_s += time.perf_counter() - began
        return window

    def _wait_until(self, tokens: int) -> None:
        """Until the states of at most so many tokens wait to be written."""
        began = time.perf_counter()
        while self._waiting and (self._waiting[0][0].done() or sum(count for _, count in self._waiting) > tokens):
            self._waiting.popleft()[0].result()
        self.writing_s += time.perf_counter() - began

    def _write(self, window: Window, states: BatchStates, first: int, skipped: int) -> None:
        """Add the batch's samples, the first of which is number `first` in its window, without those `skipped`."""
        # A batch behind one that could not be written would leave a hole that nobody sees.
        if self._failed:
            return
        self._failed = True
        self._add(window, states, first, skipped)
        self._failed = False

    def _add(self, window: Window, states: BatchStates, first: int, skipped: int) -> None:
        for number, sample in enumerate(states.each(), first):
            if number < first + skipped:
                continue
            length = len(sample.tokens.input_ids)
            if self._pending_tokens and self._pending_tokens + length > self._options.shard_tokens:
                self._end_shard({"offset": window.start, "done": number, "tally": window.tally})
            self.loss.nats += sample.loss.nats
            self.loss.tokens += sample.loss.tokens
            if not sample.finite:
                self.not_finite += 1
                continue
            self._writer.add(sample.tokens.input_ids, sample.tokens.loss_mask, sample.hidden, sample.last)
            self._pending_tokens += length

    def _end_shard(self, state: dict[str, Any]) -> None:
        # The line stands on disk before the shard does: one too many is dropped, one too few would be a loss.
        counts = {"loss": asdict(self.loss), "not_finite": self.not_finite}
        self._progress.note({"samples": self._writer.num_samples, **state, **counts})
        self._writer.end_shard()
        self._pending_tokens = 0

    def _show(self, offset: int, size: int) -> None:
        now = time.perf_counter()
        if now - self._shown > PROGRESS_S:
            self._shown = now
            self._say(
                f"{offset / size:6.1%}  {self.tokens:,} tokens, {self.tokens / (now - self._began):,.0f} tokens/s"
            )
