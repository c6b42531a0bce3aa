"""Host memory that a device copies to while others work: allocated once, page-locked, of exactly the size asked for."""

from __future__ import annotations

import mmap
import threading

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device of the process


class HostMemory:
    """nbytes of zeros at one address. For a CUDA device they are page-locked, by a thread that works from construction on: the
    pages of several GiB take seconds, in which a run reads its data. (torch's own pinned memory is rounded up to a power of two.)

    Forked children do not have it: theirs would be copies of pages that the device writes to. Raises MemoryError.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        try:
            map_ = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError from error
        map_.madvise(mmap.MADV_DONTFORK)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            map_.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(map_, dtype=torch.uint8)
        self._device, self._error = device, ""
        self._locked = False
        self._locking: threading.Thread | None = None
        if device.type == "cuda":
            self._locking = threading.Thread(target=self._lock, name="page-locking", daemon=True)
            self._locking.start()

    @property
    def bytes(self) -> Tensor:
        """uint8 [nbytes]. Waits until it is ready."""
        self.wait()
        return self._bytes

    @property
    def pages(self) -> Tensor:
        """The same, at once: for views, which are not read or written before wait()."""
        return self._bytes

    def wait(self) -> None:
        """Until the pages are there and locked."""
        if self._locking is not None:
            self._locking.join()
            self._locking = None

    @property
    def why_not_locked(self) -> str:
        """What the driver said where it did not lock the pages; "" otherwise. Copies from the device then make the host wait."""
        return self._error

    def close(self) -> None:
        """Unlocks the pages; nothing may be copying to them. The memory itself goes with the last tensor of it."""
        memory = self.bytes
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
            self._locked = False

    def _lock(self) -> None:
        try:
            torch.cuda.set_device(self._device)
            self._bytes.zero_()  # makes the pages with all cores, where locking would make them with one
            status = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), _PORTABLE)
            # The runtime keeps the last error for each thread: it ends with this one.
            self._locked = int(status) == 0
            self._error = "" if self._locked else str(status)
        except RuntimeError as error:
            self._error = str(error)
