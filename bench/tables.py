"""The tables of README.md and docs/performance.md, from the records in bench/results: `python -m bench.tables` writes them anew.

No figure in them is typed by hand; a test compares the pages with what this module makes of the records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Goal:
    """What was aimed at: ms and GiB of forward and backward, times over the bare matmuls, times faster than SpecForge and flex."""

    shape: str
    ms: float
    gib: float
    over_bare_matmuls: float
    over_specforge: float
    attention_over_flex: float


GOALS = {
    "W1": Goal("0.6B-class: S 512, N 512, K 16", 17, 3.3, 1.25, 3.4, 1.5),
    "W2": Goal("8B: S 2048, N 512, K 16", 108, 11, 1.09, 1.7, 1.5),
    "W3": Goal("27B: S 4096, N 1024, K 32", 745, 33, 1.05, 1.5, 1.25),
}


def record(name: str, results: Path = RESULTS) -> Record:
    """bench/results/h200-NAME.json. Raises ValueError when it is missing."""
    file = results / f"h200-{name}.json"
    if not file.is_file():
        raise ValueError(
            f"expected the record {file}, found none; run `dflash-engine bench {name} --out {file}` on the GPU"
        )
    found: Record = json.loads(file.read_text())
    return found


def steps(results: Path = RESULTS) -> dict[str, Record]:
    """Workload -> its row of bench step; W3 has a record of its own."""
    rows = [row for name in ("step", "step-w3") for row in record(name, results)["steps"]]
    return {row["workload"]: row for row in rows}


def speed_table(results: Path = RESULTS) -> list[str]:
    """Forward and backward of the three workloads, with the goals in brackets."""
    peers = {row["workload"]: row for row in record("peers", results)["workloads"]}
    head = [
        "workload",
        "ms",
        "GiB",
        "x bare matmuls",
        "SpecForge ms",
        "times faster",
        "host ms, replay / eager",
        "tokens/s",
    ]
    rows = [
        [
            f"{name}, {GOALS[name].shape}",
            f"{row['replay_ms']:.1f} ({GOALS[name].ms:g})",
            f"{row['held_gib']:.1f} ({GOALS[name].gib:g})",
            f"{row['over_bare_matmuls']:.3f} ({GOALS[name].over_bare_matmuls:g})",
            f"{peers[name]['specforge_ms']:.1f}",
            f"{peers[name]['ratio']:.2f} ({GOALS[name].over_specforge:g})",
            f"{row['replay_host_ms']:.2f} / {row['eager_host_ms']:.0f}",
            f"{row['tokens_per_s']:,.0f}",
        ]
        for name, row in steps(results).items()
    ]
    return markdown(head, rows)


def figures_table(results: Path = RESULTS) -> list[str]:
    """Every other figure that was asked for: what, goal, measured, and the record it stands in."""
    rows: list[list[str]] = []

    def add(name: str, what: str, goal: str, value: Callable[[Record], str]) -> None:
        rows.append([what, goal, value(record(name, results)), f"`h200-{name}.json`"])

    def step_of(found: Record, workload: str) -> Record:
        return next(row for row in found["steps"] if row["workload"] == workload)

    add(
        "step",
        "whole step over forward + backward, W2",
        "at most 1.10",
        lambda r: f"{step_of(r, 'W2')['whole_over_forward_backward']:.3f}",
    )
    add(
        "step",
        "update over copy bandwidth, W2",
        "at least 0.85",
        lambda r: f"{step_of(r, 'W2')['update_over_copy_bandwidth']:.2f}",
    )
    for name, goal in GOALS.items():
        add(
            "attention",
            f"flex_attention's time over ours, forward + backward, {name}",
            f"at least {goal.attention_over_flex:g}",
            lambda r, name=name: f"{_attention(r, name):.2f}",
        )
    add("fp8", "forward + backward in fp8, W2", "at most 87 ms", lambda r: f"{step_of(r, 'W2')['replay_ms']:.1f} ms")
    add(
        "input",
        "device idle between steps, W2 from disk",
        "at most 1 %",
        lambda r: f"{_input(r, 'disk')['device_idle_share']:.2%}",
    )
    add(
        "input",
        "host time of the training thread for a step",
        "at most 0.5 ms",
        lambda r: f"{_input(r, 'disk')['host_work_ms']:.2f} ms",
    )
    add(
        "contention",
        "throughput left beside 8 busy Python threads",
        "at least 99 %",
        lambda r: f"{_contention(r, 8)['throughput_left']:.1%}",
    )
    add("contention", "the same of the eager step", "-", lambda r: f"{_contention(r, 8)['eager_throughput_left']:.1%}")
    add("start", "6 buckets of W2's model, cold", "at most 45 s", lambda r: f"{_start(r, 'cold')['seconds']:.1f} s")
    add("start", "the same, warm", "at most 10 s", lambda r: f"{_start(r, 'warm')['seconds']:.1f} s")
    return markdown(["figure", "goal", "measured", "record"], rows)


def _attention(found: Record, workload: str) -> float:
    row = next(r for r in found["ops"] if r["workload"] == workload and r["op"].startswith("attention"))
    return float(row["results"]["flex"]["time_over_ours"])


def _input(found: Record, read_from: str) -> Record:
    return next(row for row in found["input"] if row["read_from"] == read_from)


def _contention(found: Record, threads: int) -> Record:
    return next(row for row in found["contention"] if row["threads"] == threads and row["switch_interval_ms"] < 5)


def _start(found: Record, kind: str) -> Record:
    return next(row for row in found["starts"] if row["start"] == kind)


def markdown(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    """A table's lines."""
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


TABLES: dict[str, Callable[[], list[str]]] = {"speed": speed_table, "figures": figures_table}


def filled(page: str) -> str:
    """The page with every table between its markers made anew."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} table -->", f"<!-- end of {name} table -->"
        if begin in page:
            text = "\n".join([begin, *make(), end])
            page = re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _, text=text: text, page, flags=re.DOTALL)
    return page


PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")


if __name__ == "__main__":
    for file in PAGES:
        file.write_text(filled(file.read_text()))
