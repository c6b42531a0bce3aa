"""Which positions may start a draft block, and which of them do in a given epoch.

Sampling is a pure function of (seed, epoch, sample id, piece): the same on every rank, in every batch order and after
a resume. It runs on the host, in the loader, and always fills exactly N slots, so no shape depends on the data.
"""

import numpy as np
from numpy.typing import NDArray

# The second word of the Philox key: random numbers for different ends never come from the same stream.
ANCHOR_STREAM = 0
ORDER_STREAM = 1
MIXTURE_STREAM = 2


def eligible_positions(
    loss_mask_S: NDArray[np.uint8], document_ids_S: NDArray[np.integer] | None = None
) -> NDArray[np.int64]:
    """Positions i, ascending, with loss_mask[i] and loss_mask[i + 1], both in the same document. int64[...]."""
    mask = loss_mask_S != 0
    pair = mask[:-1] & mask[1:]
    if document_ids_S is not None:
        pair &= document_ids_S[:-1] == document_ids_S[1:]
    return np.flatnonzero(pair)


def random_order(
    length: int, *, seed: int, stream: int, counter: tuple[int, int, int] = (0, 0, 0)
) -> NDArray[np.int64]:
    """A random permutation of range(length), int64[length], given by (seed, stream, counter) alone.

    The keys are raw 64-bit Philox words and the sort is stable, so it does not hang on the algorithms behind numpy's
    `Generator`, which may change between versions. Raises ValueError when seed or a counter word is negative.
    """
    if min(seed, *counter) < 0:
        raise ValueError(f"expected a seed and counters of at least 0, found seed {seed}, counter {counter}.")
    # Word 0 of the counter is the one that Philox advances; ours lie above it and never collide.
    philox = np.random.Philox(
        key=np.array([seed, stream], dtype=np.uint64), counter=np.array([0, *counter], dtype=np.uint64)
    )
    return np.argsort(philox.random_raw(length), kind="stable")


def sample_anchors(
    eligible: NDArray[np.int64], N: int, *, seed: int, epoch: int, sample_id: int, piece: int = 0
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """The first N of one random permutation of `eligible`, sorted ascending, in exactly N slots.

    Returns anchor_positions int32[N] and block_keep_mask uint8[N]. When fewer than N are eligible the unused slots
    come last, with position 0 and keep 0.
    """
    order = random_order(len(eligible), seed=seed, stream=ANCHOR_STREAM, counter=(epoch, sample_id, piece))
    chosen = np.sort(eligible[order[:N]])
    anchor_positions = np.zeros(N, dtype=np.int32)
    block_keep_mask = np.zeros(N, dtype=np.uint8)
    anchor_positions[: len(chosen)] = chosen
    block_keep_mask[: len(chosen)] = 1
    return anchor_positions, block_keep_mask
