"""Faults that only a GPU has: memory that another process holds at the start, and bad steps that are counted inside a graph."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.bad_steps import TooManyBadSteps
from engine.run import TrainingRun
from graphs.guards import noting_host_syncs
from tests.gpu.engine_helpers import CUDA
from tests.run_helpers import SETTINGS, TARGET_CONFIG, run_settings, training_dataset

HOLDER = """
import sys, torch
left = int(float(sys.argv[1]) * 2**20)
held = torch.empty(max(0, torch.cuda.mem_get_info()[0] - left), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder() -> Iterator[Callable[[float], int]]:
    """holder(MiB): another process takes all of the card but these; its pid. It ends with the test."""
    processes: list[subprocess.Popen[str]] = []

    def hold(left_mib: float) -> int:
        torch.cuda.empty_cache()
        command = [sys.executable, "-c", HOLDER, str(left_mib)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process.pid

    yield hold
    for process in processes:
        process.communicate("", timeout=60)


def train(data: Path, output: Path) -> "subprocess.CompletedProcess[str]":
    """The command line in a process of its own: this one holds some memory already."""
    changes = [change for change in SETTINGS if not change.startswith("run.device")]
    settings = [*changes, "run.device=cuda", f"data.path={data}", f"run.output={output}", "run.max_steps=2"]
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "bench.cli", "train", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


# Room for a context and nothing else, and not even that.
@pytest.mark.parametrize("left_mib", [700.0, 50.0])
def test_memory_that_another_process_holds_is_told_in_one_line(
    left_mib: float, holder: Callable[[float], int], tmp_path: Path
) -> None:
    data = training_dataset(tmp_path / "data")
    pid = holder(left_mib)
    done = train(data, tmp_path / "run")
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    print(line)
    assert line.startswith("error: ")
    # In a container the driver's numbers may be others than ours.
    told = "(pid " in line or "by no process that can be seen from here" in line or "was not found here" in line
    # Where the context itself just fits, torch's own allocator may be the first to find nothing; it names processes too.
    assert told or f"Process {pid} has" in line or "including non-PyTorch memory" in line, line
    assert "another GPU" in line or "free memory that other processes hold" in line
    assert not (tmp_path / "run" / "drafter").exists()


def settings_for(tmp_path: Path, *changes: str) -> Any:
    lengths = tuple(40 + 7 * (i % 12) for i in range(40))
    # 16 is the smallest head dim of Triton's attention.
    data = training_dataset(tmp_path / "data", lengths, target_config=TARGET_CONFIG | {"head_dim": 16})
    wanted = ("run.device=cuda", "run.precision=fp32", "run.epochs=50", "run.save_every=0", *changes)
    return run_settings(data, tmp_path / "run", *wanted)


def test_bad_steps_in_a_row_are_counted_in_the_graph_and_stop_the_run(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "optimizer.lr=1e30", "optimizer.warmup_ratio=0", "run.max_bad_steps=8")
    with pytest.raises(TooManyBadSteps, match="bad_steps.json names their samples"):
        from engine.train import train as train_here

        train_here(settings)
    record = json.loads((tmp_path / "run" / "bad_steps.json").read_text())
    assert 8 <= record["in_a_row"] <= 80 and len(record["steps"]) == record["in_a_row"]
    assert os.path.isdir(tmp_path / "run" / "checkpoints")


def test_looking_for_bad_steps_waits_for_nothing(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "run.max_bad_steps=4", "run.log_every=1000", "run.max_steps=40")
    syncs: list[str] = []
    with TrainingRun(settings, resume=True, quiet=True) as run:
        for number, batches in enumerate(run.steps()):
            for batch in run.arrivals(batches):
                run.engine.micro_step(batch.bucket)
            run.engine.update(run.schedule(run.progress.step))
            if number < 10:  # pinned memory is taken at the first looks
                run.took(batches)
            else:
                with noting_host_syncs(syncs):
                    run.took(batches)
    torch.cuda.synchronize(CUDA)
    assert syncs == []
