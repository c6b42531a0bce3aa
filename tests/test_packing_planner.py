"""Buckets for packed rows, and runs that train in them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from buffers.batching import Batch, BatchPlan
from buffers.dataset import Dataset
from buffers.packing_planner import blocks_wanted, plan_packed
from buffers.planner import Plan, check_ascending, plan_buckets
from buffers.shapes import Bucket
from buffers.staging import InputPipeline
from engine.assemble import drafter_config, frozen_target, make_batch_plan, make_plan
from engine.planning import show_plan
from engine.settings import load_settings
from tests.drafter_helpers import CPU, assert_close, assert_same_bits, cloned, make_step, objective
from tests.run_helpers import (
    SETTINGS,
    checkpoint_tensors,
    every_token,
    interrupt,
    metrics,
    run,
    run_settings,
    tokens_of_epoch,
    training_dataset,
)

pytestmark = pytest.mark.usefixtures("one_thread")

TILE = 8
PACKED = ("buckets.packing=true", "buckets.lengths=", "buckets.max_buckets=2")


def work(bucket: Bucket) -> float:
    """Blocks cost, tokens a little, and every step something."""
    return 40 + bucket.B * (bucket.S / 8 + bucket.Q)


def samples(count: int = 400, longest: int = 90, share: float = 1.0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lengths and eligible counts, a part `share` of each sample supervised."""
    lengths = np.minimum(np.exp(np.random.default_rng(3).normal(3, 0.7, count)).astype(np.int64) + 2, longest)
    return lengths, (lengths * share).astype(np.int64) - 1


def planned(lengths: NDArray[np.int64], eligible: NDArray[np.int64], **changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "num_anchors": 16,
        "K": 4,
        "max_buckets": 3,
        "token_budget": 600,
        "max_rows": 5,
        "tile": TILE,
        "seed": 1,
        **changes,
    }
    return plan_packed(lengths, eligible, cost=work, **settings)


@pytest.mark.parametrize(
    "changes", [{}, {"edges": (24, 96)}, {"max_length": 50}, {"max_length": 50, "too_long": "split"}]
)
def test_what_the_plan_counts_is_what_the_first_epoch_holds(changes: dict[str, Any]) -> None:
    lengths, eligible = samples()
    found = planned(lengths, eligible, **changes)
    check_ascending(found.buckets)
    assert all(bucket.tokens <= 600 and bucket.B <= 5 for bucket in found.buckets)
    longest = 56 if "max_length" in changes else 0
    wanted = blocks_wanted(eligible, 16, 4, TILE)
    too_long = changes.get("too_long", "skip")
    plan = BatchPlan(lengths, found.buckets, too_long=too_long, seed=1, blocks=wanted, longest=longest)
    assert len(plan.too_long) == found.too_long_count == (lengths > (longest or 96)).sum()
    epoch = plan.epoch(0)
    of_bucket = [[batch for batch in epoch if batch.bucket == bucket] for bucket in found.buckets]
    assert found.batches == tuple(map(len, of_bucket))
    assert found.samples == tuple(sum(len(batch.documents) for batch in batches) for batches in of_bucket)
    assert sum(found.useful_tokens) == sum(batch.useful_tokens for batch in epoch)
    assert found.cost == pytest.approx(sum(work(batch.bucket) for batch in epoch))
    kept = sum(d.max_blocks for batch in epoch for d in batch.documents)
    slots = sum(batch.bucket.B * batch.bucket.N for batch in epoch)
    assert found.idle_fraction == pytest.approx(1 - kept / slots)


def test_no_document_loses_a_block_to_packing() -> None:
    lengths, eligible = samples()
    found = planned(lengths, eligible)
    plan = BatchPlan(lengths, found.buckets, seed=1, blocks=blocks_wanted(eligible, 16, 4, TILE))
    kept = {d.sample_id: d.max_blocks for batch in plan.epoch(3) for d in batch.documents}
    assert [kept[i] for i in range(len(lengths))] == np.minimum(eligible, 16).tolist()


def test_short_answers_to_long_prompts_are_cheaper_packed() -> None:
    lengths, eligible = samples(share=0.3)
    options: dict[str, Any] = {"num_anchors": 16, "K": 4, "max_buckets": 3, "token_budget": 600, "max_rows": 5}
    alone = plan_buckets(lengths, eligible, cost=work, tile=TILE, **options)
    packed = planned(lengths, eligible)
    assert packed.cost < 0.95 * alone.cost
    assert packed.idle_fraction < alone.idle_fraction
    assert len(packed.buckets) <= len(alone.buckets)


def test_fixed_lengths_stay() -> None:
    lengths, eligible = samples(share=0.3)
    found = planned(lengths, eligible, edges=(24, 96))
    assert [bucket.S for bucket in found.buckets] == [24, 96]


def test_a_budget_too_small_for_one_row_is_refused_as_without_packing() -> None:
    lengths, eligible = samples()
    with pytest.raises(ValueError, match=r"expected B \* \(S \+ N \* K\) within token_budget = 60, found .* needed"):
        planned(lengths, eligible, token_budget=60)


