"""One page of a run, to open from disk: charts and tables in a single HTML file that loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from engine.changes import SETTINGS_FILE
from engine.graphs_record import bucket_figures
from engine.reports import make_console
from engine.run_records import BucketTotal, Record, RunRecords, add, number, points, read_records, slot_points, table
from engine.svg import Mark, Series, bar_chart, line_chart
from graphs.record import RecordError, read_record

_TEMPLATE = Path(__file__).with_name("report.html")


def write_report(folder: Path, out: Path | None = None) -> dict[str, Any]:
    """Writes the page of the run in `folder` to `out` (left out: report.html in it) and returns where, and how far the run is.
    Of a run that is under way or was killed it shows what there is. Raises ValueError where there are no metrics."""
    records = read_records(folder / "metrics.jsonl")
    out = out or folder / "report.html"
    temporary = out.with_name(f".{out.name}.writing")
    try:
        temporary.write_text(page(folder, records), encoding="utf-8")
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(out)) from error
    make_console(stderr=True).print(f"{out}: {state_of(records)}", markup=False, soft_wrap=True)
    return {"report": str(out), "step": records.step, "state": state_of(records), "damaged_lines": records.damaged}


def page(folder: Path, records: RunRecords) -> str:
    """The page as text. graphs.json and settings.toml in `folder` are shown where they are."""
    marks = [Mark(r["step"], _told(r)) for r in records.events if r["event"] != "ended" and r["step"]]
    sections = [
        _section("Loss", _learning(records, "loss", marks)),
        _section("Accept length: drafts accepted per block", _learning(records, "accept_len", marks)),
        _section("Accept length per slot, held out", _accepted(records)),
        _section(
            "Accuracy per slot behind the anchor, training",
            line_chart(
                [
                    Series(f"slot {k}", line)
                    for k, line in enumerate(slot_points(records.training, "accuracy_per_slot"), 1)
                ],
                marks=marks,
                ramp=True,
            ),
        ),
        _section("Useful tokens/s of the run", _speed(records, marks)),
        _section("Useful tokens per second of device time, by bucket", _bucket_lines(records, marks)),
        _section(
            "Padding",
            line_chart(
                [Series("padding", points(records.training, "padding"))], marks=marks, form=".1%", from_zero=True
            ),
        ),
        _section("Memory, GiB", _memory(records, marks)),
        _section("Seconds by phase, training", _phases(records)),
        _section("Seconds by phase, before the first step", _start(records)),
        _section("Buckets", _buckets(records), wide=True),
        _section("Starts, generations and why", _events(records), wide=True),
        _section("Graphs of the last generation", _graphs(folder), wide=True),
        _section("Gradient norm", line_chart([Series("norm", points(records.training, "grad_norm"))], marks=marks)),
        _section("Learning rate", line_chart([Series("lr", points(records.training, "lr"))], marks=marks)),
        _section("Settings", _settings(folder), wide=True),
    ]
    damaged = f" {records.damaged} damaged lines of metrics.jsonl were left out." if records.damaged else ""
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(f"dflash-engine: {folder.resolve().name}"),
        state=escape(state_of(records)),
        tiles="".join(f'<div class="tile"><b>{escape(v)}</b>{escape(k)}</div>' for k, v in _tiles(records)),
        sections="\n".join(sections),
        footer=f"Dashed lines: a start or another generation. Points of long runs are means of neighbours.{damaged}",
    )


def state_of(records: RunRecords) -> str:
    """Where the run is, as far as its last lines say."""
    last = next((r for r in reversed(records.events) if r["event"] in ("started", "ended")), None)
    if last is None or last["event"] == "started":
        return f"Step {records.step:,}: under way, or killed: no end is noted."
    return f"Step {records.step:,}: {last.get('why')}, {last.get('time')}."


def _section(title: str, content: str, *, wide: bool = False) -> str:
    content = content or '<p class="dim">Not recorded by this run.</p>'
    kind = "wide" if wide else "narrow"
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{content}</section>'


def _tiles(records: RunRecords) -> list[tuple[str, str]]:
    last = records.training[-1] if records.training else {}
    started = [r for r in records.events if r["event"] == "started"]
    total = number(started[-1].get("total_steps")) if started else None
    held_out = [y for _, y in points(records.held_out, "eval_accept_len") if y is not None]
    told = [("steps", f"{records.step:,}" + (f" of {total:,.0f}" if total else ""))]
    for name, value, form in (
        ("loss, last line", number(last.get("loss")), ".4f"),
        ("accept length, last line", number(last.get("accept_len")), ".3f"),
        ("best accept length, held out", max(held_out, default=None), ".3f"),
        ("useful tokens/s, mean of the last process", number(table(last, "machine").get("tokens_per_s_mean")), ",.0f"),
        ("steps skipped", number(last.get("skipped_steps")), ",.0f"),
    ):
        if value is not None:
            told.append((name, format(value, form)))
    seconds = sum(number(table(r, "machine").get("seconds")) or 0.0 for r in records.training)
    return [*told, ("training", str(timedelta(seconds=round(seconds)))), ("processes", str(len(started)))]


def _learning(records: RunRecords, key: str, marks: Sequence[Mark]) -> str:
    lines = [Series("training", points(records.training, key))]
    return line_chart([*lines, Series("held out", points(records.held_out, f"eval_{key}"), dots=True)], marks=marks)


def _accepted(records: RunRecords) -> str:
    lines = slot_points(records.held_out, "eval_accept_per_slot")
    found = [(k, line[-1][1]) for k, line in enumerate(lines, 1) if line[-1][1] is not None]
    bars = bar_chart([(f"slot {k}", share or 0.0, f"{share:.1%}") for k, share in found])
    note = "Share of blocks in which the slot and all before it stand, last evaluation; the sum is the accept length."
    return (
        f'{bars}<p class="dim">{note}</p>' if bars else '<p class="dim">Measured on held-out data: data.eval_path.</p>'
    )


def _speed(records: RunRecords, marks: Sequence[Mark]) -> str:
    mean = points(records.training, "machine", "tokens_per_s_mean")
    return line_chart(
        [
            Series("now, of the steps alone", points(records.training, "tokens_per_s")),
            Series("mean of the process, with everything", mean),
        ],
        marks=marks,
        form=",.0f",
    )


def _bucket_lines(records: RunRecords, marks: Sequence[Mark]) -> str:
    names = {name for _, name in records.buckets()}
    lines = []
    for name in sorted(names, key=_size):
        served = [(r["step"], table(r, "machine", "buckets", name)) for r in records.training]
        lines.append(Series(name, [(step, add(BucketTotal(), found).tokens_per_s) for step, found in served if found]))
    return line_chart(lines, marks=marks, form=",.0f")


def _memory(records: RunRecords, marks: Sequence[Mark]) -> str:
    lines = []
    for name, text in (("device", "device, held by torch"), ("host", "host, resident")):
        found = points(records.training, "machine", "memory_mib", name)
        lines.append(Series(text, [(step, mib and mib / 1024) for step, mib in found]))
    return line_chart(lines, marks=marks, from_zero=True)


def _phases(records: RunRecords) -> str:
    whole = sum(number(table(r, "machine").get("seconds")) or 0.0 for r in records.training)
    device, host = records.summed("machine", "device_s"), records.summed("machine", "host_s")
    if not whole:
        return ""
    rows = [(f"device: {name}", s) for name, s in device.items()]
    rows += [("device: idle", max(0.0, whole - sum(device.values())))]
    rows += [(f"loop: {name}", s) for name, s in host.items()]
    return bar_chart([(name, s, f"{_seconds(s)}, {s / whole:.1%}") for name, s in rows])


def _start(records: RunRecords) -> str:
    starts = [r for r in records.events if r["event"] == "started"]
    last = {name: s for name, value in table(starts[-1] if starts else {}, "seconds").items() if (s := number(value))}
    return bar_chart([(name, s, _seconds(s)) for name, s in last.items()])


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 10 else f"{value:.2f} s"


def _buckets(records: RunRecords) -> str:
    rows = []
    for (generation, name), total in sorted(
        records.buckets().items(), key=lambda item: (item[0][0], _size(item[0][1]))
    ):
        speed = total.tokens_per_s
        rows.append(
            (
                name,
                str(generation),
                f"{total.batches:,.0f}",
                f"{total.useful_tokens:,.0f}",
                f"{1 - total.useful_tokens / total.slot_tokens:.1%}" if total.slot_tokens else "-",
                f"{total.device_ms / total.timed:,.2f}" if total.timed else "-",
                f"{speed:,.0f}" if speed is not None else "-",
            )
        )
    head = ("rows x tokens x blocks", "generation", "batches", "useful tokens", "padding", "device ms", "tokens/s")
    return _table(head, rows, numbers_from=1)


def _events(records: RunRecords) -> str:
    rows = [(str(r["step"]), str(r.get("generation", "")), str(r["event"]), _told(r)) for r in records.events]
    return _table(("after step", "generation", "event", "why"), rows)


def _told(event: Record) -> str:
    changes = event.get("changes")
    told = [
        f"{c.get('setting')} {c.get('old')} -> {c.get('new')}"
        for c in (changes if isinstance(changes, list) else [])
        if isinstance(c, dict)
    ]
    time = f" ({event['time']})" if "time" in event else ""
    return ", ".join([*told, str(event.get("why", ""))]) + time


def _graphs(folder: Path) -> str:
    try:
        record = read_record(folder)
    except RecordError as error:
        return f"<p>{escape(str(error))}</p>"
    if record is None:
        return ""
    rows = []
    for bucket in map(bucket_figures, record.buckets):
        numbers = (
            ("nodes", "d"),
            ("pool_mib", ",.0f"),
            ("capture_s", ".2f"),
            ("eager_ms", ".2f"),
            ("replay_ms", ".2f"),
        )
        shown = ["-" if bucket[key] is None else format(bucket[key], form) for key, form in numbers]
        why = f": {bucket['why']}" if bucket["why"] else ""
        rows.append(
            (bucket["bucket"], bucket["how"] + why, bucket["verified"] or "not compared", bucket["fingerprint"], *shown)
        )
    head = (
        "bucket",
        "step",
        "replay and eager",
        "fingerprint",
        "kernels",
        "pool MiB",
        "capture s",
        "eager ms",
        "replay ms",
    )
    seconds = ", ".join(f"{name} {s:.1f}" for name, s in record.phases_s)
    return f"<p>Generation {record.generation}. Seconds: {escape(seconds)}.</p>{_table(head, rows, numbers_from=4)}"


def _settings(folder: Path) -> str:
    path = folder / SETTINGS_FILE
    if not path.is_file():
        return ""
    return f"<details><summary>{SETTINGS_FILE}</summary><pre>{escape(path.read_text(errors='replace'))}</pre></details>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers_from: int = 99) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="number"' if index >= numbers_from else "" for index in range(len(cells))]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><tr>{line(head, 'th')}</tr>{body}</table>" if body else ""


def _size(bucket: str) -> list[int]:
    """Buckets ascend in rows times tokens, not in the letters of their names."""
    sizes = [int(part) if part.isdecimal() else 0 for part in bucket.split("x")]
    return [sizes[0] * sizes[1] if len(sizes) > 1 else 0, *sizes]
