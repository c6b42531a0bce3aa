"""Bad input on the command line: an exit code, one line that says what was expected, found and to do, nothing written."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.cli import main
from engine.checkpoint import save_drafter
from engine.drafter_config import DrafterConfig
from engine.params import initial_parameters
from graphs.executor import CallExecutor, GraphExecutor
from tests.dataset_helpers import rewrite_manifest, rewrite_shard
from tests.foreign_helpers import FIXTURES, write_target
from tests.run_helpers import SETTINGS, TARGET_CONFIG, files_under, training_dataset

pytestmark = pytest.mark.usefixtures("one_thread")
SHARD = "shard-00000.safetensors"
FEW = (40, 130, 60)


def options(*changes: str) -> list[str]:
    return [word for change in (*SETTINGS, *changes) for word in ("--set", change)]


def tiny_drafter(folder: Path, **changes: Any) -> Path:
    """A drafter for training_dataset's target, or for another one."""
    sizes: dict[str, Any] = {
        "block_size": 4,
        "mask_token_id": 49,
        "target_layer_ids": (1, 3, 4),
        "num_target_layers": 6,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "vocab_size": 50,
        "layer_types": ("full_attention",),
    }
    config = DrafterConfig(**{**sizes, **changes})
    save_drafter(folder, config, initial_parameters(config, seed=0))
    return folder


