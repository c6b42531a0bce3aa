"""`dflash-engine data`: the commands that make and look at datasets."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from engine.cli_options import EXIT_FAILED, config_option, echo_json, json_option, set_option
from engine.settings import Settings, load_settings


@click.group(short_help="Make, check and convert hidden states.")
def data() -> None:
    """Make datasets of hidden states, look at them, and convert those of other trainers."""


# The settings of [data] by short names: what another trainer's files do not say.
FACTS = {
    "target": ("FOLDER", "The target's checkpoint, as data.target."),
    "target-layer-ids": ("ID,ID,...", "Layers of the hidden states, from 0, as data.target_layer_ids."),
    "mask-token-id": ("ID", "As data.mask_token_id."),
    "last-hidden-norm": ("auto|pre|post|none", "As data.last_hidden_norm."),
}


def facts_options(command: Callable[..., None]) -> Callable[..., None]:
    """--target and its like, --config and --set; the command gets them as `settings`."""

    @functools.wraps(command)
    def with_settings(config: str | None, overrides: Sequence[str], **arguments: Any) -> None:
        given = {name: arguments.pop(name.replace("-", "_")) for name in FACTS}
        words = [f"data.{name.replace('-', '_')}={value}" for name, value in given.items() if value is not None]
        command(settings=load_settings(config, [*overrides, *words]), **arguments)

    wrapped: Callable[..., None] = config_option(set_option(with_settings))
    for name, (metavar, text) in reversed(FACTS.items()):
        wrapped = click.option(f"--{name}", metavar=metavar, help=text)(wrapped)
    return wrapped


@data.command("inspect", short_help="Check a dataset and show what it holds.")
@click.argument("path", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--verify", is_flag=True, help="Read every byte: sha256 against the manifest, hidden states for NaN and infinity."
)
@click.option(
    "--recompute",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    help="Run the whole target over N samples (extra hf) and tell of every tap which layer it is.",
)
@facts_options
@json_option
def data_inspect(path: tuple[Path, ...], verify: bool, recompute: int, as_json: bool, settings: Settings) -> None:
    """Check the dataset in the folder PATH, and show its target, sizes and lengths, its bad files and what seems wrong.

    PATH holds a dataset of ours, or hidden states of SpecForge, speculators, Model-Optimizer or DeepSpec. With the
    target at hand (its checkpoint, or the dataset's own copy of its head), the recorded final norm and layer ids are
    compared with what the numbers say. Several folders are looked at one after the other, and as a mixture. Exits with 1
    when there are files that cannot be used, or when the folders cannot be mixed.
    """
    from engine.inspection import inspect_dataset

    if len(path) == 1:
        figures = inspect_dataset(path[0], settings, verify=verify, recompute=recompute)
    else:
        from engine.mixture_inspection import inspect_mixture

        figures = inspect_mixture(path, settings, verify=verify, recompute=recompute)
    echo_json(figures, as_json)
    if figures.get("bad_files") or figures.get("cannot_be_mixed"):
        click.get_current_context().exit(EXIT_FAILED)


@data.command("convert", short_help="Write another trainer's dataset as one of ours.")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@facts_options
@click.option("--skip-bad", is_flag=True, help="Leave out files that cannot be used, as data.on_bad_file=skip.")
@click.option(
    "--shard-tokens",
    type=click.IntRange(min=1),
    default=32768,
    show_default=True,
    help="Tokens of a shard; about two shards are in memory at a time.",
)
@json_option
def data_convert(source: Path, out: Path, settings: Settings, skip_bad: bool, shard_tokens: int, as_json: bool) -> None:
    """Write the hidden states of another trainer in the folder SOURCE as a dataset of ours in the folder OUT.

    It may be killed at any moment: the same command goes on after the last whole shard. At the end all of OUT is read
    back and compared.
    """
    from engine.convert import convert_dataset

    if skip_bad:
        settings = replace(settings, data=replace(settings.data, on_bad_file="skip"))
    echo_json(convert_dataset(source, out, settings, shard_tokens=shard_tokens), as_json)


@data.command("extract", short_help="Write a Hugging Face model's hidden states.")
@click.option(
    "--target", required=True, metavar="DIR_OR_HUB_ID", help="The causal language model, as transformers loads it."
)
@click.option(
    "--data",
    "file",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="JSONL file of conversations.",
)
@click.option("--out", required=True, metavar="FOLDER", type=click.Path(path_type=Path), help="Where the dataset goes.")
@click.option("--layers", metavar="1,9,17", default="", help="Layers to tap, from 0; left out, --num-taps of them.")
@click.option(
    "--num-taps", type=click.IntRange(min=1), default=5, show_default=True, help="Layers by the published spacing."
)
@click.option(
    "--last-hidden",
    type=click.Choice(["pre", "post", "none"]),
    default="pre",
    show_default=True,
    help="Store what goes into the final norm, what comes out of it, or neither; soft labels need one.",
)
@click.option(
    "--mask-token-id",
    type=click.IntRange(min=0),
    help="Left out, the tokenizer's mask token, or the first row of the embedding that the tokenizer does not use.",
)
@click.option(
    "--max-length", type=click.IntRange(min=0), default=4096, show_default=True, help="Tokens of a sample; 0: any."
)
@click.option(
    "--too-long",
    type=click.Choice(["cut", "skip"]),
    default="cut",
    show_default=True,
    help="Longer ones are cut at the end or left out; both are counted.",
)
@click.option("--max-samples", type=click.IntRange(min=0), default=0, show_default=True, help="Stop there; 0: all.")
@click.option(
    "--assistant-only/--all-tokens",
    default=True,
    show_default=True,
    help="Supervise what the assistant says, or every token.",
)
@click.option(
    "--tokenizer",
    default="",
    metavar="DIR_OR_HUB_ID",
    help="Another than the target's; \"bytes\": the embedded target's.",
)
@click.option(
    "--chat-template",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Jinja file to use instead of the tokenizer's.",
)
@click.option(
    "--token-budget",
    type=click.IntRange(min=1),
    default=8192,
    show_default=True,
    help="Tokens of a forward pass, padding included; a longer sample runs alone.",
)
@click.option(
    "--shard-tokens",
    type=click.IntRange(min=1),
    default=32768,
    show_default=True,
    help="Tokens of a shard: what memory holds.",
)
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to run."
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bf16", "fp32"]),
    default="auto",
    show_default=True,
    help="What the target computes in; auto: bf16 on CUDA. Stored is bf16.",
)
@json_option
def data_extract(file: Path, layers: str, as_json: bool, **options: Any) -> None:
    """Write the hidden states of a Hugging Face model over conversations as a dataset.

    A line of the file is {"conversations": [{"role", "content"}, ...]} (or messages; or ShareGPT's from and value),
    {"text"} in the chat template's form, or {"input_ids", "loss_mask"}. After an interruption the same command goes on.
    """
    try:
        ids = tuple(int(layer) for layer in layers.split(",") if layer.strip())
    except ValueError:
        raise click.UsageError(f"--layers: expected numbers with commas between, found {layers!r}.") from None
    from engine.extract_options import ExtractOptions
    from engine.hf_extract import extract_dataset

    echo_json(extract_dataset(ExtractOptions(data=file, layers=ids, **options)), as_json)
