"""Who holds a GPU's memory, as nvidia-smi tells it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import torch

_MIB = 2**20


def held_on(device: torch.device) -> str:
    """Who holds what is not free on this GPU, in words."""
    free, total = torch.cuda.mem_get_info(device)
    return memory_holders(str(getattr(torch.cuda.get_device_properties(device), "uuid", "")), total - free)


def memory_holders(uuid: str, held_bytes: int, ask: Callable[[], str | None] | None = None) -> str:
    """The processes on the GPU with this uuid and their MiB, in words; what the driver will not tell is said too. ask: gives
    nvidia-smi's answer, None where there is no nvidia-smi."""
    answer = (ask or _ask_nvidia_smi)()
    held = f"{held_bytes / _MIB:,.0f} MiB are held"
    if answer is None:
        return f"{held}; by whom, nvidia-smi would tell, which was not found here"
    told = [_told(line) for line in answer.splitlines() if line.count(",") >= 3 and uuid in line.split(",")[0]]
    if not told:
        return f"{held}; by no process that can be seen from here (the driver itself, or another container)"
    return f"{held}: {'; '.join(told)}"


def all_holders(ask: Callable[[], str | None] | None = None) -> str:
    """The processes on all GPUs and their MiB, in words, for when this process has no room to ask which GPU is its own."""
    answer = (ask or _ask_nvidia_smi)()
    if answer is None:
        return "by whom it is held, nvidia-smi would tell, which was not found here"
    told = [_told(line) for line in answer.splitlines() if line.count(",") >= 3]
    return f"held by {'; '.join(told)}" if told else "held by no process that can be seen from here"


def _told(line: str) -> str:
    """A line of nvidia-smi's in words."""
    fields = [field.strip() for field in line.split(",")]
    # A process's name may hold commas.
    pid, name, used = fields[1], ", ".join(fields[2:-1]), fields[-1]
    mine = ", this one" if pid == str(os.getpid()) else ""
    return f"{name} (pid {pid}{mine}) {f'{int(used):,} MiB' if used.isdigit() else 'an untold amount'}"


def _ask_nvidia_smi() -> str | None:
    command = [
        "nvidia-smi",
        "--query-compute-apps=gpu_uuid,pid,process_name,used_memory",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
