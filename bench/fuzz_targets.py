"""Our own formats as targets of the fuzzer: datasets, drafters, training checkpoints, settings, graphs.json."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console

from bench.fuzz_case import Broken, Files, Target, check_samples
from bench.fuzz_foreign import FOREIGN
from bench.fuzz_mutations import cross, dump_json, mutate_json, mutate_safetensors, mutate_toml
from bench.workloads import RandomInputs
from buffers.dataset import Dataset, load_target_tensors
from buffers.dataset_writer import DatasetWriter
from buffers.host_memory import HostMemory
from buffers.manifest import MANIFEST, TARGET_FILE
from buffers.open_dataset import open_dataset
from buffers.shapes import Bucket
from engine.assemble import drafter_config
from engine.checkpoint import (
    CONFIG_FILE,
    STATE_FILE,
    TRAINING_FILE,
    WEIGHTS_FILE,
    DataIdentity,
    Position,
    check_whole,
    checkpoint_folder,
    load_checkpoint,
    save_drafter,
    saved_config,
    saved_weights,
    seal,
)
from engine.checkpoint_writer import CheckpointWriter
from engine.drafter_config import FULL, SLIDING, DrafterConfig
from engine.engine import Engine, FrozenTarget
from engine.export import load_drafter
from engine.graphs_record import bucket_figures, print_record
from engine.inspection import inspect_dataset
from engine.params import initial_parameters, parameter_shapes
from engine.rope import RopeConfig, rope_attention_scaling, rope_cos_sin, rope_inv_freq
from engine.settings import ObjectiveSettings, OptimizerSettings, Settings, load_settings
from engine.snapshot import Snapshot
from engine.speculators_layout import to_speculators
from graphs.fingerprint import Fingerprint
from graphs.record import FILE as GRAPHS_FILE
from graphs.record import BucketRecord, GraphFigures, Record, read_record, write_record

D, V, LENGTHS = 4, 50, (5, 9, 3)
OUTSIDE = Path("/etc/hostname")
Seeds = Sequence[dict[str, bytes]]


def _files_of(make: Callable[..., object], *arguments: object) -> dict[str, bytes]:
    """What make(folder, *arguments) writes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "x"
        make(folder, *arguments)
        return {
            str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
        }


def _datasets() -> list[dict[str, bytes]]:
    """Two shards without, and one with last_hidden and the target's tensors."""

    def write(folder: Path, norm: str | None) -> None:
        config = {
            "model_type": "qwen3",
            "hidden_size": D,
            "intermediate_size": 8,
            "num_hidden_layers": 6,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "eos_token_id": [3, 4],
            "vocab_size": V,
            "rms_norm_eps": 1e-6,
        }
        generator = torch.Generator().manual_seed(len(norm or ""))
        with DatasetWriter(
            folder,
            target_name="tiny",
            target_config=config,
            hidden_size=D,
            target_layer_ids=(1, 4),
            vocab_size=V,
            mask_token_id=V - 1,
            last_hidden_norm=norm,
            shard_tokens=100 if norm else 14,
        ) as out:
            for length in LENGTHS:
                ids = torch.randint(V - 1, (length,), generator=generator)
                states = torch.randn(length, 2 * D, generator=generator)
                last = torch.randn(length, D, generator=generator) if norm else None
                out.add(ids, (torch.arange(length) > 0).int(), states, last)
            if norm:
                embed, head = torch.randn(2, V, D, generator=generator)
                out.write_target(embed, head.clone(), torch.ones(D))

    return [_files_of(write, norm) for norm in (None, "pre")]


def _damage_manifest(rng: Random, files: dict[str, bytes], seeds: Seeds) -> Files:
    other = rng.choice(seeds)[MANIFEST]
    if rng.random() < 0.03:
        return files | {rng.choice(sorted(files)): rng.choice((OUTSIDE, Path("."), Path("loop"), Path(MANIFEST)))}
    if rng.random() < 0.1:
        manifest = json.loads(files[MANIFEST])
        names = (
            "../x",
            "/etc/hostname",
            ".",
            "..",
            "",
            "a\nb",
            "a\0b",
            "\ud800",
            "x" * 300,
            "x" * 5000,
            "./shard-00000.safetensors",
        )
        rng.choice(manifest["shards"])["file"] = rng.choice((*names, MANIFEST, TARGET_FILE, "x/../" + sorted(files)[1]))
        return files | {MANIFEST: dump_json(manifest)}
    return files | {MANIFEST: mutate_json(rng, files[MANIFEST], other)}


