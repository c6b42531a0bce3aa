"""From one generation of captured steps to the next: whole, and with a way back.

Graphs share a pool, a stream and its workspaces, so they are made together and freed together, never one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from graphs.capture_errors import CaptureError, first_line
from graphs.executor import Executor

Order = Literal["beside", "after"]


class GenerationLost(CaptureError):
    """Neither the new generation could be made nor the old one again: there is nothing to take steps with."""


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
    remake() builds them again, and GenerationLost says that this failed too. Ctrl-C in the middle leaves the closing to
    whoever owns both.
    """
    try:
        if order == "after":
            old.release()
        make()
    except Exception as error:
        new.close()
        old.attach()
        if order == "after":
            _made_again(remake, error)
        raise
    old.close()
    new.attach()


def _made_again(remake: Callable[[], object], failure: Exception) -> None:
    try:
        remake()
    except Exception as error:
        raise GenerationLost(
            f"the new generation of graphs failed ({first_line(failure)}), and then the old one could not be captured again "
            f"({first_line(error)}); start again from the last checkpoint"
        ) from error
