"""From one generation of captured steps to the next: whole, and with a way back.

Graphs share a pool, a stream and its workspaces, so they are made together and freed together, never one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from graphs.executor import Executor

Order = Literal["beside", "after"]


def hand_over(
    old: Executor,
    new: Executor,
    *,
    order: Order,
    make: Callable[[], object],
    remake: Callable[[], object],
) -> None:
    """Builds and checks the new generation by make(), then closes the old one.

    order: "beside" builds while the old one stands, which takes the memory of both; "after" frees the old one's graphs first.
    Whatever make() raises is raised again with the new one closed and the old one fit to run - where its graphs were freed,
    remake() builds them again. Ctrl-C in the middle leaves the closing to whoever owns both.
    """
    try:
        if order == "after":
            old.release()
        make()
    except Exception:
        new.close()
        old.attach()
        if order == "after":
            remake()
        raise
    old.close()
    new.attach()
