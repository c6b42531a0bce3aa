"""The engine's commands: their options and their exit codes. bench/cli.py adds its own and is the console script.

What a command does is imported inside the command, so that `--help` never waits for torch. The functions that do the
work print for people and return their figures as a plain dictionary; `--json` prints that as the last line of stdout.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from buffers.untrusted import printable
from engine.cli_data import data
from engine.cli_options import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    PROGRAM,
    NewFile,
    config_option,
    echo_json,
    json_option,
    require_data,
    set_option,
)
from engine.failures import message_of
from engine.graphs_cli import graphs
from engine.interrupts import noting_interrupts
from engine.process_settings import set_what_helps
from engine.settings import load_settings
from engine.settings_fields import SettingsError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name=PROGRAM, prog_name=PROGRAM)
@click.option(
    "--traceback", is_flag=True, envvar="DFLASH_TRACEBACK", help="Show where an error arose (also DFLASH_TRACEBACK=1)."
)
def cli(traceback: bool) -> None:
    """Train DFlash drafters with the whole step in CUDA graphs.

    Exit codes: 0 done, 1 failed, 2 bad usage or settings, 3 stale graphs (graphs status), 130 interrupted, with a
    checkpoint saved once training has begun.
    """


@cli.command()
@click.option(
    "--out",
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the dataset, the drafter, metrics.jsonl and the picture go; left out, runs/demo or the next free one.",
)
@click.option("--steps", type=click.IntRange(min=0), default=0, help="Optimizer steps; 0 takes the demo's own number.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of weights and order.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto takes CUDA if there is a device; cuda refuses to start without one.",
)
@json_option
def demo(out: Path | None, steps: int, seed: int, device: str, as_json: bool) -> None:
    """The whole way on this machine, in minutes.

    Captures the embedded target's hidden states over Python's standard library, plans buckets, trains a drafter, and
    decodes held-out files with it, before and after training. Exits with 1 when the text is not the target's own.
    """
    from engine.demo import run_demo

    figures = run_demo(out or _free_folder(Path("runs/demo")), steps=steps, seed=seed, device=device)
    echo_json(figures, as_json)
    if figures.get("differing_tokens"):
        click.get_current_context().exit(1)


def _free_folder(wanted: Path) -> Path:
    """The folder, or with a number behind it the first that does not exist."""
    names = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([wanted], names) if not folder.exists())


@cli.command(short_help="Plan the buckets for a dataset or a mixture.")
@click.argument("data", nargs=-1, type=click.Path(path_type=Path))
@config_option
@set_option
@json_option
def plan(data: tuple[Path, ...], config: str | None, overrides: Sequence[str], as_json: bool) -> None:
    """Plan the buckets for the dataset in the folder DATA, and show what each costs and wastes.

    Several folders are mixed, with data.weights; without DATA those of data.path are planned for.
    """
    settings = load_settings(config, overrides, folders=data)
    require_data(settings)
    from engine.planning import show_plan

    echo_json(show_plan(settings.data.folders, settings), as_json)


@cli.command(short_help="Train a drafter as the TOML file CONFIG says.")
@click.argument("config", required=False, type=click.Path(dir_okay=False))
@set_option
@click.option(
    "--init",
    metavar="DRAFTER",
    type=click.Path(file_okay=False),
    help="Start from the drafter in this folder instead of new weights; short for --set model.init=DRAFTER.",
)
@click.option(
    "--resume/--no-resume",
    default=True,
    show_default=True,
    help="Go on from the last checkpoint in run.output if there is one; --no-resume refuses a folder that has one.",
)
@click.option(
    "--explain",
    is_flag=True,
    help="Train nothing: show what the settings change of the run in run.output, and what each change asks of it.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Look in every step for waits, allocations, moved buffers and NaN from padding or stale memory, compare replay and "
    "eager step every 20, and stop at the first fault; short for --set run.check_every=20.",
)
@click.option(
    "--profile",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Record some steps after the first few into FILE, a Chrome trace (.json or .json.gz).",
)
@click.option("--quiet", is_flag=True, help="Say nothing but an error; metrics.jsonl is written as ever.")
@json_option
def train(
    config: str | None,
    overrides: Sequence[str],
    init: str | None,
    resume: bool,
    explain: bool,
    quiet: bool,
    check: bool,
    profile: Path | None,
    as_json: bool,
) -> None:
    """Train a drafter as the TOML file CONFIG says.

    Ctrl-C saves a checkpoint before it ends; the same command then goes on from there. CONFIG may be edited meanwhile: the
    run takes the change over between two steps, or says why not (docs/reconfigure.md). On a terminal the figures stay in
    place, elsewhere they are lines (docs/watch.md).
    """
    changes = [
        *(["run.check_every=20"] if check else []),
        *overrides,
        *([] if init is None else [f"model.init={init}"]),
    ]
    file = None
    if config is not None:
        from engine.config_file import ConfigFile

        file = ConfigFile(config, changes)
    settings = load_settings(None, changes) if file is None else file.load()
    if explain:
        from engine.changes import explain_changes

        echo_json(explain_changes(settings), as_json)
        return
    require_data(settings)
    from engine.train import train as train_drafter

    echo_json(train_drafter(settings, resume=resume, config=file, quiet=quiet, profile=profile), as_json)


@cli.command(short_help="Write a trained drafter as servers load it.")
@click.argument("source", metavar="RUN_OR_CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--layout",
    type=click.Choice(["z-lab", "speculators"]),
    default="z-lab",
    show_default=True,
    help="z-lab: vLLM, SGLang and llama.cpp load it; speculators: for vLLM, names its target.",
)
@click.option(
    "--verifier", metavar="TARGET", default="", help="With speculators: name or folder of the target to serve with."
)
@click.option("--with-head", is_flag=True, help="With speculators: copy embedding and head from the folder TARGET.")
@json_option
def export(source: Path, out: Path, layout: str, verifier: str, with_head: bool, as_json: bool) -> None:
    """Write a trained drafter to the folder OUT as vLLM, SGLang and llama.cpp load it.

    RUN_OR_CHECKPOINT is a run's folder (its best drafter is taken, or its last checkpoint if none was evaluated), one
    checkpoint's or a drafter's. OUT, a new or empty folder, gets config.json and model.safetensors in bf16. How to serve it:
    docs/serving.md.
    """
    from engine.export import export_drafter

    echo_json(export_drafter(source, out, layout=layout, verifier=verifier, with_head=with_head), as_json)


@cli.command()
@click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--out",
    metavar="HTML",
    type=NewFile(),
    help="Where the page goes; left out, report.html in the run's folder.",
)
@json_option
def report(run_folder: Path, out: Path | None, as_json: bool) -> None:
    """Make one HTML page of a run, finished, under way or interrupted.

    RUN is the run's folder. The page loads nothing: loss, accept length per slot, tokens/s by bucket, padding, time by phase,
    memory, and every generation of graphs with its reason. docs/watch.md shows one.
    """
    from engine.report_page import write_report

    echo_json(write_report(run_folder, out), as_json)


@cli.command("eval", short_help="Measure a drafter on a dataset or by decoding.")
@click.argument("drafter", type=click.Path(path_type=Path))
@click.argument("data", required=False, type=click.Path(path_type=Path))
@click.option(
    "--target",
    metavar="TARGET",
    help="Decode for real with this target: a folder or hub id that transformers loads, or 'embedded', the demo's.",
)
@click.option(
    "--prompts",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="What to continue: .txt, a prompt a line, or .jsonl with text, messages, conversations or input_ids.",
)
@click.option(
    "--max-new-tokens", type=click.IntRange(min=2), default=256, show_default=True, help="Length of each text."
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="0: greedy, the text is compared with the target's own. Above 0: drawn from the target's distribution.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the draws.")
@click.option(
    "--samples", type=click.IntRange(min=1), default=1, show_default=True, help="Texts drawn for each prompt."
)
@click.option(
    "--plot", metavar="PNG", type=click.Path(path_type=Path, dir_okay=False), help="Draw accuracy and acceptance."
)
@config_option
@set_option
@json_option
def evaluate(
    drafter: Path,
    data: Path | None,
    target: str | None,
    prompts: Path | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    samples: int,
    plot: Path | None,
    config: str | None,
    overrides: Sequence[str],
    as_json: bool,
) -> None:
    """Measure a drafter on the dataset in the folder DATA, by decoding with its target, or both.

    DRAFTER is a run's folder (its best drafter is taken, with the run's settings unless --config names others), a
    checkpoint's or a drafter's. On DATA it prints loss, accuracy per slot and the accepted length of a block,
    teacher-forced: every block starts from the data's own tokens. With --target it decodes the prompts and prints what a
    verification accepts, the speed-up, and how many tokens are off the target's own text. Of the settings it uses
    [data], [buckets] and [run]. docs/evaluate.md explains the figures.
    """
    if prompts is not None and target is None:
        raise click.UsageError("Expected --target with --prompts, found none.")
    if data is None and target is None:
        raise click.UsageError("Expected DATA, --target or both, found neither.")
    if prompts is None and target not in (None, "embedded"):
        raise click.UsageError("Expected --prompts with --target, found none.")
    if samples > 1 and temperature == 0:
        raise click.UsageError("Expected --temperature above 0 with --samples: greedy texts of one prompt are equal.")
    described = drafter / "settings.toml"
    settings = load_settings(config or (str(described) if described.is_file() else None), overrides)
    from engine.evaluate import evaluate_drafter

    decode = None
    if target is not None:
        from engine.decode_prompts import DecodeOptions, DecodeRequest

        decode = DecodeRequest(target, prompts, DecodeOptions(max_new_tokens, temperature, seed, samples))
    echo_json(evaluate_drafter(drafter, data, settings, decode=decode, plot=plot), as_json)


@cli.command(short_help="What of the engine this machine can do, and what not.")
@click.option(
    "--disk",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Measure the disk of this folder, left out the current one's: a file of 64 MiB is written, read and removed.",
)
@click.option(
    "--measure/--no-measure",
    default=True,
    show_default=True,
    help="With a GPU, try settings of allocator and module loading in short processes of their own.",
)
@json_option
def doctor(disk: Path | None, measure: bool, as_json: bool) -> None:
    """Show what this machine is, what stands in the way, and what of the engine will work on it.

    Software, GPUs and who holds their memory, shared-memory limits, environment variables that help or hurt here, locked
    memory, optional packages, disk speed; without a GPU what the CPU can do. docs/trouble.md
    """
    from engine.doctor import run_doctor

    echo_json(run_doctor(disk, measure=measure), as_json)


cli.add_command(data)
cli.add_command(graphs)


def run(group: click.Group, args: Sequence[str] | None = None) -> int:
    """Runs a command line (None: the process's own) and returns its exit code.

    Errors that a user can mend (ValueError, OSError, MemoryError and what is derived from them, a failed capture, a full
    GPU) become one line on stderr. Anything else is a fault of ours and keeps its traceback.
    """
    set_what_helps()
    try:
        with noting_interrupts() as interrupted:
            return _run(group, list(sys.argv[1:] if args is None else args), interrupted)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED


def _run(group: click.Group, args: list[str], interrupted: Callable[[], bool]) -> int:
    traceback = False
    try:
        with group.make_context(PROGRAM, args) as context:
            traceback = context.params["traceback"]
            code = group.invoke(context)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        used = error.ctx if isinstance(error, click.UsageError) else None
        hint = f" See `{used.command_path} --help`." if used is not None else ""
        click.echo(f"error: {_one_line(error.format_message())}{hint}", err=True)
        return error.exit_code
    except Exception as error:
        if interrupted():
            # Ctrl-C came while a library was at work that made an error of its own of it.
            raise KeyboardInterrupt from error
        message = message_of(error)
        if traceback or message is None:
            raise
        click.echo(f"error: {_one_line(message) or type(error).__name__}", err=True)
        return EXIT_USAGE if isinstance(error, SettingsError) else EXIT_FAILED


def _one_line(text: str) -> str:
    # Names of files may hold a terminal's commands.
    return printable(" ".join(text.split()), most=100_000)
