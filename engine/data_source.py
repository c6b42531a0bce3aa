"""Opening a dataset as the settings say, with a word to the user while another trainer's files are scanned."""

from __future__ import annotations

import time
from pathlib import Path

from buffers.dataset import SampleSource
from buffers.foreign_facts import Facts
from buffers.open_dataset import open_dataset
from engine.drafter_config import DrafterConfig
from engine.reports import make_console
from engine.settings import DataSettings, Settings

_QUIET_S = 2.0
_EVERY_S = 10.0


def facts_from(data: DataSettings) -> Facts:
    """What [data] says of another trainer's files."""
    return Facts(
        target=data.target,
        target_layer_ids=data.target_layer_ids,
        mask_token_id=data.mask_token_id,
        last_hidden_norm=data.last_hidden_norm,
        on_bad_file=data.on_bad_file,
    )


def open_data(path: str | Path, settings: Settings, *, drafter: DrafterConfig | None = None) -> SampleSource:
    """The dataset in a folder, whoever wrote it; what is done to its values is said on stderr. A drafter's own layer ids and
    mask token stand in for settings that are left out. Raises ValueError as `buffers.open_dataset.open_dataset` does."""
    facts, fallback = facts_from(settings.data), Facts()
    if drafter is not None:
        fallback = Facts(target_layer_ids=tuple(drafter.target_layer_ids), mask_token_id=drafter.mask_token_id)
    dataset = open_dataset(path, facts, fallback=fallback, progress=ScanProgress(path))
    console = make_console(stderr=True)
    for note in dataset.notes:
        console.print(note, markup=False, soft_wrap=True)
    return dataset


class ScanProgress:
    """Lines on stderr about a scan that takes longer than a moment."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._next_s = time.monotonic() + _QUIET_S

    def __call__(self, done: int, total: int) -> None:
        """Called as samples are read."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _EVERY_S
            make_console(stderr=True).print(f"reading the lengths of {self._path}: {done} of {total} samples")
