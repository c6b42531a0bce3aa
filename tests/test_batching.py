from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from buffers.anchors import eligible_positions, sample_anchors
from buffers.arena import Arena, packed_size
from buffers.batching import Batch, BatchPlan
from buffers.dataset import Sample
from buffers.filling import NonFiniteSample, all_finite, batch_specs, clear_row, fill_row
from buffers.shapes import Bucket
from tests.dataset_helpers import HIDDEN_SIZE, TAPS, random_sample, write_dataset

TILE = 8
BUCKETS = tuple(Bucket(B, S, N, 4, TILE) for B, S, N in ((5, 16, 4), (3, 32, 8), (2, 56, 12)))
LENGTHS = np.random.default_rng(0).integers(1, 57, 113)


def smallest_bucket(length: int) -> Bucket:
    return min((bucket for bucket in BUCKETS if length <= bucket.S), key=lambda bucket: bucket.S)


def test_every_sample_goes_once_into_the_smallest_bucket_that_holds_it() -> None:
    for epoch in range(3):
        batches = BatchPlan(LENGTHS, BUCKETS, seed=4).epoch(epoch)
        assert sorted(i for batch in batches for i in batch.sample_ids) == list(range(len(LENGTHS)))
        for batch in batches:
            assert batch.epoch == epoch
            assert 0 < len(batch.rows) <= batch.bucket.B
            for row in batch.documents:
                assert (row.start, row.stop, row.piece) == (0, LENGTHS[row.sample_id], 0)
                assert smallest_bucket(row.stop) == batch.bucket


def test_only_the_last_batch_of_a_bucket_is_not_full() -> None:
    batches = BatchPlan(LENGTHS, BUCKETS, seed=4).epoch(0)
    short = [place for place, batch in enumerate(batches) if len(batch.rows) < batch.bucket.B]
    assert len(short) <= len(BUCKETS)
    assert short == list(range(len(batches) - len(short), len(batches)))


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    first = BatchPlan(LENGTHS, BUCKETS, seed=4).epoch(2)
    plan = BatchPlan(LENGTHS, BUCKETS, seed=4)
    plan.epoch(7)
    assert plan.epoch(2) == first
    assert plan.epoch(3) != first
    assert BatchPlan(LENGTHS, BUCKETS, seed=5).epoch(2) != first


@pytest.mark.parametrize("form", ["ids", "flags", "keys"])
def test_after_any_number_of_batches_the_rest_is_the_same(form: str) -> None:
    plan = BatchPlan(LENGTHS, BUCKETS, seed=4)
    whole = plan.epoch(1)
    for done in range(len(whole) + 1):
        ids = {i for batch in whole[:done] for i in batch.sample_ids}
        flags = np.zeros(len(LENGTHS), dtype=bool)
        flags[list(ids)] = True
        keys = {key for batch in whole[:done] for key in batch.keys}
        consumed = {"ids": ids, "flags": flags, "keys": keys}[form]
        assert plan.epoch(1, consumed) == whole[done:]  # type: ignore[arg-type]


def test_after_a_change_of_plan_what_is_left_still_comes_once() -> None:
    consumed = {i for batch in BatchPlan(LENGTHS, BUCKETS, seed=4).epoch(0)[:9] for i in batch.sample_ids}
    others = (Bucket(2, 24, 4, 4, TILE), Bucket(4, 64, 8, 4, TILE))
    rest = BatchPlan(LENGTHS, others, seed=4).epoch(0, consumed)
    assert sorted(i for batch in rest for i in batch.sample_ids) == sorted(set(range(len(LENGTHS))) - consumed)


def test_consumed_flags_of_another_dataset_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected consumed to be bool\[113\], found bool\[112\]"):
        BatchPlan(LENGTHS, BUCKETS, seed=4).epoch(0, np.zeros(112, dtype=bool))


LONG = np.array([10, 57, 30, 150, 56, 112])


