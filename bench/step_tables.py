"""Tables of docs/performance.md that stand there once their record does: recompute, clock and power, single operations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.markdown import RESULTS, markdown

Row = Mapping[str, Any]


def recompute_table(results: Path = RESULTS) -> list[str]:
    """`model.recompute` in its modes: time and memory, under each attention; nothing without a record."""
    rows = [
        [
            step["workload"],
            mode["attention"],
            f"`{mode['recompute']}`",
            _number(mode, "replay_ms", ".1f"),
            _number(mode, "time_over_none", ".3f"),
            _number(mode, "held_gib", ".1f"),
            mode.get("skipped") or _number(mode, "differs_by", ".1e"),
        ]
        for step in _steps(results, "recompute", "recompute-w3")
        for mode in step.get("recompute_modes", ())
    ]
    head = ["workload", "attention", "recompute", "ms", "x none", "GiB", "gradient differs from none's by"]
    return [*markdown(head, rows), "", _kept(results, "recompute", "recompute-w3")] if rows else []


def chip_table(results: Path = RESULTS) -> list[str]:
    """Clock and power while the step and its bare matmuls were replayed for seconds; nothing without a record."""
    found: dict[str, tuple[str, Row, Row]] = {}
    for name in ("power", "step", "step-w3", "recompute", "recompute-w3"):
        for step in _steps(results, name):
            if "clock_mhz" in step.get("sustained", {}):
                found.setdefault(step["workload"], (name, step["sustained"], step["bare_matmuls_sustained"]))
    if not found:
        return []
    rows = [
        [
            name,
            what,
            _number(chip, "ms", ".1f"),
            f"{_number(chip, 'clock_mhz', ',.0f')} of {_number(chip, 'max_clock_mhz', ',.0f')}",
            f"{_number(chip, 'power_w', '.0f')} of {_number(chip, 'power_limit_w', '.0f')}",
            _number(chip, "power_capped_share", ".0%"),
            ", ".join(f"{reason} {share:.0%}" for reason, share in chip.get("reasons", {}).items()) or "-",
            _number(chip, "temperature_c", ".0f"),
            f"`h200-{file}.json`",
        ]
        for name, (file, *pair) in sorted(found.items())
        for what, chip in zip(("step", "bare matmuls"), pair, strict=True)
    ]
    head = [
        "workload",
        "replayed",
        "ms",
        "SM clock, MHz",
        "power, W",
        "under a power cap",
        "what holds the clock",
        "C",
        "record",
    ]
    return ["Replayed for three seconds each, medians of nvidia-smi's samples:", "", *markdown(head, rows)]


def ops_table(results: Path = RESULTS) -> list[str]:
    """Every operation: ours, and how many times longer the others take; nothing without a record."""
    files = _files(results, "ops", "ops-w3")
    if not files:
        return []
    rows = [
        [
            f"{op['workload']} {op['op']}",
            _number(op["results"]["ours"], "ms", ".3f"),
            _number(op["results"]["ours"].get("sustained", {}), "ms", ".3f"),
            f"{_number(op['results']['ours'], 'rate', '.4g')} {op['unit']}",
            _number(op["results"]["ours"], "share_of_ceiling", ".0%"),
            *(_number(op["results"].get(name, {}), "time_over_ours", ".2f") for name in _RIVALS),
            _number(op["results"]["ours"], "error", ".1e"),
        ]
        for file in files
        for op in json.loads(file.read_text())["ops"]
    ]
    head = ["operation", "ms", "sustained", "rate", "of the ceiling", *(f"{name}, times" for name in _RIVALS), "error"]
    return [*markdown(head, rows), "", _kept(results, "ops", "ops-w3")]


_RIVALS = ("reference", "torch", "compiled", "flex")


def _steps(results: Path, *names: str) -> Iterator[Row]:
    for file in _files(results, *names):
        yield from json.loads(file.read_text())["steps"]


def _files(results: Path, *names: str) -> list[Path]:
    """The records of these names that there are."""
    return [file for name in names if (file := results / f"h200-{name}.json").is_file()]


def _kept(results: Path, *names: str) -> str:
    return f"({', '.join(f'`bench/results/{file.name}`' for file in _files(results, *names))})"


def _number(row: Row, key: str, form: str) -> str:
    return "-" if row.get(key) is None else format(row[key], form)
