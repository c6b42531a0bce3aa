"""Where the seconds before the first step go."""

from __future__ import annotations

import time


class Laps:
    """seconds: by name, those since the lap before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def end(self, name: str, *, of_it: float = 0.0, other: str = "") -> None:
        """Ends a lap; `of_it` seconds of it are counted under the name `other`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last_s - of_it
        if other:
            self.seconds[other] = self.seconds.get(other, 0.0) + of_it
        self._last_s = now

    def __str__(self) -> str:
        total = sum(self.seconds.values())
        return f"{total:.1f} s: " + ", ".join(f"{name} {s:.1f}" for name, s in self.seconds.items())