def test_the_plan_says_what_packing_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = training_dataset(tmp_path / "data", (20, 130, 30, 25, 40, 60, 10, 90))
    alone = show_plan(data, load_settings(None, [*SETTINGS, "buckets.lengths=", "buckets.max_buckets=2"]))
    assert "one sample a row; idle blocks of an epoch: " in capsys.readouterr().out
    packed = show_plan(data, load_settings(None, [*SETTINGS, *PACKED]))
    assert "documents packed; idle blocks of an epoch: " in capsys.readouterr().out
    assert (alone["packing"], packed["packing"]) == (False, True)
    assert packed["padding"] < alone["padding"]
    assert packed["epoch_pflop"] < alone["epoch_pflop"]
    assert sum(row["samples"] for row in packed["buckets"]) == 8


def test_a_packed_run_serves_every_token_once_and_goes_on_after_an_interrupt(
    tmp_path: Path,
    after_step: Any,
    steps_taken: list[tuple[Batch, ...]],
) -> None:
    data = training_dataset(tmp_path / "data", (40, 130, 60, 150, 90, 170, 50, 140, 80, 160, 20, 30))
    held_out = training_dataset(tmp_path / "held-out", (50, 100, 140, 30), first_sample=100)
    changes = (*PACKED, f"data.eval_path={held_out}", "run.epochs=3")
    whole = run(data, tmp_path / "whole", *changes)
    assert [Dataset(data).lengths.sum()] * 3 == [
        sum(tokens_of_epoch(steps_taken, epoch).values()) for epoch in range(3)
    ]
    for epoch in range(3):
        served = tokens_of_epoch(steps_taken, epoch)
        assert set(served) == every_token(data) and set(served.values()) == {1}
    assert any(len(row) > 1 for step in steps_taken for batch in step for row in batch.rows)
    assert sum(record.get("useful_tokens", 0) for record in metrics(tmp_path / "whole")) == 3 * len(every_token(data))

    after_step(whole["steps"] // 2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "broken", *changes)
    run(data, tmp_path / "broken", *changes)
    last = whole["steps"]
    assert_same_bits(checkpoint_tensors(tmp_path / "broken", last), checkpoint_tensors(tmp_path / "whole", last))
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")


@pytest.mark.parametrize(("before", "after"), [("true", "false"), ("false", "true")])
def test_packing_may_change_in_the_middle_of_an_epoch(
    tmp_path: Path,
    after_step: Any,
    steps_taken: list[tuple[Batch, ...]],
    before: str,
    after: str,
) -> None:
    data = training_dataset(tmp_path / "data", (40, 130, 60, 150, 90, 170, 50, 140, 80, 160, 20, 30))
    after_step(2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "run", f"buckets.packing={before}")
    run(data, tmp_path / "run", f"buckets.packing={after}")
    for epoch in range(2):
        served = tokens_of_epoch(steps_taken, epoch)
        assert set(served) == every_token(data) and set(served.values()) == {1}


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_a_whole_epoch_has_the_same_loss_and_gradients_packed_or_not(tmp_path: Path, weighting: str) -> None:
    """Through plan, loader and step: the same anchors of the same documents, whatever row they lie in."""
    data = training_dataset(tmp_path / "data", (40, 130, 60, 150, 90, 170, 50, 140, 80, 160, 20, 30))
    dataset = Dataset(data)
    found = []
    for packing in ("false", "true"):
        settings = run_settings(data, tmp_path / "run", f"buckets.packing={packing}", "buckets.num_anchors=48")
        config = drafter_config(settings, dataset.info)
        buckets = make_plan(settings, dataset, config, CPU).buckets
        step = make_step(config, frozen_target(settings, dataset), objective(weighting), max_positions=512)
        batches = make_batch_plan(settings, dataset, buckets).epoch(2)
        with InputPipeline(dataset, buckets, seed=0, device=CPU, dtype=torch.float32) as inputs:
            loaded = []
            for batch in batches:
                inputs.load(batch)
                loaded.append(cloned(inputs.inputs(batch.bucket)))
        outcome = step.outcome(*loaded)
        outcome["metrics"] = outcome["metrics"][:-3]  # slot_tokens and the counts of batches
        found.append((len(batches), outcome))
    (rows, alone), (packed_rows, packed) = found
    assert packed_rows < rows
    assert_close(packed, alone, 5e-6)


def test_held_out_loss_is_the_same_packed_or_not(tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data")
    held_out = training_dataset(tmp_path / "held-out", (50, 100, 140, 30, 20, 9), first_sample=100)
    changes = (f"data.eval_path={held_out}", "optimizer.lr=1e-30", "run.epochs=1")
    alone, packed = (
        run(data, tmp_path / f"packing-{packing}", f"buckets.packing={packing}", *changes)
        for packing in ("false", "true")
    )
    assert packed["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-6)
    assert packed["eval_accept_len"] == pytest.approx(alone["eval_accept_len"], rel=1e-6)


def test_one_sample_a_row_is_the_default(tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data", (20, 30, 40))
    settings = run_settings(data, tmp_path / "run")
    plan = make_batch_plan(settings, Dataset(data), [Bucket(1, 128, 32, 4)])
    assert [len(row) for batch in plan.epoch(0) for row in batch.rows] == [1, 1, 1]
