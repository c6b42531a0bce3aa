"""Other trainers' formats as targets of the fuzzer: SpecForge, Model-Optimizer, DeepSpec and speculators, two samples each."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save, save_file
from torch import Tensor

from bench.fuzz_case import Broken, Files, Target, check_samples
from bench.fuzz_mutations import NUMBERS, cross, mutate_bytes, mutate_json, mutate_safetensors
from buffers.foreign_facts import Facts
from buffers.open_dataset import complete, open_folder

D, V, TAPS, LENGTHS = 4, 50, (1, 4), (5, 3)
Seeds = Sequence[dict[str, bytes]]


def _samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "input_ids": torch.randint(V - 1, (length,), generator=generator),
            "loss_mask": (torch.arange(length) > 0).long(),
            "hidden_states": torch.randn(length, len(TAPS) * D, generator=generator).bfloat16(),
            "last": torch.randn(length, D, generator=generator).bfloat16(),
        }
        for length in LENGTHS
    ]


def _archive(values: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(values, stream)
    return stream.getvalue()


def _specforge() -> list[dict[str, bytes]]:
    plain = [{name: sample[name] for name in ("input_ids", "loss_mask", "hidden_states")} for sample in _samples()]
    dspark = [
        values | {"target_last_hidden_states": sample["last"]} for values, sample in zip(plain, _samples(), strict=True)
    ]
    folders = (
        {f"rows_0-2/data_{i}.ckpt": _archive(values) for i, values in enumerate(kind)} for kind in (plain, dspark)
    )
    packed = {f"rows_0-2/data_{i}.ckpt.gz": gzip.compress(_archive(values), mtime=0) for i, values in enumerate(plain)}
    return [*folders, packed]


def _modelopt() -> list[dict[str, bytes]]:
    return [
        {
            f"conv-{i}.pt": _archive(
                {
                    "input_ids": sample["input_ids"],
                    "loss_mask": sample["loss_mask"],
                    "aux_hidden_states": sample["hidden_states"][None],
                    "hidden_states": sample["last"],
                    "conversation_id": f"conv-{i}",
                }
            )
            for i, sample in enumerate(_samples())
        }
    ]


def _damage_archives(rng: Random, files: dict[str, bytes], seeds: Seeds) -> Files:
    """The archive's own bytes, or its pickle within an archive that is in order."""
    if rng.random() < 0.05:
        return cross(rng, files, seeds)
    name = rng.choice(sorted(files))
    content, packed = files[name], name.endswith(".gz")
    if packed:
        if rng.random() < 0.4:
            return files | {name: mutate_bytes(rng, content)}
        content = gzip.decompress(content)
    changed = (
        _change_pickle(rng, content)
        if rng.random() < 0.6
        else mutate_bytes(rng, content, files[rng.choice(sorted(files))])
    )
    return files | {name: gzip.compress(changed, 1, mtime=0) if packed else changed}


