"""`bench ops` on the CPU: every operation with its errors, and no speed for one that is wrong."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import op_cases, ops
from bench.cli import main
from bench.op_case import Case, differentiable
from bench.ratios import CPU_NOTE
from bench.workloads import WORKLOADS
from engine.settings import load_settings
from engine.settings_fields import SettingsError

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def measure(**options: Any) -> dict[str, Any]:
    return ops.run(load_settings(None, ["run.device=cpu"]), repeats=1, **options)


def tiny_cases() -> dict[str, Case]:
    return {case.op: case for case in op_cases.cases(WORKLOADS["tiny"], CPU, chunk_rows=32, compiled=False)}


def test_every_operation_with_its_rival(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "ops.json", tmp_path / "ops.png"
    figures = measure(out=out, plot=plot)
    assert json.loads(out.read_text()) == figures
    assert figures["note"] == CPU_NOTE
    assert [row["op"] for row in figures["ops"]] == list(tiny_cases())
    for row in figures["ops"]:
        assert row["results"].keys() == {"reference", "torch"}, row["op"]
        assert row["unit"] in ("TFLOP/s", "GB/s")
        assert row["results"]["reference"]["time_over_reference"] == 1.0
        for result in row["results"].values():
            assert 0 <= result["error"] < 1e-4
            assert result["ms"] is result["rate"] is None
            assert result["time_over_reference"] > 0
    assert CPU_NOTE in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_only_some_operations() -> None:
    assert [row["op"] for row in measure(only="norm,")["ops"]] == ["residual, norm, q k v", "residual, norm, MLP"]
    with pytest.raises(ValueError, match="--only conv: expected a word of an operation's name, found none"):
        measure(only="conv")


def wrong(data: Any) -> Any:
    return data.leaves["x"] @ data.weights["weight"].value.t() * (1 + 2e-4)


@pytest.mark.parametrize(("name", "most"), [("ours", r"[1-9]\.\de-07"), ("torch", "1.0e-04")])
def test_a_wrong_result_is_found(name: str, most: str) -> None:
    case = tiny_cases()["linear o"]
    case = replace(case, calls={"reference": case.calls["reference"], name: differentiable(wrong)})
    with pytest.raises(ValueError, match=f"linear o: output 0 of {name} is off by 2.0e-04, at most {most}.*no speed"):
        ops.check(case, CPU)


def test_what_is_compiled_is_set_against_the_same_uncompiled() -> None:
    case = tiny_cases()["linear o"]
    data = case.make(8, torch.float32, CPU)
    right = replace(case, calls={**case.calls, "compiled": case.calls["torch"]})
    assert max(ops.check_compiled(right, data, torch.float32).values()) == 0.0
    with pytest.raises(ValueError, match="linear o: output 0 of compiled is off by 2.0e-04"):
        ops.check_compiled(replace(case, calls={**case.calls, "compiled": differentiable(wrong)}), data, torch.float32)


def test_no_speed_is_shown_for_a_wrong_operation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "ops.json"
    rms_norm = torch.nn.functional.rms_norm
    monkeypatch.setattr("torch.nn.functional.rms_norm", lambda *args: rms_norm(*args) * 1.01)
    command = ["bench", "ops", "--set", "run.device=cpu", "--json", "--out", str(out)]
    assert main(command) == 1
    captured = capsys.readouterr()
    assert "error: tiny residual, norm, q k v: output 1 of torch is off by 1.0e-02" in captured.err
    assert "; tiny residual, norm, MLP: output 1 of torch is off by" in captured.err
    # The others are measured all the same.
    measured = [row["op"] for row in json.loads(out.read_text())["ops"]]
    assert measured == [op for op in tiny_cases() if not op.startswith("residual")]
    assert "q k v" not in captured.out


def test_large_workloads_are_refused_on_the_cpu() -> None:
    with pytest.raises(
        SettingsError, match="--workload W2: expected a CUDA device for steps of 70 TFLOP, found the CPU"
    ):
        measure(workloads=("W2",))


def test_an_operation_that_cannot_run_does_not_take_the_others_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check = ops.check

    def fails_once(case: Case, device: torch.device) -> Any:
        if case.op == "residual, norm":
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore about it")
        return check(case, device)

    monkeypatch.setattr(ops, "check", fails_once)
    with pytest.raises(ValueError, match="^tiny residual, norm: CUDA out of memory.$"):
        measure(only="norm", out=tmp_path / "ops.json")
    measured = [row["op"] for row in json.loads((tmp_path / "ops.json").read_text())["ops"]]
    assert measured == ["residual, norm, q k v", "norms of q k, RoPE", "residual, norm, MLP"]
