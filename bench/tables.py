"""Tables of README.md and of docs/performance.md, fp8.md and reliability.md from the records in bench/results.

`python -m bench.tables` writes them anew.
No figure in them is typed by hand; a test compares the pages with what this module makes of the records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.markdown import RESULTS, markdown
from bench.reliability_tables import RELIABILITY_TABLES
from bench.start_tables import start_table
from bench.step_tables import chip_table, ops_table, recompute_table

ROOT = RESULTS.parents[1]
PYTHONS_OWN_MS = 5.0  # sys.getswitchinterval() of a fresh interpreter
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Goal:
    """Aimed at: ms and GiB of forward and backward, times over the bare matmuls, times faster than SpecForge and than flex."""

    shape: str
    ms: float
    gib: float
    over_bare_matmuls: float
    over_specforge: float
    attention_over_flex: float


GOALS = {
    "W1": Goal("0.6B-class: S 512, N 512, K 16", 17, 3.3, 1.25, 3.4, 1.5),
    "W2": Goal("8B: S 2048, N 512, K 16", 108, 11, 1.09, 1.7, 1.5),
    "W3": Goal("27B: S 4096, N 1024, K 32", 745, 33, 1.05, 1.5, 1.25),
}


def record(name: str, results: Path = RESULTS) -> Record:
    """bench/results/h200-NAME.json. Raises ValueError when it is missing."""
    file = results / f"h200-{name}.json"
    if not file.is_file():
        raise ValueError(
            f"expected the record {file}, found none; run `dflash-engine bench {name} --out {file}` on the GPU"
        )
    found: Record = json.loads(file.read_text())
    return found


def steps(results: Path = RESULTS) -> dict[str, Record]:
    """Workload -> its row of bench step; W3 has a record of its own."""
    rows = [row for name in ("step", "step-w3") for row in record(name, results)["steps"]]
    return {row["workload"]: row for row in rows}


def headline(results: Path = RESULTS) -> list[str]:
    """README's number: W2, with its hardware."""
    where, row = record("peers", results)["where"], steps(results)["W2"]
    peer = _find(record("peers", results)["workloads"], workload="W2")
    ms, host, bare, ratio = (
        format(value, form)
        for value, form in (
            (peer["ours_ms"], ".0f"),
            (row["replay_host_ms"], ".1f"),
            (row["over_bare_matmuls"], ".2f"),
            (peer["ratio"], ".2f"),
        )
    )
    gpu = where["gpu"]
    return [
        f"**{ms} ms** for forward and backward of an 8B-class target's drafter (2,048 tokens, 512 blocks of 16, bf16) on one",
        f"{gpu}: {ratio} times as fast as SpecForge in the same run, {bare} times a CUDA graph of the step's bare matmuls,",
        f"with {host} ms of host time and no allocation, compilation or host sync; the replay equals the eager step bit for",
        f"bit (torch {where['torch']}, Triton {where['triton']}, `bench/results/h200-peers.json`, `h200-step.json`).",
    ]


def demo_figures(results: Path = RESULTS) -> list[str]:
    """What the demo reached on the GPU."""
    found = record("demo", results)
    before, after = (found[f"tokens_per_verification_{when}"] for when in ("before", "after"))
    return [
        f"The demo on one {found['where']['gpu']}: {before:.2f} accepted tokens per verification before training, {after:.2f}",
        f"after {found['steps']} replayed steps, {found['differing_tokens']} tokens off the target's own text",
        "(`bench/results/h200-demo.json`).",
    ]


def speed_table(results: Path = RESULTS) -> list[str]:
    """Forward and backward of the three workloads, with the goals in brackets. Time and memory are those of the run beside
    SpecForge, where both are counted from before they were built; the ratio to the bare matmuls and host time those of bench
    step, which times them in turns."""
    peers = {row["workload"]: row for row in record("peers", results)["workloads"]}
    head = [
        "workload",
        "ms",
        "GiB",
        "GiB held",
        "x bare matmuls",
        "SpecForge ms",
        "times faster",
        "SpecForge GiB",
        "host ms, replay / eager",
        "tokens/s",
    ]
    rows = [
        [
            f"{name}, {GOALS[name].shape}",
            f"{peers[name]['ours_ms']:.1f} ({GOALS[name].ms:g})",
            f"{peers[name]['ours_peak_gib']:.1f} ({GOALS[name].gib:g})",
            f"{peers[name]['ours_held_gib']:.1f}",
            f"{row['over_bare_matmuls']:.3f} ({GOALS[name].over_bare_matmuls:g})",
            f"{peers[name]['specforge_ms']:.1f}",
            f"{peers[name]['ratio']:.2f} ({GOALS[name].over_specforge:g})",
            f"{peers[name]['specforge_peak_gib']:.1f}",
            f"{row['replay_host_ms']:.2f} / {row['eager_host_ms']:.0f}",
            f"{row['tokens_per_s'] * row['replay_ms'] / peers[name]['ours_ms']:,.0f}",
        ]
        for name, row in steps(results).items()
    ]
    return markdown(head, rows)


