"""Several datasets as one, each sample as often in an epoch as its source's weight says.

A weight of 2 gives every sample of the source twice an epoch, each time with other anchors; 0.5 gives half of them, the other
half in the next epoch. The ids of a mixture stand for (source, copy, sample): a source of n samples and weight w has ceil(w) * n
of them, copy by copy. All copies but the last are in every epoch; of the last, the samples in the next stretch of one random
circle of the source take part, as long as the weight's fraction says. So after any number of epochs no sample of a source has
come more than once oftener than another, and what an epoch holds follows from (seed, epoch, source) alone.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from buffers.anchors import MIXTURE_STREAM, random_order
from buffers.dataset import Sample, SampleSource, check_range


class Mixture:
    """`SampleSource` over the sources, which must be of one target; `info` is the first one's, without a last_hidden_norm
    unless all have the same. Lengths and counts are int64[ids]. Raises ValueError for weights that are not positive, or not one
    for each source."""

    def __init__(self, sources: Sequence[SampleSource], weights: Sequence[float], *, seed: int) -> None:
        if not sources or len(weights) != len(sources) or min(weights) <= 0:
            raise ValueError(
                f"expected a positive weight for each of {len(sources)} sources, found {list(weights)}. Give each its own."
            )
        self.sources = tuple(sources)
        # A weight is meant as it is written: 0.3 is three tenths, not the double next to it.
        self.weights = tuple(Fraction(str(weight)) for weight in weights)
        self.copies = tuple(ceil(weight) for weight in self.weights)
        self.folders = tuple(folder for source in self.sources for folder in source.folders)
        self.notes = tuple(note for source in self.sources for note in source.notes)
        self.bad_files = {
            str(source.folders[0] / name): reason
            for source in self.sources
            for name, reason in source.bad_files.items()
        }
        self.lengths = self._each_copy([source.lengths for source in self.sources])
        self.eligible_counts = self._each_copy([source.eligible_counts for source in self.sources])
        self.supervised_counts = self._each_copy([source.supervised_counts for source in self.sources])
        self._sizes = [len(source) for source in self.sources]
        counts = [copies * size for copies, size in zip(self.copies, self._sizes, strict=True)]
        self._first_ids = np.cumsum([0, *counts])
        norms = {source.info.last_hidden_norm for source in self.sources}
        self.info = replace(
            self.sources[0].info,
            last_hidden_norm=norms.pop() if len(norms) == 1 else None,
            num_samples=len(self.lengths),
            shards=(),
        )
        self._circles = [
            random_order(size, seed=seed, stream=MIXTURE_STREAM, counter=(place, 0, 0)) if _part(weight) else None
            for place, (size, weight) in enumerate(zip(self._sizes, self.weights, strict=True))
        ]

    @property
    def digest(self) -> str:
        """sha256 over the sources' own, their sizes and weights, in order."""
        told = [(s.digest, len(s), str(weight)) for s, weight in zip(self.sources, self.weights, strict=True)]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    @property
    def whole(self) -> bool:
        """Whether every id takes part in every epoch."""
        return all(circle is None for circle in self._circles)

    def __len__(self) -> int:
        return len(self.lengths)

    def included(self, epoch: int) -> NDArray[np.bool_] | None:
        """Which ids take part in the epoch, bool[ids]; None when all do, in this epoch and any other."""
        if self.whole:
            return None
        mask = np.ones(len(self), dtype=np.bool_)
        for place, circle in enumerate(self._circles):
            if circle is not None:
                size, part = self._sizes[place], _part(self.weights[place])
                # Rounded up, so that the first epoch has a sample of every source.
                stretch = np.arange(ceil(epoch * part * size), ceil((epoch + 1) * part * size)) % size
                last_copy = mask[self._first_ids[place + 1] - size : self._first_ids[place + 1]]
                last_copy[:] = False
                last_copy[circle[stretch]] = True
        return mask

    def ids_of(self, place: int) -> slice:
        """The ids of the first copy of a source."""
        first = int(self._first_ids[place])
        return slice(first, first + self._sizes[place])

    def origin(self, i: int) -> tuple[Path, int]:
        """The folder that sample i lies in, and its own id there."""
        place, own = self._origin(i)
        return self.sources[place].folders[0], own

    def sample(
        self, i: int, start: int = 0, stop: int | None = None, into: Mapping[str, Tensor] | None = None
    ) -> Sample:
        """Tokens [start, stop) of the sample that i stands for, under the id i: it has anchors of its own."""
        stop = check_range(i, start, stop, self.lengths)
        place, own = self._origin(i)
        source = self.sources[place]
        return replace(source.sample(own, start, stop, into), sample_id=i, label=f"{own} of {source.folders[0]}")

    def to_plan_for(self, tile: int) -> NDArray[np.int64]:
        """The ids that buckets are planned for: the first epoch's, and of each length (rounded up to the tile) the longest and
        the one with most places for anchors, which another epoch may have."""
        mask = self.included(0)
        if mask is None:
            return np.arange(len(self))
        for values in (self.lengths, self.eligible_counts):
            by_size = np.lexsort((values, -(-self.lengths // tile)))
            rounded = -(-self.lengths[by_size] // tile)
            mask[by_size[np.flatnonzero(np.diff(rounded, append=-1))]] = True
        return np.flatnonzero(mask)

    def _origin(self, i: int) -> tuple[int, int]:
        place = int(np.searchsorted(self._first_ids, i, side="right")) - 1
        return place, int(i - self._first_ids[place]) % self._sizes[place]

    def _each_copy(self, columns: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        return np.concatenate([np.tile(column, n) for column, n in zip(columns, self.copies, strict=True)])


def _part(weight: Fraction) -> Fraction:
    """What of the last copy takes part in an epoch; 0 when all of it does."""
    return weight - floor(weight)
