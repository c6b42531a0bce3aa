"""docs/performance.md's table of starts, from the records that there are of `bench start`."""

from __future__ import annotations

import json
from pathlib import Path

from bench.markdown import RESULTS, markdown

# Record -> seconds aimed at, cold and warm; "-" where none was set.
GOALS = {"start": ("45", "10"), "start-flex": ("80", "12"), "start-12": ("-", "-"), "start-12-flex": ("-", "-")}


def start_table(results: Path = RESULTS) -> list[str]:
    """Every start that was recorded: its seconds beside the goal, kernels compiled anew and the seconds of its phases."""
    rows = []
    for name, (cold, warm) in GOALS.items():
        file = results / f"h200-{name}.json"
        if not file.is_file():
            continue
        found = json.loads(file.read_text())
        for row in found["starts"]:
            phases = ", ".join(f"{phase} {s:.1f}" for phase, s in row["phases"].items() if s >= 0.05)
            rows.append(
                [
                    f"{len(row['buckets'])} buckets, {row.get('attention', 'triton')}",
                    row["start"],
                    f"{row['seconds']:.1f} ({cold if row['start'] == 'cold' else warm})",
                    str(row.get("kernels_compiled", "-")),
                    phases,
                    f"`{file.name}`",
                ]
            )
    return markdown(["start of W2's model", "caches", "s (goal)", "compiled anew", "phases, s", "record"], rows)