def _change_pickle(rng: Random, content: bytes) -> bytes:
    """The same archive with another pickle, or with a part of another size."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        parts = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    (name,) = [name for name in parts if name.endswith("/data.pkl")]
    text = parts[name]
    match rng.randrange(6):
        case 0:
            text = mutate_bytes(rng, text)
        case 1 | 2:
            # Small whole numbers are `K<byte>` and `M<2 bytes>`: sizes, strides and offsets of tensors.
            places = [at for at in range(len(text)) if text[at : at + 1] in (b"K", b"M", b"J")]
            at = rng.choice(places)
            width = {b"K": 2, b"M": 3, b"J": 5}[text[at : at + 1]]
            number = rng.choice([n for n in NUMBERS if isinstance(n, int) and abs(n) < 2**70])
            text = text[:at] + pickle.dumps(number, 2)[2:-1] + text[at + width :]
        case 3:
            for old, new in rng.choice(_OTHER_GLOBALS):
                text = text.replace(old, new)
        case 4:
            # A value that is built by calling something with a number.
            call = (
                b"c"
                + rng.choice(_CALLED)
                + b"\n"
                + pickle.dumps((rng.choice((8, 10**9, 2**40, 2**62)),), 2)[2:-1]
                + b"R"
            )
            text = (
                text[:-2] + b"X\x01\x00\x00\x00z" + call + b"s" + text[-2:]
                if rng.random() < 0.5
                else text[:-1] + call + b"."
            )
        case _:
            part = rng.choice(sorted(parts))
            parts[part] = mutate_bytes(rng, parts[part])
            text = parts[name]
    parts[name] = text
    return _zipped(parts, zipfile.ZIP_DEFLATED if rng.random() < 0.05 else zipfile.ZIP_STORED)


_OTHER_GLOBALS: tuple[tuple[tuple[bytes, bytes], ...], ...] = (
    ((b"torch\nBFloat16Storage", b"torch\nLongStorage"),),
    ((b"torch\nBFloat16Storage", b"torch\nFloatStorage"),),
    ((b"torch\nLongStorage", b"torch\nComplexDoubleStorage"),),
    ((b"torch\nLongStorage", b"torch\nBoolStorage"),),
    ((b"torch._utils\n_rebuild_tensor_v2", b"torch._utils\n_rebuild_sparse_tensor"),),
    ((b"torch._utils\n_rebuild_tensor_v2", b"torch._utils\n_rebuild_qtensor"),),
    ((b"torch._utils\n_rebuild_tensor_v2", b"torch._utils\n_rebuild_tensor"),),
    ((b"torch._utils\n_rebuild_tensor_v2", b"torch._utils\n_rebuild_parameter"),),
    ((b"torch._utils\n_rebuild_tensor_v2", b"builtins\nbytearray"),),
    ((b"collections\nOrderedDict", b"os\nsystem"),),
    ((b"cpu", b"xpu"), (b"cpu", b"cuda")),
)
_CALLED = (
    b"builtins\nbytearray",
    b"torch\nLongTensor",
    b"torch\nFloatTensor",
    b"torch\nSize",
    b"collections\nCounter",
    b"os\nsystem",
)


def _zipped(parts: Mapping[str, bytes], compression: int) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in parts.items():
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return stream.getvalue()


def _deepspec() -> list[dict[str, bytes]]:
    record, index, shards = struct.Struct("<QIIQQQQQ"), b"", []
    for number, sample in enumerate(_samples()):
        length = len(sample["input_ids"])
        parts = [
            sample["input_ids"].int(),
            torch.ones(length, dtype=torch.uint8),
            sample["loss_mask"].to(torch.uint8),
            sample["hidden_states"],
            sample["last"],
        ]
        content, offsets = b"", []
        for part in parts:
            offsets.append(len(content))
            content += part.contiguous().view(torch.uint8).numpy().tobytes()
        index += record.pack(number, number, length, *offsets)
        shards.append(content)
    manifest = {
        "version": 2,
        "index_record_size": record.size,
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "hidden_size": D,
        "num_samples": len(shards),
        "target_layer_ids": list(TAPS),
        "target_model_name_or_path": "tiny",
        "shards": [{"shard_id": i, "file_name": f"shard-{i:05d}.bin"} for i in range(len(shards))],
    }
    files = {f"shard-{i:05d}.bin": content for i, content in enumerate(shards)}
    return [{"manifest.json": json.dumps(manifest).encode(), "samples.idx": index, **files}]


def _damage_deepspec(rng: Random, files: dict[str, bytes], seeds: Seeds) -> Files:
    name = rng.choice(("manifest.json", "manifest.json", "samples.idx", "samples.idx", *files))
    if name == "manifest.json":
        return files | {name: mutate_json(rng, files[name])}
    if name == "samples.idx" and rng.random() < 0.7:
        # A field of a record, in its place.
        content, record = bytearray(files[name]), rng.randrange(len(LENGTHS)) * 56
        at, width = rng.choice(((0, 8), (8, 4), (12, 4), (16, 8), (24, 8), (32, 8), (40, 8), (48, 8)))
        number = rng.choice([n for n in NUMBERS if isinstance(n, int)]) % 2 ** (8 * width)
        content[record + at : record + at + width] = number.to_bytes(width, "little")
        return files | {name: bytes(content)}
    return files | {name: mutate_bytes(rng, files[name], files[rng.choice(sorted(files))])}


def _speculators() -> list[dict[str, bytes]]:
    import pyarrow
    import pyarrow.ipc

    samples = _samples()
    rows = pyarrow.table({name: [sample[name].tolist() for sample in samples] for name in ("input_ids", "loss_mask")})
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, rows.schema) as out:
        out.write_table(rows)
    files = {"data/data-00000-of-00001.arrow": sink.getvalue().to_pybytes()}
    files["data/state.json"] = json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}).encode()
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        states = torch.cat([sample["hidden_states"], sample["last"]], dim=1).view(length, len(TAPS) + 1, D)
        files[f"hs_{row}.safetensors"] = save({"token_ids": sample["input_ids"], "hidden_states": states.contiguous()})
    return [files]


def _damage_speculators(rng: Random, files: dict[str, bytes], seeds: Seeds) -> Files:
    name = rng.choice(sorted(files))
    if name.endswith(".arrow"):
        return files | {name: mutate_bytes(rng, files[name])}
    if name.endswith(".json"):
        return files | {name: mutate_json(rng, files[name])}
    return files | {name: mutate_safetensors(rng, files[name], files["hs_0.safetensors"])}


@cache
def _target_folder() -> tempfile.TemporaryDirectory[str]:
    """The target's checkpoint, which is no matter of these inputs: one for all."""
    folder = tempfile.TemporaryDirectory()
    config = {"model_type": "qwen3", "hidden_size": D, "num_hidden_layers": 6, "vocab_size": V, "rms_norm_eps": 1e-6}
    (Path(folder.name) / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    weights = {
        "model.embed_tokens.weight": torch.randn(V, D, generator=generator),
        "lm_head.weight": torch.randn(V, D, generator=generator),
        "model.norm.weight": torch.ones(D),
    }
    save_file(weights, str(Path(folder.name) / "model.safetensors"))
    return folder


def _read_foreign(folder: Path) -> None:
    """As data inspect and train read it, bad files left out; both samples bad is an answer."""
    found = open_folder(folder)
    if found is None:
        raise Broken("it is taken for a dataset of ours")
    for name, reason in found.bad_files().items():
        if not reason.isprintable() or len(reason) > 500:
            raise Broken(f"the reason for {name!r} is {reason[:300]!r}, of {len(reason)} characters")
    facts = Facts(
        target=_target_folder().name,
        target_layer_ids=TAPS,
        mask_token_id=V - 1,
        last_hidden_norm="pre",
        on_bad_file="skip",
    )
    dataset = complete(found, facts)
    check_samples(dataset)
    for name, reason in dataset.bad_files.items():
        raise ValueError(f"{folder / name}: {reason}")


def _foreign(
    name: str, seeds: Callable[[], Seeds], damage: Callable[[Random, dict[str, bytes], Seeds], Files]
) -> Callable[[], Target]:
    return lambda: Target(name, seeds(), damage, _read_foreign)


FOREIGN: Mapping[str, Callable[[], Target]] = {
    "specforge": _foreign("specforge", _specforge, _damage_archives),
    "modelopt": _foreign("modelopt", _modelopt, _damage_archives),
    "deepspec": _foreign("deepspec", _deepspec, _damage_deepspec),
    "speculators": _foreign("speculators", _speculators, _damage_speculators),
}
