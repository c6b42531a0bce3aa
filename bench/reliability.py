"""The commands behind docs/reliability.md: `python -m bench.reliability COMMAND`. Each is a file of its own,
bench/reliability_COMMAND.py, which holds a click command of that name and is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click

_PREFIX = "reliability_"


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every file of commands that there is."""
        names = (path.stem.removeprefix(_PREFIX) for path in Path(__file__).parent.glob(f"{_PREFIX}*.py"))
        return sorted(name.replace("_", "-") for name in names if name != "tables")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """bench/reliability_CMD_NAME.py's command; None where there is no such file."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = cmd_name.replace("-", "_")
        command: click.Command = getattr(import_module(f"bench.{_PREFIX}{module}"), module)
        return command


@click.group(cls=_Commands)
def main() -> None:
    """Faults, kills, fuzzing and long runs, measured."""


if __name__ == "__main__":
    main()
