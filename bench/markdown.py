"""Where the records lie, and a table's lines."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def markdown(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    """A table's lines."""
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
