"""What a measured model holds is counted from before it was there."""

import pytest
import torch

from bench.memory import DeviceMemory

CUDA = torch.device("cuda", 0)


def test_what_was_there_before_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    now = {"memory_allocated": 2 * gib, "memory_reserved": 3 * gib, "max_memory_allocated": 9 * gib}
    for name in now:
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device, name=name: now[name])
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *device: None)

    def reset(device: torch.device) -> None:
        now["max_memory_allocated"] = now["memory_allocated"]

    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", reset)
    memory = DeviceMemory(CUDA)
    assert memory.read() == {"peak_gib": 0.0, "held_gib": 0.0}
    now.update(memory_allocated=5 * gib, memory_reserved=7 * gib, max_memory_allocated=6 * gib)
    assert memory.read() == {"peak_gib": 4.0, "held_gib": 4.0}
    memory.forget_peak()
    assert memory.peak_gib == 3.0, "the peak begins at what is there, the rest still counts"


def test_the_cpu_has_none() -> None:
    assert DeviceMemory(torch.device("cpu")).read() == {"peak_gib": None, "held_gib": None}
