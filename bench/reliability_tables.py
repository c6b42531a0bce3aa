"""Tables of docs/reliability.md, each from the records that its command wrote; a table without a record says how to make one.

A record is JSON: `where` (bench/timing.py's provenance) and `table`, rows of one shape, column -> cell, as they are to be shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.markdown import RESULTS, markdown

# Table -> record -> the command that writes it.
RECORDS: Mapping[str, Mapping[str, str]] = {
    "checkpoint table": {"h200-checkpoint.json": "python -m bench.reliability checkpoint --workload W2 --out"},
    "kill table": {"cpu-kill.json": "python -m bench.reliability kill --kills 50 --seed 0 --out"},
    "fuzz table": {"cpu-fuzz.json": "python -m bench.reliability fuzz --out"},
    "faults table": {"cpu-faults.json": "python -m bench.reliability faults --out"},
    "long run table": {
        "cpu-long-run.json": "python -m bench.reliability long-run --out",
        "h200-long-run.json": "python -m bench.reliability long-run --device cuda --out",
    },
}


def reliability_table(name: str, results: Path = RESULTS) -> list[str]:
    """The lines of one table: a Markdown table a record, with what it was measured on and the command that made it."""
    lines: list[str] = []
    for file, command in RECORDS[name].items():
        path = results / file
        if not path.is_file():
            lines += [f"No record yet: `{command} bench/results/{file}` makes it.", ""]
            continue
        found = json.loads(path.read_text())
        rows: list[dict[str, Any]] = found["table"]
        lines += markdown(list(rows[0]), ([_cell(row[column]) for column in rows[0]] for row in rows))
        lines += ["", _source(file, found["where"]), ""]
    return lines[:-1]


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _source(file: str, where: Mapping[str, Any]) -> str:
    return (
        f"`bench/results/{file}`, by `{where['command']}` at commit {where['commit']}: {where['gpu'] or 'CPU'}, "
        f"torch {where['torch']}, Python {where['python']}."
    )


RELIABILITY_TABLES: dict[str, Callable[[], list[str]]] = {name: partial(reliability_table, name) for name in RECORDS}
