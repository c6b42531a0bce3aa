"""Generations of captured steps on the GPU: interleaved buckets, changes of settings in a row, what fails, threads, and the
memory that is held after all of it."""

import gc
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from buffers.host_memory import HostMemory
from buffers.shapes import Bucket
from engine.checkpoint import DataIdentity, Position, checkpoint_folder, load_checkpoint
from engine.checkpoint_writer import CheckpointWriter
from engine.drafter_config import FULL
from engine.run import TrainingRun
from engine.settings import ObjectiveSettings, OptimizerSettings
from engine.snapshot import Snapshot
from engine.verification import EQUAL
from engine.warm_up import warm_up
from graphs.compile_ban import no_compilation
from graphs.executor import CaptureError, GraphExecutor
from graphs.guards import Counters
from tests.drafter_helpers import assert_same_bits, random_weights
from tests.gpu.engine_helpers import (
    BUCKETS,
    CUDA,
    Built,
    StaticInputs,
    assemble,
    build,
    drafters_data,
    fifty_steps,
    medium_config,
    reset,
    side_by_side,
    state_of,
)
from tests.reconfigure_helpers import AfterStep, assert_same_run, events, train_edited, train_resumed
from tests.run_helpers import run_settings

TRITON: dict[str, Any] = {"precision": "bf16", "attention": "triton"}
MIB = 2**20


@pytest.fixture(scope="module")
def shared() -> Iterator[Built]:
    made = build(medium_config(), BUCKETS, **TRITON, optimizer=OptimizerSettings(weight_decay=0.1))
    yield made
    made.engine.close()


@pytest.fixture
def built(shared: Built) -> Built:
    """As if it had just been built."""
    engine = shared.engine
    assert engine.optimizer is not None
    engine.attach()
    engine.params.load_(random_weights(engine.config))
    for tensor in engine.optimizer.state().values():
        tensor.zero_()
    engine.zero_()
    return shared


def test_fifty_steps_over_interleaved_buckets_equal_eager_in_loss_gradients_and_weights(built: Built) -> None:
    replayed = fifty_steps(built)
    reset(built)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(built.engine.executor, "run", built.engine.executor.call)
        eager = fifty_steps(built)
    for found, expected in zip(replayed, eager, strict=True):
        assert_same_bits(found, expected)
    assert not torch.equal(replayed[0]["fc.weight"], replayed[-1]["fc.weight"])


