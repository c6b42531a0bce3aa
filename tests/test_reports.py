"""What is printed for people: fields in a column, numbers that can be read, titles on one line."""

import math
from typing import Any

import pytest

from engine.reports import make_console, print_fields, print_table, spoken


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (True, "yes"),
        (False, "no"),
        (10948958, "10,948,958"),
        (0.6603437094682231, "0.6603"),
        (123456.7, "123,457"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        ([1, 2, 3], "1, 2, 3"),
        ([], "none"),
        ({"pre": 5.5737, "fits": "neither"}, "pre 5.574, fits neither"),
        ({}, "none"),
        ("runs/data", "runs/data"),
    ],
)
def test_a_figure_is_spoken(value: Any, text: str) -> None:
    assert spoken(value) == text


def test_fields_stand_in_one_column_and_ids_bear_no_comma(capsys: pytest.CaptureFixture[str]) -> None:
    print_fields(make_console(), {"tokens": 151669, "mask_token_id": 151669, "last_id": None})
    assert capsys.readouterr().out == "tokens         151,669\nmask_token_id  151669\nlast_id        -\n"


def test_reasons_are_set_to_the_left_and_numbers_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(make_console(), "", ("name", "n", "because"), [("a", "1", "short"), ("b", "200", "a longer reason")])
    a, b = capsys.readouterr().out.splitlines()[-3:-1]
    assert a.index("short") == b.index("a longer") and a.index("1") == b.index("200") + 2


def test_a_title_longer_than_its_table_stays_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    title = "a title [in brackets] that is much longer than the table below it " * 5
    print_table(make_console(), title, ("a", "b"), [("1", "2")])
    assert title in capsys.readouterr().out.splitlines()