def test_samples_that_are_too_long_are_skipped_and_listed() -> None:
    plan = BatchPlan(LONG, BUCKETS, too_long="skip", seed=0)
    assert plan.too_long == [(1, 57), (3, 150), (5, 112)]
    assert plan.document_counts == (1, 1, 1)
    assert sorted(i for batch in plan.epoch(0) for i in batch.sample_ids) == [0, 2, 4]


def test_samples_that_are_too_long_are_truncated_and_listed() -> None:
    plan = BatchPlan(LONG, BUCKETS, too_long="truncate", seed=0)
    assert plan.too_long == [(1, 57), (3, 150), (5, 112)]
    rows = sorted((row.sample_id, row.start, row.stop) for batch in plan.epoch(0) for row in batch.documents)
    assert rows == [(0, 0, 10), (1, 0, 56), (2, 0, 30), (3, 0, 56), (4, 0, 56), (5, 0, 56)]


def test_samples_that_are_too_long_are_split_and_every_token_comes_once() -> None:
    plan = BatchPlan(LONG, BUCKETS, too_long="split", seed=0)
    assert plan.too_long == [(1, 57), (3, 150), (5, 112)]
    batches = plan.epoch(0)
    seen = [np.zeros(length, dtype=int) for length in LONG]
    for batch in batches:
        for row in batch.documents:
            seen[row.sample_id][row.start : row.stop] += 1
            assert smallest_bucket(row.stop - row.start) == batch.bucket
    assert all((count == 1).all() for count in seen)
    pieces = Counter(i for batch in batches for i in batch.sample_ids)
    assert pieces == {0: 1, 1: 2, 2: 1, 3: 3, 4: 1, 5: 2}


def test_pieces_of_a_split_sample_are_consumed_one_by_one() -> None:
    plan = BatchPlan(LONG, BUCKETS, too_long="split", seed=0)
    whole = plan.epoch(0)
    for done in range(len(whole)):
        consumed = [key for batch in whole[:done] for key in batch.keys]
        assert plan.epoch(0, consumed) == whole[done:]
    left = plan.epoch(0, {3})
    assert 3 not in {i for batch in left for i in batch.sample_ids}


def test_plans_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="one sample of at most 56 tokens, found 1 samples, 1 of them longer"):
        BatchPlan(np.array([57]), BUCKETS, seed=0)
    with pytest.raises(ValueError, match="one sample of at most 56 tokens, found 0 samples"):
        BatchPlan(np.array([], dtype=np.int64), BUCKETS, seed=0)
    with pytest.raises(ValueError, match="expected too_long to be skip, truncate or split, found 'drop'"):
        BatchPlan(LONG, BUCKETS, too_long="drop", seed=0)  # type: ignore[arg-type]


def buffers_for(bucket: Bucket, *, dtype: torch.dtype = torch.bfloat16, last_hidden: bool = True) -> dict[str, Tensor]:
    """Fresh buffers that hold 0xFF everywhere: NaN, -1 and 255."""
    specs = batch_specs(bucket, num_taps=len(TAPS), hidden_size=HIDDEN_SIZE, dtype=dtype, with_last_hidden=last_hidden)
    return Arena("test", packed_size(specs), "cpu", poison=True).views(specs)


def sample_of(length: int, index: int = 0) -> Sample:
    return Sample(index, **random_sample(length, index), label="")


