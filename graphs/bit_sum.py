"""Whether two runs of a step left the same bits, without keeping what the first one left: one number of 64 bits is kept."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_WORDS = 2**21  # taken at a time: temporaries of 16 MiB
_STEP = -7046029254386353131  # 2^64 over the golden ratio, odd: its multiples spread over all 64 bits


def bit_sum(tensors: Iterable[Tensor]) -> int:
    """Of contiguous tensors of one device, in their order. Every word of 8 bytes is multiplied by an odd number of its place and
    all are added modulo 2^64: one word that differs always shows, several cancel by chance once in 2^64. Waits for the device."""
    total: Tensor | None = None
    factors: Tensor | None = None
    for tensor in tensors:
        if factors is None:
            places = torch.arange(1, _WORDS + 1, device=tensor.device) * _STEP
            factors = (places ^ (places >> 29)) * _STEP | 1
            total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for words in _words(tensor).split(_WORDS):
            assert total is not None
            total = total * _STEP + (words * factors[: words.numel()]).sum()
    return int(total) if total is not None else 0


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bytes as int64[n], the last one filled up with zeros; a view where it can be one."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.numel() % 8:
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 8)])
    elif flat.storage_offset() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)
