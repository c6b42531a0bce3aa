"""The records of a file in windows of a shard's tokens, and how far each of them reaches into the file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.chat_tokens import Tokens, checked, given_tokens
from engine.conversations import LeftOut, parse_record, read_lines
from engine.extract_options import ExtractOptions, Tokenizer
from engine.extract_tally import Tally


@dataclass(frozen=True)
class Window:
    """Samples of one shard, the offset in the file behind the last of them, and the counts up to there."""

    samples: list[Tokens]
    offset: int
    tally: dict[str, Any]


class Reader:
    """Reads records, makes samples of them and counts what happens in `tally`; hands out windows."""

    def __init__(
        self, options: ExtractOptions, tokenizer: Tokenizer, tally: Tally, *, vocab_size: int, mask_token_id: int
    ) -> None:
        self.tally = tally
        self._options, self._tokenizer = options, tokenizer
        self._vocab_size, self._mask_token_id = vocab_size, mask_token_id

    def windows(self, offset: int) -> Iterator[Window]:
        """Windows of at most shard_tokens tokens, or one sample, from this offset in the file on.

        Raises ValueError for text when there is no tokenizer, and conversations without a chat template.
        """
        options, tally = self._options, self.tally
        samples: list[Tokens] = []
        tokens = 0
        for line, behind in read_lines(options.data, offset):
            if options.max_samples and tally.samples >= options.max_samples:
                break
            try:
                sample = self._sample(line)
            except LeftOut as why:
                tally.records += 1
                tally.leave_out(why)
                offset = behind
                continue
            length = len(sample.input_ids)
            if samples and tokens + length > options.shard_tokens:
                # This record belongs to the next window: neither counted nor passed over yet.
                yield Window(samples, offset, tally.to_json())
                samples, tokens = [], 0
            tally.records += 1
            tally.take(sample, mask_token_id=self._mask_token_id, tokenizer_size=self._tokenizer.size)
            samples.append(sample)
            tokens += length
            offset = behind
        if samples:
            yield Window(samples, offset, tally.to_json())

    def _sample(self, line: bytes) -> Tokens:
        options = self._options
        record = parse_record(line)
        if record.input_ids is not None:
            tokens = given_tokens(record, assistant_only=options.assistant_only)
        elif self._tokenizer.to_tokens is None:
            raise ValueError(
                f"expected a tokenizer for the text in {options.data}, found none: {self._tokenizer.missing}. Give one with "
                "--tokenizer, or write input_ids."
            )
        else:
            tokens = self._tokenizer.to_tokens(record)
        return checked(tokens, vocab_size=self._vocab_size, max_length=options.max_length, too_long=options.too_long)


class Progress:
    """A line on disk for every window: the samples that the dataset has with it, and the state to go on from behind it."""

    def __init__(self, path: Path, samples: int) -> None:
        """Takes the state that belongs to `samples` and drops what was noted behind it. Raises ValueError without one."""
        self.state: dict[str, Any] = {}
        self._path = path
        kept: list[str] = []
        for line in path.read_text().splitlines() if path.is_file() else ():
            try:
                state = json.loads(line)
            except ValueError:
                break  # the line that was being written
            if state["samples"] > samples:
                break
            kept.append(line)
            self.state = state
        if self.state.get("samples", 0) != samples:
            raise ValueError(
                f"expected in {path} how much of the data the {samples} samples there are made of, found nothing about it. "
                "Remove the folder and begin again."
            )
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        temporary.replace(path)

    def note(self, state: dict[str, Any]) -> None:
        """Puts a state on disk."""
        with self._path.open("a") as file:
            file.write(json.dumps(state) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """The dataset is whole."""
        self._path.unlink(missing_ok=True)
