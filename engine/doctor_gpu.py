"""What the doctor asks of the GPUs: what they are, what of the engine they can do, which settings pay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.doctor_host import c_compiler
from engine.gpu_holders import held_on
from engine.precision import check_fp8_device

_SMALL_SHARED_MEMORY = 99 * 1024  # what the attention's small tiles compile within (engine/ops/attention_tiles.py)
_PATIENCE_S = 120.0


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


_VARIANTS: dict[str, dict[str, str]] = {
    "as it is": {},
    "CUDA_MODULE_LOADING=EAGER": {"CUDA_MODULE_LOADING": "EAGER"},
    "expandable_segments:True": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}


def measure_variants(command: Sequence[str] = (sys.executable, "-m", "engine.doctor_probe")) -> list[dict[str, Any]]:
    """A small captured step in a process of its own under each setting: its figures, and in words whether the setting helps
    against things as they are."""
    found: list[dict[str, Any]] = []
    for name, changes in _VARIANTS.items():
        env = {key: value for key, value in os.environ.items() if key != "PYTORCH_ALLOC_CONF" or not changes}
        try:
            done = subprocess.run(
                list(command), env=env | changes, capture_output=True, text=True, timeout=_PATIENCE_S, check=True
            )
            figures = dict(json.loads(done.stdout.splitlines()[-1]))
        except subprocess.CalledProcessError as error:
            found.append({"name": name, "told": f"does not work: {' '.join(error.stderr.split())[-300:]}"})
            continue
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
            found.append({"name": name, "told": f"could not be measured: {error}"})
            continue
        base = found[0] if found and "replay_ms" in found[0] else None
        found.append({"name": name, **figures, "told": compared(figures, base)})
    return found


def compared(figures: Mapping[str, Any], base: Mapping[str, Any] | None) -> str:
    """The figures in words, and with a base whether this is better: what differs by more than a measurement's noise."""
    told = (
        f"start {figures['start_s']:.1f} s, {figures['outside_mib']:,.0f} MiB beside torch's, replay "
        f"{figures['replay_ms']:.3f} ms{'' if figures['equal'] else ', REPLAY DIFFERS FROM THE EAGER STEP'}"
    )
    if base is None:
        return told
    gains: list[str] = []
    losses: list[str] = []
    for key, what, least in (("start_s", "start", 0.5), ("outside_mib", "memory", 64.0), ("replay_ms", "replay", 0.0)):
        apart = figures[key] - base[key]
        if abs(apart) > max(least, 0.05 * base[key]):
            (gains if apart < 0 else losses).append(what)
    words = [f"helps {', '.join(gains)}"] * bool(gains) + [f"hurts {', '.join(losses)}"] * bool(losses)
    return f"{told}: {'; '.join(words) or 'no difference'}"
