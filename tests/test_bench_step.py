"""`bench step` on the CPU: the tiny workload and a dataset, what is compared before, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import step, workloads
from bench.cli import main
from bench.plain_torch import CompiledStep
from bench.ratios import CPU_NOTE
from bench.recompute import difference
from bench.subjects import workload_subject
from bench.workloads import WORKLOADS
from engine.engine import Engine
from engine.settings import load_settings
from engine.settings_fields import SettingsError
from engine.work import update_bytes
from graphs.parity import Difference
from tests.run_helpers import SETTINGS, training_dataset

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def measure(*changes: str, **options: Any) -> dict[str, Any]:
    return step.run(load_settings(None, ["run.device=cpu", *changes]), repeats=2, **options)


def test_the_tiny_workload_gives_ratios_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "step.json", tmp_path / "step.png"
    figures = measure(out=out, plot=plot)
    assert json.loads(out.read_text()) == figures
    assert figures["note"] == CPU_NOTE
    (row,) = figures["steps"]
    assert (row["workload"], row["bucket"], row["K"], row["how"]) == ("tiny", "1x128x32", 4, "called")
    assert row["equals_eager"] is row["update_equals_eager"] is True
    for name in ("whole_over_forward_backward", "update_over_copy_bandwidth", "update_gb", "tflop"):
        assert row[name] > 0
    for name in ("replay_ms", "eager_spread", "tokens_per_s", "tflops", "whole_step_ms", "copy_gb_per_s", "held_gib"):
        assert row[name] is None, name
    assert "no GPU" in row["compiled_skipped"]
    assert CPU_NOTE in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_every_bucket_of_the_settings_dataset(tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data")
    rows = measure(*SETTINGS, f"data.path={data}", compiled=False)["steps"]
    assert [row["bucket"] for row in rows] == ["1x128x32", "1x256x32"]
    assert all(row["whole_over_forward_backward"] > 0 for row in rows)
    assert [row["compiled_skipped"] for row in rows] == ["--no-compiled"] * 2


def test_modes_of_recompute(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = measure("model.recompute=mlp", whole=False, recompute=True)["steps"]
    assert (row["attention"], row["precision"], row["recompute"]) == ("reference", "fp32", "mlp")
    none, *others = row["recompute_modes"]
    assert none["recompute"] == "none" and none["replay_ms"] is None
    assert [mode["recompute"] for mode in others] == ["mlp", "layer"]
    for mode in others:
        assert (mode["attention"], mode["differs_by"]) == ("reference", 0.0)
        assert mode["time_over_none"] > 0 and mode["replay_ms"] is mode["held_gib"] is None
    assert "model.recompute" in capsys.readouterr().out


def test_no_speed_is_shown_when_a_mode_has_another_gradient() -> None:
    expected = torch.arange(8.0)
    assert difference("tiny", "layer", expected, expected, "fp32") == 0.0
    with pytest.raises(ValueError, match="tiny: the gradient with recompute = layer differs .* by 1.0e-01 .*no speed"):
        difference("tiny", "layer", expected * 1.1, expected, "fp32")
    with pytest.raises(ValueError, match="differs .* by nan"):
        difference("tiny", "layer", expected * float("nan"), expected, "fp32")


def test_no_speed_is_shown_when_the_replay_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "step.json"
    monkeypatch.setattr(Engine, "verify", lambda engine, bucket: Difference("fc.weight", math.inf))
    assert main(["bench", "step", "--set", "run.device=cpu", "--json", "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "bucket 1x128x32: the replay differs from the eager step in fc.weight by inf" in captured.err
    assert not out.exists()


def test_no_speed_is_shown_when_the_update_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphs.executor import CallExecutor

    run = CallExecutor.run

    def run_wrongly(executor: CallExecutor, name: str) -> None:
        run(executor, name)
        if name == "update":
            executor._steps[name].__self__._arenas.exp_avg.mul_(2)  # type: ignore[attr-defined]

    monkeypatch.setattr(CallExecutor, "run", run_wrongly)
    with pytest.raises(ValueError, match="update: the replay differs from the eager update in exp_avg by .* no speed"):
        measure()


@pytest.mark.parametrize("weighting", ["decay", "uniform"])
def test_the_compiled_steps_gradient_is_the_engines(weighting: str) -> None:
    settings = load_settings(None, ["run.device=cpu", f"objective.weighting={weighting}"])
    with workload_subject(WORKLOADS["tiny"], settings, CPU) as subject:
        rival = CompiledStep(subject.engine.parts, subject.inputs, attention="reference", backend="eager")
        assert 0 <= step.compiled_difference(subject, rival) < 1e-5
        subject.engine.drafter.norm.value.data.mul_(-1)

        class Wrong(CompiledStep):
            def __call__(self) -> None:
                subject.engine.drafter.norm.value.data.mul_(-1)
                super().__call__()
                subject.engine.drafter.norm.value.data.mul_(-1)

        wrong = Wrong(subject.engine.parts, subject.inputs, attention="reference", backend="eager")
        with pytest.raises(ValueError, match="compiled step's gradient differs from the eager step's .* no speed"):
            step.compiled_difference(subject, wrong)


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SettingsError, match="--workload W1: expected a CUDA device for steps of 9 TFLOP, found the CPU"
    ):
        measure(workloads=("W1",))
    with pytest.raises(SettingsError, match="kl_weight: expected 0 for a named workload, which has no last_hidden"):
        measure("objective.kl_weight=1")
    with pytest.raises(SettingsError, match="--recompute: expected a named workload, found data.path"):
        measure(f"data.path={tmp_path}", recompute=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="--plot: expected matplotlib, found none"):
        measure(plot=tmp_path / "x.png")


def test_bytes_of_an_update() -> None:
    from engine.params import ParamArena

    config = workloads.WORKLOADS["tiny"].config()
    bf16 = ParamArena(config, CPU, dtype=torch.bfloat16, grad_dtype=torch.bfloat16)
    fp32 = ParamArena(config, CPU, dtype=torch.float32, grad_dtype=torch.float32)
    assert update_bytes(bf16) == 30 * bf16.size
    # The masters are the weights: nothing is written twice.
    assert update_bytes(fp32) == 32 * fp32.size
