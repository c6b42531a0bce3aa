"""Buckets for packed rows: which lengths S and blocks N make an epoch cheapest when several documents share a row.

What a set of buckets costs is found by packing a part of the first epoch into it. Two ways to a set are tried: the buckets
of the unpacked plan with other N, and one bucket for all lengths, to which smaller ones are added while that pays. As when
unpacked, quality is not traded away: a row has room for every block that its documents would have alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffers.anchors import ORDER_STREAM, random_order
from buffers.batching import BatchPlan
from buffers.packing import first_fit, reserved_blocks
from buffers.plan_counts import count_first_epoch
from buffers.planner import Plan, TooLong, documents_of, plan_buckets
from buffers.shapes import ATTENTION_TILE, Bucket, anchors_for, round_up

# Documents that are packed to price a set of buckets: the price moves by about 1 % from one draw to another.
_PRICED = 2000
# Sizes to try: S of the bucket for all lengths over the longest document, N over what its tokens would want on average.
_LONGER = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
_MORE_BLOCKS = (0.85, 1.0, 1.15, 1.3)
# Beyond their work, in parts of an epoch's: padding is read, copied and kept; a bucket is captured, and has half-empty rows
# at the end of an epoch. Small, because work decides: one block costs as much as some 200 context tokens.
_PRICE_OF_PADDING = 0.1
_PRICE_OF_A_BUCKET = 0.01


def blocks_wanted(eligible_counts: NDArray[np.int64], num_anchors: int, K: int, tile: int) -> NDArray[np.int64]:
    """Draft blocks of each sample, int64[n]: what it has in a row of its own, where N is num_anchors rounded up."""
    return np.minimum(eligible_counts, anchors_for(num_anchors, num_anchors, K, tile))


def plan_packed(
    lengths: NDArray[np.int64],
    eligible_counts: NDArray[np.int64],
    *,
    num_anchors: int,
    K: int,
    max_buckets: int,
    token_budget: int,
    cost: Callable[[Bucket], float],
    seed: int,
    max_length: int = 0,
    max_rows: int = 64,
    tile: int = ATTENTION_TILE,
    too_long: TooLong = "skip",
    edges: Sequence[int] = (),
) -> Plan:
    """plan_buckets for packed rows, with the same arguments and errors; its counts are those of epoch 0 under `seed`.

    `max_length` bounds the documents, not S: rows may be longer than any of them. The largest S is a multiple of the tile
    that holds the longest; fixed `edges` keep their S, and N alone is planned.
    """
    lengths, eligible_counts = np.asarray(lengths, dtype=np.int64), np.asarray(eligible_counts, dtype=np.int64)
    unpacked = plan_buckets(
        lengths,
        eligible_counts,
        num_anchors=num_anchors,
        K=K,
        max_buckets=max_buckets,
        token_budget=token_budget,
        cost=cost,
        max_length=max_length,
        max_rows=max_rows,
        tile=tile,
        too_long=too_long,
        edges=edges,
    )
    limit = unpacked.buckets[-1].S if edges or not max_length else round_up(max_length, tile)
    wanted = blocks_wanted(eligible_counts, num_anchors, K, tile)
    search = _Search(*documents_of(lengths, wanted, limit, too_long), K, token_budget, max_rows, tile, cost, seed=seed)
    found = search.with_better_blocks([(bucket.S, bucket.N) for bucket in unpacked.buckets])
    if not edges:
        found = min(found, search.grown(limit, max_buckets), key=search.price)
    buckets = search.buckets(found)
    plan = BatchPlan(lengths, buckets, too_long=too_long, seed=seed, blocks=wanted, longest=limit)
    return _opened_only(count_first_epoch(plan, eligible_counts, cost, unpacked.too_long_count))


Sizes = list[tuple[int, int]]


class _Search:
    """Prices sets of (S, N), ascending in S, by packing the first documents of epoch 0."""

    def __init__(
        self,
        lengths: NDArray[np.int64],
        wanted: NDArray[np.int64],
        K: int,
        token_budget: int,
        max_rows: int,
        tile: int,
        cost: Callable[[Bucket], float],
        *,
        seed: int,
    ) -> None:
        order = random_order(len(lengths), seed=seed, stream=ORDER_STREAM)[:_PRICED]
        self.lengths, self.wanted, self.scale = lengths[order], wanted[order], len(lengths) / len(order)
        self.all_lengths, self.all_wanted = lengths, wanted
        self.K, self.token_budget, self.max_rows, self.tile, self.cost = K, token_budget, max_rows, tile, cost
        self._step_costs: dict[tuple[int, int], NDArray[np.float64]] = {}
        self._prices: dict[tuple[tuple[int, int], ...], tuple[float, list[int]]] = {}

    def price(self, sizes: Sizes) -> float:
        """The epoch's cost in buckets of these sizes, with the price of padding and buckets; infinite for none."""
        return self._priced(sizes)[0] if sizes else float("inf")

    def buckets(self, sizes: Sizes) -> list[Bucket]:
        """The buckets of these sizes with the rows B that make them cheapest."""
        rows = self._priced(sizes)[1]
        return [Bucket(B, S, N, self.K, self.tile) for B, (S, N) in zip(rows, sizes, strict=True)]

    def with_better_blocks(self, sizes: Sizes) -> Sizes:
        """The same S, each with the N that makes the epoch cheapest, one after the other from the largest."""
        for index in reversed(range(len(sizes))):
            S, smallest = sizes[index]
            others = [[*sizes[:index], (S, N), *sizes[index + 1 :]] for N in self._blocks_for(S, smallest)]
            sizes = min(sizes, *others, key=self.price) if others else sizes
        return sizes

    def grown(self, limit: int, max_buckets: int) -> Sizes:
        """One bucket for all lengths up to `limit`, and smaller ones added while each pays. Empty when no row of the
        budget holds all."""
        longer = sorted({round_up(int(limit * factor), self.tile) for factor in _LONGER})
        best = self._cheapest([(S, N)] for S in longer for N in self._blocks_for(S))
        shorter: list[int] = []
        while (S := round_up(int(self.tile * 2 ** (len(shorter) / 2)), self.tile)) < limit:
            shorter.append(S)
        while best and len(best) < max_buckets:
            taken = {S for S, _ in best}
            wider = self._cheapest(sorted([*best, (S, N)]) for S in set(shorter) - taken for N in self._blocks_for(S))
            if self.price(wider) >= self.price(best):
                break
            best = wider
        return best

    def _blocks_for(self, S: int, smallest: int = 0) -> list[int]:
        """N to try for rows of S tokens, at least what its hungriest document or `smallest` asks for; none where the budget
        has no place for that."""
        step = anchors_for(1, 1, self.K, self.tile)
        fits = self.all_lengths <= S
        if not fits.any():
            return []
        least = max(smallest, anchors_for(int(self.all_wanted[fits].max()), 1 << 30, self.K, self.tile))
        most = (self.token_budget - S) // self.K // step * step
        tokens, blocks = int(self.all_lengths[fits].sum()), int(self.all_wanted[fits].sum())
        average = blocks / max(tokens, 1) * S
        # Where many documents want the same number, as num_anchors makes them, its multiples leave no block idle.
        alike = int(average) // least * least
        tried = [round_up(int(average * factor), step) for factor in _MORE_BLOCKS]
        tried += [alike, alike + least, most // least * least]
        return sorted({N for wish in tried if (N := min(max(wish, least), most)) >= least})

    def _cheapest(self, choices: Iterable[Sizes]) -> Sizes:
        return min(choices, key=self.price, default=[])

    def _priced(self, sizes: Sizes) -> tuple[float, list[int]]:
        key = tuple(sizes)
        if key not in self._prices:
            buckets = [Bucket(1, S, N, self.K, self.tile) for S, N in sizes]
            homes = np.searchsorted(np.array([S for S, _ in sizes]), self.lengths)
            blocks = reserved_blocks(self.lengths, self.wanted, homes, buckets)
            _, bucket_of = first_fit(self.lengths, blocks, homes, buckets)
            counts = np.bincount(bucket_of, minlength=len(sizes)) * self.scale
            total, positions, rows = 0.0, 0.0, []
            for size, count in zip(sizes, counts.tolist(), strict=True):
                positions += count * size[0]
                costs = self._costs_of_a_step(*size)
                totals = np.ceil(count / np.arange(1, len(costs) + 1)) * costs
                rows.append(int(np.argmin(totals)) + 1)
                total += float(totals.min())
            padding = 1 - float(self.lengths.sum() * self.scale) / positions
            price = total * (1 + _PRICE_OF_PADDING * padding + _PRICE_OF_A_BUCKET * len(sizes))
            self._prices[key] = price, rows
        return self._prices[key]

    def _costs_of_a_step(self, S: int, N: int) -> NDArray[np.float64]:
        """Cost of a batch of 1, 2, ... rows, as many as the budget allows."""
        if (S, N) not in self._step_costs:
            most = min(self.max_rows, self.token_budget // (S + N * self.K))
            self._step_costs[S, N] = np.array(
                [self.cost(Bucket(B, S, N, self.K, self.tile)) for B in range(1, most + 1)]
            )
        return self._step_costs[S, N]


def _opened_only(plan: Plan) -> Plan:
    """Without the buckets that nothing of the first epoch opens a row of: the rows of larger ones hold all their documents."""
    opened = [place for place, batches in enumerate(plan.batches) if batches]

    def of(column: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(column[place] for place in opened)

    return replace(
        plan,
        buckets=of(plan.buckets),
        bucket_costs=of(plan.bucket_costs),
        samples=of(plan.samples),
        batches=of(plan.batches),
        useful_tokens=of(plan.useful_tokens),
        used_blocks=of(plan.used_blocks),
    )
