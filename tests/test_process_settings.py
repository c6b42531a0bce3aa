"""Settings of allocator and module loading: measured each in a process of its own, judged, and set where they help."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.markdown import RESULTS
from engine import process_settings
from engine.doctor_host import settings_found
from engine.doctor_variants import BASE, best_of, compared, measure_variants, worth_setting
from engine.train import train
from tests.run_helpers import run_settings, training_dataset

EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
FIGURES: dict[str, Any] = {
    "start_s": 3.0,
    "build_s": 1.0,
    "memory_mib": 2000.0,
    "outside_mib": 500.0,
    "replay_ms": 0.5,
    "equal": True,
}


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(process_settings, "_set", {})
    yield


def test_each_variant_is_measured_alone_and_compared_with_neither_set(tmp_path: Path) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text(
        "import json, os, sys\n"
        "env = {k: v for k, v in os.environ.items() if k.startswith(('PYTORCH', 'CUDA_MOD'))}\n"
        f"open({str(tmp_path / 'seen')!r}, 'a').write(json.dumps(env) + chr(10))\n"
        "if 'max_split' in str(env): sys.exit('no such allocator')\n"
        "eager = env.get('CUDA_MODULE_LOADING') == 'EAGER'\n"
        "print('noise')\n"
        f"print(json.dumps({FIGURES!r} | {{'start_s': 3 + 2 * eager, 'memory_mib': 2000.0 - 300 * ('exp' in str(env))}}))\n"
    )
    env = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:1", "CUDA_MODULE_LOADING": "LAZY"}
    found = measure_variants((sys.executable, str(probe)), env, rounds=2)
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    own = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:1", "CUDA_MODULE_LOADING": "LAZY"}
    assert seen == 2 * [{}, {"CUDA_MODULE_LOADING": "LAZY"}, {"CUDA_MODULE_LOADING": "EAGER"}, EXPANDABLE, own]
    told = {variant["name"]: variant["told"] for variant in found}
    assert next(iter(told)) == BASE
    assert told[BASE] == "start 3.0 s, capture 1.00 s, 2,000 MiB (500 of them beside torch's), replay 0.500 ms"
    assert told["CUDA_MODULE_LOADING=LAZY"].endswith(": no difference")
    assert told["CUDA_MODULE_LOADING=EAGER"].endswith(": hurts start")
    assert told["PYTORCH_ALLOC_CONF=expandable_segments:True"].endswith(": helps memory")
    assert told["as it is"] == "does not work: no such allocator"
    assert worth_setting(found) == EXPANDABLE


def test_what_is_noise_and_what_is_not() -> None:
    assert compared(FIGURES, FIGURES) == ([], [])
    assert compared(FIGURES | {"start_s": 3.8, "replay_ms": 0.52, "memory_mib": 2060.0}, FIGURES) == ([], [])
    better = FIGURES | {"start_s": 1.8, "build_s": 0.5, "memory_mib": 1800.0, "replay_ms": 0.4}
    assert compared(better, FIGURES) == (["start", "capture", "memory", "replay"], [])
    assert compared(FIGURES, better)[1] == ["start", "capture", "memory", "replay"]
    helps, hurts = compared(better | {"equal": False}, FIGURES)
    assert helps and hurts == ["replay differs from the eager step"]
    variant = {"name": "PYTORCH_ALLOC_CONF=expandable_segments:True", "env": EXPANDABLE, "helps": helps, "hurts": hurts}
    assert worth_setting([variant]) == {}
    slow = FIGURES | {"start_s": 9.0, "memory_mib": 2100.0, "equal": False}
    assert best_of([slow, FIGURES]) == FIGURES | {"memory_mib": 2100.0, "equal": False}


def test_what_is_set_is_what_the_record_says() -> None:
    """The record is `dflash-engine doctor --json` on an H200. Without one nothing is known to help, and nothing is set."""
    file = RESULTS / "h200-doctor.json"
    measured = json.loads(file.read_text())["measured"] if file.is_file() else []
    assert dict(process_settings.HELPFUL) == worth_setting(measured)


@pytest.mark.parametrize(
    ("env", "after"),
    [
        ({}, EXPANDABLE),
        ({"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "x:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}),
    ],
)
@pytest.mark.usefixtures("nothing_set")
def test_what_the_user_has_set_stays(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], after: dict[str, str]
) -> None:
    monkeypatch.setattr(process_settings, "HELPFUL", EXPANDABLE)
    process_settings.set_what_helps(now := dict(env))
    assert now == env  # torch is here already
    monkeypatch.delitem(sys.modules, "torch")
    process_settings.set_what_helps(now)
    assert now == after
    assert process_settings.told() == ("" if env else "PYTORCH_ALLOC_CONF=expandable_segments:True")
    verdict = settings_found(now)[0]
    assert ("set by dflash-engine" in verdict.why) == (not env)


def test_the_command_line_sets_it_before_torch_is_imported() -> None:
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys; from engine import process_settings; process_settings.HELPFUL = {'CUDA_MODULE_LOADING': 'LAZY'}\n"
            "from bench.cli import main; assert 'torch' not in sys.modules\n"
            "main(['doctor', '--no-measure']); print(os.environ['CUDA_MODULE_LOADING'])",
        ],
        env={name: value for name, value in os.environ.items() if name != "CUDA_MODULE_LOADING"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert told.endswith("LAZY\n")
    assert "set by dflash-engine where you have not: CUDA_MODULE_LOADING=LAZY" in told


@pytest.mark.usefixtures("one_thread", "nothing_set")
def test_a_run_says_what_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process_settings, "_set", dict(EXPANDABLE))
    train(run_settings(training_dataset(tmp_path / "data"), tmp_path / "run", "run.max_steps=1"))
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "set in the environment" in line)
    assert line.endswith("; set in the environment: PYTORCH_ALLOC_CONF=expandable_segments:True")
