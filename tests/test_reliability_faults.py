"""The command that records the faults: what it takes for an answer, and what it does not."""

from pathlib import Path

import pytest

from bench.reliability_faults import Fault, _row, run_tests

FAULT = Fault("a fault", "one line", ("test_a.py::test_one", "test_b.py::test_one", "gpu/test_c.py::test_two"))


def test_a_row_counts_what_was_run_what_was_skipped_and_what_needs_a_gpu() -> None:
    outcomes = {"tests/test_a.py::test_one": ["passed", "skipped"], "tests/test_b.py::test_one": ["passed"]}
    row = _row(FAULT, outcomes)
    assert row["cases"] == "2 passed, 1 skipped, 1 on a GPU alone"
    assert row["tests"] == "`test_a.py::test_one`, `test_b.py::test_one`, `gpu/test_c.py::test_two`"


def test_a_fault_none_of_whose_tests_ran_is_not_met() -> None:
    skipped = {"tests/test_a.py::test_one": ["skipped"], "tests/test_b.py::test_one": ["skipped"]}
    with pytest.raises(ValueError, match="a fault: expected a test that runs here, found none of test_a.py::test_one"):
        _row(FAULT, skipped)
    # Another file's test of the same name is no answer.
    with pytest.raises(ValueError, match="expected all of its tests to run, found nothing of test_b.py::test_one"):
        _row(FAULT, {"tests/test_a.py::test_one": ["passed"]})


def test_tests_are_told_by_file_and_name_and_one_that_fails_ends_it(tmp_path: Path) -> None:
    outcomes = run_tests(["tests/test_shapes.py"])
    assert outcomes and set(outcomes) == {name for name in outcomes if name.startswith("tests/test_shapes.py::test_")}
    assert {outcome for found in outcomes.values() for outcome in found} == {"passed"}
    failing = tmp_path / "test_failing.py"
    failing.write_text("def test_it():\n    assert not 1\n")
    with pytest.raises(ValueError, match="expected every fault to be met, found tests that fail"):
        run_tests([str(failing)])
