"""Where the assistant speaks in the text of a chat template that does not mark it itself.

A template is a program: what it makes of a turn may depend on the turns behind it. Two ways are tried. The text of the
turns before an answer, with the prompt for an answer, is where the answer begins if the whole text begins with it; and
what stands before and after every answer can be learnt from conversations with known answers and looked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

# render(messages, add_generation_prompt) -> text
Render = Callable[[Sequence[dict[str, Any]], bool], str]
Span = tuple[int, int]
ASKED, ANSWERED = ("probeaskedone", "probeaskedtwo"), ("probeanswerone", "probeanswertwo")


@dataclass(frozen=True)
class TurnMarkers:
    """What stands before an assistant turn's own text and what ends it, white space at the end left out."""

    begin: str
    end: str


def learn_markers(render: Render) -> TurnMarkers | None:
    """The markers of a template, None when it has none that are the same for every turn, or refuses plain turns."""
    asked, answered = (
        [{"role": r, "content": c} for c in text] for r, text in (("user", ASKED), ("assistant", ANSWERED))
    )
    try:
        plain, prompt = render(asked[:1], False), render(asked[:1], True)
        one = render([asked[0], answered[0]], False)
        two = render([asked[0], answered[0], asked[1], answered[1]], False)
    # What a template raises is its own affair: jinja2's errors, or any of Python's.
    except Exception:
        return None
    if not all(text.startswith(plain) for text in (prompt, one, two)) or not all(a in two for a in (*ANSWERED, *ASKED)):
        return None
    if ANSWERED[0] not in one:
        return None
    before = [prompt[len(plain) :]] if len(prompt) > len(plain) else []
    before += [text[len(plain) : text.index(ANSWERED[0])] for text in (one, two)]
    after = [text[text.index(a) + len(a) :] for text, a in ((one, ANSWERED[0]), (two, ANSWERED[0]), (two, ANSWERED[1]))]
    markers = TurnMarkers(commonprefix(before), commonprefix(after).rstrip())
    return markers if markers.begin.strip() and markers.end else None


def spans_by_markers(text: str, markers: TurnMarkers) -> list[Span]:
    """[start, stop) of every assistant turn in characters, its end marker included; a last one may lack it."""
    spans = []
    found = text.find(markers.begin)
    while found >= 0:
        start = found + len(markers.begin)
        end = text.find(markers.end, start)
        stop = len(text) if end < 0 else end + len(markers.end)
        spans.append((start, stop))
        found = text.find(markers.begin, stop)
    return spans


def spans_by_prefixes(render: Render, messages: Sequence[dict[str, Any]], text: str) -> list[Span] | None:
    """The same from the texts of the conversation's beginnings; None when `text` does not begin with them."""
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            before, through = render(messages[:i], True), render(messages[: i + 1], False)
        except Exception:
            return None
        if not text.startswith(before) or not text.startswith(through) or len(through) <= len(before):
            return None
        # White space behind the end marker belongs to the template, not to the answer.
        spans.append((len(before), max(len(before), len(through.rstrip()))))
    return spans
