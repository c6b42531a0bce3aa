"""Where a run's records go beside metrics.jsonl: TensorBoard, Weights & Biases, or whatever has these two functions."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from engine.settings import Settings
from engine.settings_fields import SettingsError

_WANDB_ID = "wandb-id.txt"


class Sink(Protocol):
    """write gets the numbers of one record by name, steps ascending; close is called once, at the end of the process."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run's folder; what an earlier process wrote of steps that are done again is hidden."""

    def __init__(self, folder: Path, settings: Settings, start_step: int, quiet: bool) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(
            str(folder / "tensorboard"), purge_step=start_step + 1 if start_step else None
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a process that is killed has written what metrics.jsonl has

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run there with the settings as its config; who, where to and offline or not are its own environment variables (WANDB_*).
    A process that takes up the run writes on in the same one."""

    def __init__(self, folder: Path, settings: Settings, start_step: int, quiet: bool) -> None:
        import wandb

        known = folder / _WANDB_ID
        if not (start_step and known.is_file()):
            known.write_text(uuid.uuid4().hex + "\n")
        self._run: Any = wandb.init(
            id=known.read_text().strip(),
            resume="allow",
            name=folder.resolve().name,
            dir=str(folder),
            config=settings.to_dict(),
            settings={"silent": True} if quiet else {},
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


# By name in run.sinks: the package that is asked for, and what opens it.
SINKS: dict[str, tuple[str, Callable[[Path, Settings, int, bool], Sink]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", WeightsAndBiases),
}


def require_sinks(names: Sequence[str]) -> None:
    """Raises SettingsError when a sink's package is missing."""
    for name in names:
        package, _ = SINKS[name]
        if importlib.util.find_spec(package) is None:
            raise SettingsError(
                f"run.sinks: expected the package {package} for {name}, found none; pip install 'dflash-engine[{name}]'"
            )


class Sinks:
    """All sinks of a run. One that fails is said and left out from there on: training goes on, metrics.jsonl has everything."""

    def __init__(
        self, folder: Path, settings: Settings, start_step: int, say: Callable[[str], None], *, quiet: bool = False
    ) -> None:
        """quiet: what sinks say on the terminal by themselves is left out. Raises SettingsError when one cannot be opened."""
        self._say = say
        self._open: dict[str, Sink] = {}
        require_sinks(settings.run.sinks)
        for name in settings.run.sinks:
            try:
                self._open[name] = SINKS[name][1](folder, settings, start_step, quiet)
            except Exception as error:  # whatever a foreign library raises
                self.close()
                why = " ".join(str(error).split()) or type(error).__name__
                raise SettingsError(
                    f"run.sinks: expected {name} to start, found: {why}; leave it out or mend it"
                ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """The record's numbers, by flat names. Events have none that a chart could show."""
        if "event" not in record:
            numbers = flat({key: value for key, value in record.items() if key != "step"})
            self._each(lambda sink: sink.write(record["step"], numbers))

    def close(self) -> None:
        """Closes what is open."""
        self._each(lambda sink: sink.close())
        self._open.clear()

    def _each(self, do: Callable[[Sink], None]) -> None:
        for name, sink in list(self._open.items()):
            try:
                do(sink)
            except Exception as error:  # whatever a foreign library raises
                del self._open[name]
                why = " ".join(str(error).split()) or type(error).__name__
                self._say(f"run.sinks: {name} failed and gets no more figures, training goes on: {why}")


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers by name: those of a table as table/name, those of a list as list/1, list/2, ...; all else is left out."""
    found: dict[str, float] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}/")
        elif isinstance(value, list):
            found |= flat({str(place): item for place, item in enumerate(value, 1)}, f"{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = float(value)
    return found
