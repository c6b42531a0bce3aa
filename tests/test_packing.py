"""Several documents in a row: which go together, what lies in the buffers, and that training cannot tell."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffers import packing
from buffers.anchors import eligible_positions, sample_anchors
from buffers.arena import Arena, packed_size
from buffers.batching import Batch, BatchPlan, Document
from buffers.dataset import Sample
from buffers.filling import batch_specs, clear_row, fill_row
from buffers.packing import first_fit
from buffers.shapes import Bucket
from buffers.staging import InputPipeline
from engine.drafter_config import FULL, SLIDING, DrafterConfig
from tests.dataset_helpers import write_dataset
from tests.drafter_helpers import (
    assert_close,
    assert_same_bits,
    make_batch,
    make_step,
    objective,
    random_sample,
    random_target,
    small_config,
)

pytestmark = pytest.mark.usefixtures("one_thread")

TILE = 8
BUCKETS = (Bucket(3, 32, 12, 4, TILE), Bucket(2, 96, 24, 4, TILE))
LENGTHS = np.random.default_rng(0).integers(1, 97, 150)
BLOCKS = np.random.default_rng(1).integers(0, 20, 150)


def packed_plan(seed: int = 4, **changes: object) -> BatchPlan:
    return BatchPlan(LENGTHS, BUCKETS, seed=seed, blocks=BLOCKS, **changes)  # type: ignore[arg-type]


@pytest.fixture
def few_open_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows close while documents are left that would fit."""
    monkeypatch.setattr(packing, "OPEN_ROWS", 2)


def test_first_fit_by_hand() -> None:
    buckets = (Bucket(1, 16, 4, 4, TILE), Bucket(1, 32, 6, 4, TILE))
    lengths, blocks = np.array([10, 20, 8, 6, 12, 4, 2]), np.array([4, 3, 1, 2, 0, 2, 1])
    rows, bucket_of = first_fit(lengths, blocks, np.array([0, 1, 0, 0, 0, 0, 0]), buckets)
    # 10 fills the blocks of row 0, so 8 and 4 go to the rest of row 1 (20 + 8 + 4) and 6 to a row of its own; 12 wants no
    # block but finds no place for its tokens; 4 finds two blocks in row 1; the last 2 tokens have a block in row 2 only.
    assert rows.tolist() == [0, 1, 1, 2, 3, 1, 2]
    assert bucket_of.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_every_document_goes_once_into_a_row_that_has_room(seed: int) -> None:
    for epoch in range(2):
        batches = packed_plan(seed).epoch(epoch)
        assert sorted(i for batch in batches for i in batch.sample_ids) == list(range(len(LENGTHS)))
        for batch in batches:
            assert 0 < len(batch.rows) <= batch.bucket.B
            for row in batch.rows:
                assert sum(d.stop - d.start for d in row) <= batch.bucket.S
                assert sum(d.max_blocks for d in row) <= batch.bucket.N
                # A row is of the bucket of the document that opened it.
                assert batch.bucket == next(b for b in BUCKETS if row[0].stop <= b.S)
                for d in row:
                    assert (d.start, d.stop, d.piece) == (0, LENGTHS[d.sample_id], 0)
                    home = next(b for b in BUCKETS if d.stop <= b.S)
                    assert d.max_blocks == min(BLOCKS[d.sample_id], d.stop - 1, home.N)
        assert sum(len(row) > 1 for batch in batches for row in batch.rows) > 10


def test_packed_rows_are_fewer() -> None:
    rows = sum(len(batch.rows) for batch in packed_plan().epoch(0))
    assert rows < 0.8 * len(LENGTHS)


def test_the_order_is_given_by_seed_and_epoch_alone() -> None:
    plan = packed_plan()
    first = plan.epoch(2)
    plan.epoch(7)
    assert plan.epoch(2) == first
    assert packed_plan().epoch(2) == first
    assert plan.epoch(3) != first
    assert packed_plan(seed=5).epoch(2) != first
    assert [plan.batch_count(epoch) for epoch in range(4)] == [len(plan.epoch(epoch)) for epoch in range(4)]


