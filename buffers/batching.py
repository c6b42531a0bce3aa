"""From samples to batches, and from a batch's samples to the bytes of its bucket's input buffers.

Every sample goes once per epoch into the smallest bucket that holds it; one that is longer than the largest bucket is
skipped, truncated or split, and listed. `fill_row` and `clear_row` write every byte of a row, padding included, so
nothing that a buffer held before can reach the step.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffers.anchors import ORDER_STREAM, eligible_positions, random_order, sample_anchors
from buffers.arena import BufferSpec
from buffers.dataset import Sample
from buffers.planner import check_ascending
from buffers.shapes import Bucket

TooLong = Literal["skip", "truncate", "split"]


class NonFiniteSample(ValueError):
    """A sample's hidden states hold NaN or infinity. `sample_id` names it."""

    def __init__(self, sample_id: int, tensor: str) -> None:
        super().__init__(
            f"expected finite {tensor}, found NaN or infinity in sample {sample_id}. "
            "Extract it again, or set on_nonfinite to skip to train without it."
        )
        self.sample_id = sample_id


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens [start, stop) of one sample; `piece` counts the pieces of a split sample and is 0 otherwise."""

    sample_id: int
    start: int
    stop: int
    piece: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """At most bucket.B rows of one epoch; the bucket's remaining rows have weight zero."""

    bucket: Bucket
    rows: tuple[Row, ...]
    epoch: int

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """The samples that the rows come from."""
        return tuple(row.sample_id for row in self.rows)

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """(sample id, piece) of every row: what to record as consumed where samples are split."""
        return tuple((row.sample_id, row.piece) for row in self.rows)


