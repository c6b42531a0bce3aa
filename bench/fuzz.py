"""Runs the inputs of a target in processes of their own, so that one that ends its process is found like any other fault."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.fuzz_case import Files, Target, make_files, verdict

# Inputs are of a few KB: what takes more memory or time for one than this was led to it by what the input says.
MOST_MIB, MOST_CPU_S, MOST_WALL_S = 256, 2.0, 60.0
_REPORT_EVERY = 500
# A process has no more than MOST_MIB; a reader that makes a message of its own of what then is raised is seen by the words.
_NO_MEMORY = re.compile(r"MemoryError|alloc", re.IGNORECASE)
_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)|\b[\da-f]{6,}\b|-?[\d.]+")


@dataclass
class Tally:
    """What became of the inputs. messages: refusals by their words alone; faults: kind -> how often, the first input and its
    whole story."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    messages: Counter[str] = field(default_factory=Counter)
    faults: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, index: int, outcome: str, text: str) -> None:
        """One more."""
        self.inputs += 1
        if outcome == "accepted":
            self.accepted += 1
        elif outcome == "refused":
            self.refused += 1
            self.messages[_kind(text)] += 1
        else:
            known = self.faults.setdefault(_kind(text), {"count": 0, "first": index, "what": text[:1000]})
            known["count"] += 1
            if index < known["first"]:
                known |= {"first": index, "what": text[:1000]}

    def merge(self, other: Tally) -> None:
        """Those of another process too."""
        self.inputs += other.inputs
        self.accepted += other.accepted
        self.refused += other.refused
        self.messages += other.messages
        for kind, fault in other.faults.items():
            known = self.faults.setdefault(kind, fault | {"count": 0})
            count = known["count"] + fault["count"]
            self.faults[kind] = (fault if fault["first"] < known["first"] else known) | {"count": count}


def _kind(text: str) -> str:
    return _VARIABLE.sub("#", text)[:120]


def _room() -> tempfile.TemporaryDirectory[str]:
    """A folder in memory, where there is one, which goes when its owner says so: whoever reads in it may die."""
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="dflash-fuzz-", dir=root)


class Runner:
    """Writes inputs into a folder below `room` and reads them there."""

    def __init__(self, target: Target, room: str) -> None:
        """Raises RuntimeError when a seed cannot be read."""
        self._target, self._present = target, dict[str, bytes | Path]()
        self.folder = Path(room) / "case"
        self._warm = False
        for number, seed in enumerate(target.seeds):
            outcome, text = self.run(seed)
            if outcome != "accepted":
                raise RuntimeError(f"{target.name}: expected seed {number} to be read, found {outcome}: {text}")
        self._warm = True

    def run(self, files: Files) -> tuple[str, str]:
        """The verdict, on time too."""
        self._write(files)
        began_s = time.perf_counter()
        outcome, text = verdict(self._target, self.folder, files)
        if outcome == "refused" and _NO_MEMORY.search(text):
            return "fault", f"more than {MOST_MIB} MiB were asked for: {text[:300]}"
        if self._warm and outcome != "fault" and time.perf_counter() - began_s > MOST_CPU_S:
            # Others may have had the processor: only its own time counts, which costs too much to ask for every input.
            began_s = time.process_time()
            outcome, text = verdict(self._target, self.folder, files)
            if (taken_s := time.process_time() - began_s) > MOST_CPU_S:
                return "fault", f"it took {taken_s:.1f} s: {outcome} {text[:300]}"
        return outcome, text

    def _write(self, files: Files) -> None:
        self.folder.mkdir(exist_ok=True)
        for name in [name for name, content in self._present.items() if files.get(name) != content]:
            (self.folder / name).unlink(missing_ok=True)
            del self._present[name]
        for name, content in files.items():
            if name in self._present:
                continue
            file = self.folder / name
            if "/" in name:
                file.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                file.symlink_to(content)
            else:
                file.write_bytes(content)
            self._present[name] = content


@contextmanager
def _alone() -> Iterator[None]:
    """One thread, no warnings, and nothing is remembered of one input for the next."""
    threads, cache = torch.get_num_threads(), os.environ.get("XDG_CACHE_HOME")
    torch.set_num_threads(1)
    os.environ["XDG_CACHE_HOME"] = os.devnull
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        del os.environ["XDG_CACHE_HOME"]
        if cache is not None:
            os.environ["XDG_CACHE_HOME"] = cache