@pytest.mark.parametrize("open_rows", [1, 2, 32])
@pytest.mark.parametrize("too_long", ["truncate", "split"])
def test_after_any_number_of_batches_the_rest_is_the_same(
    monkeypatch: pytest.MonkeyPatch, open_rows: int, too_long: str
) -> None:
    monkeypatch.setattr(packing, "OPEN_ROWS", open_rows)
    plan = packed_plan(too_long=too_long, longest=80)
    whole = plan.epoch(1)
    for done in range(len(whole) + 1):
        assert plan.epoch(1, {key for batch in whole[:done] for key in batch.keys}) == whole[done:]


@pytest.mark.usefixtures("few_open_rows")
def test_after_a_change_of_buckets_or_of_packing_what_is_left_comes_once() -> None:
    consumed = {key for batch in packed_plan().epoch(0)[:9] for key in batch.keys}
    left = sorted(set(range(len(LENGTHS))) - {i for i, _ in consumed})
    unpacked = BatchPlan(LENGTHS, BUCKETS, seed=4)
    others = BatchPlan(LENGTHS, [Bucket(1, 128, 40, 4, TILE)], seed=4, blocks=BLOCKS)
    for plan in (unpacked, others):
        assert sorted(i for batch in plan.epoch(0, consumed) for i in batch.sample_ids) == left


def test_samples_longer_than_the_longest_document_are_too_long_though_a_row_would_hold_them() -> None:
    lengths = np.array([40, 90, 120])
    blocks = np.array([9, 9, 9])
    plan = BatchPlan(lengths, BUCKETS, seed=0, blocks=blocks, longest=48, too_long="split")
    assert (plan.longest, plan.too_long) == (48, [(1, 90), (2, 120)])
    pieces = sorted((d.sample_id, d.start, d.stop, d.piece) for batch in plan.epoch(0) for d in batch.documents)
    assert pieces == [(0, 0, 40, 0), (1, 0, 48, 0), (1, 48, 90, 1), (2, 0, 48, 0), (2, 48, 96, 1), (2, 96, 120, 2)]


def filled(
    config: DrafterConfig, bucket: Bucket, rows: Sequence[Sequence[Sample]], max_blocks: int = 0
) -> dict[str, Tensor]:
    """A batch with these rows of documents, the buffers poisoned before."""
    specs = batch_specs(
        bucket, num_taps=config.num_taps, hidden_size=config.hidden_size, dtype=torch.float32, with_last_hidden=True
    )
    views = Arena("batch", packed_size(specs), "cpu", poison=True).views(specs)
    for b, row in enumerate(rows):
        fill_row(views, b, row, bucket=bucket, seed=0, epoch=0, max_blocks=[max_blocks] * len(row))
    for b in range(len(rows), bucket.B):
        clear_row(views, b)
    return views


def test_a_packed_row_holds_its_documents_one_after_the_other() -> None:
    config, bucket = small_config(), Bucket(2, 64, 24, 4, TILE)
    samples = [random_sample(config, length, seed) for seed, length in enumerate((20, 1, 30))]
    batch = filled(config, bucket, [samples], max_blocks=9)
    assert batch["row_lengths"].tolist() == [51, 0]
    assert batch["position_ids"][0].tolist() == [*range(20), 0, *range(30), *[0] * 13]
    assert torch.equal(batch["input_ids"][0, :51], torch.cat([s.input_ids for s in samples]))
    assert torch.equal(batch["target_hidden"][0, 21:51], samples[2].hidden_states)
    assert not batch["target_hidden"][0, 51:].any() and not batch["last_hidden"][0, 51:].any()

    anchors: list[int] = []
    for sample, start in zip(samples, (0, 20, 21), strict=True):
        # As many as it would have in a row of 9 blocks, and the same ones.
        alone, keep = sample_anchors(
            eligible_positions(sample.loss_mask.numpy()), 9, seed=0, epoch=0, sample_id=sample.sample_id
        )
        anchors += [start + int(a) for a in alone[keep > 0]]
    assert len(anchors) == 18 and anchors == sorted(anchors)
    assert batch["anchor_positions"][0].tolist() == [*anchors, *[0] * 6]
    assert batch["block_keep_mask"][0].tolist() == [1] * 18 + [0] * 6
    assert batch["context_start"][0].tolist() == [0] * 9 + [21] * 9 + [0] * 6
    assert batch["context_end"][0].tolist() == [20] * 9 + [51] * 9 + [0] * 6


