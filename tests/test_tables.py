"""README.md, docs/performance.md, docs/fp8.md and docs/reliability.md show what the records of bench/results say."""

import json
from pathlib import Path

import pytest

from bench.reliability_tables import RECORDS, reliability_table
from bench.tables import PAGES, filled, record


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_records(page: Path) -> None:
    text = page.read_text()
    assert "<!-- end of " in text
    assert filled(text) == text, "run `python -m bench.tables`"


def test_a_missing_record_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="expected the record .*h200-step.json, found none; run `dflash-engine bench step --out"
    ):
        record("step", tmp_path)


@pytest.mark.parametrize("name", RECORDS)
def test_a_table_of_reliability_shows_its_record_or_says_how_to_make_it(name: str, tmp_path: Path) -> None:
    assert "No record yet: `python -m bench.reliability " in reliability_table(name, tmp_path)[0]
    where = {"command": "python -m x", "commit": "abc", "gpu": None, "torch": "2", "python": "3"}
    rows = [{"what": "a", "inputs": 100000, "clean": True, "seconds": 1.23456}]
    for file in RECORDS[name]:
        (tmp_path / file).write_text(json.dumps({"where": where, "table": rows}))
    lines = reliability_table(name, tmp_path)
    assert lines[:3] == [
        "| what | inputs | clean | seconds |",
        "| --- | --- | --- | --- |",
        "| a | 100,000 | yes | 1.235 |",
    ]
    assert "by `python -m x` at commit abc: CPU, torch 2, Python 3." in lines[4]
