"""Training runs from end to end on the CPU: what they write, how they go on, and what they refuse."""

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from buffers.batching import Batch
from buffers.dataset import Dataset
from engine.data_feed import Progress
from engine.export import export_drafter
from engine.run import TrainingRun
from engine.settings import load_settings
from engine.settings_fields import SettingsError
from tests.drafter_helpers import assert_same_bits
from tests.run_helpers import (
    LENGTHS,
    SETTINGS,
    checkpoint_tensors,
    files_under,
    logged_steps,
    metrics,
    run,
    run_settings,
    training_dataset,
)

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parent.parent


class Killed(Exception):
    """Stands for a process that dies: nobody catches it, nothing is saved."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return training_dataset(tmp_path / "data")


@pytest.fixture
def after_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Has something happen right after one optimizer step, once."""

    def arrange(step: int, act: Callable[[], None]) -> None:
        took = Progress.took

        def took_then_act(self: Progress, batches: tuple[Batch, ...]) -> None:
            took(self, batches)
            if self.step == step:
                monkeypatch.setattr(Progress, "took", took)
                act()

        monkeypatch.setattr(Progress, "took", took_then_act)

    return arrange


@pytest.fixture
def steps_taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Batch, ...]]:
    """The batches of every step of every run of the test."""
    steps: list[tuple[Batch, ...]] = []
    took = Progress.took

    def note(self: Progress, batches: tuple[Batch, ...]) -> None:
        steps.append(batches)
        took(self, batches)

    monkeypatch.setattr(Progress, "took", note)
    return steps


def kill() -> None:
    raise Killed


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def tokens_of_epoch(steps: list[tuple[Batch, ...]], epoch: int) -> Counter[tuple[int, int]]:
    """How often each (sample, token) of an epoch was served."""
    return Counter(
        (row.sample_id, token)
        for step in steps
        for batch in step
        if batch.epoch == epoch
        for row in batch.rows
        for token in range(row.start, row.stop)
    )


def every_token(data: Path) -> set[tuple[int, int]]:
    return {(i, token) for i, length in enumerate(Dataset(data).lengths.tolist()) for token in range(length)}


def test_a_run_learns_and_leaves_what_it_should(data: Path, tmp_path: Path) -> None:
    held_out = training_dataset(tmp_path / "held-out", (50, 100, 140), first_sample=100)
    output = tmp_path / "runs" / "one"
    figures = run(data, output, f"data.eval_path={held_out}", "run.epochs=4", "run.eval_every=10")
    assert files_under(output).keys() == {
        "settings.toml",
        "metrics.jsonl",
        "buffers.txt",
        "left_out.json",
        *(f"{folder}/{file}" for folder in ("best", "drafter") for file in ("config.json", "model.safetensors")),
        "best/best.json",
        *(
            f"checkpoints/step-000000{step}/{file}"
            for step in (36, 40)  # run.keep = 2
            for file in ("state.json", "training.safetensors")
        ),
    }
    assert logged_steps(output) == [*range(3, 40, 3), 40]
    losses = [record["loss"] for record in metrics(output) if "loss" in record]
    assert losses[-1] < 0.75 * losses[0]
    assert sum(record.get("micro_batches", 0) for record in metrics(output)) == 40
    assert sum(record.get("useful_tokens", 0) for record in metrics(output)) == 4 * sum(LENGTHS)
    assert figures["steps"] == 40
    assert figures["how"] == "called"
    assert [row["batches"] for row in figures["buckets"]] == [20, 20]
    assert figures["device_allocations"] == figures["compilations"] == figures["skipped_steps"] == 0
    assert figures["eval_loss"] == metrics(output)[-1]["eval_loss"]
    json.dumps(figures)
    assert not [thread for thread in threading.enumerate() if thread.name == "input-loader"]


