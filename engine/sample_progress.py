"""How far a pass over a dataset's samples is, on stderr."""

from __future__ import annotations

import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.reports import make_console

_EVERY_S = 10.0


class SampleProgress:
    """A bar on a terminal's stderr; elsewhere a line now and then."""

    def __init__(self, total: int, done: int, what: str) -> None:
        self._console = make_console(stderr=True)
        self._total, self._done, self._what = total, done, what
        self._next_s = time.monotonic() + _EVERY_S
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=total, completed=done)

    def advance(self) -> None:
        """One sample more is done."""
        self._done += 1
        self._bar.advance(self._task)
        if not self._console.is_terminal and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _EVERY_S
            self._console.print(f"{self._what}: {self._done} of {self._total} samples")

    def __enter__(self) -> SampleProgress:
        self._bar.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._bar.stop()
