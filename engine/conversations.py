"""Records of a JSONL file: conversations, formatted text or tokens, and why a line is none of them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffers.untrusted import one_line, shown, shown_names

# ShareGPT's names for who speaks.
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}


class LeftOut(Exception):
    """A record that becomes no sample: `reason` is what it is counted under, `detail` tells of this one."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Record:
    """One line. Exactly one of `messages`, `text` and `input_ids` is set.

    messages: dicts with role and content, as a chat template takes them; tools: for the same; loss_mask: of input_ids.
    """

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None


def read_lines(path: Path, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """Each line that is not blank, with the file's offset in bytes behind it, from `offset` on."""
    with path.open("rb") as stream:
        stream.seek(offset)
        for line in stream:
            offset += len(line)
            if line.strip():
                yield line, offset


def parse_record(line: bytes) -> Record:
    """The record of a line. Raises LeftOut for what is none."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LeftOut("no JSON", one_line(error)) from error
    if b"\\u" in line or b"\xed" in line:
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError) as error:  # half of a pair of surrogates, which no tokenizer takes
            raise LeftOut("text that is no Unicode", one_line(error)) from error
    if not isinstance(values, dict):
        raise LeftOut("no JSON object", f"found {shown(values, 40)}")
    if "input_ids" in values:
        return Record(input_ids=_numbers(values, "input_ids"), loss_mask=_numbers(values, "loss_mask"))
    if "text" in values:
        if not isinstance(values["text"], str):
            raise LeftOut("text is no string", f"found {shown(values['text'], 40)}")
        return Record(text=values["text"])
    for name in ("conversations", "messages"):
        if name in values:
            tools = values.get("tools")
            return Record(messages=_messages(values[name]), tools=tools if isinstance(tools, list) else None)
    raise LeftOut(
        "no conversation", f"found only {shown_names(values, 80)}; expected conversations, messages, text or input_ids"
    )


def _numbers(values: dict[str, Any], name: str) -> list[int] | None:
    found = values.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(value) is int or type(value) is bool for value in found):
        raise LeftOut(f"{name} is no list of whole numbers", f"found {shown(found, 40)}")
    return [int(value) for value in found]


def _messages(found: Any) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not found:
        raise LeftOut("no conversation", f"expected a list of messages, found {shown(found, 40)}")
    messages = []
    for message in found:
        if not isinstance(message, dict):
            raise LeftOut("no conversation", f"expected messages with role and content, found {shown(message, 40)}")
        rest = {key: value for key, value in message.items() if key not in ("from", "value")}
        role = message.get("role", message.get("from"))
        if not isinstance(role, str):
            raise LeftOut(
                "no conversation", f"expected messages with role and content, found {shown_names(message, 80)}"
            )
        content = message.get("content", message.get("value"))
        if content is None and "tool_calls" not in message:
            raise LeftOut("no conversation", f"expected a content in the message of {shown(role, 40)}, found none")
        messages.append({**rest, "role": ROLES.get(role, role), "content": "" if content is None else content})
    return messages
