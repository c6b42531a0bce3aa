"""Options that every measurement has. Nothing heavy is imported: `--help` never waits for torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import click

from engine.cli_options import config_option, json_option, set_option

Command = Callable[..., Any]

workload_option = click.option(
    "--workload",
    "workloads",
    type=click.Choice(["W1", "W2", "W3", "tiny"]),
    multiple=True,
    help="A named shape: W1 0.6B-class, W2 8B, W3 27B, tiny for the CPU; may be repeated.",
)
out_option = click.option(
    "--out", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Write the JSON there too."
)
plot_option = click.option(
    "--plot", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Draw the figures into this PNG."
)


def measure_options(repeats: int) -> Callable[[Command], Command]:
    """--config, --set, --repeats, --json, --out and --plot; `repeats` is the default of its own."""
    repeats_option = click.option(
        "--repeats",
        type=click.IntRange(min=1),
        default=repeats,
        show_default=True,
        help="Timed calls; the median counts.",
    )
    options = (config_option, set_option, repeats_option, json_option, out_option, plot_option)
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)
