"""Checkpoints beside the training on the GPU: a snapshot holds one moment whatever is queued behind it, nothing is allocated on
the device, and a run that saves computes what one that does not computes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from buffers.host_memory import HostMemory
from engine.checkpoint import DataIdentity, Position, checkpoint_folder, load_checkpoint
from engine.checkpoint_writer import CheckpointWriter
from engine.settings import OptimizerSettings
from engine.snapshot import Snapshot, training_tensors
from engine.train import train
from graphs.guards import Counters, host_sync_is_an_error
from tests.drafter_helpers import assert_same_bits
from tests.gpu.engine_helpers import BUCKETS, CUDA, Built, build, drafters_data, medium_config
from tests.gpu.test_regeneration import ON_THE_GPU
from tests.reconfigure_helpers import assert_same_run, train_edited, train_resumed
from tests.run_helpers import checkpoint_tensors, interrupt, metrics, run_settings, steps_of


@pytest.fixture(scope="module")
def wide() -> Iterator[Built]:
    """Half a GiB of masters and moments: their copies take many times as long as a step over the smallest bucket."""
    config = medium_config(hidden_size=1024, intermediate_size=8192)
    made = build(
        config, BUCKETS[:1], precision="bf16", attention="triton", optimizer=OptimizerSettings(weight_decay=0.1)
    )
    yield made
    made.engine.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafters_data(tmp_path_factory.mktemp("data") / "data")


def steps(built: Built, count: int) -> None:
    for _ in range(count):
        built.engine.micro_step(BUCKETS[0])
        built.engine.update(lr=1e-2)


def test_host_memory_is_pinned_and_of_the_size_asked_for() -> None:
    memory = HostMemory(100_000_001, CUDA)
    assert memory.bytes.shape == (100_000_001,) and not memory.bytes.any()
    assert memory.why_not_locked == "" and memory.bytes.is_pinned()
    memory.close()
    assert not memory.bytes.is_pinned()


def test_a_snapshot_holds_one_moment_whatever_is_queued_behind_it(wide: Built) -> None:
    memory = HostMemory(Snapshot.nbytes(wide.engine.config), CUDA)
    snapshot = Snapshot(wide.engine, memory)
    wide.inputs.load(BUCKETS[0], seed=0)
    steps(wide, 3)
    for _ in range(4):
        torch.cuda.synchronize()
        expected = {name: tensor.clone() for name, tensor in training_tensors(wide.engine).items()}
        before = Counters.read(CUDA)
        with host_sync_is_an_error():
            snapshot.take()
            steps(wide, 3)
        assert (Counters.read(CUDA) - before).device_allocations == 0
        snapshot.wait()
        taken = {name: tensor.clone() for name, tensor in snapshot.tensors().items()}
        torch.cuda.synchronize()
        assert_same_bits(snapshot.tensors(), taken)
        assert_same_bits(taken, {name: tensor.cpu() for name, tensor in expected.items()})
        changed = training_tensors(wide.engine)["master.fc.weight"]
        assert not torch.equal(changed, expected["master.fc.weight"]), "the steps behind it wrote what it holds"
    memory.close()


def test_what_was_written_beside_steps_restores_the_moment(wide: Built, tmp_path: Path) -> None:
    memory = HostMemory(Snapshot.nbytes(wide.engine.config), CUDA)
    writer = CheckpointWriter(tmp_path, Snapshot(wide.engine, memory), wide.engine.config)
    wide.inputs.load(BUCKETS[0], seed=1)
    steps(wide, 2)
    writer.save(Position(2, 0, (), DataIdentity(1, 1, "", 1)), {}, keep=1)
    steps(wide, 2)
    first = {name: tensor.clone() for name, tensor in training_tensors(wide.engine).items()}
    writer.wait()
    load_checkpoint(checkpoint_folder(tmp_path, 2), wide.engine)
    steps(wide, 2)
    assert_same_bits(training_tensors(wide.engine), first)
    memory.close()


def test_a_run_that_saves_every_two_steps_computes_what_one_that_does_not_computes(
    data: Path, tmp_path: Path, after_step: Any
) -> None:
    changes = (*ON_THE_GPU, "run.epochs=4", "run.log_every=1", "run.keep=99")
    saves = (*changes, "run.save_every=2")
    plain = train(run_settings(data, tmp_path / "plain", *changes, "run.save_every=0"))
    figures = train(run_settings(data, tmp_path / "saving", *saves))
    last = figures["steps"]
    assert figures["how"] == "replayed" and figures["device_allocations"] == plain["device_allocations"] == 0
    assert steps_of(tmp_path / "saving") == sorted({*range(2, last, 2), last})
    assert metrics(tmp_path / "saving") == metrics(tmp_path / "plain")
    assert_same_bits(checkpoint_tensors(tmp_path / "saving", last), checkpoint_tensors(tmp_path / "plain", last))

    after_step(7, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(run_settings(data, tmp_path / "broken", *saves))
    train(run_settings(data, tmp_path / "broken", *saves))
    assert_same_run(tmp_path / "broken", tmp_path / "plain", last)


def test_a_generation_is_captured_while_a_checkpoint_is_written(data: Path, tmp_path: Path, after_step: Any) -> None:
    edits = [(step, (f"buckets.max_rows={1 + step % 2}",)) for step in range(3, 8)]
    first = (*ON_THE_GPU, "run.epochs=4", "run.log_every=1", "run.keep=99", "run.save_every=1", "run.verify=never")
    figures = train_edited(after_step, data, tmp_path / "edited", edits, *first)
    train_resumed(after_step, data, tmp_path / "resumed", edits, *first)
    assert figures["device_allocations"] == 0 and figures["generation"] == 6
    assert_same_run(tmp_path / "edited", tmp_path / "resumed", figures["steps"])
