"""What befalls a run in its middle: one clear line, nothing lost, and the same command goes on to what it would have been."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.markdown import RESULTS
from bench.reliability_faults import FAULTS
from buffers.dataset import Dataset, Sample
from engine.engine import Engine
from engine.failures import message_of
from engine.run import TrainingRun
from engine.tensor_file import write_tensors
from tests.full_disk_run import STEPS
from tests.run_helpers import (
    checkpoint_tensors,
    files_under,
    logged_steps,
    metrics,
    records,
    run,
    steps_of,
    training_dataset,
)

pytestmark = pytest.mark.usefixtures("one_thread")
CHANGES = ("run.max_steps=16", "run.log_every=1", "run.save_every=4")
AfterStep = Callable[[int, Callable[[], None]], None]
IN_THE_LOADER = "input-loader"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the runs of the test say."""
    lines: list[str] = []
    say = TrainingRun.say

    def note(self: TrainingRun, text: str) -> None:
        lines.append(text)
        say(self, text)

    monkeypatch.setattr(TrainingRun, "say", note)
    return lines


def same_checkpoints(one: Path, other: Path, step: int = 16) -> None:
    first, second = checkpoint_tensors(one, step), checkpoint_tensors(other, step)
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different


def goes_on_as_if_nothing_had_been(data: Path, output: Path) -> None:
    """The same command ends with what an undisturbed run has."""
    whole = output.with_name("whole")
    run(data, whole, *CHANGES)
    assert run(data, output, *CHANGES)["steps"] == 16
    same_checkpoints(output, whole)
    assert logged_steps(output) == logged_steps(whole)


