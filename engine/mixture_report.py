"""What people are told of a mixture: what each source is in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console

from buffers.batching import BatchPlan
from buffers.mixture import Mixture
from engine.reports import print_table


def source_rows(mixture: Mixture, plan: BatchPlan) -> list[dict[str, Any]]:
    """A row a source: its samples and tokens as they lie, and what of them an epoch holds on average; `share` is that of the
    epoch's tokens. Samples that are too long count as the plan has them."""
    served = plan.served_tokens
    rows: list[dict[str, Any]] = []
    for place, (source, weight) in enumerate(zip(mixture.sources, mixture.weights, strict=True)):
        tokens = served[mixture.ids_of(place)]
        rows.append(
            {
                "source": str(source.folders[0]),
                "weight": float(weight),
                "samples": len(source),
                "tokens": int(source.lengths.sum()),
                "samples_per_epoch": float(weight * int((tokens > 0).sum())),
                "tokens_per_epoch": float(weight * int(tokens.sum())),
            }
        )
    total = sum(row["tokens_per_epoch"] for row in rows)
    return [row | {"share": row["tokens_per_epoch"] / total} for row in rows]


def print_sources(rows: Iterable[dict[str, Any]], console: Console) -> None:
    """The rows of source_rows for people."""
    print_table(
        console,
        "sources",
        ("source", "weight", "samples", "tokens", "samples/epoch", "tokens/epoch", "share of tokens"),
        (
            (
                r["source"],
                f"{r['weight']:g}",
                f"{r['samples']:,}",
                f"{r['tokens']:,}",
                f"{r['samples_per_epoch']:,.0f}",
                f"{r['tokens_per_epoch']:,.0f}",
                f"{r['share']:.1%}",
            )
            for r in rows
        ),
    )
