"""Other trainers' hidden states: the fixtures they wrote, small writers of ours for what the fixtures lack, and a target."""

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from buffers.dataset import DatasetWriter
from buffers.foreign_facts import Facts

FIXTURES = Path(__file__).parent / "fixtures"
FORMATS = ("specforge", "speculators", "modelopt", "deepspec")
V, D, TAPS, MASK = 512, 64, (1, 2, 3), 511
COUNT = 10


def truth() -> list[dict[str, Tensor]]:
    """The ten samples of every fixture, as DatasetWriter.add takes them."""
    tensors = load_file(FIXTURES / "truth.safetensors")
    names = ("input_ids", "loss_mask", "hidden_states", "last_hidden")
    return [{name: tensors[f"{index}.{name}"] for name in names} for index in range(COUNT)]


def write_target(folder: Path, **changes: Any) -> Path:
    """A checkpoint folder of the fixtures' target: random embedding, head and norm."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": D,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": V,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    generator = torch.Generator().manual_seed(3)
    weights = {
        "model.embed_tokens.weight": torch.randn(V, D, generator=generator),
        "lm_head.weight": torch.randn(V, D, generator=generator) * 0.1,
        "model.norm.weight": torch.rand(D, generator=generator) + 0.5,
    }
    save_file(weights, str(folder / "model.safetensors"))
    return folder


def facts(target: Path, /, **changes: Any) -> Facts:
    """Everything that the fixtures do not say."""
    said: dict[str, Any] = {"target": str(target), "target_layer_ids": TAPS, "mask_token_id": MASK}
    return Facts(**said | changes)


def archive(values: Any, *, packed: bool = False) -> bytes:
    """What torch.save writes, gzipped if asked."""
    stream = io.BytesIO()
    torch.save(values, stream)
    return gzip.compress(stream.getvalue()) if packed else stream.getvalue()


def specforge_values(sample: dict[str, Tensor]) -> dict[str, Any]:
    """A sample under SpecForge's keys."""
    return {
        "input_ids": sample["input_ids"].long(),
        "loss_mask": sample["loss_mask"].long(),
        "hidden_states": sample["hidden_states"],
    }


def write_specforge(
    folder: Path,
    change: Callable[[dict[str, Any], dict[str, Tensor]], dict[str, Any]] = lambda values, sample: values,
    *,
    packed: bool = False,
    suffix: str = ".ckpt",
) -> Path:
    """All samples as SpecForge's files, each dictionary passed through `change(values, sample)`."""
    rows = folder / "rows_0-2000"
    rows.mkdir(parents=True)
    for index, sample in enumerate(truth()):
        content = archive(change(specforge_values(sample), sample), packed=packed)
        (rows / f"data_{index}{suffix}").write_bytes(content)
    return folder


def write_ours(folder: Path, target: Path, **changes: Any) -> Path:
    """The fixtures' samples as a dataset of ours."""
    info: dict[str, Any] = {
        "target_name": "tiny",
        "target_config": json.loads((target / "config.json").read_text()),
        "hidden_size": D,
        "target_layer_ids": TAPS,
        "vocab_size": V,
        "mask_token_id": MASK,
        "last_hidden_norm": "pre",
    }
    with DatasetWriter(folder, **info | changes) as out:
        for sample in truth():
            out.add(**sample)
    return folder
