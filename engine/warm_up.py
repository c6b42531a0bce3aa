"""Compile first, threads later: one thread builds every engine of a process, then each may be stepped from a thread of its own.

Engines have memory, streams and pools of their own, so they replay side by side, on several devices or on one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.engine import Engine
from graphs.compile_ban import compilation_allowed, no_compilation
from graphs.executor import BuildReport


@contextmanager
def warm_up(engines: Sequence[Engine]) -> Iterator[list[list[BuildReport]]]:
    """Compiles and captures everything for all engines, one after the other in the calling thread; gives what each took. Inside,
    whoever has anything compiled, in any thread, gets a CompilationError; engine.regenerate() is exempt, one thread at a time.

    A thread that takes an engine's steps calls engine.attach() first. Raises CaptureError.
    """
    reports = []
    for engine in engines:
        with compilation_allowed():
            reports.append(engine.build())
    with no_compilation():
        yield reports
