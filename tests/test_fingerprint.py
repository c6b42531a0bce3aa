"""Fingerprints: what changes them, what does not, and how a change is told."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.sources as sources
from buffers.shapes import Bucket
from engine.drafter_config import DrafterConfig
from engine.fingerprints import bucket_fingerprints
from engine.kernels import Ops, reference_ops
from engine.rope import RopeConfig
from engine.settings import load_settings
from engine.sources import files_of
from graphs.fingerprint import BUFFERS, Change, Fingerprint, addresses, hash_of_files
from tests.dataset_helpers import write_dataset
from tests.drafter_helpers import CPU, small_config

BUCKET = Bucket(2, 128, 32, 4)


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_dataset(tmp_path_factory.mktemp("data") / "one", (40, 60), last_hidden=True).info


def fingerprint(
    info: Any, *changes: str, bucket: Bucket = BUCKET, precision: str = "fp32", **model: Any
) -> Fingerprint:
    settings = load_settings(None, changes)
    made = bucket_fingerprints(settings, small_config(**model), info, [bucket], CPU, precision)
    return made[bucket]


def changed(a: Fingerprint, b: Fingerprint) -> list[str]:
    return [change.field for change in b.changes(a)]


def test_what_is_captured_again_changes_it(info: Any) -> None:
    plain = fingerprint(info)
    assert plain == fingerprint(info)
    for field, other in (
        ("bucket", fingerprint(info, bucket=replace(BUCKET, B=1))),
        ("bucket", fingerprint(info, bucket=replace(BUCKET, S=256))),
        ("bucket", fingerprint(info, bucket=replace(BUCKET, N=64))),
        ("bucket", fingerprint(info, bucket=replace(BUCKET, tile=64))),
        ("evaluation", fingerprint(info, "data.eval_path=held-out")),
        ("accumulation", fingerprint(info, "run.accumulation=2")),
        ("model.hidden_size", fingerprint(info, hidden_size=128)),
        ("objective.weighting", fingerprint(info, "objective.weighting=uniform")),
        ("recompute", fingerprint(info, "model.recompute=layer")),
        ("head_chunk", fingerprint(info, "model.head_chunk=512")),
    ):
        assert changed(plain, other) == [field]
        assert other.digest != plain.digest
    assert "dtype" in changed(plain, fingerprint(info, precision="bf16"))
    assert "objective.kl" in changed(plain, fingerprint(info, "objective.kl_weight=0.1"))


def test_every_size_and_rule_of_the_model_counts(info: Any) -> None:
    plain = fingerprint(info)
    others: dict[str, Any] = {
        "block_size": 8,
        "mask_token_id": 510,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 1024,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 9,
        "causal_layers": (True, True),
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(theta=5e5),
    }
    for name, value in others.items():
        assert f"model.{name}" in changed(plain, fingerprint(info, **{name: value})), name
    assert changed(plain, fingerprint(info, target_layer_ids=(1, 2, 3))) == ["model.num_taps"]
    left = {field.name for field in fields(DrafterConfig)} - others.keys()
    idle: dict[str, Any] = {
        "target_layer_ids": (1, 4),
        "num_target_layers": 7,
        "max_position_embeddings": 99,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "dtype": "float32",
    }
    for name, value in idle.items():
        left.remove(name)
        assert fingerprint(info, **{name: value}) == plain, f"no kernel sees {name}"
    assert not left, "a field that nobody decided about"


def test_what_the_arithmetic_of_numbers_and_labels_depends_on(info: Any) -> None:
    bf16 = fingerprint(info, precision="bf16")
    assert changed(bf16, fingerprint(info, "optimizer.grad_dtype=fp32", precision="bf16")) == ["gradients"]
    assert changed(fingerprint(info), bf16) == ["dtype", "gradients", "precision"]
    dpace = fingerprint(info, "objective.weighting=dpace")
    assert changed(dpace, fingerprint(info, "objective.weighting=dpace", "objective.dpace_alpha=0.3")) == [
        "objective.dpace_alpha"
    ]
    pre = replace(info, last_hidden_norm="pre")
    soft = fingerprint(pre, "objective.kl_weight=0.1")
    assert changed(fingerprint(info, "objective.kl_weight=0.1"), soft) == [
        "objective.last_hidden_norm",
        "objective.norm_eps",
    ]
    other = replace(pre, target_config={**pre.target_config, "rms_norm_eps": 1e-5})
    assert changed(soft, fingerprint(other, "objective.kl_weight=0.1")) == ["objective.norm_eps"]
    assert fingerprint(other) == fingerprint(pre), "without soft labels nobody norms the target's hidden states"


def test_what_fp8_is_evaluated_with_counts_where_there_is_evaluation(
    info: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ops(device: torch.device, attention: str, precision: str = "bf16") -> Ops:
        asked.append(precision)
        return reference_ops()

    monkeypatch.setattr("engine.fingerprints.select_ops", ops)
    for precision, changes, expected in (
        ("fp8", ("data.eval_path=held-out",), ["fp8", "bf16"]),
        ("fp8", (), ["fp8"]),
        ("bf16", ("data.eval_path=held-out",), ["bf16"]),
    ):
        asked.clear()
        fingerprint(info, *changes, precision=precision)
        assert asked == expected


def test_what_a_replay_reads_from_the_device_does_not(info: Any) -> None:
    changes = (
        "optimizer.lr=1e-3",
        "optimizer.weight_decay=0.1",
        "optimizer.clip_norm=2",
        "optimizer.schedule=constant",
        "objective.gamma=3",
        "objective.ce_weight=0.5",
        "run.log_every=3",
    )
    assert fingerprint(info) == fingerprint(info, *changes)
    assert fingerprint(info, "objective.kl_weight=0.1") == fingerprint(info, "objective.kl_weight=0.3")


def test_a_changed_source_file_is_a_changed_kernel(info: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(info)
    for package in ("engine",):
        for path in (sources._ROOT / package).rglob("*.py"):
            copy = tmp_path / path.relative_to(sources._ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(sources, "_ROOT", tmp_path)
    assert fingerprint(info) == before, "where the sources lie does not matter"
    for name, field in (
        ("ops/attention_ref.py", "source.attention"),
        ("ops/frozen_head_ref.py", "source.loss"),
        ("ops/norm_mlp_ref.py", "source.operations"),
        ("model.py", "source.step"),
        ("mask.py", "source.step"),
        ("kernels.py", "source.step"),
    ):
        path = tmp_path / "engine" / name
        original = path.read_text()
        path.write_text(original + "\n# another word\n")
        assert changed(before, fingerprint(info)) == [field], name
        path.write_text(original)
    unused = tmp_path / "engine" / "ops" / "norm_mlp.py"
    unused.write_text(unused.read_text() + "\n# another word\n")
    assert fingerprint(info) == before, "the CPU does not run that file"


def test_sources_are_followed_through_their_imports() -> None:
    names = {path.name for path in files_of(["engine.ops.norm_mlp"])}
    assert {"norm_mlp.py", "rms_norm.py", "weight.py", "column_sums.py"} <= names
    assert not {"attention.py", "model.py"} & names
    assert {path.name for path in files_of(["engine.ops.attention"])} >= {"attention_kernels.py", "attention_tiles.py"}


def test_a_change_names_field_old_and_new() -> None:
    old, new = Fingerprint.of({"a": 1, "b": "x", "gone": 2}), Fingerprint.of({"a": 2, "b": "x", "here": 3})
    assert new.changes(old) == [Change("a", "1", "2"), Change("gone", "2", None), Change("here", None, "3")]
    assert str(new.changes(old)[1]) == "gone: 2 -> nothing"
    assert new.changes(old, ignore=("a", "gone", "here")) == []
    assert not old.with_field(BUFFERS, 2).changes(old.with_field(BUFFERS, 1), ignore=(BUFFERS,))


def test_moved_buffers_are_seen() -> None:
    tensors = {"weight": torch.zeros(4), "grad": torch.zeros(4)}
    before = addresses([("parameters", tensors)])
    tensors["weight"].fill_(1.0)
    assert addresses([("parameters", tensors)]) == before
    moved = addresses([("parameters", {**tensors, "grad": torch.zeros(4)})])
    assert [change.field for change in moved.changes(before)] == ["parameters.grad"]


def test_the_order_of_files_does_not_matter(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.py", "b.py")]
    for path in paths:
        path.write_text(path.name)
    assert hash_of_files(paths) == hash_of_files(reversed(paths)) == hash_of_files(paths * 2)
    paths[0].write_text("b.py")
    paths[1].write_text("a.py")
    assert hash_of_files(paths) != hash_of_files([])
