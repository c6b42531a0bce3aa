"""NaN in a graph pool's free memory between two replays: a captured step that reads what it has not written is found out.

After the captures a pool's memory belongs to the graphs, though torch counts it as free. What a replay leaves there is dead:
the next replay, of whichever graph, writes over it. Only tensors that somebody still holds live on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

# Every byte. All bits set is NaN in every floating type that a step has (bf16, fp16, fp32, fp64, both of fp8), and -1 in its
# integers.
POISON, CLEAN = 0xFF, 0x00


class _Bytes:
    """Device memory by its address, for torch to look at."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


def bytes_at(address: int, size: int, device: torch.device) -> Tensor:
    """uint8 [size], a view of device memory that somebody else owns."""
    return torch.as_tensor(_Bytes(address, size), device=device)


def fill_pool(device: torch.device, pool: Any, byte: int) -> int:
    """Fills what is free in the pool (a torch.cuda.graph_pool_handle(); None: there is none) with POISON or CLEAN, in the order
    of the current stream; returns how many bytes that is. Allocates nothing and waits for nothing."""
    if pool is None:
        return 0
    filled = 0
    for address, size in free_ranges(torch.cuda.memory_snapshot(pool, include_traces=False), device, pool):
        bytes_at(address, size, device).fill_(byte)
        filled += size
    return filled


def free_ranges(segments: Iterable[Mapping[str, Any]], device: torch.device, pool: Any) -> Iterator[tuple[int, int]]:
    """(address, bytes) of all that nobody holds, of torch.cuda.memory_snapshot()'s segments those of the device and the pool;
    neighbours are one range. Blocks that are allocated, or wait for another stream before they are free, are left out."""
    for segment in segments:
        if segment["device"] != device.index or tuple(segment["segment_pool_id"]) != tuple(pool):
            continue
        address = start = segment["address"]
        for block in segment["blocks"]:
            end = address + block["size"]
            if block["state"] != "inactive":
                if address > start:
                    yield start, address - start
                start = end
            address = end
        if address > start:
            yield start, address - start
