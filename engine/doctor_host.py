"""What the doctor asks of the machine beside its GPU: environment, disk, limits, optional packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.process_settings import ALLOCATOR, MODULE_LOADING, set_by_us

_MIB = 2**20
_WRITE_MIB = 64
_EXTRAS = {
    "transformers": "hf",
    "pyarrow": "arrow",
    "matplotlib": "plots",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}


@dataclass(frozen=True)
class Setting:
    """An environment variable that matters here. value: "" where it is not set. verdict: good | no gain | hurts."""

    name: str
    value: str
    verdict: str
    why: str


@dataclass(frozen=True)
class DiskSpeed:
    """Of one file, flushed; note says what the figure for reading is worth."""

    write_mib_s: float
    read_mib_s: float
    free_gib: float
    note: str


def settings_found(env: Mapping[str, str] = os.environ) -> list[Setting]:
    """The allocator's and the module loader's setting, always, and every other one that is set and gets in the way."""
    name = next((name for name in ALLOCATOR if env.get(name)), ALLOCATOR[0])
    found = [_allocator(name, env.get(name, ""), env), _module_loading(env.get(MODULE_LOADING, ""))]
    found = [
        Setting(s.name, s.value, "good", "set by dflash-engine, because measuring has shown that it helps")
        if s.value and set_by_us(s.name, s.value)
        else s
        for s in found
    ]
    for name, why in _IN_THE_WAY.items():
        value = env.get(name, "")
        if value.strip().lower() not in ("", "0", "false"):
            found.append(Setting(name, value, "hurts", why))
    if env.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        why = "copies to the device wait behind the step: one hardware queue for all streams; unset it"
        found.append(Setting("CUDA_DEVICE_MAX_CONNECTIONS", "1", "hurts", why))
    if "CUDA_VISIBLE_DEVICES" in env:
        value = env["CUDA_VISIBLE_DEVICES"]
        hidden = value.strip() in ("", "-1")
        why = "every GPU is hidden from the engine; unset it" if hidden else "the engine takes the first of these"
        found.append(Setting("CUDA_VISIBLE_DEVICES", value or "(empty)", "hurts" if hidden else "good", why))
    return found


_IN_THE_WAY = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every launch, so that nothing is queued ahead; unset it",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "a capture may not call cudaMalloc, and without the cache it must; unset it",
    "TRITON_INTERPRET": "Triton's kernels run in Python, on the host; unset it",
    "TORCH_COMPILE_DISABLE": 'attention = "flex" is not compiled and would be dense; unset it',
    "TORCHDYNAMO_DISABLE": 'attention = "flex" is not compiled and would be dense; unset it',
}


def _allocator(name: str, value: str, env: Mapping[str, str]) -> Setting:
    options = {key.strip(): told.strip().lower() for key, _, told in (part.partition(":") for part in value.split(","))}
    if options.get("backend") == "cudamallocasync":
        why = "this backend counts no allocations, so that --check and the reports would be blind; unset it"
        return Setting(name, value, "hurts", why)
    if options.get("expandable_segments") == "true":
        if env.get("NCCL_GRAPH_REGISTER") == "1":
            why = "NCCL cannot register buffers in such segments below sm_100; set NCCL_GRAPH_REGISTER=0 or unset this"
            return Setting(name, value, "hurts", why)
        why = "it is against fragments, and after the captures nothing is allocated that could make any"
        return Setting(name, value, "no gain", why)
    if value:
        return Setting(name, value, "no gain", "after the captures nothing is allocated: what it tunes is not in use")
    return Setting(
        name, "", "good", "the graphs have a pool of their own, largest first, and allocate nothing after it"
    )


def _module_loading(value: str) -> Setting:
    name = MODULE_LOADING
    if value.upper() == "EAGER":
        why = "every kernel of every library is loaded at the start: seconds and device memory for kernels nobody calls"
        return Setting(name, value, "hurts", why)
    why = "kernels are loaded when first called, and every step is called before it is captured"
    return Setting(name, value, "good", why)


def check_folder(folder: Path) -> None:
    """Raises NotADirectoryError where there is no such folder."""
    if not folder.is_dir():
        raise NotADirectoryError(
            f"{folder}: expected a folder to measure the disk of, found none; make it or name another"
        )


def disk_speed(folder: Path, *, mib: int = _WRITE_MIB) -> DiskSpeed:
    """Writes a file of `mib` MiB that does not compress, flushes it, reads it, removes it. Raises OSError."""
    folder = Path(folder)
    check_folder(folder)
    block = os.urandom(4 * _MIB)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".dflash-engine-doctor-") as file:
        start = time.perf_counter()
        for _ in range(max(1, mib // 4)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        write_s = time.perf_counter() - start
        written = file.tell()
        note = "from the system's cache"
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            note = "after asking the system to drop its cache"
        start = time.perf_counter()
        with open(file.name, "rb", buffering=0) as again:
            while again.read(4 * _MIB):
                pass
        read_s = time.perf_counter() - start
    write, read = (written / _MIB / max(1e-9, seconds) for seconds in (write_s, read_s))
    return DiskSpeed(write, read, shutil.disk_usage(folder).free / 2**30, note)


def locked_memory() -> dict[str, Any]:
    """RLIMIT_MEMLOCK in bytes (None: no limit), and what it means here."""
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    limit = "no limit" if soft is None else f"at most {soft / _MIB:,.1f} MiB"
    why = "CUDA pins memory through its driver, which this does not bound"
    if soft is not None:
        why += "; NCCL over InfiniBand is bound by it: ulimit -l unlimited"
    return {"soft_bytes": soft, "hard_bytes": hard, "told": f"{limit} ({why})"}


def extras() -> dict[str, str]:
    """Version of every optional package, "" for one that is not installed, by "package [extra]"."""
    return {f"{name} [{extra}]": _version(name) for name, extra in _EXTRAS.items()}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def c_compiler() -> str:
    """What Triton will make its launchers with, or ""."""
    wanted = [os.environ.get("CC", ""), "clang", "gcc"]
    return next((found for name in wanted if name and (found := shutil.which(name))), "")
