"""What a training run says of itself when it begins and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine import process_settings
from engine.left_out import spoken_lengths, spoken_samples
from engine.mixture_report import print_sources
from engine.reports import print_bucket_table

if TYPE_CHECKING:
    from engine.run import TrainingRun


def held_out_too_long(run: TrainingRun) -> Sequence[tuple[int, int]]:
    """(sample, length) of the held-out samples that no bucket holds."""
    return run.intake.held_out.too_long if run.intake.held_out is not None else []


def say_plan(run: TrainingRun) -> None:
    """Device, precision, attention, what is formed again, buckets, and what is too long for them."""
    engine, too_long = run.engine, run.settings.data.too_long
    names = ", ".join(bucket.name for bucket in engine.buckets)
    how = "replaying CUDA graphs" if engine.executor.how == "replayed" else "calling the steps (no GPU)"
    if run.intake.plan.sources:
        print_sources(run.intake.plan.sources, run.console)
    environment = f"; set in the environment: {process_settings.told()}" if process_settings.told() else ""
    kernels = f"{engine.precision}, {engine.ops.name} attention, recompute {engine.drafter.recompute}"
    run.say(f"{engine.device}, {kernels}, {how}; buckets (rows x tokens x blocks): {names}{environment}")
    what = {"skip": "left out", "truncate": "cut off", "split": "split"}[too_long]
    for kind, found in (("samples", run.intake.plan.too_long), ("held-out samples", held_out_too_long(run))):
        if found:
            run.say(f"{len(found)} {kind} longer than the largest bucket are {what}: {spoken_lengths(found)}")


def say_end(run: TrainingRun, rows: Sequence[dict[str, Any]], skipped: Sequence[Any]) -> None:
    """The table of buckets (rows of bucket_rows), where the drafter lies, what was checked, and the samples left out."""
    if any(row["batches"] for row in rows):
        print_bucket_table(rows, run.console)
    else:
        done = f"all {run.progress.step} steps were done before"
        run.say(f"nothing is left to train: {done}; more run.epochs or run.max_steps go on")
    best = f"; best so far by accepted length: {run.folder / 'best'}" if run.intake.held_out is not None else ""
    run.say(f"drafter of the last step: {run.folder / 'drafter'}{best}")
    if run.checks.steps:
        run.say(f"{run.checks.steps} steps checked, {run.checks.compared} of them compared: nothing found")
    if skipped:
        run.say(f"{len(skipped)} samples with NaN or infinity were left out: {spoken_samples(skipped)}")
