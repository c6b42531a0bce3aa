"""Ctrl-C and SIGTERM at a moment that suits the work."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """Inside, a first Ctrl-C or SIGTERM sets `seen` and no more; a second one raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.seen = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Only the main thread may set handlers; elsewhere whoever runs us handles interrupts.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True
