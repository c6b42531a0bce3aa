"""The command that times checkpoints, on the tiny workload."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench.reliability_checkpoint import checkpoint
from engine.checkpoint_writer import CheckpointWriter


def test_a_checkpoint_among_steps_is_compared_and_timed(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    done = CliRunner().invoke(checkpoint, ["--checkpoints", "1", "--set", "run.device=cpu", "--out", str(out)])
    assert done.exit_code == 0, done.output
    figures = json.loads(out.read_text())
    (row,) = figures["checkpoints"]
    assert row["equals_engine"] and row["device_allocations"] == 0
    assert min(row[name] for name in ("step_ms", "save_ms", "on_disk_s", "copy_s")) > 0
    assert figures["table"][0]["workload"] == "tiny"


def test_a_checkpoint_with_other_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    save = CheckpointWriter.save

    def changes_the_engine_first(self: CheckpointWriter, *args: object, **kwargs: object) -> None:
        self._snapshot._engine.params.exp_avg.add_(torch.tensor(1e-3))
        save(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointWriter, "save", changes_the_engine_first)
    done = CliRunner().invoke(checkpoint, ["--checkpoints", "1", "--set", "run.device=cpu"])
    assert isinstance(done.exception, ValueError) and "exp_avg.fc.weight: the checkpoint has other bits" in str(
        done.exception
    )