def _damage_shards(rng: Random, files: dict[str, bytes], seeds: Seeds) -> Files:
    """The manifest mostly says the damaged files' sizes and hashes: only their content is at fault."""
    tensors = [name for name in files if name.endswith(".safetensors")]
    found = dict(files)
    if rng.random() < 0.1:
        found = cross(rng, found, seeds)
    else:
        name, other = rng.choice(tensors), rng.choice(seeds)
        donor = other[rng.choice([name for name in other if name.endswith(".safetensors")])]
        found[name] = mutate_safetensors(rng, files[name], donor)
    with contextlib.suppress(ValueError):
        manifest = json.loads(found[MANIFEST])
        for shard in manifest["shards"]:
            content = found.get(shard["file"])
            if content is not None and rng.random() < 0.95:
                shard |= {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        found[MANIFEST] = json.dumps(manifest).encode()
    return found


def _read_dataset(folder: Path) -> None:
    dataset = open_dataset(folder)
    check_samples(dataset)
    if not isinstance(dataset, Dataset) or len(dataset.info.digest) != 64:
        raise Broken("it is no dataset of ours")
    if (folder / TARGET_FILE).exists():
        load_target_tensors(folder)
    if dataset.info.digest[0] not in "0123":
        return  # what follows takes five times as long as reading: for a part of the inputs
    with _silence():
        json.dumps(inspect_dataset(folder, Settings(), verify=True))
    _check_config(drafter_config(Settings(), dataset.info))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _drafter_config(**changes: Any) -> DrafterConfig:
    sizes: dict[str, Any] = {
        "block_size": 4,
        "mask_token_id": V - 1,
        "target_layer_ids": (1, 4),
        "num_target_layers": 6,
        "hidden_size": D,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "vocab_size": V,
        "layer_types": (FULL,),
    }
    return DrafterConfig(**sizes | changes)


def _drafters() -> list[dict[str, bytes]]:
    """z-lab's layout, plain and with sliding layers and yarn; speculators'; and z-lab's in two shards with an index."""
    yarn = RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=1024, attention_factor=1.1)
    plain, odd = _drafter_config(), _drafter_config(layer_types=(SLIDING, FULL), sliding_window=8, rope=yarn)

    def write(folder: Path, config: DrafterConfig, speculators: bool = False) -> None:
        def describe(found: dict[str, object]) -> dict[str, object]:
            return to_speculators(found, "target", ["Qwen3ForCausalLM"]) if speculators else found

        save_drafter(folder, config, initial_parameters(config, seed=0), describe=describe)

    found = [_files_of(write, config) for config in (plain, odd)]
    found.append(_files_of(write, plain, True))
    with tempfile.TemporaryDirectory() as name:
        save_drafter(Path(name) / "x", plain, initial_parameters(plain, seed=0))
        weights = load_drafter(Path(name) / "x")[1]
    names = {f"model-0000{part}-of-00002.safetensors": [n for n in weights if ("mlp" in n) == part] for part in (0, 1)}
    from safetensors.torch import save

    index = {"metadata": {}, "weight_map": {n: file for file, part in names.items() for n in part}}
    parts = {file: save({n: weights[n] for n in part}) for file, part in names.items()}
    found.append(
        {CONFIG_FILE: found[0][CONFIG_FILE], f"{WEIGHTS_FILE}.index.json": json.dumps(index).encode(), **parts}
    )
    return found


def _damage_drafter_config(rng: Random, files: dict[str, bytes], seeds: Seeds) -> Files:
    names = [name for name in files if name.endswith(".json")]
    name = CONFIG_FILE if rng.random() < 0.9 else rng.choice(names)
    return files | {name: mutate_json(rng, files[name], rng.choice(seeds)[CONFIG_FILE])}


def _damage_drafter_weights(rng: Random, files: dict[str, bytes], seeds: Seeds) -> Files:
    if rng.random() < 0.1:
        return cross(rng, files, seeds)
    names = [name for name in files if name.endswith(".safetensors")]
    return files | {(name := rng.choice(names)): mutate_safetensors(rng, files[name], files[rng.choice(names)])}


