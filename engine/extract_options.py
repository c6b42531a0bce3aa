"""What `data extract` is asked for, and what follows from it for a target and a tokenizer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from buffers.dataset_writer import SHARD_TOKENS
from buffers.manifest import sha256
from engine.bytes_vocab import MASK_TOKEN_ID, VOCAB_SIZE
from engine.chat_tokens import ByteTokens, ChatTokens
from engine.drafter_config import default_target_layer_ids
from engine.hf_target import import_transformers

BYTES = "bytes"


@dataclass(frozen=True, kw_only=True)
class ExtractOptions:
    """What `data extract` is asked for; names and meaning are those of its options."""

    target: str
    data: Path
    out: Path
    tokenizer: str = ""
    chat_template: Path | None = None
    layers: tuple[int, ...] = ()
    num_taps: int = 5
    last_hidden: str = "pre"
    mask_token_id: int | None = None
    max_length: int = 4096
    too_long: str = "cut"
    max_samples: int = 0
    assistant_only: bool = True
    token_budget: int = 8192
    shard_tokens: int = SHARD_TOKENS
    device: str = "auto"
    dtype: str = "auto"


def choose_layers(options: ExtractOptions, num_layers: int) -> tuple[int, ...]:
    """The layers asked for, or z-lab's spacing of num_taps. Raises ValueError for others than 0..T-1, each once."""
    if not options.layers:
        return default_target_layer_ids(num_layers, options.num_taps)
    wrong = [layer for layer in options.layers if not 0 <= layer < num_layers]
    if wrong:
        raise ValueError(
            f"--layers: expected numbers in 0..{num_layers - 1}, found {wrong}. Layer t is the residual stream behind layer t, "
            "counted from 0."
        )
    if list(options.layers) != sorted(set(options.layers)):
        raise ValueError(
            f"--layers: expected ascending numbers, each once, found {list(options.layers)}. A drafter takes them in that order."
        )
    return options.layers


@dataclass(frozen=True)
class Tokenizer:
    """What makes tokens of text, None without a tokenizer, which `missing` then explains; `size` is its number of tokens."""

    to_tokens: ChatTokens | ByteTokens | None
    size: int | None
    mask_token_id: int | None = None
    missing: str = ""

    @property
    def unmarked(self) -> bool:
        """Whether there is a chat template that does not mark the assistant's turns."""
        chat = self.to_tokens
        return isinstance(chat, ChatTokens) and chat.template is not None and not chat.marks_turns


def load_tokenizer(options: ExtractOptions) -> Tokenizer:
    """The target's tokenizer or the one asked for. Raises ValueError when one that was asked for cannot be loaded."""
    if options.tokenizer == BYTES:
        return Tokenizer(ByteTokens(), VOCAB_SIZE, MASK_TOKEN_ID)
    name = options.tokenizer or options.target
    try:
        loaded = import_transformers().AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    # transformers has no one type for "there is none": OSError, ValueError, KeyError, by what is missing.
    except Exception as error:
        why = f"{name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        if options.tokenizer or options.chat_template:
            raise ValueError(
                f"--tokenizer: expected a tokenizer that can be loaded, found {why}; name another"
            ) from error
        return Tokenizer(None, None, missing=why)
    if len(loaded) <= len(loaded.get_added_vocab()):
        # What transformers makes of a folder without a tokenizer's files.
        return Tokenizer(None, None, missing=f"{name} has none")
    if options.chat_template is not None:
        loaded.chat_template = options.chat_template.read_text(encoding="utf-8")
    return Tokenizer(ChatTokens(loaded, assistant_only=options.assistant_only), len(loaded), loaded.mask_token_id)


def choose_mask_token(wanted: int | None, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, str]:
    """The mask token and where it comes from: the one asked for, the tokenizer's own, or the first id behind its tokens.

    The last is what SpecForge and SGLang come to, which add <|MASK|> to the tokenizer. Raises ValueError when there is none.
    """
    if wanted is not None:
        if not 0 <= wanted < vocab_size:
            raise ValueError(
                f"--mask-token-id: expected a row of the embedding, 0..{vocab_size - 1}, found {wanted}. Name one."
            )
        return wanted, "as asked"
    own, size = tokenizer.mask_token_id, tokenizer.size
    if own is not None and own < vocab_size:
        return own, "the tokenizer's own"
    if size is not None and size < vocab_size:
        return size, f"the first of {vocab_size - size} rows of the embedding that the tokenizer does not use"
    why = "no tokenizer" if size is None else f"{size} tokens for {vocab_size} rows of the embedding"
    raise ValueError(
        f"mask token: expected a tokenizer with a mask token or fewer tokens than the embedding has rows, found {why}. Name a "
        "token that never occurs with --mask-token-id."
    )


def source_of(options: ExtractOptions, precision: str) -> str:
    """All that decides about the samples but the target's config: an unfinished dataset goes on only with the same."""
    values = {
        key: value for key, value in asdict(options).items() if key not in ("out", "device", "token_budget", "dtype")
    }
    values |= {"data": sha256(options.data), "precision": precision}
    if options.chat_template is not None:
        values["chat_template"] = sha256(options.chat_template)
    return json.dumps(values, sort_keys=True)
