import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from buffers.batching import BatchPlan
from buffers.planner import Plan, check_ascending, plan_buckets, plan_table
from buffers.shapes import Bucket, anchors_for, round_up

TILE = 8


def work(bucket: Bucket) -> float:
    """A cost with a constant, a linear and a quadratic part, so that the trade-off has an inside."""
    return 40 + bucket.tokens + bucket.B * bucket.S * bucket.Q / 50


def plan(lengths: NDArray[np.int64], eligible: NDArray[np.int64], **changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "num_anchors": 6,
        "K": 4,
        "max_buckets": 3,
        "token_budget": 200,
        "max_rows": 5,
        "tile": TILE,
        **changes,
    }
    return plan_buckets(lengths, eligible, cost=work, **settings)


def cheapest_by_brute_force(
    lengths: NDArray[np.int64], eligible: NDArray[np.int64], *, max_buckets: int, token_budget: int
) -> float:
    """Try every set of edges and every number of rows."""
    edges = sorted({round_up(int(length), TILE) for length in lengths})
    best = float("inf")
    for count in range(1, max_buckets + 1):
        for inner in itertools.combinations(edges[:-1], count - 1):
            total = 0.0
            below = 0
            for S in (*inner, edges[-1]):
                members = (lengths > below) & (lengths <= S)
                N = anchors_for(int(eligible[members].max()), 6, 4, TILE)
                choices = [
                    -(-int(members.sum()) // bucket.B) * work(bucket)
                    for bucket in (Bucket(B, S, N, 4, TILE) for B in range(1, 6))
                    if bucket.tokens <= token_budget
                ]
                total += min(choices, default=float("inf"))
                below = S
            best = min(best, total)
    return best


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("max_buckets", [1, 2, 3, 6])
def test_the_plan_is_the_cheapest_there_is(seed: int, max_buckets: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 60, generator.integers(1, 40))
    eligible = np.minimum(generator.integers(0, 10, len(lengths)), lengths - 1)
    budget = int(generator.integers(90, 300))
    found = plan(lengths, eligible, max_buckets=max_buckets, token_budget=budget)
    expected = cheapest_by_brute_force(lengths, eligible, max_buckets=max_buckets, token_budget=budget)
    assert found.cost == pytest.approx(expected)
    assert len(found.buckets) <= max_buckets
    assert all(bucket.tokens <= budget and bucket.B <= 5 for bucket in found.buckets)
    check_ascending(found.buckets)


@pytest.mark.parametrize("too_long", ["skip", "truncate", "split"])
def test_what_the_plan_counts_is_what_the_batches_hold(too_long: str) -> None:
    generator = np.random.default_rng(1)
    lengths = generator.integers(1, 100, 300)
    eligible = np.minimum(generator.integers(0, 10, 300), lengths - 1)
    found = plan(lengths, eligible, max_length=50, too_long=too_long)
    assert found.buckets[-1].S == 56
    assert found.too_long_count == (lengths > 56).sum()

    batches = BatchPlan(lengths, found.buckets, too_long=too_long, seed=0)  # type: ignore[arg-type]
    assert len(batches.too_long) == found.too_long_count
    assert batches.document_counts == found.samples
    epoch = batches.epoch(0)
    assert tuple(sum(batch.bucket == bucket for batch in epoch) for bucket in found.buckets) == found.batches
    assert found.cost == pytest.approx(sum(work(batch.bucket) for batch in epoch))
    useful = sum(batch.useful_tokens for batch in epoch)
    positions = sum(batch.bucket.B * batch.bucket.S for batch in epoch)
    assert found.padding_fraction == pytest.approx(1 - useful / positions)


def test_n_is_a_matter_of_quality_and_never_lowered_to_fit() -> None:
    lengths = np.array([8, 8, 48])
    found = plan(lengths, np.array([3, 2, 40]), max_buckets=2, token_budget=72)
    assert [(bucket.S, bucket.N) for bucket in found.buckets] == [(8, 4), (48, 6)]


def test_a_budget_too_small_for_one_row_is_refused_with_the_one_that_works() -> None:
    lengths, eligible = np.array([8, 20, 48]), np.array([7, 10, 40])
    message = (
        r"expected B \* \(S \+ N \* K\) within token_budget = 60, found 72 needed with one row a bucket .*"
        "Raise token_budget to at least 72, or max_length to at most 24"
    )
    with pytest.raises(ValueError, match=message):
        plan(lengths, eligible, token_budget=60)
    assert plan(lengths, eligible, token_budget=72).buckets[-1] == Bucket(1, 48, 6, 4, TILE)
    assert plan(lengths, eligible, token_budget=60, max_length=24).buckets[-1].S == 24
    with pytest.raises(ValueError, match=r"Raise token_budget to at least 72\.$"):
        plan(lengths, eligible, token_budget=20)


def test_the_budget_named_is_for_the_number_of_buckets_allowed() -> None:
    """One bucket for both would need the short sample's N beside the long sample's S."""
    lengths, eligible = np.array([24, 48]), np.array([20, 2])
    assert len(plan(lengths, eligible, token_budget=56, max_buckets=2).buckets) == 2
    with pytest.raises(ValueError, match="found 72 needed with one row .* at least 72, or max_length to at most 24"):
        plan(lengths, eligible, token_budget=56, max_buckets=1)


def test_nothing_to_plan_for_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least one sample to plan buckets for, found none"):
        plan(np.array([], dtype=np.int64), np.array([], dtype=np.int64))
    with pytest.raises(ValueError, match="at least one sample of at most 8 tokens, found 2 samples, 2 of them longer"):
        plan(np.array([20, 30]), np.array([1, 1]), max_length=8)
    with pytest.raises(ValueError, match="expected one eligible count for each of 2 lengths, found 1"):
        plan(np.array([20, 30]), np.array([1]))
    with pytest.raises(ValueError, match="expected a positive max_buckets, found 0"):
        plan(np.array([20]), np.array([1]), max_buckets=0)


def test_many_samples_with_many_lengths_are_planned_without_a_loop_over_them() -> None:
    generator = np.random.default_rng(0)
    lengths = np.minimum(np.exp(generator.normal(7, 1, 1_000_000)).astype(np.int64) + 1, 32768)
    calls = 0

    def counted(bucket: Bucket) -> float:
        nonlocal calls
        calls += 1
        return work(bucket)

    found = plan_buckets(lengths, lengths // 2, num_anchors=512, K=16, max_buckets=6, token_budget=65536, cost=counted)
    assert sum(found.samples) == len(lengths)
    assert calls < 200_000


def test_buckets_out_of_order_or_mixed_are_refused() -> None:
    first, second = Bucket(1, 8, 2, 4, TILE), Bucket(1, 16, 2, 4, TILE)
    with pytest.raises(ValueError, match="expected at least one bucket, found none"):
        check_ascending([])
    with pytest.raises(ValueError, match=r"ascending S, each S once, found S = \[16, 8\]"):
        check_ascending([second, first])
    with pytest.raises(ValueError, match=r"ascending S, each S once, found S = \[8, 8\]"):
        check_ascending([first, first])
    with pytest.raises(ValueError, match=r"one block size for all buckets, found K = \[4, 8\]"):
        check_ascending([first, Bucket(1, 16, 2, 8, TILE)])


def test_the_table_has_a_row_for_each_bucket() -> None:
    generator = np.random.default_rng(2)
    lengths = generator.integers(1, 60, 200)
    found = plan(lengths, lengths // 3)
    rows = plan_table(found)
    assert [row.bucket for row in rows] == [bucket.name for bucket in found.buckets]
    assert sum(row.samples for row in rows) == 200
    assert sum(row.cost_share for row in rows) == pytest.approx(1)
    assert all(0 <= row.padding_fraction < 1 for row in rows)


def test_fixed_edges_make_one_bucket_each_and_drop_the_unused() -> None:
    lengths, eligible = np.array([5, 100, 140, 400]), np.array([4, 99, 20, 30])
    plan = plan_buckets(
        lengths,
        eligible,
        num_anchors=64,
        K=8,
        max_buckets=1,
        token_budget=4096,
        cost=lambda bucket: float(bucket.tokens),
        edges=(100, 250, 380, 512),
    )
    assert [(bucket.S, bucket.N) for bucket in plan.buckets] == [(128, 64), (256, 32), (512, 32)]
    assert plan.samples == (2, 1, 1) and plan.batches == (2, 1, 1)


def test_fixed_edges_count_longer_samples_as_too_long() -> None:
    plan = plan_buckets(
        np.array([50, 300]),
        np.array([49, 299]),
        num_anchors=16,
        K=8,
        max_buckets=4,
        token_budget=4096,
        cost=lambda bucket: 1.0,
        edges=(128,),
    )
    assert plan.too_long_count == 1 and [bucket.S for bucket in plan.buckets] == [128]
