"""Captured steps of several buckets in one pool: a replay is what the step called from Python computes, bit for bit,
whatever ran before it and whatever the padding holds; and it costs no allocation, no wait and no compilation."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from buffers.shapes import Bucket
from engine.drafter_config import FULL
from engine.settings import ObjectiveSettings, OptimizerSettings
from graphs.guards import Counters, host_sync_is_an_error
from graphs.pool_poison import POISON
from tests.drafter_helpers import assert_close, assert_same_bits
from tests.gpu.engine_helpers import BUCKETS, CUDA, Built, build, medium_config

# Flex compiles for every bucket and kind of layer, which takes seconds each: two buckets and one kind.
KINDS: dict[str, dict[str, Any]] = {
    "triton": {
        "config": medium_config(),
        "buckets": BUCKETS,
        "precision": "bf16",
        "objective": ObjectiveSettings(kl_weight=0.15),
        "evaluate": True,
    },
    "flex": {
        "config": medium_config(layer_types=(FULL, FULL), sliding_window=None),
        "buckets": (BUCKETS[0], BUCKETS[-1]),
        "precision": "bf16",
        "optimizer": OptimizerSettings(grad_dtype="fp32"),
    },
    "reference": {
        "config": medium_config(),
        "buckets": BUCKETS,
        "precision": "fp32",
        "objective": ObjectiveSettings(weighting="dpace"),
        "evaluate": True,
    },
    "fp8": {
        "config": medium_config(),
        "buckets": BUCKETS,
        "precision": "fp8",
        "attention": "triton",
    },
}


@pytest.fixture(scope="module", params=KINDS)
def built(request: pytest.FixtureRequest) -> Iterator[Built]:
    made = build(**({"attention": request.param} | KINDS[request.param]))
    yield made
    made.engine.close()


def test_every_step_is_captured_the_largest_first_and_in_one_pool(built: Built) -> None:
    assert {report.how for report in built.reports} == {"replayed"}
    training = [report for report in built.reports if report.name.startswith("train ")]
    assert [report.name for report in training] == [f"train {b.name}" for b in reversed(built.engine.buckets)]
    first, *others = [report.pool_mib for report in training]
    assert first > 20
    assert sum(others) <= 0.4 * first, f"the pool grew by {others} MiB after the first bucket's {first}"


def test_a_replay_reads_what_the_inputs_hold_now(built: Built) -> None:
    for bucket in built.engine.buckets:
        built.inputs.load(bucket, seed=0)
        first = built.replay(bucket)
        built.inputs.load(bucket, seed=1)
        second = built.replay(bucket)
        same = [name for name, tensor in first.items() if torch.equal(tensor, second[name])]
        # D-PACE's denominator is a number of rows.
        assert set(same) <= {"denominator"}, bucket.name
        assert all(tensor.isfinite().all() and tensor.any() for tensor in second.values())
        assert_same_bits(second, built.eager(bucket))


def test_verify_finds_no_difference_and_would_find_one(built: Built) -> None:
    engine, bucket = built.engine, built.engine.buckets[0]
    built.inputs.load(bucket, seed=3)
    assert engine.verify(bucket) is None
    assert not engine.params.grad.any() and not engine.metrics.sums.any()
    call = engine.executor.call

    def call_on_other_rows(name: str) -> None:
        built.inputs.load(bucket, seed=4)
        call(name)
        built.inputs.load(bucket, seed=3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.executor, "call", call_on_other_rows)
        difference = engine.verify(bucket)
    assert difference is not None and difference.relative > 1e-3


def test_twenty_interleaved_replays_equal_eager(built: Built) -> None:
    choices = list(product(built.engine.buckets, (0, 1, 2)))
    expected = {}
    for bucket, seed in choices:
        built.inputs.load(bucket, seed)
        expected[bucket, seed] = built.eager(bucket)
    for index in np.random.default_rng(7).integers(0, len(choices), 20):
        bucket, seed = choices[index]
        built.inputs.load(bucket, seed)
        assert_same_bits(built.replay(bucket), expected[bucket, seed])


def test_micro_batches_of_different_buckets_add_up(built: Built) -> None:
    buckets = built.engine.buckets[-3:]
    for bucket in buckets:
        built.inputs.load(bucket, seed=5)
    together = built.replay(*buckets)
    assert_same_bits(together, built.eager(*buckets))
    alone = [built.replay(bucket) for bucket in buckets]
    summed = {name: torch.stack([outcome[name].double() for outcome in alone]).sum(0) for name in together}
    # Each addition to the gradient arena rounds once.
    tolerance = 3 * torch.finfo(built.engine.params.grad.dtype).eps
    assert_close({name: tensor.double() for name, tensor in together.items()}, summed, max(tolerance, 2e-6))


def poison(built: Built, bucket: Bucket) -> None:
    """NaN and nonsense wherever no row and no kept block reaches."""
    views = built.inputs(bucket)
    padding = torch.arange(bucket.S, device=CUDA) >= views["row_lengths"][:, None]
    unused = views["block_keep_mask"] == 0
    assert padding.any()
    for name in ("target_hidden", "last_hidden"):
        views[name][padding] = float("nan")
    views["input_ids"][padding] = -1
    views["position_ids"][padding] = 1 << 30
    views["loss_mask"][padding] = 1
    for name in ("anchor_positions", "context_start", "context_end"):
        views[name][unused] = torch.randint(0, bucket.S, (int(unused.sum()),), device=CUDA, dtype=torch.int32)


def test_what_padding_and_unused_blocks_hold_never_matters(built: Built) -> None:
    for bucket, seed in product(built.engine.buckets, (0, 1)):
        built.inputs.load(bucket, seed)
        expected = built.replay(bucket)
        built.inputs.load(bucket, seed)
        poison(built, bucket)
        assert_same_bits(built.replay(bucket), expected)
        poison(built, bucket)
        assert_same_bits(built.eager(bucket), expected)


def test_what_the_pool_holds_before_a_replay_never_matters(built: Built) -> None:
    """As train --check has it: NaN in all of the pool before every replay."""
    engine = built.engine
    evaluate = engine.options.eval_inputs is not None

    def outcomes(bucket: Bucket) -> dict[str, torch.Tensor]:
        found = built.replay(bucket, bucket)
        if evaluate:
            engine.eval_metrics.zero_()
            engine.executor.run(f"eval {bucket.name}")
            found["evaluation"] = engine.eval_metrics.sums.clone()
        return found

    pool_mib = sum(report.pool_mib for report in built.reports)
    try:
        for bucket in engine.buckets:
            built.inputs.load(bucket, seed=2)
            expected = outcomes(bucket)
            engine.executor.pool_fill = POISON
            before = Counters.read(CUDA)
            assert_same_bits(outcomes(bucket), expected)
            assert engine.executor.filled_mib > 0.9 * pool_mib
            engine.executor.pool_fill = None
        assert all(tensor.isfinite().all() for tensor in expected.values())
        assert (Counters.read(CUDA) - before).compilations == 0
    finally:
        engine.executor.pool_fill = None


def test_a_batch_without_content_adds_nothing(built: Built) -> None:
    bucket = built.engine.buckets[0]
    for tensor in built.inputs(bucket).values():
        tensor.zero_()
    outcome = built.replay(bucket)
    assert not any(tensor.any() for name, tensor in outcome.items() if name != "sums")
    assert outcome["sums"][:7].count_nonzero() == 0


@pytest.mark.parametrize("built", ["triton", "reference"], indirect=True)
def test_evaluation_is_replayed_and_touches_no_gradient(built: Built) -> None:
    engine = built.engine
    for bucket, seed in product(engine.buckets, (0, 1)):
        built.inputs.load(bucket, seed)
        trained = built.replay(bucket)
        found = []
        for run in (engine.executor.run, engine.executor.call):
            engine.zero_()
            run(f"eval {bucket.name}")
            metrics = engine.eval_metrics
            counters = {"sums": metrics.sums, "slots": metrics.slots, "histogram": metrics.blocks_by_accepted}
            found.append({name: tensor.clone() for name, tensor in counters.items()})
            totals = metrics.snapshot().read().sums
            # The histogram's own mean is the accepted length.
            counts = metrics.blocks_by_accepted.tolist()
            assert sum(n * count for n, count in enumerate(counts)) == totals["accepted"]
            assert sum(counts) == totals["blocks"]
            assert not engine.params.grad.any() and not engine.metrics.sums.any()
        assert_same_bits(*found)
        shared = ("sums", "slots")
        assert_close({name: found[0][name] for name in shared}, {name: trained[name] for name in shared}, 1e-6)


def test_thirty_steps_allocate_nothing_wait_for_nothing_and_compile_nothing(built: Built) -> None:
    engine = built.engine
    assert engine.optimizer is not None
    for bucket in engine.buckets:
        built.inputs.load(bucket, seed=4)
    engine.zero_()
    torch.cuda.synchronize()
    before, reserved = Counters.read(CUDA), torch.cuda.memory_reserved()
    snapshots = []
    with host_sync_is_an_error(), torch.compiler.set_stance("fail_on_recompile"):
        for step in range(30):
            engine.micro_step(engine.buckets[step % len(engine.buckets)])
            engine.update(lr=1e-4)
            if step % 10 == 9:
                snapshots.append(engine.metrics.snapshot(engine.optimizer.grad_norm))
    assert Counters.read(CUDA) - before == Counters(device_allocations=0, compilations=0)
    assert torch.cuda.memory_reserved() == reserved
    assert [snapshot.read().sums["micro_batches"] for snapshot in snapshots] == [10, 20, 30]
    assert all(0 < snapshot.beside()[0] < float("inf") for snapshot in snapshots)


def test_after_building_nothing_is_traced_again_not_even_by_the_eager_twin(built: Built) -> None:
    before = Counters.read(CUDA)
    with torch.compiler.set_stance("fail_on_recompile"):
        for bucket in built.engine.buckets:
            built.inputs.load(bucket, seed=6)
            built.eager(bucket)
    assert (Counters.read(CUDA) - before).compilations == 0
