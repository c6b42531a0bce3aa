"""Ctrl-C, SIGTERM and SIGHUP at a moment that suits the work."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """Inside, a first Ctrl-C or SIGTERM sets `seen` and says what follows; a second one raises KeyboardInterrupt at once. With
    rereads a SIGHUP asks for the settings file to be read again; without, it ends the process as ever."""

    def __init__(self, say: Callable[[str], None], *, rereads: bool = False) -> None:
        self.seen = False
        self._reread, self._rereads = False, rereads
        self._say = say
        self._handlers: dict[int, Any] = {}

    def take_reread(self) -> bool:
        """Whether a SIGHUP came since the last call."""
        asked, self._reread = self._reread, False
        return asked

    def __enter__(self) -> Self:
        # Only the main thread may set handlers; elsewhere whoever runs us handles interrupts.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._note)
            if self._rereads:
                self._handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._note_reread)
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
        self._say("stopping after this step, with a checkpoint; a second Ctrl-C ends at once, without one")

    def _note_reread(self, number: int, frame: FrameType | None) -> None:
        self._reread = True


@contextmanager
def noting_interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C raises KeyboardInterrupt as ever; what the context gives tells whether it has come. Code in C in which it arrives
    may raise an error of its own instead."""
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    # Only the main thread may set handlers; one that somebody else has set, or turned off, stays.
    ours = threading.current_thread() is threading.main_thread()
    ours = ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
