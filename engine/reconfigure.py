"""Another configuration without a restart: what is live is written, the rest becomes a new generation of graphs - between two
steps, from the same weights, moments and place in the data - and what cannot be taken over is refused while the run goes on."""

from __future__ import annotations

import gc
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from buffers.stages import stage
from engine.assemble import generation_options
from engine.changes import SettingChange, change_figures, changes_between, refuse_restarts, worst
from engine.config_file import ConfigFile
from engine.data_feed import carried_over
from engine.failures import message_of
from engine.graphs_ready import lasting_addresses
from engine.intake import Intake, plan_intake
from engine.laps import Laps
from engine.memory_budget import Budget, budget_for
from engine.run_files import write_description
from engine.settings import Settings
from engine.sinks import require_sinks
from engine.turns import set_turns
from graphs.generation import GenerationLost
from graphs.guards import Counters

if TYPE_CHECKING:
    from engine.run import TrainingRun

# They change which steps are left, not how one is taken.
_STEPS_LEFT = {"run.epochs", "run.max_steps", "run.accumulation"}


def follow(run: TrainingRun, config: ConfigFile) -> None:
    """Takes over what the settings file says, where it changed or SIGHUP asks. A file without settings, a change that is
    refused and a generation that cannot be made leave the run as it was, with the reason said and noted in metrics.jsonl.
    Raises GenerationLost when there is nothing left to go on with."""
    changes: list[SettingChange] = []
    settings: Settings | None = None
    try:
        asked = run.interrupts.take_reread()
        settings = config.changed(at_once=asked)
        if settings is None:
            return
        changes = changes_between(run.settings, settings)
        if asked and not changes:
            run.say(f"{config.path} was read: it changes nothing")
        reconfigure(run, settings)
    except GenerationLost:
        raise
    except Exception as error:
        told = message_of(error)
        if told is None or run.settings is settings:  # taken over by then: a full disk, say, ends the run as ever
            raise
        why = " ".join(told.split())
        run.say(f"{config.path} is not taken over, the run goes on as it was: {why}")
        _note(run, "refused", changes, why)


def reconfigure(run: TrainingRun, settings: Settings) -> None:
    """Goes on under these settings; see TrainingRun.reconfigure."""
    if not run.engine.between_steps or run.thread not in (None, threading.current_thread()):
        raise ValueError(
            "reconfigure: expected a call between two steps, in the thread that takes them, found one within a step or from "
            "another thread; write to the settings file instead, which the run takes over at the end of a step"
        )
    changes = changes_between(run.settings, settings)
    if not changes:
        return
    refuse_restarts(changes)
    require_sinks(settings.run.sinks)
    run.run_log.write()  # the lines stand in the order of their steps
    before, laps = Counters.read(run.engine.device), Laps()
    asks, places = worst(changes), lasting_addresses(run.engine)
    if asks == "recapture":
        with stage("regenerate"), run.watch.aside("regeneration"):
            _regenerate(run, settings, laps)
    run.settings = settings
    _write(run, settings)
    position = run.progress.position(run.run_log.sums)
    if asks == "recapture":
        position = carried_over(position, run.data.training, run.intake.plan.batches, settings.data.too_long)
    if asks == "recapture" or not _STEPS_LEFT.isdisjoint(change.name for change in changes):
        run.begin_at(position)
    else:
        run.schedule_steps()
    with suppress(FileNotFoundError):  # the folder was deleted: the line of metrics below makes it again
        write_description(run)
    assert not lasting_addresses(run.engine).changes(places), "what outlives a generation has moved"
    spoken = ", ".join(map(str, changes))
    what = f"generation {run.engine.generation}, {laps}" if asks == "recapture" else "written"
    run.say(f"after step {run.progress.step}: {spoken}: {asks} ({what})")
    _note(run, "reconfigured", changes, asks)
    # What changing took is not what the steady state takes.
    run.counters += Counters.read(run.engine.device) - before


def _regenerate(run: TrainingRun, settings: Settings, laps: Laps) -> None:
    """The run's next generation, in place; or the old one again, with the loader at the step that is due, and an error."""
    old, engine = run.intake, run.engine
    plan = plan_intake(run.data, settings, _budget(run, settings))
    position = run.progress.position(run.run_log.sums)
    carried_over(position, run.data.training, plan.batches, settings.data.too_long)  # raises what it raises now
    laps.end("plan")
    old.stop()
    rows = run.tally.rows(engine)
    intake = None
    try:
        intake = Intake(run.data, plan, predecessor=old)
        changes = generation_options(settings) | intake.for_engine()
        made = intake
        engine.regenerate(
            order=settings.run.regenerate,
            check=lambda reports: run.make_ready(made, laps, reports),
            check_old=partial(run.make_ready, old, laps),
            **changes,
        )
    except Exception:
        if settings.run.regenerate == "after":
            run.tally.end_times(rows)
        if intake is not None:
            intake.close()
        run.begin_at(position)
        _give_memory_back(engine.device)
        raise
    run.intake = intake
    run.tally.end_times(rows)
    run.tally.end_intake(old)
    old.close()
    del old
    _give_memory_back(engine.device)
    laps.end("switch")


def _write(run: TrainingRun, settings: Settings) -> None:
    """The values that steps, the loader and the housekeeping read."""
    engine = run.engine
    assert engine.optimizer is not None
    engine.write_objective(settings.objective)
    engine.optimizer.write(settings.optimizer)
    run.intake.write(settings)
    set_turns(settings.run.switch_interval_ms)


def _budget(run: TrainingRun, settings: Settings) -> Budget | None:
    """What the new generation and all that stays may take together: what is free, and what this run holds, but for the old
    generation's pool where that stands beside."""
    device = run.engine.device
    if settings.run.memory_budget_gib or device.type != "cuda":
        return budget_for(settings, device)
    mine = torch.cuda.memory_reserved(device)
    beside = run.intake.plan.memory.pool if settings.run.regenerate == "beside" else 0
    source = f"what {torch.cuda.get_device_name(device)} has for it" + (
        ' beside the old generation; run.regenerate = "after" frees that first' if beside else ""
    )
    return Budget(torch.cuda.mem_get_info(device)[0] + mine - beside, source)


def _give_memory_back(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _note(run: TrainingRun, event: str, changes: list[SettingChange], why: str) -> None:
    record: dict[str, Any] = {
        "step": run.progress.step,
        "event": event,
        "generation": run.engine.generation,
        "changes": [change_figures(change) for change in changes],
        "why": why,
    }
    run.metrics_file.write(record)
