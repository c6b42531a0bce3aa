"""A watched run: a leak is found, a slow step is counted where it belongs, and what comes and goes is neither."""

import json
import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from bench.long_run import CHECKPOINT, EVALUATION, StepLog, WatchedRun, watch
from bench.long_run_verdict import rates, read_lines, slow_steps, verdicts
from bench.mixture import Mixture
from bench.reliability import main
from bench.reliability_long_run import CUDA_SAVE_EVERY, workload_run
from bench.trend import floor_rise, trend
from bench.workloads import WORKLOADS
from buffers.batching import Batch, Document
from buffers.shapes import Bucket
from engine import demo
from engine.run import TrainingRun
from engine.train import take_steps
from tests.fake_cuda import DEVICE, FakeCuda
from tests.run_helpers import run_settings, training_dataset

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def test_a_line_that_rises_is_told_from_noise() -> None:
    t = np.arange(300.0)
    noise = np.random.Generator(np.random.Philox(0)).normal(0, 5, 300)
    flat, leak = trend(t, 500 + noise), trend(t, 500 + noise + 0.2 * t)
    assert abs(flat.slope_per_minute) < 3 * flat.standard_error and not flat.grows(tolerance=8)
    assert leak.slope_per_minute == pytest.approx(12, abs=2) and leak.drift == pytest.approx(60, abs=10)
    assert leak.grows(tolerance=8)
    # Steady, and too little to matter; much, but falling.
    assert not trend(t, 500 + 0.01 * t).grows(tolerance=8)
    assert not trend(t, 500 - t).grows(tolerance=8)
    # Back and forth within a block makes no slope.
    assert not trend(t, 500 + 50 * (t % 10)).grows(tolerance=8)
    with pytest.raises(ValueError, match="expected at least 6 samples after the warm-up, found 5; let the run"):
        trend(t[:5], t[:5])


def test_what_comes_and_goes_does_not_raise_the_floor() -> None:
    assert floor_rise([3, 4, 3, 5, 3, 4, 3, 3]) == 0
    assert floor_rise([3, 3, 4, 4, 5, 5, 6, 6]) == 3


def steps_of(ms: list[float], aside: dict[int, int]) -> StepLog:
    log = StepLog(CPU)
    for index in range(len(ms)):
        bucket = Bucket(B=1, S=128 * (1 + index % 2), N=32, K=4)
        log.ended((Batch(bucket, ((Document(index, 0, 100),),), 0),), aside.get(index, 0))
    log._ms[: len(ms)] = ms
    return log


def test_a_slow_step_is_counted_where_it_belongs() -> None:
    # The buckets take 10 and 100 ms; the first step, of the warm-up, does not count.
    ms = [900.0, 100, 10, 100, 31, 299, 10, 301, 10, 100, 50, 100, 10, 900]
    found = slow_steps(steps_of(ms, {10: EVALUATION, 12: CHECKPOINT, 13: EVALUATION | CHECKPOINT}), 1)
    assert found["median_ms"] == {"1x128x32": 10, "1x256x32": 100}
    assert (found["steps"]["count"], found["steps"]["slow"]) == (10, 2)
    assert found["steps"]["slowest"] == pytest.approx(3.1)
    assert (found["after_evaluation"]["count"], found["after_evaluation"]["slow"]) == (2, 2)
    assert (found["after_evaluation"]["slowest"], found["after_checkpoint"]["slowest"]) == (9, 1)


def test_on_the_gpu_events_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    made: list[dict[str, Any]] = []
    event = torch.cuda.Event

    def make(**options: Any) -> torch.cuda.Event:
        made.append(options)
        return event(**options)

    monkeypatch.setattr(torch.cuda, "Event", make)
    log = StepLog(DEVICE)
    for index in range(50):
        log.ended((Batch(Bucket(B=1, S=128, N=32, K=4), ((Document(index, 0, 100),),), 0),), 0)
        log.go_on()
    assert log.ms().tolist() == [1.0] * 50
    assert made == [{"enable_timing": True}] * 2


def test_the_pace_at_the_beginning_and_at_the_end() -> None:
    found = rates(steps_of([10.0] * 30 + [20.0] * 30, {}), 0)
    assert found == pytest.approx((10_000, 5_000, 0.3))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training_dataset(tmp_path_factory.mktemp("long") / "data")


def watched(data: Path, folder: Path) -> tuple[WatchedRun, dict[str, bool | None]]:
    changes = ("run.epochs=6", "run.save_every=5", "run.eval_every=10", f"data.eval_path={data}")
    run, figures = watch(run_settings(data, folder, *changes), every_s=0.0)
    assert figures["steps"] == run.step_log.count == 60
    assert run.warm_from is not None
    lines = read_lines(folder / "metrics.jsonl")
    found = verdicts(run.step_log, run.samples, run.warm_from, lines)
    return run, {verdict.what: verdict.holds for verdict in found}


