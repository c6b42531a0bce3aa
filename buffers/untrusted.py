"""What is read from files that anyone may have written: JSON, names of other files, and their words within our messages."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# config.json and manifests are a few levels deep; what is nested deeper ends in whoever walks it.
MOST_LEVELS = 64
_MOST_NAME = 255


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text. Raises ValueError, in a few words, for anything else, and for what readers do not agree on or
    cannot pass on: a key that is there twice, values nested more than MOST_LEVELS deep, text that UTF-8 cannot say."""
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        value = json.loads(text, object_pairs_hook=_each_key_once)
    except RecursionError as error:
        raise ValueError(f"values nested more than {MOST_LEVELS} levels deep") from error
    except UnicodeDecodeError as error:
        raise ValueError("bytes that are no text in UTF-8") from error
    except ValueError as error:
        raise ValueError(one_line(error)) from error
    _refuse_odd(value)
    return value


def read_object(file: Path) -> dict[str, Any]:
    """The object of a JSON file. Raises ValueError naming the file, and OSError."""
    try:
        value = parse_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"expected JSON in {file}, found {error}. Copy the file again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected an object in {file}, found {shown(value)}. Copy the file again.")
    return value


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file of a checkpoint's model.safetensors.index.json. Raises ValueError for anything but the names of files
    beside it. They may be links that lead elsewhere: so the hub's cache keeps its files."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"expected a weight_map of file names in {index}, found none. Copy the file again.")
    strange = [file for file in weight_map.values() if not _is_plain_name(file)]
    if strange:
        raise ValueError(
            f"expected a weight_map of files beside {index}, found {shown(strange[0])}. Copy the file again."
        )
    return weight_map


def shown(value: object, most: int = 120) -> str:
    """A value from a file as a message shows it: in one line of printable characters, cut where it is long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # ValueError: an int of thousands of digits
        text = f"<{type(value).__name__}>"
    return printable(text, most)


def shown_names(names: Iterable[object], most: int = 120) -> str:
    """Names from a file, with commas between them, as `shown` shows a value."""
    return printable(", ".join(map(str, names)), most)


def one_line(error: object, most: int = 160) -> str:
    """Another library's message, which may repeat what it read, as part of ours."""
    return printable(" ".join(str(error).split()), most) or type(error).__name__


def is_inside(folder: Path, name: str) -> bool:
    """Whether `name`, which a file gives for another one, is of a file in `folder` or below it, links followed."""
    parts = Path(name).parts
    plain = bool(parts) and name.isprintable() and all(len(part.encode()) <= _MOST_NAME for part in parts)
    if not plain or len(name) > 4 * _MOST_NAME or ".." in parts or Path(name).is_absolute():
        return False
    try:
        return (folder / name).resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # RuntimeError: links in a circle
        return False


def _is_plain_name(name: str) -> bool:
    return (
        name not in ("", ".", "..")
        and name.isprintable()
        and Path(name).name == name
        and len(name.encode()) <= _MOST_NAME
    )


def printable(text: str, most: int = 2000) -> str:
    """A text of printable characters alone: what is none, as a terminal's commands, is spelt; cut where it is long."""
    if len(text) > most:
        text = text[: most - 3] + "..."
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice, 40)} twice")
    return found


def _refuse_odd(value: Any) -> None:
    level = [value]
    for _ in range(MOST_LEVELS):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str) and not item.isascii():
                _refuse_lone_surrogates(item)
        if not below:
            return
        level = below
    raise ValueError(f"values nested more than {MOST_LEVELS} levels deep")


def _refuse_lone_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text that UTF-8 cannot say, {shown(text, 40)}") from error
