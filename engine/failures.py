"""What a user is told about an error that they can mend, in one line."""

import errno

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LESS_MEMORY = (
    "Lower buckets.token_budget, buckets.num_anchors or model.head_chunk, or free memory that other processes hold."
)


def message_of(error: Exception) -> str | None:
    """The line for ValueError, OSError, MemoryError and what is derived from them, a failed capture, a failed check and a full
    GPU; None for a fault of ours."""
    if isinstance(error, OSError) and error.strerror:
        # A write that fails knows no name: the file was opened long before.
        where = "could not write" if error.filename is None else str(error.filename)
        hint = " Make room there; the same command goes on." if error.errno in _NO_ROOM else ""
        return f"{where}: {error.strerror}.{hint}"
    if isinstance(error, MemoryError):
        return f"{str(error) or 'the memory of this machine is full'}. {_LESS_MEMORY}"
    if isinstance(error, ValueError | OSError):
        return str(error)
    if isinstance(error, RuntimeError):
        # Whoever raised these has loaded torch already.
        from torch import OutOfMemoryError

        from engine.checking import CheckFailed
        from graphs.executor import CaptureError

        if isinstance(error, CaptureError | CheckFailed):
            return str(error)
        # The CPU's allocator has no type of its own for a full memory.
        full = ("can't allocate memory", "Storage size calculation overflowed")
        if isinstance(error, OutOfMemoryError) or any(words in str(error) for words in full):
            return f"{str(error).splitlines()[0]} {_LESS_MEMORY}"
    return None
