"""From a record to tokens and a loss mask, with a Hugging Face tokenizer and its chat template."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.assistant_turns import Span, learn_markers, spans_by_markers, spans_by_prefixes
from engine.bytes_vocab import encode_document
from engine.conversations import LeftOut, Record

# How the mask of a sample was found, as the report counts it.
BY_TEMPLATE, BY_PREFIXES, BY_MARKERS = "template's generation markers", "beginnings of the text", "markers of a turn"
GIVEN, ALL = "given", "all tokens"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Tokens:
    """input_ids int32[T], loss_mask uint8[T], how the mask was found, and how many tokens were cut off at the end."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    how: str
    cut: int = 0


class ByteTokens:
    """The embedded target's tokens: bytes behind a token that opens the document. Text only, all of it supervised."""

    def __call__(self, record: Record) -> Tokens:
        if record.text is None:
            raise ValueError(
                "expected records with text for the tokenizer bytes, found a conversation. It has no chat template: "
                "write text or input_ids."
            )
        ids = encode_document(record.text.encode()).numpy()
        return Tokens(ids, np.ones(len(ids), np.uint8), ALL)


class ChatTokens:
    """A tokenizer with its chat template. With `assistant_only` the mask is 1 on what the assistant says, end of turn
    included; otherwise everywhere."""

    def __init__(self, tokenizer: Any, *, assistant_only: bool) -> None:
        self._tokenizer = tokenizer
        self._assistant_only = assistant_only
        try:
            template = tokenizer.get_chat_template()
        # transformers' way of saying that there is none.
        except ValueError:
            template = None
        self.template: str | None = template if isinstance(template, str) else None
        self.marks_turns = self.template is not None and bool(_GENERATION.search(self.template))
        self._markers = learn_markers(self._render) if self.template and not self.marks_turns else None

    def __call__(self, record: Record) -> Tokens:
        """The sample of a record of text or messages. Raises LeftOut for one that cannot become tokens and mask, and
        ValueError when there is no chat template for any."""
        if record.text is not None:
            return self._text(record.text)
        assert record.messages is not None
        if self.template is None:
            raise ValueError(
                "expected a chat template in the tokenizer, found none. Give one with --chat-template, or write text or "
                "input_ids into the records."
            )
        return self._conversation(record.messages, record.tools)

    def _text(self, text: str) -> Tokens:
        if not self._assistant_only:
            ids, _ = self._encode(text, [])
            return Tokens(ids, np.ones(len(ids), np.uint8), ALL)
        markers = self._markers
        if markers is None and self.template:
            # A template that marks its turns is asked for what stands around them only for formatted text.
            markers = self._markers = learn_markers(self._render)
        spans = spans_by_markers(text, markers) if markers else []
        if not spans:
            raise LeftOut("text without an assistant turn", "no turn of the chat template in it; or use --all-tokens")
        ids, mask = self._encode(text, spans)
        return Tokens(ids, mask, BY_MARKERS)

    def _conversation(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Tokens:
        def render(turns: Sequence[dict[str, Any]], prompt: bool) -> str:
            return self._render(turns, prompt, tools)

        try:
            if self._assistant_only and self.marks_turns and self._tokenizer.is_fast:
                found = self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=self.template,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                )
                ids, mask = found["input_ids"], found["assistant_masks"]
                return Tokens(np.asarray(ids, np.int32), np.asarray(mask, np.uint8), BY_TEMPLATE)
            text = render(messages, False)
        # A template raises what it likes: jinja2's errors (roles that must alternate), or any of Python's.
        except Exception as error:
            raise LeftOut("refused by the chat template", f"{type(error).__name__} {error}") from error
        if not self._assistant_only:
            ids, _ = self._encode(text, [])
            return Tokens(ids, np.ones(len(ids), np.uint8), ALL)
        turns = sum(message["role"] == "assistant" for message in messages)
        how, spans = BY_PREFIXES, spans_by_prefixes(render, messages, text)
        if spans is None and self._markers is not None:
            how, spans = BY_MARKERS, spans_by_markers(text, self._markers)
        if spans is None or len(spans) != turns:
            raise LeftOut(
                "assistant turns not found in the template's text",
                f"{len(spans or ())} of {turns} without generation markers",
            )
        ids, mask = self._encode(text, spans)
        return Tokens(ids, mask, how)

    def _render(
        self, messages: Sequence[dict[str, Any]], prompt: bool, tools: list[dict[str, Any]] | None = None
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            list(messages), tools=tools, chat_template=self.template, tokenize=False, add_generation_prompt=prompt
        )
        return str(text)

    def _encode(self, text: str, spans: Sequence[Span]) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """The tokens of the text as it stands, and 1 for each that lies in a span with all its characters."""
        fast = self._tokenizer.is_fast
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast)
        ids = np.asarray(found["input_ids"], np.int32)
        mask = np.zeros(len(ids), np.uint8)
        if not len(ids) or not spans:
            return ids, mask
        if fast:
            first, last = np.asarray(found["offset_mapping"]).T
            starts, stops = np.asarray(spans).T
            span = np.searchsorted(starts, first, side="right") - 1
            mask[:] = (span >= 0) & (last <= stops[span]) & (last > first)
            return ids, mask
        for start, stop in spans:
            # Without offsets, a beginning of the text must have the beginning of the tokens.
            begin, end = (self._tokenizer(text[:at], add_special_tokens=False)["input_ids"] for at in (start, stop))
            if list(ids[: len(begin)]) != begin or list(ids[: len(end)]) != end:
                raise LeftOut("tokens that cross a turn's border", "a tokenizer without offsets cannot tell them apart")
            mask[len(begin) : len(end)] = 1
        return ids, mask


