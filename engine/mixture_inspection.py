"""`dflash-engine data inspect` of several folders: each by itself, and whether they can be trained on together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.data_source import open_training_data
from engine.inspection import inspect_dataset
from engine.reports import make_console
from engine.settings import Settings


def inspect_mixture(folders: Sequence[Path], settings: Settings, *, verify: bool, recompute: int = 0) -> dict[str, Any]:
    """Prints and returns what `inspect_dataset` finds of each folder, under "datasets"; "bad_files" has those of all, and
    "cannot_be_mixed" the reason, None when they can be. Raises ValueError for a folder that is no dataset."""
    console = make_console()
    datasets: dict[str, dict[str, Any]] = {}
    for folder in folders:
        console.print(f"{folder}:", markup=False, soft_wrap=True)
        datasets[str(folder)] = inspect_dataset(folder, settings, verify=verify, recompute=recompute)
    bad_files = {
        str(Path(folder) / name): reason
        for folder, figures in datasets.items()
        for name, reason in figures["bad_files"].items()
    }
    reason = None
    try:
        open_training_data(folders, settings)
    except ValueError as error:
        reason = str(error)
    console.print(
        "they can be trained on together" if reason is None else f"they cannot be mixed: {reason}",
        markup=False,
        soft_wrap=True,
    )
    return {"datasets": datasets, "bad_files": bad_files, "cannot_be_mixed": reason}