class BatchPlan:
    """The batches of every epoch, a pure function of (lengths, buckets, too_long, seed) and what was consumed.

    `lengths` int64[n] are the samples' tokens, `buckets` ascend in S. `too_long` lists (sample id, length) of the
    samples longer than the largest bucket, which are left out ("skip"), cut at the bucket's S ("truncate") or cut into
    pieces of S tokens, each a row of its own with positions from 0 ("split"). `row_counts` are the rows per bucket.
    Raises ValueError when there is no bucket, when they do not ascend, or when no sample is left.
    """

    def __init__(
        self, lengths: NDArray[np.int64], buckets: Sequence[Bucket], *, too_long: TooLong = "skip", seed: int
    ) -> None:
        check_ascending(buckets)
        if too_long not in ("skip", "truncate", "split"):
            raise ValueError(f"expected too_long to be skip, truncate or split, found {too_long!r}. Choose one.")
        lengths = np.asarray(lengths, dtype=np.int64)
        largest = buckets[-1].S
        long_ids = np.flatnonzero(lengths > largest)
        self.buckets = tuple(buckets)
        self.seed = seed
        self.num_samples = len(lengths)
        self.too_long: list[tuple[int, int]] = list(zip(long_ids.tolist(), lengths[long_ids].tolist(), strict=True))

        pieces = np.ones(len(lengths), dtype=np.int64)
        if too_long == "skip":
            pieces[long_ids] = 0
        elif too_long == "split":
            pieces[long_ids] = -(-lengths[long_ids] // largest)
        if not pieces.sum():
            raise ValueError(
                f"expected at least one sample of at most {largest} tokens, found {len(lengths)} samples, "
                f"{len(long_ids)} of them longer. Plan a larger bucket, or set too_long to truncate or split."
            )
        self._sample_ids = np.repeat(np.arange(len(lengths)), pieces)
        first_row = np.cumsum(pieces) - pieces
        self._pieces = np.arange(len(self._sample_ids)) - first_row[self._sample_ids]
        self._starts = self._pieces * largest
        self._stops = np.minimum(lengths[self._sample_ids], self._starts + largest)
        edges = np.array([bucket.S for bucket in buckets])
        self._bucket_index = np.searchsorted(edges, self._stops - self._starts)
        counts = np.bincount(self._bucket_index, minlength=len(buckets))
        self.row_counts: tuple[int, ...] = tuple(counts.tolist())

    def epoch(
        self, epoch: int, consumed: Collection[int | tuple[int, int]] | NDArray[np.bool_] | None = None
    ) -> list[Batch]:
        """The batches of `epoch` that are left, in order.

        The rows are walked in a random order given by (seed, epoch); each joins its bucket's queue, a full queue is a
        batch, and at the end the partly filled queues follow in the order of the buckets. `consumed` is bool[n] by
        sample, or holds sample ids (all pieces of the sample) and (sample id, piece) pairs (`Batch.keys`). Taking out
        what the first batches consumed leaves exactly the batches after them.
        """
        order = random_order(len(self._sample_ids), seed=self.seed, stream=ORDER_STREAM, counter=(epoch, 0, 0))
        if consumed is not None:
            order = order[~self._consumed_rows(consumed)[order]]
        # A row leaves at the place in the walk where its batch gets its last row; leftovers leave after everything.
        leaves_at = np.empty(len(order), dtype=np.int64)
        for index, bucket in enumerate(self.buckets):
            places = np.flatnonzero(self._bucket_index[order] == index)
            full = len(places) // bucket.B * bucket.B
            leaves_at[places[:full]] = np.repeat(places[bucket.B - 1 : full : bucket.B], bucket.B)
            leaves_at[places[full:]] = len(order) + index
        by_batch = np.argsort(leaves_at, kind="stable")
        order, leaves_at = order[by_batch], leaves_at[by_batch]

        columns = (self._sample_ids[order], self._starts[order], self._stops[order], self._pieces[order])
        rows = list(map(Row, *(column.tolist() for column in columns)))
        first = np.flatnonzero(np.diff(leaves_at, prepend=-1))
        buckets = self._bucket_index[order[first]].tolist()
        ends = [*first.tolist(), len(rows)][1:]
        return [
            Batch(self.buckets[bucket], tuple(rows[start:end]), epoch)
            for bucket, start, end in zip(buckets, first.tolist(), ends, strict=True)
        ]

    def _consumed_rows(self, consumed: Collection[int | tuple[int, int]] | NDArray[np.bool_]) -> NDArray[np.bool_]:
        if isinstance(consumed, np.ndarray):
            if consumed.dtype != np.bool_ or consumed.shape != (self.num_samples,):
                raise ValueError(
                    f"expected consumed to be bool[{self.num_samples}], found {consumed.dtype}"
                    f"{list(consumed.shape)}. Give one flag for every sample of the dataset."
                )
            return consumed[self._sample_ids]
        whole = np.zeros(self.num_samples, dtype=np.bool_)
        pairs: set[tuple[int, int]] = set()
        for item in consumed:
            if isinstance(item, tuple):
                pairs.add(item)
            else:
                whole[item] = True
        rows = whole[self._sample_ids]
        if pairs:
            # Only split samples have pieces to tell apart, so this loop is as long as what was consumed at most.
            first_row = np.searchsorted(self._sample_ids, np.arange(self.num_samples))
            for sample_id, piece in pairs:
                row = first_row[sample_id] + piece
                if row < len(rows) and self._sample_ids[row] == sample_id:
                    rows[row] = True
        return rows


def batch_specs(
    bucket: Bucket, *, num_taps: int, hidden_size: int, dtype: torch.dtype, with_last_hidden: bool
) -> tuple[BufferSpec, ...]:
    """The input buffers of a bucket's step, in the order in which they are packed.

    L = num_taps, D = hidden_size; the hidden states have `dtype`, the rest is int32 and uint8.
    """
    B, S, N = bucket.B, bucket.S, bucket.N
    hidden = [BufferSpec("target_hidden", (B, S, num_taps * hidden_size), dtype)]
    if with_last_hidden:
        hidden.append(BufferSpec("last_hidden", (B, S, hidden_size), dtype))
    return (
        *hidden,
        BufferSpec("input_ids", (B, S), torch.int32),
        BufferSpec("position_ids", (B, S), torch.int32),
        BufferSpec("loss_mask", (B, S), torch.uint8),
        BufferSpec("row_lengths", (B,), torch.int32),
        BufferSpec("anchor_positions", (B, N), torch.int32),
        BufferSpec("block_keep_mask", (B, N), torch.uint8),
        BufferSpec("context_start", (B, N), torch.int32),
        BufferSpec("context_end", (B, N), torch.int32),
    )


def fill_row(
    buffers: Mapping[str, Tensor], b: int, sample: Sample, *, bucket: Bucket, seed: int, epoch: int, piece: int = 0
) -> None:
    """Write `sample` and its anchors into row b of host buffers laid out by `batch_specs`, and zero the row's padding.

    Raises NonFiniteSample, before anything is written, when hidden states hold NaN or infinity; ValueError when the
    sample is longer than S or its tensors do not fit the buffers.
    """
    length = len(sample.input_ids)
    if length > bucket.S:
        raise ValueError(
            f"expected at most {bucket.S} tokens for bucket {bucket.name}, found {length} in sample "
            f"{sample.sample_id}. Skip, truncate or split it, or plan a larger bucket."
        )
    sources = {"target_hidden": sample.hidden_states, "input_ids": sample.input_ids, "loss_mask": sample.loss_mask}
    if "last_hidden" in buffers:
        if sample.last_hidden is None:
            raise ValueError(
                f"expected last_hidden in sample {sample.sample_id}, found none. "
                "Extract the dataset with the last hidden state, or train without soft labels."
            )
        sources["last_hidden"] = sample.last_hidden
    for name, source in sources.items():
        # copy_ broadcasts: a wrong shape would be spread over the row without a word.
        expected = (length, *buffers[name].shape[2:])
        if source.shape != expected:
            raise ValueError(
                f"expected {name} of shape {list(expected)} in sample {sample.sample_id}, found "
                f"{list(source.shape)}. Build the buffers from this dataset's layer ids and hidden size."
            )
        if source.is_floating_point() and not all_finite(source):
            raise NonFiniteSample(sample.sample_id, name)
    for name, source in sources.items():
        row = buffers[name][b]
        row[:length].copy_(source)
        row[length:].zero_()

    positions = buffers["position_ids"][b]
    torch.arange(length, dtype=positions.dtype, out=positions[:length])
    positions[length:].zero_()
    buffers["row_lengths"][b] = length

    anchor_positions, block_keep_mask = sample_anchors(
        eligible_positions(sample.loss_mask.numpy()),
        bucket.N,
        seed=seed,
        epoch=epoch,
        sample_id=sample.sample_id,
        piece=piece,
    )
    keep = torch.from_numpy(block_keep_mask)
    buffers["anchor_positions"][b].copy_(torch.from_numpy(anchor_positions))
    buffers["block_keep_mask"][b].copy_(keep)
    buffers["context_start"][b].zero_()
    # In the buffer's int32: a uint8 product would wrap.
    buffers["context_end"][b].copy_(keep).mul_(length)


def clear_row(buffers: Mapping[str, Tensor], b: int) -> None:
    """Zero every byte of row b: no context, no kept block, weight zero."""
    for buffer in buffers.values():
        buffer[b].zero_()


def all_finite(values: Tensor) -> bool:
    """Whether no element is NaN or infinite. One pass without temporaries: minimum and maximum both propagate NaN."""
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))