def test_a_short_document_beside_a_long_one_keeps_its_share() -> None:
    config, bucket = small_config(), Bucket(1, 2304, 704, 4, TILE)
    long, short = random_sample(config, 2048, 0), random_sample(config, 187, 1)
    batch = filled(config, bucket, [[long, short]], max_blocks=512)
    documents = batch["context_start"][0][batch["block_keep_mask"][0] > 0]
    assert [(documents == start).sum().item() for start in (0, 2048)] == [512, 186]


def test_more_than_a_row_holds_is_refused() -> None:
    config, bucket = small_config(), Bucket(1, 32, 12, 4, TILE)
    samples = [random_sample(config, 16, seed) for seed in (3, 4)]
    with pytest.raises(ValueError, match="at most 12 blocks for bucket 1x32x12, found 20 up to sample 4. Lower max_bl"):
        filled(config, bucket, [samples], max_blocks=10)
    with pytest.raises(ValueError, match="at most 32 tokens for bucket 1x32x12, found 48 in sample 3, 4, 3"):
        filled(config, bucket, [[*samples, samples[0]]], max_blocks=2)


def test_a_row_of_one_document_is_the_unpacked_row() -> None:
    config, bucket = small_config(), Bucket(2, 32, 16, 4, TILE)
    samples = [random_sample(config, 20, 0), random_sample(config, 32, 1)]
    assert_same_bits(filled(config, bucket, [[s] for s in samples]), make_batch(config, bucket, samples))
    assert_same_bits(filled(config, bucket, [[s] for s in samples], 16), make_batch(config, bucket, samples))


def documents(config: DrafterConfig) -> list[Sample]:
    """Fully supervised, with holes, without a place for a block, of one token, and two more."""
    holes = (torch.arange(25) % 5 > 0).to(torch.uint8)
    none = torch.zeros(9, dtype=torch.uint8)
    return [
        random_sample(config, 18, 0),
        random_sample(config, 25, 1, holes),
        random_sample(config, 9, 2, none),
        random_sample(config, 1, 3),
        random_sample(config, 12, 4),
        random_sample(config, 23, 5),
    ]


@pytest.mark.parametrize("weighting", ["decay", "uniform", "dpace"])
@pytest.mark.parametrize("layer_types", [(FULL, FULL), (FULL, SLIDING)])
def test_packed_documents_train_as_they_would_alone(layer_types: tuple[str, ...], weighting: str) -> None:
    config = small_config(layer_types=layer_types, sliding_window=12 if SLIDING in layer_types else None)
    step = make_step(config, random_target(config), objective(weighting, kl=0.2))
    samples = documents(config)
    alone = [make_batch(config, Bucket(1, 32, 8, 4, TILE), [sample]) for sample in samples]
    expected = step.outcome(*alone)
    if weighting == "dpace":
        assert expected["denominator"] == 4
    packed = filled(config, Bucket(3, 64, 20, 4, TILE), [samples[:4], samples[4:]], max_blocks=8)
    assert sum(int(batch["block_keep_mask"].sum()) for batch in alone) == packed["block_keep_mask"].sum() == 32
    found = step.outcome(packed)
    for outcome in (found, expected):
        outcome["metrics"] = outcome["metrics"][:-3]  # slot_tokens and the counts of batches
    assert_close(found, expected, 2e-6)