def _check_config(config: DrafterConfig) -> None:
    """What a drafter's config says must give finite positions, and must survive being written."""
    cos, sin = rope_cos_sin(
        torch.arange(8), rope_inv_freq(config.rope, config.head_dim), rope_attention_scaling(config.rope)
    )
    if not (cos.isfinite().all() and sin.isfinite().all()):
        raise Broken(f"its positions are not finite: {config.rope}")
    if not (math.isfinite(config.rms_norm_eps) and 0 <= config.rms_norm_eps <= 1):
        raise Broken(f"rms_norm_eps is {config.rms_norm_eps}")
    written = replace(config, dtype="bfloat16").to_json()
    text = json.dumps(written, allow_nan=False)
    if DrafterConfig.from_json(json.loads(text)) != replace(config, dtype="bfloat16"):
        raise Broken("what is written of its config is another one")


def _read_drafter(folder: Path) -> None:
    config, weights = load_drafter(folder, 6)
    shapes = parameter_shapes(config)
    if {name: tuple(tensor.shape) for name, tensor in weights.items()} != shapes:
        raise Broken("its tensors are not its config's")
    for tensor in weights.values():
        tensor.float().sum()
    _check_config(config)


def _engine() -> Engine:
    config, device, bucket = _drafter_config(), torch.device("cpu"), Bucket(1, 128, 32, 4)
    embed, head = torch.randn(2, V, D, generator=torch.Generator().manual_seed(1))
    inputs = RandomInputs(config, [bucket], device, torch.float32)
    engine = Engine(
        config,
        FrozenTarget(embed, head, torch.ones(D)),
        [bucket],
        inputs,
        device=device,
        objective=ObjectiveSettings(),
        optimizer=OptimizerSettings(),
    )
    engine.params.draw_(0)
    return engine


# One for all inputs: a checkpoint is copied into its memory.
_one_engine = cache(_engine)


def _checkpoints() -> list[dict[str, bytes]]:
    data = DataIdentity(num_samples=10, num_tokens=1000, digest="ab" * 32, longest=120)

    def write(folder: Path, position: Position) -> None:
        engine = _engine()
        memory = HostMemory(Snapshot.nbytes(engine.config), engine.device)
        writer = CheckpointWriter(folder.parent / "root", Snapshot(engine, memory), engine.config)
        writer.save(position, {"seed": 0, "schedule": {}, "settings": {}, "fingerprints": {}}, keep=1)
        writer.wait()
        shutil.move(checkpoint_folder(folder.parent / "root", position.step), folder)

    logged = _engine().metrics.snapshot().read()
    positions = (
        Position(8, 1, ((3, 0), (7, 0)), data, logged),
        Position(0, 0, (), data, None),
    )
    return [_files_of(write, position) for position in positions]


def _damage_checkpoint(rng: Random, files: dict[str, bytes], seeds: Seeds) -> Files:
    other = rng.choice(seeds)
    found = dict(files)
    match rng.randrange(10):
        case 0:
            found = cross(rng, files, seeds)
        case 1 | 2 | 3 | 4:
            found[STATE_FILE] = mutate_json(rng, files[STATE_FILE], other[STATE_FILE])
        case _:
            found[TRAINING_FILE] = mutate_safetensors(rng, files[TRAINING_FILE], other[TRAINING_FILE])
    if rng.random() < 0.1:
        return found
    # The checksums are mostly made right: damage gets past them only when it was written so.
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        state = json.loads(found[STATE_FILE])
        content = found[TRAINING_FILE]
        if isinstance(state.get("files"), dict) and rng.random() < 0.9:
            told = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            state["files"][TRAINING_FILE] = told
        state.pop("sha256", None)
        found[STATE_FILE] = seal(state).encode()
    return found


