"""Every setting of a training run, once: name, default, range and help. Files and `--set` are read here.

`python -m engine.settings > docs/settings.md` writes the table for readers; a test compares the two.
"""

import codecs
import dataclasses
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from buffers.untrusted import one_line, shown, shown_names
from engine.settings_fields import (
    SettingsError,
    check_fields,
    expected,
    field_types,
    from_text,
    from_toml,
    section_name,
    setting,
)

# gamma of the decay for a block of K tokens, from the DFlash paper (arXiv 2602.06036).
PAPER_GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}
LEAST_GAMMA = 0.01  # exp(-1 / 0.01) is 0 in fp32, and -0 / gamma must stay a number
# What a name is compared by where the nearest is looked for.
_MOST_NAME = 60
SINK_NAMES = ("tensorboard", "wandb")  # what they are: engine/sinks.py


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The drafter. What is 0 is taken from the target."""

    num_hidden_layers: int = setting(5, "drafter layers; 5 as in z-lab's Qwen3-8B-DFlash-b16", change="restart", low=1)
    block_size: int = setting(
        16, "K, tokens of a draft block, the anchor's included; 16 as in z-lab's b16", change="restart", low=2
    )
    intermediate_size: int = setting(0, "width of the MLP", change="restart", low=0)
    num_attention_heads: int = setting(0, "query heads", change="restart", low=0)
    num_key_value_heads: int = setting(0, "key and value heads", change="restart", low=0)
    head_dim: int = setting(0, "width of a head", change="restart", low=0)
    layer_types: tuple[str, ...] = setting(
        ("full",), "full or sliding: one word for all layers, or one for each layer", change="restart"
    )
    sliding_window: int = setting(
        0, "context and draft tokens that a sliding layer sees; 0 without sliding layers", change="restart", low=0
    )
    causal: Literal["auto", "yes", "no"] = setting(
        "auto",
        "whether a slot sees only the slots up to its own in its block; auto: in sliding layers, not in full ones, as servers "
        "assume; yes and no hold for every layer and are exported as is_causal",
        change="restart",
    )
    initializer_range: float = setting(
        0.02, "standard deviation of new weights; 0.02 as in z-lab's config.json", change="restart", above=0.0
    )
    init: str = setting(
        "",
        "folder of a drafter (config.json, model.safetensors; z-lab's or speculators' layout) to start from instead of new "
        "weights; its config.json wins over the sizes given here; `train --init`",
        change="restart",
    )
    attention: Literal["auto", "triton", "flex", "reference"] = setting(
        "auto",
        "triton: kernels made for this mask; flex: compiled flex_attention; reference: plain torch, small-scale only; auto: "
        "triton on CUDA, reference on the CPU",
        change="recapture",
    )
    recompute: Literal["none", "mlp", "layer"] = setting(
        "none",
        "what the backward pass forms again instead of keeping it: nothing, the MLP's hidden values, or whole layers; less "
        "memory for more time",
        change="recapture",
    )
    head_chunk: int = setting(
        2048,
        "rows of logits that exist at a time; with soft labels the target's exist beside them, for all context positions of "
        "a batch if these are fewer than its draft positions",
        change="recapture",
        low=1,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        unknown = [word for word in self.layer_types if word not in ("full", "sliding")]
        if unknown or len(self.layer_types) not in (1, self.num_hidden_layers):
            raise SettingsError(
                f"model.layer_types: expected full or sliding, once or {self.num_hidden_layers} times "
                f"(num_hidden_layers), found {shown_names(self.layer_types) or 'nothing'}."
            )
        if ("sliding" in self.layer_types) != (self.sliding_window > 0):
            raise SettingsError(
                f"model.sliding_window: expected more than 0 exactly when model.layer_types has sliding layers, found "
                f"{self.sliding_window} with {shown_names(self.layer_types)}. Set both or neither."
            )

    @property
    def types_of_layers(self) -> tuple[str, ...]:
        """One of "full_attention" and "sliding_attention" (config.json's words) for each drafter layer."""
        words = self.layer_types * (self.num_hidden_layers if len(self.layer_types) == 1 else 1)
        return tuple(f"{word}_attention" for word in words)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The hidden states to train on."""

    path: str | tuple[str, ...] = setting(
        "",
        "dataset folder to train on: ours (dataset.json and its shards), or hidden states of SpecForge, speculators, "
        "Model-Optimizer or DeepSpec, for which target, mask_token_id and mostly target_layer_ids are needed; or a list of "
        "folders, in any of these formats, as a mixture (docs/data.md); --set splits at commas",
        change="restart",
    )
    weights: tuple[float, ...] = setting(
        (),
        "for each folder of path how often an epoch has its samples: 2 is twice, 0.5 half of them and the other half in the "
        "next epoch; empty is 1 for each",
        change="restart",
        above=0.0,
        high=1000.0,
    )
    eval_path: str = setting(
        "", "dataset folder of held-out samples; empty trains without evaluation", change="restart"
    )
    target: str = setting(
        "", "folder of the target's checkpoint; empty means the dataset's own target.safetensors", change="restart"
    )
    target_layer_ids: tuple[int, ...] = setting(
        (),
        "layers that another trainer's hidden states come from, in their order, counted from 0 (speculators counts from 1); "
        "empty takes what the dataset says",
        change="restart",
        low=0,
    )
    mask_token_id: int = setting(
        -1, "mask token for another trainer's hidden states; -1 takes what the dataset says", change="restart", low=-1
    )
    last_hidden_norm: Literal["auto", "pre", "post", "none"] = setting(
        "auto",
        "another trainer's last hidden states: before or after the target's final norm, or not to be read; auto takes what the "
        "format fixes, which Model-Optimizer's does not",
        change="restart",
    )
    on_bad_file: Literal["refuse", "skip"] = setting(
        "refuse",
        "files of another trainer's dataset that cannot be used: stop and name them, or leave them out",
        change="restart",
    )
    too_long: Literal["skip", "truncate", "split"] = setting(
        "skip",
        "samples longer than the largest bucket: leave out, cut off, or cut into pieces; all are listed",
        change="recapture",
    )
    on_nonfinite: Literal["refuse", "skip"] = setting(
        "refuse",
        "samples with NaN or infinity in their hidden states: stop and name the sample, or leave it out",
        change="live",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if not all(self.folders):
            raise SettingsError(
                f"data.path: expected the name of a folder everywhere, found {shown(list(self.folders))}."
            )
        if self.folders and self.weights and len(self.weights) != len(self.folders):
            raise SettingsError(
                f"data.weights: expected a number for each folder of data.path, {len(self.folders)} in all, found "
                f"{shown(list(self.weights))}. Set as many, or leave it empty: 1 for each."
            )

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of path; () when it is empty."""
        if isinstance(self.path, str):
            return (self.path,) if self.path else ()
        return self.path


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketsSettings:
    """The shapes of a step: rows B, context tokens S and draft blocks N of each bucket."""

    max_buckets: int = setting(
        6, "most buckets that the planner may make; each costs one capture", change="recapture", low=1
    )
    token_budget: int = setting(
        32768,
        "most B * (S + N * K) of a bucket: context and draft tokens of a step; made for a GPU, on a CPU 2048 keeps steps short",
        change="recapture",
        low=1,
    )
    max_length: int = setting(
        0,
        "longest sample to plan for, rounded up to the attention tile (128); 0 means the longest of the dataset; packed rows "
        "may be longer",
        change="recapture",
        low=0,
    )
    max_rows: int = setting(64, "most rows B of a bucket", change="recapture", low=1)
    num_anchors: int = setting(
        512,
        "most draft blocks of a row; 512 as in SpecForge, TorchSpec, Model-Optimizer and NeMo Automodel",
        change="recapture",
        low=1,
    )
    lengths: tuple[int, ...] = setting(
        (),
        "bucket lengths S to use instead of planned ones, ascending; rounded up to the attention tile (128)",
        change="recapture",
        low=1,
    )
    packing: bool = setting(
        False,
        "several documents in a row, each with the blocks it would have alone (docs/packing.md); false: one sample a row",
        change="recapture",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if any(a >= b for a, b in zip(self.lengths, self.lengths[1:], strict=False)):
            raise SettingsError(
                f"buckets.lengths: expected ascending lengths, found {shown(list(self.lengths))}. Sort them."
            )
        if self.lengths and self.max_length:
            raise SettingsError(
                f"buckets.max_length: expected 0 with buckets.lengths, found {self.max_length}. The last of the "
                "lengths is the longest sample; leave one of the two out."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """The loss. Its weights and gamma are values on the device: changing them needs no new capture."""

    weighting: Literal["decay", "uniform", "dpace"] = setting(
        "decay",
        "weights of a block's slots: decay (arXiv 2602.06036), uniform, or dpace (D-PACE, arXiv 2605.18810)",
        change="recapture",
    )
    gamma: float = setting(
        0.0,
        "slot k weighs exp(-(k-1) / gamma); 0 takes the paper's 4, 5, 7 for K = 8, 10, 16, linear between them and "
        "constant beyond",
        change="live",
        low=0.0,
    )
    dpace_alpha: float = setting(
        0.5, "smoothing of D-PACE's probabilities; 0.5 by its paper", change="recapture", low=0.0, high=1.0
    )
    ce_weight: float = setting(1.0, "weight of the cross entropy with the data's tokens", change="live", low=0.0)
    kl_weight: float = setting(
        0.0,
        "weight of KL(target || drafter); more than 0 needs last_hidden in the dataset",
        change="live",
        from_low="recapture",
        low=0.0,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if 0.0 < self.gamma < LEAST_GAMMA:
            raise SettingsError(
                f"objective.gamma: expected 0 (the paper's) or at least {LEAST_GAMMA}, found {self.gamma}, with which slot 2 "
                "weighs nothing even in fp32. Set it higher, or model.block_size to 2 to train slot 1 alone."
            )
        if self.ce_weight + self.kl_weight == 0.0:
            raise SettingsError("objective: expected ce_weight or kl_weight above 0, found 0 for both. Set one.")

    def gamma_for(self, block_size: int) -> float:
        """The gamma in force for blocks of `block_size` tokens."""
        if self.gamma > 0.0:
            return self.gamma
        sizes = sorted(PAPER_GAMMA)
        size = min(max(block_size, sizes[0]), sizes[-1])
        low = max(known for known in sizes if known <= size)
        high = min(known for known in sizes if known >= size)
        part = (size - low) / (high - low) if high > low else 0.0
        return PAPER_GAMMA[low] + part * (PAPER_GAMMA[high] - PAPER_GAMMA[low])


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW on fp32 masters, with a clip of the global norm."""

    lr: float = setting(
        6e-4,
        "highest learning rate; 6e-4 as in SpecForge's qwen3-8b-dflash-offline recipe (TorchSpec, Model-Optimizer, "
        "NeMo Automodel and DeepSpec use the same)",
        change="live",
        above=0.0,
    )
    schedule: Literal["cosine", "constant"] = setting(
        "cosine", "after the warm-up; cosine as in SpecForge, TorchSpec, NeMo Automodel and DeepSpec", change="live"
    )
    warmup_ratio: float = setting(
        0.04, "part of all steps with a rising rate; 0.04 as in SpecForge's recipe", change="live", low=0.0, below=1.0
    )
    min_lr_ratio: float = setting(
        0.0,
        "where cosine ends, as a part of lr; NeMo Automodel and TorchSpec end at 0.1",
        change="live",
        low=0.0,
        high=1.0,
    )
    beta1: float = setting(
        0.9, "decay of the first moment; 0.9 as in NeMo Automodel", change="live", low=0.0, below=1.0
    )
    beta2: float = setting(
        0.95, "decay of the second moment; 0.95 as in NeMo Automodel", change="live", low=0.0, below=1.0
    )
    eps: float = setting(
        1e-8, "added to the root of the second moment; 1e-8 as in torch.optim.AdamW", change="live", above=0.0
    )
    weight_decay: float = setting(0.0, "decoupled weight decay; 0 as in SpecForge", change="live", low=0.0)
    clip_norm: float = setting(
        1.0,
        "largest global norm of the gradient; 1.0 as in SpecForge's recipe; 0 does not clip",
        change="live",
        low=0.0,
    )
    grad_dtype: Literal["bf16", "fp32"] = setting(
        "bf16",
        "type of the gradient arena; fp32 doubles its memory; always fp32 when precision is fp32",
        change="restart",
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Where the run goes, how long it is, and what it writes."""

    output: str = setting("runs/drafter", "folder of the run: checkpoints, metrics.jsonl, settings", change="restart")
    epochs: int = setting(
        6, "passes over the data; 6 as in SpecForge's run_qwen3_8b_dflash_online.sh", change="live", low=1
    )
    max_steps: int = setting(
        0, "optimizer steps to stop at, if earlier than the epochs' end; 0 means no limit", change="live", low=0
    )
    accumulation: int = setting(
        1,
        "batches of an optimizer step; they may be of different buckets; with more than 1 every bucket has a second graph, which "
        "adds to the sums that the first began",
        change="live",
        from_low="recapture",
        low=1,
    )
    seed: int = setting(0, "seed of new weights, of the order of samples and of the anchors", change="restart", low=0)
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "auto: CUDA if there is a device; cuda: refuse without one", change="restart"
    )
    precision: Literal["auto", "bf16", "fp32", "fp8"] = setting(
        "auto",
        "of the step's arithmetic; auto: bf16 on CUDA, fp32 on the CPU; fp8: bf16, but e4m3 in the matmuls of the MLP and the "
        "draft stream's q, k, v, o (compute capability 8.9 or newer); evaluation stays bf16, as inference is",
        change="restart",
    )
    log_every: int = setting(10, "steps between two lines of metrics", change="live", low=1)
    sinks: tuple[str, ...] = setting(
        (),
        "where metrics go beside metrics.jsonl: tensorboard, wandb (docs/watch.md); read when the run starts",
        change="live",
    )
    eval_every: int = setting(
        200, "steps between two evaluations on data.eval_path; 0 evaluates at the end only", change="live", low=0
    )
    eval_batches: int = setting(0, "most batches of an evaluation; 0 means all", change="live", low=0)
    save_every: int = setting(
        500, "steps between two checkpoints; the last step always has one; 0 means only that", change="live", low=0
    )
    switch_interval_ms: float = setting(
        0.1,
        "longest turn of a busy Python thread while another one waits, during training; 0 leaves Python's own 5 ms, with which "
        "busy threads starve the loader",
        change="live",
        low=0.0,
        high=1000.0,
    )
    regenerate: Literal["beside", "after"] = setting(
        "beside",
        "a new generation of graphs is captured beside: while the old one stands, which takes the memory of both; after: when "
        "the old one is freed, which is captured again if the new one fails",
        change="live",
    )
    on_capture_failure: Literal["stop", "eager"] = setting(
        "stop",
        "a bucket whose step cannot be captured: stop and name the line; eager: call its step, and say so in every report",
        change="live",
    )
    keep: int = setting(
        2, "latest checkpoints to keep; the best by evaluation is kept beside them", change="live", low=1
    )
    verify: Literal["always", "changed", "never"] = setting(
        "always",
        "compare every bucket's replay with the eager step on a real batch before the first step; changed: only the buckets that "
        "graphs.json in run.output does not know as verified under the same fingerprint (docs/graphs.md)",
        change="live",
    )
    memory_budget_gib: float = setting(
        0.0,
        "most GiB of device memory to plan for; 0 means what the device has free; a plan that is estimated to need more is "
        "refused before anything is allocated",
        change="live",
        low=0.0,
    )
    check_every: int = setting(
        0,
        "look in every step whether the steady state keeps its promises, and compare replay and eager step every so many steps; "
        "stops at the first that is broken; `train --check` sets 20; 0 looks at nothing (docs/trouble.md)",
        change="live",
        low=0,
    )
    max_bad_steps: int = setting(
        20,
        "steps in a row without a finite gradient, which change nothing but a counter, after which the run stops and "
        "bad_steps.json in run.output names their samples; 0 is never (docs/trouble.md)",
        change="live",
        low=0,
    )
    watchdog_s: float = setting(
        600.0,
        "seconds without any movement after which the run says in what it is stuck: read, stage, replay, checkpoint, ... "
        "(docs/trouble.md); it never stops the run; 0 is never",
        change="live",
        low=0.0,
    )
    cache: str = setting(
        "",
        "folder for compiled kernels, one inside it for every version of torch, Triton, driver and GPU; empty means "
        "~/.cache/dflash-engine",
        change="restart",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        unknown = [name for name in self.sinks if name not in SINK_NAMES]
        if unknown or len(set(self.sinks)) < len(self.sinks):
            raise SettingsError(
                f"run.sinks: expected some of {', '.join(SINK_NAMES)}, each once, found {shown_names(self.sinks)}. Leave out "
                f"{shown_names(unknown) or 'what is there twice'}."
            )
        if not self.output:
            raise SettingsError("run.output: expected a folder, found nothing. Name one; . is the current folder.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run. Everything is checked when it is built; nothing can be changed afterwards."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    buckets: BucketsSettings = BucketsSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    run: RunSettings = RunSettings()

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain sections of plain values (tuples become lists), as JSON and TOML have them."""
        return {
            section: {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
            for section, fields in dataclasses.asdict(self).items()
        }

    def to_toml(self) -> str:
        """A file that `load_settings` reads back as equal settings."""
        lines = []
        for section, fields in self.to_dict().items():
            lines.append(f"[{section}]")
            # JSON's text, numbers and flat lists are TOML's too, but for DEL, which TOML wants escaped.
            lines.extend(
                f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
                for key, value in fields.items()
            )
            lines.append("")
        return "\n".join(lines)


SECTIONS: dict[str, type[Any]] = {section_name(section): section for section in field_types(Settings).values()}


def load_settings(
    path: str | Path | None = None, overrides: Sequence[str] = (), *, folders: Sequence[str | Path] = ()
) -> Settings:
    """The settings of a TOML file (None: the defaults), changed by `overrides` of the form section.key=value. folders: what a
    command was given in place of data.path.

    Raises SettingsError for a file that is missing or is not TOML, for a section or key that does not exist (with the
    nearest known name), and for a value of the wrong type or out of range.
    """
    tables: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    if path is not None:
        for section, table in _read_toml(Path(path)).items():
            if section not in SECTIONS:
                told = _unknown_section(section) if isinstance(table, dict) else _outside_sections(section)
                raise SettingsError(f"{path}: {told}")
            if not isinstance(table, dict):
                raise SettingsError(f"{path}: {section}: expected a section [{section}], found {shown(table)}.")
            for key, value in table.items():
                tables[section][key] = from_toml(value, _kind(section, key, f"{path}: "))
    for override in overrides:
        name, equals, text = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot):
            near = "" if dot else _meant(name.strip())
            raise SettingsError(f"--set: expected section.key=value, found {shown(override)}{near}.")
        if section not in SECTIONS:
            raise SettingsError(f"--set {shown_names([name], 60)}: {_unknown_section(section)}")
        tables[section][key] = from_text(text.strip(), _kind(section, key, "--set: "))
    if folders:
        tables["data"]["path"] = tuple(map(str, folders))
    return Settings(**{section: SECTIONS[section](**table) for section, table in tables.items()})


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().removeprefix(codecs.BOM_UTF8).decode())
    except OSError as error:
        raise SettingsError(f"{path}: expected a settings file, found none to read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path}: expected TOML, found a mistake: {one_line(error)}.") from error


def _unknown_section(section: str) -> str:
    nearest = difflib.get_close_matches(section[:_MOST_NAME], SECTIONS, n=1, cutoff=0.0)[0]
    return (
        f"unknown section [{shown_names([section], 40)}]; the nearest is [{nearest}]. Sections: {', '.join(SECTIONS)}."
    )


def _outside_sections(key: str) -> str:
    return f"expected settings in sections, found {shown_names([key], 40)} outside of them{_meant(key)}."


def _meant(key: str) -> str:
    """; the nearest is optimizer.lr: where a key without its section is in some of them or near one."""
    known = [(section, name) for section in SECTIONS for name in field_types(SECTIONS[section])]
    near = difflib.get_close_matches(key[:_MOST_NAME].lower(), [name for _, name in known], n=1)
    names = [f"{section}.{name}" for section, name in known if name in near]
    return f"; the nearest is {' or '.join(names)}" if names else ""


def _kind(section: str, key: str, where: str) -> Any:
    """The declared type of section.key."""
    kinds = field_types(SECTIONS[section])
    if key not in kinds:
        known = [f"{other}.{name}" for other in SECTIONS for name in field_types(SECTIONS[other])]
        # The right key under the wrong section is likelier than a misspelt one.
        same = [name for name in known if name.endswith(f".{key}")]
        near = same or [f"{section}.{name}" for name in difflib.get_close_matches(key[:_MOST_NAME].lower(), kinds, n=1)]
        # A name that is like none of ours is another trainer's word: its nearest by letters would mislead.
        told = f"the nearest is {near[0]}" if near else f"[{section}] has {', '.join(kinds)}"
        raise SettingsError(f"{where}unknown setting {section}.{shown_names([key], 60)}; {told}.")
    return kinds[key]


def settings_table() -> str:
    """docs/settings.md: one table a section."""
    lines = [
        "# Settings",
        "",
        "Written by `python -m engine.settings > docs/settings.md` from `engine/settings.py`; do not edit.",
        "",
        "`dflash-engine train run.toml --set optimizer.lr=3e-4 --set buckets.lengths=512,2048` reads a TOML file",
        "with the sections below, then single changes. What is left out has its default. An unknown name or a value",
        "out of range is refused before anything starts.",
        "",
        "The last column says what a change asks of a run that goes on ([reconfigure.md](reconfigure.md)): live - a value is",
        "written; recapture - one new generation of graphs, from the same weights, moments and place in the data; restart -",
        "refused, the run goes on as it was.",
    ]
    for name, section in SECTIONS.items():
        head = ["| setting | default | values | meaning | change |", "|---|---|---|---|---|"]
        lines += ["", f"## [{name}]", "", section.__doc__ or "", "", *head]
        for field in dataclasses.fields(section):
            kind = field_types(section)[field.name]
            values = expected(kind, field.metadata["limits"])
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            text = field.metadata["help"].replace("|", "\\|")
            lines.append(
                f"| `{field.name}` | `{json.dumps(default)}` | {values} | {text} | {_change(field.metadata)} |"
            )
    return "\n".join(lines) + "\n"


def _change(metadata: Mapping[str, Any]) -> str:
    between = f"; {metadata['from_low']} between {metadata['limits'].low:g} and more" if metadata["from_low"] else ""
    return f"{metadata['change']}{between}"


if __name__ == "__main__":
    print(settings_table(), end="")