def raw(buffer: Tensor) -> bytes:
    return buffer.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_the_buffers_come_in_the_agreed_order_with_the_agreed_shapes() -> None:
    specs = batch_specs(BUCKETS[1], num_taps=3, hidden_size=8, dtype=torch.float32, with_last_hidden=True)
    assert [(spec.name, spec.shape, spec.dtype) for spec in specs] == [
        ("target_hidden", (3, 32, 24), torch.float32),
        ("last_hidden", (3, 32, 8), torch.float32),
        ("input_ids", (3, 32), torch.int32),
        ("position_ids", (3, 32), torch.int32),
        ("loss_mask", (3, 32), torch.uint8),
        ("row_lengths", (3,), torch.int32),
        ("anchor_positions", (3, 8), torch.int32),
        ("block_keep_mask", (3, 8), torch.uint8),
        ("context_start", (3, 8), torch.int32),
        ("context_end", (3, 8), torch.int32),
    ]
    without = batch_specs(BUCKETS[1], num_taps=3, hidden_size=8, dtype=torch.float32, with_last_hidden=False)
    assert without == (specs[0], *specs[2:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [1, 2, 15, 31, 32])
def test_a_filled_row_holds_the_sample_and_zero_bytes_behind_it(length: int, dtype: torch.dtype) -> None:
    bucket = BUCKETS[1]
    buffers, sample = buffers_for(bucket, dtype=dtype), sample_of(length, index=300)
    fill_row(buffers, 1, [sample], bucket=bucket, seed=6, epoch=2, pieces=[1])

    assert sample.last_hidden is not None
    positions = torch.arange(length, dtype=torch.int32)
    for name, expected in (
        ("target_hidden", sample.hidden_states.to(dtype)),
        ("last_hidden", sample.last_hidden.to(dtype)),
        ("input_ids", sample.input_ids),
        ("position_ids", positions),
        ("loss_mask", sample.loss_mask),
    ):
        row = buffers[name][1]
        assert torch.equal(row[:length], expected)
        assert not any(raw(row[length:]))
    anchors, keep = sample_anchors(
        eligible_positions(sample.loss_mask.numpy()), bucket.N, seed=6, epoch=2, sample_id=300, piece=1
    )
    assert buffers["row_lengths"][1] == length
    assert buffers["anchor_positions"][1].tolist() == anchors.tolist()
    assert buffers["block_keep_mask"][1].tolist() == keep.tolist()
    assert buffers["context_start"][1].tolist() == [0] * bucket.N
    assert buffers["context_end"][1].tolist() == [length * kept for kept in keep.tolist()]
    for buffer in buffers.values():
        assert set(raw(buffer[0])) | set(raw(buffer[2])) == {0xFF}


def test_context_ends_beyond_a_byte_are_whole() -> None:
    bucket = Bucket(1, 512, 4, 4, TILE)
    buffers = buffers_for(bucket)
    fill_row(buffers, 0, [sample_of(300)], bucket=bucket, seed=0, epoch=0)
    assert buffers["context_end"].tolist() == [[300] * 4]


def test_every_eligible_count_from_none_to_n_fits_one_bucket_without_a_new_shape() -> None:
    bucket = Bucket(1, 32, 8, 4, TILE)
    buffers = buffers_for(bucket)
    shapes = {name: (buffer.shape, buffer.data_ptr()) for name, buffer in buffers.items()}
    for count in range(bucket.N + 1):
        sample = sample_of(32)
        sample.loss_mask.zero_()[: count + 1 if count else 0] = 1
        fill_row(buffers, 0, [sample], bucket=bucket, seed=0, epoch=0)
        assert buffers["anchor_positions"].tolist() == [[*range(count), *[0] * (bucket.N - count)]]
        assert buffers["block_keep_mask"].tolist() == [[1] * count + [0] * (bucket.N - count)]
    assert {name: (buffer.shape, buffer.data_ptr()) for name, buffer in buffers.items()} == shapes


@pytest.mark.parametrize("last_hidden", [False, True])
def test_what_a_buffer_held_before_leaves_no_trace(last_hidden: bool) -> None:
    """Bytes written after poison and after a longer batch are the bytes written into zeros."""
    bucket = BUCKETS[2]

    def written(before: str) -> list[bytes]:
        buffers = buffers_for(bucket, last_hidden=last_hidden)
        for buffer in buffers.values():
            if before == "zeros":
                buffer.zero_()
        if before == "longer":
            for b in range(bucket.B):
                fill_row(buffers, b, [sample_of(56, 40 + b)], bucket=bucket, seed=0, epoch=0)
        fill_row(buffers, 0, [sample_of(9, 7)], bucket=bucket, seed=0, epoch=0)
        clear_row(buffers, 1)
        return [raw(buffer) for buffer in buffers.values()]

    assert written("poison") == written("zeros")
    assert written("longer") == written("zeros")


def test_a_cleared_row_is_zero_in_every_byte() -> None:
    buffers = buffers_for(BUCKETS[0])
    clear_row(buffers, 3)
    for buffer in buffers.values():
        assert not any(raw(buffer[3]))
        assert set(raw(buffer[2])) == {0xFF}


@pytest.mark.parametrize("name", ["hidden_states", "last_hidden"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_sample_that_is_not_finite_is_named_and_not_written(name: str, value: float) -> None:
    buffers, sample = buffers_for(BUCKETS[1]), sample_of(20, index=17)
    getattr(sample, name)[19, 5] = value
    with pytest.raises(NonFiniteSample, match="found NaN or infinity in sample 17. Extract it again, or set") as raised:
        fill_row(buffers, 0, [sample], bucket=BUCKETS[1], seed=0, epoch=0)
    assert raised.value.sample_id == 17
    assert all(set(raw(buffer)) == {0xFF} for buffer in buffers.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype) -> None:
    values = torch.randn(7, 37).to(dtype)
    assert all_finite(values)
    assert all_finite(torch.full((5, 5), torch.finfo(dtype).max, dtype=dtype))
    for place in range(values.numel()):
        for bad in (float("nan"), float("inf"), -float("inf")):
            damaged = values.clone()
            damaged.view(-1)[place] = bad
            assert not all_finite(damaged)


def test_a_sample_longer_than_the_bucket_is_refused() -> None:
    message = "expected at most 32 tokens for bucket 3x32x8, found 33 in sample 5. Skip, truncate or split it"
    with pytest.raises(ValueError, match=message):
        fill_row(buffers_for(BUCKETS[1]), 0, [sample_of(33, 5)], bucket=BUCKETS[1], seed=0, epoch=0)


def test_a_sample_of_another_width_is_refused_and_not_broadcast() -> None:
    sample = sample_of(4)
    narrow = Sample(3, sample.input_ids, sample.loss_mask, sample.hidden_states[:, :1], sample.last_hidden)
    with pytest.raises(ValueError, match=r"target_hidden of shape \[4, 24\] in sample 3, found \[4, 1\]"):
        fill_row(buffers_for(BUCKETS[0]), 0, [narrow], bucket=BUCKETS[0], seed=0, epoch=0)
    short_mask = Sample(3, sample.input_ids, sample.loss_mask[:1], sample.hidden_states, sample.last_hidden)
    with pytest.raises(ValueError, match=r"loss_mask of shape \[4\] in sample 3, found \[1\]"):
        fill_row(buffers_for(BUCKETS[0]), 0, [short_mask], bucket=BUCKETS[0], seed=0, epoch=0)


def test_a_missing_last_hidden_is_named() -> None:
    sample = sample_of(4)
    without = Sample(3, sample.input_ids, sample.loss_mask, sample.hidden_states, None)
    with pytest.raises(ValueError, match="expected last_hidden in sample 3, found none"):
        fill_row(buffers_for(BUCKETS[0]), 0, [without], bucket=BUCKETS[0], seed=0, epoch=0)


def test_batches_of_a_split_dataset_fill_the_pieces(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, [130, 20], last_hidden=True)
    plan = BatchPlan(dataset.lengths, BUCKETS, too_long="split", seed=0)
    for batch in plan.epoch(0):
        assert isinstance(batch, Batch)
        buffers = buffers_for(batch.bucket)
        for b, row in enumerate(batch.documents):
            sample = dataset.sample(row.sample_id, row.start, row.stop)
            fill_row(buffers, b, [sample], bucket=batch.bucket, seed=0, epoch=0, pieces=[row.piece])
            whole = dataset.sample(row.sample_id).input_ids[row.start : row.stop]
            assert torch.equal(buffers["input_ids"][b, : row.stop - row.start], whole)
            assert buffers["position_ids"][b, : row.stop - row.start].tolist() == list(range(row.stop - row.start))
