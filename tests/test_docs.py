"""The pages for readers name settings and commands that there are."""

import re
from pathlib import Path

import click
import pytest

from engine.cli import cli
from engine.drafter_config import default_target_layer_ids
from engine.settings import SECTIONS, load_settings
from engine.settings_fields import field_types

DOCS = Path(__file__).parent.parent / "docs"
SETTINGS = {f"{section}.{name}" for section, kind in SECTIONS.items() for name in field_types(kind)}


def our_column(page: str) -> str:
    """A page without the first column of its tables, which is the other trainer's."""
    lines = []
    for line in page.splitlines():
        lines.append(line.split("|", 2)[2] if line.startswith("|") else line)
    return "\n".join(lines)


@pytest.mark.parametrize("page", ["from-specforge.md", "serving.md", "reconfigure.md"])
def test_every_setting_that_is_named_exists(page: str) -> None:
    text = our_column((DOCS / page).read_text(encoding="utf-8"))
    sections = "|".join(SECTIONS)
    named = set(re.findall(rf"\b((?:{sections})\.[a-z_][a-z_0-9]*)\b", text))
    files = {"model.safetensors", "model.py", "run.toml", "run.yaml", "data.md", "objective.py", "run.reconfigure"}
    assert len(named - files) >= {"from-specforge.md": 40, "serving.md": 4, "reconfigure.md": 4}[page]
    assert named - files <= SETTINGS


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


@pytest.mark.parametrize("page", ["from-specforge.md", "serving.md", "reconfigure.md"])
def test_commands_and_their_options_exist(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    lines = re.findall(r"dflash-engine ([a-z]+(?: [a-z]+)?)([^`\n|]*)", text)
    assert len(lines) >= (2 if page == "reconfigure.md" else 3)
    for words, rest in lines:
        first, _, second = words.partition(" ")
        command = cli.commands[first]
        if isinstance(command, click.Group):
            command = command.commands[second]
        known = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
        assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) <= known, (words, rest)


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
    pages = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
    found = []
    for page in pages:
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
    assert {page.resolve() for page in pages[1:]} <= set(found), "a page that nothing links to"
