"""From samples to batches.

Every sample goes once per epoch into the smallest bucket that holds it, alone in its row or packed with others
(packing.py); one that is too long is skipped, truncated or split, and listed.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from buffers.anchors import ORDER_STREAM, random_order
from buffers.packing import first_fit, reserved_blocks
from buffers.planner import TooLong, check_ascending
from buffers.shapes import Bucket


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens [start, stop) of one sample; `piece` counts the pieces of a split sample and is 0 otherwise.

    `max_blocks` bounds its draft blocks where it shares a row; 0 leaves it all that the bucket has.
    """

    sample_id: int
    start: int
    stop: int
    piece: int = 0
    max_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """At most bucket.B rows of one epoch, each of one document or, packed, of several; the bucket's remaining rows have
    weight zero."""

    bucket: Bucket
    rows: tuple[tuple[Document, ...], ...]
    epoch: int

    @property
    def documents(self) -> tuple[Document, ...]:
        """The documents of all rows, in the order in which they lie."""
        return tuple(chain.from_iterable(self.rows))

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """The samples that the documents come from."""
        return tuple(document.sample_id for document in self.documents)

    @property
    def useful_tokens(self) -> int:
        """Context positions that hold a token."""
        return sum(document.stop - document.start for document in self.documents)

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """(sample id, piece) of every document: what to record as consumed where samples are split."""
        return tuple((document.sample_id, document.piece) for document in self.documents)


