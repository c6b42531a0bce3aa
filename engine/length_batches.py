"""Batches of like length: what pads a row stands behind its tokens, where a causal model cannot see it."""

from collections.abc import Iterator, Sequence

# Lengths are rounded up to this, so that a device meets few shapes.
LENGTH_STEP = 32


def batches_of_like_length(
    lengths: Sequence[int], token_budget: int, step: int = LENGTH_STEP
) -> Iterator[tuple[list[int], int]]:
    """Groups of indices by rising length, each with the length that its rows are padded to.

    A group's padded size is at most `token_budget` tokens, or the group is one row.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batch and _padded(lengths[index], step) * (len(batch) + 1) > token_budget:
            yield batch, _padded(lengths[batch[-1]], step)
            batch = []
        batch.append(index)
    if batch:
        yield batch, _padded(lengths[batch[-1]], step)


def _padded(length: int, step: int) -> int:
    return -(-length // step) * step
