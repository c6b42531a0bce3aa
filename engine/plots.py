"""Pictures: of a run its loss, accepted length and buckets; of an evaluation what was accepted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot_run(metrics: Path, buckets: Sequence[Mapping[str, Any]], out: Path) -> Path | None:
    """Draws metrics.jsonl and the table of buckets into the PNG `out`; None when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    training = [r for r in records if "loss" in r]
    held_out = [r for r in records if "eval_loss" in r]
    figure, (loss, accept, bars) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    for axis, key, title in ((loss, "loss", "loss"), (accept, "accept_len", "accepted draft tokens per block")):
        axis.plot([r["step"] for r in training], [r[key] for r in training], label="training")
        axis.plot([r["step"] for r in held_out], [r[f"eval_{key}"] for r in held_out], "o-", label="held out")
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        axis.legend()
    names = [f"{r['bucket']}\n{r['batches']} batches, {r['padding']:.0%} padding" for r in buckets]
    drawn = bars.bar(names, [r["useful_tokens_per_s"] for r in buckets])
    bars.bar_label(drawn, [f"{r['device_ms']:.1f} ms" for r in buckets])
    bars.set(title=f"useful tokens/s by bucket ({buckets[0]['how']})")
    bars.tick_params(axis="x", labelsize=7)
    bars.margins(y=0.12)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)
    return out


def require_plot(out: Path) -> None:
    """Raises ValueError when `out` cannot become a picture: matplotlib or its folder is missing, or it is no PNG's name."""
    if out.suffix != ".png" or not out.parent.is_dir():
        raise ValueError(f"plot: expected the name of a .png file in a folder that exists, found {out}; name one")
    try:
        import matplotlib  # noqa: F401 - asked for before hours of work, not after
    except ImportError as error:
        raise ValueError(
            "plot: expected the package matplotlib, found none; pip install 'dflash-engine[plots]'"
        ) from error


def plot_evaluation(figures: Mapping[str, Any], out: Path) -> Path:
    """Draws an evaluation (engine.evaluate) into the PNG `out`: accuracy per slot where it was teacher-forced, and how many
    drafts were accepted, teacher-forced and decoded. Raises ValueError as require_plot does."""
    require_plot(out)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = {"teacher-forced": figures, "decoded": figures.get("decoding", {})}
    measured = {name: part for name, part in measured.items() if "acceptance_histogram" in part}
    slots = figures.get("accuracy_per_slot")
    figure, axes = pyplot.subplots(
        1, 2 if slots else 1, figsize=(11 if slots else 6, 4), layout="constrained", squeeze=False
    )
    if slots:
        axes[0][0].bar(range(1, len(slots) + 1), slots)
        axes[0][0].set(title="accuracy per slot", xlabel="slot behind the anchor", ylim=(0, 1))
    width = 0.8 / len(measured)
    for i, (name, part) in enumerate(measured.items()):
        counts = part["acceptance_histogram"]
        total, mean = max(1, sum(counts)), part["tokens_per_verification"]
        at = [n + (i - (len(measured) - 1) / 2) * width for n in range(len(counts))]
        label = name if mean is None else f"{name}: {mean:.2f} tokens per verification"
        axes[0][-1].bar(at, [count / total for count in counts], width, label=label)
    axes[0][-1].set(title="accepted drafts", xlabel="drafts accepted at once", ylabel="share of blocks")
    axes[0][-1].legend()
    for axis in axes[0]:
        axis.grid(alpha=0.3, axis="y")
    figure.savefig(out, dpi=110)
    pyplot.close(figure)
    return out