class BatchPlan:
    """The batches of every epoch, a pure function of the arguments and of what was consumed.

    `lengths` int64[n] are the samples' tokens, `buckets` ascend in S. `blocks` int64[n], the draft blocks that each
    sample wants, packs several documents into a row; None gives each a row of its own. A sample of more than `longest`
    tokens (0: the largest bucket's S) is too long: left out ("skip"), cut off there ("truncate") or cut into pieces of
    that many tokens, each a document of its own with positions from 0 ("split"). `included` gives, for an epoch, bool[n]: the
    samples that take part (None: all, as without it). `too_long` lists (sample id, length) of those too long,
    `document_counts` are all documents by home bucket, the smallest that holds them. Raises ValueError when there
    is no bucket, when they do not ascend, or when no sample is left.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        buckets: Sequence[Bucket],
        *,
        too_long: TooLong = "skip",
        seed: int,
        blocks: NDArray[np.int64] | None = None,
        longest: int = 0,
        included: Callable[[int], NDArray[np.bool_] | None] | None = None,
    ) -> None:
        check_ascending(buckets)
        if too_long not in ("skip", "truncate", "split"):
            raise ValueError(f"expected too_long to be skip, truncate or split, found {too_long!r}. Choose one.")
        lengths = np.asarray(lengths, dtype=np.int64)
        longest = min(longest or buckets[-1].S, buckets[-1].S)
        long_ids = np.flatnonzero(lengths > longest)
        self.buckets = tuple(buckets)
        self.seed = seed
        self.longest = longest
        self._included = included
        self.num_samples = len(lengths)
        self.too_long: list[tuple[int, int]] = list(zip(long_ids.tolist(), lengths[long_ids].tolist(), strict=True))

        pieces = np.ones(len(lengths), dtype=np.int64)
        if too_long == "skip":
            pieces[long_ids] = 0
        elif too_long == "split":
            pieces[long_ids] = -(-lengths[long_ids] // longest)
        if not pieces.sum():
            raise ValueError(
                f"expected at least one sample of at most {longest} tokens, found {len(lengths)} samples, "
                f"{len(long_ids)} of them longer. Plan a larger bucket, or set too_long to truncate or split."
            )
        self._sample_ids = np.repeat(np.arange(len(lengths)), pieces)
        first_piece = np.cumsum(pieces) - pieces
        self._pieces = np.arange(len(self._sample_ids)) - first_piece[self._sample_ids]
        self._starts = self._pieces * longest
        self._stops = np.minimum(lengths[self._sample_ids], self._starts + longest)
        self._lengths = self._stops - self._starts
        self._homes = np.searchsorted(np.array([bucket.S for bucket in buckets]), self._lengths)
        self._blocks = np.zeros_like(self._lengths)
        self.packed = blocks is not None
        if blocks is not None:
            wanted = np.asarray(blocks, dtype=np.int64)[self._sample_ids]
            self._blocks = reserved_blocks(self._lengths, wanted, self._homes, buckets)
        self.document_counts: tuple[int, ...] = self._count(self._homes)
        # The loader asks for an epoch first, the training loop for the same one a little later.
        self._latest: tuple[int, list[Batch]] | None = None

    @property
    def epochs_alike(self) -> bool:
        """Whether every whole epoch has as many batches."""
        return not self.packed and self._taking_part(0) is None

    def batch_count(self, epoch: int) -> int:
        """Batches of the whole epoch. Packed rows have to be packed for it."""
        if self.packed:
            return len(self.epoch(epoch))
        taking_part = self._taking_part(epoch)
        counts = self.document_counts if taking_part is None else self._count(self._homes[taking_part])
        return sum(-(-count // bucket.B) for count, bucket in zip(counts, self.buckets, strict=True))

    @property
    def served_tokens(self) -> NDArray[np.int64]:
        """Tokens of each sample that an epoch with it serves, int64[n]: 0 for one that is left out."""
        return np.bincount(self._sample_ids, weights=self._lengths, minlength=self.num_samples).astype(np.int64)

    def epoch(
        self, epoch: int, consumed: Collection[int | tuple[int, int]] | NDArray[np.bool_] | None = None
    ) -> list[Batch]:
        """The batches of `epoch` that are left, in order.

        The documents are walked in a random order given by (seed, epoch); each is a row of its bucket or is packed into
        one. A row joins its bucket's queue when it is opened, a full queue is a batch, and at the end the partly filled
        queues follow in the order of the buckets. `consumed` is bool[n] by sample, or holds sample ids (all pieces of the
        sample) and (sample id, piece) pairs (`Batch.keys`). Taking out what the first batches consumed leaves exactly the
        batches after them.
        """
        latest = self._latest
        if consumed is None and latest is not None and latest[0] == epoch:
            return latest[1]
        batches = self._batches(epoch, consumed)
        if consumed is None:
            self._latest = epoch, batches
        return batches

    def _batches(
        self, epoch: int, consumed: Collection[int | tuple[int, int]] | NDArray[np.bool_] | None
    ) -> list[Batch]:
        order = random_order(len(self._sample_ids), seed=self.seed, stream=ORDER_STREAM, counter=(epoch, 0, 0))
        taking_part = self._taking_part(epoch)
        if taking_part is not None:
            order = order[taking_part[order]]
        if consumed is not None:
            order = order[~self._consumed_documents(consumed)[order]]
        if self.packed:
            row_of, bucket_of = first_fit(self._lengths[order], self._blocks[order], self._homes[order], self.buckets)
        else:
            row_of, bucket_of = np.arange(len(order)), self._homes[order]
        # A row leaves at the place in the walk where its batch gets its last row; leftovers leave after everything.
        leaves_at = np.empty(len(bucket_of), dtype=np.int64)
        for index, bucket in enumerate(self.buckets):
            places = np.flatnonzero(bucket_of == index)
            full = len(places) // bucket.B * bucket.B
            leaves_at[places[:full]] = np.repeat(places[bucket.B - 1 : full : bucket.B], bucket.B)
            leaves_at[places[full:]] = len(bucket_of) + index
        by_batch = np.argsort(leaves_at, kind="stable")
        leaves_at, bucket_of = leaves_at[by_batch], bucket_of[by_batch]
        new_place = np.empty_like(by_batch)
        new_place[by_batch] = np.arange(len(by_batch))
        row_of = new_place[row_of]
        by_row = np.argsort(row_of, kind="stable")
        order, row_of = order[by_row], row_of[by_row]

        columns = (self._sample_ids, self._starts, self._stops, self._pieces, self._blocks)
        documents = list(map(Document, *(column[order].tolist() for column in columns)))
        rows = [tuple(documents[first:end]) for first, end in pairwise(_starts_of_runs(row_of))]
        batches = list(pairwise(_starts_of_runs(leaves_at)))
        index_of = bucket_of.tolist()
        return [Batch(self.buckets[index_of[first]], tuple(rows[first:end]), epoch) for first, end in batches]

    def _taking_part(self, epoch: int) -> NDArray[np.bool_] | None:
        """By document; None: all."""
        included = None if self._included is None else self._included(epoch)
        return None if included is None else included[self._sample_ids]

    def _count(self, homes: NDArray[np.int64]) -> tuple[int, ...]:
        return tuple(np.bincount(homes, minlength=len(self.buckets)).tolist())

    def _consumed_documents(self, consumed: Collection[int | tuple[int, int]] | NDArray[np.bool_]) -> NDArray[np.bool_]:
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
        documents = whole[self._sample_ids]
        if pairs:
            # Only split samples have pieces to tell apart, so this loop is as long as what was consumed at most.
            first_piece = np.searchsorted(self._sample_ids, np.arange(self.num_samples))
            for sample_id, piece in pairs:
                place = first_piece[sample_id] + piece
                if place < len(documents) and self._sample_ids[place] == sample_id:
                    documents[place] = True
        return documents


def _starts_of_runs(values: NDArray[np.int64]) -> list[int]:
    """Where each run of equal values starts, and at the end the number of values."""
    return [*np.flatnonzero(np.diff(values, prepend=-1)).tolist(), len(values)]
