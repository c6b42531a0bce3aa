"""One picture of a run: loss, accepted length, and what each bucket did."""

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
