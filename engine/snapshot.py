"""The state of a run as it stands between two updates, copied to host memory without waiting for the device.

On CUDA the copies of masters and moments run on a stream of their own, beside the next micro-batches, which read parameters and
write gradients. What keeps them whole:
  they begin after all that the caller's stream holds, the last update with it   (the copy stream waits for that stream),
  the counters, which the next micro-batch adds to, go over on the caller's stream, before it,
  the next update begins after the copies                                         (Engine.hold_update: the device waits),
  the host memory is written again only when its content is on disk               (CheckpointWriter.save waits).
Nothing is allocated on the device. On the CPU take() copies and returns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from buffers.host_memory import HostMemory
from engine.drafter_config import DrafterConfig
from engine.engine import Engine
from engine.params import arena_size

_ARENAS = ("master", "exp_avg", "exp_avg_sq")


def training_tensors(engine: Engine) -> dict[str, Tensor]:
    """Everything that a checkpoint restores, by its name there, as views of the engine's memory."""
    assert engine.optimizer is not None and engine.params.master is not None, "an engine that does not train"
    return _named(engine, {name: _arena(engine, name) for name in _ARENAS}, _counters(engine))


class Snapshot:
    """Owns a place on the host for each of training_tensors(). One caller thread takes; another may read after wait()."""

    @staticmethod
    def nbytes(config: DrafterConfig) -> int:
        """The host memory that masters and moments need: 12 bytes a parameter."""
        return len(_ARENAS) * arena_size(config) * torch.float32.itemsize

    def __init__(self, engine: Engine, memory: HostMemory) -> None:
        """memory: nbytes() of the engine's config, not read or written by others from here on."""
        self._engine, cuda = engine, engine.device.type == "cuda"
        size = engine.params.size
        self._memory = memory
        parts = memory.pages[: len(_ARENAS) * size * torch.float32.itemsize].view(torch.float32).split(size)
        self._arenas = dict(zip(_ARENAS, parts, strict=True))
        self._counters = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=cuda)
            for name, tensor in _counters(engine).items()
        }
        self.copied: torch.cuda.Event | None = None
        if cuda:
            # Urgent streams are of another set than those that graphs are captured on: it is never one of them.
            self._stream = torch.cuda.Stream(engine.device, priority=-1)
            self.copied = torch.cuda.Event(blocking=True)

    def take(self) -> None:
        """Begins to copy the state as the steps queued so far will leave it. The content before is gone."""
        engine, cuda = self._engine, self.copied is not None
        self._memory.wait()
        for name, tensor in _counters(engine).items():
            self._counters[name].copy_(tensor, non_blocking=cuda)
        if self.copied is None:
            self._copy_arenas()
            return
        self._stream.wait_stream(torch.cuda.current_stream(engine.device))
        with torch.cuda.stream(self._stream):
            self._copy_arenas()
            self.copied.record(self._stream)
        engine.hold_update(self.copied)

    def wait(self) -> None:
        """Until the copies are done. From any thread."""
        if self.copied is not None:
            self.copied.synchronize()

    def tensors(self) -> dict[str, Tensor]:
        """What was taken, by its name in a checkpoint; views."""
        return _named(self._engine, self._arenas, self._counters)

    def buffers(self) -> dict[str, Tensor]:
        """The host memory, for buffers.arena.arena_table."""
        return self._arenas | self._counters

    def _copy_arenas(self) -> None:
        for name, place in self._arenas.items():
            place.copy_(_arena(self._engine, name), non_blocking=self.copied is not None)


def _arena(engine: Engine, name: str) -> Tensor:
    arena: Tensor = getattr(engine.params, name)
    return arena


def _counters(engine: Engine) -> dict[str, Tensor]:
    assert engine.optimizer is not None
    return {
        "optimizer.step": engine.optimizer.step,
        "optimizer.skipped": engine.optimizer.skipped,
        "metrics.sums": engine.metrics.sums,
        "metrics.slots": engine.metrics.slots,
    }


def _named(engine: Engine, arenas: dict[str, Tensor], counters: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {f"{kind}.{name}": view for kind, arena in arenas.items() for name, view in engine.params.named(arena)}
    return named | counters
