"""The files that describe a run in its folder, written when it begins and when it changes, and the folder where it was taken."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from buffers.naming import naming
from engine.changes import SETTINGS_FILE
from engine.engine_buffers import engine_buffers
from engine.left_out import write_left_out
from engine.reports import write_buffers
from engine.run_folder import alone_in
from engine.run_words import held_out_too_long
from graphs.record import write_record

if TYPE_CHECKING:
    from engine.run import TrainingRun


def write_description(run: TrainingRun) -> None:
    """settings.toml, graphs.json and buffers.txt, as they are from here on."""
    temporary = run.folder / f".{SETTINGS_FILE}.writing"
    snapshot = ("snapshot on the host", run.saving.snapshot.buffers())
    buffers = [*run.intake.named_buffers(), *engine_buffers(run.engine), snapshot]
    with naming(run.folder):
        temporary.write_text(run.settings.to_toml())
        temporary.replace(run.folder / SETTINGS_FILE)
        write_record(run.folder, run.graphs)
        write_buffers(run.folder / "buffers.txt", buffers)


def write_what_is_left_out(run: TrainingRun, not_finite: Sequence[Any]) -> None:
    """left_out.json; not_finite: the samples that were found to hold NaN or infinity."""
    write_left_out(
        run.folder / "left_out.json",
        too_long=run.settings.data.too_long,
        training=run.intake.plan.too_long,
        held_out=held_out_too_long(run),
        not_finite=not_finite,
        bad_files=run.data.training.bad_files,
    )


def restore_run_folder(run: TrainingRun, parts: ExitStack) -> None:
    """metrics.jsonl was deleted or moved away, and is there again. With it went run.output, if what describes the run is gone
    too: that is written anew, and the folder held again, until `parts` close."""
    if (run.folder / SETTINGS_FILE).exists():
        run.say(f"{run.folder / 'metrics.jsonl'} was deleted or moved away: it is there again with all its lines")
        return
    parts.enter_context(alone_in(run.folder))
    write_description(run)
    write_what_is_left_out(run, [])
    if run.intake.held_out is not None:
        run.intake.held_out.best = None  # best/ went too
    run.say(
        f"{run.folder} was deleted or moved away while the run writes there: the folder is there again with all lines of "
        "metrics.jsonl, and the run goes on; its checkpoints are gone until the next one, as run.save_every says"
    )
