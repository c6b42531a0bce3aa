"""A mixture of datasets: how often each sample comes, in which epochs, under which id, and what its buckets are planned for."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from buffers.batching import BatchPlan
from buffers.dataset import Dataset
from buffers.filling import NonFiniteSample, batch_specs, fill_row
from buffers.mixture import Mixture
from buffers.shapes import Bucket
from engine.assemble import make_batch_plan, make_plan
from engine.checkpoint import Position
from engine.data_feed import beginning, count_steps, training_steps
from engine.settings import load_settings
from tests.dataset_helpers import random_sample, write_dataset, writer
from tests.drafter_helpers import small_config

SIZES = (11, 7, 5)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Dataset]:
    root = tmp_path_factory.mktemp("sources")
    generator = np.random.default_rng(0)
    return [
        write_dataset(root / f"source{place}", generator.integers(20, 120, size).tolist())
        for place, size in enumerate(SIZES)
    ]


def times_served(mixture: Mixture, plan: BatchPlan, epoch: int) -> Counter[tuple[str, int]]:
    """How often each sample of each folder is served in an epoch."""
    served = [i for batch in plan.epoch(epoch) for i in batch.sample_ids]
    assert len(set(served)) == len(served)
    return Counter((str(folder), own) for folder, own in map(mixture.origin, served))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("weights", [(1.0, 2.0, 0.5), (0.3, 1.7, 0.05), (2.5, 1.0, 0.9)])
def test_every_sample_comes_as_often_as_its_weight_says(
    sources: list[Dataset], weights: tuple[float, ...], packing: bool
) -> None:
    mixture = Mixture(sources, weights, seed=3)
    blocks = np.minimum(mixture.eligible_counts, 8) if packing else None
    plan = BatchPlan(mixture.lengths, [Bucket(3, 128, 32, 4)], seed=3, blocks=blocks, included=mixture.included)
    total: Counter[tuple[str, int]] = Counter()
    for epoch in range(20):
        served = times_served(mixture, plan, epoch)
        assert len(plan.epoch(epoch)) == plan.batch_count(epoch)
        total += served
        for source, weight in zip(sources, weights, strict=True):
            counts = [served[str(source.path), i] for i in range(len(source))]
            assert {int(weight), int(np.ceil(weight))} >= set(counts)
            assert abs(sum(counts) - weight * len(source)) < 1
            so_far = [total[str(source.path), i] for i in range(len(source))]
            assert max(so_far) - min(so_far) <= 1
            assert abs(sum(so_far) - weight * len(source) * (epoch + 1)) < 1
    for source, weight in zip(sources, weights, strict=True):
        assert {total[str(source.path), i] for i in range(len(source))} == {round(weight * 20)}


def test_halves_of_two_epochs_make_a_whole_and_follow_from_the_seed(sources: list[Dataset]) -> None:
    halves = [Mixture(sources[:1], (0.5,), seed=seed) for seed in (1, 1, 2)]
    drawn = [[mixture.included(epoch) for epoch in (0, 1)] for mixture in halves]
    for first, second in drawn:
        assert first is not None and second is not None
        assert first.sum() == 6 and second.sum() == 5 and not (first & second).any()
    assert np.array_equal(drawn[0], drawn[1])  # type: ignore[arg-type]
    assert not np.array_equal(drawn[0], drawn[2])  # type: ignore[arg-type]


def test_two_sources_of_one_size_do_not_leave_out_the_same_samples(tmp_path: Path) -> None:
    pair = [write_dataset(tmp_path / name, [30] * 40) for name in ("a", "b")]
    mask = Mixture(pair, (0.5, 0.5), seed=0).included(0)
    assert mask is not None and not np.array_equal(mask[:40], mask[40:])


def test_a_copy_is_the_same_sample_with_other_anchors(sources: list[Dataset]) -> None:
    mixture = Mixture(sources[:1], (2.0,), seed=0)
    assert len(mixture) == 2 * SIZES[0] and mixture.included(0) is None
    bucket = Bucket(1, 128, 4, 4, 16)
    longest = int(np.argmax(sources[0].eligible_counts))
    anchors = []
    for i in (longest, longest + SIZES[0]):
        sample = mixture.sample(i)
        assert sample.sample_id == i and sample.input_ids.equal(sources[0].sample(longest).input_ids)
        specs = batch_specs(bucket, num_taps=3, hidden_size=8, dtype=sample.hidden_states.dtype, with_last_hidden=False)
        buffers = {spec.name: sample.hidden_states.new_zeros(spec.shape, dtype=spec.dtype) for spec in specs}
        fill_row(buffers, 0, [sample], bucket=bucket, seed=0, epoch=0)
        anchors.append(buffers["anchor_positions"].tolist())
    assert anchors[0] != anchors[1]


def test_ids_lengths_and_pieces_are_those_of_the_source(sources: list[Dataset]) -> None:
    mixture = Mixture(sources, (1, 2, 0.5), seed=0)
    for i in range(len(mixture)):
        folder, own = mixture.origin(i)
        source = next(source for source in sources if source.path == folder)
        assert mixture.lengths[i] == source.lengths[own]
        assert mixture.eligible_counts[i] == source.eligible_counts[own]
        assert mixture.sample(i, 2, 9).hidden_states.equal(source.sample(own, 2, 9).hidden_states)
    assert [mixture.origin(i)[1] for i in range(SIZES[0] + 2 * SIZES[1] + SIZES[2])] == [
        *range(SIZES[0]),
        *range(SIZES[1]),
        *range(SIZES[1]),
        *range(SIZES[2]),
    ]
    for outside in (-1, len(mixture)):
        with pytest.raises(IndexError, match="expected a sample in 0..29, found"):
            mixture.sample(outside)


def test_messages_name_the_folder_and_the_samples_own_id(tmp_path: Path) -> None:
    good = write_dataset(tmp_path / "good", [30, 40])
    bad = write_dataset(tmp_path / "bad", [30, 40, 50], nonfinite=(1,))
    mixture = Mixture([good, bad], (1, 2), seed=0)
    sample = mixture.sample(6)
    bucket = Bucket(1, 128, 32, 4)
    specs = batch_specs(bucket, num_taps=3, hidden_size=8, dtype=sample.hidden_states.dtype, with_last_hidden=False)
    buffers = {spec.name: sample.hidden_states.new_zeros(spec.shape, dtype=spec.dtype) for spec in specs}
    with pytest.raises(NonFiniteSample, match=f"NaN or infinity in sample 1 of {bad.path}. Extract"):
        fill_row(buffers, 0, [sample], bucket=bucket, seed=0, epoch=0)


def test_the_digest_knows_content_weights_and_order(sources: list[Dataset], tmp_path: Path) -> None:
    with writer(tmp_path / "other") as out:
        for index in range(SIZES[0]):
            sample = random_sample(int(sources[0].lengths[index]), index + 50)
            del sample["last_hidden"]
            out.add(**sample)
    other = Dataset(tmp_path / "other")
    a, b = sources[:2]
    mixtures = [
        Mixture(chosen, weights, seed=0)
        for chosen, weights in (
            ([a, b], (1, 0.5)),
            ([b, a], (0.5, 1)),
            ([other, b], (1, 0.5)),
            ([a, b], (1, 0.6)),
            ([a, b], (0.9, 0.5)),
        )
    ]
    assert len({mixture.digest for mixture in mixtures}) == len(mixtures)
    assert Mixture([a, b], (1.0, 0.5), seed=9).digest == mixtures[0].digest


def test_a_weight_for_each_source(sources: list[Dataset]) -> None:
    for weights in ((1.0,), (1.0, 0.0), (1.0, -1.0)):
        with pytest.raises(ValueError, match="expected a positive weight for each of 2 sources, found"):
            Mixture(sources[:2], weights, seed=0)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_steps_are_counted_as_they_are_taken_from_any_place(sources: list[Dataset], accumulation: int) -> None:
    mixture = Mixture(sources, (0.7, 1.4, 0.5), seed=0)
    plan = BatchPlan(
        mixture.lengths, [Bucket(2, 64, 32, 4, 64), Bucket(1, 128, 32, 4, 64)], seed=0, included=mixture.included
    )
    start = beginning(mixture, plan)
    total = count_steps(plan, start=start, epochs=4, accumulation=accumulation)
    steps = list(training_steps(plan, start=start, total_steps=total, accumulation=accumulation))
    assert len(steps) == total and {step[0].epoch for step in steps} == {0, 1, 2, 3}
    assert next(training_steps(plan, start=start, total_steps=total + 1, accumulation=1))[0].epoch == 0
    for done in range(0, total, 3):
        epoch = steps[done][0].epoch
        consumed = [key for step in steps[:done] if step[0].epoch == epoch for batch in step for key in batch.keys]
        here = Position(done, epoch, tuple(consumed), start.data)
        assert count_steps(plan, start=here, epochs=4, accumulation=accumulation) == total
        assert list(training_steps(plan, start=here, total_steps=total, accumulation=accumulation)) == steps[done:]


def test_epochs_without_end_are_counted_at_once(tmp_path: Path) -> None:
    data = Dataset(write_dataset(tmp_path / "one", [30, 40, 100]).path)
    plan = BatchPlan(data.lengths, [Bucket(1, 128, 32, 4)], seed=0)
    arguments: dict[str, Any] = {"start": beginning(data, plan), "accumulation": 2}
    assert count_steps(plan, epochs=2**63 - 1, **arguments) == 2 * (2**63 - 1)
    assert count_steps(plan, epochs=2**63 - 1, max_steps=7, **arguments) == 7
    assert count_steps(plan, epochs=1, **arguments) == 2


def test_an_epoch_may_be_empty(tmp_path: Path) -> None:
    mixture = Mixture([write_dataset(tmp_path / "one", [30])], (0.5,), seed=0)
    for blocks in (None, np.array([8])):
        plan = BatchPlan(mixture.lengths, [Bucket(1, 128, 32, 4)], seed=0, blocks=blocks, included=mixture.included)
        assert [plan.batch_count(epoch) for epoch in range(4)] == [1, 0, 1, 0]
        start = beginning(mixture, plan)
        assert count_steps(plan, start=start, epochs=4, accumulation=1) == 2
        taken = training_steps(plan, start=start, total_steps=2, accumulation=1)
        assert [step[0].epoch for step in taken] == [0, 2]


@pytest.mark.parametrize("packing", ["false", "true"])
def test_buckets_are_planned_for_an_epoch_and_hold_all_others(tmp_path: Path, packing: str) -> None:
    lengths = np.random.default_rng(1).integers(130, 500, 60).tolist()
    short, long = write_dataset(tmp_path / "short", [40] * 30), write_dataset(tmp_path / "long", [*lengths, 900])
    mixture = Mixture([short, long], (1, 0.1), seed=0)
    settings = load_settings(
        None, ["model.block_size=4", "buckets.num_anchors=32", "buckets.max_rows=4", f"buckets.packing={packing}"]
    )
    config = small_config()
    plan = make_plan(settings, mixture, config, torch.device("cpu"))
    batch_plan = make_batch_plan(settings, mixture, plan.buckets)
    assert not batch_plan.too_long and plan.buckets[-1].S >= 900
    batches = batch_plan.epoch(0)
    assert sum(plan.samples) == 30 + 7 and sum(plan.batches) == len(batches)
    assert sum(plan.useful_tokens) == sum(batch.useful_tokens for batch in batches)
    assert 0 <= plan.idle_fraction < 1 and 0 < plan.padding_fraction < 1
    for epoch in range(12):
        for batch in batch_plan.epoch(epoch):
            for row in batch.rows:
                assert sum(document.stop - document.start for document in row) <= batch.bucket.S
