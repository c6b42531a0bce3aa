"""The arrows, read from the source: buffers <- graphs <- engine <- bench, and no operation leans on its twin."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "buffers": {"buffers"},
    "graphs": {"graphs", "buffers"},
    "engine": {"engine", "graphs", "buffers"},
    "bench": {"bench", "engine", "graphs", "buffers"},
}
OURS = {*MAY_IMPORT, "tests"}
FILES = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]


def imported(source: str, package: str) -> set[str]:
    """Every module that the source of a module in `package` names in an import, at any depth, with dots resolved.

    Of `from a import b` both a and a.b are given, because b may be a module.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            names.add(module)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def imported_by(path: Path) -> set[str]:
    return imported(path.read_text(encoding="utf-8"), ".".join(path.relative_to(ROOT).parent.parts))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import engine.mask as m", {"engine.mask"}),
        ("from engine.ops import x_ref", {"engine.ops", "engine.ops.x_ref"}),
        ("from . import x_ref", {"engine.ops", "engine.ops.x_ref"}),
        ("from .x_ref import f", {"engine.ops.x_ref", "engine.ops.x_ref.f"}),
        ("from ..mask import f", {"engine.mask", "engine.mask.f"}),
        ("def f():\n    import bench", {"bench"}),
    ],
)
def test_imports_are_found_in_every_form(source: str, expected: set[str]) -> None:
    assert imported(source, "engine.ops") == expected


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    wrong = {name for name in imported_by(path) if name.split(".")[0] in OURS - MAY_IMPORT[package]}
    assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def test_operations_never_import_their_references_nor_the_reverse() -> None:
    ops = ROOT / "engine" / "ops"
    pairs = [(path.with_name(path.name.replace("_ref.py", ".py")), path) for path in ops.glob("*_ref.py")]
    for one, other in pairs + [(ref, op) for op, ref in pairs]:
        if one.exists():
            assert f"engine.ops.{other.stem}" not in imported_by(one), f"{one.name} imports {other.name}"


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_every_operation_has_its_definition_beside_it(precision: str) -> None:
    pytest.importorskip("triton")
    from engine.kernels import fused_ops

    ops = vars(fused_ops("triton", precision))
    modules = {value.__module__ for value in ops.values() if getattr(value, "__module__", "").startswith("engine.ops.")}
    assert len(modules) > 10
    for module in [*modules, "engine.ops.attention"]:
        path = ROOT.joinpath(*module.split("."))
        assert path.with_name(f"{path.name}_ref.py").exists(), module


def test_no_file_bears_the_name_of_a_standard_module() -> None:
    # `python bench/x.py` puts bench/ first on sys.path: a bench/profile.py would then break `import cProfile`.
    assert [str(path.relative_to(ROOT)) for path in FILES if path.stem in sys.stdlib_module_names] == []
