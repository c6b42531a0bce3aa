"""What is said when a step cannot be captured: which step, why, and the line of ours that did it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_ROOT = Path(__file__).parent.parent
_PACKAGES = tuple(f"{_ROOT / name}/" for name in ("buffers", "graphs", "engine", "bench"))
# It calls the steps: a line of it is in every traceback.
_CALLER = str(_ROOT / "graphs" / "executor.py")


class CaptureError(RuntimeError):
    """A step could not be warmed up or captured; says which, where and what to do."""


@contextmanager
def explained(name: str, doing: str, device: torch.device) -> Iterator[None]:
    """Inside, a RuntimeError or one of Triton's errors becomes a CaptureError about `doing` (warming up, capturing) the step."""
    free = torch.cuda.mem_get_info(device)[0] / 2**30
    before = sys.exception()
    try:
        yield
    except Exception as error:
        # Triton's are no RuntimeErrors: a kernel that asks for more shared memory than the card has, for one.
        if not isinstance(error, RuntimeError) and not type(error).__module__.startswith("triton."):
            raise
        cause = _first_cause(error, before)
        at = "" if (line := our_line(cause)) is None else f" (at {line})"
        if not isinstance(cause, torch.OutOfMemoryError):
            raise CaptureError(f"could not finish {doing} {name}: {first_line(cause)}{at}") from error
        total = torch.cuda.mem_get_info(device)[1] / 2**30
        raise CaptureError(
            f"out of GPU memory while {doing} {name}: {free:.1f} of {total:.1f} GiB were free before it; lower "
            f"buckets.token_budget, buckets.num_anchors or model.head_chunk ({first_line(cause)}){at}"
        ) from error


def our_line(error: BaseException) -> str | None:
    """The innermost line of these packages in the error's traceback, as "engine/step.py:42, in forward_backward"."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(_PACKAGES) and frame.filename not in (__file__, _CALLER):
            return f"{Path(frame.filename).relative_to(_ROOT)}:{frame.lineno}, in {frame.name}"
    return None


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _first_cause(error: BaseException, before: BaseException | None) -> BaseException:
    """What went wrong first - a capture that was broken fails once more when it is ended - but not before `before`, which was
    being handled when this began."""
    while isinstance(error.__context__, Exception) and error.__context__ is not before:
        error = error.__context__
    return error
