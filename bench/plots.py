"""One picture a measurement: groups of bars. matplotlib is asked for only when a picture is."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.settings_fields import SettingsError


def check_plot(plot: Path | None) -> None:
    """Before minutes of measuring: raises SettingsError when a picture is wanted and cannot be drawn."""
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise SettingsError(
            "--plot: expected matplotlib, found none; pip install 'dflash-engine[plots]' or leave --plot out"
        )


def plot_bars(
    out: Path,
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    unit: str = "",
) -> None:
    """Draws one bar a group and series, with its value on top, into the PNG `out`; None draws nothing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width = 0.8 / max(1, len(series))
    figure, axis = pyplot.subplots(figsize=(max(6, 1.2 * len(groups) * len(series) * 0.6), 4.5), layout="constrained")
    for index, (name, values) in enumerate(series.items()):
        at = [group + (index - (len(series) - 1) / 2) * width for group in range(len(groups))]
        drawn = axis.bar(at, [value or 0.0 for value in values], width, label=name)
        axis.bar_label(drawn, ["" if value is None else f"{value:.3g}" for value in values], fontsize=7)
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    axis.set(title=title, ylabel=unit)
    axis.margins(y=0.12)
    axis.legend(fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png", dpi=110)
    pyplot.close(figure)


def plot_lines(
    out: Path, title: str, parts: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]], *, x: str
) -> None:
    """Draws into the PNG `out` a part a unit, one above the other over the same x; each a name -> (x, y) of lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(parts), squeeze=False, sharex=True, figsize=(8, 3 * len(parts)), layout="constrained"
    )
    for axis, (unit, lines) in zip(axes[:, 0], parts.items(), strict=True):
        for name, (at, values) in lines.items():
            axis.plot(at, values, linewidth=0.8, label=name)
        axis.set_ylabel(unit)
        axis.legend(fontsize=8)
    axes[0, 0].set_title(title)
    axes[-1, 0].set_xlabel(x)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png", dpi=110)
    pyplot.close(figure)
