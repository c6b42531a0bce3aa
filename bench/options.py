"""Options that every measurement has. Nothing heavy is imported: `--help` never waits for torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce, wraps
from pathlib import Path
from typing import Any

import click

from engine.cli_options import NewFile, config_option, echo_json, json_option, set_option
from engine.settings import Settings, load_settings

Command = Callable[..., Any]

workload_option = click.option(
    "--workload",
    "workloads",
    type=click.Choice(["W1", "W2", "W3", "tiny"]),
    multiple=True,
    help="A named shape: W1 0.6B-class, W2 8B, W3 27B, tiny for the CPU; may be repeated.",
)
out_option = click.option("--out", metavar="FILE", type=NewFile(), help="Write the JSON there too.")
plot_option = click.option("--plot", metavar="FILE", type=NewFile(), help="Draw the figures into this PNG.")


@dataclass(frozen=True)
class Measure:
    """What the options of measure_options ask for."""

    config: str | None
    overrides: Sequence[str]
    repeats: int
    as_json: bool
    out: Path | None
    plot: Path | None

    def settings(self, folders: Sequence[Path] = ()) -> Settings:
        """Those of --config and --set; folders instead of data.path."""
        return load_settings(self.config, self.overrides, folders=folders)

    @property
    def asked(self) -> dict[str, Any]:
        """repeats, out and plot, as every measurement's run() takes them."""
        return {"repeats": self.repeats, "out": self.out, "plot": self.plot}

    def tell(self, figures: dict[str, Any]) -> None:
        """The record as the last line, with --json."""
        echo_json(figures, self.as_json)


def measure_options(repeats: int) -> Callable[[Command], Command]:
    """--config, --set, --repeats, --json, --out and --plot as one argument `measure`; `repeats` is the default of its own."""
    repeats_option = click.option(
        "--repeats",
        type=click.IntRange(min=1),
        default=repeats,
        show_default=True,
        help="Timed calls; the median counts.",
    )
    options = (config_option, set_option, repeats_option, json_option, out_option, plot_option)

    def decorate(command: Command) -> Command:
        @wraps(command)
        def measuring(
            *,
            config: str | None,
            overrides: Sequence[str],
            repeats: int,
            as_json: bool,
            out: Path | None,
            plot: Path | None,
            **its_own: Any,
        ) -> Any:
            return command(measure=Measure(config, overrides, repeats, as_json, out, plot), **its_own)

        return reduce(lambda made, option: option(made), reversed(options), measuring)

    return decorate
