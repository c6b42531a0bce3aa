"""What extraction counts: what became of every record, and what is odd about the samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.chat_tokens import Tokens
from engine.conversations import LeftOut

EXAMPLES = 5
# The target's own cross entropy, over that of a uniform guess, from which on tokens look like chance to it.
CHANCE = 0.75


@dataclass
class Tally:
    """Counts over the records read so far. `left_out`: reason -> count, and the first EXAMPLES with line and detail."""

    records: int = 0
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    cut_samples: int = 0
    cut_tokens: int = 0
    mask_token_samples: int = 0
    beyond_tokenizer: int = 0
    how: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, dict[str, Any]] = field(default_factory=dict)

    def take(self, tokens: Tokens, *, mask_token_id: int, tokenizer_size: int | None) -> None:
        """Count a sample."""
        self.samples += 1
        self.tokens += len(tokens.input_ids)
        self.supervised += int(tokens.loss_mask.sum())
        self.cut_samples += tokens.cut > 0
        self.cut_tokens += tokens.cut
        self.mask_token_samples += bool((tokens.input_ids == mask_token_id).any())
        if tokenizer_size is not None:
            self.beyond_tokenizer += int((tokens.input_ids >= tokenizer_size).sum())
        self.how[tokens.how] = self.how.get(tokens.how, 0) + 1

    def leave_out(self, why: LeftOut) -> None:
        """Count a record that became no sample; the record is the last one read."""
        entry = self.left_out.setdefault(why.reason, {"count": 0, "examples": []})
        entry["count"] += 1
        if len(entry["examples"]) < EXAMPLES:
            entry["examples"].append(f"record {self.records}: {why.detail}"[:200])

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which Tally(**values) makes it again."""
        return asdict(self)


@dataclass
class TargetLoss:
    """The target's cross entropy on the first supervised tokens, in nats."""

    nats: float = 0.0
    tokens: int = 0

    @property
    def mean(self) -> float | None:
        return self.nats / self.tokens if self.tokens else None


def warnings_about(
    tally: Tally, loss: TargetLoss, *, vocab_size: int, mask_token_id: int, tokenizer_size: int | None, unmarked: bool
) -> list[str]:
    """What a user should look at, each with its numbers."""
    found = []
    if unmarked:
        found.append(
            "the chat template has no generation markers: assistant turns were found by "
            + (", ".join(f"{how} in {count:,} samples" for how, count in tally.how.items()) or "nothing")
        )
    if tokenizer_size is not None and tokenizer_size > vocab_size:
        found.append(
            f"the tokenizer has {tokenizer_size:,} tokens, the target's embedding {vocab_size:,} rows: another target's?"
        )
    if tally.beyond_tokenizer:
        found.append(
            f"{tally.beyond_tokenizer:,} of {tally.tokens:,} token ids are beyond the tokenizer's {tokenizer_size:,}: another "
            "tokenizer's?"
        )
    if tally.mask_token_samples:
        found.append(
            f"the mask token {mask_token_id} occurs in {tally.mask_token_samples:,} of {tally.samples:,} samples"
        )
    chance = math.log(vocab_size)
    if loss.mean is not None and loss.mean > CHANCE * chance:
        found.append(
            f"the target's own loss on the supervised tokens is {loss.mean:.2f} nats, a blind guess has {chance:.2f}: another "
            "tokenizer's ids, or a target that was not trained?"
        )
    return found


def left_out_lines(left_out: dict[str, dict[str, Any]], count: int = 2) -> Sequence[str]:
    """One line a reason: how many, and the first `count` examples."""
    return [
        f"{entry['count']:,} left out, {reason} ({'; '.join(entry['examples'][:count])})"
        for reason, entry in left_out.items()
    ]
