"""train --profile: a trace that opens, with a named range for every step, bucket and phase of the window."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from engine.profiling import STEPS, WARM_UP
from engine.settings_fields import SettingsError
from engine.train import train
from tests.run_helpers import checkpoint_tensors, interrupt, run_settings, training_dataset

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return training_dataset(tmp_path / "data")


def ranges(trace: dict[str, Any]) -> list[str]:
    """The names of what is a range of a person's, in the order in which they began."""
    events = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(events, key=lambda event: event["ts"])]


def test_a_window_of_steps_has_every_phase_by_name_and_changes_nothing(data: Path, tmp_path: Path) -> None:
    trace, changes = tmp_path / "trace.json", ("run.save_every=10", "run.log_every=4")
    train(run_settings(data, tmp_path / "plain", *changes))
    figures = train(run_settings(data, tmp_path / "profiled", *changes), profile=trace)
    found = ranges(json.loads(trace.read_text()))
    steps = [name for name in found if name.startswith("step ")]
    assert steps == [f"step {number}" for number in range(WARM_UP + 1, WARM_UP + STEPS + 1)]
    assert found.count("call update") == STEPS
    assert {"call train 1x128x32", "call train 1x256x32", "stage 1x128x32", "log", "checkpoint"} <= set(found)
    assert any(name.startswith("read 1x") and "samples" in name for name in found), "the loader's thread is in it"
    assert figures["steps"] == 20
    plain, profiled = (checkpoint_tensors(tmp_path / name, 20) for name in ("plain", "profiled"))
    assert all((plain[name] == profiled[name]).all() for name in plain)


def test_a_run_too_short_for_the_warm_up_is_recorded_whole_and_compressed(data: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    train(run_settings(data, tmp_path / "run", "run.max_steps=3"), profile=trace)
    found = ranges(json.loads(gzip.decompress(trace.read_bytes())))
    assert [name for name in found if name.startswith("step ")] == ["step 1", "step 2", "step 3"]


def test_an_interrupted_run_leaves_what_it_recorded(
    data: Path, tmp_path: Path, after_step: Callable[[int, Callable[[], None]], None]
) -> None:
    trace = tmp_path / "trace.json"
    after_step(WARM_UP + 2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(run_settings(data, tmp_path / "run"), profile=trace)
    found = ranges(json.loads(trace.read_text()))
    assert [name for name in found if name.startswith("step ")] == [f"step {WARM_UP + 1}", f"step {WARM_UP + 2}"]


def test_one_that_ends_before_the_window_says_so(
    data: Path,
    tmp_path: Path,
    after_step: Callable[[int, Callable[[], None]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    after_step(2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(run_settings(data, tmp_path / "run"), profile=tmp_path / "trace.json")
    assert "the run ended before its window" in capsys.readouterr().err and not (tmp_path / "trace.json").exists()


def test_a_file_that_cannot_be_one_is_refused_before_anything(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("trace.txt", "none/trace.json"):
        with pytest.raises(SettingsError, match=r"--profile .*expected a file ending in \.json"):
            train(run_settings(data, tmp_path / "run"), profile=tmp_path / name)
    assert not (tmp_path / "run").exists()
    command = ["train", "--set", f"data.path={data}", "--set", f"run.output={tmp_path / 'run'}"]
    assert main([*command, "--profile", "trace.txt"]) == 2
    assert "--profile trace.txt: expected" in capsys.readouterr().err
