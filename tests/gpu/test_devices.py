"""Several devices of one process: one thread makes everything ready, then each engine is stepped from a thread of its own, at the
same time."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

from buffers.batching import BatchPlan
from buffers.dataset import Dataset
from buffers.shapes import Bucket
from buffers.staging import InputPipeline
from engine.assemble import drafter_config, engine_options, frozen_target
from engine.drafter_config import FULL
from engine.engine import Engine
from engine.optimizer import AdamW
from engine.warm_up import warm_up
from graphs.guards import Counters
from tests.drafter_helpers import assert_same_bits, random_weights
from tests.gpu.engine_helpers import (
    BUCKETS,
    Built,
    StaticInputs,
    assemble,
    drafters_data,
    fifty_steps,
    medium_config,
    reset,
    side_by_side,
)
from tests.run_helpers import LENGTHS, run_settings

DEVICES = [torch.device("cuda", index) for index in range(2)]
KINDS: dict[str, dict[str, Any]] = {
    "triton": {"config": medium_config(), "buckets": BUCKETS[:3]},
    # Compiled for every bucket, kind of layer and device, which takes seconds each.
    "flex": {
        "config": medium_config(layer_types=(FULL, FULL), sliding_window=None),
        "buckets": (BUCKETS[0], BUCKETS[2]),
    },
}


class AtOnce:
    """Lets the works of all devices begin together and notes when each ran."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(len(DEVICES), timeout=120)
        self.spans: dict[int, tuple[float, float]] = {}

    def __call__(self, number: int, work: Callable[[], None]) -> Callable[[], None]:
        def timed() -> None:
            self._barrier.wait()
            start = time.perf_counter()
            work()
            self.spans[number] = (start, time.perf_counter())

        return timed

    @property
    def overlapped(self) -> bool:
        return max(start for start, _ in self.spans.values()) < min(end for _, end in self.spans.values())


def on_the_host(outcomes: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{name: tensor.cpu() for name, tensor in outcome.items()} for outcome in outcomes]


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("attached", [True, False])
def test_engines_on_two_devices_step_in_two_threads_at_once(attention: str, attached: bool) -> None:
    """Not attached, a thread's current device is the first one and its stream the default one: right all the same."""
    config, buckets = KINDS[attention]["config"], KINDS[attention]["buckets"]
    made = [assemble(config, buckets, precision="bf16", attention=attention, device=device) for device in DEVICES]
    found: dict[int, list[dict[str, Tensor]]] = {}

    def work(number: int) -> None:
        if attached:
            made[number].engine.attach()
            assert torch.cuda.current_device() == DEVICES[number].index
        found[number] = on_the_host(fifty_steps(made[number], seed=number, buckets=buckets))

    at_once = AtOnce()
    with warm_up([each.engine for each in made]) as reports:
        assert {report.how for of_engine in reports for report in of_engine} == {"replayed"}
        before = Counters.read(DEVICES[0]).compilations
        assert side_by_side([at_once(number, lambda n=number: work(n)) for number in range(2)]) == []  # type: ignore[misc]
        assert Counters.read(DEVICES[0]).compilations == before
    assert at_once.overlapped
    for number, each in enumerate(made):
        each.engine.attach()
        reset(each)
        alone = on_the_host(fifty_steps(each, seed=number, buckets=buckets))
        for expected, seen in zip(alone, found[number], strict=True):
            assert_same_bits(seen, expected)
        for bucket in buckets:
            each.inputs.load(bucket, seed=1)
            assert each.engine.verify(bucket) is None
    for each in made:
        each.engine.close()


def test_compiling_is_over_on_every_device_after_the_warm_up() -> None:
    made = [assemble(medium_config(), BUCKETS[:1], precision="bf16", attention="triton", device=d) for d in DEVICES]

    def something_new(device: torch.device) -> None:
        torch.cuda.set_device(device)
        torch.compile(lambda x: x * 3, dynamic=False)(torch.ones(5, device=device))

    with warm_up([each.engine for each in made]):
        raised = side_by_side([lambda d=device: something_new(d) for device in DEVICES])  # type: ignore[misc]
    assert len(raised) == 2
    for error in raised:
        assert "after the warm-up" in str(error), error
    for each in made:
        each.engine.close()


