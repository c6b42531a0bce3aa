"""The command that kills a run again and again, at a scale of seconds."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from bench.reliability_kill import Kill, _killed, _refuse_lost_steps, measure


def test_a_run_that_was_killed_ends_as_one_that_was_not() -> None:
    figures = measure(kills=2, seed=0)  # raises where the two end otherwise
    assert [died["at"] for died in figures["kills"]] == ["write", "write"]
    assert all(0 <= died["redone"] <= 6 for died in figures["kills"])
    assert figures["kills"][1]["began"] == figures["kills"][0]["saved"] > 0
    assert {row["figure"]: row["measured"] for row in figures["table"]}["processes killed with SIGKILL"] == 2


def test_a_process_that_goes_on_from_before_the_newest_checkpoint_is_found() -> None:
    done = [Kill("step", 0, 8, 6, False, False, False), Kill("start", None, 8, 6, False, False, False)]
    assert [died.redone for died in done] == [2, 0]
    _refuse_lost_steps(done, 6)
    with pytest.raises(ValueError, match="kill 2: expected to go on from step 6, the newest checkpoint, found 3"):
        _refuse_lost_steps(done, 3)
    with pytest.raises(ValueError, match="expected the last process to say from where it goes on, found nothing"):
        _refuse_lost_steps(done, None)


def test_a_process_that_ends_by_itself_is_no_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(folder: Path, name: str, steps: int, log: Path) -> subprocess.Popen[bytes]:
        log.write_text("no such setting\n")
        process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"])
        process.wait()
        return process

    monkeypatch.setattr("bench.reliability_kill._train", ends)
    moments = random.Random(0)
    monkeypatch.setattr(moments, "choice", lambda of: "start")
    monkeypatch.setattr(moments, "random", lambda: 0.0)
    with pytest.raises(ValueError, match="the run ended with 2 before it was killed: no such setting"):
        _killed(tmp_path, 1, 99, moments)
