"""Tile sizes of the attention kernels and how many ways context dK/dV is split: functions of shapes and of the card only.

Nothing is tuned at run time: the same shapes on the same card always give the same tiles, hence the same bits.
R = H / G, the heads of a GQA group. A row of a tile is a (draft position, head of the group) pair.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cache

LARGE_SHARED_MEMORY = 227 * 1024  # bytes a block may have: Hopper and data-centre Blackwell; other cards have 99 KiB or more


@dataclass(frozen=True)
class Tile:
    """Query rows and context keys that one program holds at a time, its warps and the depth of its load pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """The tile of each kernel: forward, dQ with draft dK/dV, context dK/dV."""

    forward: Tile
    dq: Tile
    dkv: Tile


@dataclass(frozen=True)
class BlockLayout:
    """Draft blocks in a tile of rows: `blocks` whole blocks, or one block spread over `parts` tiles of `positions` each."""

    blocks: int
    parts: int
    positions: int
    keys: int  # draft keys of a tile, padded to a power of two that a matrix product accepts


# (head dim, large shared memory) for two-byte types. Shared memory: bytes of a tile x stages, checked by compiling for sm_90,
# sm_86 and sm_120; registers: the fp32 accumulators of 256 threads leave room for one product beside them.
_TILES = {
    (64, True): Tiles(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    (128, True): Tiles(Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2)),
    (256, True): Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    (64, False): Tiles(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    (128, False): Tiles(Tile(128, 32, 8, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)),
    (256, False): Tiles(Tile(64, 32, 8, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
}
# fp32 serves tests and debugging: exact products take no tensor core, and wide tiles of them only spill.
_FP32 = Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))


def tiles_for(E: int, itemsize: int, shared_memory: int) -> Tiles:
    """Tiles for head dim E, element size in bytes and the shared memory in bytes that a block may have on the card.

    Raises ValueError for head dims other than 16, 32, 64, 128 and 256.
    """
    if E not in (16, 32, 64, 128, 256):
        raise ValueError(f"expected a head dim of 64, 128 or 256 (16 and 32 for tests), found {E}. Use attention = 'flex'.")
    if itemsize > 2:
        return _FP32
    return _TILES[max(E, 64), shared_memory >= LARGE_SHARED_MEMORY]


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << (value - 1).bit_length()


def block_layout(rows: int, R: int, K: int) -> BlockLayout:
    """How draft blocks of K positions with R heads each lie in tiles of `rows` rows."""
    positions = rows // R
    if not positions:
        raise ValueError(f"expected at most {rows} heads in a GQA group, found {R}. Use attention = 'flex'.")
    blocks = positions // K
    if not blocks:
        return BlockLayout(1, -(-K // positions), positions, max(16, power_of_two(K)))
    return BlockLayout(blocks, 1, blocks * K, max(16, power_of_two(blocks * K)))


@cache
def splits_for(S: int, query_tiles: int, heads: int, keys: int, window: int | None, slots: int) -> int:
    """Programs that share the query range of one tile of context keys: the fewest that keep all slots busy.

    heads: kv heads of all rows together (B * G); slots: programs the card runs at once. The load is that of anchors spread
    evenly over S - real anchors would need a look at the device. Heaviest first, each to the slot that is free first; taken
    is the first split within 10 % of the ideal, or the best of all.
    """
    reach = [min(S - first, S if window is None else keys + window) / S for first in range(0, S, keys)]
    ideal = heads * query_tiles * sum(reach) / slots
    best, best_time = 1, float("inf")
    for splits in (1, 2, 3, 4, 6, 8, 12, 16):
        free = [0.0] * slots
        for share in reach:
            for _ in range(heads * splits):
                # One tile's time for a program to begin and end with; it also ends the gain from splitting further.
                heapq.heapreplace(free, free[0] + 1 + -(-query_tiles * share // splits))
        time = max(free)
        if time < 0.98 * best_time:
            best, best_time = splits, time
        if time <= 1.1 * ideal or heads * len(reach) > 8 * slots:
            break
    return best
