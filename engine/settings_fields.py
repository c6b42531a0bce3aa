"""How a setting is declared, checked and read from text; what the settings are is in engine/settings.py.

A section is a frozen keyword-only dataclass whose fields are made with `setting`. Its name in a file is the class's
name without "Settings", in lower case. Allowed types: int, float, str, bool, Literal of strings, tuples of int, float or str,
and str | tuple[str, ...].
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from buffers.untrusted import shown

T = TypeVar("T")


class SettingsError(ValueError):
    """A setting that does not exist or a value that it cannot have; the command line answers with exit code 2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The range of a number: `low` and `high` belong to it, `above` and `below` do not."""

    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None

    def hold(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        words = (("at least", self.low), ("more than", self.above), ("at most", self.high), ("less than", self.below))
        return " and ".join(f"{word} {limit:g}" for word, limit in words if limit is not None)


# numpy and torch count in int64; what goes to the device as a number is fp32 there.
_LARGEST: dict[Any, float] = {int: 2**63 - 1, float: 3.4e38}


# What a change of a setting asks of a run that goes on: a value is written, a new generation of graphs is captured, or it
# cannot be had without another run.
Change = Literal["live", "recapture", "restart"]


def setting(
    default: T,
    text: str,
    *,
    change: Change,
    from_low: Change | None = None,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
) -> T:
    """A dataclass field with its help text, the class of its changes (from_low: of one between `low` and more, where that
    is another) and, for numbers (or each number of a tuple), its range."""
    limits = Limits(low=low, above=above, high=high, below=below)
    return dataclasses.field(
        default=default, metadata={"help": text, "limits": limits, "change": change, "from_low": from_low}
    )


def section_name(section: type) -> str:
    return section.__name__.removesuffix("Settings").lower()


_TYPES: dict[type, Mapping[str, Any]] = {}


def field_types(section: type) -> Mapping[str, Any]:
    """The declared type of every field of a section, in order."""
    if section not in _TYPES:
        _TYPES[section] = _field_types(section)
    return _TYPES[section]


def _field_types(section: type) -> Mapping[str, Any]:
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def choices(kind: Any) -> tuple[str, ...]:
    """The words that a setting of this type may have; () where any text will do."""
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def expected(kind: Any, limits: Limits) -> str:
    """What a setting takes, in words, as in "a whole number, at least 1"."""
    if words := choices(kind):
        return "one of " + ", ".join(words)
    if _is_union(kind):
        return " or ".join(expected(one, limits) for one in typing.get_args(kind))
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        name = "a list of " + {int: "whole numbers", float: "numbers", str: "words"}[inner]
    else:
        name = names[kind]
    return f"{name}, {limits}" if str(limits) else name


def check_fields(section: Any) -> None:
    """Type and range of every field of a section that is being built.

    Raises SettingsError with the setting's full name, what was expected and what was found.
    """
    for field in dataclasses.fields(section):
        kind = field_types(type(section))[field.name]
        limits = field.metadata["limits"]
        value = getattr(section, field.name)
        if not _fits(value, kind, limits):
            words = expected(kind, limits)
            if (
                isinstance(value, int | float)
                and limits.high is limits.below is None
                and value > _LARGEST.get(kind, value)
            ):
                words += f" and at most {_LARGEST[kind]}"
            raise SettingsError(f"{section_name(type(section))}.{field.name}: expected {words}, found {shown(value)}.")


def _fits(value: Any, kind: Any, limits: Limits) -> bool:
    if words := choices(kind):
        return value in words
    if _is_union(kind):
        return any(_fits(value, one, limits) for one in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        return isinstance(value, tuple) and all(_fits(item, inner, limits) for item in value)
    if kind is str:
        return isinstance(value, str) and _is_plain(value)
    if kind is bool:
        return isinstance(value, bool)
    # bool is an int in Python; in a settings file it is a mistake.
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        return False
    return abs(value) <= _LARGEST[kind] and limits.hold(value)


def _is_union(kind: Any) -> bool:
    return isinstance(kind, types.UnionType)


def _is_plain(text: str) -> bool:
    """Whether settings.toml and a path can hold the text: no NUL, nothing that UTF-8 cannot say."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def from_toml(value: Any, kind: Any) -> Any:
    """A TOML value in the form that the field holds: lists become tuples, whole numbers become floats where the field
    is one, and text for a list is split at its commas. What does not fit is returned as it is: `check_fields` names it.
    """
    if typing.get_origin(kind) is tuple:
        if isinstance(value, str):
            return from_text(value, kind)
        inner = typing.get_args(kind)[0]
        return tuple(from_toml(item, inner) for item in value) if isinstance(value, list) else value
    if _is_union(kind):
        return tuple(value) if isinstance(value, list) else value
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return float(value)
    return value


def from_text(text: str, kind: Any) -> Any:
    """The value that `--set section.key=text` means; like `from_toml`, it returns what it cannot read unchanged."""
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        return tuple(from_text(item.strip(), inner) for item in text.split(",") if item.strip())
    if _is_union(kind):
        return from_text(text, tuple[str, ...]) if "," in text else text
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return text
    if kind is bool:
        return {"true": True, "false": False}.get(text, text)
    return text
