"""The commands about graphs: `graphs status` and `graphs build`."""

from collections.abc import Sequence

import click

from engine.cli_options import EXIT_STALE, echo_json, json_option, require_data, set_option
from engine.settings import load_settings


@click.group(short_help="Capture a run's graphs; see whether they hold.")
def graphs() -> None:
    """Capture the graphs of a run's settings, and see whether those that were captured still hold."""


@graphs.command(short_help="Tell which buckets' graphs are fresh or stale.")
@click.argument("config", required=False, type=click.Path(dir_okay=False))
@set_option
@json_option
def status(config: str | None, overrides: Sequence[str], as_json: bool) -> None:
    """Fresh, stale or not built: every bucket of the TOML file CONFIG against graphs.json in run.output.

    Stale names what changed. Exit codes: 0 all fresh, 3 any bucket stale or not built. docs/graphs.md
    """
    settings = load_settings(config, overrides)
    require_data(settings)
    from engine.graphs_status import show_status

    figures = show_status(settings)
    echo_json(figures, as_json)
    if figures.get("fresh") is False:
        click.get_current_context().exit(EXIT_STALE)


@graphs.command(short_help="Capture, verify and measure a run's graphs.")
@click.argument("config", required=False, type=click.Path(dir_okay=False))
@set_option
@json_option
def build(config: str | None, overrides: Sequence[str], as_json: bool) -> None:
    """Compile, capture, verify and measure the graphs of the TOML file CONFIG, write graphs.json into run.output, and end.

    What stays is that file and the compiled kernels in the cache: graphs live as long as their process. docs/graphs.md
    """
    settings = load_settings(config, overrides)
    require_data(settings)
    from engine.graphs_build import build_graphs

    echo_json(build_graphs(settings), as_json)
