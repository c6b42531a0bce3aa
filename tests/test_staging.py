import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from buffers.arena import Arena, arena_table, packed_size
from buffers.batching import Batch, BatchPlan, Document
from buffers.dataset import Dataset, Sample
from buffers.filling import NonFiniteSample, batch_specs, clear_row, fill_row
from buffers.shapes import Bucket
from buffers.staging import InputPipeline, LoaderEnded
from tests.dataset_helpers import HIDDEN_SIZE, TAPS, write_dataset

BUCKETS = tuple(Bucket(B, S, N, 4, 8) for B, S, N in ((5, 16, 4), (3, 32, 8), (2, 56, 12)))
LENGTHS = np.random.default_rng(0).integers(1, 57, 60).tolist()
SEED = 11


def pipeline_for(dataset: Dataset, dtype: torch.dtype = torch.float32, **settings: object) -> InputPipeline:
    return InputPipeline(dataset, BUCKETS, seed=SEED, device="cpu", dtype=dtype, poison=True, **settings)  # type: ignore[arg-type]


def filled_directly(dataset: Dataset, batch: Batch, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The batch's inputs in fresh memory, without pipeline."""
    specs = batch_specs(
        batch.bucket,
        num_taps=len(TAPS),
        hidden_size=HIDDEN_SIZE,
        dtype=dtype,
        with_last_hidden=dataset.info.last_hidden_norm is not None,
    )
    views = Arena("expected", packed_size(specs), "cpu", poison=True).views(specs)
    for b in range(batch.bucket.B):
        clear_row(views, b)
    for b, row in enumerate(batch.documents):
        sample = dataset.sample(row.sample_id, row.start, row.stop)
        fill_row(views, b, [sample], bucket=batch.bucket, seed=SEED, epoch=batch.epoch, pieces=[row.piece])
    return views


def raw(tensor: Tensor) -> Tensor:
    """The tensor's bytes, flat."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_holds(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(raw(found[name]), raw(tensor)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last_hidden", [False, True])
def test_every_batch_arrives_in_order_at_the_same_addresses(
    tmp_path: Path, dtype: torch.dtype, last_hidden: bool
) -> None:
    dataset = write_dataset(tmp_path, LENGTHS, last_hidden=last_hidden)
    plan = BatchPlan(dataset.lengths, BUCKETS, seed=0)
    with pipeline_for(dataset, dtype) as pipeline:
        addresses = {bucket: [t.data_ptr() for t in pipeline.inputs(bucket).values()] for bucket in BUCKETS}
        for epoch in range(2):
            batches = plan.epoch(epoch)
            pipeline.start(batches)
            for expected in batches:
                assert pipeline.next() == expected
                assert_holds(pipeline.inputs(expected.bucket), filled_directly(dataset, expected, dtype))
            assert pipeline.next() is None
            assert pipeline.next() is None
        assert addresses == {bucket: [t.data_ptr() for t in pipeline.inputs(bucket).values()] for bucket in BUCKETS}
        assert pipeline.wait_ms >= 0


def test_no_byte_of_poison_or_of_a_longer_batch_reaches_the_inputs(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, [56, 56, 3], last_hidden=True)
    with pipeline_for(dataset) as pipeline:
        pipeline.load(Batch(BUCKETS[2], ((Document(0, 0, 56),), (Document(1, 0, 56),)), 0))
        short = Batch(BUCKETS[2], ((Document(2, 0, 3),),), 0)
        pipeline.load(short)
        inputs = pipeline.inputs(BUCKETS[2])
        assert_holds(inputs, filled_directly(dataset, short))
        assert not raw(inputs["target_hidden"][0, 3:]).any()
        assert not raw(inputs["target_hidden"][1]).any()


def test_load_passes_a_running_stream_without_disturbing_it(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, LENGTHS)
    batches = BatchPlan(dataset.lengths, BUCKETS, seed=0).epoch(0)
    with pipeline_for(dataset) as pipeline:
        pipeline.start(batches)
        for expected, other in zip(batches, reversed(batches), strict=True):
            assert pipeline.next() == expected
            assert_holds(pipeline.inputs(expected.bucket), filled_directly(dataset, expected))
            pipeline.load(other)
            assert_holds(pipeline.inputs(other.bucket), filled_directly(dataset, other))
        assert pipeline.next() is None


def test_start_drops_what_is_left_of_the_last_start(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, LENGTHS)
    plan = BatchPlan(dataset.lengths, BUCKETS, seed=0)
    with pipeline_for(dataset) as pipeline:
        for epoch in range(5):
            batches = plan.epoch(epoch)
            pipeline.start(batches)
            for expected in batches[: epoch + 1]:
                assert pipeline.next() == expected
                assert_holds(pipeline.inputs(expected.bucket), filled_directly(dataset, expected))
        pipeline.stop()
        with pytest.raises(ValueError, match=r"expected start\(batches\) before next\(\), found no batches under way"):
            pipeline.next()


def test_the_loader_runs_ahead_by_no_more_than_its_slots(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, LENGTHS)
    batches = BatchPlan(dataset.lengths, BUCKETS, seed=0).epoch(0)
    taken: list[Batch] = []

    def watched() -> Iterator[Batch]:
        for batch in batches:
            taken.append(batch)
            yield batch

    with pipeline_for(dataset, slots=2) as pipeline:
        pipeline.start(watched())
        for delivered in range(1, len(batches) + 1):
            assert pipeline.next() is not None
            # Two slots, the batch just delivered, and the one that the loader holds while it waits for a slot.
            assert delivered <= len(taken) <= delivered + 3


def test_a_sample_that_is_not_finite_is_refused_after_the_batches_before_it(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, [10, 12, 9, 14], nonfinite=[2])
    batches = [Batch(BUCKETS[0], ((Document(i, 0, int(dataset.lengths[i])),),), 0) for i in range(4)]
    with pipeline_for(dataset) as pipeline:
        pipeline.start(batches)
        assert [pipeline.next(), pipeline.next()] == batches[:2]
        with pytest.raises(NonFiniteSample, match="found NaN or infinity in sample 2"):
            pipeline.next()
        with pytest.raises(NonFiniteSample, match="sample 2"):
            pipeline.load(batches[2])
        pipeline.start(batches[3:])
        assert pipeline.next() == batches[3]
    assert pipeline.skipped == []


def test_a_sample_that_is_not_finite_is_skipped_and_listed_by_setting(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, [10, 12, 9], nonfinite=[1])
    batch = Batch(BUCKETS[0], tuple((Document(i, 0, int(dataset.lengths[i])),) for i in range(3)), 0)
    with pipeline_for(dataset, on_nonfinite="skip") as pipeline:
        for _ in range(2):
            pipeline.start([batch])
            assert pipeline.next() == batch
            inputs = pipeline.inputs(BUCKETS[0])
            assert inputs["row_lengths"].tolist() == [10, 0, 9, 0, 0]
            assert not any(raw(tensor[1]).any() for tensor in inputs.values())
            assert torch.isfinite(inputs["target_hidden"]).all()
    assert pipeline.skipped == [1]


def test_what_goes_wrong_in_the_loader_is_raised_in_next(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, [10])
    stranger, good = Bucket(1, 8, 2, 4, 8), Batch(BUCKETS[0], ((Document(0, 0, 10),),), 0)

    def broken() -> Iterator[Batch]:
        yield good
        raise OSError("the disk is gone")

    with pipeline_for(dataset) as pipeline:
        for batches, error, message in (
            ([Batch(stranger, (), 0)], ValueError, "expected one of the buckets 5x16x4, 3x32x8, 2x56x12, found 1x8x2"),
            (
                [Batch(BUCKETS[2], ((Document(0, 0, 10),),) * 3, 0)],
                ValueError,
                "at most 2 rows for bucket 2x56x12, found 3",
            ),
            ([Batch(BUCKETS[2], ((Document(4, 0, 10),),), 0)], IndexError, r"expected a sample in 0\.\.0, found 4"),
            ([Batch(BUCKETS[2], ((Document(0, 0, 11),),), 0)], ValueError, "stop <= 10 in sample 0"),
            ([good, Batch(stranger, (), 0)], ValueError, "found 1x8x2"),
            (broken(), OSError, "the disk is gone"),
        ):
            pipeline.start(batches)
            with pytest.raises(error, match=message):
                while pipeline.next() is not None:
                    pass
        with pytest.raises(ValueError, match="found 1x8x2"):
            pipeline.inputs(stranger)


def test_close_ends_the_thread_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, LENGTHS)
    pipeline = pipeline_for(dataset)
    pipeline.start(BatchPlan(dataset.lengths, BUCKETS, seed=0).epoch(0))
    assert pipeline.next() is not None
    assert any(thread.name == "input-loader" for thread in threading.enumerate())
    pipeline.close()
    pipeline.close()
    assert not any(thread.name == "input-loader" for thread in threading.enumerate())


@pytest.mark.parametrize("error", [MemoryError("no more"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_whatever_ends_the_loaders_thread_is_raised_in_next(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = write_dataset(tmp_path, [10, 10])
    batches = [Batch(BUCKETS[0], ((Document(i, 0, 10),),), 0) for i in range(2)]
    sample = dataset.sample

    def dies(i: int, start: int = 0, stop: int | None = None) -> Sample:
        if i:
            raise error
        return sample(i, start, stop)

    monkeypatch.setattr(dataset, "sample", dies)
    with pipeline_for(dataset) as pipeline:
        pipeline.start(batches)
        assert pipeline.next() == batches[0]
        with pytest.raises(Exception) as caught:
            pipeline.next()
    if isinstance(error, Exception):
        assert caught.value is error
    else:
        assert isinstance(caught.value, LoaderEnded) and caught.value.__cause__ is error
        assert f"the loader's thread ended with {error!r}" in str(caught.value)


def test_a_loader_that_is_gone_without_a_word_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = write_dataset(tmp_path, [10])
    monkeypatch.setattr(InputPipeline, "_fill_ahead", lambda self, run, batches: None)
    with pipeline_for(dataset) as pipeline:
        pipeline.start([Batch(BUCKETS[0], ((Document(0, 0, 10),),), 0)])
        with pytest.raises(LoaderEnded, match="the loader's thread is gone"):
            pipeline.next()


def test_last_hidden_is_left_out_on_request_and_missed_when_asked_for(tmp_path: Path) -> None:
    with pipeline_for(write_dataset(tmp_path / "with", [10], last_hidden=True), with_last_hidden=False) as pipeline:
        pipeline.load(Batch(BUCKETS[0], ((Document(0, 0, 10),),), 0))
        assert "last_hidden" not in pipeline.inputs(BUCKETS[0])
    with pytest.raises(ValueError, match="expected last_hidden in the dataset .*, found none"):
        pipeline_for(write_dataset(tmp_path / "without", [10]), with_last_hidden=True)


def test_settings_that_cannot_be_met_are_refused(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, [10])
    with pytest.raises(ValueError, match="expected at least 2 slots, found 1"):
        pipeline_for(dataset, slots=1)
    with pytest.raises(ValueError, match="expected on_nonfinite to be refuse or skip, found 'ignore'"):
        pipeline_for(dataset, on_nonfinite="ignore")


def test_all_memory_of_the_pipeline_is_in_the_table(tmp_path: Path) -> None:
    with pipeline_for(write_dataset(tmp_path, [10])) as pipeline:
        rows = arena_table(pipeline.named_buffers())
    names = [(row.arena, row.name) for row in rows]
    assert ("static inputs 2x56x12", "target_hidden") in names
    assert [name for name in names if name[1] == "bytes"] == [(f"slot {index}", "bytes") for index in range(3)]
