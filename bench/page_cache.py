"""Whether a file lies in the system's page cache, and how to have it read from the disk again."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path


def drop_from_cache(files: Iterable[Path]) -> None:
    """Asks the system to forget the files' pages: they must be written out and not mapped. A tmpfs keeps them."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_share(files: Iterable[Path]) -> float:
    """The share of the files' pages that are in memory, 0 to 1, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    here = total = 0
    for file in files:
        size = file.stat().st_size
        pages = -(-size // mmap.PAGESIZE)
        # A private mapping that may be written to gives its address away; nothing is written.
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
            state, first = (ctypes.c_ubyte * pages)(), ctypes.c_char.from_buffer(mapped)
            if libc.mincore(ctypes.addressof(first), size, state):
                raise OSError(ctypes.get_errno(), f"mincore: {os.strerror(ctypes.get_errno())}", str(file))
            del first
        here += sum(byte & 1 for byte in state)
        total += pages
    return here / total if total else 0.0
