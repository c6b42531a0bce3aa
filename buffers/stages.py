"""What each thread is doing, by name: for a watchdog that asks when nothing moves, and as ranges in a profile.

The names are few, so that they can be looked up (docs/trouble.md): read, stage, replay, call, log, evaluate, checkpoint,
check, regenerate, idle; collective for whoever waits for other ranks.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch.profiler import record_function


class Stage(NamedTuple):
    """name: one of the module's. what: on what, in words, or "". since_s: time.monotonic when it began."""

    name: str
    what: str
    since_s: float

    def __str__(self) -> str:
        return f"{self.name} {self.what}".rstrip()


# By thread; a thread's entries are its own to write.
_stages: dict[int, Stage] = {}
_changes: dict[int, int] = {}
_ranges = False


@contextmanager
def stage(name: str, what: str = "") -> Iterator[None]:
    """Inside, and as a decorator in the function, the calling thread is doing this. May be nested: the innermost counts."""
    thread = threading.get_ident()
    outer = _stages.get(thread)
    _changes[thread] = _changes.get(thread, 0) + 1
    _stages[thread] = Stage(name, what, time.monotonic())
    try:
        if _ranges:
            with record_function(f"{name} {what}".rstrip()):
                yield
        else:
            yield
    finally:
        _changes[thread] += 1
        if outer is None:
            del _stages[thread]  # its number may be another thread's later
        else:
            _stages[thread] = outer


def changes_of(thread: int) -> int:
    """How often the thread has entered or left a stage: it moves on as long as this does."""
    return _changes.get(thread, 0)


def stages_now() -> dict[threading.Thread, Stage]:
    """The stage of every thread that is in one."""
    return {thread: found for thread in threading.enumerate() if (found := _stages.get(thread.ident or 0)) is not None}


def place_of(thread: threading.Thread) -> str:
    """Where the thread is, as "file.py:12 in function", the innermost place; "" for one that has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno} in {frame.f_code.co_name}"


@contextmanager
def ranges_in_profiles() -> Iterator[None]:
    """Inside, every stage is a range of torch.profiler's trace, in whatever thread."""
    global _ranges
    before, _ranges = _ranges, True
    try:
        yield
    finally:
        _ranges = before
