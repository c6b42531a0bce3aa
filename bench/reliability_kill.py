"""`python -m bench.reliability kill`: a CPU run killed again and again, aimed half of the times at the middle of a checkpoint,
and compared with one that was left alone.

Every process is the command line's own `train`, of a tiny drafter that is saved every few steps and evaluated between; each dies
of SIGKILL. Measured is what is on disk: whether a checkpoint was being written when the process died, or one that is no longer
kept removed (its folder lies there under another name), how far the run was (metrics.jsonl has a line a step), and from which
step the next process says that it goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from bench.temporary_data import write_samples
from bench.timing import provenance, write_result
from bench.workloads import TINY, WORKLOADS
from engine.reports import make_console

ROOT = Path(__file__).resolve().parents[1]
SAVE_EVERY = 3
_STEPS_A_KILL = 12  # a process that is killed late has come so far; the run must not end before its last kill
_START_S, _STEP_S, _WRITE_S = (
    6.0,
    0.1,
    0.02,
)  # after which at most a process is killed: of its start, of a step, of a write
_LATEST_S = 120.0  # a process that does nothing for so long is broken
_SAMPLES = 24


@dataclass(frozen=True)
class Kill:
    """at: what it waited for: "start" (any moment of the process's first seconds), "step" or "write". began: from which step the
    process went on, None when it did not come so far. step: the last that was logged; saved: the newest checkpoint on disk, 0
    without one. under_way, removing, best_under_way: whether a checkpoint was being written, one being removed, best/ being
    written."""

    at: str
    began: int | None
    step: int
    saved: int
    under_way: bool
    removing: bool
    best_under_way: bool

    @property
    def redone(self) -> int:
        """Steps that this kill has taken a second time: none, of a process that took none."""
        return self.step - self.saved if self.began is not None else 0


@click.command()
@click.option("--kills", type=click.IntRange(1), default=50, show_default=True, help="processes to kill")
@click.option("--seed", type=int, default=0, show_default=True, help="of the moments")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON file for the record")
def kill(kills: int, seed: int, out: Path | None) -> None:
    """Kills a CPU run again and again and compares its end with that of a run left alone."""
    figures = measure(kills, seed)
    write_result(figures, out)
    print(json.dumps(figures))


def measure(kills: int, seed: int) -> dict[str, Any]:
    """The record. Raises ValueError when the two runs end otherwise, or a step was redone that need not have been."""
    console, moments = make_console(stderr=True), random.Random(seed)
    steps = _STEPS_A_KILL * (kills + 1)
    with tempfile.TemporaryDirectory(prefix="dflash-kill-") as place:
        folder = Path(place)
        for name, count in (("data", _SAMPLES), ("held-out", 2)):
            lengths = [64 + 5 * (i % 12) for i in range(count)]
            write_samples(folder / name, WORKLOADS[TINY], lengths, torch.device("cpu"), with_target=True)
        _finish(folder, "alone", steps)
        done: list[Kill] = []
        for number in range(1, kills + 1):
            done.append(died := _killed(folder, number, steps, moments))
            console.print(
                f"kill {number}/{kills} ({died.at}): after step {died.step}, {died.saved} saved"
                + (", a checkpoint under way" if died.under_way else ""),
                highlight=False,
            )
        _finish(folder, "killed", steps)
        _refuse_lost_steps(done, _began(folder / "killed.log"))
        ends = {name: _end_of(folder / name) for name in ("alone", "killed")}
    differing = [what for what in ends["alone"] if ends["alone"][what] != ends["killed"][what]]
    if differing:
        raise ValueError(f"expected two runs that end alike, found other {', '.join(differing)} after {kills} kills")
    return _record(done, ends["alone"], steps, seed)


def _train(folder: Path, name: str, steps: int, log: Path) -> subprocess.Popen[bytes]:
    settings = {
        "data.path": folder / "data",
        "data.eval_path": folder / "held-out",
        "model.block_size": 4,
        "model.num_hidden_layers": 2,
        "buckets.num_anchors": 16,
        "buckets.max_rows": 1,
        "buckets.lengths": 128,
        "run.device": "cpu",
        "run.output": folder / name,
        "run.epochs": steps,
        "run.max_steps": steps,
        "run.log_every": 1,
        "run.eval_every": 5,
        "run.save_every": SAVE_EVERY,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    # One thread: sums of floats depend on how many share them, and machines differ in that.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench.cli", "train", *words]
    with log.open("wb") as out:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)


def _finish(folder: Path, name: str, steps: int) -> None:
    log = folder / f"{name}.log"
    code = _train(folder, name, steps, log).wait()
    if code:
        raise ValueError(f"the run ended with {code}: {_last_line(log)}")


def _killed(folder: Path, number: int, steps: int, moments: random.Random) -> Kill:
    """Starts a process and kills it at a moment drawn from `moments`."""
    run, log = folder / "killed", folder / f"killed-{number}.log"
    at = moments.choice(("start", "step", "write", "write"))
    more, late = moments.randint(0, _STEPS_A_KILL - SAVE_EVERY), moments.random()
    # What another process left unfinished lies there until the next checkpoint is begun.
    left = _unfinished(run)
    process, began_s = _train(folder, "killed", steps, log), time.monotonic()

    def wait_until(come: Callable[[], bool]) -> None:
        while not come():
            if process.poll() is not None:
                raise ValueError(f"the run ended with {process.returncode} before it was killed: {_last_line(log)}")
            if time.monotonic() - began_s > _LATEST_S:
                process.kill()
                raise ValueError(f"expected a step within {_LATEST_S:g} s, found none: {_last_line(log)}")
            time.sleep(0.0005)

    if at == "start":
        time.sleep(late * _START_S)
    else:
        wait_until(lambda: _began(log) is not None)
        first = _began(log) or 0
        wait_until(lambda: _logged(run) >= first + more)
        if at == "write":
            wait_until(lambda: bool(_unfinished(run) - left))
        time.sleep(late * (_WRITE_S if at == "write" else _STEP_S))
    process.kill()
    if process.wait() != -signal.SIGKILL:
        raise ValueError(f"the run ended with {process.returncode} before it was killed: {_last_line(log)}")
    saved = max((int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")), default=0)
    found = {name for name, _ in _unfinished(run) - left}
    under_way, removing = (
        any(map(re.compile(rf"\.step-\d+\.{what}").fullmatch, found)) for what in ("writing", "removing")
    )
    best = any(name.startswith(".best") for name in found)
    return Kill(at, _began(log), _logged(run), saved, under_way, removing, best)


def _unfinished(run: Path) -> set[tuple[str, int]]:
    """Folders that are being written or removed, each with the time of its last change."""
    found = set()
    for path in (*run.glob("checkpoints/.step-*"), *run.glob(".best.*")):
        with suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ctime_ns))
    return found


def _began(log: Path) -> int | None:
    """The step that a process went on from, 0 for the beginning; None where it was not ready."""
    lines = log.read_text(errors="replace").splitlines()
    if not any(line.startswith("ready after ") for line in lines):
        return None
    told = [line for line in lines if line.startswith("going on from ")]
    return int(told[0].rpartition("step-")[2]) if told else 0


def _records(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    found = []
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # the line under way
    return found


def _logged(run: Path) -> int:
    return max((record["step"] for record in _records(run)), default=0)


def _refuse_lost_steps(done: Sequence[Kill], last: int | None) -> None:
    """Every process that came so far went on from the newest checkpoint that there was. last: of the one that was not killed."""
    if last is None:
        raise ValueError("expected the last process to say from where it goes on, found nothing of it")
    began = [*(died.began for died in done[1:]), last]
    for number, (died, went_on) in enumerate(zip(done, began, strict=True), 1):
        if went_on is not None and went_on != died.saved:
            raise ValueError(
                f"kill {number}: expected to go on from step {died.saved}, the newest checkpoint, found {went_on}"
            )


def _end_of(run: Path) -> dict[str, str]:
    """Digests of what a run comes to."""
    last = max((run / "checkpoints").glob("step-*"), key=lambda path: path.name)
    files = {
        "weights, moments and position": last / "training.safetensors",
        "drafter": run / "drafter" / "model.safetensors",
        "best drafter": run / "best" / "model.safetensors",
    }
    kept = [
        {k: v for k, v in r.items() if k not in ("machine", "tokens_per_s")} for r in _records(run) if "event" not in r
    ]
    return {what: hashlib.sha256(file.read_bytes()).hexdigest() for what, file in files.items()} | {
        "metrics": hashlib.sha256(json.dumps(kept).encode()).hexdigest()
    }


def _record(done: Sequence[Kill], end: Mapping[str, str], steps: int, seed: int) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "processes killed with SIGKILL": len(done),
        "of them while a checkpoint was being written": sum(died.under_way for died in done),
        "of them while one that is no longer kept was being removed": sum(died.removing for died in done),
        "of them while best/ was being written": sum(died.best_under_way for died in done),
        "of them before the process was ready for its first step": sum(died.began is None for died in done),
        "steps of the run": steps,
        "steps between two checkpoints": SAVE_EVERY,
        "steps redone after a kill, at most": max(died.redone for died in done),
        "steps redone after a kill in mid-run, on average": sum(died.redone for died in done)
        / max(1, sum(died.began is not None for died in done)),
        "steps redone from before the newest checkpoint on disk": 0,
        "weights, moments, drafters and metrics equal those of the run left alone, bit for bit": True,
    }
    return {
        "where": provenance(),
        "seed": seed,
        "kills": [vars(died) | {"redone": died.redone} for died in done],
        "sha256": dict(end),
        "table": [{"figure": name, "measured": value} for name, value in figures.items()],
    }


def _last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "it said nothing"
