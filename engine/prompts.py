"""Prompts for decoding: a text file or JSON lines, as token ids.

A .txt file holds one prompt a line. A .jsonl file holds records as `data extract` reads them: `text`, `messages` or
`conversations` (through the tokenizer's chat template; the assistant's last words are left out, for they are what is to
be decoded) or `input_ids`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.bytes_vocab import encode_bytes
from engine.conversations import LeftOut, Record, parse_record
from engine.hf_target import import_transformers


class Tokenizer(Protocol):
    """What makes token ids of a prompt."""

    def text(self, text: str) -> list[int]: ...

    def chat(self, conversation: Record) -> list[int]: ...


class ByteTokenizer:
    """The embedded target's: a token a byte."""

    def text(self, text: str) -> list[int]:
        """The text's bytes in UTF-8."""
        ids: list[int] = encode_bytes(text.encode()).tolist()
        return ids

    def chat(self, conversation: Record) -> list[int]:
        """Raises ValueError: it has no chat template."""
        raise ValueError("expected text or input_ids, found a conversation: the embedded target has no chat template")


class HFTokenizer:
    """A Hugging Face tokenizer, loaded when the first prompt needs it: prompts of ids do without."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loaded: Any = None

    def text(self, text: str) -> list[int]:
        """With the special tokens that the tokenizer puts around a text."""
        return list(self._tokenizer()(text)["input_ids"])

    def chat(self, conversation: Record) -> list[int]:
        """Through the chat template, up to where the assistant speaks. Raises ValueError without a template."""
        tokenizer = self._tokenizer()
        if tokenizer.chat_template is None:
            raise ValueError(
                f"expected a chat template in the tokenizer of {self._name}, found none; give prompts as text or input_ids"
            )
        try:
            text = tokenizer.apply_chat_template(
                conversation.messages, tools=conversation.tools, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program of its own and raises what it likes
            raise ValueError(f"the chat template of {self._name} refused the conversation: {error}") from error
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _tokenizer(self) -> Any:
        if self._loaded is None:
            transformers = import_transformers()
            try:
                loaded = transformers.AutoTokenizer.from_pretrained(self._name, trust_remote_code=False)
            except Exception as error:  # tokenizers raises bare Exceptions for damaged files
                raise ValueError(
                    f"expected a tokenizer in {self._name}, found none that loads ({error}); give prompts as input_ids"
                ) from error
            # Of some models transformers makes a tokenizer without any words where there are no files.
            if len(loaded) <= len(loaded.get_added_vocab()):
                raise ValueError(f"expected a tokenizer in {self._name}, found none; give prompts as input_ids")
            self._loaded = loaded
        return self._loaded


def check_file(path: Path) -> None:
    """Raises ValueError for a file that is not there or is neither .txt nor .jsonl."""
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(
            f"{path}: expected a .txt file (a prompt a line) or a .jsonl file, found another kind; name one of these"
        )
    if not path.is_file():
        raise ValueError(f"{path}: expected a file of prompts, found no such file; check --prompts")


def read_prompts(path: Path, tokenizer: Tokenizer, vocab_size: int) -> list[Tensor]:
    """The prompts of a file, each int64[T] with T > 0. Raises ValueError naming file and line."""
    check_file(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8, found {error}; save it again") from error
    prompts = list(_prompts(path, lines, tokenizer, vocab_size))
    if not prompts:
        raise ValueError(f"{path}: expected at least one prompt, found none; write some")
    return prompts


def _prompts(path: Path, lines: list[str], tokenizer: Tokenizer, vocab_size: int) -> Iterator[Tensor]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            ids = tokenizer.text(line) if path.suffix == ".txt" else _from_json(line, tokenizer)
            if not ids:
                raise ValueError("expected at least one token, found an empty prompt; leave the line out")
            if not all(0 <= i < vocab_size for i in ids):
                raise ValueError(
                    f"expected token ids from 0 to {vocab_size - 1}, the target's vocabulary, found others; use the target's "
                    "own tokenizer"
                )
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        yield torch.tensor(ids, dtype=torch.int64)


def _from_json(line: str, tokenizer: Tokenizer) -> list[int]:
    try:
        record = parse_record(line.encode())
    except LeftOut as error:
        raise ValueError(str(error)) from error
    if record.input_ids is not None:
        return record.input_ids
    if record.text is not None:
        return tokenizer.text(record.text)
    assert record.messages is not None
    end = len(record.messages)
    while end and record.messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise ValueError("expected a turn that is not the assistant's, found none; add what was asked")
    return tokenizer.chat(replace(record, messages=record.messages[:end]))
