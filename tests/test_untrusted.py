"""Files that anyone may have written: nothing of them runs, leads out of their folder, or takes memory for a number in them."""

import ast
import gzip
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bench.cli import main
from buffers.dataset import Dataset, load_target_tensors
from buffers.manifest import read_tensors
from buffers.open_dataset import open_dataset
from buffers.torch_archive import load_archive
from buffers.untrusted import is_inside, parse_json, read_weight_map, shown
from engine.checkpoint import save_drafter
from engine.drafter_config import load_drafter_config
from engine.export import load_drafter
from engine.settings import load_settings
from engine.settings_fields import SettingsError
from graphs.record import RecordError, read_record
from tests.dataset_helpers import rewrite_manifest, rewrite_shard, write_dataset
from tests.foreign_helpers import FIXTURES, archive, facts, write_target
from tests.test_imports import FILES, ROOT

UNPICKLERS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def calls(path: Path) -> Iterator[tuple[str, dict[str, ast.expr]]]:
    """Each call in a file: the dotted name of what is called and the keyword arguments."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {word.arg: word.value for word in node.keywords if word.arg}


def dangers(path: Path) -> list[str]:
    """What could run code that a file brings."""
    found = []
    for called, words in calls(path):
        told = {name: value.value for name, value in words.items() if isinstance(value, ast.Constant)}
        if called in ("eval", "exec", "compile", "__import__"):
            found.append(called)
        if called == "torch.load" and told.get("weights_only") is not True:
            found.append("torch.load without weights_only=True")
        if called in ("np.load", "numpy.load") and told.get("allow_pickle") is not False:
            found.append("np.load without allow_pickle=False")
        if "trust_remote_code" in words and told.get("trust_remote_code") is not False:
            found.append("trust_remote_code")
        if ".from_pretrained" in called and "Auto" in called and told.get("trust_remote_code") is not False:
            found.append(f"{called} without trust_remote_code=False")
        if told.get("shell") is True:
            found.append("shell=True")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [name for name in names if name.split(".")[0] in UNPICKLERS]
    return found


# The fuzzer writes pickles, and reads none.
@pytest.mark.parametrize(
    "path", [path for path in FILES if path.name != "fuzz_foreign.py"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_nothing_unpickles_or_runs_what_a_file_brings(path: Path) -> None:
    assert dangers(path) == []


def test_dangers_are_seen(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text(
        "import pickle\nfrom torch import load\ntorch.load(f)\ntorch.load(f, weights_only=False)\nnp.load(f)\neval('1')\n"
        "t.AutoModel.from_pretrained(n)\nt.AutoModel.from_pretrained(n, trust_remote_code=x)\nmodel.eval()\n"
        "torch.load(f, weights_only=True)\nnn.Embedding.from_pretrained(w)\nrun('x', shell=True)\n"
    )
    assert len(dangers(source)) == 9


def test_a_chat_template_runs_in_transformers_sandbox() -> None:
    transformers = pytest.importorskip("transformers")
    from jinja2.exceptions import SecurityError
    from tokenizers import Tokenizer, models

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})))
    for template in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}"):
        with pytest.raises(SecurityError, match="unsafe|not safely callable"):
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template=template, tokenize=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested more than 64"),
        ("[" * 65 + "]" * 65, "nested more than 64"),
        ('{"a":' * 70 + "1" + "}" * 70, "nested more than 64"),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' twice"),
        ('{"a": "\\ud800"}', "text that UTF-8 cannot say"),
        ('{"\\udc00": 1}', "text that UTF-8 cannot say"),
        ("9" * 5000, "Exceeds the limit"),
        ("{", "Expecting property name"),
        (b"\xff\xfe{\x00}\x00", "bytes that are no text in UTF-8"),
    ],
)
def test_json_that_readers_could_not_agree_on(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse_json(text)
    assert str(error.value).isprintable() and len(str(error.value)) < 300


def test_json_as_others_write_it() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": [1, 2.5, null, "\\u00e4\\ud83d\\ude00"]}') == {"a": [1, 2.5, None, "ä😀"]}
    # A target's config.json may have infinity where nobody reads it.
    assert parse_json("[Infinity]") == [float("inf")]
    assert parse_json("[" * 60 + "]" * 60)


def test_words_of_a_file_stay_in_their_line() -> None:
    assert shown("a\nb\x1b[31m\u202e\ud800") == r"'a\nb\x1b[31m\u202e\ud800'"
    assert len(shown("x" * 10**6)) == 120 and shown("x" * 10**6).endswith("...")
    assert shown(10**5000) == "<int>"


@pytest.mark.parametrize(
    "name",
    ["", ".." , "../x", "a/../../x", "/etc/passwd", "a\0b", "a\nb", "\ud800", "x" * 300, "out", "loop", "a/" * 600 + "x"],
)  # fmt: skip
def test_names_that_lead_out_of_a_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "outside").write_text("x")
    (folder / "out").symlink_to(tmp_path / "outside")
    (folder / "loop").symlink_to("loop")
    assert not is_inside(folder, name)


def test_names_and_links_within_a_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    assert all(is_inside(tmp_path, name) for name in ("file", "a/b", "link", "shard ä.bin"))


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b", "..", "", "a\0b", "x" * 300])
def test_an_index_names_files_beside_it_alone(name: str, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": name, "model.norm.weight": "a.safetensors"}}))
    for read in (read_weight_map, lambda file: load_target_tensors(file.parent)):
        with pytest.raises(ValueError, match="expected a weight_map of files beside .*index.json, found"):
            read(index)


def test_a_shard_that_is_a_link_out_of_its_folder(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", (5, 6))
    shard = tmp_path / "data" / "shard-00000.safetensors"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="expected shards inside .*, found 'shard-00000.safetensors'"):
        Dataset(tmp_path / "data")


def test_offsets_whose_differences_leave_int64(tmp_path: Path) -> None:
    write_dataset(tmp_path, (50, 60, 70))
    offsets = torch.tensor([0, 2**63 - 1, -2, 180])
    assert (offsets.diff() > 0).all()
    rewrite_shard(tmp_path, lambda tensors: tensors.update(offsets=offsets))
    with pytest.raises(ValueError, match="expected offsets in shard-00000.safetensors to rise from 0 to 180"):
        Dataset(tmp_path)


@pytest.mark.parametrize("length", [0, 3, 10**6, 2**40, 2**63, 2**64 - 1])
def test_a_safetensors_header_of_another_length(length: int, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(100)}, str(file))
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    with pytest.raises(
        ValueError, match="expected a safetensors file in .*x.safetensors, found one that cannot be read"
    ):
        read_tensors(file)


def test_a_safetensors_tensor_of_any_size(tmp_path: Path) -> None:
    for shape, end in (([2**31, 2**31], 400), ([2**62], 2**64 - 8), ([2**63], 400), ([100], 2**62)):
        header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()
        (tmp_path / "x").write_bytes(struct.pack("<Q", len(header)) + header + bytes(400))
        with pytest.raises(ValueError, match="found one that cannot be read"):
            read_tensors(tmp_path / "x")


@pytest.mark.parametrize("key", ["target_name", "sha256"])
def test_words_of_a_manifest_stay_in_their_line(key: str, tmp_path: Path) -> None:
    write_dataset(tmp_path, (5, 6))

    def change(manifest: dict[str, Any]) -> None:
        (manifest if key in manifest else manifest["shards"][0])[f"{key}\n\x1b[31m"] = "x" * 10_000

    rewrite_manifest(tmp_path, change)
    with pytest.raises(ValueError, match=r"\\n\\x1b") as error:
        Dataset(tmp_path)
    assert str(error.value).isprintable() and str(tmp_path) in str(error.value)


def pickled(name: str, *arguments: Any) -> bytes:
    """An archive whose pickle calls something."""

    class Call:
        def __reduce__(self) -> Any:
            module, _, function = name.rpartition(".")
            return getattr(__import__(module, fromlist=[function]), function), arguments

    return archive({"input_ids": Call()})


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("builtins.bytearray", (10**9,), "asks for .*bytearray"),
        ("torch.LongStorage", (10**9,), "asks for torch.*LongStorage"),
        ("torch.FloatTensor", (10**9,), "asks for .*FloatTensor"),
        ("os.mkdir", ("ran",), "asks for posix.mkdir, which could run code"),
        ("collections.Counter", ("abc",), "asks for collections.Counter"),
    ],
)
def test_a_pickle_that_asks_for_memory_or_code(
    name: str, arguments: tuple[Any, ...], reason: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = pickled(name, *arguments)
    (tmp_path / "x.ckpt").write_bytes(gzip.compress(content) if packed else content)

    def load(*args: Any, **words: Any) -> None:
        raise AssertionError("torch.load was asked")

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(ValueError, match=reason):
        load_archive(tmp_path / "x.ckpt")
    assert not (tmp_path / "ran").exists()


def test_a_tensor_beyond_its_storage(tmp_path: Path) -> None:
    content = archive({"input_ids": torch.arange(7), "x": torch.ones(3, 5)})
    # The sizes and strides (3, 5), (5, 1) of x: K\x03K\x05 ... K\x05K\x01.
    sizes = content.index(b"K\x03K\x05\x86")
    for change in (b"K\x04K\x05\x86", b"K\x03K\xff\x86"):
        (tmp_path / "x.pt").write_bytes(content[:sizes] + change + content[sizes + 5 :])
        with pytest.raises(
            ValueError, match="damaged|expected tensors within their storages, found one of 15 elements"
        ):
            load_archive(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 10**12, "layer_types": None},
            "num_hidden_layers: expected 1 to 1000, found 1000000000000",
        ),
        ({"is_causal": "false"}, "is_causal: expected true or false, found 'false'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, found 1"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps: expected a number from 0 to 1, found -1e-06"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps: expected a number, found 1000"),
        ({"rope_theta": float("nan"), "rope_parameters": None}, "rope_theta: expected a number, found nan"),
        ({"rope_theta": 10**400, "rope_parameters": None}, "rope_theta: expected a number, found 1000"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, r"rope kind: expected a word, found \['yarn'\]"),
        (
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
            "a positive original_max_position_embeddings, found 0",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0}},
            "above 0 and at most 1e.06 as beta_fast, found 0",
        ),
        ({"head_dim": 5}, "head_dim: expected an even number, found 5"),
        ({"layer_types": ["full_attention", ["x"]], "num_hidden_layers": 2}, "layer_types: expected 2 entries"),
        ({"architectures": "a\nb" * 1000}, r"architectures: expected .* found 'a\\nba\\nb"),
        ({"dtype": "x" * 100}, "dtype: expected the name of one"),
        ({"hidden_size": [1] * 1000}, "hidden_size: expected an integer, found"),
    ],
)
def test_a_drafters_config_with_hostile_values(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    from tests.drafter_helpers import small_config

    (tmp_path / "config.json").write_text(json.dumps({**small_config().to_json(), "rope_scaling": None, **changes}))
    with pytest.raises(ValueError, match=message) as error:
        load_drafter_config(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)
    assert str(error.value).isprintable() and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('["a\\nb"]\n', r"unknown section \[a\\nb\]; the nearest"),
        (f"[{'x' * 5000}]\n", "unknown section"),
        ('[run]\n"a\\u001b[31m" = 1\n', r"unknown setting run.a\\x1b\[31m"),
        ("[run]\nseed = 1979-05-27\n", "run.seed: expected a whole number, at least 0, found datetime.date"),
        ("[run]\noutput = 07:32:00\n", "run.output: expected text, found datetime.time"),
        (
            f"[run]\nseed = {'9' * 400}\n",
            "run.seed: expected a whole number, at least 0 and at most 9223372036854775807, found 999",
        ),
        (f"[run]\nseed = {'9' * 5000}\n", "expected TOML, found a mistake: Exceeds the limit"),
        ("[run]\nseed = " + "[" * 20_000, "expected TOML, found a mistake: "),
        ('[run]\noutput = "a\\u0000b"\n', r"run.output: expected text, found 'a\\x00b'"),
        (f"[run]\noutput = ['{'x' * 50_000}']\n", "run.output: expected text, found"),
        ("[run]\nlog_every = true\n", "run.log_every: expected a whole number, at least 1, found True"),
        ("[optimizer]\nlr = nan\n", "optimizer.lr: expected a number, more than 0, found nan"),
    ],
)
def test_settings_with_hostile_values(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(SettingsError, match=message) as error:
        load_settings(tmp_path / "run.toml")
    assert str(error.value).isprintable() and len(str(error.value)) < 1000


def test_settings_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"[run]\noutput = '\xff'\n")
    with pytest.raises(SettingsError, match=r"run.toml: expected TOML, found a mistake: 'utf-8' codec"):
        load_settings(tmp_path / "run.toml")


def test_a_record_of_graphs_nested_without_end(tmp_path: Path) -> None:
    (tmp_path / "graphs.json").write_text('{"version": ' + "[" * 100_000)
    with pytest.raises(RecordError, match="nested more than 64 levels deep"):
        read_record(tmp_path)


def test_an_arrow_file_that_claims_rows_beyond_its_buffers(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.ipc

    from buffers.foreign_speculators import SpeculatorsReader

    rows = pyarrow.table({name: [[7, 8, 9]] for name in ("input_ids", "loss_mask")})
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, rows.schema) as out:
        out.write_table(rows)
    whole = sink.getvalue().to_pybytes()
    # The end of the first row's list: [0, 3] becomes [0, 2^30].
    offsets = whole.index(struct.pack("<ii", 0, 3))
    (tmp_path / "x.arrow").write_bytes(whole[: offsets + 4] + struct.pack("<i", 2**30) + whole[offsets + 8 :])
    with pytest.raises(ValueError, match="x.arrow: expected an Arrow stream, found a damaged one"):
        SpeculatorsReader(tmp_path, ["x.arrow"], {}, {"x.arrow": ""})


def test_compressed_arrow_columns_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.ipc

    from buffers.foreign_speculators import SpeculatorsReader

    rows = pyarrow.table({name: [[7] * 10_000] for name in ("input_ids", "loss_mask")})
    for compression in (None, "zstd", "lz4"):
        options = pyarrow.ipc.IpcWriteOptions(compression=compression)
        with (
            pyarrow.OSFile(str(tmp_path / "x.arrow"), "wb") as sink,
            pyarrow.ipc.new_stream(sink, rows.schema, options=options) as out,
        ):
            out.write_table(rows)
        if compression is None:
            assert SpeculatorsReader(tmp_path, ["x.arrow"], {}, {"x.arrow": ""}).arrow_rows == 1
        else:
            with pytest.raises(ValueError, match=r"x.arrow: expected an Arrow stream, .* \(compressed columns\)"):
                SpeculatorsReader(tmp_path, ["x.arrow"], {}, {"x.arrow": ""})


def test_a_name_in_a_dataset_gives_the_terminal_no_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path, (5, 6))
    rewrite_manifest(tmp_path, lambda manifest: manifest.update(target_name="\x1b]0;mine\x07\u202e"))
    assert main(["data", "inspect", str(tmp_path)]) == 0
    assert r"\x1b]0;mine\x07\u202e" in capsys.readouterr().out
    assert main(["data", "inspect", str(tmp_path / "\x1b[2J")]) == 1
    assert r"\x1b[2J" in capsys.readouterr().err


def test_a_drafter_that_is_not_finite(tmp_path: Path) -> None:
    from tests.drafter_helpers import random_weights, small_config

    config = small_config()
    save_drafter(tmp_path / "x", config, random_weights(config))
    tensors = read_tensors(tmp_path / "x" / "model.safetensors")
    wrong = tensors["norm.weight"].clone()
    wrong[3] = float("nan")
    save_file(tensors | {"norm.weight": wrong}, str(tmp_path / "y"))
    (tmp_path / "y").replace(tmp_path / "x" / "model.safetensors")
    with pytest.raises(
        ValueError, match="x: expected finite weights, found NaN or infinity in norm.weight; use another"
    ):
        load_drafter(tmp_path / "x")


@pytest.mark.parametrize(
    "shards",
    [[1], [{"file": "x"}], "abc", [{"file": "../x", "num_samples": 1, "num_tokens": 5, "num_bytes": 9, "sha256": ""}]],
)
def test_a_list_of_unfinished_shards_with_hostile_values(shards: Any, tmp_path: Path) -> None:
    from tests.dataset_helpers import random_sample, writer

    out = writer(tmp_path, source="x", last_hidden_norm="post")
    out.add(**random_sample(5))
    out.end_shard()
    state = json.loads((tmp_path / "unfinished.json").read_text())
    (tmp_path / "unfinished.json").write_text(json.dumps(state | {"shards": shards}))
    with pytest.raises(ValueError, match="expected the list of shards in .*unfinished.json, found a damaged one"):
        writer(tmp_path, source="x", last_hidden_norm="post", resume=True)


def test_a_deepspec_shard_whose_name_is_no_line(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "deepspec", tmp_path / "x")
    manifest = json.loads((tmp_path / "x" / "manifest.json").read_text())
    manifest["shards"][0]["file_name"] = "shard\n\ufeff.bin"
    (tmp_path / "x" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"shard\\n\\ufeff.bin, sample 0: expected shards inside the folder") as error:
        open_dataset(tmp_path / "x", facts(write_target(tmp_path / "target")))
    assert str(error.value).isprintable()


def test_a_bad_file_whose_name_is_no_line(tmp_path: Path) -> None:
    (tmp_path / "a\n\x1b[2J.ckpt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a\\n\\x1b\[2J.ckpt: expected a file of torch.save, found an empty file"):
        open_dataset(tmp_path, facts(tmp_path))
