"""Training runs from end to end on the CPU: what they write, how they go on, and what they refuse."""

import json
import re
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from buffers.batching import Batch
from buffers.dataset import Dataset
from engine.export import export_drafter
from engine.run import TrainingRun
from engine.settings import load_settings
from tests.drafter_helpers import assert_same_bits
from tests.run_helpers import (
    LENGTHS,
    Killed,
    checkpoint_tensors,
    every_token,
    files_under,
    kill,
    logged_steps,
    metrics,
    run,
    run_settings,
    tokens_of_epoch,
    training_dataset,
)

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parent.parent


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return training_dataset(tmp_path / "data")


def test_a_run_learns_and_leaves_what_it_should(data: Path, tmp_path: Path) -> None:
    held_out = training_dataset(tmp_path / "held-out", (50, 100, 140), first_sample=100)
    output = tmp_path / "runs" / "one"
    figures = run(data, output, f"data.eval_path={held_out}", "run.epochs=4", "run.eval_every=10")
    assert files_under(output).keys() == {
        "settings.toml",
        "metrics.jsonl",
        "buffers.txt",
        "left_out.json",
        "graphs.json",
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
    assert (figures["attention"], figures["recompute"], figures["reserved_mib"]) == ("reference", "none", None)
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
    told = json.loads((output / "best" / "best.json").read_text())
    assert told == best | {"eval_data": Dataset(held_out).digest}
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


def test_weights_that_are_not_finite_end_the_run_and_the_checkpoints_stay(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    run(data, output, "run.epochs=1")
    before = files_under(output / "checkpoints")
    monkeypatch.setattr("engine.optimizer.Schedule.__call__", lambda schedule, step: 1e300)
    with pytest.raises(ValueError, match="step-00000012: expected finite weights, found NaN .* Lower optimizer.lr"):
        run(data, output)
    assert files_under(output / "checkpoints") == before


def test_a_run_that_learned_nothing_is_no_success(tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data", (40, 50), nonfinite=(0, 1))
    with pytest.raises(ValueError, match="expected a step that learned, found all 4 skipped"):
        run(data, tmp_path / "run", "data.on_nonfinite=skip")
    assert not (tmp_path / "run" / "drafter").exists()
    assert [record["loss"] for record in metrics(tmp_path / "run")] == [None, None]


def test_every_sample_that_is_left_out_is_listed(data: Path, tmp_path: Path) -> None:
    lengths = Dataset(data).lengths
    run(data, tmp_path / "run", "run.max_steps=1", "buckets.lengths=128")
    left_out = json.loads((tmp_path / "run" / "left_out.json").read_text())
    assert left_out["too_long"] == "skip"
    assert left_out["training"] == [[i, int(n)] for i, n in enumerate(lengths) if n > 128]
    assert left_out["training"] and left_out["not_finite"] == []
