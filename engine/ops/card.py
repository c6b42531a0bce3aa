"""What the kernels must know of the card to choose their sizes."""

from __future__ import annotations

from functools import cache

import torch
import triton

# Bytes that a block may have on Hopper and on data-centre Blackwell. The other cards have 99 KiB or more.
LARGE_SHARED_MEMORY = 227 * 1024
# What a kernel needs besides its pipeline: reductions across warps.
_RESERVE = 8 * 1024


@cache
def shared_memory_and_processors(device: torch.device) -> tuple[int, int]:
    """(bytes of shared memory that a block may have, multiprocessors); small numbers where Triton is interpreted."""
    if device.type != "cuda":
        return LARGE_SHARED_MEMORY, 8
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return properties["max_shared_mem"], properties["multiprocessor_count"]


def pipeline_stages(wanted: int, bytes_a_stage: int, device: torch.device) -> int:
    """The depth of a load pipeline that a block has room for: `wanted`, or none (1). A stage in flight holds bytes_a_stage."""
    room = shared_memory_and_processors(device)[0] - _RESERVE
    return wanted if (wanted - 1) * bytes_a_stage <= room else 1
