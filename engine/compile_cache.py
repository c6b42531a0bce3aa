"""Compiled kernels stay on disk, one folder for every combination of torch, Triton, CUDA, driver and GPU, so that a second start
of the same run compiles nothing and one under other software begins with a clean folder.

Triton and Inductor know themselves what to compile again when a source, a shape or an option changes. None of our kernels is
autotuned, so there are no choices to keep beside them; what Inductor chooses by timing it keeps in its own folder itself.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from engine.fingerprints import software_fields
from engine.settings import Settings
from engine.settings_fields import SettingsError
from graphs.fingerprint import Fingerprint

FILE = "cache.json"
VERSION = 1
_FOLDERS = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
# What was set here, not by the user: another run of this process may set it again.
_set: dict[str, str] = {}


def use_compile_cache(settings: Settings, device: torch.device, say: Callable[[str], None]) -> Path | None:
    """Points Triton and Inductor to the folder for this software and device and returns it; None on the CPU, where nothing is
    compiled. TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR win where the user has set them. To be called before anything is
    compiled. Raises SettingsError for a folder that cannot be written to."""
    if device.type != "cuda":
        return None
    threading.Thread(target=_name_triton, name="triton-key", daemon=True).start()
    folder = open_cache(base_folder(settings), software_fields(device), say)
    for variable, name in _FOLDERS.items():
        if os.environ.get(variable) == _set.get(variable):
            _set[variable] = os.environ[variable] = str(folder / name)
    if settings.model.attention == "flex":
        threading.Thread(target=_load_compiler, name="compiler-import", daemon=True).start()
    return folder


def _name_triton() -> None:
    """Triton's caches name their entries after a hash of all of Triton, half a GB. It is reckoned once a process, so here, beside
    the reading of data, instead of before the first kernel."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        return  # no Triton, or one that keeps it elsewhere: its first kernel reckons it
    triton_key()


def _load_compiler() -> None:
    """What torch.compile loads for its first function, seconds of imports, while memory is taken and weights are drawn. The first
    is what engine/ops/attention_flex.py begins with: who imports it meanwhile waits there, and does not come in from another side
    of a circle of imports."""
    for name in ("torch.nn.attention.flex_attention", "torch._dynamo", "torch._inductor.compile_fx"):
        importlib.import_module(name)


def base_folder(settings: Settings) -> Path:
    """run.cache, or the user's folder for caches."""
    if settings.run.cache:
        return Path(settings.run.cache).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-engine"


def open_cache(base: Path, fields: Mapping[str, str], say: Callable[[str], None]) -> Path:
    """The folder for these software fields, made or emptied where it is not of this version: what another version wrote, or
    what cannot be read, is not used. Raises SettingsError for one that cannot be written to."""
    folder = base / Fingerprint.of(fields).digest
    written = {"format": "dflash-engine cache", "version": VERSION, "software": dict(fields)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = _read(folder / FILE)
        if found == written:
            return folder
        stale = [folder / name for name in _FOLDERS.values() if (folder / name).exists()]
        if stale:
            what = (
                "another version" if isinstance(found, dict) and found.get("version") != VERSION else "something else"
            )
            say(f"{folder}: compiled kernels of {what} are not used and are compiled again")
        for path in stale:
            shutil.rmtree(path)
        temporary = folder / f".{FILE}.{os.getpid()}"
        temporary.write_text(json.dumps(written, indent=1) + "\n")
        temporary.replace(folder / FILE)
    except OSError as error:
        raise SettingsError(
            f"run.cache: expected a folder that can be written to, found {folder} ({error.strerror}); choose another"
        ) from error
    return folder


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
