"""The console script `dflash-engine`: the engine's commands and the measurements."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from bench.options import Measure, measure_options, out_option, plot_option, workload_option
from engine.cli import cli, run
from engine.cli_options import config_option, echo_json, json_option, set_option
from engine.settings import load_settings


@cli.group(short_help="Measure time and memory.")
def bench() -> None:
    """Measure time and memory; a speed is shown only after replay and eager gave equal results."""


@bench.command(short_help="A training step: eager, compiled, replayed.")
@workload_option
@click.option("--compiled/--no-compiled", default=True, show_default=True, help="Time torch.compile's step too.")
@click.option("--whole/--no-whole", default=True, show_default=True, help="Time whole steps and the update too.")
@click.option("--recompute", is_flag=True, help="Time all modes of model.recompute, under triton and flex, too.")
@measure_options(20)
def step(
    workloads: Sequence[str],
    compiled: bool,
    whole: bool,
    recompute: bool,
    measure: Measure,
) -> None:
    """A training step eager, compiled and replayed, and the whole of it.

    Milliseconds, tokens/s, TFLOP/s, memory, the ratio to the step's bare matmuls; the whole step with its data from disk,
    clip and AdamW against forward and backward; the update against the copy bandwidth. Of the named workloads, or of
    every bucket of data.path; without either of W1, W2 and W3, on the CPU of the tiny one.
    """
    settings = measure.settings()
    from bench.step import run as run_step

    measure.tell(
        run_step(settings, workloads=workloads, compiled=compiled, whole=whole, recompute=recompute, **measure.asked)
    )


@bench.command(short_help="Tokens/s of each bucket and of an epoch.")
@click.argument("data", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--mixture",
    is_flag=True,
    help="Instead of DATA lognormal lengths, median 700, 95 of 100 under 2048, at most 4096; a tenth on the CPU.",
)
@click.option(
    "--samples", type=click.IntRange(min=1), default=2000, show_default=True, help="Samples of the mixture's epoch."
)
@click.option(
    "--supervised",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="The last part of each of the mixture's samples that has labels, as an answer has.",
)
@workload_option
@measure_options(20)
def buckets(
    data: tuple[Path, ...],
    mixture: bool,
    samples: int,
    supervised: float,
    workloads: Sequence[str],
    measure: Measure,
) -> None:
    """Tokens/s of each bucket and of an epoch, against padding to the longest sample and against eager steps.

    The buckets are those of the plan for the dataset in the folder DATA (several folders are mixed, with data.weights; without
    DATA those of data.path), or for a mixture of lengths on the model of one --workload (W2, on the CPU tiny). With
    buckets.packing one sample a row is timed too.
    """
    settings = measure.settings(data)
    folders = () if mixture and not data else settings.data.folders
    if (not folders) != mixture:
        raise click.UsageError("Expected either DATA or --mixture, found " + ("both." if data else "neither."))
    if workloads and (folders or len(workloads) > 1):
        raise click.UsageError("Expected at most one --workload, with --mixture. One step's speed: bench step.")
    from bench.buckets import run as run_buckets

    measure.tell(
        run_buckets(
            folders or None, settings, samples=samples, supervised=supervised, workloads=workloads, **measure.asked
        )
    )


@bench.command(short_help="A row through SpecForge's model and through ours.")
@click.option(
    "--specforge",
    metavar="DIR",
    type=click.Path(path_type=Path),
    required=True,
    help="Your checkout of sgl-project/SpecForge; its training model is imported from there.",
)
@workload_option
@measure_options(20)
def peers(
    specforge: Path,
    workloads: Sequence[str],
    measure: Measure,
) -> None:
    """A row's forward and backward through SpecForge's own training model and through ours, in turns.

    Both get the same weights, inputs and anchors; no speed is shown unless loss and gradients agree. Without --workload
    W1, W2 and W3, on the CPU the tiny one. docs/benchmarks.md says what of SpecForge is used and how.
    """
    settings = measure.settings()
    from bench.peers import run as run_peers

    measure.tell(run_peers(specforge, settings, workloads=workloads, **measure.asked))


@bench.command(short_help="Each operation against its definition and torch.")
@workload_option
@click.option("--only", metavar="WORDS", default="", help="Measure the operations whose name has these words.")
@click.option("--compiled/--no-compiled", default=True, show_default=True, help="Time torch.compile's rivals too.")
@measure_options(20)
def ops(
    workloads: Sequence[str],
    only: str,
    compiled: bool,
    measure: Measure,
) -> None:
    """Each operation of the step and the update against its definition and torch's own.

    Milliseconds of forward and backward, TFLOP/s or GB/s, and the error of each, on the shapes of the named workloads;
    without one of W1, W2 and W3, on the CPU of the tiny one.
    """
    settings = measure.settings()
    from bench.ops import run as run_ops

    measure.tell(run_ops(settings, workloads=workloads, only=only, compiled=compiled, **measure.asked))


@bench.command(short_help="Extraction, and training from its files.")
@click.option("--samples", type=click.IntRange(min=8), default=200, show_default=True, help="Samples to extract.")
@click.option("--steps", type=click.IntRange(min=2), default=100, show_default=True, help="Steps to train from them.")
@config_option
@set_option
@json_option
@out_option
@plot_option
def extract(
    samples: int,
    steps: int,
    config: str | None,
    overrides: Sequence[str],
    as_json: bool,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Extraction and training from the extracted files, tokens/s and host memory of each.

    The target is random and has Qwen3-0.6B's shape; lengths are lognormal, median 700, 95 of 100 under 2048. On the CPU a
    tiny target and a tenth of the lengths. First the target is run again over some samples and compared with the files.
    """
    settings = load_settings(config, overrides)
    from bench.extract import run as run_extract

    echo_json(run_extract(settings, samples=samples, steps=steps, out=out, plot=plot), as_json)


