"""README.md, docs/performance.md, docs/fp8.md and docs/reliability.md show what the records of bench/results say."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.reliability_tables import RECORDS, reliability_table
from bench.start_tables import start_table
from bench.step_tables import chip_table, ops_table, recompute_table
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


def test_recompute_stands_there_once_it_is_recorded(tmp_path: Path) -> None:
    assert recompute_table(tmp_path) == []
    modes: list[dict[str, Any]] = [
        {"attention": "flex", "recompute": "none", "replay_ms": 20.04, "held_gib": 3.04},
        {"attention": "flex", "recompute": "mlp", "replay_ms": 22.04, "held_gib": 2.5}
        | {"time_over_none": 1.1, "differs_by": 0.0},
        {"attention": "flex", "recompute": "layer", "skipped": "out of GPU memory"},
    ]
    for name, workload in (("recompute", "W1"), ("recompute-w3", "W3")):
        steps = [{"workload": workload, "recompute_modes": modes}]
        (tmp_path / f"h200-{name}.json").write_text(json.dumps({"steps": steps}))
    lines = recompute_table(tmp_path)
    assert lines[2:5] == [
        "| W1 | flex | `none` | 20.0 | - | 3.0 | - |",
        "| W1 | flex | `mlp` | 22.0 | 1.100 | 2.5 | 0.0e+00 |",
        "| W1 | flex | `layer` | - | - | - | out of GPU memory |",
    ]
    assert lines[5].startswith("| W3 | flex | `none`")
    assert lines[-1] == "(`bench/results/h200-recompute.json`, `bench/results/h200-recompute-w3.json`)"
    (tmp_path / "h200-recompute-w3.json").unlink()
    assert recompute_table(tmp_path)[-1] == "(`bench/results/h200-recompute.json`)", "only what there is"


def test_every_recorded_start_stands_there(tmp_path: Path) -> None:
    assert len(start_table(tmp_path)) == 2
    row = {"start": "warm", "seconds": 11.24, "phases": {"import": 3.0, "rest": 0.01}, "buckets": ["a"] * 6}
    (tmp_path / "h200-start-flex.json").write_text(
        json.dumps({"starts": [{**row, "attention": "flex", "kernels_compiled": 0}]})
    )
    assert start_table(tmp_path)[2:] == [
        "| 6 buckets, flex | warm | 11.2 (12) | 0 | import 3.0 | `h200-start-flex.json` |"
    ]


def test_clock_and_power_stand_there_once_they_are_recorded(tmp_path: Path) -> None:
    assert chip_table(tmp_path) == []
    chip = {"ms": 111.2, "clock_mhz": 1410, "max_clock_mhz": 1980, "power_w": 698.2, "power_limit_w": 700}
    chip |= {"temperature_c": 61, "power_capped_share": 0.9}
    steps: list[dict[str, Any]] = [
        {"workload": "W1", "sustained": {"ms": 16.0, "skipped": "no nvidia-smi here"}},
        {"workload": "W2", "sustained": chip | {"reasons": {"software power cap": 0.9}}}
        | {"bare_matmuls_sustained": chip | {"reasons": {}}},
    ]
    (tmp_path / "h200-step.json").write_text(json.dumps({"steps": steps}))
    assert chip_table(tmp_path)[4:] == [
        "| W2 | step | 111.2 | 1,410 of 1,980 | 698 of 700 | 90% | software power cap 90% | 61 | `h200-step.json` |",
        "| W2 | bare matmuls | 111.2 | 1,410 of 1,980 | 698 of 700 | 90% | - | 61 | `h200-step.json` |",
    ]


def test_operations_stand_there_once_they_are_recorded(tmp_path: Path) -> None:
    assert ops_table(tmp_path) == []
    ours = {"ms": 2.0, "rate": 700.0, "share_of_ceiling": 0.9, "error": 0.002, "sustained": {"ms": 2.4}}
    results = {"ours": ours, "reference": {"skipped": "out of memory"}, "torch": {"time_over_ours": 1.5}}
    op = {"workload": "W1", "op": "linear o", "unit": "TFLOP/s", "results": results}
    (tmp_path / "h200-ops.json").write_text(json.dumps({"ops": [op]}))
    assert ops_table(tmp_path)[2] == "| W1 linear o | 2.000 | 2.400 | 700 TFLOP/s | 90% | - | 1.50 | - | - | 2.0e-03 |"
