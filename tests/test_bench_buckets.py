"""`bench buckets` on the CPU: a dataset's plan, what is written down, and no speed without equality."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import buckets, timing
from bench.cli import main
from bench.mixture import Mixture
from bench.ratios import CPU_NOTE
from bench.subjects import workload_subject
from bench.timed_step import measure_step
from bench.workloads import WORKLOADS
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
    assert figures["note"] == CPU_NOTE
    assert [row["bucket"] for row in figures["buckets"]] == ["1x128x32", "1x256x32"]
    for row in figures["buckets"]:
        assert row["how"] == "called"
        assert row["equals_eager"] is True
        assert row["attention"] == "reference"
        assert row["device_allocations"] == row["compilations"] == 0
        for name in ("replay_ms", "eager_ms", "replay_host_ms", "tokens_per_s", "tflops", "held_gib", "capture_s"):
            assert row[name] is None, name
        assert row["tflop"] > 0
    told = capsys.readouterr().out
    assert CPU_NOTE in told
    assert "called" in told


def test_rates_are_work_over_time() -> None:
    settings = load_settings(None, ["run.device=cpu"])
    with workload_subject(WORKLOADS["tiny"], settings, torch.device("cpu")) as subject:
        row = measure_step(subject, repeats=2)
    assert row["useful_tokens_per_s"] == row["tokens_per_s"] == pytest.approx(128 / row["replay_ms"] * 1e3)
    assert row["draft_tokens_per_s"] == pytest.approx(row["tokens_per_s"])
    assert row["tflops"] == pytest.approx(row["tflop"] / row["replay_ms"] * 1e3)


def test_a_result_says_where_it_comes_from(tmp_path: Path) -> None:
    where = measure(training_dataset(tmp_path / "data", (40,)))["where"]
    assert where.keys() == {"gpu", "torch", "triton", "cuda", "python", "commit", "command", "date"}
    assert where["command"].startswith("dflash-engine")
    assert len(where["commit"].removesuffix("+changes")) in (12, len("unknown"))


def test_an_epoch_in_buckets_against_padding_to_the_longest(tmp_path: Path) -> None:
    figures = measure(training_dataset(tmp_path / "data"))
    epoch = figures["epoch"]
    assert epoch.keys() == {"buckets", "buckets_eager", "pad_to_longest", "pad_to_longest_eager"}
    assert epoch["buckets"]["time_over_buckets"] == 1.0
    assert epoch["buckets"]["batches"] == epoch["pad_to_longest"]["batches"] == 10
    # 1,070 tokens in five rows of 128 and five of 256, or in ten of 256.
    assert epoch["buckets"]["padding"] == pytest.approx(1 - 1070 / 1920)
    assert epoch["pad_to_longest"]["padding"] == pytest.approx(1 - 1070 / 2560)
    # Of all batches of a bucket, not of the one that is timed.
    assert {row["bucket"]: row["padding"] for row in figures["buckets"]} == {
        "1x128x32": pytest.approx(1 - 320 / 640),
        "1x256x32": pytest.approx(1 - 750 / 1280),
    }
    for record in epoch.values():
        assert record["time_over_buckets"] > 0
        assert record["seconds"] is record["useful_tokens_per_s"] is None


def test_a_mixture_of_lengths(tmp_path: Path) -> None:
    settings = load_settings(None, ["run.device=cpu", "buckets.num_anchors=32", "buckets.token_budget=2048"])
    plot = tmp_path / "mixture.png"
    figures = buckets.run(None, settings, samples=60, repeats=1, out=None, plot=plot)
    assert (figures["workload"], figures["samples"]) == ("tiny", 60)
    assert [row["K"] for row in figures["buckets"]] == [4] * len(figures["buckets"])
    assert figures["epoch"]["pad_to_longest"]["padding"] > figures["epoch"]["buckets"]["padding"]
    assert sum(row["batches"] for row in figures["buckets"]) == figures["epoch"]["buckets"]["batches"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SettingsError, match="kl_weight: expected 0 for a named workload, which has no last_hidden"):
        soft = load_settings(None, ["run.device=cpu", "objective.kl_weight=1"])
        buckets.run(None, soft, samples=60, repeats=1, out=None)


def test_packed_rows_of_a_mixture_against_one_sample_a_row() -> None:
    changes = ("buckets.num_anchors=32", "buckets.token_budget=2048", "buckets.packing=true")
    settings = load_settings(None, ["run.device=cpu", *changes])
    figures = buckets.run(None, settings, samples=60, supervised=0.25, repeats=1, out=None)
    epoch = figures["epoch"]
    assert figures["mixture"]["supervised"] == 0.25
    assert list(epoch) == [
        f"{name}{way}" for name in ("buckets", "one_sample_a_row", "pad_to_longest") for way in ("", "_eager")
    ]
    assert epoch["buckets"]["batches"] < epoch["pad_to_longest"]["batches"]
    assert epoch["buckets"]["padding"] < epoch["pad_to_longest"]["padding"]
    assert sum(row["batches"] for row in figures["buckets"]) == epoch["buckets"]["batches"]


def test_packed_rows_of_a_dataset(tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data", (40, 30, 60, 20, 130, 50))
    figures = measure(data, None, "buckets.packing=true")
    assert figures["epoch"]["one_sample_a_row"]["batches"] == 6
    assert figures["epoch"]["buckets"]["batches"] < 6
    assert figures["epoch"]["one_sample_a_row"]["time_over_buckets"] > 0


def test_the_mixture_is_lognormal() -> None:
    lengths = Mixture(samples=20_000).lengths()
    assert np.median(lengths) == pytest.approx(700, rel=0.02)
    assert np.mean(lengths < 2048) == pytest.approx(0.95, abs=0.005)
    assert lengths.min() >= 16 and lengths.max() == 4096
    assert (lengths == Mixture(samples=20_000).lengths()).all()


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


def test_a_large_workload_is_refused_on_the_cpu() -> None:
    with pytest.raises(
        SettingsError, match="--workload W1: expected a CUDA device for steps of 9 TFLOP, found the CPU"
    ):
        buckets.run(None, load_settings(None, ["run.device=cpu"]), workloads=("W1",), repeats=1, out=None)
