"""Proofs that the steady state is what it should be: no host sync, no allocation, no compilation."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@contextmanager
def host_sync_is_an_error(active: bool = True) -> Iterator[None]:
    """Inside, an operation that makes the host wait for the device raises where it stands. No effect without CUDA."""
    if not active or not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def noting_host_syncs(places: list[str]) -> Iterator[None]:
    """Inside, the place (file:line) of every operation that makes the host wait for the device is added to `places`, and the
    operation is done. Other warnings are given afterwards. Nothing is noted without CUDA."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        caught.clear()  # what it says of itself
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if "synchronizing CUDA operation" in str(warning.message):
            places.append(f"{warning.filename}:{warning.lineno}")
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@dataclass(frozen=True)
class Counters:
    """device_allocations: requests to torch's caching allocator. compilations: graphs that torch.compile made, and Triton
    kernels made ready for a new combination of types and constants, from disk or anew."""

    device_allocations: int
    compilations: int

    @staticmethod
    def read(device: torch.device) -> Counters:
        """The counts since this module was imported; subtract two readings."""
        allocations = 0
        if device.type == "cuda":
            allocations = torch.cuda.memory_stats(device).get("allocation.all.allocated", 0)
        # Not imported for this: it takes seconds, and who has not loaded it has compiled nothing.
        dynamo = sys.modules.get("torch._dynamo.utils")
        graphs = int(dynamo.counters["stats"].get("unique_graphs", 0)) if dynamo is not None else 0
        return Counters(allocations, graphs + _triton_kernels)

    def __add__(self, other: Counters) -> Counters:
        return Counters(self.device_allocations + other.device_allocations, self.compilations + other.compilations)

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(self.device_allocations - earlier.device_allocations, self.compilations - earlier.compilations)


def kernels_compiled() -> int:
    """Triton kernels, and graphs of torch.compile, that no cache on disk held - or that no cache takes - and that were compiled
    since this module was imported."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return _compiled_anew
    counts = dynamo.counters["inductor"]
    return _compiled_anew + sum(int(counts.get(f"fxgraph_cache_{how}", 0)) for how in ("miss", "bypass"))


_triton_kernels = 0
_compiled_anew = 0


def _count_triton_kernels() -> None:
    """Hooks into Triton's compilation, before whatever hook is there already. Without Triton there is nothing to count."""
    try:
        import triton
    except ImportError:
        return
    earlier = triton.knobs.runtime.jit_post_compile_hook

    def count(*args: Any, **kwargs: Any) -> Any:
        global _triton_kernels
        _triton_kernels += 1
        return earlier(*args, **kwargs) if earlier is not None else None

    triton.knobs.runtime.jit_post_compile_hook = count
    listener = triton.knobs.compilation.listener

    def listen(*args: Any, **kwargs: Any) -> None:
        global _compiled_anew
        _compiled_anew += not kwargs["cache_hit"]
        if listener is not None:
            listener(*args, **kwargs)

    triton.knobs.compilation.listener = listen


_count_triton_kernels()
