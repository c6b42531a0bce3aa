"""Speculative decoding of prompts, measured: what is accepted, whether the text is the target's own, and what it gains."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from engine.acceptance import Sampler
from engine.decode import Decoded, DecodingTarget, Drafter, plain_generate, speculative_generate
from engine.reports import print_fields, print_table

# New tokens of the first, unmeasured decoding: libraries load and pick kernels in it.
_WARM_UP_TOKENS = 8
# The name of the target that comes with the package.
EMBEDDED = "embedded"


@dataclass(frozen=True)
class DecodeOptions:
    """How prompts are decoded: temperature 0 is greedy; above it, `samples` texts a prompt are drawn."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    samples: int = 1

    def sampler(self) -> Sampler | None:
        """For all texts, one after the other; None when greedy."""
        return Sampler(self.temperature, self.seed) if self.temperature > 0 else None


@dataclass(frozen=True)
class DecodeRequest:
    """What to decode: `target` is a folder, a hub id or EMBEDDED, which has prompts of its own where `prompts` is None."""

    target: str
    prompts: Path | None
    options: DecodeOptions


def decode_prompts(
    target: DecodingTarget[Any], drafter: Drafter, prompts: Sequence[Tensor], options: DecodeOptions
) -> dict[str, Any]:
    """The figures of decoding every prompt both ways, with the drafter and by the target alone.

    speedup is the ratio of new tokens a second, the prompt's own pass left out on both sides. Tokens per second are given on
    CUDA only: on a CPU they say more about the machine than about the drafter.
    """
    like = drafter.embed_tokens
    # The longest prompt is refused before the work begins, not after the others.
    target.new_cache(max(map(len, prompts)) + options.max_new_tokens + drafter.config.block_size)
    speculative_generate(target, drafter, prompts[0], _WARM_UP_TOKENS, options.sampler())
    plain_generate(target, prompts[0], _WARM_UP_TOKENS, options.sampler())
    samplers = options.sampler(), options.sampler()
    drafted, own = [], []
    for prompt in (prompt for prompt in prompts for _ in range(options.samples)):
        drafted.append(speculative_generate(target, drafter, prompt, options.max_new_tokens, samplers[0]))
        own.append(plain_generate(target, prompt, options.max_new_tokens, samplers[1]))
    figures = acceptance(drafted, drafter.config.block_size)
    figures |= {
        "prompts": len(prompts),
        "texts": len(drafted),
        "new_tokens": sum(len(text.tokens) for text in drafted),
        "temperature": options.temperature,
    }
    if options.temperature == 0:
        figures |= against_own_text(drafted, own)
    rates = [_tokens_per_s(texts) for texts in (drafted, own)]
    figures["speedup"] = rates[0] / rates[1] if all(rates) else None
    if like.is_cuda:
        figures |= {
            "tokens_per_s": rates[0],
            "plain_tokens_per_s": rates[1],
            "device": torch.cuda.get_device_name(like.device),
        }
    else:
        figures["device"] = like.device.type
    return figures


def acceptance(texts: Sequence[Decoded], block_size: int) -> dict[str, Any]:
    """What the verifications of all texts accepted.

    acceptance_histogram[n], n = 0..block_size - 1: verifications in which n drafts stood. tokens_per_verification counts
    the target's own token too; None when every text ended with its first token.
    """
    lengths = [length for text in texts for length in text.accept_lengths]
    counts = Counter(lengths)
    return {
        "tokens_per_verification": statistics.fmean(lengths) if lengths else None,
        "verifications": len(lengths),
        "acceptance_histogram": [counts[accepted + 1] for accepted in range(block_size)],
    }


def against_own_text(texts: Sequence[Decoded], own: Sequence[Decoded]) -> dict[str, int]:
    """How far greedy texts are the target's own, token by token.

    differing_tokens should be 0. near_ties: places where the target's two best logits are equal but for rounding;
    near_tie_differences: texts that part from the target's own at such a place, which both passes call one. What follows
    there is not compared: another order of summation chose another text.
    """
    differing = parted = 0
    for text, plain in zip(texts, own, strict=True):
        pairs = enumerate(zip_longest(text.tokens, plain.tokens))
        differs = [i for i, (found, expected) in pairs if found != expected]
        if differs and differs[0] in text.near_ties and differs[0] in plain.near_ties:
            parted += 1
        else:
            differing += len(differs)
    return {
        "differing_tokens": differing,
        "near_ties": sum(len(text.near_ties) for text in texts),
        "near_tie_differences": parted,
    }


def _tokens_per_s(texts: Sequence[Decoded]) -> float:
    # The clock starts at the first new token, which comes with the prompt.
    seconds = sum(text.decode_s for text in texts)
    return sum(len(text.tokens) - 1 for text in texts) / seconds if seconds > 0 else 0.0


def print_decoding(figures: dict[str, Any], console: Console) -> None:
    """The figures of decode_prompts for people."""
    histogram, verifications = figures["acceptance_histogram"], max(1, figures["verifications"])
    print_table(
        console,
        "verifications by accepted drafts",
        ("drafts", "verifications", "share"),
        ((str(n), str(count), f"{count / verifications:.1%}") for n, count in enumerate(histogram)),
    )
    print_fields(console, {name: value for name, value in figures.items() if name != "acceptance_histogram"})
    if figures.get("differing_tokens"):
        console.print("differing_tokens should be 0: see docs/evaluate.md, or decode with --set run.precision=fp32")


@contextmanager
def one_thread() -> Iterator[None]:
    """Decodes small models: batches of one token are too small to share, and threads that wait for each other take longer
    than one alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