def run_here(target: Target, indices: Sequence[int], seed: int = 0) -> Tally:
    """In this process: an input that ends it ends all."""
    tally = Tally()
    with _alone(), _room() as room:
        runner = Runner(target, room)
        for index in indices:
            tally.add(index, *runner.run(make_files(target, seed, index)))
    return tally


def _work(
    make: Callable[[], Target], room: str, indices: Sequence[int], seed: int, place: Any, out: Connection
) -> None:
    """A process's part: tallies of _REPORT_EVERY inputs each, and `place` always at the input under way."""
    with _alone():
        target = make()
        runner = Runner(target, room)
        with open("/proc/self/statm") as statm:
            taken = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + (MOST_MIB << 20),) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for start in range(0, len(indices), _REPORT_EVERY):
            tally = Tally()
            for index in indices[start : start + _REPORT_EVERY]:
                place.value = index
                tally.add(index, *runner.run(make_files(target, seed, index)))
            out.send(tally)
    out.send(None)


class _Part:
    """One process and the inputs that it has yet to answer for."""

    def __init__(self, make: Callable[[], Target], indices: Sequence[int], seed: int, tally: Tally) -> None:
        self._make, self._left, self._seed, self._tally = make, list(indices), seed, tally
        self.done = False
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._room = _room()
        self._place = context.Value("q", -1, lock=False)
        self._in, out = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_work, args=(self._make, self._room.name, self._left, self._seed, self._place, out), daemon=True
        )
        # Address space is what is limited: every arena of malloc would reserve some for nothing.
        before = os.environ.get("MALLOC_ARENA_MAX")
        os.environ["MALLOC_ARENA_MAX"] = before or "1"
        self._process.start()
        if before is None:
            del os.environ["MALLOC_ARENA_MAX"]
        out.close()
        self._seen, self._seen_s = -1, time.monotonic()

    def look(self) -> None:
        """Takes what the process has to say; one that died or stopped is a finding, and another takes its place."""
        try:
            while self._in.poll(0.05):
                tally = self._in.recv()
                if tally is None:
                    self._process.join()
                    self._room.cleanup()
                    self.done = True
                    return
                self._tally.merge(tally)
                del self._left[: tally.inputs]
        except EOFError:
            self._process.join()
            self._blame(f"the process ended with code {self._process.exitcode}")
            return
        if self._place.value != self._seen:
            self._seen, self._seen_s = self._place.value, time.monotonic()
        elif self._seen >= 0 and time.monotonic() - self._seen_s > MOST_WALL_S:
            self._process.kill()
            self._process.join()
            self._blame(f"no answer within {MOST_WALL_S:.0f} s")

    def _blame(self, text: str) -> None:
        self._room.cleanup()
        index = self._place.value
        if index < 0:
            raise RuntimeError(f"{text} before the first input was read")
        self._tally.add(index, "fault", text)
        # What it had found since its last report is found again.
        self._left.remove(index)
        self._start()


def run_inputs(
    make: Callable[[], Target],
    inputs: int,
    *,
    seed: int = 0,
    first: int = 0,
    processes: int = 1,
    progress: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Inputs first .. first + inputs - 1 of a target, which every process makes for itself (make: importable by name)."""
    tally, indices = Tally(), range(first, first + inputs)
    parts = [_Part(make, indices[number::processes], seed, tally) for number in range(min(processes, inputs))]
    while any(not part.done for part in parts):
        for part in parts:
            if not part.done:
                part.look()
        progress(tally)
    return tally


def keep_faults(target: Target, tally: Tally, seed: int, folder: Path) -> None:
    """The first input of every kind of fault as files, with its story beside them."""
    for fault in tally.faults.values():
        case = folder / f"{target.name}-{seed}-{fault['first']}"
        shutil.rmtree(case, ignore_errors=True)
        for name, content in make_files(target, seed, fault["first"]).items():
            file = case / "files" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                file.symlink_to(content)
            else:
                file.write_bytes(content)
        case.mkdir(exist_ok=True)
        (case / "why.json").write_text(json.dumps(fault, indent=1) + "\n")


def row(name: str, tally: Tally, seconds: float) -> dict[str, Any]:
    """A line of the table."""
    return {
        "files": name,
        "inputs": tally.inputs,
        "read to the end": tally.accepted,
        "refused in one line": tally.refused,
        "different messages": len(tally.messages),
        "anything else": tally.inputs - tally.accepted - tally.refused,
        "inputs/s": round(tally.inputs / seconds),
    }


def as_record(tally: Tally) -> dict[str, Any]:
    """For JSON; the commonest messages alone."""
    return asdict(tally) | {"messages": dict(tally.messages.most_common(20))}