def test_held_out_samples_are_measured_at_fixed_steps_and_the_best_drafter_kept(data: Path, tmp_path: Path) -> None:
    held_out = training_dataset(tmp_path / "held-out", (50, 100, 140), first_sample=100)
    output = tmp_path / "run"
    changes = ("run.epochs=4", "run.eval_every=8", "run.save_every=8", "run.keep=9", "optimizer.lr=3e-2")
    run(data, output, f"data.eval_path={held_out}", *changes)
    measured = [record for record in metrics(output) if "eval_loss" in record]
    assert [record["step"] for record in measured] == [8, 16, 24, 32, 40]
    steps = [record["step"] for record in metrics(output)]
    assert steps == sorted(steps)
    best = max(measured, key=lambda record: record["eval_accept_len"])
    assert json.loads((output / "best" / "best.json").read_text()) == best
    saved, kept = checkpoint_tensors(output, best["step"]), load_file(output / "best" / "model.safetensors")
    assert_same_bits(kept, {name: saved[f"master.{name}"].bfloat16() for name in kept})


def test_a_step_takes_micro_batches_of_different_buckets_and_what_an_epoch_has_left(
    data: Path, tmp_path: Path, steps_taken: list[tuple[Batch, ...]]
) -> None:
    output = tmp_path / "run"
    figures = run(data, output, "run.accumulation=3", "run.log_every=1")
    assert [record["micro_batches"] for record in metrics(output)] == [3, 3, 3, 1] * 2
    assert [record["epoch"] for record in metrics(output)] == [0] * 4 + [1] * 4
    assert [len(step) for step in steps_taken] == [3, 3, 3, 1] * 2
    assert any(len({batch.bucket for batch in step}) == 2 for step in steps_taken)
    assert figures["steps"] == 8
    for epoch in (0, 1):
        assert tokens_of_epoch(steps_taken, epoch) == Counter(every_token(data))


def test_long_lived_buffers_are_listed(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", "run.max_steps=1")
    head, *rows = [line.split() for line in (tmp_path / "run" / "buffers.txt").read_text().splitlines()]
    assert head == ["arena", "name", "shape", "dtype", "MiB", "address"]
    named = {row[-5] for row in rows}
    assert {"target_hidden", "input_ids", "weight", "grad", "exp_avg", "embed_tokens"} <= named
    assert all(row[-1].startswith("0x") for row in rows)


def test_the_readmes_settings_are_read(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "run.toml").write_text(block)
    assert load_settings(tmp_path / "run.toml").data.path == "runs/data/train"


def test_max_steps_ends_the_run_and_its_schedule(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    assert run(data, output, "run.max_steps=7", "run.log_every=1", "optimizer.warmup_ratio=0.3")["steps"] == 7
    rates = [record["lr"] for record in metrics(output)]
    assert rates[:3] == [0.5e-2, 1e-2, 1e-2]  # int(0.3 * 7) steps of warm-up
    assert rates[-1] == pytest.approx(1e-2 * 0.5 * (1 + torch.cos(torch.tensor(4 / 5 * torch.pi)).item()))


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


def test_ctrl_c_ends_with_130_and_a_checkpoint(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    changes = [*SETTINGS, f"data.path={data}", f"run.output={output}", "run.epochs=10000"]
    command = [sys.executable, "-m", "bench.cli", "train", *(word for change in changes for word in ("--set", change))]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGINT)
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

    after_step(2, twice)
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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


@pytest.mark.parametrize(
    ("too_long", "rows", "tokens", "word"),
    [("skip", 2, 100, "left out"), ("truncate", 4, 356, "cut off"), ("split", 7, 630, "split")],
)
def test_samples_that_are_too_long_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], too_long: str, rows: int, tokens: int, word: str
) -> None:
    data = training_dataset(tmp_path / "data", (40, 200, 60, 330))
    output = tmp_path / "run"
    changes = (f"data.too_long={too_long}", "buckets.lengths=", "buckets.max_length=128", "run.epochs=1")
    figures = run(data, output, *changes)
    assert figures["too_long_samples"] == 2
    assert figures["steps"] == rows
    assert sum(record["useful_tokens"] for record in metrics(output)) == tokens
    expected = f"2 samples longer than the largest bucket are {word}: 1 (200), 3 (330)"
    assert expected in capsys.readouterr().err


