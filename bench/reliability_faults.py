"""`python -m bench.reliability faults`: what befalls a run, what it does then, and the tests that make it happen."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click

from bench.timing import provenance, write_result
from engine.reports import make_console

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Fault:
    """what: in words. then: what the run does. tests: file::function below tests/."""

    what: str
    then: str
    tests: tuple[str, ...]


_GOES_ON = (
    "ends with 1 and one line that names the file; given room, the same command ends with an undisturbed run's weights"
)
_SAVED = "the steps before it are saved; one line; the same command ends with an undisturbed run's weights"

FAULTS = (
    Fault(
        "disk full: `metrics.jsonl`, checkpoint, drafter",
        _GOES_ON,
        ("test_faults.py::test_a_full_disk_while_training",),
    ),
    Fault(
        "disk full at the beginning, or found to be so when a folder is flushed",
        "ends with 1 and one line that names the folder",
        (
            "test_faults.py::test_a_disk_that_is_full_from_the_beginning",
            "test_publish.py::test_a_disk_that_is_full_only_when_it_is_flushed_is_named",
        ),
    ),
    Fault(
        "disk full: `report`",
        "ends with 1 and one line, no half page; again with room",
        ("test_faults.py::test_a_full_disk_while_the_report_is_written",),
    ),
    Fault(
        "disk full: `data convert`",
        "ends with 1 and one line that names the file",
        ("test_bad_input.py::test_a_disk_that_is_full",),
    ),
    Fault(
        "output that cannot be written (read-only disk, a file in its place)",
        "refused before anything is captured, exit code 2",
        (
            "test_faults.py::test_a_disk_that_is_read_only",
            "test_bad_input.py::test_a_run_folder_that_cannot_be_written",
        ),
    ),
    Fault(
        "run folder deleted or moved away",
        "made again with all lines of `metrics.jsonl`, said in one line; the run goes on, its drafter is written",
        (
            "test_faults.py::test_a_run_folder_that_is_deleted_or_moved",
            "test_faults.py::test_a_run_folder_that_is_deleted_while_a_checkpoint_is_written",
            "test_faults.py::test_a_metrics_file_that_is_deleted_is_there_again",
        ),
    ),
    Fault("shard cut or removed in mid-run", _SAVED, ("test_faults.py::test_a_shard_that_is_cut_or_removed",)),
    Fault(
        "shard cut in the middle of a read",
        "one line that names the shard; no SIGBUS",
        ("test_dataset.py::test_a_shard_that_is_cut_in_the_middle_of_a_read_is_named",),
    ),
    Fault(
        "newest checkpoint damaged",
        "the newest that is whole is gone on from; those passed over are said with the reason and set aside",
        (
            "test_resume.py::test_a_run_goes_on_from_the_newest_whole_checkpoint_and_says_which_it_passes_over",
            "test_resume.py::test_a_checkpoint_whose_bytes_the_disk_has_lost_is_passed_over",
        ),
    ),
    Fault(
        "no checkpoint whole",
        "refused with the reasons; nothing is begun anew",
        ("test_resume.py::test_without_a_whole_checkpoint_nothing_is_begun_anew",),
    ),
    Fault(
        "loader ends: `OSError`, `MemoryError`, `SystemExit`",
        _SAVED,
        (
            "test_faults.py::test_a_loader_that_dies",
            "test_staging.py::test_whatever_ends_the_loaders_thread_is_raised_in_next",
        ),
    ),
    Fault(
        "loader gone without a word",
        "an error, no wait without end",
        ("test_staging.py::test_a_loader_that_is_gone_without_a_word_is_not_waited_for",),
    ),
    Fault(
        "NaN or infinity in hidden states",
        "refused with the sample's id, or left out by `data.on_nonfinite`; the steps before it are saved",
        (
            "test_bad_input.py::test_a_sample_that_is_not_finite_is_named",
            "test_resume.py::test_a_bad_sample_costs_none_of_the_steps_before_it",
        ),
    ),
    Fault(
        "gradient that is not finite",
        "weights, moments and step count stay, a counter rises, the next batch comes",
        ("test_optimizer.py::test_a_step_with_a_gradient_that_is_not_finite_is_skipped",),
    ),
    Fault(
        "`run.max_bad_steps` of them in a row",
        "the run saves, stops, and `bad_steps.json` names batches, samples and pieces",
        (
            "test_bad_steps.py::test_the_run_stops_and_names_the_samples",
            "test_bad_steps.py::test_the_checkpoint_before_the_stop_has_what_was_learned_before_the_bad_steps",
            "gpu/test_faults.py::test_bad_steps_in_a_row_are_counted_in_the_graph_and_stop_the_run",
        ),
    ),
    Fault(
        "GPU out of memory while capturing",
        "one line: which step, how much was free, what to lower",
        (
            "test_bad_input.py::test_out_of_gpu_memory_while_capturing",
            "gpu/test_out_of_memory.py::test_what_was_being_done_is_named",
        ),
    ),
    Fault("GPU out of memory in mid-run", _SAVED, ("test_faults.py::test_a_gpu_that_is_full_in_mid_run",)),
    Fault(
        "GPU memory held by another process at start",
        "one line: who, how much, what to do; nothing allocated",
        (
            "test_memory_estimate.py::test_who_holds_the_memory_is_told_with_the_refusal",
            "test_faults.py::test_a_gpu_without_room_for_the_process_itself",
            "gpu/test_faults.py::test_memory_that_another_process_holds_is_told_in_one_line",
        ),
    ),
    Fault(
        "clock that jumps by hours, files with wrong dates",
        "nothing: durations are of the monotonic clock, checkpoints go by their steps",
        (
            "test_faults.py::test_a_clock_that_jumps",
            "test_faults.py::test_checkpoints_are_in_the_order_of_their_steps_whatever_their_files_dates",
        ),
    ),
    Fault(
        "standstill in read, stage, replay, collective or checkpoint",
        "one line after `run.watchdog_s` names the stage of every thread",
        (
            "test_watchdog.py::test_every_stage_of_a_run_is_named",
            "test_watchdog.py::test_a_loader_that_stalls_is_named_while_the_run_waits_and_changes_nothing",
            "test_watchdog.py::test_a_replay_that_does_not_come_back_is_named",
            "test_watchdog.py::test_a_standstill_is_told_once_and_again_later_and_that_it_ended",
        ),
    ),
)


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON file for the record")
def faults(out: Path | None) -> None:
    """Makes every fault happen and records that the run did what it should."""
    figures = measure()
    write_result(figures, out)
    console = make_console()
    for row in figures["table"]:
        console.print(f"{row['fault']}: {row['cases']}", markup=False, soft_wrap=True)


def measure() -> dict[str, Any]:
    """Runs the tests. Raises ValueError when one fails, is missing or none of a fault's was run."""
    outcomes = run_tests([f"tests/{test}" for fault in FAULTS for test in fault.tests])
    return {"where": provenance(), "table": [_row(fault, outcomes) for fault in FAULTS]}