def test_a_run_that_keeps_its_memory(data: Path, tmp_path: Path) -> None:
    run, holds = watched(data, tmp_path / "run")
    assert run.warm_from == 11  # the second epoch has begun, one evaluation and two checkpoints are done
    assert len(run.samples.columns(run.warm_from)["seconds"]) == 60 - 11 + 2
    assert ((run.step_log.aside() & EVALUATION) > 0).sum() == 5  # that of the end comes after the last step
    assert ((run.step_log.aside() & CHECKPOINT) > 0).sum() == 11
    assert run.step_log.tokens().sum() == 6 * sum((40, 130, 60, 150, 90, 170, 50, 140, 80, 160))
    assert (run.step_log.ms() > 0).all()
    for what in ("host memory that is no file's", "threads", "open files", "Python's objects", "loss"):
        assert holds[what] is True, what
    assert holds["steps"] is None and "device memory held by torch" not in holds


@pytest.fixture
def leak(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Keeps what a function makes in every step."""
    kept: list[Any] = []
    took = TrainingRun.took

    def plant(make: Callable[[], Any]) -> None:
        def leaking(run: TrainingRun, batches: tuple[Batch, ...]) -> None:
            took(run, batches)
            kept.append(make())

        monkeypatch.setattr(TrainingRun, "took", leaking)

    yield plant
    kept.clear()


def test_objects_that_stay_are_found(data: Path, tmp_path: Path, leak: Callable[[Callable[[], Any]], None]) -> None:
    leak(lambda: [[] for _ in range(500)])
    assert watched(data, tmp_path / "run")[1]["Python's objects"] is False


def mapped_memory() -> mmap.mmap:
    """2 MiB from the system itself: malloc might take them from what earlier tests have freed."""
    memory = mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"x" * len(memory))
    return memory


def test_memory_that_stays_fails_the_command(
    tmp_path: Path, leak: Callable[[Callable[[], Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    leak(mapped_memory)
    monkeypatch.setattr(demo, "DATASET_TOKENS", 3000)
    monkeypatch.setattr(demo, "HELD_OUT_TOKENS", 600)
    out, plot = tmp_path / "long.json", tmp_path / "long.png"
    command = ["long-run", "--steps", "60", "--every", "0.05", "--out", str(out), "--plot", str(plot)]
    changes = ("run.save_every=10", "run.eval_every=20", "buckets.num_anchors=16", "buckets.token_budget=512")
    result = CliRunner().invoke(main, [*command, *(word for change in changes for word in ("--set", change))])
    assert result.exit_code == 1
    assert "expected a run that keeps its memory and its pace, found otherwise: " in result.output
    record = json.loads(out.read_text())
    holds = {row["what"]: row["holds"] for row in record["table"]}
    assert holds["host memory that is no file's"] == "**no**" and holds["loss"] == "yes"
    assert (record["steps"], record["every"]) == (60, {"log": 20, "eval": 20, "save": 10})
    assert "device_used_mib" not in record["samples"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_ends_before_it_is_warm(data: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="steps after an epoch, an evaluation and two checkpoints, found one of 20 steps"
    ):
        watch(run_settings(data, tmp_path / "run", "run.save_every=15"))


def test_minutes_end_a_run(data: Path, tmp_path: Path) -> None:
    run, figures = watch(run_settings(data, tmp_path / "run", "run.epochs=10000"), minutes=0.01, warm_up_s=0.0)
    assert run.warm_from is not None and run.warm_from < figures["steps"] < 1000
    # What the end of a run does is done.
    assert (tmp_path / "run" / "drafter" / "config.json").is_file()


def test_the_run_of_a_workload_has_all_its_buckets(tmp_path: Path) -> None:
    lengths = (128, 256, 384)
    settings = workload_run(tmp_path, 12, CPU, WORKLOADS["tiny"], lengths, Mixture(70, 205, 384, samples=20))
    assert settings.run.save_every == CUDA_SAVE_EVERY
    settings = replace(settings, buckets=replace(settings.buckets, num_anchors=32, token_budget=768))
    with WatchedRun(settings, minutes=None, every_s=9.0, warm_up_s=0.0) as run:
        assert [bucket.S for bucket in run.engine.buckets] == list(lengths)
        figures = take_steps(run)
    assert len(figures["buckets"]) == 3 and figures["eval_loss"] > 0
