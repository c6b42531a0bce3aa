"""Says in what a run is stuck. A thread that looks and speaks; it changes nothing and stops nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from buffers.stages import changes_of, place_of, stages_now

_LONGEST_LOOK_S = 1.0


class Watchdog:
    """Inside, when the thread that entered neither enters nor leaves a stage (buffers/stages.py) for limit_s() seconds, one line
    is said with the stage, those of the other threads, and the oldest step that the device has not finished; again after twice,
    four times, ... that long, and once more when it moves again."""

    def __init__(
        self,
        limit_s: Callable[[], float],
        say: Callable[[str], None],
        *,
        where: Callable[[], str] = lambda: "",
        device: Callable[[], str] = lambda: "",
    ) -> None:
        """limit_s: asked at every look; 0 is never. where: how far the run is, in words. device: the name of the step that the
        device is at, or ""."""
        self._limit_s, self._say, self._where, self._device = limit_s, say, where, device
        self._end = threading.Event()
        self._watched = threading.current_thread()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._watched = threading.current_thread()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        # The monotonic clock: one that is set forward or back is no standstill.
        seen, moved_s, patience = -1, time.monotonic(), 1
        limit_s = self._limit_s()
        while not self._end.wait(min(_LONGEST_LOOK_S, limit_s / 4) if limit_s else _LONGEST_LOOK_S):
            limit_s, changes, now_s = self._limit_s(), changes_of(self._watched.ident or 0), time.monotonic()
            if changes != seen:
                if patience > 1:
                    self._say(f"it moves again {self._where()}, after {now_s - moved_s:.0f} s")
                seen, moved_s, patience = changes, now_s, 1
            elif limit_s and now_s - moved_s >= limit_s * patience:
                patience *= 2
                self._say(self._told(now_s - moved_s))

    def _told(self, still_s: float) -> str:
        stages = stages_now()
        own = stages.pop(self._watched, None)
        told = [
            f"nothing has moved for {still_s:.0f} s {self._where()}: stuck {f'in {own}' if own else 'between two stages'}"
        ]
        told[0] += _at(self._watched)
        told += [f"{thread.name} in {stage}{_at(thread)}" for thread, stage in stages.items()]
        step = self._device()
        if step:
            told.append(f"the device has not finished {step}")
        return "; ".join(told) + ". See docs/trouble.md"


def _at(thread: threading.Thread) -> str:
    place = place_of(thread)
    return f" ({place})" if place else ""
