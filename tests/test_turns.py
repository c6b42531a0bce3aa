"""Busy Python threads beside the training thread: who sets the length of their turns, and that it is set back."""

import sys
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.turns import short_turns
from tests.run_helpers import run, training_dataset

pytestmark = pytest.mark.usefixtures("one_thread")


def test_turns_are_short_inside_only() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(KeyError), short_turns(0.25):
        assert sys.getswitchinterval() == pytest.approx(0.25e-3)
        raise KeyError
    assert sys.getswitchinterval() == before
    with short_turns(0):
        assert sys.getswitchinterval() == before


def test_a_run_takes_the_settings_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    update = Engine.update

    def note(engine: Engine, lr: float) -> None:
        seen.append(sys.getswitchinterval())
        update(engine, lr)

    monkeypatch.setattr(Engine, "update", note)
    before, data = sys.getswitchinterval(), training_dataset(tmp_path / "data", (40, 60))
    figures = run(data, tmp_path / "run", "run.max_steps=2")
    assert seen == pytest.approx([1e-4, 1e-4])
    run(data, tmp_path / "other", "run.max_steps=1", "run.switch_interval_ms=2")
    assert seen[2:] == pytest.approx([2e-3])
    assert sys.getswitchinterval() == before
    phases = {"data", "weights", "plan", "memory", "capture", "compile", "verify", "snapshot", "rest"}
    assert figures["start_s"].keys() == phases
    assert 0 < sum(figures["start_s"].values()) <= figures["seconds"]
