"""Device memory of what is measured, without what the process held before: cuBLAS keeps 32 MiB for every stream that an engine
measured earlier had run on."""

from __future__ import annotations

import torch


class DeviceMemory:
    """What is allocated and reserved on the device from here on, in GiB; None on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forget_peak()
        if device.type == "cuda":
            self._before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)

    def forget_peak(self) -> None:
        """Lets the peak begin anew, and gives back what torch keeps unused."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def peak_gib(self) -> float | None:
        """The most that was allocated at a time since the peak was forgotten."""
        if self._device.type != "cuda":
            return None
        return float(torch.cuda.max_memory_allocated(self._device) - self._before[0]) / 2**30

    @property
    def held_gib(self) -> float | None:
        """What torch's allocator keeps from the device, the graphs' pool included."""
        if self._device.type != "cuda":
            return None
        return float(torch.cuda.memory_reserved(self._device) - self._before[1]) / 2**30

    def read(self) -> dict[str, float | None]:
        """Both, for a record."""
        return {"peak_gib": self.peak_gib, "held_gib": self.held_gib}
