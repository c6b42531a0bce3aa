"""What a change of settings asks of a run: a value is written, a new generation of graphs is captured, or it is refused.

The class of every setting stands beside it in engine/settings.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.reports import make_console, print_table
from engine.settings import SECTIONS, Settings, load_settings
from engine.settings_fields import Change, SettingsError

SETTINGS_FILE = "settings.toml"
_MEANING = {
    "live": "written between two steps, nothing is captured",
    "recapture": "one new generation of graphs, between two steps",
    "restart": "refused: the run goes on as it was",
}
WORST_FIRST: tuple[Change, ...] = ("restart", "recapture", "live")


@dataclass(frozen=True)
class SettingChange:
    """One setting that differs, as section.key."""

    name: str
    old: Any
    new: Any
    change: Change

    def __str__(self) -> str:
        return f"{self.name} {_plain(self.old)} -> {_plain(self.new)}"


def changes_between(old: Settings, new: Settings) -> list[SettingChange]:
    """Every setting that differs with the class of its change, what asks most first."""
    found = []
    for section, kind in SECTIONS.items():
        for field in dataclasses.fields(kind):
            before, after = (getattr(getattr(settings, section), field.name) for settings in (old, new))
            if before != after:
                change: Change = field.metadata["change"]
                low = field.metadata["limits"].low
                if field.metadata["from_low"] and (before == low) != (after == low):
                    change = field.metadata["from_low"]
                found.append(SettingChange(f"{section}.{field.name}", before, after, change))
    return sorted(found, key=lambda change: WORST_FIRST.index(change.change))


def refuse_restarts(changes: Sequence[SettingChange]) -> None:
    """Raises SettingsError naming the changes that a run cannot take over."""
    restarts = [str(change) for change in changes if change.change == "restart"]
    if restarts:
        raise SettingsError(
            f"{', '.join(restarts)}: expected a change that a run can take over, found {'one' if len(restarts) == 1 else 'some'} "
            "of what it is made of; set it back, or start another run with another run.output"
        )


def worst(changes: Sequence[SettingChange]) -> Change:
    """The class of all of them together."""
    return min((change.change for change in changes), key=WORST_FIRST.index, default="live")


def explain_changes(settings: Settings) -> dict[str, Any]:
    """Prints and returns what the settings change of the run in run.output, and what each change would ask of it. Nothing is
    done. Raises SettingsError where there is no run."""
    described = Path(settings.run.output) / SETTINGS_FILE
    if not described.is_file():
        raise SettingsError(
            f"run.output: expected a run to compare with, found no {described}; without one the settings are a new run's"
        )
    changes = changes_between(load_settings(described), settings)
    console = make_console()
    if changes:
        print_table(
            console,
            f"changes of {described}",
            ("setting", "old", "new", "class"),
            ((change.name, _plain(change.old), _plain(change.new), change.change) for change in changes),
        )
    together = worst(changes) if changes else "none"
    text = f"{together}: {_MEANING[together]}" if changes else f"nothing differs from {described}"
    console.print(text, markup=False, soft_wrap=True)
    return {
        "run": settings.run.output,
        "class": together,
        "changes": [change_figures(change) | {"class": change.change} for change in changes],
    }


def change_figures(change: SettingChange) -> dict[str, Any]:
    """As JSON has it."""
    return {"setting": change.name, "old": change.old, "new": change.new}


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return repr(value) if isinstance(value, str) else str(value)
