"""The records of a file in windows, and on disk how far the shards written so far reach into them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffers.untrusted import parse_json
from engine.chat_tokens import Tokens, checked, given_tokens
from engine.conversations import LeftOut, parse_record, read_lines
from engine.extract_options import ExtractOptions, Tokenizer
from engine.extract_tally import Tally

# Tokens that are sorted by length together, so that little is padded; their ids and masks are held, not their states.
WINDOW_TOKENS = 2**18


@dataclass(frozen=True)
class Window:
    """Samples, where they begin and end in the file, in bytes, and the counts before them."""

    samples: list[Tokens]
    start: int
    stop: int
    tally: dict[str, Any]


class Reader:
    """Reads records, makes samples of them and counts what happens in `tally`; hands out windows."""

    def __init__(
        self, options: ExtractOptions, tokenizer: Tokenizer, tally: Tally, *, vocab_size: int, mask_token_id: int
    ) -> None:
        self.tally = tally
        self.end = 0
        self._options, self._tokenizer = options, tokenizer
        self._vocab_size, self._mask_token_id = vocab_size, mask_token_id

    def windows(self, start: int) -> Iterator[Window]:
        """Windows of at most WINDOW_TOKENS tokens, or one sample, from this offset in the file on; then `end` is set.

        Raises ValueError for text when there is no tokenizer, and conversations without a chat template.
        """
        options, tally = self._options, self.tally
        samples: list[Tokens] = []
        tokens, stop, before = 0, start, tally.to_json()
        for line, behind in read_lines(options.data, start):
            if options.max_samples and tally.samples >= options.max_samples:
                break
            try:
                sample = self._sample(line)
            except LeftOut as why:
                tally.records += 1
                tally.leave_out(why)
                stop = behind
                continue
            length = len(sample.input_ids)
            if samples and tokens + length > WINDOW_TOKENS:
                # This record belongs to the next window: neither counted nor passed over yet.
                yield Window(samples, start, stop, before)
                samples, tokens, start, before = [], 0, stop, tally.to_json()
            tally.records += 1
            tally.take(sample, mask_token_id=self._mask_token_id, tokenizer_size=self._tokenizer.size)
            samples.append(sample)
            tokens += length
            stop = behind
        if samples:
            yield Window(samples, start, stop, before)
        self.end = stop

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
    """A line on disk for every shard: the samples that the dataset has with it, and the state to go on from behind it."""

    def __init__(self, path: Path, samples: int) -> None:
        """Takes the state that belongs to `samples` and drops what was noted behind it. Raises ValueError without one."""
        self.state: dict[str, Any] = {}
        self._path = path
        kept: list[str] = []
        for line in path.read_text().splitlines() if path.is_file() else ():
            try:
                state = parse_json(line)
            except ValueError:
                break  # the line that was being written
            if not isinstance(state, dict) or type(state.get("samples")) is not int or state["samples"] > samples:
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
