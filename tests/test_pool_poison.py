"""NaN in a graph pool's free memory: what is free, what is filled, and that every replay begins with it when asked to."""

import ctypes
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from graphs import pool_poison
from graphs.executor import GraphExecutor
from graphs.pool_poison import CLEAN, POISON, fill_pool, free_ranges
from tests.fake_cuda import DEVICE, FakeCuda

POOL = (0, 7)


def segment(address: int, *blocks: tuple[int, str], pool: tuple[int, int] = POOL, device: int = 0) -> dict[str, Any]:
    """As torch.cuda.memory_snapshot() gives it."""
    return {
        "device": device,
        "address": address,
        "segment_pool_id": pool,
        "blocks": [{"size": size, "state": state} for size, state in blocks],
    }


def test_what_nobody_holds_is_free() -> None:
    segments = [
        segment(
            1000,
            (10, "inactive"),
            (20, "active_allocated"),
            (30, "inactive"),
            (5, "inactive"),
            (6, "active_pending_free"),
        ),
        segment(5000, (8, "active_allocated")),
        segment(6000, (8, "inactive")),
        segment(7000, (8, "inactive"), pool=(0, 0)),
        segment(8000, (8, "inactive"), device=1),
    ]
    assert list(free_ranges(segments, DEVICE, POOL)) == [(1000, 10), (1030, 35), (6000, 8)]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """16 floats of which the pool holds the first eight; somebody holds the third and the fourth."""
    values = torch.arange(1.0, 17.0)
    blocks = (8, "inactive"), (8, "active_allocated"), (16, "inactive")

    def snapshot(pool: Any, include_traces: bool) -> list[dict[str, Any]]:
        assert not include_traces
        return [segment(values.data_ptr(), *blocks, pool=pool)]

    def bytes_at(address: int, size: int, device: torch.device) -> Tensor:
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    monkeypatch.setattr(pool_poison, "bytes_at", bytes_at)
    return values


def test_free_memory_is_filled_with_nan_and_the_rest_is_left(memory: Tensor) -> None:
    assert fill_pool(DEVICE, POOL, POISON) == 24
    assert [math.isnan(value) for value in memory.tolist()] == [True] * 2 + [False] * 2 + [True] * 4 + [False] * 8
    assert memory[2:4].tolist() == [3.0, 4.0] and memory[8:].tolist() == list(range(9, 17))
    assert fill_pool(DEVICE, POOL, CLEAN) == 24 and memory[:2].tolist() == [0.0, 0.0]
    assert fill_pool(DEVICE, None, POISON) == 0


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_the_poison_is_nan_in_every_type(dtype: torch.dtype) -> None:
    values = torch.full((16,), POISON, dtype=torch.uint8).view(dtype)
    assert values.float().isnan().all()


def test_a_replay_begins_with_a_poisoned_pool_only_when_asked_to(
    memory: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    cuda._users[POOL] = 0  # type: ignore[index]
    executor = GraphExecutor(DEVICE)
    executor.add("train a", lambda: None)
    executor.build()
    executor.run("train a")
    executor.call("train a")
    assert not memory.isnan().any()
    executor.pool_fill = POISON
    executor.call("train a")
    assert not memory.isnan().any() and executor.filled_mib == 0
    executor.run("train a")
    assert memory.isnan().sum() == 6 and executor.filled_mib == 24 / 2**20
    assert cuda.replays == 2
    executor.close()
