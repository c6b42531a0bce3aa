"""Several folders as `data.path`: trained on, gone on with, planned, inspected, and refused when they do not belong together."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from bench.buckets import run as bench_buckets
from bench.cli import main
from buffers.batching import Batch
from engine.data_source import open_training_data
from engine.mixture_inspection import inspect_mixture
from engine.planning import show_plan
from engine.settings import Settings, load_settings
from engine.settings_fields import SettingsError
from engine.train import train
from tests.drafter_helpers import assert_same_bits
from tests.foreign_helpers import FIXTURES, MASK, TAPS, write_ours, write_target
from tests.run_helpers import SETTINGS, TARGET_CONFIG, checkpoint_tensors, interrupt, metrics, run, training_dataset

pytestmark = pytest.mark.usefixtures("one_thread")
FOREIGN = (f"data.target_layer_ids={','.join(map(str, TAPS))}", f"data.mask_token_id={MASK}")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Ten samples and six others of one target."""
    return (
        training_dataset(tmp_path / "a"),
        training_dataset(tmp_path / "b", (35, 135, 65, 155, 95, 45), first_sample=50),
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def mixed(*folders: Path, output: Path = Path("unused"), weights: str = "", changes: tuple[str, ...] = ()) -> Settings:
    return load_settings(
        None, [*SETTINGS, f"data.weights={weights}", f"run.output={output}", *changes], folders=folders
    )


def served(steps: list[tuple[Batch, ...]], epoch: int) -> Counter[int]:
    return Counter(i for step in steps for batch in step if batch.epoch == epoch for i in batch.sample_ids)


@pytest.mark.parametrize(("packing", "interrupted_after"), [("false", 5), ("false", 17), ("true", 5), ("true", 14)])
def test_an_interrupted_mixture_goes_on_as_if_nothing_had_been(
    pair: tuple[Path, Path],
    tmp_path: Path,
    after_step: Any,
    steps_taken: list[tuple[Batch, ...]],
    packing: str,
    interrupted_after: int,
) -> None:
    def settings(output: str) -> Settings:
        changes = ("run.epochs=3", f"buckets.packing={packing}")
        return mixed(*pair, output=tmp_path / output, weights="0.5,1.5", changes=changes)

    whole = train(settings("whole"))
    steps, seen = whole["steps"], list(steps_taken)
    assert seen[interrupted_after - 1][0].epoch == seen[interrupted_after][0].epoch  # in the middle of an epoch
    if packing == "false":
        assert steps == 3 * (5 + 9)
    for epoch in range(3):
        ids = served(seen, epoch)
        assert set(ids.values()) == {1}
        assert sum(i < 10 for i in ids) == 5 and sum(i >= 10 for i in ids) == 9
    after_step(interrupted_after, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(settings("broken"))
    assert train(settings("broken"))["steps"] == steps
    assert_same_bits(checkpoint_tensors(tmp_path / "broken", steps), checkpoint_tensors(tmp_path / "whole", steps))
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")


def test_weights_of_one_are_the_sources_together_and_one_folder_stays_as_it_was(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    plain = run(pair[0], tmp_path / "plain")
    assert "sources" not in plain
    for weights in ("", "1"):
        figures = train(mixed(pair[0], output=tmp_path / f"one{weights}", weights=weights))
        assert "sources" not in figures
        assert_same_bits(checkpoint_tensors(tmp_path / f"one{weights}", 20), checkpoint_tensors(tmp_path / "plain", 20))
    both = train(mixed(*pair, output=tmp_path / "both"))
    assert both["steps"] == 32
    assert [row["samples_per_epoch"] for row in both["sources"]] == [10, 6]
    written = load_settings(tmp_path / "both" / "settings.toml")
    assert written.data.folders == tuple(map(str, pair)) and written.data.weights == ()


def test_other_weights_or_folders_are_refused_in_the_middle_of_a_run(pair: tuple[Path, Path], tmp_path: Path) -> None:
    short = ("run.max_steps=4",)
    output = tmp_path / "run"
    train(mixed(*pair, output=output, weights="1,0.5", changes=short))
    a, b = pair
    for folders, weights, message in (
        (
            (a, b),
            "1,0.75",
            "data.path: .*/a, .*/b has 16 samples .* on 16 with .* of other content or weights; point it",
        ),
        ((b, a), "0.5,1", "of other content or weights"),
        ((a, b), "1,2", "has 22 samples with .* the checkpoint was trained on 16"),
        ((a,), "", "has 10 samples with .* the checkpoint was trained on 16"),
    ):
        with pytest.raises(ValueError, match=message):
            train(mixed(*folders, output=output, weights=weights))
    assert train(mixed(*pair, output=output, weights="1,0.5"))["steps"] == 2 * (10 + 3)


def test_ours_and_specforges_in_one_run(target: Path, tmp_path: Path) -> None:
    ours = write_ours(tmp_path / "ours", target)
    folders = (ours, FIXTURES / "specforge")
    changes = (*FOREIGN, f"data.target={target}", "run.epochs=1", f"data.eval_path={FIXTURES / 'deepspec'}")
    figures = train(mixed(*folders, output=tmp_path / "run", weights="0.5,2", changes=changes))
    assert figures["steps"] == 5 + 20 and figures["final"]["loss"] > 0 and figures["eval_loss"] > 0
    rows = figures["sources"]
    assert [(row["source"], row["weight"], row["samples"]) for row in rows] == [
        (str(ours), 0.5, 10),
        (str(FIXTURES / "specforge"), 2.0, 10),
    ]
    assert [row["share"] for row in rows] == pytest.approx([0.2, 0.8])
    settings = mixed(*folders, changes=changes)
    mixture = open_training_data(settings.data.folders, settings)
    for i in range(10):
        mine, theirs = mixture.sample(i), mixture.sample(10 + i)
        assert mine.input_ids.equal(theirs.input_ids) and mine.hidden_states.equal(theirs.hidden_states)


def test_what_is_left_out_is_named_by_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = training_dataset(tmp_path / "a", (40, 300, 60))
    b = training_dataset(tmp_path / "b", (50, 60, 400, 70), nonfinite=(3,), first_sample=50)
    settings = mixed(a, b, output=tmp_path / "run", weights="1,2", changes=("data.on_nonfinite=skip", "run.epochs=1"))
    figures = train(settings)
    left_out = json.loads((tmp_path / "run" / "left_out.json").read_text())
    assert left_out["training"] == [[str(a), 1, 300], [str(b), 2, 400]]
    assert left_out["not_finite"] == [[str(b), 3]]
    assert figures["skipped_samples"] == [(str(b), 3)] and figures["too_long_samples"] == 2
    told = capsys.readouterr().err
    assert f"2 samples longer than the largest bucket are left out: 1 of {a} (300), 2 of {b} (400)" in told
    assert f"1 samples with NaN or infinity were left out: 3 of {b}" in told
    with pytest.raises(ValueError, match=f"NaN or infinity in sample 3 of {b}. Extract it again"):
        train(mixed(a, b, output=tmp_path / "refused"))


def test_everything_that_does_not_agree_is_named_at_once(pair: tuple[Path, Path], tmp_path: Path) -> None:
    config = TARGET_CONFIG | {"num_hidden_layers": 8, "rope_theta": 5e5}
    other = training_dataset(
        tmp_path / "other", target_config=config, target_layer_ids=(1, 3, 5), mask_token_id=48, last_hidden_norm="pre"
    )
    a = pair[0]
    with pytest.raises(ValueError, match="found different") as error:
        show_plan((a, other), mixed())
    told = str(error.value)
    for words in (
        f"target_layer_ids: [1, 3, 4] in {a}, [1, 3, 5] in {other}",
        f"mask_token_id: 49 in {a}, 48 in {other}",
        f"num_hidden_layers of the target: 6 in {a}, 8 in {other}",
        "rope of the target: RopeConfig(",
    ):
        assert words in told
    assert "last_hidden_norm" not in told and "hidden_size" not in told and "\n" not in told
    with pytest.raises(ValueError, match=f"last_hidden_norm: None in {a}, pre in {other}"):
        show_plan((a, other), mixed(changes=("objective.kl_weight=1",)))


def test_another_target_with_the_same_sizes_is_seen(pair: tuple[Path, Path], target: Path, tmp_path: Path) -> None:
    other = training_dataset(tmp_path / "other", first_sample=20)
    show_plan((pair[0], other), mixed())
    weights_file = other / "target.safetensors"
    tensors = load_file(weights_file)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}, str(weights_file))
    with pytest.raises(ValueError, match=f"weights of the target: [0-9a-f]+ in {pair[0]}, [0-9a-f]+ in {other}"):
        show_plan((pair[0], other), mixed())
    # Without weights to compare the name tells.
    weights_file.unlink()
    named = training_dataset(tmp_path / "named", target_name="else/huge")
    (named / "target.safetensors").unlink()
    show_plan((pair[0], other), mixed())
    with pytest.raises(ValueError, match=f"found different target: tiny in {other}, huge in {named}. Mix folders"):
        show_plan((other, named), mixed())

    ours = write_ours(tmp_path / "ours", target, mask_token_id=MASK - 1)
    changes = (*FOREIGN, f"data.target={target}")
    with pytest.raises(ValueError, match=f"mask_token_id: {MASK - 1} in {ours}, {MASK} in .*specforge. Mix folders"):
        show_plan((ours, FIXTURES / "specforge"), mixed(changes=changes))


def test_all_that_the_formats_do_not_say_is_named_at_once(target: Path) -> None:
    folders = [FIXTURES / name for name in ("deepspec", "specforge", "modelopt")]
    with pytest.raises(ValueError, match="expected 4 more settings") as error:
        show_plan(folders, mixed())
    for name in ("target (", "target_layer_ids (", "mask_token_id (", "last_hidden_norm ("):
        assert str(error.value).count(f"data.{name}") == 1


def test_a_norm_that_one_format_leaves_open_is_not_put_on_another(target: Path) -> None:
    changes = (*FOREIGN, f"data.target={target}", "data.last_hidden_norm=pre", "objective.kl_weight=1")
    modelopt, deepspec, speculators = (FIXTURES / name for name in ("modelopt", "deepspec", "speculators"))
    show_plan((modelopt, speculators), mixed(changes=changes))
    with pytest.raises(ValueError, match="last_hidden_norm: pre in .*modelopt, post in .*deepspec. Mix folders"):
        show_plan((modelopt, deepspec), mixed(changes=changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["data.path=a,b", "data.weights=1"],
            r"data.weights: expected a number for each folder of data.path, 2 in all, found \[1.0\]",
        ),
        (["data.path=a", "data.weights=1,2"], r"data.weights: .* 1 in all, found \[1.0, 2.0\]"),
        (
            ["data.path=a,b", "data.weights=1,0"],
            "data.weights: expected a list of numbers, more than 0 and at most 1000",
        ),
        (["data.path=a,b", "data.weights=1,x"], "data.weights: expected a list of numbers, more than 0"),
    ],
)
def test_weights_that_cannot_be(changes: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(None, changes)


def test_paths_in_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[data]\npath = ["a", "b,c"]\nweights = [1, 0.5]\n')
    data = load_settings(file).data
    assert data.folders == ("a", "b,c") and data.weights == (1.0, 0.5)
    file.write_text(load_settings(file).to_toml())
    assert load_settings(file).data == data
    file.write_text('[data]\npath = "b,c"\n')
    assert load_settings(file).data.folders == ("b,c",)
    assert load_settings(None, ["data.path=a, b"]).data.folders == ("a", "b")
    assert load_settings(file, ["data.weights=2,1"], folders=("x", "y")).data.folders == ("x", "y")
    file.write_text('[data]\npath = ["a", ""]\n')
    with pytest.raises(SettingsError, match="data.path: expected the name of a folder everywhere"):
        load_settings(file)
    file.write_text('[data]\npath = ["a", 3]\n')
    with pytest.raises(SettingsError, match=r"data.path: expected text or a list of words, found \('a', 3\)"):
        load_settings(file)


def test_one_folder_twice_is_refused(pair: tuple[Path, Path]) -> None:
    with pytest.raises(SettingsError, match="data.path: expected every folder once, found .*/a/../a again"):
        show_plan((pair[0], pair[1], pair[0] / ".." / "a"), mixed())


def test_plan_and_its_counts(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(pair[0]), str(pair[1]), *(w for change in SETTINGS for w in ("--set", change)), "--json"]
    assert main(["plan", *words, "--set", "data.weights=0.5,2"]) == 0
    told = capsys.readouterr().out
    figures = json.loads(told.splitlines()[-1])
    assert sum(row["samples"] for row in figures["buckets"]) == 5 + 12
    assert [row["samples_per_epoch"] for row in figures["sources"]] == [5, 12]
    tokens = [0.5 * 1070, 2 * 530]
    assert [row["tokens_per_epoch"] for row in figures["sources"]] == tokens
    assert [row["share"] for row in figures["sources"]] == pytest.approx([t / sum(tokens) for t in tokens])
    # A terminal folds the title.
    assert f"{pair[0]},{pair[1]}:16samples,1,600tokens" in "".join(told.split()) and "66.5%" in told
    assert main(["plan", "--set", f"data.path={pair[0]}"]) == 0
    assert main(["plan"]) == 2


def test_a_single_folder_may_have_a_weight(pair: tuple[Path, Path], tmp_path: Path) -> None:
    figures = train(mixed(pair[0], output=tmp_path / "run", weights="0.3", changes=("run.epochs=10",)))
    assert figures["steps"] == 30


def test_bench_buckets_of_a_mixture(pair: tuple[Path, Path]) -> None:
    figures = bench_buckets(pair, mixed(weights="0.5,1"), repeats=1, out=None)
    assert figures["samples"] == 11 and figures["data"] == f"{pair[0]}, {pair[1]}"
    assert sum(row["batches"] for row in figures["buckets"]) == 11


def test_bench_buckets_takes_the_settings_folders(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    given = (*SETTINGS, f"data.path={pair[0]},{pair[1]}", "data.weights=0.5,1")
    words = [word for setting in given for word in ("--set", setting)]
    assert main(["bench", "buckets", *words, "--repeats", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["samples"] == 11


def test_inspecting_several(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = inspect_mixture(pair, mixed(), verify=False)
    assert [found["samples"] for found in figures["datasets"].values()] == [10, 6]
    assert figures["cannot_be_mixed"] is None and figures["bad_files"] == {}
    other = training_dataset(tmp_path / "other", mask_token_id=48)
    assert main(["data", "inspect", str(pair[0]), str(other)]) == 1
    assert "they cannot be mixed: data.path: expected hidden states of one target" in capsys.readouterr().out