def reserved_mib() -> float:
    """What torch holds, with nothing cached."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() / MIB


def test_all_buckets_hold_at_most_1_3_times_what_the_largest_alone_does() -> None:
    grown = []
    for buckets in (BUCKETS[-1:], BUCKETS):
        made = assemble(medium_config(), buckets, **TRITON)
        before = reserved_mib()
        made.engine.build()
        grown.append(reserved_mib() - before)
        made.engine.close()
    assert grown[1] <= 1.3 * grown[0], grown


def test_other_anchors_and_nothing_else_change_the_output(built: Built) -> None:
    bucket = BUCKETS[1]
    built.inputs.load(bucket, seed=0)
    first = built.replay(bucket)
    anchors = built.inputs(bucket)["anchor_positions"]
    kept = built.inputs(bucket)["block_keep_mask"] > 0
    moved = torch.where(kept & (anchors > 0), anchors - 1, anchors)
    assert not torch.equal(moved, anchors)
    anchors.copy_(moved)
    second = built.replay(bucket)
    assert not torch.equal(first["fc.weight"], second["fc.weight"]) and first["sums"][0] != second["sums"][0]
    assert_same_bits(second, built.eager(bucket))


def test_what_a_checkpoint_restores_is_what_the_graphs_go_on_with(built: Built, tmp_path: Path) -> None:
    """No graph keeps old moments, an old step count or an old lr."""
    engine = built.engine
    fifty_steps(built)
    position = Position(50, 0, (), DataIdentity(1, 1, "", 1))
    memory = HostMemory(Snapshot.nbytes(engine.config), CUDA)
    writer = CheckpointWriter(tmp_path, Snapshot(engine, memory), engine.config)
    writer.save(position, {}, keep=1)
    writer.wait()
    memory.close()
    folder = checkpoint_folder(tmp_path, 50)
    first = fifty_steps(built, seed=4)
    load_checkpoint(folder, engine)
    assert engine.optimizer is not None and int(engine.optimizer.step) == 50
    second = fifty_steps(built, seed=4)
    for found, expected in zip(second, first, strict=True):
        assert_same_bits(found, expected)
    load_checkpoint(folder, engine)
    before = engine.params.weight.clone()
    built.inputs.load(BUCKETS[0], seed=0)
    engine.micro_step(BUCKETS[0])
    engine.update(lr=0.0)
    assert torch.equal(engine.params.weight, before)


def test_a_loader_pins_and_copies_while_buckets_are_captured() -> None:
    made = assemble(medium_config(), BUCKETS, **TRITON)
    done, rounds = threading.Event(), [0]
    wrong: list[object] = []

    def load() -> None:
        try:
            torch.cuda.set_device(CUDA)
            stream = torch.cuda.Stream(CUDA)
            while not done.is_set():
                host = torch.arange(100_000 + rounds[0] % 7, dtype=torch.float32, pin_memory=True)
                with torch.cuda.stream(stream):
                    device = host.to(CUDA, non_blocking=True)
                    # Waiting for the device in any other way is an error in every thread while the steps are warmed up.
                    back = torch.empty(1, pin_memory=True).copy_(device[-1:], non_blocking=True)
                    event = torch.cuda.Event(blocking=True)
                    event.record(stream)
                    event.synchronize()
                    if back.item() != len(host) - 1:
                        wrong.append("another value arrived")
                rounds[0] += 1
        except Exception as error:
            wrong.append(error)

    loader = threading.Thread(target=load)
    loader.start()
    try:
        reports = made.engine.build()
    finally:
        done.set()
        loader.join()
    assert wrong == [] and rounds[0] > 3
    assert {report.how for report in reports} == {"replayed"}
    for bucket in BUCKETS:
        made.inputs.load(bucket, seed=1)
        assert made.engine.verify(bucket) is None
    made.engine.close()


def test_twelve_buckets_are_compiled_once_and_replayed() -> None:
    buckets = tuple(Bucket(1 + i % 2, 128 * (1 + i), 16, 8) for i in range(12))
    made = build(medium_config(), buckets, **TRITON)
    assert {report.how for report in made.reports} == {"replayed"}
    for bucket in buckets:
        made.inputs.load(bucket, seed=0)
    before = Counters.read(CUDA)
    with no_compilation(), torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(2):
            for bucket in buckets:
                made.engine.micro_step(bucket)
            made.engine.update(lr=1e-3)
    assert Counters.read(CUDA) - before == Counters(0, 0)
    for bucket in buckets[::5]:
        assert made.engine.verify(bucket) is None
    made.engine.close()


@pytest.mark.parametrize(("attention", "D"), [("triton", 320), ("flex", 384)])
def test_what_a_new_generations_backward_pass_needs_is_compiled_in_the_middle_of_a_run(attention: str, D: int) -> None:
    """Autograd runs it in a thread of its own. Sizes that no other test has: the kernels are not there yet."""
    config = medium_config(hidden_size=D, intermediate_size=2 * D, layer_types=(FULL, FULL), sliding_window=None)
    made = build(config, BUCKETS[:1], precision="bf16", attention=attention)
    before = Counters.read(CUDA)
    with no_compilation():
        inputs = StaticInputs(config, BUCKETS[1:2], torch.bfloat16)
        reports = made.engine.regenerate(buckets=BUCKETS[1:2], inputs=inputs, recompute="mlp")
        assert (Counters.read(CUDA) - before).compilations > 0, "nothing that was forbidden was tried"
        assert {report.how for report in reports} == {"replayed"}
        inputs.load(BUCKETS[1], seed=0)
        assert made.engine.verify(BUCKETS[1]) is None
    made.engine.close()


@pytest.mark.parametrize("order", ["beside", "after"])
def test_an_engine_regenerates_and_falls_back_and_the_graphs_are_right(order: Any) -> None:
    config, fewer = medium_config(), BUCKETS[1:3]
    made = build(config, BUCKETS[:2], **TRITON)
    engine = made.engine
    fifty_steps(made, buckets=BUCKETS[:2])
    kept = state_of(made)
    inputs = StaticInputs(config, fewer, torch.bfloat16)

    def refuse(reports: Any) -> None:
        raise CaptureError("not these")

    with pytest.raises(CaptureError, match="not these"):
        engine.regenerate(order=order, check=refuse, buckets=fewer, inputs=inputs)
    assert engine.generation == 1
    assert_same_bits(state_of(made), kept)
    for bucket in BUCKETS[:2]:
        made.inputs.load(bucket, seed=2)
        assert_same_bits(made.replay(bucket), made.eager(bucket))
    engine.zero_()
    objective = ObjectiveSettings(weighting="dpace", kl_weight=0.2)
    reports = engine.regenerate(order=order, buckets=fewer, inputs=inputs, objective=objective, recompute="mlp")
    assert engine.generation == 2 and {report.how for report in reports} == {"replayed"}
    assert isinstance(engine.executor, GraphExecutor) and torch.cuda.current_stream() == engine.executor.stream
    again = Built(engine, inputs)
    for bucket in fewer:
        inputs.load(bucket, seed=2)
        assert_same_bits(again.replay(bucket), again.eager(bucket))
    engine.close()


ON_THE_GPU = ("run.device=cuda", "model.num_hidden_layers=2", "model.block_size=8", "model.attention=triton")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafters_data(tmp_path_factory.mktemp("data") / "data")


def test_twenty_changes_of_every_class_in_a_row_equal_as_many_resumed_runs(
    data: Path, tmp_path: Path, after_step: AfterStep
) -> None:
    changes = [
        ("buckets.lengths=256",), ("optimizer.lr=2e-2",), ("objective.kl_weight=0.5",), ("objective.kl_weight=0.25",),
        ("model.recompute=mlp",), ("objective.gamma=2",), ("buckets.packing=true",), ("optimizer.weight_decay=0.1",),
        ("objective.weighting=dpace",), ("run.accumulation=2",), ("buckets.packing=false", "buckets.lengths=128,256"),
        ("run.log_every=2",), ("objective.kl_weight=0",), ("run.regenerate=after",), ("model.head_chunk=100",),
        ("run.epochs=9",), ("buckets.max_rows=2",), ("objective.ce_weight=0.5",), ("objective.weighting=decay",),
        ("model.recompute=none", "optimizer.clip_norm=0.5"),
    ]  # fmt: skip
    edits = [(step, change) for step, change in enumerate(changes, start=3)]
    first = (*ON_THE_GPU, "run.epochs=5", "run.log_every=1", "run.verify=never")
    figures = train_edited(after_step, data, tmp_path / "edited", edits, *first)
    train_resumed(after_step, data, tmp_path / "resumed", edits, *first)
    assert_same_run(tmp_path / "edited", tmp_path / "resumed", figures["steps"])
    assert figures["generation"] == 13 and figures["how"] == "replayed"
    assert figures["compilations"] == 0, "but for what regenerating takes"
    classes = [record["why"] for record in events(tmp_path / "edited")]
    assert (classes.count("recapture"), classes.count("live")) == (12, 8)


def test_a_change_that_needs_a_restart_is_refused_while_graphs_replay(
    data: Path, tmp_path: Path, after_step: AfterStep, capsys: pytest.CaptureFixture[str]
) -> None:
    edits = [(2, ("model.block_size=16",)), (4, ("model.block_size=8", "buckets.lengths=256"))]
    figures = train_edited(after_step, data, tmp_path / "run", edits, *ON_THE_GPU, "run.max_steps=8")
    assert figures["steps"] == 8 and figures["generation"] == 2
    assert "model.block_size 8 -> 16: expected a change that a run can take over" in capsys.readouterr().err
    assert {row["how"] for row in figures["buckets"]} == {"replayed"}


def test_evaluation_is_compared_in_every_generation(data: Path, tmp_path: Path) -> None:
    held_out = drafters_data(tmp_path / "held-out")
    first = (*ON_THE_GPU, f"data.eval_path={held_out}", "run.verify=always")
    plans = ("buckets.lengths=128,256", "buckets.lengths=256", "buckets.lengths=128,256")
    with TrainingRun(run_settings(data, tmp_path / "run", *first, plans[0]), resume=True) as run:
        for generation, plan in enumerate(plans, start=1):
            run.reconfigure(run_settings(data, tmp_path / "run", *first, plan))
            assert run.engine.generation == generation
            assert {(b.how, b.verified, b.held_out) for b in run.graphs.buckets} == {("replayed", EQUAL, EQUAL)}
            assert {graph.name.split()[0] for b in run.graphs.buckets for graph in b.graphs} == {"train", "eval"}
            run.evaluate()


@pytest.mark.parametrize("order", ["beside", "after"])
def test_twenty_regenerations_hold_no_more_than_a_fresh_start(data: Path, tmp_path: Path, order: str) -> None:
    first = (*ON_THE_GPU, f"run.regenerate={order}", "run.verify=always")
    plans = [("buckets.lengths=128,256",), ("buckets.lengths=256", "buckets.max_rows=4", "objective.kl_weight=0.5")]
    held: list[tuple[float, float]] = []
    with TrainingRun(run_settings(data, tmp_path / "run", *first, *plans[0]), resume=True) as run:
        for number in range(21):
            if number:
                run.reconfigure(run_settings(data, tmp_path / "run", *first, *plans[number % 2]))
            reserved = reserved_mib()
            free, total = torch.cuda.mem_get_info(CUDA)
            held.append((reserved, (total - free) / MIB))
        assert run.engine.generation == 21
    assert held[20][0] - held[0][0] <= 64, f"torch holds {held} MiB"
    # What the driver holds: kernels of the second plan stay loaded, so the first time that both were there is what counts.
    assert held[20][1] - held[2][1] <= 64, f"of the device are taken {held} MiB"
    # Nor does it creep.
    assert max(b[0] - a[0] for a, b in pairwise(held[2::2])) <= 8, held


@pytest.mark.parametrize("attached", [True, False])
def test_two_engines_on_one_device_step_in_two_threads_at_once(attached: bool) -> None:
    """Not attached, a thread's steps wait for its own stream and it for them: slower, and right all the same."""
    buckets = BUCKETS[:3]
    made = [assemble(medium_config(), buckets, **TRITON) for _ in range(2)]
    found: dict[int, list[dict[str, Tensor]]] = {}

    def work(number: int) -> None:
        if attached:
            made[number].engine.attach()
        found[number] = fifty_steps(made[number], seed=number, buckets=buckets)
        torch.cuda.synchronize()

    with warm_up([each.engine for each in made]):
        streams = [getattr(each.engine.executor, "stream") for each in made]  # noqa: B009 - only a GraphExecutor has one
        assert streams[0] != streams[1]
        assert side_by_side([lambda: work(0), lambda: work(1)]) == []
    for number, each in enumerate(made):
        each.engine.attach()
        reset(each)
        for expected, seen in zip(fifty_steps(each, seed=number, buckets=buckets), found[number], strict=True):
            assert_same_bits(seen, expected)
    for each in made:
        each.engine.close()


