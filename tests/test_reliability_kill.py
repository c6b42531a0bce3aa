"""The command that kills a run again and again, at a scale of seconds."""

import pytest

from bench.reliability_kill import Kill, _refuse_lost_steps, measure


def test_a_run_that_was_killed_ends_as_one_that_was_not() -> None:
    figures = measure(kills=2, seed=0)  # raises where the two end otherwise
    assert [died["at"] for died in figures["kills"]] == ["write", "write"]
    assert all(0 <= died["redone"] <= 6 for died in figures["kills"])
    assert figures["kills"][1]["began"] == figures["kills"][0]["saved"] > 0
    assert {row["figure"]: row["measured"] for row in figures["table"]}["processes killed with SIGKILL"] == 2


def test_a_process_that_goes_on_from_before_the_newest_checkpoint_is_found() -> None:
    done = [Kill("step", 0, 8, 6, False, False), Kill("start", None, 8, 6, False, False)]
    _refuse_lost_steps(done, 6)
    with pytest.raises(ValueError, match="kill 2: expected to go on from step 6, the newest checkpoint, found 3"):
        _refuse_lost_steps(done, 3)
