"""docs/messages.md has every message of the packages."""

import re
from pathlib import Path

import pytest
import torch

from bench.cli import main
from bench.message_reader import ROOT, messages
from bench.messages import page, topic_of
from engine.train import train
from tests.run_helpers import run_settings, training_dataset

PAGE = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")


def on_the_page(line: str) -> bool:
    """Whether a text of the page is this line, some words standing for its values."""
    for text in re.findall(r"^- `(.+)` \(", PAGE, re.MULTILINE):
        literal = [re.escape(part) for part in re.split(r"<[^>]*>", text)]
        if re.fullmatch(".*".join(literal), line.replace("`", "'")):
            return True
    return False


def test_the_page_is_the_sources() -> None:
    assert page() == PAGE, "run python -m bench.messages > docs/messages.md"


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


@pytest.mark.usefixtures("one_thread")
def test_every_line_of_a_run_is_found_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with samples that are too long, held-out data, --check and a trace; the same once more; and where nothing is left."""
    data = training_dataset(tmp_path / "data", (40, 130, 300, 60), nonfinite=(1,))
    held_out = training_dataset(tmp_path / "held-out", (50, 300), first_sample=100)
    changes = (f"data.eval_path={held_out}", "data.on_nonfinite=skip", "run.check_every=2", "run.save_every=0")
    train(run_settings(data, tmp_path / "run", *changes, "run.epochs=1"), profile=tmp_path / "trace.json")
    for _ in range(2):
        train(run_settings(data, tmp_path / "run", *changes, "run.epochs=2"))
    said = [line for line in capsys.readouterr().err.splitlines() if line.strip() and line[0] not in " ─"]
    assert {line.split()[0] for line in said} >= {"cpu,", "step", "ready", "going", "settings", "trace", "drafter"}
    table = "buckets (rows x tokens x blocks)"
    assert [line for line in said if line != table and not on_the_page(line)] == []


def test_what_the_doctor_says_is_found_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out.splitlines()
    why = [line.rstrip() for line in told if re.search(r" (yes|no|good|hurts) +\S", line)]
    assert len(why) == 8
    assert [line for line in why if not on_the_page(re.split(r" (?:yes|no|good|hurts) +", line)[1])] == []
    assert all(on_the_page(line) for line in told if line.startswith(("no GPU", "disk of", "set by")))


@pytest.mark.parametrize(
    "line",
    [
        "nothing has moved for 600 s after step 4120: stuck in read until the loader delivers",
        "the device has not finished train 4x2048x512",
        "it moves again after step 4120, after 1203 s",
        "runs/x/checkpoints/step-00000500 is passed over and set aside: no state.json to read",
        "checkpoints are written beside the training, from a snapshot in 1.20 GiB of host memory that could not be pinned (why), "
        "so each makes the run wait longer",
        "train 4x2048x512 is called, not replayed: why",
        "3,000 MiB are held; by whom, nvidia-smi would tell, which was not found here",
        "data: 3 of 9 samples have no two supervised tokens side by side, so no draft block: they add nothing",
    ],
)
def test_what_is_said_while_all_goes_on_is_found_there(line: str) -> None:
    assert on_the_page(line)


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
    elsewhere = {message.file for message in messages() if topic_of(message.file) == "Elsewhere"}
    assert len(elsewhere) < 8, f"files without a topic in bench/messages.py: {sorted(elsewhere)}"