class Adds:
    """Adds 1 to `number`; `fails` is done first."""

    def __init__(self, fails: Callable[[], object] = lambda: None, mib: int = 1) -> None:
        self.number, self._fails, self._mib = torch.zeros(1000, device=CUDA), fails, mib

    def __call__(self) -> None:
        block = torch.ones(self._mib * MIB // 4, device=CUDA)
        self._fails()
        self.number += block[:1]


def waits() -> None:
    torch.ones(1, device=CUDA).item()


def breaks_a_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()


@pytest.mark.parametrize("fails", [waits, breaks_a_capture])
def test_a_bucket_that_cannot_be_captured_is_called_and_gives_its_pool_back(fails: Callable[[], None]) -> None:
    fine, bad = Adds(), Adds(fails, mib=512)
    before = reserved_mib()
    executor = GraphExecutor(CUDA)
    executor.on_failure = "eager"
    executor.add("train large", bad, group="large")
    executor.add("add large", Adds(mib=512), group="large")
    executor.add("train small", fine, group="small")
    reports = {report.name: report for report in executor.build()}
    assert [reports[name].how for name in ("train large", "add large", "train small")] == [
        "called",
        "called",
        "replayed",
    ]
    assert "train large" in reports["train large"].why
    assert reserved_mib() - before < 300, "the pool of the bucket that is called is held"
    torch.cuda.synchronize()
    numbers = [fine.number[0].item(), bad.number[0].item()]
    for _ in range(3):
        executor.run("train large")
        executor.run("train small")
    torch.cuda.synchronize()
    assert [fine.number[0].item() - numbers[0], bad.number[0].item() - numbers[1]] == [3, 3]
    executor.close()
    # A capture that was broken must not keep torch from giving memory back for ever.
    large = torch.ones(512 * MIB // 4, device=CUDA)
    del large
    assert reserved_mib() - before < 150


def test_strict_names_the_line_of_a_step_that_waits() -> None:
    made = assemble(medium_config(), BUCKETS[:1], **TRITON)
    weigh = made.engine.ops.weigh_rows

    def weigh_and_wait(rows: Tensor, scale: Tensor | None, weights: Tensor) -> None:
        weigh(rows, scale, weights)
        weights.sum().item()

    object.__setattr__(made.engine.ops, "weigh_rows", weigh_and_wait)
    with pytest.raises(
        CaptureError, match=r"warming up train 1x128x16: .* \(at engine/objective.py:\d+, in block_loss\)"
    ):
        made.engine.build()
    made.engine.close()