def test_a_generation_is_made_on_one_device_while_the_other_trains() -> None:
    config = medium_config()
    made = [assemble(config, BUCKETS[:2], precision="bf16", attention="triton", device=device) for device in DEVICES]
    going, stop = threading.Event(), threading.Event()
    steps = [0]

    def train() -> None:
        # Nothing in here waits for the device: that is an error in every thread while steps are warmed up.
        engine = made[0].engine
        engine.attach()
        while not stop.is_set():
            engine.micro_step(BUCKETS[steps[0] % 2])
            engine.update(lr=1e-3)
            steps[0] += 1
            going.set()
            if steps[0] % 8 == 0:
                event = torch.cuda.Event(blocking=True)
                event.record()
                event.synchronize()

    for each in made:
        each.engine.attach()
    with warm_up([each.engine for each in made]):
        for bucket in BUCKETS[:2]:
            made[0].inputs.load(bucket, seed=4)
        torch.cuda.synchronize(DEVICES[0])
        raised: list[BaseException] = []
        trainer = threading.Thread(target=lambda: raised.extend(side_by_side([train])))
        trainer.start()
        try:
            assert going.wait(60)
            made[1].engine.attach()
            inputs = StaticInputs(config, BUCKETS[2:3], torch.bfloat16, DEVICES[1])
            begun = steps[0]
            reports = made[1].engine.regenerate(buckets=BUCKETS[2:3], inputs=inputs, recompute="layer")
            assert steps[0] > begun, "the other device stood still"
        finally:
            stop.set()
            trainer.join()
        assert raised == [] and {report.how for report in reports} == {"replayed"}
        again = Built(made[1].engine, inputs)
        inputs.load(BUCKETS[2], seed=2)
        assert_same_bits(again.replay(BUCKETS[2]), again.eager(BUCKETS[2]))
    found = {name: tensor.cpu() for name, tensor in made[0].engine.params.state().items()}
    made[0].engine.attach()
    reset(made[0])
    for bucket in BUCKETS[:2]:
        made[0].inputs.load(bucket, seed=4)
    for step in range(steps[0]):
        made[0].engine.micro_step(BUCKETS[step % 2])
        made[0].engine.update(lr=1e-3)
    assert_same_bits(found, {name: tensor.cpu() for name, tensor in made[0].engine.params.state().items()})
    for each in made:
        each.engine.close()


def test_loaders_of_two_devices_feed_their_engines_at_once(tmp_path: Path) -> None:
    """Pinned slots, copy streams and a loader thread for each device, over one dataset."""
    data = drafters_data(tmp_path / "data")
    dataset = Dataset(data)
    settings = run_settings(
        data, tmp_path / "run", "run.device=cuda", "model.num_hidden_layers=2", "model.block_size=8"
    )
    config, target = drafter_config(settings, dataset.info), frozen_target(settings, dataset)
    buckets = (Bucket(1, 128, 16, 8), Bucket(1, 256, 16, 8))
    pipelines, engines = [], []
    for device in DEVICES:
        pipeline = InputPipeline(dataset, buckets, seed=device.index, device=device, dtype=torch.bfloat16, poison=True)
        options = engine_options(settings, device, "bf16") | {"buckets": buckets, "inputs": pipeline.inputs}
        engines.append(Engine(config, target, optimizer=settings.optimizer, **options))
        engines[-1].params.load_(random_weights(config))
        pipelines.append(pipeline)
    found: dict[int, dict[str, Tensor]] = {}

    def train(number: int, into: dict[int, dict[str, Tensor]]) -> None:
        engine, pipeline = engines[number], pipelines[number]
        engine.attach()
        plan = BatchPlan(np.array(LENGTHS), buckets, seed=number)
        pipeline.start(batch for epoch in range(6) for batch in plan.epoch(epoch))
        while (batch := pipeline.next()) is not None:
            engine.micro_step(batch.bucket)
            engine.update(lr=1e-3)
        into[number] = {name: tensor.cpu() for name, tensor in engine.params.state().items()}

    at_once = AtOnce()
    with warm_up(engines):
        assert side_by_side([at_once(n, lambda n=n: train(n, found)) for n in range(2)]) == []  # type: ignore[misc]
    assert at_once.overlapped
    alone: dict[int, dict[str, Tensor]] = {}
    for number, engine in enumerate(engines):
        engine.attach()
        engine.params.load_(random_weights(config))
        optimizer = engine.optimizer
        assert isinstance(optimizer, AdamW)
        for tensor in optimizer.state().values():
            tensor.zero_()
        engine.zero_()
        train(number, alone)
        assert_same_bits(found[number], alone[number])
    assert not torch.equal(found[0]["fc.weight"], found[1]["fc.weight"])
    for engine, pipeline in zip(engines, pipelines, strict=True):
        pipeline.close()
        engine.close()
