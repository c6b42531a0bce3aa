"""Settings: defaults, files, single changes, and what each mistake is answered with."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from engine.settings import SECTIONS, BucketsSettings, ModelSettings, ObjectiveSettings, Settings, load_settings
from engine.settings import settings_table as table
from engine.settings_fields import SettingsError, setting

DOCS = Path(__file__).parent.parent / "docs" / "settings.md"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_docs_are_the_code() -> None:
    assert DOCS.read_text(encoding="utf-8") == table(), "run: python -m engine.settings > docs/settings.md"


def test_every_setting_has_a_help_text() -> None:
    for section in SECTIONS.values():
        assert all(field.metadata["help"] for field in dataclasses.fields(section))


def test_every_setting_has_a_class() -> None:
    classes = {
        f"{name}.{field.name}": field.metadata["change"]
        for name, section in SECTIONS.items()
        for field in dataclasses.fields(section)
    }
    assert set(classes.values()) == {"live", "recapture", "restart"}
    with pytest.raises(TypeError, match="change"):
        setting(1, "a setting without one")  # type: ignore[call-arg]
    lines = {
        line.split("|")[1].strip(" `"): line.split("|")[-2].strip() for line in table().splitlines() if "| `" in line
    }
    assert len(lines) == len(classes), "names differ between sections"
    assert lines["accumulation"] == "live; recapture between 1 and more"
    assert lines["kl_weight"] == "live; recapture between 0 and more"
    assert (lines["lr"], lines["num_anchors"], lines["block_size"]) == ("live", "recapture", "restart")


def test_file_then_overrides(tmp_path: Path) -> None:
    path = written(tmp_path, "[optimizer]\nlr = 1e-3\nbeta1 = 0\n[buckets]\nlengths = [512, 2048]\n[run]\nseed = 3\n")
    settings = load_settings(path, ["run.seed=4", "data.path=a=b", "buckets.num_anchors = 64"])
    assert settings.optimizer.lr == 1e-3
    assert settings.optimizer.beta1 == 0.0 and isinstance(settings.optimizer.beta1, float)
    assert settings.buckets == BucketsSettings(lengths=(512, 2048), num_anchors=64)
    assert settings.run.seed == 4
    assert settings.data.path == "a=b"


def test_lists_are_read_from_lists_and_from_text(tmp_path: Path) -> None:
    expected = ModelSettings(num_hidden_layers=2, layer_types=("sliding", "full"), sliding_window=8)
    for value in ('["sliding", "full"]', '"sliding,full"', '"sliding, full"'):
        text = f"[model]\nnum_hidden_layers = 2\nsliding_window = 8\nlayer_types = {value}\n"
        assert load_settings(written(tmp_path, text)).model == expected
    assert load_settings(None, ["buckets.lengths=128,256"]).buckets.lengths == (128, 256)
    assert load_settings(None, ["buckets.lengths="]).buckets.lengths == ()


def test_toml_comes_back_equal(tmp_path: Path) -> None:
    changes = [
        "buckets.lengths=128,256",
        "buckets.packing=true",
        'data.path=C:\\d "q" é\t.',
        "optimizer.eps=1e-12",
        "model.layer_types=full",
    ]
    changes.append("run.output=a\x7fb\n")
    settings = load_settings(None, changes)
    assert settings != Settings()
    assert load_settings(written(tmp_path, settings.to_toml())) == settings


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().run.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("modle.block_size=8", r"--set modle.block_size: unknown section \[modle\]; the nearest is \[model\]"),
        ("model.blok_size=8", "unknown setting model.blok_size; the nearest is model.block_size"),
        ("run.lr=1", "unknown setting run.lr; the nearest is optimizer.lr"),
        (
            "optimizer.learning_rate=1",
            r"unknown setting optimizer.learning_rate; \[optimizer\] has lr, schedule, warmup_ratio",
        ),
        ("lr=1", r"--set: expected section.key=value, found 'lr=1'; the nearest is optimizer.lr\."),
        ("xyzzy=1", r"--set: expected section.key=value, found 'xyzzy=1'\."),
        ("run.seed", "--set: expected section.key=value, found 'run.seed'"),
        ("optimizer.lr=fast", "optimizer.lr: expected a number, more than 0, found 'fast'"),
        ("optimizer.lr=0", "optimizer.lr: expected a number, more than 0, found 0.0"),
        ("optimizer.lr=nan", "optimizer.lr: expected a number, more than 0, found nan"),
        ("optimizer.beta2=1", "optimizer.beta2: expected a number, at least 0 and less than 1, found 1.0"),
        ("run.seed=1.5", "run.seed: expected a whole number, at least 0, found '1.5'"),
        ("buckets.packing=yes", "buckets.packing: expected true or false, found 'yes'"),
        ("data.too_long=cut", "data.too_long: expected one of skip, truncate, split, found 'cut'"),
        ("buckets.lengths=128,x", r"buckets.lengths: expected a list of whole numbers, at least 1, found \(128, 'x'\)"),
        ("buckets.lengths=256,128", r"buckets.lengths: expected ascending lengths, found \[256, 128\]"),
        ("model.layer_types=full,sliding", "model.layer_types: expected full or sliding, once or 5 times"),
        ("model.layer_types=ful", "found ful"),
        ("model.layer_types=", "found nothing"),
        ("model.layer_types=sliding", "model.sliding_window: expected more than 0 exactly when"),
        ("model.sliding_window=128", "model.sliding_window: .* found 128 with full. Set both or neither"),
        ("objective.ce_weight=0", "objective: expected ce_weight or kl_weight above 0"),
    ],
)
def test_mistakes_are_named(override: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(None, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "lr = 1\n",
            r"run.toml: expected settings in sections, found lr outside of them; the nearest is optimizer.lr\.",
        ),
        ("[optimiser]\nlr = 1\n", r"run.toml: unknown section \[optimiser\]; the nearest is \[optimizer\]"),
        ("[optimizer]\nLR = 1\n", "run.toml: unknown setting optimizer.LR; the nearest is optimizer."),
        ("run = 3\n", r"run.toml: run: expected a section \[run\], found 3"),
        ('[run]\nseed = "3"\n', "run.seed: expected a whole number, at least 0, found '3'"),
        ("[run]\nseed = true\n", "run.seed: expected a whole number, at least 0, found True"),
        ("[optimizer]\nlr = true\n", "optimizer.lr: expected a number, more than 0, found True"),
        ("[buckets]\npacking = 1\n", "buckets.packing: expected true or false, found 1"),
        ("[data]\npath = 3\n", "data.path: expected text or a list of words, found 3"),
        ("[data]\ntoo_long = []\n", "data.too_long: expected one of skip, truncate, split, found"),
        ("[buckets]\nlengths = 512\n", "buckets.lengths: expected a list of whole numbers, at least 1, found 512"),
        ("[buckets]\nlengths = [512]\nmax_length = 512\n", "buckets.max_length: expected 0 with buckets.lengths"),
        ("[run\n", "run.toml: expected TOML, found a mistake"),
    ],
)
def test_mistakes_in_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(written(tmp_path, text))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="absent.toml: expected a settings file, found none"):
        load_settings(tmp_path / "absent.toml")


def test_construction_checks_types_too() -> None:
    wrong: Any = "16"
    with pytest.raises(SettingsError, match="model.block_size: expected a whole number, at least 2, found '16'"):
        ModelSettings(block_size=wrong)


def test_layer_types_for_each_layer() -> None:
    assert ModelSettings(num_hidden_layers=2).types_of_layers == ("full_attention", "full_attention")
    mixed = ModelSettings(num_hidden_layers=2, layer_types=("sliding", "full"), sliding_window=4)
    assert mixed.types_of_layers == ("sliding_attention", "full_attention")


@pytest.mark.parametrize(("block_size", "gamma"), [(2, 4), (8, 4), (9, 4.5), (10, 5), (13, 6), (16, 7), (32, 7)])
def test_gamma_follows_the_paper(block_size: int, gamma: float) -> None:
    assert math.isclose(ObjectiveSettings().gamma_for(block_size), gamma)
    assert ObjectiveSettings(gamma=2.5).gamma_for(block_size) == 2.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("run.output=", "run.output: expected a folder, found nothing"),
        ("run.output=a\0b", "run.output: expected text, found"),
        ("data.path=\ud800", "data.path: expected text or a list of words, found"),
        (
            "run.seed=18446744073709551616",
            "run.seed: expected a whole number, at least 0 and at most 9223372036854775807, found 18446744073709551616",
        ),
        ("objective.gamma=1e39", r"objective.gamma: expected a number, at least 0 and at most 3.4e\+38, found 1e\+39"),
        ("objective.ce_weight=4e38", r"objective.ce_weight: .* at most 3.4e\+38, found 4e\+38"),
        ("optimizer.warmup_ratio=1e99", r"optimizer.warmup_ratio: .* at least 0 and less than 1, found 1e\+99"),
        ("buckets.lengths=128,99999999999999999999", "buckets.lengths: expected a list of whole numbers"),
    ],
)
def test_what_no_file_and_no_counter_can_hold(change: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(None, [change])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[optimizer]\nlr = 1" + "0" * 400,
            r"optimizer.lr: expected a number, more than 0 and at most 3.4e\+38, found 1000",
        ),
        ("[run]\nseed = -1" + "0" * 400, "run.seed: expected a whole number, at least 0, found -1000"),
        ("[run]\nseed = " + "9" * 5000, "expected TOML, found a mistake"),
        ("a = " + "[" * 5000, "expected TOML, found a mistake"),
    ],
)
def test_numbers_and_nesting_without_end(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(written(tmp_path, text))


def test_a_file_saved_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbf[run]\nseed = 7\n")
    assert load_settings(file).run.seed == 7