def figures_table(results: Path = RESULTS) -> list[str]:
    """Every other figure that was asked for: what, goal, measured, and the record it stands in."""
    whole = steps(results)["W2"]
    fp8 = _find(record("fp8", results)["steps"], workload="W2")
    fed, cached = (_find(record("input", results)["input"], read_from=where) for where in ("disk", "page cache"))
    beside = next(
        row
        for row in record("contention", results)["contention"]
        if row["threads"] == 8 and row["switch_interval_ms"] < PYTHONS_OWN_MS
    )
    rows = [
        (
            "whole step over forward + backward, W2",
            "at most 1.10",
            f"{whole['whole_over_forward_backward']:.3f}",
            "step",
        ),
        ("update over copy bandwidth, W2", "at least 0.85", f"{whole['update_over_copy_bandwidth']:.2f}", "step"),
        ("forward + backward in fp8, W2", "at most 87 ms", f"{fp8['replay_ms']:.1f} ms", "fp8"),
        ("device idle between steps, W2 from disk", "at most 1 %", f"{fed['device_idle_share']:.2%}", "input"),
        ("host time to launch a step, update included", "at most 0.5 ms", f"{fed['launch_ms']:.2f} ms", "input"),
        ("the same, samples from the page cache", "at most 0.5 ms", f"{cached['launch_ms']:.2f} ms", "input"),
        ("processor time of the training thread a step", "at most 0.5 ms", f"{fed['host_work_ms']:.2f} ms", "input"),
        ("throughput left beside 8 busy threads", "at least 99 %", f"{beside['throughput_left']:.1%}", "contention"),
        ("the same of the eager step", "-", f"{beside['eager_throughput_left']:.1%}", "contention"),
    ]
    for name, goal in GOALS.items():
        kept = "ops-w3" if name == "W3" else "ops"
        row = next(r for r in record(kept, results)["ops"] if r["workload"] == name and "attention" in r["op"])
        ours, flex = (row["results"][way] for way in ("ours", "flex"))
        over, error = flex["time_over_ours"], flex["error"]
        rows += [
            (f"flex_attention over ours, {name}", f"at least {goal.attention_over_flex:g}", f"{over:.2f}", kept),
            (f"our attention's largest error, {name}", f"flex's {error:.3e}", f"{ours['error']:.3e}", kept),
        ]
    head = ["figure", "goal", "measured", "record"]
    return markdown(head, [[*cells, f"`h200-{name}.json`"] for *cells, name in rows])


def mixture_table(results: Path = RESULTS) -> list[str]:
    """An epoch of lognormal lengths on W1's model: useful tokens/s and padding."""
    names = {"buckets": "in buckets", "one_sample_a_row": "one sample a row", "pad_to_longest": "padded to the longest"}
    rows = []
    for name, supervised in (("buckets", "every token"), ("packing", "the last 40 %")):
        epoch = record(name, results)["epoch"]
        for key, how in names.items():
            if key in epoch:
                said = "packed" if (name, key) == ("packing", "buckets") else how
                speeds = [f"{epoch[key + kind]['useful_tokens_per_s']:,.0f}" for kind in ("", "_eager")]
                rows.append([supervised, said, *speeds, f"{epoch[key]['padding']:.1%}", f"`h200-{name}.json`"])
    return markdown(["supervised", "rows", "useful tokens/s", "eager", "padding", "record"], rows)


def extraction_table(results: Path = RESULTS) -> list[str]:
    """Extraction from a target of Qwen3-0.6B's shape, and training from its files."""
    found = record("extract", results)
    rows = [
        [stage, f"{found[stage]['tokens_per_s']:,.0f}", f"{found['host_peak_gib'][stage]:.1f}"]
        for stage in ("extraction", "training")
    ]
    return markdown(["stage", "tokens/s", "host memory at its peak, GiB"], rows)


def fp8_table(results: Path = RESULTS) -> list[str]:
    """The embedded target's drafter trained in bf16 and in fp8."""
    rows = [
        [run["precision"], str(run["seed"]), f"{run['eval_loss']:.3f}", f"{run['eval_accept_len']:.3f}"]
        + [f"{run['tokens_per_verification']:.2f}", str(run["differing_tokens"])]
        for run in record("fp8-demo", results)["demo"]["runs"]
    ]
    head = [
        "precision",
        "seed",
        "held-out loss",
        "accepted length",
        "tokens per verification",
        "tokens off the target's text",
    ]
    return markdown(head, rows)


def _find(rows: Iterable[Record], **wanted: str) -> Record:
    return next(row for row in rows if all(row[key] == value for key, value in wanted.items()))


TABLES: dict[str, Callable[[], list[str]]] = {
    "headline": headline,
    "speed table": speed_table,
    "figures table": figures_table,
    "demo figures": demo_figures,
    "mixture table": mixture_table,
    "extraction table": extraction_table,
    "fp8 table": fp8_table,
    "start table": start_table,
    "recompute table": recompute_table,
    "chip table": chip_table,
    "ops table": ops_table,
    **RELIABILITY_TABLES,
}


def filled(page: str) -> str:
    """The page with everything between the markers made anew."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if begin in page:
            start, stop = page.index(begin), page.index(end)
            page = page[:start] + "\n".join([begin, *make(), ""]) + page[stop:]
    return page


PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("performance", "fp8", "reliability")))


if __name__ == "__main__":
    for file in PAGES:
        file.write_text(filled(file.read_text()))
