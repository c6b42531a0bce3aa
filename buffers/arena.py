"""Arenas: one block of bytes each, allocated once, and named tensors at fixed addresses inside it.

A list of `BufferSpec` says which tensors there are; packing them is arithmetic, so two arenas given the same list have
the same layout and one copy of `packed_size` bytes moves all of it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from buffers.shapes import round_up

# Enough for vector loads and TMA descriptors; also what cudaMalloc itself promises.
ALIGNMENT = 256


@dataclass(frozen=True)
class BufferSpec:
    """One named tensor: its shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself, without alignment."""
        return math.prod(self.shape) * self.dtype.itemsize


def packed_size(specs: Iterable[BufferSpec]) -> int:
    """Bytes that `specs` take one after the other, each starting at a multiple of 256 bytes."""
    return sum(round_up(spec.nbytes, ALIGNMENT) for spec in specs)


class Arena:
    """Owns one uint8 tensor of `nbytes` on `device`; every view of it keeps its address for the arena's life.

    `pinned` asks for page-locked host memory (device must be the CPU). `poison` fills it with 0xFF, which is NaN in
    every float type and -1 in the signed integers, so that a test sees whoever reads what nobody wrote. Without it
    the content is undefined.
    """

    def __init__(
        self, name: str, nbytes: int, device: torch.device | str, *, pinned: bool = False, poison: bool = False
    ) -> None:
        device = torch.device(device)
        if nbytes <= 0:
            raise ValueError(f"expected a positive size for arena {name!r}, found {nbytes} bytes. List its buffers.")
        if pinned and device.type != "cpu":
            raise ValueError(f"expected device cpu for the pinned arena {name!r}, found {device}. Drop pinned.")
        # Host allocators promise less than 256 bytes of alignment: take more and start at the first aligned address.
        spare = ALIGNMENT if device.type == "cpu" else 0
        block = torch.empty(nbytes + spare, dtype=torch.uint8, device=device, pin_memory=pinned)
        shift = -block.data_ptr() % ALIGNMENT
        assert shift <= spare, f"arena {name!r} starts at {block.data_ptr():#x}, not at a multiple of {ALIGNMENT}"
        self.name = name
        self.bytes = block[shift : shift + nbytes]
        if poison:
            self.bytes.fill_(0xFF)

    @property
    def nbytes(self) -> int:
        """Size of the arena."""
        return self.bytes.numel()

    def views(self, specs: Sequence[BufferSpec], base: int = 0) -> dict[str, Tensor]:
        """Tensors for `specs`, packed from byte `base` on (a multiple of 256). They alias the arena: no copy.

        Raises ValueError when two specs share a name or when the specs do not fit.
        """
        if base % ALIGNMENT:
            raise ValueError(f"expected base to be a multiple of {ALIGNMENT}, found {base}. Round it up.")
        end = base + packed_size(specs)
        if end > round_up(self.nbytes, ALIGNMENT) or base + _last_byte(specs) > self.nbytes:
            raise ValueError(
                f"expected arena {self.name!r} to hold {end} bytes, found {self.nbytes}. Size it with packed_size."
            )
        views: dict[str, Tensor] = {}
        offset = base
        for spec in specs:
            if spec.name in views:
                raise ValueError(f"expected buffer names to differ, found {spec.name!r} twice. Rename one.")
            views[spec.name] = self.bytes[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)
            offset += round_up(spec.nbytes, ALIGNMENT)
        return views


def _last_byte(specs: Sequence[BufferSpec]) -> int:
    return packed_size(specs[:-1]) + specs[-1].nbytes if specs else 0


class ArenaRow(NamedTuple):
    """One line of the table of buffers."""

    arena: str
    name: str
    shape: str
    dtype: str
    mib: float
    address: str


def arena_table(arenas: Iterable[tuple[str, Mapping[str, Tensor]]]) -> list[ArenaRow]:
    """A row for every tensor of every (arena name, named tensors): shape, dtype, MiB and address, ready to print."""
    return [
        ArenaRow(
            arena,
            name,
            "x".join(map(str, tensor.shape)) or "scalar",
            str(tensor.dtype).removeprefix("torch."),
            tensor.numel() * tensor.element_size() / 2**20,
            f"{tensor.data_ptr():#x}",
        )
        for arena, tensors in arenas
        for name, tensor in tensors.items()
    ]
