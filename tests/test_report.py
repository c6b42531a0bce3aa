"""The page of a run: whole, loading nothing, and made of interrupted and damaged runs too."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.cli import main
from engine.held_out import share_accepted
from engine.report_page import write_report
from engine.run_records import read_records
from engine.svg import Mark, Series, bar_chart, line_chart, thinned, ticks
from tests.run_helpers import metrics, run, training_dataset


def training(step: int, **changes: Any) -> dict[str, Any]:
    bucket = {"batches": 4, "useful_tokens": 800, "slot_tokens": 1000, "device_ms": 20.0, "timed": 2}
    machine = {
        "generation": 1 + step // 30,
        "seconds": 2.0,
        "device_s": {"forward and backward": 1.5, "update": 0.25},
        "host_s": {"waiting for input": 0.5},
        "memory_mib": {"device": 2048.0, "host": 512.0},
        "buckets": {"2x512x64": bucket, "1x1024x64": bucket},
        "tokens_per_s_mean": 1234.0,
    }
    record = {"step": step, "epoch": 0, "lr": 1e-3, "loss": 3.0, "accept_len": 0.5, "accuracy_per_slot": [0.5, 0.25]}
    return record | {"padding": 0.2, "tokens_per_s": 1000.0, "grad_norm": 1.0, "machine": machine} | changes


EVENTS: list[dict[str, Any]] = [
    {"step": 0, "event": "started", "time": "2030-01-01T00:00:00+00:00", "generation": 1, "why": "a new run"}
    | {"total_steps": 90, "seconds": {"data": 1.5, "compile": 30.0}},
    {"step": 30, "event": "reconfigured", "generation": 2, "why": "recapture"}
    | {"changes": [{"setting": "buckets.token_budget", "old": 1024, "new": "<2048>"}]},
]
EVALUATION = {"step": 20, "eval_loss": 2.5, "eval_accept_len": 0.75, "eval_accept_per_slot": [0.5, 0.25]}


def a_run(folder: Path, *lines: Any) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def page_of(folder: Path) -> str:
    """The page's text; it must be well-formed, and nothing in it may ask for another file."""
    text = Path(write_report(folder)["report"]).read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script|<link|nan", text)
    return text


def section(text: str, title: str) -> str:
    (found,) = (part for part in text.split("<section")[1:] if f"<h2>{title}" in part)
    return found


