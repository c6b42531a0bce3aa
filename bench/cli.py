"""The console script `dflash-engine`: the engine's commands and the measurements."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from engine.cli import cli, config_option, echo_json, json_option, run, set_option
from engine.settings import load_settings


@cli.group()
def bench() -> None:
    """Measure time and memory; a speed is shown only after replay and eager gave equal results."""


@bench.command()
@click.argument("data", required=False, type=click.Path(path_type=Path))
@click.option(
    "--workload",
    "workloads",
    type=click.Choice(["W1", "W2", "W3"]),
    multiple=True,
    help="Random data of a named shape instead of DATA: W1 0.6B-class, W2 8B, W3 27B; may be repeated.",
)
@config_option
@set_option
@click.option(
    "--repeats", type=click.IntRange(min=1), default=20, show_default=True, help="Timed steps; the median counts."
)
@json_option
@click.option(
    "--out", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Write the JSON there too."
)
def buckets(
    data: Path | None,
    workloads: Sequence[str],
    config: str | None,
    overrides: Sequence[str],
    repeats: int,
    as_json: bool,
    out: Path | None,
) -> None:
    """Tokens/s, milliseconds and memory of each bucket, eager against replay in one run.

    The buckets are those of the plan for the dataset in the folder DATA, or those of the named workloads.
    """
    if (data is None) == (not workloads):
        raise click.UsageError("Expected either DATA or --workload, found " + ("neither." if data is None else "both."))
    settings = load_settings(config, overrides)
    from bench.buckets import run as run_buckets

    figures = run_buckets(data, settings, workloads=tuple(workloads), repeats=repeats, out=out)
    echo_json(figures, as_json)


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command line (None: the process's own) and returns its exit code."""
    return run(cli, args)


if __name__ == "__main__":
    sys.exit(main())
