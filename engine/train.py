"""The training loop. A batch is on its way to the device while the step before runs; a step is a replay; numbers are read
some steps later, when they have arrived."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.config_file import ConfigFile
from engine.run import TrainingRun
from engine.settings import Settings


def train(
    settings: Settings,
    *,
    resume: bool = True,
    config: ConfigFile | None = None,
    quiet: bool = False,
    profile: Path | None = None,
) -> dict[str, Any]:
    """Trains as the settings say and returns the run's figures; run.output holds the drafter, metrics and checkpoints. config:
    the file that the settings come from; what is changed in it is taken over between two steps (docs/reconfigure.md).
    quiet: nothing is said on the terminal. profile: where a trace of some steps goes (docs/trouble.md).

    Raises SettingsError (bad settings), ValueError (bad data), CaptureError, and KeyboardInterrupt after an interrupt,
    with a checkpoint saved.
    """
    with TrainingRun(settings, resume=resume, config=config, quiet=quiet, profile=profile) as run:
        return take_steps(run)


def take_steps(run: TrainingRun) -> dict[str, Any]:
    """The loop: takes the steps that are left of a run and returns its figures."""
    engine = run.engine
    for batches in run.steps():
        for batch in run.arrivals(batches):
            engine.micro_step(batch.bucket)
        engine.update(run.schedule(run.progress.step))
        run.took(batches)

        if run.due(run.settings.run.log_every):
            run.log()
        if run.due(run.settings.run.eval_every):
            run.evaluate()
        if run.due(run.settings.run.save_every):
            run.save()
        run.follow_config()
        run.stop_if_interrupted()
    return run.finish()