def test_every_section_of_a_run_under_way(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", EVENTS[0], training(10), EVALUATION, EVENTS[1], training(40), training(50))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 60, "lo')  # the line under way when the machine went down
    text = page_of(folder)
    assert "Step 50: under way, or killed" in text and "1 damaged lines" in text
    assert "50 of 90" in text and "1,234" in text
    assert "slot 1" in section(text, "Accept length per slot") and "25.0%" in section(text, "Accept length per slot")
    # 4 batches of 200 tokens, 2 of which took 20 ms: 20,000 tokens/s.
    assert re.findall(r">([0-9a-z,.%]+)</td>", section(text, "Buckets")) == [
        *("1x1024x64", "1", "4", "800", "20.0%", "10.00", "20,000"),
        *("2x512x64", "1", "4", "800", "20.0%", "10.00", "20,000"),
        *("1x1024x64", "2", "8", "1,600", "20.0%", "10.00", "20,000"),
        *("2x512x64", "2", "8", "1,600", "20.0%", "10.00", "20,000"),
    ]
    assert "4.50 s, 75.0%" in section(text, "Seconds by phase, training")
    assert "0.75 s, 12.5%" in section(text, "Seconds by phase, training")  # device: idle
    assert "30.0 s" in section(text, "Seconds by phase, before")
    assert "buckets.token_budget 1024 -&gt; &lt;2048&gt;, recapture" in section(text, "Starts, generations")
    for title in ("Loss", "Accept length:", "Accuracy per slot", "Useful tokens/s of", "Useful tokens per", "Padding"):
        assert "<polyline" in section(text, title) and 'class="mark"' in section(text, title)
    assert "<polyline" in section(text, "Memory")


def test_lines_without_the_machines_figures_and_with_wrong_values(tmp_path: Path) -> None:
    wrong = [
        training(1, machine=None, loss=None, accuracy_per_slot="x", padding=True),
        training(2, machine={"buckets": [], "device_s": {"update": "x"}, "seconds": None}, loss=10**400, lr=1e308),
        training(3, machine={"buckets": {"odd": {"batches": 1}}}, accuracy_per_slot=[None, {}, 0.5]),
        {"step": 3, "event": ["odd"], "changes": [7, {}], "time": {}},
        {"step": -1, "loss": 2.0},
        {"step": 4.5, "loss": 2.0},
        [],
    ]
    folder = a_run(tmp_path / "run", *wrong)
    (folder / "graphs.json").write_text("{")
    text = page_of(folder)
    assert "3 damaged lines" in text and "build them again" in section(text, "Graphs")
    assert "Not recorded by this run" in section(text, "Memory")


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics.jsonl: expected the metrics of a run, found none to read"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match="expected at least one line of metrics, found none"):
        write_report(a_run(tmp_path / "run", 7))


@pytest.mark.usefixtures("one_thread")
def test_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = training_dataset(tmp_path / "data")
    held_out = training_dataset(tmp_path / "held-out", (50, 100), first_sample=100)
    run(data, tmp_path / "run", f"data.eval_path={held_out}", "run.epochs=1")
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html"), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"{tmp_path / 'page.html'}: Step 10: finished")
    assert json.loads(captured.out)["step"] == 10
    text = page_of(tmp_path / "run")
    assert text == (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Not recorded" not in text
    assert "called: nothing to compare" in section(text, "Graphs") and "token_budget" in section(text, "Settings")
    evaluation = metrics(tmp_path / "run")[-1]
    assert sum(evaluation["eval_accept_per_slot"]) == pytest.approx(evaluation["eval_accept_len"])
    assert read_records(tmp_path / "run" / "metrics.jsonl").damaged == 0


def test_shares_add_up_to_the_accepted_length() -> None:
    assert share_accepted([2, 1, 1]) == [0.5, 0.25]
    assert share_accepted([0, 0, 0]) == [0.0, 0.0]


def test_slots_have_colours_of_their_own_from_dark_to_light() -> None:
    chart = line_chart([Series(f"slot {k}", [(1, 0.1 * k), (2, 0.2 * k)]) for k in range(1, 16)], ramp=True)
    colors = re.findall(r"stroke:hsl\((\d+) \d+% (\d+)%\)", chart)
    lights = [int(light) for _, light in colors]
    assert len(set(colors)) == 15 and lights == sorted(lights) and lights[-1] - lights[0] >= 25


def test_charts_keep_within_their_frame() -> None:
    line = [(float(step), None if step == 7 else 1e6 * step) for step in range(5000)]
    assert len(thinned(line)) == 295 and thinned(line)[-1] == (4999.0, 4999e6)
    chart = line_chart([Series("a<b", line)], marks=[Mark(100, "why & what"), Mark(1e9, "beyond")])
    root = ElementTree.fromstring(f"<div>{chart}</div>")
    ends = root.findall(".//polyline")[0].attrib["points"].split()
    assert all(0 <= float(x) <= 720 and 0 <= float(y) <= 260 for x, y in (end.split(",") for end in ends))
    assert [mark.findtext("title") for mark in root.findall(".//line[@class='mark']")] == ["why & what"]
    assert line_chart([Series("nothing", [(1, None)])]) == bar_chart([]) == ""
    assert "<circle" in line_chart([Series("one", [(3, 0.0)])])
    assert "<rect" in bar_chart([("none", 0.0, "0")])


@pytest.mark.parametrize("ends", [(0.0, 0.0), (3.0, 3.0), (0.0, 0.37), (-5.0, 1e299), (2.5, 7.0), (1e-310, 2e-310)])
def test_ticks_enclose_what_is_drawn(ends: tuple[float, float]) -> None:
    found = ticks(*ends)
    assert 1 <= len(found) <= 8 and found[0] <= ends[0] and ends[1] <= found[-1] * (1 + 1e-12)
