"""`bench input`, `bench contention` and `bench start` on the CPU: what they report, and that they compare first."""

import json
import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import contention, page_cache, start, temporary_data
from bench import input as bench_input
from bench.cli import main
from bench.fed_steps import fed_steps
from bench.ratios import CPU_NOTE
from bench.subjects import trained_from_disk
from bench.workloads import WORKLOADS
from engine.engine import Engine
from engine.settings import load_settings
from graphs.parity import Difference

pytestmark = pytest.mark.usefixtures("one_thread")
CPU, TINY = torch.device("cpu"), WORKLOADS["tiny"]
SETTINGS = load_settings(None, ["run.device=cpu"])


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bench_input, contention):
        monkeypatch.setattr(module, "samples_that_fit", lambda workload: 6)


def test_input_from_the_disk_and_from_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "input.json", tmp_path / "input.png"
    figures = bench_input.run(SETTINGS, repeats=2, out=out, plot=plot)
    assert json.loads(out.read_text()) == figures
    assert figures["note"] == CPU_NOTE
    for row in figures["input"]:
        assert (row["workload"], row["how"], row["samples"], row["steps"]) == ("tiny", "called", 6, 2)
        assert row["equals_eager"] is True
        assert 0 <= row["device_idle_share"] < 1
        assert 0 <= row["cached_share_before"] <= 1
        assert row["step_ms"] is row["host_work_ms"] is row["loader_wait_ms"] is None
    assert figures["input"][1]["read_from"] == "page cache"
    assert CPU_NOTE in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_steps_are_counted_after_the_warm_up(tmp_path: Path) -> None:
    folder = temporary_data.write_samples(tmp_path / "data", TINY, [TINY.S] * 4, CPU)
    with trained_from_disk(folder, TINY, SETTINGS, CPU) as subjects:
        steps = fed_steps(subjects, repeats=3, warm_ups=1, epochs=1)
        assert len(steps.step_ms) == len(steps.idle_ms) == len(steps.host_ms) == len(steps.launch_ms) == 3
        assert all(idle < step for idle, step in zip(steps.idle_ms, steps.step_ms, strict=True))
        assert steps.mean_ms == pytest.approx(sum(steps.step_ms) / 3)
        with pytest.raises(ValueError, match="expected 5 batches, found 4; lower --repeats"):
            fed_steps(subjects, repeats=4, warm_ups=1, epochs=1)
        optimizer = subjects.engine.optimizer
        assert optimizer is not None
        assert (int(optimizer.step), int(optimizer.skipped)) == (8, 0)


def test_the_page_cache_is_told_from_the_disk(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"x" * (1 << 20))
    assert page_cache.cached_share([file]) == 1.0
    page_cache.drop_from_cache([file])
    # A tmpfs keeps what it holds.
    assert page_cache.cached_share([file]) in (0.0, 1.0)


def test_busy_threads_are_there_and_go() -> None:
    def busy() -> int:
        return sum(thread.name.startswith("busy ") for thread in threading.enumerate())

    with contention.busy_threads(3):
        assert busy() == 3
    assert busy() == 0


def test_contention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "contention.json", tmp_path / "contention.png"
    figures = contention.run(SETTINGS, threads=(1,), repeats=1, out=out, plot=plot)
    assert json.loads(out.read_text()) == figures
    assert (figures["workload"], figures["equals_eager"], figures["note"]) == ("tiny", True, CPU_NOTE)
    rows: list[dict[str, Any]] = figures["contention"]
    assert [(row["threads"], row["switch_interval_ms"]) for row in rows] == [(0, 0.1), (1, 0.1), (1, 5.0)]
    assert rows[0]["throughput_left"] == 1.0
    assert all(row["throughput_left"] > 0 and row["step_ms"] is None for row in rows)
    assert CPU_NOTE in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["input", "contention"])
def test_no_speed_is_shown_when_the_replay_differs(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(Engine, "verify", lambda engine, bucket: Difference("fc.weight", math.inf))
    assert main(["bench", command, "--set", "run.device=cpu", "--json", "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "the replay differs from the eager step in fc.weight" in captured.err
    assert not out.exists()


def test_a_start_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[dict[str, str]] = []
    spawn = subprocess.run

    def note(command: list[str], **options: Any) -> Any:
        if "bench.start_once" in command:
            seen.append(options["env"])
        return spawn(command, **options)

    monkeypatch.setattr("subprocess.run", note)
    figures = start.run(SETTINGS, buckets=12, out=tmp_path / "start.json")
    assert json.loads((tmp_path / "start.json").read_text()) == figures
    cold, warm = figures["starts"]
    assert (cold["start"], warm["start"], figures["verified"], figures["note"]) == ("cold", "warm", False, CPU_NOTE)
    assert len(cold["buckets"]) == 12 and cold["attention"] == "reference"
    assert cold["loaded"] == [], "what training does not need is not loaded"
    for row in (cold, warm):
        assert row["seconds"] is None and set(row["phases"].values()) == {None}
        assert row["shares"].keys() >= {"import", "data", "weights", "memory", "compile", "capture", "verify"}
        assert 0.9 < sum(row["shares"].values()) <= 1.0
    # Both find the same caches of compiled kernels, and none but their own.
    assert seen[0]["TRITON_CACHE_DIR"] == seen[1]["TRITON_CACHE_DIR"]
    assert not Path(seen[0]["TRITON_CACHE_DIR"]).exists()


def test_a_warm_start_that_compiles_shows_no_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {"seconds": 1.0, "phases": {"import": 1.0}, "buckets": ["a"], "attention": "flex", "kernels_compiled": 3}
    done = subprocess.CompletedProcess([sys.executable], 0, json.dumps(found), "")
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: done)
    with pytest.raises(
        ValueError, match="start 2: expected every kernel in the caches .*, found 3 compiled anew; no time"
    ):
        start.run(SETTINGS, out=tmp_path / "start.json")
    assert not (tmp_path / "start.json").exists()


def test_a_start_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess(
        [sys.executable], 1, "", "Traceback ...\nCaptureError: bucket 1x512x512 differs\n"
    )
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: failed)
    with pytest.raises(ValueError, match="start 1: expected a run that gets ready, found one that ended: CaptureError"):
        start.run(SETTINGS)
