"""docs/messages.md, every message of the packages, from their source: `python -m bench.messages > docs/messages.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from fnmatch import fnmatch

from bench.message_reader import Message, messages

# Title, what to do about messages of this kind, and the files they arise in; the first that fits has a file.
TOPICS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Settings and command line",
        "Nothing has begun yet. Every setting with its values is in [settings.md](settings.md), every option in `--help`.",
        ("engine/settings*", "engine/cli*", "bench/cli*", "engine/config_file*", "engine/compile_cache*"),
    ),
    (
        "Other trainers' hidden states",
        "`dflash-engine data inspect FOLDER` lists all files that cannot be used and all settings that are missing; "
        '`data.on_bad_file = "skip"` leaves bad files out ([data.md](data.md)). A bare reason stands behind its file\'s name.',
        (
            "buffers/foreign*",
            "buffers/raw_sample*",
            "buffers/torch_archive*",
            "buffers/pickle_check*",
            "buffers/untrusted*",
            "engine/convert*",
            "buffers/open_dataset*",
        ),
    ),
    (
        "Hidden states from a model",
        "Records that are left out are counted with their reason, the first five with their line ([extract.md](extract.md)).",
        ("engine/hf_extract*", "engine/hf_target*", "engine/extract_*", "engine/conversations*", "engine/chat_tokens*")
        + ("engine/assistant_turns*", "engine/corpus*"),
    ),
    (
        "Datasets",
        "Our own format is described in [files.md](files.md). What is truncated, changed or half-written is to be copied or "
        "written again; `dflash-engine data inspect FOLDER --verify` reads every byte. Mixtures: [data.md](data.md).",
        ("buffers/dataset*", "buffers/manifest*", "buffers/shard_file*", "buffers/filling*", "buffers/mixture*")
        + ("engine/data_*", "engine/mixture*", "engine/held_out*", "engine/inspection*", "engine/reading_checks*")
        + ("engine/recomputation*", "engine/mixture_agreement*"),
    ),
    (
        "Buckets",
        "`dflash-engine plan --config run.toml` shows what a change makes of the data, in a second.",
        (
            "buffers/planner*",
            "buffers/packing*",
            "buffers/batching*",
            "buffers/shapes*",
            "buffers/anchors*",
            "engine/bucketing*",
        ),
    ),
    (
        "Targets and drafters",
        "What is computed otherwise than training or the servers would is refused by name: [serving.md](serving.md) has what is "
        "read of a config, [extract.md](extract.md) which targets fit.",
        ("engine/target*", "engine/rope*", "engine/drafter_*", "engine/params*", "engine/export*", "engine/assemble*")
        + ("engine/speculators_layout*",),
    ),
    (
        "Memory",
        "See [a plan that does not fit](trouble.md#expected-a-plan-within--gib) and [graphs.md](graphs.md).",
        ("engine/memory_*", "buffers/arena*", "engine/failures*", "engine/planning*"),
    ),
    (
        "Graphs and kernels",
        "The line names bucket and source line. `run.on_capture_failure` and `run.verify` say what a run does about it "
        "([graphs.md](graphs.md), [reconfigure.md](reconfigure.md)); `dflash-engine doctor` says what works on this machine.",
        ("graphs/*", "engine/graphs_*", "engine/kernels*", "engine/ops/*", "engine/verification*", "engine/precision*")
        + ("engine/warm_up*", "engine/generation*"),
    ),
    (
        "A run",
        "What was saved stays: mend what is named, and the same command goes on from the last checkpoint "
        "([trouble.md](trouble.md), [watch.md](watch.md)).",
        (
            "engine/run*",
            "engine/checkpoint*",
            "engine/changes*",
            "engine/checking*",
            "engine/bad_steps*",
            "engine/sinks*",
        )
        + ("buffers/staging*", "engine/profiling*", "engine/reconfigure*", "engine/optimizer*", "engine/engine*")
        + ("engine/metrics*", "engine/tensor_file*", "engine/interrupts*", "engine/watchdog*", "engine/left_out*")
        + ("engine/report_page*", "engine/progress*"),
    ),
    (
        "Doctor",
        "What `dflash-engine doctor` says of this machine; each with its reason ([trouble.md](trouble.md)).",
        ("engine/doctor*", "engine/gpu_holders*", "engine/process_settings*"),
    ),
    (
        "Measuring a drafter",
        "[evaluate.md](evaluate.md) has the figures, and the targets that are refused.",
        (
            "engine/evaluate*",
            "engine/decode*",
            "engine/prompts*",
            "engine/acceptance*",
            "engine/hf_decoding*",
            "engine/plots*",
        ),
    ),
    (
        "Benchmarks",
        "Where the comparison fails no speed is shown: [benchmarks.md](benchmarks.md).",
        ("bench/*",),
    ),
    ("Elsewhere", "From commands and parts that have no page of their own.", ("*",)),
)


def topic_of(file: str) -> str:
    """The title under which a file's messages stand."""
    return next(title for title, _, patterns in TOPICS if any(fnmatch(file, pattern) for pattern in patterns))


def page() -> str:
    """docs/messages.md."""
    found = messages()
    lines = [
        "# Messages",
        "",
        "Written by `python -m bench.messages > docs/messages.md` from the source; do not edit.",
        "",
        "An error is one line: what was expected, what was found, what to do. All that the packages raise are here by topic, and",
        "the lines that are said while all goes on. <Words> stand where a value goes: search for words of yours that are no",
        "name or number. `dflash-engine --traceback COMMAND` shows where an error arose; [trouble.md](trouble.md) goes by",
        "symptoms.",
    ]
    for title, advice, _ in TOPICS:
        of_topic = [message for message in found if topic_of(message.file) == title]
        if of_topic:
            lines += ["", f"## {title}", "", advice]
            lines += _listed(message for message in of_topic if not message.said)
            said = _listed(message for message in of_topic if message.said)
            lines += ["", "Said while all goes on:", *said] if said else []
    return "\n".join(lines) + "\n"


def _listed(messages: Iterable[Message]) -> list[str]:
    lines = [f"- `{message.text}` ({message.file})" for message in messages]
    return ["", *lines] if lines else []


if __name__ == "__main__":
    sys.stdout.write(page())