@pytest.fixture
def fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line that must fail with this code and one line, and leave every file as it was."""

    def run(args: list[str], code: int = 1) -> str:
        before = files_under(tmp_path)
        assert main(args) == code
        assert files_under(tmp_path) == before
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "Traceback" not in captured.err
        *progress, last = captured.err.splitlines()
        assert last.startswith("error: ")
        assert not any(line.startswith("error: ") for line in progress)
        if args[0] == "bench":
            progress = [line for line in progress if not line.startswith("measuring ")]
        if args[0] != "train":
            assert not progress  # a run says what it has planned before it meets a bad sample
        return last.removeprefix("error: ")

    return run


Fails = Callable[..., str]


def commands_on(data: Path, tmp_path: Path) -> dict[str, list[str]]:
    """Every command that reads a dataset."""
    drafter = tmp_path / "drafter"
    return {
        "inspect": ["data", "inspect", str(data)],
        "plan": ["plan", str(data), *options()],
        "train": ["train", *options(f"data.path={data}", f"run.output={tmp_path / 'run'}")],
        "eval": ["eval", str(drafter), str(data), *options()],
        "bench": ["bench", "buckets", str(data), *options(), "--repeats", "1"],
    }


def change_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def damage(data: Path) -> None:
        rewrite_shard(data, lambda tensors: tensors.update({name: change(tensors[name]).contiguous()}))

    return damage


def change_manifest(**values: Any) -> Callable[[Path], None]:
    return lambda data: rewrite_manifest(data, lambda manifest: manifest.update(values))


def cut(file: str, keep: float) -> Callable[[Path], None]:
    def damage(data: Path) -> None:
        content = (data / file).read_bytes()
        (data / file).write_bytes(content[: int(len(content) * keep)])

    return damage


def token_outside(ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids[45] = 50
    return ids


def half_written_but_listed(data: Path) -> None:
    cut(SHARD, 0.5)(data)
    size = (data / SHARD).stat().st_size
    rewrite_manifest(data, lambda manifest: manifest["shards"][0].update(num_bytes=size))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda data: data.rename(data.with_name("away")), "expected a dataset with dataset.json in {data}"),
    "no manifest": (
        lambda data: (data / "dataset.json").unlink(),
        "found none. Check the path; a folder of shards without it was not finished: write it again.",
    ),
    "half a manifest": (cut("dataset.json", 0.5), "expected dataset.json to be JSON, found "),
    "no shard": (
        lambda data: (data / SHARD).unlink(),
        f"expected shard {{data}}/{SHARD}, found no such file. Copy it or write the dataset again.",
    ),
    "truncated shard": (cut(SHARD, 0.5), ": truncated or half-written. Copy it or write the dataset again."),
    "half-written shard": (
        half_written_but_listed,
        f"{SHARD}, found one that cannot be read: truncated or half-written",
    ),
    "dtype": (
        change_tensor("hidden_states", lambda states: states.float()),
        "expected hidden_states as bfloat16 in {data}/" + SHARD + ", found float32. Convert the dataset.",
    ),
    "shape": (
        change_tensor("input_ids", lambda ids: ids[None]),
        "expected input_ids of shape [230] in {data}/" + SHARD + ", found [1, 230]. Write the dataset again.",
    ),
    "layer ids": (
        change_manifest(target_layer_ids=[1, 3]),
        "hidden_states [230, 16] (2 target_layer_ids [1, 3], hidden size 8), found [230, 24]. Correct target_layer_ids",
    ),
    "token id": (
        change_tensor("input_ids", token_outside),
        f"expected token ids in 0..49 in {SHARD}, sample 1, found 50 at position 5. Check the tokenizer",
    ),
    "loss mask": (
        change_tensor("loss_mask", lambda mask: mask[:-1]),
        "expected loss_mask of 230 values, one a token, in {data}/" + SHARD + ", found shape [229].",
    ),
    "empty": (
        change_manifest(num_samples=0, shards=[]),
        "expected at least one sample in {data}, found none. Extract or convert some.",
    ),
}


@pytest.mark.parametrize("command", ["inspect", "plan", "train", "eval", "bench"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_dataset(damage: str, command: str, tmp_path: Path, fails: Fails) -> None:
    data = training_dataset(tmp_path / "data", FEW)
    tiny_drafter(tmp_path / "drafter")
    change, message = DAMAGES[damage]
    change(data)
    assert message.format(data=data) in fails(commands_on(data, tmp_path)[command])


@pytest.mark.parametrize("command", ["train", "eval", "bench"])
def test_a_sample_that_is_not_finite_is_named(command: str, tmp_path: Path, fails: Fails) -> None:
    data = training_dataset(tmp_path / "data", FEW, nonfinite=(1,))
    tiny_drafter(tmp_path / "drafter")
    args = commands_on(data, tmp_path)[command]
    if command == "train":
        args = [*args, "--set", "run.output=" + str(tmp_path.with_name(tmp_path.name + "-run"))]
    expected = "expected finite target_hidden, found NaN or infinity in sample 1. Extract it again, or set on_nonfinite to skip"
    assert expected in fails(args)


@pytest.mark.parametrize("command", ["plan", "train", "eval", "bench"])
def test_every_sample_longer_than_the_largest_bucket(command: str, tmp_path: Path, fails: Fails) -> None:
    data = training_dataset(tmp_path / "data", (300, 400))
    tiny_drafter(tmp_path / "drafter")
    line = fails(commands_on(data, tmp_path)[command])
    assert "expected at least one sample of at most 256 tokens, found 2 samples, 2 of them longer" in line
    assert "set too_long to truncate or split" in line


def test_a_budget_that_holds_no_row(tmp_path: Path, fails: Fails) -> None:
    data = training_dataset(tmp_path / "data", FEW)
    line = fails(["plan", str(data), *options("buckets.token_budget=100")])
    assert "found 384 needed with one row a bucket" in line
    assert "Raise token_budget to at least 384" in line


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_target_that_is_not_the_datasets_own(command: str, tmp_path: Path, fails: Fails) -> None:
    data, other = training_dataset(tmp_path / "data", FEW), training_dataset(tmp_path / "other", FEW)
    tiny_drafter(tmp_path / "drafter")
    file = other / "target.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    line = fails([*commands_on(data, tmp_path)[command], "--set", f"data.target={other}"], code=2)
    expected = f"data.target: expected the target of {data / 'target.safetensors'}, found other weights in {other}."
    assert line.startswith(expected)
    if command == "train":
        line = fails([*commands_on(data, tmp_path)[command], "--set", f"data.eval_path={other}"])
        assert f"data.eval_path: {file} has other weights than the target in {data}; hold out samples" in line


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "optimizer.wight_decay=1",
            "--set: unknown setting optimizer.wight_decay; the nearest is optimizer.weight_decay.",
        ),
        ("data.seed=1", "--set: unknown setting data.seed; the nearest is run.seed."),
        ("optimiser.lr=1", "unknown section [optimiser]; the nearest is [optimizer]."),
        ("run.epochs=none", "run.epochs: expected a whole number, at least 1, found 'none'."),
        ("data.too_long=cut", "data.too_long: expected one of skip, truncate, split, found 'cut'."),
    ],
)
def test_settings(setting: str, message: str, tmp_path: Path, fails: Fails) -> None:
    data = training_dataset(tmp_path / "data", FEW)
    for command in ("plan", "train", "eval", "bench"):
        assert message in fails([*commands_on(data, tmp_path)[command], "--set", setting], code=2)
    section, _, rest = setting.partition(".")
    key, _, value = rest.partition("=")
    (tmp_path / "run.toml").write_text(f"[{section}]\n{key} = {json.dumps(value)}\n")
    assert "expected" in (line := fails(["train", str(tmp_path / "run.toml")], code=2)) or "nearest" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["plan", "train", "eval", "bench", "demo"])
def test_a_gpu_where_there_is_none(command: str, tmp_path: Path, fails: Fails) -> None:
    data = training_dataset(tmp_path / "data", FEW)
    tiny_drafter(tmp_path / "drafter")
    if command == "demo":
        args = ["demo", "--out", str(tmp_path / "demo"), "--device", "cuda"]
    else:
        args = [*commands_on(data, tmp_path)[command], "--set", "run.device=cuda"]
    line = fails(args, code=2)
    assert line.startswith('run.device = "cuda" requires a GPU, found none that torch can use; check the driver')
    assert 'or set run.device = "auto" to train on the CPU' in line
    assert not (tmp_path / "demo").exists()


def test_a_run_folder_that_cannot_be_written(tmp_path: Path, fails: Fails) -> None:
    data = training_dataset(tmp_path / "data", FEW)
    (tmp_path / "file").write_text("a file")
    for output in (tmp_path / "file", tmp_path / "file" / "run"):
        args = commands_on(data, tmp_path)["train"]
        line = fails([*args, "--set", f"run.output={output}"], code=2)
        assert f"run.output: expected a folder that can be written to, found {output} (" in line
        assert line.endswith("; choose another")


def test_a_run_folder_that_holds_something_else(tmp_path: Path, fails: Fails) -> None:
    data = training_dataset(tmp_path / "data", FEW)
    args = commands_on(data, tmp_path)["train"]
    tiny_drafter(tmp_path / "drafter")
    for folder, what in ((data, "a dataset"), (tmp_path / "drafter", "a model")):
        before = sorted(folder.rglob("*"))
        line = fails([*args, "--set", f"run.output={folder}"], code=2)
        assert line == f"run.output: expected a folder for the run, found {what} in {folder}; choose another"
        assert sorted(folder.rglob("*")) == before


def test_files_and_folders_of_the_command_line_are_looked_for_before_the_work(tmp_path: Path, fails: Fails) -> None:
    nowhere = tmp_path / "nowhere" / "x"
    tiny_drafter(tmp_path / "drafter")
    for option in ("--out", "--plot"):
        line = fails(["bench", "step", "--set", "run.device=cpu", option, str(nowhere)], code=2)
        assert f"Invalid value for '{option}': expected a file in a folder that exists, found '{nowhere}'" in line
    assert "Invalid value for '--out'" in fails(["report", str(tmp_path), "--out", str(nowhere)], code=2)
    decode = ["eval", str(tmp_path / "drafter"), "--target", str(nowhere), "--prompts"]
    assert "x.txt: expected a file of prompts, found no such file; check --prompts" in fails(
        [*decode, f"{nowhere}.txt"]
    )
    (tmp_path / "prompts.md").write_text("# hello")
    assert "expected a .txt file (a prompt a line)" in fails([*decode, str(tmp_path / "prompts.md")])
    data = training_dataset(tmp_path / "data", FEW)
    line = fails(["data", "inspect", str(data), "--target", str(nowhere)])
    assert (
        line
        == f"data.target: expected the folder of the target's checkpoint, found no folder {nowhere}; check the path"
    )


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_run_folder_without_permission(tmp_path: Path, fails: Fails) -> None:
    data = training_dataset(tmp_path / "data", FEW)
    (tmp_path / "run").mkdir(mode=0o500)
    line = fails(commands_on(data, tmp_path)["train"], code=2)
    assert "run.output: expected a folder that can be written to" in line and "(Permission denied)" in line


@pytest.mark.parametrize("command", ["train", "eval", "bench"])
def test_target_tensors(command: str, tmp_path: Path, fails: Fails) -> None:
    data = training_dataset(tmp_path / "data", FEW)
    tiny_drafter(tmp_path / "drafter")
    args, file = commands_on(data, tmp_path)[command], data / "target.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": torch.zeros(60, 8)}, file)
    expected = (
        "lm_head.weight has shape (60, 8), expected (50, 8) from dataset.json; point data.target to the checkpoint"
    )
    assert expected in fails(args)
    del tensors["norm.weight"]
    save_file(tensors, file)
    assert "found no norm.weight" in fails(args)
    file.write_bytes(file.read_bytes()[:100])
    assert "target.safetensors, found one that cannot be read: truncated or half-written" in fails(args)
    file.unlink()
    expected = f"expected the target's embedding, head and norm in {file}, found no such file; set data.target"
    assert expected in fails(args)
    expected = f"expected the target's tensors in {tmp_path}/nowhere/model.safetensors, found no such file"
    assert expected in fails([*args, "--set", f"data.target={tmp_path}/nowhere"])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model_type": "gemma3_text"}, "model_type gemma3_text scales its embedding"),
        ({"text_config": {**TARGET_CONFIG, "model_type": "gemma2"}}, "model_type gemma2 scales its embedding"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"embedding_multiplier": 12.0, "logits_scaling": 8.0}, "embedding_multiplier 12.0; logits_scaling 8.0"),
        ({"lm_head_bias": True}, "lm_head_bias"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "train", "eval", "bench"])
def test_targets_that_are_not_reproduced(
    command: str, changes: dict[str, Any], name: str, tmp_path: Path, fails: Fails
) -> None:
    data = training_dataset(tmp_path / "data", FEW, target_config=TARGET_CONFIG | changes)
    tiny_drafter(tmp_path / "drafter")
    expected = f"target cannot be reproduced: {name}. Only plain embeddings and heads are supported"
    assert expected in fails(commands_on(data, tmp_path)[command])


def test_a_dataset_that_does_not_say_the_targets_sizes(tmp_path: Path, fails: Fails) -> None:
    data = training_dataset(tmp_path / "data", FEW, target_config={})
    args = commands_on(data, tmp_path)["train"]
    assert fails(args).endswith(
        "num_attention_heads, found None; write the target's config.json there, or set model.num_attention_heads"
    )
    sizes = ("model.num_attention_heads=2", "model.intermediate_size=16")
    line = fails([*args, *(word for size in sizes for word in ("--set", size))])
    assert line.endswith("to have num_hidden_layers, found None; write the target's config.json there")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, "has hidden_size 16"),
        ({"vocab_size": 60}, "has vocab_size 60"),
        ({"target_layer_ids": (0, 3, 4)}, "has target_layer_ids (0, 3, 4)"),
    ],
)
def test_a_drafter_that_does_not_belong_to_the_data(
    changes: dict[str, Any], message: str, tmp_path: Path, fails: Fails
) -> None:
    data = training_dataset(tmp_path / "data", FEW)
    drafter = tiny_drafter(tmp_path / "drafter", **changes)
    assert message in fails(commands_on(data, tmp_path)["eval"])
    for command in ("plan", "train", "bench"):
        line = fails([*commands_on(data, tmp_path)[command], "--set", f"model.init={drafter}"])
        assert f"model.init: {drafter} {message}" in line
        assert line.endswith("extract hidden states for this drafter or start from another")


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_drafter_that_is_missing_or_damaged(command: str, tmp_path: Path, fails: Fails) -> None:
    data = training_dataset(tmp_path / "data", FEW)
    drafter = tmp_path / "drafter"
    args = commands_on(data, tmp_path)[command]
    # eval takes a run's folder too, and so looks for more before it gives up.
    nothing = f"{drafter}: expected a run's folder, a checkpoint or a drafter, found none of"
    no_config, no_weights = nothing, nothing
    if command == "train":
        args += ["--set", f"model.init={drafter}"]
        no_config = f"expected the file {drafter}/config.json, found none"
        no_weights = "expected a safetensors file in"
    assert no_config in fails(args)
    tiny_drafter(drafter)
    file = drafter / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert "expected a safetensors file in" in fails(args)
    file.unlink()
    assert no_weights in fails(args)
    file.write_bytes(whole)
    (drafter / "config.json").write_text("{")
    assert f"expected JSON in {drafter}/config.json, found" in fails(args)


def test_soft_labels_without_last_hidden(tmp_path: Path, fails: Fails) -> None:
    data = training_dataset(tmp_path / "data", FEW)
    args = commands_on(data, tmp_path)["train"]
    line = fails([*args, "--set", "objective.kl_weight=0.1"], code=2)
    assert "objective.kl_weight: soft labels need last_hidden, which" in line
    assert "set it to 0 or extract the last hidden states" in line


def test_attention_that_the_device_does_not_have(tmp_path: Path, fails: Fails) -> None:
    data = training_dataset(tmp_path / "data", FEW)
    line = fails([*commands_on(data, tmp_path)["train"], "--set", "model.attention=flex"], code=2)
    assert "needs a CUDA device, found cpu" in line


def test_export_writes_over_nothing(tmp_path: Path, fails: Fails) -> None:
    drafter = tiny_drafter(tmp_path / "drafter")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert "expected a new or empty folder" in fails(["export", str(drafter), str(tmp_path / "out")])
    assert "expected a new or empty folder" in fails(["export", str(drafter), str(drafter)])
    assert "expected a run's folder" in fails(["export", str(tmp_path), str(tmp_path / "other")])


def test_demo_writes_over_nothing(tmp_path: Path, fails: Fails) -> None:
    (tmp_path / "demo" / "data").mkdir(parents=True)
    (tmp_path / "demo" / "data" / "mine.txt").write_text("mine")
    assert "holds an earlier demo; remove it or choose another folder" in fails(
        ["demo", "--out", str(tmp_path / "demo")]
    )


def out_of_memory(*args: Any, **kwargs: Any) -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB.\nSee documentation"
    )


class FullDevice(CallExecutor):
    """Steps on the CPU, warmed up as on a GPU with 3 of 8 GiB free."""

    def build(self, **calls: Any) -> Any:
        graphs = object.__new__(GraphExecutor)
        graphs.device, graphs._steps = torch.device("cuda"), self._steps
        for name in self._steps:
            graphs._warm_up(name)


@pytest.mark.parametrize("command", ["train", "bench"])
def test_out_of_gpu_memory_while_capturing(
    command: str, tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = training_dataset(tmp_path / "data", FEW)
    monkeypatch.setattr("engine.engine.make_executor", lambda device: FullDevice())
    monkeypatch.setattr("engine.generation.forward_backward", out_of_memory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 8 * 2**30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    line = fails(commands_on(data, tmp_path)[command])
    assert line == (
        "out of GPU memory while warming up train 1x256x32: 3.0 of 8.0 GiB were free before it; lower buckets.token_budget, "
        "buckets.num_anchors or model.head_chunk (CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
        "of 8.00 GiB.)"
    )


@pytest.mark.parametrize("command", ["train", "eval", "bench"])
def test_out_of_gpu_memory_while_the_parameters_are_placed(
    command: str, tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = training_dataset(tmp_path / "data", FEW)
    tiny_drafter(tmp_path / "drafter")
    monkeypatch.setattr("engine.engine.ParamArena", out_of_memory)
    line = fails(commands_on(data, tmp_path)[command])
    assert line.startswith("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert "Lower buckets.token_budget, buckets.num_anchors or model.head_chunk" in line


@pytest.mark.parametrize("command", ["train", "convert"])
def test_a_disk_that_is_full(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    def full(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError('I/O error: Os { code: 28, kind: StorageFull, message: "No space left on device" }')

    data, target = training_dataset(tmp_path / "data", FEW), write_target(tmp_path / "target")
    facts = ["--target", str(target), "--target-layer-ids", "1,2,3", "--mask-token-id", "511"]
    convert = ["data", "convert", str(FIXTURES / "specforge"), str(tmp_path / "out"), *facts]
    monkeypatch.setattr("buffers.manifest.save_file", full)
    assert main(convert if command == "convert" else commands_on(data, tmp_path)["train"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: could not write ") and "No space left on device" in line


def test_a_disk_that_is_full_while_text_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    data = training_dataset(tmp_path / "data", FEW)
    monkeypatch.setattr("engine.reports.MetricsLog.write", full)
    assert main(commands_on(data, tmp_path)["train"]) == 1
    expected = "error: could not write: No space left on device. Make room there; the same command goes on."
    assert capsys.readouterr().err.splitlines()[-1] == expected


def test_other_faults_keep_their_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a fault of ours")

    data = training_dataset(tmp_path / "data", FEW)
    monkeypatch.setattr("engine.generation.forward_backward", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        main(commands_on(data, tmp_path)["train"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": [1]}, "expected target_config to have an object as text_config, found [1]"),
        ({"rms_norm_eps": "1e-6"}, "a number from 0 to 1 as rms_norm_eps, found '1e-6'"),
        ({"rms_norm_eps": float("nan")}, "a number from 0 to 1 as rms_norm_eps, found nan"),
        ({"num_key_value_heads": [1]}, "to have num_key_value_heads, found [1]"),
        ({"head_dim": float("inf")}, "to have head_dim, found inf"),
        ({"num_attention_heads": True}, "to have num_attention_heads, found True"),
        ({"max_position_embeddings": {}}, "to have max_position_embeddings, found {}"),
        ({"intermediate_size": 10**30}, "intermediate_size: expected a positive integer below 2**31, found 1000"),
    ],
)
def test_a_targets_config_with_wrong_values(
    changes: dict[str, Any], message: str, tmp_path: Path, fails: Fails
) -> None:
    data = training_dataset(tmp_path / "data", FEW, target_config=TARGET_CONFIG | changes)
    for command in ("plan", "train"):
        assert message in fails(commands_on(data, tmp_path)[command])


def test_a_targets_config_with_nulls_has_the_defaults(tmp_path: Path) -> None:
    nulls = {"rms_norm_eps": None, "max_position_embeddings": None, "num_key_value_heads": None, "head_dim": None}
    data = training_dataset(tmp_path / "data", FEW, target_config=TARGET_CONFIG | nulls)
    assert main(["plan", str(data), *options()]) == 0


@pytest.mark.parametrize("command", ["plan", "train", "eval", "bench"])
def test_a_dataset_without_a_place_for_a_block(command: str, tmp_path: Path, fails: Fails) -> None:
    data = training_dataset(tmp_path / "data", FEW)
    tiny_drafter(tmp_path / "drafter")
    change_tensor("loss_mask", lambda mask: torch.arange(len(mask), dtype=torch.uint8) % 2)(data)
    line = fails(commands_on(data, tmp_path)[command])
    assert f"{data}: expected a sample with two supervised neighbours (loss_mask 1, 1), found none in 3 samples" in line


def test_held_out_samples_without_a_place_for_a_block(tmp_path: Path, fails: Fails) -> None:
    data, held_out = training_dataset(tmp_path / "data", FEW), training_dataset(tmp_path / "held-out", FEW)
    change_tensor("loss_mask", torch.zeros_like)(held_out)
    line = fails([*commands_on(data, tmp_path)["train"], "--set", f"data.eval_path={held_out}"])
    assert f"data.eval_path: {held_out}: expected a sample with two supervised neighbours" in line


def test_more_memory_than_there_is(tmp_path: Path, fails: Fails) -> None:
    data = training_dataset(tmp_path / "data", FEW)
    args = commands_on(data, tmp_path)["train"]
    line = fails([*args, "--set", "model.intermediate_size=2000000000", "--set", "model.head_dim=2000000000"])
    assert "Lower buckets.token_budget" in line
    assert "the memory of this machine is full. Lower" in fails(
        [*args, "--set", "model.num_hidden_layers=100000000000"]
    )
