"""Records to tokens and loss masks: with generation markers, without them, and what is left out."""

import json
from typing import Any

import pytest

from engine.chat_tokens import (
    BY_MARKERS,
    BY_PREFIXES,
    BY_TEMPLATE,
    GIVEN,
    ByteTokens,
    ChatTokens,
    checked,
    given_tokens,
)
from engine.conversations import LeftOut, Record, parse_record
from tests.hf_helpers import CHATML, MARKED, THINKING, chat, word_tokenizer

TURNS = chat("hello world", "how are you", "tell me more", "of course")


def supervised(tokenizer: Any, record: Record, **options: Any) -> tuple[list[str], str]:
    """The supervised tokens of a record as they are written, spaces aside, and how they were found."""
    tokens = ChatTokens(tokenizer, assistant_only=options.pop("assistant_only", True))(record)
    written = tokenizer.convert_ids_to_tokens(tokens.input_ids.tolist())
    return [
        t for t, m in zip(written, tokens.loss_mask.tolist(), strict=True) if m and t not in ("<unk>", " ")
    ], tokens.how


ANSWERS = ["how", "are", "you", "<|im_end|>", "of", "course", "<|im_end|>"]


@pytest.mark.parametrize(("template", "how"), [(MARKED, BY_TEMPLATE), (CHATML, BY_PREFIXES)])
def test_what_the_assistant_says_is_supervised_to_the_end_of_its_turn(template: str, how: str) -> None:
    assert supervised(word_tokenizer(template), Record(messages=TURNS)) == (ANSWERS, how)


def test_turns_are_found_where_the_template_rewrites_them() -> None:
    found = supervised(word_tokenizer(THINKING), Record(messages=TURNS))
    assert found == ([*ANSWERS[:4], "<think>", "\n", "</think>", "\n", *ANSWERS[4:]], BY_MARKERS)


def test_formatted_text_is_read_by_the_templates_own_markers() -> None:
    for template in (CHATML, MARKED, THINKING):
        tokenizer = word_tokenizer(template)
        text = word_tokenizer(CHATML).apply_chat_template(TURNS, tokenize=False)
        assert supervised(tokenizer, Record(text=text)) == (ANSWERS, BY_MARKERS)
    # An answer that was cut off has no end.
    cut = text[: text.rindex("<|im_end|>")]
    assert supervised(tokenizer, Record(text=cut)) == (ANSWERS[:-1], BY_MARKERS)
    with pytest.raises(LeftOut, match="text without an assistant turn"):
        supervised(tokenizer, Record(text="hello world"))
    assert supervised(tokenizer, Record(text="hello world"), assistant_only=False)[0] == ["hello", "world"]


def test_a_tokenizer_without_offsets_gives_the_same() -> None:
    class Slow:
        """A tokenizer of Python: no offsets, no masks."""

        is_fast = False

        def __init__(self, fast: Any) -> None:
            self._fast = fast

        def __call__(self, text: str, **options: Any) -> Any:
            assert not options.pop("return_offsets_mapping", False)
            return self._fast(text, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._fast, name)

    for template, how in ((CHATML, BY_PREFIXES), (THINKING, BY_MARKERS), (MARKED, BY_PREFIXES)):
        fast, slow = word_tokenizer(template), Slow(word_tokenizer(template))
        found = supervised(slow, Record(messages=TURNS))
        assert found == (supervised(fast, Record(messages=TURNS))[0], how)


def test_what_cannot_be_found_or_rendered_is_left_out_with_a_reason() -> None:
    odd = "{% for m in messages %}{{ m['content'] | upper }} {% endfor %}{{ messages | length }}"
    with pytest.raises(LeftOut, match="assistant turns not found in the template's text: 0 of 2"):
        supervised(word_tokenizer(odd), Record(messages=TURNS))
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + CHATML
    with pytest.raises(LeftOut, match="refused by the chat template: TemplateError user first"):
        supervised(word_tokenizer(strict), Record(messages=chat("", "hello")[1:]))
    with pytest.raises(ValueError, match="expected a chat template in the tokenizer, found none. Give one with --chat"):
        supervised(word_tokenizer(None), Record(messages=TURNS))


