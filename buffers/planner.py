"""Which buckets to build for a dataset: edges and rows from the histogram of lengths, by dynamic programming.

The lengths are rounded up to the attention tile; a bucket serves a run of neighbouring rounded lengths. For each run N
is what its samples can fill, up to num_anchors (quality, not cost, decides it), and B is the number of rows that makes
ceil(samples / B) * cost(bucket) smallest within the token budget. The plan is the partition into at most `max_buckets`
runs with the smallest sum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from buffers.shapes import ATTENTION_TILE, Bucket, anchors_for, round_up

# What becomes of a sample that no bucket holds.
TooLong = Literal["skip", "truncate", "split"]


@dataclass(frozen=True)
class Plan:
    """Buckets in ascending S and what an epoch costs with them.

    `cost` is the sum over buckets of batches * cost(bucket), in the cost function's unit. `padding_fraction` is the
    part of the context positions of an epoch that holds no token, `idle_fraction` the part of its draft blocks that has no
    anchor. `samples`, `batches`, `useful_tokens` and `used_blocks` are per bucket (documents, where samples are split; an
    upper bound of their blocks); `too_long_count` counts samples longer than the limit. Where documents are packed, or epochs
    hold different samples, these are the first epoch's.
    """

    buckets: tuple[Bucket, ...]
    cost: float
    bucket_costs: tuple[float, ...]
    samples: tuple[int, ...]
    batches: tuple[int, ...]
    useful_tokens: tuple[int, ...]
    used_blocks: tuple[int, ...]
    too_long_count: int

    @property
    def padding_fraction(self) -> float:
        """Padding over all context positions of an epoch, 0 to 1."""
        positions = (count * bucket.B * bucket.S for count, bucket in zip(self.batches, self.buckets, strict=True))
        return 1 - sum(self.useful_tokens) / max(1, sum(positions))

    @property
    def idle_fraction(self) -> float:
        """Draft blocks without an anchor over all of an epoch, 0 to 1."""
        blocks = (count * bucket.B * bucket.N for count, bucket in zip(self.batches, self.buckets, strict=True))
        return 1 - sum(self.used_blocks) / max(1, sum(blocks))


def plan_buckets(
    lengths: NDArray[np.int64],
    eligible_counts: NDArray[np.int64],
    *,
    num_anchors: int,
    K: int,
    max_buckets: int,
    token_budget: int,
    cost: Callable[[Bucket], float],
    max_length: int = 0,
    max_rows: int = 64,
    tile: int = ATTENTION_TILE,
    too_long: TooLong = "skip",
    edges: Sequence[int] = (),
) -> Plan:
    """Plan the buckets for samples of `lengths` int64[n] tokens with `eligible_counts` int64[n] eligible positions.

    `token_budget` bounds B * (S + N * K) of every bucket; `max_length` (rounded up to the tile; 0 for none) bounds S,
    and longer samples are left out of the count, cut or split as `too_long` says, just as `BatchPlan` will do with
    the plan's buckets. `edges` (rounded up to the tile) fixes the buckets' S instead of planning them, and with them the
    longest sample; an edge that no sample needs gets no bucket. Raises ValueError when there is nothing to plan for or when
    a bucket that is needed does not fit the budget with one row; the message names the smallest budget, or the largest
    max_length, that works.
    """
    for name, value in (("max_buckets", max_buckets), ("token_budget", token_budget), ("max_rows", max_rows)):
        if value <= 0:
            raise ValueError(f"expected a positive {name}, found {value}. Set it to at least 1.")
    lengths, eligible_counts = np.asarray(lengths, dtype=np.int64), np.asarray(eligible_counts, dtype=np.int64)
    if len(lengths) != len(eligible_counts):
        raise ValueError(
            f"expected one eligible count for each of {len(lengths)} lengths, found {len(eligible_counts)}. "
            "Take both from one dataset."
        )
    if not len(lengths):
        raise ValueError(
            "expected at least one sample to plan buckets for, found none. Point to a dataset that has some."
        )
    fixed = np.unique([round_up(edge, tile) for edge in edges]).astype(np.int64)
    limit = round_up(max_length, tile) if max_length > 0 else max(int(lengths.max()), 1)
    if len(fixed):
        limit = int(fixed[-1])
    too_long_count = int((lengths > limit).sum())
    rows, eligible = documents_of(lengths, eligible_counts, limit, too_long)
    if not len(rows):
        raise ValueError(
            f"expected at least one sample of at most {limit} tokens, found {len(lengths)} samples, "
            f"{too_long_count} of them longer. Raise max_length, or set too_long to truncate or split."
        )

    rounded = fixed[np.searchsorted(fixed, rows)] if len(fixed) else -(-rows // tile) * tile
    used, place = np.unique(rounded, return_inverse=True)
    counts = np.bincount(place)
    most_eligible = np.zeros(len(used), dtype=np.int64)
    np.maximum.at(most_eligible, place, eligible)

    runs = _Runs(used, counts, most_eligible, num_anchors, K, token_budget, max_rows, tile, cost)
    if len(fixed):
        runs.costs[~np.eye(len(used), dtype=np.bool_)] = np.inf  # every edge is a bucket of its own
        max_buckets = len(used)
    cuts = _cheapest_cuts(runs.costs, max_buckets)
    if cuts is None:
        raise ValueError(_does_not_fit(runs, max_buckets))

    buckets = tuple(runs.bucket(first, last) for first, last in cuts)
    samples = tuple(int(counts[first : last + 1].sum()) for first, last in cuts)
    tokens_by_edge = np.bincount(place, weights=rows)
    bucket_costs = tuple(float(runs.costs[first, last]) for first, last in cuts)
    return Plan(
        buckets=buckets,
        cost=sum(bucket_costs),
        bucket_costs=bucket_costs,
        samples=samples,
        batches=tuple(-(-n // bucket.B) for n, bucket in zip(samples, buckets, strict=True)),
        useful_tokens=tuple(int(tokens_by_edge[first : last + 1].sum()) for first, last in cuts),
        used_blocks=tuple(
            int(np.minimum(eligible[(place >= first) & (place <= last)], bucket.N).sum())
            for (first, last), bucket in zip(cuts, buckets, strict=True)
        ),
        too_long_count=too_long_count,
    )


def check_ascending(buckets: Sequence[Bucket]) -> None:
    """Raise ValueError unless there is a bucket and their S ascend, one K for all."""
    if not buckets:
        raise ValueError("expected at least one bucket, found none. Plan buckets for the dataset first.")
    edges = [bucket.S for bucket in buckets]
    if edges != sorted(set(edges)):
        raise ValueError(f"expected buckets in ascending S, each S once, found S = {edges}. Sort them, merge equal S.")
    if len({bucket.K for bucket in buckets}) > 1:
        raise ValueError(
            f"expected one block size for all buckets, found K = {[bucket.K for bucket in buckets]}. Use one K."
        )


class PlanRow(NamedTuple):
    """One line of a plan's table; `cost_share` is the bucket's part of the epoch's cost."""

    bucket: str
    S: int
    N: int
    B: int
    tokens: int
    samples: int
    batches: int
    padding_fraction: float
    idle_fraction: float
    cost_share: float


