"""README.md, docs/performance.md and docs/fp8.md show what the records of bench/results say."""

from pathlib import Path

import pytest

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
