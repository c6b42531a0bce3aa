"""The pipeline's events: with slow and with quick steps, no batch is overwritten before it was read."""

import time

import numpy as np
import pytest
import torch
from torch import Tensor

from buffers.batching import Batch, BatchPlan
from buffers.dataset import Dataset
from buffers.shapes import Bucket
from buffers.staging import InputPipeline, _Filled
from tests.dataset_helpers import write_dataset
from tests.test_staging import SEED, assert_holds, filled_directly

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

# The largest bucket's inputs take more than 2 MiB, so that copies last long enough to overlap.
BUCKETS = (Bucket(32, 128, 64, 4), Bucket(16, 512, 64, 4), Bucket(16, 2048, 64, 4))
# About a millisecond: longer than filling and copying a batch.
SLOW_CYCLES = 2_000_000


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(8), np.log(2048), 700)).astype(int).tolist()
    return write_dataset(tmp_path_factory.mktemp("data"), lengths, last_hidden=True, shard_tokens=50_000)


def fifty_random_batches(dataset: Dataset) -> list[Batch]:
    plan = BatchPlan(dataset.lengths, BUCKETS, seed=3)
    batches = [batch for epoch in range(2) for batch in plan.epoch(epoch)]
    chosen = np.random.default_rng(5).integers(0, len(batches), 50)
    return [batches[place] for place in chosen]


def pipeline_for(dataset: Dataset, slots: int = 3) -> InputPipeline:
    return InputPipeline(dataset, BUCKETS, seed=SEED, device="cuda", dtype=torch.bfloat16, slots=slots, poison=True)


def clones(pipeline: InputPipeline, batch: Batch) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in pipeline.inputs(batch.bucket).items()}


def assert_all_right(dataset: Dataset, batches: list[Batch], found: list[dict[str, Tensor]]) -> None:
    torch.cuda.synchronize()
    assert len(found) == len(batches)
    for batch, tensors in zip(batches, found, strict=True):
        on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
        assert_holds(on_host, filled_directly(dataset, batch, torch.bfloat16))


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("slow", ["never", "always", "sometimes"])
@pytest.mark.parametrize("side_stream", [False, True])
def test_fifty_batches_arrive_whole_however_slow_the_steps_are(
    dataset: Dataset, slots: int, slow: str, side_stream: bool
) -> None:
    batches = fifty_random_batches(dataset)
    assert {batch.bucket for batch in batches} == set(BUCKETS)
    found = []
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    with pipeline_for(dataset, slots) as pipeline, torch.cuda.stream(stream):
        pipeline.start(batches)
        for index, batch in enumerate(batches):
            assert pipeline.next() == batch
            if slow == "always" or (slow == "sometimes" and index % 7 < 3):
                # The step reads late: a copy that does not wait would have overwritten its inputs by then.
                torch.cuda._sleep(SLOW_CYCLES)
            found.append(clones(pipeline, batch))
        assert pipeline.next() is None
    assert_all_right(dataset, batches, found)


def test_a_change_of_stream_between_batches_waits_for_the_steps_on_the_old_one(dataset: Dataset) -> None:
    batches = fifty_random_batches(dataset)
    found = []
    streams = [torch.cuda.Stream() for _ in range(3)]
    with pipeline_for(dataset) as pipeline:
        pipeline.start(batches)
        for index, batch in enumerate(batches):
            with torch.cuda.stream(streams[index % 3]):
                assert pipeline.next() == batch
                torch.cuda._sleep(SLOW_CYCLES)
                found.append(clones(pipeline, batch))
    assert_all_right(dataset, batches, found)


def test_loading_a_batch_in_between_disturbs_nothing(dataset: Dataset) -> None:
    batches = fifty_random_batches(dataset)
    order, found = [], []
    with pipeline_for(dataset) as pipeline:
        pipeline.start(batches)
        for index, batch in enumerate(batches):
            assert pipeline.next() == batch
            torch.cuda._sleep(SLOW_CYCLES)
            order.append(batch)
            found.append(clones(pipeline, batch))
            if index % 5 == 0:
                other = batches[-1 - index]
                pipeline.load(other)
                torch.cuda._sleep(SLOW_CYCLES)
                order.append(other)
                found.append(clones(pipeline, other))
    assert_all_right(dataset, order, found)


def test_a_new_start_in_the_middle_drops_the_rest_and_corrupts_nothing(dataset: Dataset) -> None:
    batches = fifty_random_batches(dataset)
    order, found = [], []
    with pipeline_for(dataset) as pipeline:
        for first in range(0, 50, 10):
            pipeline.start(batches[first:])
            for batch in batches[first : first + 3]:
                assert pipeline.next() == batch
                torch.cuda._sleep(SLOW_CYCLES)
                order.append(batch)
                found.append(clones(pipeline, batch))
    assert_all_right(dataset, order, found)


def test_the_next_batch_is_copied_while_the_step_runs(dataset: Dataset) -> None:
    """The copy of the batch after it is done while a step that outlasts it is not."""
    batches = fifty_random_batches(dataset)
    with pipeline_for(dataset) as pipeline:
        pipeline.start(batches)
        for _ in range(10):
            run = pipeline._run
            assert run is not None
            while run.ready.qsize() < 2:
                time.sleep(0.001)
            assert pipeline.next() is not None
            torch.cuda._sleep(100 * SLOW_CYCLES)
            step_done = torch.cuda.Event()
            step_done.record()
            upcoming = pipeline._upcoming
            assert isinstance(upcoming, _Filled)
            assert upcoming.slot.copied is not None
            upcoming.slot.copied.synchronize()
            assert not step_done.query()
            torch.cuda.synchronize()


def test_next_neither_synchronises_nor_allocates(dataset: Dataset) -> None:
    batches = fifty_random_batches(dataset)
    with pipeline_for(dataset) as pipeline:
        pipeline.start(batches)
        pipeline.next()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            while pipeline.next() is not None:
                pass
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