def given_tokens(record: Record, *, assistant_only: bool) -> Tokens:
    """The sample of a record of input_ids. Raises LeftOut when it has no mask, or one of another length."""
    assert record.input_ids is not None
    ids, most = record.input_ids, np.iinfo(np.int32).max
    # An id that int32 cannot hold is outside every vocabulary all the same.
    ids32 = np.asarray([min(max(i, -1), most) for i in ids], np.int32)
    if not assistant_only:
        return Tokens(ids32, np.ones(len(ids), np.uint8), ALL)
    if record.loss_mask is None:
        raise LeftOut("input_ids without loss_mask", "write one, or use --all-tokens")
    if len(record.loss_mask) != len(ids):
        raise LeftOut("loss_mask of another length", f"{len(ids)} tokens, {len(record.loss_mask)} mask values")
    if not set(record.loss_mask) <= {0, 1}:
        raise LeftOut("loss_mask that is not 0 and 1", f"found {sorted(set(record.loss_mask))[:4]}")
    return Tokens(ids32, np.asarray(record.loss_mask, np.uint8), GIVEN)


def checked(tokens: Tokens, *, vocab_size: int, max_length: int, too_long: str) -> Tokens:
    """The sample cut to max_length tokens (0: any), if it can be trained on; raises LeftOut if not."""
    ids, mask, cut = tokens.input_ids, tokens.loss_mask, 0
    if max_length and len(ids) > max_length:
        cut = len(ids) - max_length
        if too_long == "skip":
            raise LeftOut("longer than max_length", f"{len(ids)} tokens")
        ids, mask = ids[:max_length], mask[:max_length]
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        raise LeftOut(
            "token ids outside the vocabulary",
            f"{len(outside)} of {len(ids)}, the first {ids[outside[0]]} in a vocabulary of {vocab_size}: another tokenizer's?",
        )
    if mask.sum() < 2:
        raise LeftOut(
            "fewer than two supervised tokens", f"{mask.sum()} of {len(ids)}" + (f", {cut} cut off" * bool(cut))
        )
    if not (mask[:-1] & mask[1:]).any():
        raise LeftOut("no two supervised neighbours", f"{mask.sum()} of {len(ids)}")
    return Tokens(ids, mask, tokens.how, cut)
