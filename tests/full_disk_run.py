"""Commands whose disk is full at one moment or another, for test_faults.py: `unshare -rm python -m tests.full_disk_run FOLDER`.

FOLDER is an empty one; a small disk (a tmpfs) is mounted on FOLDER/disk in a mount namespace of this process's own. The last line
of stdout is JSON: moment -> exit code, last line of stderr, and what was found afterwards.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import engine.run
from bench.cli import main
from buffers.batching import Batch
from engine.data_feed import Progress
from tests.run_helpers import SETTINGS, checkpoint_tensors, logged_steps, steps_of, training_dataset

STEPS = 10


def command(data: Path, output: Path) -> list[str]:
    """Trains for STEPS steps: a checkpoint every fourth, a line every step."""
    changes = (*SETTINGS, f"data.path={data}", f"run.output={output}", f"run.max_steps={STEPS}", "run.log_every=1")
    return ["train", *(word for change in (*changes, "run.epochs=1") for word in ("--set", change))]


def run(args: list[str]) -> tuple[int, str]:
    """Exit code and last line of stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        code = main(args)
    return code, (err.getvalue().splitlines() or [""])[-1]


def fill(disk: Path) -> None:
    """Takes the last byte of it."""
    with (disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def empty(disk: Path) -> None:
    (disk / "ballast").unlink()


@contextlib.contextmanager
def full_after_step(step: int, disk: Path):  # type: ignore[no-untyped-def]
    """Inside, the disk is full once that step was taken."""
    took = Progress.took

    def took_then_fill(self: Progress, batches: tuple[Batch, ...]) -> None:
        took(self, batches)
        if self.step == step:
            fill(disk)

    Progress.took = took_then_fill  # type: ignore[method-assign]
    try:
        yield
    finally:
        Progress.took = took  # type: ignore[method-assign]


@contextlib.contextmanager
def full_before(name: str, disk: Path):  # type: ignore[no-untyped-def]
    """Inside, the disk is full once engine.run calls this function."""
    function: Callable[..., Any] = getattr(engine.run, name)

    def fill_then_call(*args: Any, **kwargs: Any) -> Any:
        fill(disk)
        return function(*args, **kwargs)

    setattr(engine.run, name, fill_then_call)
    try:
        yield
    finally:
        setattr(engine.run, name, function)


def outcomes(folder: Path) -> dict[str, Any]:
    """What became of it at each moment."""
    disk, data = folder / "disk", training_dataset(folder / "data")
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], check=True)
    torch.set_num_threads(1)
    run(command(data, folder / "undisturbed"))
    expected = checkpoint_tensors(folder / "undisturbed", STEPS)
    found: dict[str, Any] = {}
    moments = {
        "metrics": full_after_step(2, disk),
        "checkpoint": full_after_step(7, disk),
        "drafter": full_before("save_drafter", disk),
    }
    for moment, full in moments.items():
        output = disk / moment
        args = command(data, output)
        if moment == "checkpoint":
            args += ["--set", "run.log_every=100"]
        with full:
            code, line = run(args)
        steps = steps_of(output) if (output / "checkpoints").is_dir() else []
        empty(disk)
        again, _ = run(args)
        tensors = checkpoint_tensors(output, STEPS)
        found[moment] = {
            "code": code,
            "line": line,
            "checkpoints": steps,
            "again": again,
            "equal": all(torch.equal(tensors[name], expected[name]) for name in expected),
            "logged": logged_steps(output),
            "drafter": (output / "drafter" / "model.safetensors").is_file(),
        }
    fill(disk)
    code, line = run(command(data, disk / "beginning"))
    found["beginning"] = {"code": code, "line": line}
    code, line = run(["report", str(disk / "metrics")])
    found["report"] = {"code": code, "line": line, "page": (disk / "metrics" / "report.html").exists()}
    empty(disk)
    again, _ = run(["report", str(disk / "metrics")])
    found["report"] |= {"again": again, "page again": (disk / "metrics" / "report.html").exists()}
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    code, line = run(command(data, disk / "read-only"))
    found["read-only"] = {"code": code, "line": line}
    return found


if __name__ == "__main__":
    os.environ["XDG_CACHE_HOME"] = str(Path(sys.argv[1]) / "cache")
    print(json.dumps(outcomes(Path(sys.argv[1]))))
