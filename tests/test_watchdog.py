"""Who is stuck in what, said by a thread that only looks."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buffers.dataset import Dataset, Sample
from buffers.stages import changes_of, stage, stages_now
from buffers.staging import InputPipeline
from engine.checkpoint_writer import CheckpointWriter
from engine.held_out import HeldOut
from engine.optimizer import AdamW
from engine.run import TrainingRun
from engine.train import train
from engine.watchdog import Watchdog
from graphs.executor import GraphExecutor
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


@pytest.mark.parametrize(
    ("where", "name", "stuck", "other"),
    [
        (InputPipeline, "_deliver", "stuck in stage 1x", ""),
        (AdamW, "update", "stuck in call update (", ""),
        (
            CheckpointWriter,
            "_write",
            "stuck in checkpoint until that of step 4 is written (",
            "checkpoint-writer in checkpoint step 4 (",
        ),
        (HeldOut, "evaluate", "stuck in evaluate (", ""),
    ],
)
def test_every_stage_of_a_run_is_named(
    where: type, name: str, stuck: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    release, real, watching = threading.Event(), getattr(where, name), threading.Event()

    def stalls(*args: Any, **kwargs: Any) -> Any:
        # Not while things are built: the watchdog is there for the steps.
        if watching.is_set():
            release.wait(WITHIN_S)
        return real(*args, **kwargs)

    def note(self: TrainingRun, text: str) -> None:
        said.append(text)
        if stuck in text:
            release.set()

    enter = TrainingRun.__enter__

    def entered(self: TrainingRun) -> TrainingRun:
        watching.set()
        return enter(self)

    monkeypatch.setattr(TrainingRun, "__enter__", entered)
    monkeypatch.setattr(where, name, stalls)
    monkeypatch.setattr(TrainingRun, "say", note)
    data, held_out = training_dataset(tmp_path / "data"), training_dataset(tmp_path / "held-out")
    changes = ("run.max_steps=9", "run.save_every=4", "run.watchdog_s=0.2", f"data.eval_path={held_out}")
    train(run_settings(data, tmp_path / "run", *changes))
    (line,) = [text for text in said if stuck in text][:1]
    assert "nothing has moved for" in line and other in line and line.endswith(". See docs/trouble.md")


def test_a_replay_that_does_not_come_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Stuck:
        def replay(self) -> None:
            wait_for(lambda: bool(said))

    executor = object.__new__(GraphExecutor)
    executor._graphs = {"train 4x2048x512": Stuck()}  # type: ignore[dict-item]
    executor.pool_fill = None
    executor.times = SimpleNamespace(measure=lambda name: nullcontext())  # type: ignore[assignment]
    monkeypatch.setattr(GraphExecutor, "_on_our_stream", lambda self: nullcontext())
    with Watchdog(lambda: 0.02, said.append):
        executor.run("train 4x2048x512")
    assert "stuck in replay train 4x2048x512 (" in said[0]
