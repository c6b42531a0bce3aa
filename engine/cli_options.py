"""What commands share: options, exit codes, and how figures are told."""

import json
import math
from pathlib import Path
from typing import Any

import click

from engine.settings import Settings
from engine.settings_fields import SettingsError

PROGRAM = "dflash-engine"
EXIT_FAILED, EXIT_USAGE, EXIT_STALE, EXIT_INTERRUPTED = 1, 2, 3, 130


class NewFile(click.Path):
    """A file to write at the end of the work: that its folder exists is seen before it."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A click.BadParameter for a file in a folder that does not exist."""
        file: Path = super().convert(value, param, ctx)  # type: ignore[assignment]
        if not file.parent.is_dir():
            self.fail(f"expected a file in a folder that exists, found '{file}'; make the folder first.", param, ctx)
        return file


json_option = click.option("--json", "as_json", is_flag=True, help="End stdout with one line of JSON: the figures.")
config_option = click.option(
    "--config", metavar="FILE", type=click.Path(dir_okay=False), help="TOML file of settings; defaults without it."
)
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Change one setting, as in run.device=cpu; may be repeated. Names: docs/settings.md.",
)


def require_data(settings: Settings) -> None:
    """Raises SettingsError where no dataset is named."""
    if not settings.data.folders:
        raise SettingsError(
            "data.path: expected a dataset's folder, found nothing. Set it in [data] or with --set data.path=FOLDER."
        )


def echo_json(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(_without_nan(figures)))


def _without_nan(value: Any) -> Any:
    """The same with null for numbers that are not finite: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