def test_both_spellings_of_a_conversation() -> None:
    line = {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "fine"}], "id": 7}
    plain = parse_record(json.dumps({"messages": chat("hello", "fine")}).encode())
    assert parse_record(json.dumps(line).encode()) == plain == Record(messages=chat("hello", "fine"))
    call = {"messages": [{"role": "assistant", "content": None, "tool_calls": [1]}], "tools": [{"name": "f"}]}
    assert parse_record(json.dumps(call).encode()) == Record(
        messages=[{"role": "assistant", "content": "", "tool_calls": [1]}], tools=[{"name": "f"}]
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "no JSON: Expecting"),
        ("[1]", "no JSON object: found"),
        ('{"prompt": 1}', "no conversation: found only prompt; expected conversations, messages, text or input_ids"),
        ('{"text": 3}', "text is no string"),
        ('{"messages": []}', "expected a list of messages"),
        ('{"messages": ["hi"]}', "expected messages with role and content, found 'hi'"),
        ('{"messages": [{"content": "hi"}]}', "expected messages with role and content, found content"),
        ('{"messages": [{"role": "user"}]}', "expected a content in the message of 'user'"),
        ('{"text": "hello \\ud83d"}', "text that is no Unicode"),
        ('{"messages": [{"role": "user", "content": "\\udc00"}]}', "text that is no Unicode"),
        ('{"input_ids": "abc"}', "input_ids is no list of whole numbers"),
        ('{"input_ids": [1, 2.5]}', "input_ids is no list of whole numbers"),
    ],
)
def test_lines_that_are_no_records(line: str, message: str) -> None:
    with pytest.raises(LeftOut, match=message):
        parse_record(line.encode())


def test_a_whole_pair_of_surrogates_is_text() -> None:
    assert parse_record(b'{"text": "\\ud83d\\ude00"}').text == "\U0001f600"


def test_given_tokens() -> None:
    tokens = given_tokens(Record(input_ids=[1, 2, 3], loss_mask=[0, 1, 1]), assistant_only=True)
    assert (tokens.input_ids.tolist(), tokens.loss_mask.tolist(), tokens.how) == ([1, 2, 3], [0, 1, 1], GIVEN)
    assert given_tokens(Record(input_ids=[1, 2, 3]), assistant_only=False).loss_mask.tolist() == [1, 1, 1]
    for mask, message in ((None, "without loss_mask"), ([1, 1], "3 tokens, 2 mask values"), ([0, 2, 1], "not 0 and 1")):
        with pytest.raises(LeftOut, match=message):
            given_tokens(Record(input_ids=[1, 2, 3], loss_mask=mask), assistant_only=True)


def test_samples_that_cannot_be_trained_on_are_left_out() -> None:
    def check(ids: list[int], mask: list[int], **changes: Any) -> Any:
        options: dict[str, Any] = {"vocab_size": 10, "max_length": 4, "too_long": "cut", **changes}
        return checked(given_tokens(Record(input_ids=ids, loss_mask=mask), assistant_only=True), **options)

    cut = check([1, 2, 3, 4, 5, 6], [0, 1, 1, 1, 1, 1])
    assert (cut.input_ids.tolist(), cut.loss_mask.tolist(), cut.cut) == ([1, 2, 3, 4], [0, 1, 1, 1], 2)
    assert len(check([1, 2, 3, 4, 5, 6], [1] * 6, max_length=0).input_ids) == 6
    for ids, mask, message in (
        ([1, 2, 3], [0, 0, 1], "fewer than two supervised tokens: 1 of 3"),
        ([1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 1], "fewer than two supervised tokens: 1 of 4, 2 cut off"),
        ([1, 2, 3], [1, 0, 1], "no two supervised neighbours: 2 of 3"),
        ([1, 12, -3], [1, 1, 1], "2 of 3, the first 12 in a vocabulary of 10: another tokenizer's"),
        ([1, 2**40, 3], [1, 1, 1], "token ids outside the vocabulary: 1 of 3"),
        ([1, 2**70, -(2**70)], [1, 1, 1], "token ids outside the vocabulary: 2 of 3"),
    ):
        with pytest.raises(LeftOut, match=message):
            check(ids, mask)
    with pytest.raises(LeftOut, match="longer than max_length: 5 tokens"):
        check([1] * 5, [1] * 5, too_long="skip")


def test_bytes_of_the_embedded_target() -> None:
    tokens = ByteTokens()(Record(text="ab"))
    assert (tokens.input_ids.tolist(), tokens.loss_mask.tolist()) == ([257, 97, 98], [1, 1, 1])
    with pytest.raises(ValueError, match="expected records with text for the tokenizer bytes, found a conversation"):
        ByteTokens()(Record(messages=TURNS))