def _read_checkpoint(folder: Path) -> None:
    check_whole(folder)
    config, weights = saved_config(folder), saved_weights(folder)
    if config.to_json() != _drafter_config().to_json():
        _check_config(config)
    engine = _one_engine()
    position = load_checkpoint(folder, engine)
    if position.step < 0 or position.epoch < 0 or any(min(row) < 0 or row[0] >= 10**9 for row in position.consumed):
        raise Broken(f"its position is {position}")
    if position.logged is not None:
        json.dumps((engine.metrics.snapshot().read() - position.logged).means())
    if not engine.metrics.sums.isfinite().all():
        raise Broken("its metrics are not finite")
    for name, tensor in engine.params.state().items():
        if not torch.equal(weights[name].to(tensor.dtype), tensor):
            raise Broken(f"{name} is not what was loaded")


def _settings() -> list[dict[str, bytes]]:
    others = (
        '[model]\nlayer_types = ["full", "sliding"]\nnum_hidden_layers = 2\nsliding_window = 64\n',
        '[data]\npath = ["a", "b"]\nweights = [1, 0.5]\ntarget_layer_ids = [1, 2]\n[run]\nsinks = ["wandb"]\n',
        "[buckets]\nlengths = [128, 256]\npacking = true\n[objective]\nkl_weight = 1e-1\n[optimizer]\nlr = 3e-4\n",
    )
    return [{"run.toml": text.encode()} for text in (Settings().to_toml(), *others)]


def _damage_settings(rng: Random, files: dict[str, bytes], seeds: Seeds) -> Files:
    return {"run.toml": mutate_toml(rng, files["run.toml"], rng.choice(seeds)["run.toml"])}


def _read_settings(folder: Path) -> None:
    settings = load_settings(folder / "run.toml")
    json.dumps(settings.to_dict(), allow_nan=False)
    (folder / "again.toml").write_text(settings.to_toml(), encoding="utf-8")
    if load_settings(folder / "again.toml") != settings:
        raise Broken("what is written of the settings says something else")


def _records() -> list[dict[str, bytes]]:
    fields = Fingerprint.of({"bucket": "1x128x32", "torch": "2.11", "device": "GPU"})
    graph = GraphFigures("train 1x128x32", 321, 64.0, 1.5, 2.0, 0.1)
    bucket = BucketRecord("1x128x32", fields, "replayed", (graph,), "equal bits", 0.2, 12.0, 9.0, 8.0, 0.5, 60.0)
    record = Record(3, (bucket, replace(bucket, bucket="1x256x32")), (graph,), (("compile", 1.0),), 7, 2000.0)
    return [_files_of(write_record, told) for told in (record, Record(4, ()))]


def _damage_record(rng: Random, files: dict[str, bytes], seeds: Seeds) -> Files:
    content = mutate_json(rng, files[GRAPHS_FILE], rng.choice(seeds)[GRAPHS_FILE])
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(content)
        if isinstance(found, dict) and rng.random() < 0.8:
            # As if it had been written so.
            parts = {name: value for name, value in found.items() if name not in ("format", "version", "sha256")}
            told = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
            content = json.dumps(found | {"sha256": told}).encode()
    return {GRAPHS_FILE: content}


def _read_record(folder: Path) -> None:
    record = read_record(folder)
    if record is None:
        raise Broken("there is no record")
    json.dumps([bucket_figures(bucket) for bucket in record.buckets])
    with open(os.devnull, "w") as nowhere:
        print_record(record, Console(file=nowhere, width=200))
    for bucket in record.buckets:
        record.verified_before(bucket.bucket, False, bucket.fingerprint)


OWN: Mapping[str, Callable[[], Target]] = {
    "dataset-manifest": lambda: Target("dataset-manifest", _datasets(), _damage_manifest, _read_dataset),
    "dataset-shards": lambda: Target("dataset-shards", _datasets(), _damage_shards, _read_dataset),
    "drafter-config": lambda: Target("drafter-config", _drafters(), _damage_drafter_config, _read_drafter),
    "drafter-weights": lambda: Target("drafter-weights", _drafters(), _damage_drafter_weights, _read_drafter),
    "checkpoint": lambda: Target("checkpoint", _checkpoints(), _damage_checkpoint, _read_checkpoint),
    "settings": lambda: Target("settings", _settings(), _damage_settings, _read_settings, settings=True),
    "graphs": lambda: Target("graphs", _records(), _damage_record, _read_record),
}
TARGETS: Mapping[str, Callable[[], Target]] = {**OWN, **FOREIGN}
