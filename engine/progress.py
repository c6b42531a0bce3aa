"""How a run tells people where it is: a block of figures at the foot of a terminal, plain lines anywhere else, or nothing."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from engine.reports import PatientConsole
from engine.watch import device_share

# Redrawing takes a millisecond or two; it happens in the loop's own thread, because another one would take turns from it.
_SECONDS_BETWEEN = 0.5


class Display:
    """Where a run's lines for people go. With live, step lines become figures that stay in place, and all other lines scroll by
    above them."""

    def __init__(self, plain: Console, *, live: bool, console: Console | None = None) -> None:
        """plain: for lines, when nothing is live. console: the terminal, stderr by default."""
        self._plain = plain
        self._live: Live | None = None
        if live:
            console = console or PatientConsole(stderr=True, highlight=False)
            self._live = Live(console=console, auto_refresh=False, transient=False)
        self._began_s = self._drawn_s = time.perf_counter()
        self._first_step: int | None = None
        self._step, self._total, self._record = 0, 0, dict[str, Any]()
        self._batches: Counter[str] = Counter()

    def start(self) -> None:
        """From here on the figures are shown; the ETA counts from here."""
        self._began_s = time.perf_counter()
        if self._live is not None:
            self._live.start()

    def say(self, text: str) -> None:
        """A line for people."""
        shown = self._live is not None and self._live.is_started
        console = self._live.console if self._live is not None and shown else self._plain
        with self._while_there_is_a_terminal():
            console.print(text, markup=False, soft_wrap=True)

    def step(self, step: int, total: int) -> None:
        """A step was queued; redraws when that was not done for a while."""
        if self._first_step is None:
            self._first_step = step - 1
        self._step, self._total = step, total
        if self._live is not None and time.perf_counter() - self._drawn_s > _SECONDS_BETWEEN:
            self._draw()

    def figures(self, record: Mapping[str, Any], total: int) -> None:
        """A line of metrics has arrived."""
        self._record, self._total = dict(record), total
        self._batches.update({name: int(b["batches"]) for name, b in record["machine"]["buckets"].items()})
        if self._live is None:
            self.say(step_line(record, total, self._eta_s()))
        else:
            self._draw()

    def stop(self) -> None:
        """The figures stay as they are, what is said from here on comes below. May be called twice."""
        if self._live is not None and self._live.is_started:
            self._draw()
        live, self._live = self._live, None
        if live is not None and live.is_started:
            with self._while_there_is_a_terminal():
                live.stop()

    def _draw(self) -> None:
        if self._live is None or not self._live.is_started:
            return
        self._drawn_s = time.perf_counter()
        figures = block(self._step, self._total, self._eta_s(), self._record, self._batches)
        with self._while_there_is_a_terminal():
            self._live.update(figures, refresh=True)

    @contextmanager
    def _while_there_is_a_terminal(self) -> Iterator[None]:
        """Where it was closed, or nobody reads the pipe any more, or a log's disk is full: from there on nothing is said, and
        training goes on; metrics.jsonl has everything."""
        try:
            yield
        except OSError:
            live, self._live = self._live, None
            if live is not None:
                with suppress(OSError):
                    live.stop()
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for all that is written there later

    def _eta_s(self) -> float:
        done = self._step - (self._first_step or 0)
        if done <= 0:
            return math.nan
        return (time.perf_counter() - self._began_s) / done * (self._total - self._step)


def step_line(record: Mapping[str, Any], total: int, eta_s: float = math.nan) -> str:
    """A line of metrics in one line of text."""
    skipped = record["skipped_steps"]
    return (
        f"step {record['step']}/{total}, epoch {record['epoch'] + 1}, ETA {_hours(eta_s)}: "
        f"loss {record['loss']:.4f}, accuracy {record['accuracy']:.3f}, "
        f"accepted length {record['accept_len']:.3f}, {record['tokens_per_s']:,.0f} tokens/s"
        + (f", {skipped} steps skipped" if skipped else "")
    )


def block(step: int, total: int, eta_s: float, record: Mapping[str, Any], batches: Mapping[str, int]) -> Group:
    """All figures, as a few rows for a terminal. record: the last line of metrics, {} before the first; step may be ahead of
    it. batches: by bucket, of this process."""
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(f"step {step:,}/{total:,}", style="bold"),
        ProgressBar(total=max(1, total), completed=step, width=30),
        f"{step / max(1, total):.1%}",
        f"epoch {record['epoch'] + 1}" if record else "",
        f"ETA {_hours(eta_s)}",
    )
    if not record:
        return Group(head, Text("the first figures come with the first line of metrics (run.log_every)", style="dim"))
    machine = record["machine"]
    skipped = f"{record['skipped_steps']} skipped" if record["skipped_steps"] else ""
    per_step_ms = machine["host_s"]["waiting for input"] * 1e3 / max(1, record["micro_batches"])
    memory = ", ".join(f"{name} {mib / 1024:.1f} GiB" for name, mib in machine["memory_mib"].items())
    rows = (
        ("learning", f"loss {record['loss']:.4f}", f"accuracy {record['accuracy']:.3f}", skipped),
        (
            "drafts",
            f"accept length {record['accept_len']:.3f}",
            f"{record['tokens_per_verification']:.3f} tokens per verification",
        ),
        (
            "useful tokens/s",
            f"{record['tokens_per_s']:,.0f} now",
            f"{machine['tokens_per_s_mean']:,.0f} mean",
            f"padding {record['padding']:.1%}",
        ),
        ("device", f"busy {device_share(machine):.1%}", f"input wait {per_step_ms:.2f} ms a batch"),
        ("memory", memory),
        ("batches", "   ".join(f"{name}: {count:,}" for name, count in sorted(batches.items()))),
    )
    body = Table.grid(padding=(0, 2))
    body.add_column(style="dim", no_wrap=True)
    body.add_column()
    for name, *cells in rows:
        body.add_row(name, "   ".join(cell for cell in cells if cell))
    return Group(head, body)


def _hours(seconds: float) -> str:
    return "?" if math.isnan(seconds) else str(timedelta(seconds=round(seconds)))
