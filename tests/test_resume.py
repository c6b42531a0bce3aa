"""A run that goes on: after Ctrl-C, a kill, a bad sample or a change of plan, and what stands in its folder by then."""

import errno
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from buffers.batching import Batch
from buffers.dataset import Dataset
from buffers.manifest import sha256
from engine.run import TrainingRun
from engine.settings_fields import SettingsError
from tests.drafter_helpers import assert_same_bits
from tests.run_helpers import (
    LENGTHS,
    SETTINGS,
    Killed,
    checkpoint_tensors,
    every_token,
    files_under,
    interrupt,
    kill,
    logged_steps,
    metrics,
    run,
    run_settings,
    steps_of,
    tokens_of_epoch,
    training_dataset,
)

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parent.parent
# A schedule that does not ask how many epochs there will be.
CONSTANT = ("optimizer.schedule=constant", "optimizer.warmup_ratio=0")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return training_dataset(tmp_path / "data")


@pytest.mark.parametrize("interrupted_after", [6, 7, 10, 16])
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(
    data: Path, tmp_path: Path, after_step: Any, interrupted_after: int
) -> None:
    held_out = training_dataset(tmp_path / "held-out", (50, 100, 140), first_sample=100)
    changes = (f"data.eval_path={held_out}", "run.eval_every=7", "run.save_every=5", "optimizer.lr=3e-2")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(data, whole, *changes)
    assert metrics(whole)[-2]["accuracy"] > 0
    after_step(interrupted_after, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(data, broken, *changes)
    assert (broken / "checkpoints" / f"step-{interrupted_after:08d}").is_dir()
    assert not (broken / "drafter").exists()
    assert run(data, broken, *changes)["steps"] == 20
    assert_same_bits(checkpoint_tensors(broken, 20), checkpoint_tensors(whole, 20))
    assert metrics(broken) == metrics(whole)
    for name in ("drafter/model.safetensors", "best/model.safetensors", "best/best.json"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("killed_after", [3, 5, 7])
def test_a_killed_run_does_again_what_came_after_its_last_checkpoint(
    data: Path, tmp_path: Path, after_step: Any, killed_after: int
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    changes = ("run.log_every=1", "run.accumulation=2")
    run(data, whole, *changes)
    after_step(killed_after, kill)
    with pytest.raises(Killed):
        run(data, broken, *changes)
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9')  # the line under way
    run(data, broken, *changes)
    assert_same_bits(checkpoint_tensors(broken, 10), checkpoint_tensors(whole, 10))
    assert metrics(broken) == metrics(whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupt_ends_with_130_and_a_checkpoint(data: Path, tmp_path: Path, number: signal.Signals) -> None:
    output = tmp_path / "run"
    changes = [*SETTINGS, f"data.path={data}", f"run.output={output}", "run.epochs=10000"]
    command = [sys.executable, "-m", "bench.cli", "train", *(word for change in changes for word in ("--set", change))]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 3/"):
            process.send_signal(number)
            break
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-1] == "interrupted"
    (newest, *_) = sorted((output / "checkpoints").iterdir(), reverse=True)
    step = json.loads((newest / "state.json").read_text())["step"]
    assert f"checkpoint of step {step} saved" in err
    assert logged_steps(output) == list(range(3, step + 1, 3))


def test_a_second_interrupt_ends_at_once(data: Path, tmp_path: Path, after_step: Any) -> None:
    def twice() -> None:
        interrupt()
        interrupt()

    before = signal.getsignal(signal.SIGINT)
    after_step(2, twice)
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("too_long", ["skip", "split"])
@pytest.mark.parametrize(
    ("before", "after"), [("128,256", "256"), ("256", "128,256"), ("128", "128,256"), ("256", "128")]
)
def test_after_a_change_of_buckets_the_rest_of_the_epoch_is_served_once(
    tmp_path: Path, after_step: Any, steps_taken: list[tuple[Batch, ...]], before: str, after: str, too_long: str
) -> None:
    data = training_dataset(tmp_path / "data", (40, 300, 60, 250, 90, 170, 50, 140, 80, 520))
    changes = (f"data.too_long={too_long}", "run.epochs=2")
    after_step(4, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "run", *changes, f"buckets.lengths={before}")
    taken = tokens_of_epoch(steps_taken, 0)
    run(data, tmp_path / "run", *changes, f"buckets.lengths={after}", "buckets.max_rows=2")
    served = tokens_of_epoch(steps_taken, 0)
    assert set(served.values()) == {1}
    largest = int(after.split(",")[-1])
    fits = {sample for sample, length in enumerate(Dataset(data).lengths.tolist()) if length <= largest}
    for sample, token in every_token(data):
        begun = any(of == sample for of, _ in taken)
        if sample in fits or too_long == "split":
            # A sample cut by the earlier plan and begun under it has had its turn.
            assert served[sample, token] or begun
    in_epoch_1 = set(tokens_of_epoch(steps_taken, 1))
    assert in_epoch_1 == {(i, token) for i, token in every_token(data) if too_long == "split" or i in fits}


def test_a_finished_run_started_again_changes_nothing(data: Path, tmp_path: Path) -> None:
    held_out = training_dataset(tmp_path / "held-out", (50, 100), first_sample=100)
    found = []
    for _ in range(2):
        figures = run(data, tmp_path / "run", f"data.eval_path={held_out}")
        files = files_under(tmp_path / "run")
        del files["buffers.txt"], files["graphs.json"]  # addresses and seconds are the process's
        found.append((figures, files))
    (first, before), (again, after) = found
    assert after == before
    assert again["eval_loss"] == first["eval_loss"]
    assert again["final"]["loss"] == first["final"]["loss"]


def test_a_run_that_goes_on_says_what_it_leaves_out(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    run(data, output, "run.max_steps=2")
    assert "buckets (rows x tokens x blocks)" in capsys.readouterr().err.splitlines()
    run(data, output, "run.max_steps=2", f"model.init={output / 'drafter'}")
    said = capsys.readouterr().err
    assert "step-00000002; model.init is not read: the weights are the checkpoint's" in said
    assert "nothing is left to train: all 2 steps were done before" in said
    assert "buckets (rows x tokens x blocks)" not in said.splitlines()


def test_more_epochs_continue_a_finished_run(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", "run.epochs=1")
    assert run(data, tmp_path / "run", "run.epochs=2")["steps"] == 20
    assert logged_steps(tmp_path / "run") == [3, 6, 9, 10, 12, 15, 18, 20]


def test_a_folder_with_a_run_is_not_written_over(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", "run.epochs=1")
    before = files_under(tmp_path / "run")
    with pytest.raises(SettingsError, match="run.output: .*holds a run with checkpoints; leave out --no-resume"):
        run(data, tmp_path / "run", resume=False)
    assert files_under(tmp_path / "run") == before
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(SettingsError, match="run.output: .*holds a trained drafter, but no checkpoint"):
        run(data, tmp_path / "run")


def test_a_new_run_does_not_take_the_best_of_one_that_left_no_checkpoint(
    data: Path, tmp_path: Path, after_step: Any
) -> None:
    held_out = training_dataset(tmp_path / "held-out", (50, 100), first_sample=100)
    changes = (f"data.eval_path={held_out}", "run.eval_every=1", "run.save_every=0")
    after_step(2, kill)
    with pytest.raises(Killed):
        run(data, tmp_path / "run", *changes)
    best = tmp_path / "run" / "best" / "best.json"
    best.write_text(best.read_text().replace('"eval_accept_len": 0.0', '"eval_accept_len": 99.0'))
    assert "99.0" in best.read_text()
    run(data, tmp_path / "run", *changes)
    assert "99.0" not in best.read_text()


def test_a_checkpoint_of_another_drafter_or_of_other_data_is_refused(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", "run.epochs=1")
    before = files_under(tmp_path / "run")
    with pytest.raises(ValueError, match="drafter has layer_types .*, the settings ask for .*; set it back, or train"):
        run(data, tmp_path / "run", "model.num_hidden_layers=2")
    other = training_dataset(tmp_path / "other", LENGTHS[:-1])
    with pytest.raises(ValueError, match="has 9 samples with .* tokens, the checkpoint was trained on 10 with"):
        run(other, tmp_path / "run")
    assert files_under(tmp_path / "run") == before


def cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def set_version(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 2}))


def set_step(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"step": 9}))


@pytest.mark.parametrize(
    ("file", "damage", "why"),
    [
        ("state.json", cut, "state.json: "),
        ("state.json", Path.unlink, "no state.json to read: No such file"),
        ("state.json", set_version, "state.json of format version 2, this version reads 1"),
        ("state.json", set_step, "state.json has another content than was written: its SHA-256 differs"),
        ("training.safetensors", cut, "training.safetensors is cut off or grown: "),
        ("training.safetensors", Path.unlink, "no training.safetensors to read: No such file"),
        ("training.safetensors", flip, "training.safetensors has other bytes than were written: its SHA-256 differs"),
    ],
    ids=["cut state", "no state", "other format", "other state", "cut tensors", "no tensors", "a bit of the tensors"],
)
def test_a_run_goes_on_from_the_newest_whole_checkpoint_and_says_which_it_passes_over(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, damage: Any, why: str
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(data, whole, *CONSTANT)
    run(data, broken, "run.epochs=1", *CONSTANT)
    checkpoints = broken / "checkpoints"
    damage(checkpoints / "step-00000010" / file)
    capsys.readouterr()
    run(data, broken, "run.keep=9", *CONSTANT)
    said = capsys.readouterr().err
    assert f"step-00000010 is passed over and set aside: {why}" in said
    assert (
        "going on from " in said
        and "step-00000008\nsettings changed since then: run.epochs 1 -> 2, run.keep 2 -> 9" in said
    )
    assert_same_bits(checkpoint_tensors(broken, 20), checkpoint_tensors(whole, 20))
    assert [line["loss"] for line in metrics(broken) if line.get("step") == 12] == [
        line["loss"] for line in metrics(whole) if line.get("step") == 12
    ]
    assert (checkpoints / "passed-over-step-00000010").is_dir()
    assert steps_of(broken) == [8, 12, 16, 20]


def test_a_checkpoint_whose_bytes_the_disk_has_lost_is_passed_over(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(file: Path) -> str:
        if "step-00000010" in str(file):
            raise OSError(errno.EIO, "Input/output error")
        return sha256(file)

    run(data, tmp_path / "run", "run.epochs=1")
    monkeypatch.setattr("engine.checkpoint.sha256", lost)
    assert run(data, tmp_path / "run", "run.epochs=1")["steps"] == 10
    said = capsys.readouterr().err
    assert "step-00000010 is passed over and set aside: training.safetensors cannot be read: Input/output error" in said
    assert f"going on from {tmp_path / 'run' / 'checkpoints' / 'step-00000008'}" in said


def test_without_a_whole_checkpoint_nothing_is_begun_anew(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", "run.epochs=1")
    checkpoints = tmp_path / "run" / "checkpoints"
    flip(checkpoints / "step-00000010" / "training.safetensors")
    cut(checkpoints / "step-00000008" / "training.safetensors")
    before = files_under(tmp_path / "run")
    both = "step-00000010: training.safetensors has other bytes .*; step-00000008: training.safetensors is cut off"
    with pytest.raises(ValueError, match=f"expected a checkpoint to go on from, found none that is whole .{both}"):
        run(data, tmp_path / "run")
    assert files_under(tmp_path / "run") == before


def made_by_an_earlier_version(folder: Path, **changes: Any) -> None:
    """Takes out what came later, checksums among it."""
    state = json.loads((folder / "state.json").read_text())
    for name in ("schedule", "seed", "settings", "fingerprints", "files", "sha256"):
        del state[name]
    (folder / "state.json").write_text(json.dumps(state | changes))


def test_a_checkpoint_without_checksums_is_gone_on_from(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "whole", *CONSTANT)
    run(data, tmp_path / "run", "run.epochs=1", *CONSTANT)
    made_by_an_earlier_version(tmp_path / "run" / "checkpoints" / "step-00000010")
    run(data, tmp_path / "run", *CONSTANT)
    assert_same_bits(checkpoint_tensors(tmp_path / "run", 20), checkpoint_tensors(tmp_path / "whole", 20))


def test_checkpoints_that_were_not_finished_are_cleared_away(data: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "run" / "checkpoints" / ".step-00000003.writing"
    unfinished.mkdir(parents=True)
    (unfinished / "state.json").write_text("{")
    run(data, tmp_path / "run", "run.epochs=1")
    assert sorted(folder.name for folder in unfinished.parent.iterdir()) == ["step-00000008", "step-00000010"]


def test_links_and_files_in_the_place_of_folders_are_in_nobodys_way(data: Path, tmp_path: Path) -> None:
    held_out = training_dataset(tmp_path / "held-out", (50,), first_sample=100)
    output, changes = tmp_path / "run", (f"data.eval_path={held_out}", "run.eval_every=1", "optimizer.lr=3e-2")
    run(data, output, *changes, "run.epochs=1")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("best", "checkpoints/step-00000008", "checkpoints/step-00000010"):
        (output / name).rename(elsewhere / Path(name).name)
        (output / name).symlink_to(elsewhere / Path(name).name)
    for name in ("best.old", "best.writing", "checkpoints/step-00000011.writing", "checkpoints/step-00000012.old"):
        place = output / name
        place.with_name(f".{place.name}").write_text("no folder")
    (elsewhere / "best" / "best.json").unlink()  # the next evaluation is the best
    moved = files_under(elsewhere)
    assert run(data, output, *changes, "run.save_every=1", "run.keep=1")["steps"] == 20
    assert steps_of(output) == [20] and not (output / "best").is_symlink()
    assert not [path for path in output.rglob(".*") if path.is_file()]
    assert files_under(elsewhere) == moved, "what a link leads to stays"


def test_two_runs_do_not_write_to_one_folder(data: Path, tmp_path: Path) -> None:
    settings = run_settings(data, tmp_path / "run")
    with (
        TrainingRun(settings, resume=True),
        pytest.raises(SettingsError, match="run.output: another run is writing to"),
    ):
        TrainingRun(settings, resume=True)
    assert run(data, tmp_path / "run")["steps"] == 20


def test_the_best_drafter_outlives_a_death_between_two_renames(data: Path, tmp_path: Path) -> None:
    held_out = training_dataset(tmp_path / "held-out", (50,), first_sample=100)
    output = tmp_path / "run"
    run(data, output, f"data.eval_path={held_out}", "run.epochs=1")
    # Better than any that comes after it.
    best = output / "best" / "best.json"
    best.write_text(json.dumps(json.loads(best.read_text()) | {"eval_accept_len": 99.0}))
    before = files_under(output / "best")
    (output / "best").rename(output / ".best.old")
    run(data, output, f"data.eval_path={held_out}", "run.epochs=2")
    assert files_under(output / "best") == before
    assert not (output / ".best.old").exists()


def test_a_best_that_was_measured_on_other_samples_is_none(data: Path, tmp_path: Path) -> None:
    first, second = (training_dataset(tmp_path / str(n), (50, n), first_sample=n) for n in (100, 140))
    best = tmp_path / "run" / "best" / "best.json"
    run(data, tmp_path / "run", f"data.eval_path={first}", "run.epochs=1")
    told = json.loads(best.read_text()) | {"eval_accept_len": 99.0}
    best.write_text(json.dumps(told))
    run(data, tmp_path / "run", f"data.eval_path={first}", "run.epochs=2")
    assert json.loads(best.read_text()) == told
    run(data, tmp_path / "run", f"data.eval_path={second}", "run.epochs=3")
    assert json.loads(best.read_text())["eval_data"] == Dataset(second).digest


@pytest.mark.parametrize("text", ["", "null", "{}", '{"eval_accept_len": null}', '{"eval_accept_len": 1e999}', "\xff"])
def test_a_damaged_best_is_named(data: Path, tmp_path: Path, text: str) -> None:
    held_out = training_dataset(tmp_path / "held-out", (50,), first_sample=100)
    run(data, tmp_path / "run", f"data.eval_path={held_out}", "run.epochs=1")
    (tmp_path / "run" / "best" / "best.json").write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match="best.json: expected the best evaluation, found a damaged one .*; remove"):
        run(data, tmp_path / "run", f"data.eval_path={held_out}")


def test_lines_of_metrics_that_are_none_are_dropped(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", "run.epochs=1")
    before = metrics(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'null\n7\n{"step": "x"}\n\xff\n{"step": 3')
    run(data, tmp_path / "run", "run.epochs=1")
    assert metrics(tmp_path / "run") == before


@pytest.mark.parametrize(
    "change",
    [
        {"format_version": 2},
        {"config": None},
        {"step": -1},
        {"epoch": 10**30},
        {"data": {"num_samples": "x"}},
        {"logged": 3},
    ],
)
def test_a_state_with_wrong_values_is_named(data: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    run(data, tmp_path / "run", "run.epochs=1", "run.keep=1")
    made_by_an_earlier_version(tmp_path / "run" / "checkpoints" / "step-00000010", **change)
    with pytest.raises(ValueError, match="found none that is whole .step-00000010: "):
        run(data, tmp_path / "run")


@pytest.mark.parametrize("consumed", [[[999, 0]], [[-1, 0]], [3, 4], [[0.5, 0.0]]])
def test_consumed_rows_that_there_are_not(data: Path, tmp_path: Path, consumed: list[Any]) -> None:
    run(data, tmp_path / "run", "run.epochs=1", "run.keep=1")
    folder = tmp_path / "run" / "checkpoints" / "step-00000010"
    made_by_an_earlier_version(folder)
    file = folder / "training.safetensors"
    save_file(load_file(file) | {"consumed": torch.tensor(consumed)}, file)
    with pytest.raises(ValueError, match="found none that is whole .step-00000010: consumed "):
        run(data, tmp_path / "run")


def test_a_bad_sample_costs_none_of_the_steps_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = training_dataset(tmp_path / "data", nonfinite=(2,))
    with pytest.raises(ValueError, match="in sample 2"):
        run(data, tmp_path / "run", "run.save_every=0")
    folders = sorted((tmp_path / "run" / "checkpoints").iterdir())
    step = int(folders[-1].name.removeprefix("step-"))
    assert step > 0 and len(folders) == 1
    assert f"checkpoint of step {step} saved before the error below" in capsys.readouterr().err
    figures = run(data, tmp_path / "run", "run.save_every=0", "data.on_nonfinite=skip")
    assert figures["steps"] == 20 and figures["skipped_samples"] == [2]


def test_a_checkpoint_of_other_data_of_the_same_size_is_refused(tmp_path: Path) -> None:
    run(training_dataset(tmp_path / "a"), tmp_path / "run", "run.max_steps=4")
    other = training_dataset(tmp_path / "b", first_sample=100)
    with pytest.raises(ValueError, match="the checkpoint was trained on 10 with .* of other content; point it back"):
        run(other, tmp_path / "run", "run.max_steps=8")


def test_a_run_that_learned_nothing_leaves_no_checkpoint_behind(tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data", (40, 50), nonfinite=(0, 1))
    with pytest.raises(ValueError, match="expected a step that learned"):
        run(data, tmp_path / "run", "data.on_nonfinite=skip", "run.save_every=0")
    assert not list((tmp_path / "run").glob("checkpoints/*"))
