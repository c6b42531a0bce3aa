"""The pages for readers: every command, setting and block of code in them is one, and is run by a test or marked."""

import ast
import contextlib
import importlib
import importlib.util
import json
import re
import shlex
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import bench.cli  # noqa: F401
from bench.reliability import main as reliability
from buffers.dataset import Dataset
from engine.cli import cli
from engine.drafter_config import default_target_layer_ids
from engine.engine import Engine
from engine.settings import SECTIONS, load_settings
from engine.settings_fields import SettingsError, field_types
from tests.pages import NOT_RUN, PAGES, ROOT, blocks, commands
from tests.run_helpers import TARGET_CONFIG

DOCS = ROOT / "docs"
SETTINGS = {f"{section}.{name}" for section, kind in SECTIONS.items() for name in field_types(kind)}

# Words behind `model.`, `run.` and the like that make no setting of it.
FILE_ENDINGS = {"json", "md", "py", "safetensors", "toml", "yaml"}
OTHER_NAMES = {"generate", "reconfigure"}
# The test that runs a command from end to end; the pages' own lines are taken apart here.
RUN_IN = {
    "data extract": "test_tutorial.py",
    "data inspect": "test_tutorial.py",
    "data convert": "test_convert.py",
    "plan": "test_tutorial.py",
    "graphs build": "test_tutorial.py",
    "graphs status": "test_tutorial.py",
    "train": "test_tutorial.py",
    "eval": "test_tutorial.py",
    "report": "test_tutorial.py",
    "export": "test_tutorial.py",
    "doctor": "test_tutorial.py",
    "demo": "test_demo.py",
    "bench buckets": "test_bench_buckets.py",
    "bench step": "test_bench_step.py",
    "bench peers": "needs a checkout of SpecForge; tests/test_bench_peers.py has a stand-in",
}


