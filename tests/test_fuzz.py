"""The fuzzer: every reader answers a few hundred damaged files, and a fault that is planted is found."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.fuzz import keep_faults, row, run_here, run_inputs
from bench.fuzz_case import Target, make_files
from bench.fuzz_targets import TARGETS
from tests.fuzz_planted import planted

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_get_clean_errors(name: str) -> None:
    if name == "speculators":
        pytest.importorskip("pyarrow")
    tally = run_here(TARGETS[name](), range(200), seed=1)
    assert tally.faults == {}
    assert tally.inputs == tally.accepted + tally.refused == 200
    # Damage that is never noticed, or always at once, tests nothing.
    assert tally.accepted >= 5 and len(tally.messages) >= 5


# With it one of the 60 inputs ends its process.
SEED = 2


def test_planted_faults_of_every_kind_are_found(tmp_path: Path) -> None:
    tally = run_inputs(planted, 60, seed=SEED, processes=1)
    letters = {index: make_files(planted(), SEED, index)["a.txt"] for index in range(60)}
    found = {letters[fault["first"]]: fault for fault in tally.faults.values()}
    told = {
        b"b": "KeyError: 'b'",
        b"c": "a message that names no file",
        b"d": "a message of more than one printable line",
        b"f": "accepted, but it is an f",
        b"g": "the process ended with code -6",
        b"h": "characters",
    }
    for letter, text in told.items():
        assert text in found[letter]["what"]
        assert found[letter]["count"] == sum(other == letter for other in letters.values())
    assert any("allocate memory" in fault["what"] for fault in tally.faults.values())
    assert tally.inputs == 60 and tally.refused == sum(letter == b"i" for letter in letters.values())
    keep_faults(planted(), tally, SEED, tmp_path)
    first = found[b"b"]["first"]
    assert (tmp_path / f"planted-{SEED}-{first}" / "files" / "a.txt").read_bytes() == b"b"
    assert row("planted", tally, 1.0)["anything else"] == 60 - tally.accepted - tally.refused


@pytest.mark.parametrize("name", ["dataset-manifest", "specforge", "settings"])
def test_an_input_follows_from_seed_and_number_alone(name: str) -> None:
    make: Callable[[], Target] = TARGETS[name]
    first, again = make(), make()
    inputs = [make_files(first, 5, index) for index in range(30)]
    assert [make_files(again, 5, index) for index in reversed(range(30))] == inputs[::-1]
    assert inputs != [make_files(first, 6, index) for index in range(30)]
