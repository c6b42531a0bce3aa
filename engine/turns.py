"""How long a busy Python thread may keep the others waiting."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PYTHONS_OWN_S = sys.getswitchinterval()


@contextmanager
def short_turns(switch_interval_ms: float) -> Iterator[None]:
    """Inside, Python threads hand over after this long when another one waits; 0 leaves Python's own 5 ms.

    The training thread and the loader give the interpreter up at every call into torch, some dozens of times a step, and
    wait a turn of every busy thread to get it back. The device has steps queued (buffers/staging.py: one more than the
    pipeline has slots), so it idles only when those turns add up to more than they take.
    """
    before = sys.getswitchinterval()
    if switch_interval_ms > 0:
        set_turns(switch_interval_ms)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def set_turns(switch_interval_ms: float) -> None:
    """The same from here on."""
    sys.setswitchinterval(switch_interval_ms / 1e3 if switch_interval_ms > 0 else _PYTHONS_OWN_S)
