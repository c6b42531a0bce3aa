"""What the doctor asks of the GPUs: what they are, and what of the engine they can do."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.doctor_host import c_compiler
from engine.gpu_holders import held_on
from engine.precision import check_fp8_device

_SMALL_SHARED_MEMORY = 99 * 1024  # what the attention's small tiles compile within (engine/ops/attention_tiles.py)


@dataclass(frozen=True)
class Gpu:
    """shared_memory: bytes that a block may ask for. held: who holds what is not free, in words."""

    name: str
    capability: str
    total_bytes: int
    free_bytes: int
    shared_memory: int
    processors: int
    held: str


@dataclass(frozen=True)
class Works:
    """Whether a part of the engine will work, and why or with what."""

    works: bool
    why: str


def find_gpus() -> list[Gpu]:
    """Those that torch can use."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        shared = int(getattr(properties, "shared_memory_per_block_optin", 0)) or _shared_memory(index)
        held = held_on(torch.device("cuda", index))
        capability = f"{properties.major}.{properties.minor}"
        found.append(Gpu(properties.name, capability, total, free, shared, properties.multi_processor_count, held))
    return found


def _shared_memory(index: int) -> int:
    try:
        import triton
    except ImportError:
        return 0
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def works_here(gpus: Sequence[Gpu], env: Mapping[str, str] = os.environ) -> dict[str, Works]:
    """What of the engine the first GPU, or without one the CPU, can do."""
    if not gpus:
        no = "needs a GPU that torch can use; install the driver and a CUDA build of torch"
        return {
            "train, eval, demo": Works(True, "the steps are called, in fp32, with attention from its definition: slow"),
            "plan, data, export": Works(True, "no GPU takes part"),
            "capture and replay": Works(False, no),
            'model.attention = "triton" or "flex"': Works(False, no),
            'run.precision = "fp8"': Works(False, no),
        }
    gpu = gpus[0]
    capability = tuple(int(part) for part in gpu.capability.split("."))
    compiles = _compiler(env)
    return {
        'run.precision = "bf16"': (
            Works(True, f"capability {gpu.capability}")
            if capability >= (8, 0)
            else Works(False, f"needs capability 8.0 or newer, found {gpu.capability}")
        ),
        'run.precision = "fp8"': _fp8(),
        'model.attention = "triton"': compiles or _tiles(gpu),
        'model.attention = "flex"': compiles or _flex(env),
        "capture and replay": _capture(env),
    }


def _compiler(env: Mapping[str, str]) -> Works | None:
    """Why no kernel can be compiled here; None where that works."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return Works(False, "Triton is not installed; pip install triton")
    if env.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return Works(False, "TRITON_INTERPRET is set; unset it")
    if not c_compiler():
        return Works(False, "Triton needs a C compiler for its launchers, found none; install gcc or set CC")
    return None


def _tiles(gpu: Gpu) -> Works:
    from engine.ops.card import LARGE_SHARED_MEMORY

    have = f"{gpu.shared_memory / 1024:.0f} KiB of shared memory a block"
    if gpu.shared_memory >= LARGE_SHARED_MEMORY:
        return Works(True, f"{have}: the large tiles")
    if gpu.shared_memory >= _SMALL_SHARED_MEMORY:
        return Works(True, f"{have}: the small tiles")
    return Works(False, f'{have}, the smallest tiles need 99; set model.attention = "flex"')


def _flex(env: Mapping[str, str]) -> Works:
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if env.get(name, "0").strip().lower() not in ("", "0", "false"):
            return Works(False, f"{name} is set, so that it would not be compiled; unset it")
    return Works(True, "torch.compile makes it for every bucket, in tens of seconds each")


def _fp8() -> Works:
    try:
        check_fp8_device(torch.device("cuda", 0))
    except ValueError as error:
        return Works(False, str(error))
    return Works(True, "e4m3 matmuls, capability 8.9 or newer")


def _capture(env: Mapping[str, str]) -> Works:
    if env.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") not in ("", "0"):
        return Works(False, "PYTORCH_NO_CUDA_MEMORY_CACHING is set; unset it")
    return Works(True, "the measurement below captures a small step and compares its replay")
