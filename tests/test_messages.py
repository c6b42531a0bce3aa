"""docs/messages.md has every message that the packages raise."""

import re
from pathlib import Path

import pytest

from bench import messages
from bench.cli import main
from bench.messages import ROOT

PAGE = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")


def on_the_page(line: str) -> bool:
    """Whether a text of the page is this line, some words standing for its values."""
    for text in re.findall(r"^- `(.+)` \(", PAGE, re.MULTILINE):
        literal = [re.escape(part) for part in re.split(r"<[^>]*>", text)]
        if re.fullmatch(".*".join(literal), line.replace("`", "'")):
            return True
    return False


def test_the_page_is_the_sources() -> None:
    assert messages.page() == PAGE, "run python -m bench.messages > docs/messages.md"


@pytest.mark.parametrize(
    "line",
    [
        "train --set data.path=nowhere",
        "train --set optimizer.rate=1",
        "train --set optimizer.lr=-1",
        "train nothing.toml",
        "train",
        "plan . --set buckets.lengths=256,128",
        "data inspect nowhere",
        "data inspect .",
        "eval nowhere nowhere --set run.device=cpu",
        "export nowhere out",
        "report nowhere",
        "train --explain --set run.output=nowhere",
        "bench buckets",
    ],
)
def test_an_error_of_the_command_line_is_found_there(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) in (1, 2)
    said = capsys.readouterr().err.splitlines()[-1].removeprefix("error: ")
    assert on_the_page(said.partition(" See `dflash-engine")[0]), said


def test_words_that_are_no_message_are_not_found() -> None:
    assert not on_the_page("expected something else, found this")


def test_what_a_function_makes_of_its_arguments_is_read() -> None:
    """Errors that a helper or an error's own __init__ words: checks of a run, damaged checkpoints, captures."""
    for words in (
        "expected no allocation on the device",
        "expected a training checkpoint, found a damaged one (training.safetensors is cut off or grown",
        "out of GPU memory while",
        "expected B * (S + N * K) within token_budget",
        "Lower buckets.token_budget, buckets.num_anchors or model.head_chunk",
    ):
        assert words in PAGE


def test_every_file_that_raises_has_a_topic() -> None:
    elsewhere = {message.file for message in messages.messages() if messages.topic_of(message.file) == "Elsewhere"}
    assert len(elsewhere) < 8, f"files without a topic in bench/messages.py: {sorted(elsewhere)}"
