"""What this machine is, what stands in the way, and what of the engine will work on it. Measures little and changes nothing."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from engine.doctor_gpu import Gpu, find_gpus, works_here
from engine.doctor_host import Setting, c_compiler, check_folder, disk_speed, extras, locked_memory, settings_found
from engine.doctor_variants import measure_variants, worth_setting
from engine.fingerprints import software_fields
from engine.process_settings import HELPFUL
from engine.reports import make_console, print_table

_GIB = 2**30


def run_doctor(disk: Path | None = None, *, measure: bool = True) -> dict[str, Any]:
    """Prints what is found and returns it. disk: a folder whose disk is written to and read from, 64 MiB, and left as it was;
    None: the current one, if it can be written to. measure: with a GPU, short child processes try settings of allocator and
    module loading. Raises OSError for a folder that is named and cannot be written to."""
    if disk is not None:
        check_folder(disk)  # measuring the rest takes a minute
    gpus = find_gpus()
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    software = {"python": platform.python_version()} | software_fields(device) | {"C compiler": c_compiler() or "none"}
    works, settings = works_here(gpus), settings_found()
    figures: dict[str, Any] = {
        "software": software,
        "gpus": [asdict(gpu) for gpu in gpus],
        "works": {name: asdict(found) for name, found in works.items()},
        "settings": [asdict(setting) for setting in settings],
        "measured": measure_variants() if gpus and measure else [],
        "set_by_us": dict(HELPFUL),
        "locked_memory": locked_memory(),
        "extras": extras(),
    }
    console = make_console()
    print_table(console, "Software", ("", "version"), software.items())
    _print_gpus(console, gpus)
    title = f"What works on {gpus[0].name if gpus else 'the CPU'}"
    rows = [(name, "yes" if found.works else "no", found.why) for name, found in works.items()]
    print_table(console, title, ("", "works", "because"), rows)
    _print_settings(console, settings)
    for variant in figures["measured"]:
        console.print(f"measured, {variant['name']}: {variant['told']}", markup=False, soft_wrap=True)
    if figures["measured"]:
        figures["worth_setting"] = worth_setting(figures["measured"])
        console.print(f"worth setting here: {_pairs(figures['worth_setting'])}", markup=False, soft_wrap=True)
    console.print(f"set by dflash-engine where you have not: {_pairs(HELPFUL)}", markup=False, soft_wrap=True)
    console.print(f"locked memory: {figures['locked_memory']['told']}", markup=False, soft_wrap=True)
    told = ", ".join(f"{name} {version or 'not installed'}" for name, version in figures["extras"].items())
    console.print(f"optional: {told}", markup=False, soft_wrap=True)
    told, figures["disk"] = _disk(disk)
    console.print(told, markup=False, soft_wrap=True)
    return figures


def _disk(folder: Path | None) -> tuple[str, dict[str, Any]]:
    """In words, and as figures: {} where the current folder cannot be written to."""
    try:
        speed = disk_speed(folder or Path())
    except OSError as error:
        if folder is not None:
            raise
        return (
            f"disk: not measured, the current folder cannot be written to ({error.strerror}); --disk names another",
            {},
        )
    return (
        f"disk of {folder or 'the current folder'}: writes {speed.write_mib_s:,.0f} MiB/s, reads {speed.read_mib_s:,.0f} MiB/s "
        f"({speed.note}), {speed.free_gib:,.1f} GiB free",
        asdict(speed),
    )


def _print_gpus(console: Any, gpus: list[Gpu]) -> None:
    rows = [
        (
            f"{index} {gpu.name}",
            gpu.capability,
            f"{gpu.free_bytes / _GIB:.1f} of {gpu.total_bytes / _GIB:.1f}",
            f"{gpu.shared_memory / 1024:.0f}",
            f"{gpu.processors}",
        )
        for index, gpu in enumerate(gpus)
    ]
    if not rows:
        console.print("no GPU that torch can use: the steps are called on the CPU", markup=False, soft_wrap=True)
        return
    columns = ("GPU", "capability", "GiB free", "KiB shared memory a block", "processors")
    print_table(console, "GPUs", columns, rows)
    for index, gpu in enumerate(gpus):
        console.print(f"GPU {index}: {gpu.held}", markup=False, soft_wrap=True)


def _pairs(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "nothing"


def _print_settings(console: Any, settings: list[Setting]) -> None:
    rows = [(s.name, s.value or "not set", s.verdict, s.why) for s in settings]
    print_table(console, "Settings of the environment", ("", "is", "here", "because"), rows)