def test_a_finished_run_started_again_changes_nothing(data: Path, tmp_path: Path) -> None:
    held_out = training_dataset(tmp_path / "held-out", (50, 100), first_sample=100)
    found = []
    for _ in range(2):
        figures = run(data, tmp_path / "run", f"data.eval_path={held_out}")
        files = files_under(tmp_path / "run")
        del files["buffers.txt"]  # addresses are the process's
        found.append((figures, files))
    (first, before), (again, after) = found
    assert after == before
    assert again["eval_loss"] == first["eval_loss"]
    assert again["final"]["loss"] == first["final"]["loss"]


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


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_soft_labels(tmp_path: Path, norm: str) -> None:
    data = training_dataset(tmp_path / "data", last_hidden_norm=norm)
    run(data, tmp_path / "run", "objective.kl_weight=0.15", "run.log_every=1")
    for record in metrics(tmp_path / "run"):
        assert record["kl"] > 0
        assert record["loss"] == pytest.approx(record["ce"] + 0.15 * record["kl"], rel=1e-5)


def test_soft_labels_see_whether_the_final_norm_was_applied(tmp_path: Path) -> None:
    found = []
    for norm in ("pre", "post"):
        data = training_dataset(tmp_path / norm, last_hidden_norm=norm)
        run(data, tmp_path / f"run-{norm}", "objective.kl_weight=0.15", "run.max_steps=1")
        found.append(metrics(tmp_path / f"run-{norm}")[0])
    assert found[0]["ce"] == found[1]["ce"]
    assert found[0]["kl"] != found[1]["kl"]


def test_a_drafter_to_start_from(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "first")
    export_drafter(tmp_path / "first", tmp_path / "exported")
    changes = (f"model.init={tmp_path / 'exported'}", "optimizer.lr=1e-30", "model.num_hidden_layers=3")
    run(data, tmp_path / "second", *changes, "run.max_steps=2")
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("exported", "second/drafter")]
    assert_same_bits(weights[1], weights[0])


def test_a_sample_that_is_not_finite_is_skipped_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = training_dataset(tmp_path / "data", nonfinite=(2, 5))
    figures = run(data, tmp_path / "run", "data.on_nonfinite=skip", "run.log_every=1")
    assert figures["skipped_samples"] == [2, 5]
    assert "2 samples with NaN or infinity were left out: 2, 5" in capsys.readouterr().err
    assert figures["skipped_steps"] == 4  # one row a batch: those steps had nothing to learn from
    assert metrics(tmp_path / "run")[-1]["skipped_steps"] == 4
    for tensor in load_file(tmp_path / "run" / "drafter" / "model.safetensors").values():
        assert tensor.isfinite().all()
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_a_sample_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data", nonfinite=(2,))
    with pytest.raises(ValueError, match="found NaN or infinity in sample 2. Extract it again, or set on_nonfinite"):
        run(data, tmp_path / "run")


def test_a_checkpoint_of_another_drafter_or_of_other_data_is_refused(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", "run.epochs=1")
    before = files_under(tmp_path / "run")
    with pytest.raises(ValueError, match="drafter has layer_types .*, the settings ask for .*; set it back, or train"):
        run(data, tmp_path / "run", "model.num_hidden_layers=2")
    other = training_dataset(tmp_path / "other", LENGTHS[:-1])
    with pytest.raises(ValueError, match="has 9 samples with .* tokens, the checkpoint was trained on 10 with"):
        run(other, tmp_path / "run")
    assert files_under(tmp_path / "run") == before


@pytest.mark.parametrize("file", ["state.json", "training.safetensors"])
def test_a_damaged_checkpoint_is_named(data: Path, tmp_path: Path, file: str) -> None:
    run(data, tmp_path / "run", "run.epochs=1")
    folder = tmp_path / "run" / "checkpoints" / "step-00000010"
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="step-00000010: expected a training checkpoint, found a damaged one"):
        run(data, tmp_path / "run")


