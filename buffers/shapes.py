"""The fixed sizes of a training step, and the one legend of axis names for the whole repository.

B rows   S context tokens of a row   N draft blocks (anchors) of a row   K tokens of a block   Q = N * K draft positions
L target layers tapped   D hidden   H heads   G kv heads   E head dim   V vocabulary

A tensor's name carries its axes where they are in play: `q_BHQE`.
"""

import math
from dataclasses import dataclass, fields

# Keys and queries are worked on in tiles of this many; S and Q are multiples of it, so that no tile is ragged.
ATTENTION_TILE = 128


@dataclass(frozen=True, order=True)
class Bucket:
    """Every shape of a step: B rows of S context tokens and N draft blocks of K tokens each.

    Raises ValueError when a size is not positive or when S or Q = N * K is not a multiple of `tile`.
    """

    B: int
    S: int
    N: int
    K: int
    tile: int = ATTENTION_TILE

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value <= 0:
                raise ValueError(f"expected a positive {field.name} in a bucket, found {value}. Set it to at least 1.")
        if self.S % self.tile:
            raise ValueError(
                f"expected S to be a multiple of the attention tile {self.tile}, found S = {self.S}. "
                f"Round it up to {round_up(self.S, self.tile)}."
            )
        if self.Q % self.tile:
            raise ValueError(
                f"expected Q = N * K to be a multiple of the attention tile {self.tile}, found {self.N} * {self.K} = "
                f"{self.Q}. Raise N to {anchors_for(self.N, self.N, self.K, self.tile)}."
            )

    @property
    def Q(self) -> int:
        """Draft positions of a row."""
        return self.N * self.K

    @property
    def name(self) -> str:
        """The bucket as B x S x N, for tables and messages."""
        return f"{self.B}x{self.S}x{self.N}"

    @property
    def tokens(self) -> int:
        """Positions that the whole bucket holds, context and draft: B * (S + Q)."""
        return self.B * (self.S + self.Q)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def anchors_for(most_eligible: int, num_anchors: int, K: int, tile: int) -> int:
    """A bucket's N: min(num_anchors, most_eligible), at least 1, rounded up so that N * K is a multiple of `tile`.

    `most_eligible` is the most eligible anchor positions that any sample of the bucket has. Raises ValueError when
    num_anchors, K or tile is not positive.
    """
    for name, value in (("num_anchors", num_anchors), ("K", K), ("tile", tile)):
        if value <= 0:
            raise ValueError(f"expected a positive {name}, found {value}. Set it to at least 1.")
    return round_up(max(1, min(most_eligible, num_anchors)), tile // math.gcd(tile, K))