def our_column(page: str) -> str:
    """A page without the first column of its tables, which is the other trainer's."""
    lines = []
    for line in page.splitlines():
        lines.append(line.split("|", 2)[2] if line.startswith("|") else line)
    return "\n".join(lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    text = our_column(text) if page.name == "from-specforge.md" else text
    named = set(re.findall(rf"\b((?:{'|'.join(SECTIONS)})\.[a-z_][a-z_0-9]*)\b", text))
    assert {name for name in named if name.partition(".")[2] not in FILE_ENDINGS | OTHER_NAMES} <= SETTINGS


def test_the_settings_on_the_page_of_formats(tmp_path: Path) -> None:
    tables = re.findall(r"```toml\n(.*?)```", (DOCS / "data.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    for table, folders in zip(tables, (1, 2), strict=True):
        (tmp_path / "run.toml").write_text(table)
        data = load_settings(tmp_path / "run.toml").data
        assert data.target_layer_ids == default_target_layer_ids(36, 5) and len(data.folders) == folders


def test_the_translated_recipe_is_a_settings_file(tmp_path: Path) -> None:
    text = (DOCS / "from-specforge.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "run.toml").write_text(recipe)
    settings = load_settings(tmp_path / "run.toml")
    assert (settings.model.num_hidden_layers, settings.buckets.max_length, settings.optimizer.beta2) == (5, 3072, 0.999)
    assert settings.data.target_layer_ids == default_target_layer_ids(36, 5)


def leaves(group: click.Group, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that does something, with its name's words."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, (*words, name))
        else:
            yield (*words, name), command


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Takes `dflash-engine ...` apart as the console script would, and the settings of its --set. Runs nothing. Raises
    click's errors and SettingsError."""

    def check_settings(**options: Any) -> None:
        load_settings(None, options.get("overrides", ()))

    for _, command in leaves(cli):
        monkeypatch.setattr(command, "callback", check_settings)
    return lambda words: cli.main(words[1:], standalone_mode=False)


def spoken_commands(page: Path) -> list[list[str]]:
    """Every `dflash-engine ...` of a page, in blocks and in the text, there where more than a command's name is given."""
    text = page.read_text(encoding="utf-8")
    in_blocks = [words for block in blocks(page) if block.language == "bash" for words in commands(block.text)]
    spans = re.findall(r"(?<!`)`(dflash-engine [^`\n]+)`", text)
    in_text = [shlex.split(span.replace("PATH...", "PATH").replace("DATA...", "DATA")) for span in spans]
    names = [("--traceback", "COMMAND"), *(words for words, _ in leaves(cli))]
    return [words for words in in_blocks if words[0].endswith("dflash-engine")] + [
        words for words in in_text if tuple(words[1:]) not in names
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_command_line_takes_every_command_of_the_pages(page: Path, parse: Callable[[list[str]], None]) -> None:
    for words in spoken_commands(page):
        try:
            parse(words)
        except (click.ClickException, SettingsError) as error:
            pytest.fail(f"{page.name}: {shlex.join(words)}: {error}")


def test_a_command_that_is_wrong_is_found(parse: Callable[[list[str]], None]) -> None:
    for line, why in (
        ("dflash-engine eval runs/x --prompt p.txt", "--prompt"),
        ("dflash-engine graphs show run.toml", "show"),
        ("dflash-engine train run.toml --set optimizer.rate=1", "rate"),
    ):
        with pytest.raises((click.ClickException, SettingsError), match=why):
            parse(shlex.split(line))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_are_run_exist_with_their_options(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name, words in re.findall(r"python -m ((?:bench|engine)\.[a-z0-9_.]+)([^`\n]*)", text):
        found = importlib.util.find_spec(name)
        assert found is not None and found.origin is not None, f"{page.name}: {name}"
        source = Path(found.origin).read_text(encoding="utf-8")
        if name == "bench.reliability":
            command = reliability.get_command(click.Context(reliability), words.split()[0])
            assert command is not None, f"{page.name}: python -m {name}{words}"
            source = " ".join(o for parameter in command.params for o in parameter.opts)
        for option in re.findall(r"(?<!\S)--[a-z-]+", words):
            assert re.search(rf"(?<!\S){option}\b", source.replace('"', " ")), f"{page.name}: python -m {name}{words}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_block_is_run_somewhere_or_marked(page: Path) -> None:
    for block in blocks(page):
        assert block.language in ("bash", "python", "toml", "json", "text"), f"{page.name}: {block.text[:60]}"
        if block.language != "bash":
            continue
        for words in commands(block.text):
            if words[0].endswith("dflash-engine"):
                command = next(name for name in RUN_IN if words[1 : 1 + len(name.split())] == name.split())
                test = RUN_IN[command]
                if test.endswith(".py"):
                    source = (ROOT / "tests" / test).read_text(encoding="utf-8")
                    assert command in source or all(f'"{word}"' in source for word in command.split()), (words, test)
            elif page.name != "tutorial.md":  # where what is not marked is run
                assert any(tuple(words[: len(start)]) == start for start in NOT_RUN), f"{page.name}: {words}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_settings_is_a_settings_file(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.language == "toml":
            (tmp_path / "run.toml").write_text(block.text)
            load_settings(tmp_path / "run.toml")


def test_a_dataset_is_written_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python as it stands, with a tiny target's sizes and tensors of random numbers."""
    (program,) = (block.text for block in blocks(DOCS / "data.md") if block.language == "python")
    for old, new in (("4096", "8"), ("151936", "50"), ("151669", "49")):
        assert program.count(f"={old},") == 1
        program = program.replace(f"={old},", f"={new},")
    (tmp_path / "Qwen3-8B").mkdir()
    (tmp_path / "Qwen3-8B" / "config.json").write_text(json.dumps(TARGET_CONFIG | {"num_hidden_layers": 36}))
    monkeypatch.chdir(tmp_path)
    ids = torch.arange(12, dtype=torch.int32)
    sample = (ids, torch.ones(12, dtype=torch.uint8), torch.randn(12, 5 * 8, dtype=torch.bfloat16))
    tensors = {"embed_tokens": torch.randn(50, 8), "lm_head": torch.randn(50, 8), "norm": torch.ones(8)}
    exec(program, {**tensors, "samples": [sample, sample]})
    dataset = Dataset(tmp_path / "runs" / "data" / "train")
    assert dataset.lengths.tolist() == [12, 12] and dataset.info.target_layer_ids == (1, 9, 17, 25, 33)


def test_engines_are_warmed_up_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python as it stands, with a warm-up and engines that note what is done with them."""
    (program,) = (block.text for block in blocks(ROOT / "docs" / "reconfigure.md") if block.language == "python")
    tree = ast.parse(program)
    (imported,) = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    module = importlib.import_module(str(imported.module))
    assert all(hasattr(module, name.name) for name in imported.names)
    done: list[list[str]] = []

    def warm_up(engines: list[str]) -> contextlib.AbstractContextManager[None]:
        done.append(engines)
        return contextlib.nullcontext()

    monkeypatch.setattr(module, "warm_up", warm_up)
    names: dict[str, Any] = {"threading": threading, "work": print, "engines": ["one", "another"]}
    exec(program, names)
    assert done == [["one", "another"]] and len(names["threads"]) == 2
    assert callable(Engine.attach)


def test_the_lines_of_json_are_json() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "json":
                assert isinstance(json.loads(block.text), dict)


def test_the_tests_of_the_promises_exist() -> None:
    rows = (DOCS / "architecture.md").read_text(encoding="utf-8").partition("## Promises")[2]
    named = re.findall(r"`(tests/[a-z_/]+\.py)::(test_[a-z0-9_]+)`", rows)
    assert len(named) > 25
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "docs/contributing.md", "docs/tutorial.md"])
def test_files_that_are_named_exist(page: str) -> None:
    named = re.findall(
        r"`((?:buffers|graphs|engine|bench|tests|\.ci)/[\w./-]*)", (ROOT / page).read_text(encoding="utf-8")
    )
    ours = [name for name in named if not (ROOT / name.partition("::")[0]).exists()]
    # Records may be asked for before they are made; x stands for an operation.
    assert [name for name in ours if name not in ("engine/ops/x.py", "engine/ops/x_ref.py")] == []


def test_every_figure_that_is_explained_is_one() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS.parent / "bench").glob("*.py"))
    rows = re.findall(r"^\| (`[^|]*) \|", (DOCS / "benchmarks.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    spans = [span for row in rows for span in re.findall(r"`([^`]+)`", row)]
    names = [span.rpartition(".")[2].removesuffix("[]") for span in spans if not span.startswith(("-", "."))]
    assert len(names) > 60
    # peers has the figures of both under their names, buckets those of the eager epoch.
    missing = [n for n in names if not re.search(rf'"({n}|{re.sub("^(ours|specforge)_|_eager$", "", n)})"', source)]
    assert missing == []


def test_links_lead_to_pages_and_headings_that_exist() -> None:
    found = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if link.startswith("https://"):
                continue
            path, _, heading = link.partition("#")
            to = page.parent / path if path else page
            assert to.exists(), f"{page.name} links to {link}"
            if heading:
                heads = re.findall(r"^#+ (.*)$", to.read_text(encoding="utf-8"), flags=re.MULTILINE)
                slugs = {re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in heads}
                assert heading in slugs, f"{page.name} links to {link}"
            found.append(to.resolve())
    assert {page.resolve() for page in PAGES[1:]} <= set(found), "a page that nothing links to"