def test_checkpoints_that_were_not_finished_are_cleared_away(data: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "run" / "checkpoints" / ".step-00000003.writing"
    unfinished.mkdir(parents=True)
    (unfinished / "state.json").write_text("{")
    run(data, tmp_path / "run", "run.epochs=1")
    assert sorted(folder.name for folder in unfinished.parent.iterdir()) == ["step-00000008", "step-00000010"]


def test_held_out_samples_of_another_target_are_refused(data: Path, tmp_path: Path) -> None:
    held_out = training_dataset(tmp_path / "held-out", (50,), target_layer_ids=(0, 3, 4))
    with pytest.raises(ValueError, match=r"data.eval_path: .*target_layer_ids \(0, 3, 4\), .* has \(1, 3, 4\)"):
        run(data, tmp_path / "run", f"data.eval_path={held_out}")
    longer = training_dataset(tmp_path / "longer", (500,))
    with pytest.raises(ValueError, match="data.eval_path: expected at least one sample of at most 256 tokens"):
        run(data, tmp_path / "run", f"data.eval_path={longer}")
    assert not (tmp_path / "run").exists()


def test_what_was_opened_is_closed_when_the_start_fails(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr("engine.engine.Engine.close", lambda engine: closed.append("engine"))
    monkeypatch.setattr("engine.run.MetricsLog", lambda *args, **kwargs: kill())
    with pytest.raises(Killed):
        TrainingRun(run_settings(data, tmp_path / "run"), resume=True)
    assert closed == ["engine"]


def test_weights_that_are_not_finite_end_the_run_and_the_checkpoints_stay(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run(data, output, "run.epochs=1")
    before = files_under(output / "checkpoints")
    with pytest.raises(ValueError, match="step-00000012: expected finite weights, found NaN .* Lower optimizer.lr"):
        run(data, output, "optimizer.lr=1e300")
    assert files_under(output / "checkpoints") == before


def test_a_run_that_learned_nothing_is_no_success(tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data", (40, 50), nonfinite=(0, 1))
    with pytest.raises(ValueError, match="expected a step that learned, found all 4 skipped"):
        run(data, tmp_path / "run", "data.on_nonfinite=skip")
    assert not (tmp_path / "run" / "drafter").exists()
    assert [record["loss"] for record in metrics(tmp_path / "run")] == [None, None]


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
    run(data, output, f"data.eval_path={held_out}", "optimizer.lr=3e-2", "run.epochs=4")
    best = files_under(output / "best")
    assert json.loads(best["best.json"])["eval_accept_len"] > 0
    (output / "best").rename(output / ".best.old")
    run(data, output, f"data.eval_path={held_out}", "optimizer.lr=1e-9", "run.epochs=5")
    assert (
        json.loads(files_under(output / "best")["best.json"])["eval_accept_len"]
        >= json.loads(best["best.json"])["eval_accept_len"]
    )
    assert not (output / ".best.old").exists()


@pytest.mark.parametrize("text", ["", "null", "{}", '{"eval_accept_len": null}', "\xff"])
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
    run(data, tmp_path / "run", "run.epochs=1")
    file = tmp_path / "run" / "checkpoints" / "step-00000010" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match="step-00000010: expected a training checkpoint, found a damaged one"):
        run(data, tmp_path / "run")


@pytest.mark.parametrize("consumed", [[[999, 0]], [[-1, 0]], [3, 4], [[0.5, 0.0]]])
def test_consumed_rows_that_there_are_not(data: Path, tmp_path: Path, consumed: list[Any]) -> None:
    run(data, tmp_path / "run", "run.epochs=1")
    file = tmp_path / "run" / "checkpoints" / "step-00000010" / "training.safetensors"
    save_file(load_file(file) | {"consumed": torch.tensor(consumed)}, file)
    with pytest.raises(ValueError, match="step-00000010: expected a training checkpoint, found a damaged one"):
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


def test_every_sample_that_is_left_out_is_listed(data: Path, tmp_path: Path) -> None:
    lengths = Dataset(data).lengths
    run(data, tmp_path / "run", "run.max_steps=1", "buckets.lengths=128")
    left_out = json.loads((tmp_path / "run" / "left_out.json").read_text())
    assert left_out["too_long"] == "skip"
    assert left_out["training"] == [[i, int(n)] for i, n in enumerate(lengths) if n > 128]
    assert left_out["training"] and left_out["not_finite"] == []
