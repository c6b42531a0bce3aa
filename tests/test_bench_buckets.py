"""`bench buckets` on the CPU: a dataset's plan, what is written down, and no speed without equality."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import buckets, timing, workloads
from bench.cli import main
from engine.engine import Engine
from engine.settings import load_settings
from engine.settings_fields import SettingsError
from graphs.parity import Difference
from tests.run_helpers import SETTINGS, training_dataset

pytestmark = pytest.mark.usefixtures("one_thread")


def measure(data: Path, out: Path | None = None, *changes: str) -> dict[str, Any]:
    return buckets.run(data, load_settings(None, [*SETTINGS, *changes]), workloads=(), repeats=2, out=out)


def test_every_bucket_of_a_datasets_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = training_dataset(tmp_path / "data"), tmp_path / "results" / "cpu.json"
    figures = measure(data, out)
    assert json.loads(out.read_text()) == figures
    assert [row["bucket"] for row in figures["buckets"]] == ["1x128x32", "1x256x32"]
    for row in figures["buckets"]:
        assert row["how"] == "called"
        assert row["equals_eager"] is True
        assert row["attention"] == "reference"
        assert row["device_allocations"] == row["compilations"] == 0
        assert row["held_gib"] is None
        for name in ("replay_ms", "eager_ms", "replay_host_ms", "eager_host_ms", "tokens_per_s", "tflops"):
            assert row[name] > 0
        assert row["useful_tokens_per_s"] == pytest.approx(row["tokens_per_s"] * (1 - row["padding"]))
        assert row["tflops"] == pytest.approx(row["tflop"] / row["replay_ms"] * 1e3)
    told = capsys.readouterr().out
    assert "CPU, torch" in told
    assert "called" in told


def test_a_result_says_where_it_comes_from(tmp_path: Path) -> None:
    where = measure(training_dataset(tmp_path / "data", (40,)))["where"]
    assert where.keys() == {"gpu", "torch", "triton", "cuda", "python", "commit", "command", "date"}
    assert where["command"].startswith("dflash-engine ")
    assert len(where["commit"].removesuffix("+changes")) in (12, len("unknown"))


def test_a_named_workload_on_random_data(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = workloads.Workload("W1", 16, 32, 8, 64, S=128, N=32, K=4)
    monkeypatch.setitem(workloads.WORKLOADS, "W1", tiny)
    settings = load_settings(None, ["run.device=cpu"])
    (row,) = buckets.run(None, settings, workloads=("W1",), repeats=1, out=None)["buckets"]
    assert (row["workload"], row["bucket"], row["K"], row["how"]) == ("W1", "1x128x32", 4, "called")
    assert row["tokens_per_s"] == pytest.approx(128 / row["replay_ms"] * 1e3)
    with pytest.raises(SettingsError, match="kl_weight: expected 0 for a named workload, which has no last_hidden"):
        soft = load_settings(None, ["run.device=cpu", "objective.kl_weight=1"])
        buckets.run(None, soft, workloads=("W1",), repeats=1, out=None)


def test_soft_labels_are_timed_where_the_data_has_them(tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data", (40, 60), last_hidden_norm="pre")
    (row,) = measure(data, None, "objective.kl_weight=0.15")["buckets"]
    assert row["equals_eager"] is True


def test_no_speed_is_shown_when_replay_and_eager_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = training_dataset(tmp_path / "data", (40,)), tmp_path / "result.json"
    monkeypatch.setattr(Engine, "verify", lambda engine, bucket: Difference("fc.weight", math.inf))
    command = ["bench", "buckets", str(data), "--out", str(out), *(w for s in SETTINGS for w in ("--set", s))]
    assert main(command) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "measuring 1x128x32 ...\n"
        "error: bucket 1x128x32: the replay differs from the eager step in fc.weight by inf of its largest value; no speed "
        "is shown\n"
    )
    assert not out.exists()


def test_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.010, 1.0, 1.001, 2.0, 2.003])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    calls: list[None] = []
    found = timing.median_ms(lambda: calls.append(None), torch.device("cpu"), repeats=3, warm_ups=2)
    assert found == pytest.approx(3.0)
    assert len(calls) == 5


def test_a_named_workload_is_refused_on_the_cpu() -> None:
    with pytest.raises(SettingsError, match="--workload W1: expected a CUDA device for steps of 9 TFLOP, found the CPU"):
        buckets.run(None, load_settings(None, ["run.device=cpu"]), workloads=("W1",), repeats=1, out=None)