def run_tests(tests: Sequence[str]) -> dict[str, list[str]]:
    """Of each test, as it is named, passed or skipped for each of its cases. Raises ValueError when one does anything else."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # A folder without a GPU skips its modules whole: naming a test in one would be an error.
        here = [test for test in tests if not test.startswith("tests/gpu/") or _has_gpu()]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *here]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"expected every fault to be met, found tests that fail:\n{done.stdout[-4000:]}")
        found: dict[str, list[str]] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            skipped = case.find("skipped") is not None
            file = case.get("classname", "").replace(".", "/") + ".py"
            test = f"{file}::{case.get('name', '').partition('[')[0]}"
            found.setdefault(test, []).append("skipped" if skipped else "passed")
    return found


def _row(fault: Fault, outcomes: Mapping[str, Sequence[str]]) -> dict[str, str]:
    cases = {test: outcomes.get(f"tests/{test}", ()) for test in fault.tests}
    passed = sum(outcome == "passed" for found in cases.values() for outcome in found)
    if not passed:
        raise ValueError(f"{fault.what}: expected a test that runs here, found none of {', '.join(fault.tests)}")
    if lost := [test for test, found in cases.items() if not found and not test.startswith("gpu/")]:
        raise ValueError(f"{fault.what}: expected all of its tests to run, found nothing of {', '.join(lost)}")
    skipped = sum(outcome == "skipped" for found in cases.values() for outcome in found)
    on_gpu = sum(not found for found in cases.values())
    return {
        "fault": fault.what,
        "what happens": fault.then,
        "tests": ", ".join(f"`{test}`" for test in fault.tests),
        "cases": f"{passed} passed"
        + (f", {skipped} skipped" if skipped else "")
        + (f", {on_gpu} on a GPU alone" if on_gpu else ""),
    }


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
