"""The arithmetic of a step against numbers worked out by hand."""

import pytest

from bench.matmuls import matmul_flop, step_matmuls
from bench.workloads import WORKLOADS
from buffers.shapes import Bucket
from engine.drafter_config import FULL, SLIDING
from engine.work import FIXED_FLOP, planning_cost, spoken_flop, step_flop
from tests.drafter_helpers import small_config


def flop_of(name: str, *, whole: bool = True) -> float:
    workload = WORKLOADS[name]
    return matmul_flop(step_matmuls(workload.config(), workload.bucket, whole=whole))


@pytest.mark.parametrize(("name", "tflop"), [("W1", 9.3), ("W2", 71.8), ("W3", 505.0)])
def test_the_named_workloads_are_the_designs(name: str, tflop: float) -> None:
    """Its figures count slot 0 in the head and fc's input gradient too, which no step of ours computes."""
    workload = WORKLOADS[name]
    config, bucket = workload.config(), workload.bucket
    slot_0 = 4 * bucket.N * config.hidden_size * config.vocab_size
    fc = 2 * bucket.S * config.num_taps * config.hidden_size**2
    assert (step_flop(config, bucket) + slot_0 + fc) / 1e12 == pytest.approx(tflop, rel=5e-3)


def test_matmuls_of_w1_by_hand() -> None:
    # 8192 draft and 512 context tokens, 7680 of the former in the head; D 1024, q and o 2048 wide, k and v 1024 each.
    draft, context, head = 8192, 512, 7680
    layer = draft * 1024 * (2048 + 2 * 1024) + context * 1024 * 2 * 1024 + draft * 2048 * 1024 + draft * 3 * 1024 * 3072
    by_hand = 2 * (3 * 5 * layer + 2 * context * 1024 * 5 * 1024 + 2 * head * 1024 * 151936)
    assert flop_of("W1") == by_hand
    assert 8.5e12 < by_hand < 9.0e12


@pytest.mark.parametrize("name", WORKLOADS)
def test_matmuls_and_attention_are_the_whole_work(name: str) -> None:
    workload = WORKLOADS[name]
    config, bucket = workload.config(), workload.bucket
    heads = config.num_attention_heads * config.head_dim
    attention = 5 * 14 * heads * bucket.Q * (bucket.S / 2 + bucket.K)
    assert step_flop(config, bucket) == pytest.approx(flop_of(name) + attention, rel=1e-9)


@pytest.mark.parametrize(("name", "whole", "own"), [("W1", 8.69, 8.47), ("W2", 67.7, 66.1), ("W3", 479.3, 471.6)])
def test_what_the_engine_leaves_out_of_its_matmuls(name: str, whole: float, own: float) -> None:
    """The figures of docs/performance.md."""
    assert flop_of(name) / 1e12 == pytest.approx(whole, abs=0.05)
    assert flop_of(name, whole=False) / 1e12 == pytest.approx(own, abs=0.05)
    workload = WORKLOADS[name]
    c, bucket = workload.config(), workload.bucket
    kv = c.num_key_value_heads * c.head_dim
    mask_slots = (bucket.Q - bucket.N - 1) * c.hidden_size * (c.num_attention_heads * c.head_dim + 2 * kv)
    slot_0 = bucket.N * 3 * c.hidden_size * c.intermediate_size
    assert flop_of(name) - flop_of(name, whole=False) == 6 * (mask_slots + slot_0)


def test_every_matmul_has_the_shapes_of_its_place() -> None:
    config, bucket = small_config(), Bucket(B=3, S=128, N=32, K=4)
    shapes = step_matmuls(config, bucket)
    for place in range(0, 15, 3):
        forward, for_input, for_weight = shapes[place : place + 3]
        count, rows, out, into = forward
        assert (count, rows in (3 * 128, 3 * 32 * 4)) == (2, True)
        assert for_input == (count, rows, into, out)
        assert for_weight == (count, out, into, rows)
    assert shapes[15:] == [(1, 384, 64, 128), (1, 64, 128, 384), (1, 288, 512, 64), (1, 288, 64, 512)]


def test_work_grows_with_rows_and_a_window_bounds_it() -> None:
    config = small_config()
    one, three = (Bucket(B=B, S=1024, N=32, K=4) for B in (1, 3))
    assert step_flop(config, three) == 3 * step_flop(config, one)
    full, sliding = (
        small_config(layer_types=(kind,) * 2, sliding_window=64 if kind == SLIDING else None)
        for kind in (FULL, SLIDING)
    )
    # 512 visible keys of a full layer, 64 of a sliding one; own blocks alike.
    assert step_flop(full, one) - step_flop(sliding, one) == 2 * 14 * 64 * 128 * (512 - 64)


def test_planning_adds_what_a_step_costs_whatever_its_size() -> None:
    config, bucket = small_config(), Bucket(B=1, S=128, N=32, K=4)
    for device, fixed in FIXED_FLOP.items():
        assert planning_cost(config, device)(bucket) == step_flop(config, bucket) + fixed


@pytest.mark.parametrize(
    ("flop", "spoken"),
    [(0, "0 kFLOP"), (5.554e10, "55.54 GFLOP"), (7.18e13, "71.8 TFLOP"), (6.4e17, "640 PFLOP"), (5e21, "5000 EFLOP")],
)
def test_work_is_told_in_a_unit_that_can_be_read(flop: float, spoken: str) -> None:
    assert spoken_flop(flop) == spoken
