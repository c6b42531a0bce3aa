"""`python -m bench.reliability fuzz`: damaged and hostile files for every reader; only clean errors count as an answer."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bench.fuzz import Tally, as_record, keep_faults, row, run_inputs
from bench.fuzz_case import Target
from bench.fuzz_targets import TARGETS
from bench.timing import provenance, write_result


def make_target(name: str) -> Target:
    """A target of that name, in any process."""
    return TARGETS[name]()


@click.command()
@click.argument("targets", nargs=-1, type=click.Choice(list(TARGETS)))
@click.option("--inputs", type=click.IntRange(min=1), default=100_000, show_default=True, help="Of each target.")
@click.option("--first", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the first input.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed and number make the same input.")
@click.option("--processes", type=click.IntRange(min=1), default=2, show_default=True, help="Processes that read.")
@click.option(
    "--keep", type=click.Path(path_type=Path), default=Path("runs/fuzz"), show_default=True, help="For faults."
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the record there.")
def fuzz(
    targets: Sequence[str], inputs: int, first: int, seed: int, processes: int, keep: Path, out: Path | None
) -> None:
    """Damaged files of each of TARGETS (all of them if none is named), read as the commands read them.

    An input counts as answered when it is read to the end and is what it says it is, or refused by one line that names the
    file. Anything else - another exception, a second line, more than 256 MiB or 2 s, the end of the process - is a fault: the
    exit code is 1, and the first input of its kind is kept as files under --keep.
    """
    rows, details = [], {}
    figures: dict[str, Any] = {}
    where = provenance()
    for name in targets or tuple(TARGETS):
        make, began_s = functools.partial(make_target, name), time.perf_counter()
        tally = run_inputs(make, inputs, seed=seed, first=first, processes=processes, progress=_Said(name))
        rows.append(row(name, tally, time.perf_counter() - began_s))
        details[name] = as_record(tally)
        keep_faults(make(), tally, seed, keep)
        for fault in tally.faults.values():
            click.echo(f"{name} {fault['first']} ({fault['count']} of its kind): {fault['what']}")
        click.echo(", ".join(f"{key} {value}" for key, value in rows[-1].items()))
        figures = {"where": where, "inputs": inputs, "first": first, "seed": seed, "table": rows, "targets": details}
        # After every target: what was found is not lost with the rest.
        write_result(figures, out)
    if any(detail["faults"] for detail in details.values()):
        raise SystemExit(1)


class _Said:
    """A line now and then."""

    def __init__(self, name: str) -> None:
        self._name, self._next_s = name, time.monotonic() + 20

    def __call__(self, tally: Tally) -> None:
        if time.monotonic() > self._next_s:
            self._next_s = time.monotonic() + 20
            click.echo(f"{self._name}: {tally.inputs} inputs, {len(tally.faults)} kinds of fault", err=True)
