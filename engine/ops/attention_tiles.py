"""Tile sizes of the attention kernels, and how many ways context dK/dV is split: functions of shapes and of the card.

Nothing is tuned at run time: the same shapes on the same card always give the same tiles, hence the same bits.
R = H / G heads make a GQA group; a row of a tile is one draft position of one head.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cache

from engine.ops.card import LARGE_SHARED_MEMORY


@dataclass(frozen=True)
class Tile:
    """Query rows and context keys that one program holds at a time, its warps, and the depth of its load pipeline."""

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
    """Draft blocks in a tile of rows: `blocks` whole ones, or one that is spread over `parts` tiles.

    positions: draft positions of a tile; keys: its draft keys, padded to a power of two that a matrix product accepts.
    """

    blocks: int
    parts: int
    positions: int
    keys: int


# By (head dim, large shared memory), for types of two bytes. All compile within 227 KiB (sm_90) or 99 KiB (sm_86,
# sm_89, sm_120). dkv keeps two fp32 sums of keys x head dim, which limits its tile; three stages hide its loads.
_TILES = {
    (64, True): Tiles(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    (128, True): Tiles(Tile(128, 64, 8, 4), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    (256, True): Tiles(Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 3)),
    (64, False): Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    (128, False): Tiles(Tile(128, 32, 8, 2), Tile(64, 32, 4, 2), Tile(32, 64, 8, 2)),
    (256, False): Tiles(Tile(32, 32, 4, 2), Tile(32, 16, 4, 2), Tile(32, 32, 8, 1)),
}
# Where a whole block of all heads of a group fits into 64 rows, this does as well on long contexts and 15 % better on short
# ones (swept on an H200, S = 512 and 2048): two programs share a multiprocessor, and edge tiles waste less.
_SMALL_BLOCK_ROWS = 64
_SMALL_BLOCKS = Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 128, 8, 3))
# Two such blocks in 64 rows: half the rows a step suits dK/dV better (S = 512: 0.238 ms for the backward pass, not 0.266).
_TINY_BLOCK_ROWS = 32
_TINY_BLOCKS = Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(32, 64, 4, 3))
# fp32 serves tests: exact products take no tensor core, and wide tiles of them would only spill.
_FP32 = Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))
_HEAD_DIMS = (16, 32, 64, 128, 256)
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)


def tiles_for(E: int, itemsize: int, shared_memory: int, block_rows: int) -> Tiles:
    """Tiles for head dim E, elements of `itemsize` bytes and a card whose blocks may have `shared_memory` bytes.

    block_rows: rows that a draft block takes, K * R.

    Raises ValueError for head dims other than 16, 32, 64, 128 and 256.
    """
    if E not in _HEAD_DIMS:
        raise ValueError(f"expected a head dim among {_HEAD_DIMS}, found {E}. Use attention = 'flex'.")
    if itemsize > 2:
        return _FP32
    large = shared_memory >= LARGE_SHARED_MEMORY
    if E == 128 and large and block_rows <= _SMALL_BLOCK_ROWS:
        return _TINY_BLOCKS if block_rows <= _TINY_BLOCK_ROWS else _SMALL_BLOCKS
    return _TILES[max(E, 64), large]


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << (value - 1).bit_length()


def block_layout(rows: int, R: int, K: int) -> BlockLayout:
    """How draft blocks of K positions of R heads lie in tiles of `rows` rows. Raises ValueError where R > rows."""
    positions = rows // R
    if not positions:
        raise ValueError(f"expected at most {rows} heads in a GQA group, found {R}. Use attention = 'flex'.")
    blocks = positions // K
    if not blocks:
        return BlockLayout(1, -(-K // positions), positions, max(16, power_of_two(K)))
    return BlockLayout(blocks, 1, blocks * K, max(16, power_of_two(blocks * K)))


@cache
def splits_for(S: int, query_tiles: int, heads: int, keys: int, window: int | None, slots: int) -> int:
    """Programs that share the query range of one tile of `keys` context keys: the fewest that keep the card busy.

    heads: kv heads of all rows together (B * G); slots: programs that the card runs at once. Anchors are taken to be
    spread evenly over S, since a look at the real ones would be a host sync. Programs are dealt out as the card does:
    heaviest first, each to the slot that is free first. Taken is the first split within 10 % of ideal, else the best.
    """
    seen = [min(S - first, S if window is None else keys + window) / S for first in range(0, S, keys)]
    ideal = heads * query_tiles * sum(seen) / slots
    if heads * len(seen) > 8 * slots:
        return 1
    best, best_time = 1, float("inf")
    for splits in _SPLITS:
        free = [0.0] * slots
        for share in seen:
            # One unit more than its tiles, for a program's beginning and end: that is where splitting stops paying.
            time = 1 + -(-query_tiles * share // splits)
            for _ in range(heads * splits):
                heapq.heapreplace(free, free[0] + time)
        if max(free) < 0.98 * best_time:
            best, best_time = splits, max(free)
        if best_time <= 1.1 * ideal:
            break
    return best
