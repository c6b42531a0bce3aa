"""What the README, the installation and CI promise each other."""

import ast
import importlib.metadata
import re
from pathlib import Path
from typing import Any

import click
import pytest

import bench.cli
from engine.cli import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = ("buffers", "graphs", "engine", "bench")


def setup_arguments() -> dict[str, ast.expr]:
    """The keyword arguments of setup.py's call, unevaluated: reading them needs no setuptools."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setup":
            return {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    raise AssertionError("setup.py calls no setup()")


def line_between(name: str) -> str:
    (block,) = re.findall(rf"<!-- {name} -->\n```bash\n(.*)\n```\n<!-- end of {name} -->\n", README)
    return str(block)


def test_readme_lines_start_from_python_and_pip() -> None:
    for name, ending in (("demo line", "/dflash-engine demo"), ("test line", "/python -m pytest -n 2")):
        line = line_between(name)
        assert line.startswith("python3 -m venv .venv && .venv/bin/pip install -e ")
        assert line.endswith(ending)


def test_ci_runs_the_readme_line_and_no_other() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "<!-- test line -->" in script and "<!-- end of test line -->" in script
    assert "pip install" not in script and "pytest" not in script
    assert "constraints.txt" in script
    pinned = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert "torch==2.13.0" in pinned and all(re.fullmatch(r"[a-z-]+==[0-9.]+", line) for line in pinned)


def test_readme_names_commands_that_exist() -> None:
    def names(group: click.Group) -> set[str]:
        found = set()
        for name, command in group.commands.items():
            inner = names(command) if isinstance(command, click.Group) else {""}
            found |= {f"{name} {rest}".strip() for rest in inner}
        return found

    told = set(re.findall(r"^\| `dflash-engine ([a-z]+(?: [a-z]+)*)", README, flags=re.MULTILINE))
    assert bench.cli.bench.name in cli.commands
    assert told == names(cli)


def test_readme_names_files_that_exist() -> None:
    for path in re.findall(r"`([a-z_]+/[a-z_/]+\.(?:py|md|txt|toml))`", README):
        assert (ROOT / path).is_file(), f"README.md names {path}"


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {folder.name for folder in folders} >= set(PACKAGES)
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_packages_are_named_in_setup() -> None:
    packages = setup_arguments()["packages"]
    assert isinstance(packages, ast.Call)
    assert {keyword.arg: ast.literal_eval(keyword.value) for keyword in packages.keywords} == {
        "include": ["engine*", "buffers*", "graphs*", "bench*"]
    }


def test_license_is_apache() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


def test_installed_metadata() -> None:
    try:
        installed = importlib.metadata.distribution("dflash-engine")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("dflash-engine is not installed here")
    arguments: dict[str, Any] = setup_arguments()
    assert installed.version == ast.literal_eval(arguments["version"])
    assert installed.metadata["Requires-Python"] == ">=3.11"
    assert set(installed.metadata.get_all("Provides-Extra") or ()) == {
        "arrow",
        "hf",
        "plots",
        "tensorboard",
        "test",
        "wandb",
    }
    (script,) = installed.entry_points.select(group="console_scripts")
    assert (script.name, script.value) == ("dflash-engine", "bench.cli:main")
