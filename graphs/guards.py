"""Proofs that the steady state is what it should be: no host sync, no allocation, no compilation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@contextmanager
def host_sync_is_an_error(active: bool = True) -> Iterator[None]:
    """Inside, an operation that makes the host wait for the device raises where it stands. No effect without CUDA."""
    if not active or not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@dataclass(frozen=True)
class Counters:
    """device_allocations: requests to torch's caching allocator. compilations: graphs that torch.compile made."""

    device_allocations: int
    compilations: int

    @staticmethod
    def read(device: torch.device) -> Counters:
        """The counts since the process started; subtract two readings."""
        allocations = 0
        if device.type == "cuda":
            allocations = torch.cuda.memory_stats(device).get("allocation.all.allocated", 0)
        from torch._dynamo.utils import counters

        return Counters(allocations, int(counters["stats"].get("unique_graphs", 0)))

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(self.device_allocations - earlier.device_allocations, self.compilations - earlier.compilations)
