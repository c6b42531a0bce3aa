"""What torch's caching allocator would hold of the device for a sequence of allocations: its rounding, segments, best fit and
splitting (c10/cuda/CUDACachingAllocator.cpp), for one stream of one private pool, from which nothing is given back."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

MIB = 2**20
_SMALLEST = 512  # bytes; every size is rounded up to a multiple
_SMALL = MIB  # up to here a request is served from small segments
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT = 10 * MIB  # from here on a request without a free block gets a segment of its own size
_ROUND_LARGE = 2 * MIB


@dataclass(order=True)
class Block:
    """A piece of a segment, ordered as the allocator searches: by size, then address."""

    size: int
    address: int
    small: bool = field(compare=False)
    segment_end: int = field(compare=False)
    segment_start: int = field(compare=False)


@dataclass
class Pool:
    """Allocations in the order of a step. Bytes. reserved: held of the device; live and most_live: in use, now and at most."""

    reserved: int = 0
    live: int = 0
    most_live: int = 0
    _free: list[Block] = field(default_factory=list)
    _end: int = 0

    def new(self, nbytes: int) -> Block:
        """The smallest free block that holds nbytes, or a new segment; what is left of it is free again, if it is large enough
        to be worth keeping apart."""
        size = max(_SMALLEST, -(-nbytes // _SMALLEST) * _SMALLEST)
        small = size <= _SMALL
        found = next((block for block in self._free if block.small == small and block.size >= size), None)
        if found is None:
            found = self._segment(size, small)
        else:
            self._free.remove(found)
        left = found.size - size
        if left >= _SMALLEST if small else left > _SMALL:
            rest = Block(left, found.address + size, small, found.segment_end, found.segment_start)
            insort(self._free, rest)
            found = Block(size, found.address, small, found.segment_end, found.segment_start)
        self.live += found.size
        self.most_live = max(self.most_live, self.live)
        return found

    def free(self, *blocks: Block) -> None:
        """Given back to the pool, and joined with free neighbours of the same segment."""
        for block in blocks:
            self.live -= block.size
            for other in [b for b in self._free if b.segment_start == block.segment_start]:
                if other.address + other.size == block.address or block.address + block.size == other.address:
                    self._free.remove(other)
                    start = min(block.address, other.address)
                    block = Block(block.size + other.size, start, block.small, block.segment_end, block.segment_start)
            insort(self._free, block)

    def _segment(self, size: int, small: bool) -> Block:
        if small:
            taken = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            taken = _LARGE_SEGMENT
        else:
            taken = -(-size // _ROUND_LARGE) * _ROUND_LARGE
        start = self._end
        self._end += taken
        self.reserved += taken
        return Block(taken, start, small, start + taken, start)
