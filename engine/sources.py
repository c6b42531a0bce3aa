"""Which of our source files take part in a step, found by reading their imports: the kernels of a fingerprint."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parent.parent

ATTENTION_MODULES = {
    "triton": "engine.ops.attention",
    "flex": "engine.ops.attention_flex",
    "reference": "engine.ops.attention_ref",
}


def files_of(modules: Iterable[str], *, within: str = "engine.ops") -> set[Path]:
    """The files of `modules` and of all modules of `within` that they import at their top level, directly or not."""
    seen: dict[str, Path] = {}
    left = list(modules)
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen[module] = _ROOT / Path(*module.split(".")).with_suffix(".py")
        left += [name for name in _imports(seen[module]) if name.startswith(within + ".")]
    return set(seen.values())


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """Modules named by `import a` and `from a import b` at the top level of a file; not those inside functions."""
    found: list[str] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return tuple(found)