@pytest.fixture(scope="module")
def full_disk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of commands on a real disk that was full, or read-only; its own process has the mount."""
    folder = tmp_path_factory.mktemp("full")
    can = subprocess.run(["unshare", "-rm", "true"], capture_output=True) if shutil.which("unshare") else None
    if can is None or can.returncode:
        pytest.skip("this machine lets nobody mount a small disk of his own")
    command = ["unshare", "-rm", sys.executable, "-m", "tests.full_disk_run", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("moment", "file", "checkpoints"),
    [
        ("metrics", "metrics/metrics.jsonl: ", []),
        ("checkpoint", ".step-00000008.writing/training.safetensors: ", [4]),
        ("drafter", ".drafter.writing/model.safetensors: ", [8, 10]),
    ],
)
def test_a_full_disk_while_training(moment: str, file: str, checkpoints: list[int], full_disk: dict[str, Any]) -> None:
    found = full_disk[moment]
    assert found["code"] == 1
    assert file in found["line"] and "No space left on device" in found["line"] and "Make room" in found["line"]
    assert found["checkpoints"] == checkpoints
    # With room again the same command goes on to the weights of an undisturbed run.
    assert found["again"] == 0 and found["equal"] and found["drafter"]
    assert found["logged"] == (list(range(1, STEPS + 1)) if moment != "checkpoint" else [STEPS])


def test_a_disk_that_is_full_from_the_beginning(full_disk: dict[str, Any]) -> None:
    found = full_disk["beginning"]
    assert found["code"] == 1
    assert "disk/beginning: No space left on device. Make room there; the same command goes on." in found["line"]


def test_a_full_disk_while_the_report_is_written(full_disk: dict[str, Any]) -> None:
    found = full_disk["report"]
    assert found["code"] == 1 and not found["page"]
    assert "report.html: No space left on device. Make room there; the same command goes on." in found["line"]
    assert found["again"] == 0 and found["page again"]


def test_a_disk_that_is_read_only(full_disk: dict[str, Any]) -> None:
    found = full_disk["read-only"]
    assert found["code"] == 2
    assert "run.output: expected a folder that can be written to, found " in found["line"]
    assert "(Read-only file system); choose another" in found["line"]


def cut(shard: Path) -> None:
    os.truncate(shard, 3000)


@pytest.mark.parametrize(
    ("harm", "message"),
    [(cut, "as when it was opened, found 3000: it was cut"), (Path.unlink, "found no such file: it was removed")],
)
def test_a_shard_that_is_cut_or_removed(
    harm: Callable[[Path], None], message: str, tmp_path: Path, after_step: AfterStep, said: list[str]
) -> None:
    data, out = training_dataset(tmp_path / "data"), tmp_path / "run"
    shard = data / "shard-00000.safetensors"
    content = shard.read_bytes()
    after_step(6, lambda: harm(shard))
    with pytest.raises(ValueError, match=message) as caught:
        run(data, out, *CHANGES)
    assert str(shard) in str(caught.value)
    # The loader is ahead: what it had read is trained on, and the checkpoint is of the last step that was.
    last = steps_of(out)[-1]
    due = last % 4 == 0  # it was saved before the error came
    assert last >= 6 and (due or f"checkpoint of step {last} saved before the error below" in said)
    shard.write_bytes(content)
    goes_on_as_if_nothing_had_been(data, out)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (SystemExit(3), "the loader's thread ended with SystemExit(3), and the batches that it had left with it"),
        (MemoryError("no memory for a sample"), "no memory for a sample. Lower buckets.token_budget, "),
        (
            OSError(5, "Input/output error", "/data/shard"),
            "/data/shard: Input/output error. See after the disk or network",
        ),
    ],
)
def test_a_loader_that_dies(
    error: BaseException, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    data, out = training_dataset(tmp_path / "data"), tmp_path / "run"
    sample, read = Dataset.sample, [0]

    def dies(self: Dataset, i: int, start: int = 0, stop: int | None = None) -> Sample:
        if threading.current_thread().name == IN_THE_LOADER:
            read[0] += 1
            if read[0] == 10:
                raise error
        return sample(self, i, start, stop)

    with monkeypatch.context() as patch:
        patch.setattr(Dataset, "sample", dies)
        with pytest.raises(Exception) as caught:
            run(data, out, *CHANGES)
    assert isinstance(caught.value, Exception) and (message_of(caught.value) or "").startswith(line)
    assert steps_of(out)[-1] == 9 and "checkpoint of step 9 saved before the error below" in said
    goes_on_as_if_nothing_had_been(data, out)


def test_a_gpu_that_is_full_in_mid_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    data, out = training_dataset(tmp_path / "data"), tmp_path / "run"
    micro_step, taken = Engine.micro_step, [0]

    def full(self: Engine, bucket: Any) -> None:
        taken[0] += 1
        if taken[0] == 7:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        micro_step(self, bucket)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "micro_step", full)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            run(data, out, *CHANGES)
    line = message_of(caught.value) or ""
    assert line.startswith("CUDA out of memory. Tried to allocate 2.00 GiB. Lower buckets.token_budget, ")
    assert "or free memory that other processes hold" in line
    assert steps_of(out)[-1] == 6 and "checkpoint of step 6 saved before the error below" in said
    goes_on_as_if_nothing_had_been(data, out)


@pytest.mark.parametrize(
    "error",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasLtMatmul(...)`",
    ],
)
def test_a_gpu_without_room_for_the_process_itself(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "engine.gpu_holders._ask_nvidia_smi", lambda: "GPU-1, 4242, /usr/bin/python3, train.py, 139000\n"
    )
    assert message_of(RuntimeError(error)) == (
        "the GPU's memory is full (held by /usr/bin/python3, train.py (pid 4242) 139,000 MiB). End what should not run there, or "
        "take another GPU."
    )
    monkeypatch.setattr("engine.gpu_holders._ask_nvidia_smi", lambda: None)
    assert "nvidia-smi would tell, which was not found here" in (message_of(RuntimeError(error)) or "")


@pytest.mark.parametrize("moved", [False, True])
def test_a_run_folder_that_is_deleted_or_moved(
    moved: bool, tmp_path: Path, after_step: AfterStep, said: list[str]
) -> None:
    data, out = training_dataset(tmp_path / "data"), tmp_path / "runs" / "mine"
    run(data, tmp_path / "whole", *CHANGES)

    def away() -> None:
        # At once: a checkpoint may be under way, and put files where they are being removed.
        (tmp_path / "runs").rename(tmp_path / "elsewhere")
        if not moved:
            shutil.rmtree(tmp_path / "elsewhere")

    after_step(6, away)
    run(data, out, *CHANGES)
    assert sum("was deleted or moved away while the run writes there" in line for line in said) == 1
    assert metrics(out) == metrics(tmp_path / "whole")
    assert files_under(out).keys() >= files_under(tmp_path / "whole").keys() - {
        name for name in files_under(tmp_path / "whole") if name.startswith("checkpoints/")
    }
    same_checkpoints(out, tmp_path / "whole")
    assert files_under(out / "drafter") == files_under(tmp_path / "whole" / "drafter")
    # Whoever starts another run there is refused as before, and the same command finds it done.
    assert run(data, out, *CHANGES)["steps"] == 16


@pytest.mark.parametrize("after", [False, True])
def test_a_run_folder_that_is_deleted_while_a_checkpoint_is_written(
    after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = training_dataset(tmp_path / "data"), tmp_path / "run"
    write, written = write_tensors, [0]

    def delete(*args: Any) -> Any:
        written[0] += 1
        if written[0] == 2 and not after:
            out.rename(tmp_path / "gone")
        done = write(*args)
        if written[0] == 2 and after:
            out.rename(tmp_path / "gone")
        return done

    monkeypatch.setattr("engine.checkpoint_writer.write_tensors", delete)
    run(data, out, *CHANGES)
    assert written[0] == 5 and steps_of(out) == [12, 16]
    assert logged_steps(out) == list(range(1, 17)) and (out / "drafter").is_dir()


def test_a_metrics_file_that_is_deleted_is_there_again(tmp_path: Path, after_step: AfterStep, said: list[str]) -> None:
    data, out = training_dataset(tmp_path / "data"), tmp_path / "run"
    after_step(6, (out / "metrics.jsonl").unlink)
    run(data, out, *CHANGES)
    assert logged_steps(out) == list(range(1, 17))
    assert f"{out / 'metrics.jsonl'} was deleted or moved away: it is there again with all its lines" in said


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    data, out = training_dataset(tmp_path / "data"), tmp_path / "run"
    (out / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(OSError) as caught:
        run(data, out, *CHANGES)
    line = f"{out / 'metrics.jsonl'}: Is a directory. Move away what has that name; the same command goes on."
    assert message_of(caught.value) == line
    (out / "metrics.jsonl").rmdir()
    assert run(data, out, *CHANGES)["steps"] == 16


def test_a_clock_that_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    data, jumping, calm = training_dataset(tmp_path / "data"), tmp_path / "jumping", tmp_path / "calm"
    run(data, calm, *CHANGES)
    now, calls, real = time.time(), [0], time.time

    def jumps() -> float:
        calls[0] += 1
        return now + (1 if calls[0] % 2 else -1) * 7200.0 * calls[0]

    monkeypatch.setattr(time, "time", jumps)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumps() * 1e9))
    began_s = time.perf_counter()
    figures = run(data, jumping, *CHANGES, "run.watchdog_s=60")
    took_s = time.perf_counter() - began_s
    assert time.time is not real
    assert metrics(jumping) == metrics(calm)
    lines = [record for record in records(jumping) if "loss" in record]
    assert [line["step"] for line in lines] == list(range(1, 17))
    seconds = [line["machine"]["seconds"] for line in lines]
    assert all(second > 0 for second in seconds) and sum(seconds) <= took_s and figures["seconds"] <= took_s
    assert all(line["tokens_per_s"] > 0 and line["machine"]["tokens_per_s_mean"] > 0 for line in lines)
    assert not any("nothing has moved" in line or "moves again" in line for line in said)
    same_checkpoints(jumping, calm)


def test_checkpoints_are_in_the_order_of_their_steps_whatever_their_files_dates(tmp_path: Path) -> None:
    data, out = training_dataset(tmp_path / "data"), tmp_path / "run"
    run(data, out, *CHANGES, "run.keep=9")
    shutil.rmtree(out / "checkpoints" / "step-00000016")
    shutil.rmtree(out / "drafter")
    for order, step in enumerate(reversed(steps_of(out))):
        for path in (out / "checkpoints" / f"step-{step:08d}").rglob("*"):
            os.utime(path, (10**9 + order, 10**9 + order))
        os.utime(out / "checkpoints" / f"step-{step:08d}", (10**9 + order, 10**9 + order))
    run(data, out, *CHANGES, "run.keep=2")
    assert steps_of(out) == [12, 16]
    why = [record["why"] for record in records(out) if record.get("event") == "started"]
    assert why[-1] == "going on from step-00000012"


def test_no_duration_and_no_order_is_taken_from_the_wall_clock() -> None:
    """The places that name it: a line's time for people, and whether a file was changed."""
    root = Path(__file__).resolve().parents[1]
    words = ("time.time(", "time.time_ns(", "datetime.now(", "st_mtime", "getmtime(", "st_ctime")
    found = {
        str(path.relative_to(root))
        for package in ("buffers", "graphs", "engine")
        for path in (root / package).rglob("*.py")
        if any(word in path.read_text() for word in words)
    }
    assert found == {"engine/run_log.py", "engine/config_file.py", "buffers/foreign_recognise.py"}


def test_every_test_that_the_table_of_faults_names_is_there() -> None:
    tests = Path(__file__).parent
    named = [test for fault in FAULTS for test in fault.tests]
    assert len(named) == len(set(named)) and all(fault.what and fault.then and fault.tests for fault in FAULTS)
    for test in named:
        file, _, function = test.partition("::")
        assert f"\ndef {function}(" in (tests / file).read_text(), test
    page = (tests.parent / "docs" / "reliability.md").read_text()
    if (RESULTS / "cpu-faults.json").is_file():
        assert all(f"`{test}`" in page for test in named), "a fault that was never recorded"
