"""Runs whose settings file is edited while they train, and their twins: interrupted there and resumed under the new settings."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.config_file import ConfigFile
from engine.train import train
from tests.drafter_helpers import assert_same_bits
from tests.run_helpers import checkpoint_tensors, comes_and_goes, interrupt, metrics, records, run_settings

# (after which step, the settings that change there)
Edits = Sequence[tuple[int, tuple[str, ...]]]
AfterStep = Callable[[int, Callable[[], None]], None]


def write_config(path: Path, data: Path, output: Path, *changes: str) -> None:
    """A settings file of the tiny run with these changes."""
    path.write_text(run_settings(data, output, *changes).to_toml())


def hang_up() -> None:
    """SIGHUP: read the file now."""
    signal.raise_signal(signal.SIGHUP)


def train_edited(
    after_step: AfterStep, data: Path, output: Path, edits: Edits, *first: str, config: Path | None = None
) -> dict[str, Any]:
    """Trains under `first`, and after each of the steps under further changes, which add up."""
    config = config or output.with_suffix(".toml")
    write_config(config, data, output, *first)

    def edit(number: int, so_far: tuple[str, ...]) -> None:
        step, changes = edits[number]

        def act() -> None:
            write_config(config, data, output, *so_far, *changes)
            hang_up()
            if number + 1 < len(edits):
                edit(number + 1, (*so_far, *changes))

        after_step(step, act)

    edit(0, first)
    file = ConfigFile(config)
    return train(file.load(), config=file)


def train_resumed(after_step: AfterStep, data: Path, output: Path, edits: Edits, *first: str) -> dict[str, Any]:
    """The same, but that the run is interrupted after each of the steps and started again under the changed settings."""
    so_far = first
    for step, changes in edits:
        after_step(step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(run_settings(data, output, *so_far))
        so_far = (*so_far, *changes)
    return train(run_settings(data, output, *so_far))


def events(output: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says of changes."""
    return [record for record in records(output) if "event" in record and not comes_and_goes(record)]


def assert_same_run(one: Path, other: Path, steps: int) -> None:
    """The same lines of metrics and, bit for bit, the same last checkpoint."""
    lines = [[record for record in metrics(output) if "event" not in record] for output in (one, other)]
    assert lines[0] == lines[1]
    assert_same_bits(checkpoint_tensors(one, steps), checkpoint_tensors(other, steps))
