"""Who is stuck in what, said by a thread that only looks."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from buffers.dataset import Dataset, Sample
from buffers.stages import changes_of, stage, stages_now
from engine.run import TrainingRun
from engine.train import train
from engine.watchdog import Watchdog
from tests.run_helpers import checkpoint_tensors, run_settings, training_dataset

pytestmark = pytest.mark.usefixtures("one_thread")
WITHIN_S = 20.0


def wait_for(true: Callable[[], bool]) -> None:
    """Lets the others run until it is so."""
    end_s = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.005)


def test_the_innermost_stage_counts_and_is_forgotten_at_the_end() -> None:
    me, before = threading.current_thread(), changes_of(threading.get_ident())
    with stage("checkpoint"):
        with pytest.raises(ValueError, match="inside"), stage("replay", "train 1x2x3"):
            assert str(stages_now()[me]) == "replay train 1x2x3"
            raise ValueError("inside")
        assert str(stages_now()[me]) == "checkpoint"
    assert me not in stages_now()
    assert changes_of(threading.get_ident()) == before + 4


def test_a_standstill_is_told_once_and_again_later_and_that_it_ended() -> None:
    said: list[str] = []
    with Watchdog(lambda: 0.02, said.append, where=lambda: "after step 7", device=lambda: "train 1x2x3"):
        with stage("collective", "of gradients"):
            wait_for(lambda: len(said) >= 2)
        wait_for(lambda: any("moves again after step 7" in line for line in said))
    assert "nothing has moved for" in said[0] and "after step 7: stuck in collective of gradients (" in said[0]
    assert "the device has not finished train 1x2x3" in said[0]
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}


def test_one_that_moves_and_one_that_is_off_say_nothing() -> None:
    said: list[str] = []
    with Watchdog(lambda: 0.0, said.append), stage("replay"):
        time.sleep(0.05)
    with Watchdog(lambda: 1000.0, said.append):
        time.sleep(0.05)
    assert said == []


def test_a_loader_that_stalls_is_named_while_the_run_waits_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = training_dataset(tmp_path / "data")
    changes = ("run.max_steps=6", "run.save_every=0")
    train(run_settings(data, tmp_path / "calm", *changes))
    said: list[str] = []
    release, sample, say = threading.Event(), Dataset.sample, TrainingRun.say

    def stalls(self: Dataset, sample_id: int, start: int = 0, stop: int | None = None) -> Sample:
        # The loader's thread alone: the comparison before the first step reads in the main one.
        if threading.current_thread().name == "input-loader" and len(said_stuck()) == 0:
            release.wait(WITHIN_S)
        return sample(self, sample_id, start, stop)

    def said_stuck() -> list[str]:
        # On a busy machine something else may seem to stand still before the loader does.
        return [line for line in said if "stuck in read until the loader delivers (" in line]

    def note(self: TrainingRun, text: str) -> None:
        said.append(text)
        say(self, text)
        if said_stuck():
            release.set()

    monkeypatch.setattr(Dataset, "sample", stalls)
    monkeypatch.setattr(TrainingRun, "say", note)
    train(run_settings(data, tmp_path / "stalled", *changes, "run.watchdog_s=0.2"))
    first = said_stuck()[0]
    assert "nothing has moved for" in first and "input-loader in read 1x" in first
    assert "in stalls)" not in first.split("input-loader")[0]
    calm, stalled = (checkpoint_tensors(tmp_path / name, 6) for name in ("calm", "stalled"))
    assert all((calm[name] == stalled[name]).all() for name in calm)