def plan_table(plan: Plan) -> list[PlanRow]:
    """A row for each bucket of the plan, ready to print."""
    return [
        PlanRow(
            bucket.name,
            bucket.S,
            bucket.N,
            bucket.B,
            bucket.tokens,
            samples,
            batches,
            1 - useful / (batches * bucket.B * bucket.S) if batches else 0.0,
            1 - used / (batches * bucket.B * bucket.N) if batches else 0.0,
            bucket_cost / plan.cost if plan.cost else 0.0,
        )
        for bucket, samples, batches, useful, used, bucket_cost in zip(
            plan.buckets,
            plan.samples,
            plan.batches,
            plan.useful_tokens,
            plan.used_blocks,
            plan.bucket_costs,
            strict=True,
        )
    ]


def documents_of(
    lengths: NDArray[np.int64], eligible: NDArray[np.int64], limit: int, too_long: TooLong
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lengths of the documents that an epoch will have, and an upper bound of each one's eligible positions."""
    if too_long == "skip":
        fits = lengths <= limit
        return lengths[fits], eligible[fits]
    if too_long == "truncate":
        rows = np.minimum(lengths, limit)
    elif too_long == "split":
        pieces = np.maximum(-(-lengths // limit), 1)
        last = np.repeat(np.cumsum(pieces) - 1, pieces) == np.arange(pieces.sum())
        rows = np.where(last, np.repeat(lengths - (pieces - 1) * limit, pieces), limit)
        eligible = np.repeat(eligible, pieces)
    else:
        raise ValueError(f"expected too_long to be skip, truncate or split, found {too_long!r}. Choose one.")
    return rows, np.minimum(eligible, np.maximum(rows - 1, 0))


class _Runs:
    """For every run first..last of rounded lengths: the N, the best B and the cost of the one bucket that serves it."""

    def __init__(
        self,
        edges: NDArray[np.int64],
        counts: NDArray[np.int64],
        most_eligible: NDArray[np.int64],
        num_anchors: int,
        K: int,
        token_budget: int,
        max_rows: int,
        tile: int,
        cost: Callable[[Bucket], float],
    ) -> None:
        size = len(edges)
        self.edges, self.K, self.tile, self.token_budget = edges, K, tile, token_budget
        self.costs = np.full((size, size), np.inf)
        self.N = np.zeros((size, size), dtype=np.int64)
        self.B = np.zeros((size, size), dtype=np.int64)
        before = np.concatenate([[0], np.cumsum(counts)])
        for last in range(size):
            S = int(edges[last])
            samples = before[last + 1] - before[: last + 1]
            most = np.maximum.accumulate(most_eligible[last::-1])[::-1]
            N = np.array([anchors_for(int(value), num_anchors, K, tile) for value in most])
            self.N[: last + 1, last] = N
            # Few runs with the same end differ in N, so the cost function is called a few times per end and B.
            for value in np.unique(N):
                rows = np.arange(1, min(max_rows, token_budget // (S + int(value) * K)) + 1)
                if not len(rows):
                    continue
                first = np.flatnonzero(value == N)
                costs = np.array([cost(Bucket(int(B), S, int(value), K, tile)) for B in rows])
                totals = -(-samples[first][:, None] // rows) * costs
                best = np.argmin(totals, axis=1)
                self.costs[first, last] = totals[np.arange(len(first)), best]
                self.B[first, last] = rows[best]

    def bucket(self, first: int, last: int) -> Bucket:
        return Bucket(int(self.B[first, last]), int(self.edges[last]), int(self.N[first, last]), self.K, self.tile)

    def needs(self) -> NDArray[np.float64]:
        """Budget that each run needs with one row, float so that it can go through the same recursion."""
        needs = self.edges[None, :] + self.N * self.K
        return np.where(np.tri(len(self.edges), dtype=np.bool_).T, needs, np.inf)


def _cheapest_cuts(costs: NDArray[np.float64], max_buckets: int) -> list[tuple[int, int]] | None:
    """The runs (first, last) that cover all lengths with at most `max_buckets` runs and the smallest sum of `costs`.

    best[last] after g rounds is the smallest sum for the lengths 0..last in g runs. None when no cover is finite.
    """
    size = len(costs)
    best = costs[0].copy()
    starts = [np.zeros(size, dtype=np.int64)]
    finals = [best[-1]]
    for _ in range(1, min(max_buckets, size)):
        # Row `first` holds best[first - 1] + costs[first]: a new run that starts at `first`, after what lies before it.
        totals = np.concatenate([np.full((1, size), np.inf), best[:-1, None] + costs[1:]])
        starts.append(np.argmin(totals, axis=0))
        best = totals[starts[-1], np.arange(size)]
        finals.append(best[-1])
    rounds = int(np.argmin(finals))
    if not np.isfinite(finals[rounds]):
        return None
    cuts = []
    last = size - 1
    for start in reversed(starts[: rounds + 1]):
        first = int(start[last])
        cuts.append((first, last))
        last = first - 1
    return cuts[::-1]


def _does_not_fit(runs: _Runs, max_buckets: int) -> str:
    """The message for a plan that the budget does not allow even with one row a bucket."""
    needs = runs.needs()
    best = needs[0].copy()
    for _ in range(1, min(max_buckets, len(needs))):
        best = np.minimum(best, np.maximum(best[:-1, None], needs[1:]).min(axis=0, initial=np.inf))
    last = len(needs) - 1
    fitting = runs.edges[best <= runs.token_budget]
    shorter = f", or max_length to at most {fitting[-1]}" if len(fitting) else ""
    S = int(runs.edges[last])
    return (
        f"expected B * (S + N * K) within token_budget = {runs.token_budget}, found {int(best[last])} needed with one "
        f"row a bucket (S up to {S}, K = {runs.K}). Raise token_budget to at least {int(best[last])}{shorter}."
    )
