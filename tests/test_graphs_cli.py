"""`graphs build` and `graphs status` from end to end on the CPU: what they say, write and exit with."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.cli import main
from engine.checkpoint import Position, load_checkpoint
from engine.engine import Engine
from graphs.record import FILE, read_record, write_record
from tests.run_helpers import files_under, run, run_settings, training_dataset

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    settings = run_settings(training_dataset(tmp_path / "data"), tmp_path / "run")
    (tmp_path / "run.toml").write_text(settings.to_toml())
    return tmp_path / "run.toml"


def told(capsys: pytest.CaptureFixture[str]) -> Sequence[str]:
    return capsys.readouterr().out.splitlines()


def test_from_not_built_to_fresh_to_stale(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graphs", "status", str(config)]) == 3
    assert told(capsys) == [
        f"{tmp_path / 'run' / FILE}: no graphs were built",
        "1x128x32: not built",
        "1x256x32: not built",
    ]
    assert main(["graphs", "build", str(config), "--json"]) == 0
    *lines, last = told(capsys)
    assert any("called: nothing to compare" in line and "1x256x32" in line for line in lines)
    assert any('of model.recompute = "none" under reference attention, in fp32' in line for line in lines)
    built = json.loads(last)
    assert (built["recompute"], built["attention"], built["precision"]) == ("none", "reference", "fp32")
    assert [row["how"] for row in built["buckets"]] == ["called", "called"]
    assert [row["worth"] for row in built["buckets"]] == ["called", "called"]
    assert {"compile", "capture", "verify"} <= built["phases_s"].keys()
    assert files_under(tmp_path / "run").keys() == {FILE}
    assert main(["graphs", "status", str(config)]) == 0
    assert told(capsys) == ["generation 1", "1x128x32: fresh, called", "1x256x32: fresh, called"]

    changed = ["--set", "model.recompute=layer", "--set", "buckets.lengths=128,384"]
    assert main(["graphs", "status", str(config), "--json", *changed]) == 3
    *lines, last = told(capsys)
    assert lines == [
        "generation 1",
        "1x128x32: stale (recompute: none -> layer)",
        "1x384x32: not built",
        "built before, planned no more: 1x256x32",
    ]
    figures = json.loads(last)
    assert figures["fresh"] is False
    assert figures["buckets"][0]["changes"] == [{"field": "recompute", "old": "none", "new": "layer"}]
    assert figures["unplanned"] == ["1x256x32"]


def test_live_settings_leave_graphs_fresh(config: Path) -> None:
    assert main(["graphs", "build", str(config)]) == 0
    live = ["--set", "optimizer.lr=1e-4", "--set", "objective.gamma=2", "--set", "run.log_every=1"]
    assert main(["graphs", "status", str(config), *live]) == 0


def test_a_truncated_record_is_reported_and_built_again(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["graphs", "build", str(config)]) == 0
    path = tmp_path / "run" / FILE
    path.write_bytes(path.read_bytes()[:200])
    capsys.readouterr()
    assert main(["graphs", "status", str(config), "--json"]) == 3
    *lines, last = told(capsys)
    assert "truncated or damaged" in lines[0]
    assert lines[1:] == ["1x128x32: not built", "1x256x32: not built"]
    assert "truncated" in json.loads(last)["problem"]
    assert main(["graphs", "build", str(config)]) == 0
    assert "truncated" in capsys.readouterr().err
    assert main(["graphs", "status", str(config)]) == 0


def test_a_run_leaves_what_build_leaves(config: Path, tmp_path: Path) -> None:
    run(tmp_path / "data", tmp_path / "run", "run.max_steps=1")
    assert main(["graphs", "status", str(config)]) == 0
    record = read_record(tmp_path / "run")
    assert record is not None
    assert [bucket.bucket for bucket in record.buckets] == ["1x128x32", "1x256x32"]
    assert [graph.name for graph in record.buckets[0].graphs] == ["train 1x128x32"]
    assert [graph.name for graph in record.others] == ["update"]


def test_more_batches_a_step_need_graphs_that_add(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "data", tmp_path / "run", "run.max_steps=1", "run.accumulation=2")
    record = read_record(tmp_path / "run")
    assert record is not None
    assert [graph.name for graph in record.buckets[0].graphs] == ["train 1x128x32", "add 1x128x32"]
    assert main(["graphs", "status", str(config), "--set", "run.accumulation=3"]) == 0
    told(capsys)
    assert main(["graphs", "status", str(config)]) == 3
    assert "1x128x32: stale (accumulation: more -> 1)" in told(capsys)


def test_a_dataset_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("status", "build"):
        assert main(["graphs", command]) == 2
        assert "data.path: expected a dataset's folder" in capsys.readouterr().err


def test_a_buffer_that_moved_is_named(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "data", tmp_path / "run", "run.max_steps=2")

    def moving(saved: Path, into: Engine) -> Position:
        position = load_checkpoint(saved, into)
        into.params.exp_avg = into.params.exp_avg.clone()
        return position

    monkeypatch.setattr("engine.run_saving.load_checkpoint", moving)
    with pytest.raises(
        ValueError, match=r"found others: parameters\.exp_avg: 0x\S+ float32 .* -> 0x.*write into them in place"
    ):
        run(tmp_path / "data", tmp_path / "run", "run.max_steps=4")


def test_status_tells_how_evaluation_was_compared(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = training_dataset(tmp_path / "held-out", (50, 140), first_sample=100)
    sets = ["--set", f"data.eval_path={held_out}"]
    assert main(["graphs", "build", str(config), *sets, "--json"]) == 0
    built = json.loads(told(capsys)[-1])
    assert {row["held_out"] for row in built["buckets"]} == {"called: nothing to compare"}
    assert all("eval" in row["graphs"][-1] for row in built["buckets"])
    record = read_record(tmp_path / "run")
    assert record is not None
    compared = [replace(record.buckets[0], how="replayed", verified="equal bits", held_out="equal bits")]
    write_record(tmp_path / "run", replace(record, buckets=(*compared, *record.buckets[1:])))
    assert main(["graphs", "status", str(config), *sets, "--json"]) == 0
    *lines, last = told(capsys)
    assert lines[1:] == ["1x128x32: fresh, replayed, equal bits; held-out: equal bits", "1x256x32: fresh, called"]
    assert json.loads(last)["buckets"][0]["held_out"] == "equal bits"


@pytest.mark.parametrize("field", ["torch", "triton", "cuda", "driver", "gpu", "world_size", "source.attention"])
def test_other_software_and_other_sources_make_every_bucket_stale(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    assert main(["graphs", "build", str(config)]) == 0
    record = read_record(tmp_path / "run")
    assert record is not None
    now = record.buckets[0].fingerprint.to_dict()[field]
    old = [replace(bucket, fingerprint=bucket.fingerprint.with_field(field, "another")) for bucket in record.buckets]
    write_record(tmp_path / "run", replace(record, buckets=tuple(old)))
    capsys.readouterr()
    assert main(["graphs", "status", str(config)]) == 3
    assert told(capsys)[1:] == [f"{b.bucket}: stale ({field}: another -> {now})" for b in record.buckets]