@pytest.mark.parametrize("layer_types", [(FULL, FULL), (FULL, SLIDING), (SLIDING, SLIDING)])
def test_what_lies_in_the_padding_of_a_packed_row_never_matters(layer_types: tuple[str, ...]) -> None:
    config = small_config(layer_types=layer_types, sliding_window=12 if SLIDING in layer_types else None)
    step = make_step(config, random_target(config), objective("dpace", kl=0.3))
    samples = documents(config)
    batch = filled(config, Bucket(3, 64, 20, 4, TILE), [samples[:4], samples[4:]], max_blocks=8)
    expected = step.outcome(batch)
    assert expected["loss"].isfinite() and expected["denominator"] > 0
    padding = torch.arange(64) >= batch["row_lengths"][:, None]
    for name in ("target_hidden", "last_hidden"):
        batch[name][padding] = float("nan")
    for name in ("input_ids", "position_ids"):
        batch[name][padding] = torch.randint(-(2**31), 2**31 - 1, (int(padding.sum()),), dtype=torch.int32)
    batch["loss_mask"][padding] = 1
    unused = batch["block_keep_mask"] == 0
    for name in ("anchor_positions", "context_start", "context_end"):
        batch[name][unused] = torch.randint(0, 64, (int(unused.sum()),), dtype=torch.int32)
    assert_same_bits(step.outcome(batch), expected)


def test_a_block_depends_on_its_own_document_alone() -> None:
    config = small_config()
    step = make_step(config, random_target(config))
    samples = documents(config)
    bucket = Bucket(1, 96, 48, 4, TILE)
    changed = [random_sample(config, len(s.input_ids), 10 + i, s.loss_mask) for i, s in enumerate(samples)]

    def blocks(row: Sequence[Sample]) -> Tensor:
        batch = filled(config, bucket, [row], max_blocks=8)
        with torch.no_grad():
            return step.parts.drafter(batch)[0][batch["block_keep_mask"][0] > 0]

    before = blocks(samples)
    starts = filled(config, bucket, [samples], max_blocks=8)["context_start"][0, : len(before)]
    offsets = list(itertools.accumulate((len(s.input_ids) for s in samples), initial=0))
    for index in range(len(samples)):
        # Its anchors come from its sample id, which it keeps.
        other = changed[index]
        row = list(samples)
        row[index] = Sample(
            samples[index].sample_id, other.input_ids, other.loss_mask, other.hidden_states, other.last_hidden
        )
        after = blocks(row)
        same = (after == before).flatten(1).all(-1)
        assert torch.equal(same, starts != offsets[index])


def test_a_document_that_is_not_finite_leaves_its_row_alone(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data", [10, 12, 14, 9], last_hidden=False)
    bad = {1, 3}
    sample = dataset.sample

    def damaged(i: int, start: int = 0, stop: int | None = None) -> Sample:
        found = sample(i, start, stop)
        if i not in bad:
            return found
        hidden = found.hidden_states.clone()
        hidden[3, 2] = float("nan")
        return Sample(i, found.input_ids, found.loss_mask, hidden, None)

    dataset.sample = damaged  # type: ignore[method-assign, assignment]
    bucket = BUCKETS[1]

    def row(*ids: int) -> tuple[Document, ...]:
        return tuple(Document(i, 0, int(dataset.lengths[i]), 0, 6) for i in ids)

    options = {"seed": 0, "device": "cpu", "dtype": torch.float32, "poison": True}
    with InputPipeline(dataset, [bucket], on_nonfinite="skip", **options) as inputs:  # type: ignore[arg-type]
        inputs.load(Batch(bucket, (row(0, 1, 2, 3), row(3)), 0))
        found = {name: tensor.clone() for name, tensor in inputs.inputs(bucket).items()}
        assert inputs.skipped == [1, 3]
        inputs.load(Batch(bucket, (row(0, 2),), 0))
        assert_same_bits(found, inputs.inputs(bucket))
    with InputPipeline(dataset, [bucket], **options) as inputs, pytest.raises(ValueError, match="in sample 1. Extract"):  # type: ignore[arg-type]
        inputs.load(Batch(bucket, (row(0, 1, 2, 3),), 0))


def test_many_documents_are_packed_in_one_walk() -> None:
    generator = np.random.default_rng(0)
    lengths: NDArray[np.int64] = np.minimum(np.exp(generator.normal(6.5, 0.7, 200_000)).astype(np.int64) + 1, 4096)
    bucket = Bucket(1, 8192, 1536, 16)
    plan = BatchPlan(lengths, [bucket], seed=0, blocks=np.minimum(lengths // 4, 512))
    batches = plan.epoch(0)
    assert sum(batch.useful_tokens for batch in batches) == lengths.sum()
    used = sum(d.max_blocks for batch in batches for d in batch.documents)
    assert used > 0.9 * len(batches) * bucket.N