@bench.command("input", short_help="Whether the device waits for its input.")
@workload_option
@measure_options(20)
def input_(
    workloads: Sequence[str],
    measure: Measure,
) -> None:
    """Whether the device waits for its input: training steps with samples from disk, then from the page cache.

    Device idle between steps, host time of the training thread and wait for the loader, on --workload (W2, on the CPU
    tiny). Writes 2 GB to TMPDIR.
    """
    settings = measure.settings()
    from bench.input import run as run_input

    measure.tell(run_input(settings, workloads=workloads, **measure.asked))


@bench.command(short_help="Throughput beside busy Python threads.")
@workload_option
@click.option(
    "--threads",
    type=click.IntRange(min=0, max=256),
    multiple=True,
    help="Busy pure-Python threads; may be repeated. Left out: 0, 1, 2, 4 and 8, on the CPU 0, 1 and 2.",
)
@measure_options(20)
def contention(
    workloads: Sequence[str],
    threads: Sequence[int],
    measure: Measure,
) -> None:
    """Throughput beside busy Python threads in the process, eager and replayed.

    Whole training steps with their input from disk, on --workload (W2, on the CPU tiny), under run.switch_interval_ms, and
    once more under Python's own 5 ms.
    """
    settings = measure.settings()
    from bench.contention import run as run_contention

    measure.tell(run_contention(settings, workloads=workloads, threads=threads, **measure.asked))


@bench.command(short_help="Seconds to the first step, by phase.")
@workload_option
@click.option(
    "--buckets",
    type=click.Choice(["6", "12"]),
    default="6",
    show_default=True,
    help="Buckets, from 512 or 256 tokens to 4096.",
)
@measure_options(1)
def start(
    workloads: Sequence[str],
    buckets: str,
    measure: Measure,
) -> None:
    """Seconds to the first step of a run with six or twelve buckets, by phase, in processes of their own.

    Once with empty caches of compiled kernels, then --repeats times with full ones, in which nothing may be compiled; on
    --workload (W2, on the CPU tiny). `--set model.attention=flex` measures the compiled one. Writes 4 GB to TMPDIR.
    """
    settings = measure.settings()
    from bench.start import run as run_start

    measure.tell(run_start(settings, workloads=workloads, buckets=int(buckets), **measure.asked))


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command line (None: the process's own) and returns its exit code."""
    return run(cli, args)


if __name__ == "__main__":
    sys.exit(main())
