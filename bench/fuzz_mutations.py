"""How a valid file is damaged: bytes, numbers in text, the structure of JSON and TOML, and headers of safetensors files.

Everything is drawn from the generator that is handed in, so an input follows from its seed alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Mutation = Callable[[Random, bytes], bytes]

NUMBERS: tuple[Any, ...] = (
    *(
        0,
        -1,
        1,
        2,
        7,
        255,
        2**15,
        2**31 - 1,
        2**31,
        2**32,
        2**53 + 1,
        2**63 - 1,
        2**63,
        2**64,
        -(2**63),
        10**30,
        10**400,
    ),
    *(0.0, -0.0, 0.5, 1.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
)
_TEXTS = (
    *(
        "",
        " ",
        "0",
        "true",
        "null",
        "a" * 5000,
        "../x",
        "/etc/passwd",
        "..",
        ".",
        "x\0y",
        "a\nb\nc",
        "\x1b[31m",
        "\u202e",
    ),
    *(
        "\ud800",
        "nul",
        "\\",
        "data",
        "full_attention",
        "sliding_attention",
        "yarn",
        "default",
        "bfloat16",
        "F32",
        "I64",
    ),
)
_INT = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_TOML_VALUES = (
    *(
        b"1979-05-27",
        b"07:32:00",
        b"1979-05-27T07:32:00Z",
        b"{a = 1}",
        b"[1, [2]]",
        b"nan",
        b"-inf",
        b"0x7fffffffffffffff",
    ),
    *(
        b'"""a\nb"""',
        b"'''\n\n'''",
        b"1e999",
        b"true",
        b'""',
        b"[]",
        b"[true]",
        b'"\\u0000"',
        b'"a\\nb"',
        b"0o17",
        b"1_000",
    ),
    *(b"[" * 400 + b"]" * 400, b"[" * 20000, b"9" * 400, b"9" * 5000, b'"' + b"x" * 20000 + b'"', b"'full,sliding'"),
)


def mutate_bytes(rng: Random, content: bytes, other: bytes = b"") -> bytes:
    """One to four damages of a file without regard to what it is. other: a second file to cross it with."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        content = rng.choice(_BYTE_MUTATIONS)(rng, content)
        if other and rng.random() < 0.1:
            content = content[: rng.randint(0, len(content))] + other[rng.randint(0, len(other)) :]
    return content


def _flip(rng: Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _truncate(rng: Random, content: bytes) -> bytes:
    return content[: rng.randint(0, len(content))]


def _insert(rng: Random, content: bytes) -> bytes:
    at = rng.randint(0, len(content))
    new = rng.choice((rng.randbytes(rng.choice((1, 4, 64))), b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"}", b'"'))
    return content[:at] + new + content[at:]


def _remove(rng: Random, content: bytes) -> bytes:
    at = rng.randint(0, len(content))
    return content[:at] + content[at + rng.choice((1, 2, 8, 100)) :]


def _repeat(rng: Random, content: bytes) -> bytes:
    at, length = rng.randint(0, len(content)), rng.choice((1, 8, 64, 1000))
    return content[: at + length] + content[at : at + length] * rng.choice((1, 1, 5)) + content[at + length :]


def _overwrite(rng: Random, content: bytes) -> bytes:
    at, width = rng.randint(0, max(0, len(content) - 8)), rng.choice((1, 2, 4, 8))
    number = rng.choice([n for n in NUMBERS if isinstance(n, int)]) % 2 ** (8 * width)
    return content[:at] + number.to_bytes(width, rng.choice(("little", "little", "big"))) + content[at + width :]


def replace_number(rng: Random, content: bytes) -> bytes:
    """Another value for one of the numbers of a text."""
    places = list(_INT.finditer(content))
    if not places:
        return _insert(rng, content)
    place = rng.choice(places)
    new = rng.choice((*(str(n).encode() for n in NUMBERS), b"01", b"1.", b"+1", b"1e5", b'"1"', b"9" * 5000))
    return content[: place.start()] + new + content[place.end() :]


_BYTE_MUTATIONS: tuple[Mutation, ...] = (_flip, _truncate, _insert, _remove, _repeat, _overwrite, replace_number)


def mutate_json(rng: Random, content: bytes, other: bytes = b"") -> bytes:
    """A JSON text with one to three changes of its structure; sometimes of its bytes instead."""
    if rng.random() < 0.15:
        return mutate_bytes(rng, content, other)
    value, donor = json.loads(content), json.loads(other or content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = _change_value(rng, value, donor)
    try:
        text = dump_json(value)
    except (ValueError, RecursionError):  # a value that was put below itself has no end
        return mutate_bytes(rng, content, other)
    if rng.random() < 0.03:
        text = _double_key(rng, text)
    if rng.random() < 0.02:
        text = rng.choice((text.decode(errors="replace").encode("utf-16"), b"\xef\xbb\xbf" + text, text + b"\0"))
    return text


def dump_json(value: Any) -> bytes:
    """Whatever it holds: lone surrogates as escapes, infinity as Python spells it, nesting that json.dumps refuses."""
    text = json.dumps(value).encode()
    for marker, nested in (
        (b'"@deep list"', b"[" * 3000 + b"]" * 3000),
        (b'"@deep object"', b'{"a":' * 3000 + b"1" + b"}" * 3000),
        (b'"@open"', b"[" * 100_000),
    ):
        text = text.replace(marker, nested, 1)  # one: a list may hold the marker thousands of times
    return text


def _change_value(rng: Random, value: Any, donor: Any) -> Any:
    places = list(_places(value))
    if not places:
        return rng.choice((donor, [], {}, 0, "", None))
    holder, key = rng.choice(places)
    match rng.randrange(10):
        case 0:
            del holder[key]
        case 1 | 2:
            holder[key] = rng.choice(NUMBERS)
        case 3:
            holder[key] = rng.choice(_TEXTS)
        case 4:
            holder[key] = rng.choice((None, True, False, [], {}, [[]], {"a": 1}, "@deep list", "@deep object", "@open"))
        case 5:
            other_holder, other_key = rng.choice(places)
            holder[key], other_holder[other_key] = other_holder[other_key], holder[key]
        case 6 if list(_places(donor)):
            from_holder, from_key = rng.choice(list(_places(donor)))
            holder[key] = from_holder[from_key]
        case 7:
            scalar = not isinstance(holder[key], list | dict)
            new: Any = [holder[key]] if rng.random() < 0.5 else {str(key): holder[key]}
            holder[key] = new * rng.choice((1, 2, 2000 if scalar else 3)) if isinstance(new, list) else new
        case 8 if isinstance(holder, dict):
            holder[rng.choice((*_TEXTS, str(key) + "x", str(key).upper()))] = holder.pop(key)
        case _:
            number = holder[key]
            plain = isinstance(number, int) and not isinstance(number, bool)
            holder[key] = number + rng.choice((-1, 1, 2, 64)) if plain else rng.choice((str(number), [number, number]))
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (holder, key or index) in a JSON value."""
    found: list[tuple[Any, Any]] = []
    left = [value]
    while left and len(found) < 5000:
        holder = left.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            found.append((holder, key))
            left.append(holder[key])
    return found


def _double_key(rng: Random, text: bytes) -> bytes:
    entries = list(re.finditer(rb'"\w+": (?:\d+|"[^"]*"|null|true|false)', text))
    if not entries:
        return text
    entry = rng.choice(entries)
    return text[: entry.start()] + replace_number(rng, entry[0]) + b", " + text[entry.start() :]


def mutate_toml(rng: Random, content: bytes, other: bytes = b"") -> bytes:
    """A TOML text with one to three of its lines changed; sometimes its bytes instead."""
    if rng.random() < 0.15:
        return mutate_bytes(rng, content, other)
    lines, donor = content.split(b"\n"), (other or content).split(b"\n")
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(lines))
        key, equals, value = lines[at].partition(b" = ")
        match rng.randrange(9):
            case 0:
                lines.insert(at, rng.choice(donor))
            case 1:
                lines[at] = lines[rng.randrange(len(lines))]
            case 2 | 3 if equals:
                lines[at] = key + equals + rng.choice(_TOML_VALUES)
            case 4 | 5 if equals:
                lines[at] = key + equals + str(rng.choice(NUMBERS)).encode()
            case 6 if equals:
                lines[at] = (
                    rng.choice((key + b"x", b'"a\\nb"', b"a.b.c", b'""', b'"\\u0000"', b"x" * 3000)) + equals + value
                )
            case 7:
                deep = rng.choice((b".".join([b"a"] * 2000), b"run", b'"a\\nb"', b"[run]", b"run.output", b"x" * 3000))
                lines.insert(at, b"[" + deep + b"]")
            case _:
                lines[at] = mutate_bytes(rng, lines[at])
    text = b"\n".join(lines)
    return (
        rng.choice((b"\xef\xbb\xbf" + text, text.replace(b"\n", b"\r"), text + b"\0")) if rng.random() < 0.03 else text
    )


def mutate_safetensors(rng: Random, content: bytes, other: bytes = b"") -> bytes:
    """A safetensors file with another header (its length told rightly, or not), other data, or other bytes."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    match rng.randrange(8):
        case 0 | 1:
            return mutate_bytes(rng, content, other)
        case 2:
            told = rng.choice((0, 1, length - 1, length + 1, length + 8, len(content), 10**8, 2**32, 2**63, 2**64 - 1))
            return told.to_bytes(8, "little") + header + data
        case 3:
            data = mutate_bytes(rng, data)
        case 4 if other:
            # The other file's header over these data, or the other way round.
            other_length = int.from_bytes(other[:8], "little")
            header = other[8 : 8 + other_length]
        case 5:
            header = dump_json(_change_tensor(rng, json.loads(header)))
        case _:
            header = mutate_json(rng, header.rstrip(b" "), b"")
    return len(header).to_bytes(8, "little") + header + data


_DTYPES = (
    "BOOL",
    "U8",
    "I8",
    "I16",
    "U16",
    "F16",
    "BF16",
    "I32",
    "U32",
    "F32",
    "F64",
    "I64",
    "U64",
    "F8_E4M3",
    "F8_E5M2",
    "C64",
)
_MORE_DTYPES = ("F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "F128", "", "f32")


def _change_tensor(rng: Random, header: dict[str, Any]) -> dict[str, Any]:
    """Another type or shape for a tensor, mostly one of as many bytes, so that the file stays in order."""
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return header
    told = header[rng.choice(names)]
    size = max(1, sum(end - begin for begin, end in [told["data_offsets"]]))
    match rng.randrange(5):
        case 0:
            told["dtype"] = rng.choice(_DTYPES + _MORE_DTYPES)
        case 1:
            wide = {
                "U8": 1,
                "I8": 1,
                "BOOL": 1,
                "F16": 2,
                "BF16": 2,
                "I16": 2,
                "F32": 4,
                "I32": 4,
                "F64": 8,
                "I64": 8,
                "C64": 8,
            }
            told["dtype"] = rng.choice([name for name, bytes_ in wide.items() if size % bytes_ == 0])
            told["shape"] = [size // wide[told["dtype"]]]
        case 2:
            count = 1
            for axis in told["shape"]:
                count *= axis
            told["shape"] = rng.choice(([count], [1, count], [count, 1], [*told["shape"], 1], [1, *told["shape"]], []))
        case 3:
            told["shape"] = rng.choice(([0], [2**31, 2**33], [0, 2**63], [2**63], [-1], [1] * 100, told["shape"][::-1]))
        case _:
            first, second = rng.choice(names), rng.choice(names)
            header[first], header[second] = header[second], header[first]
    return header


def cross(rng: Random, files: dict[str, bytes], others: Sequence[dict[str, bytes]]) -> dict[str, bytes]:
    """One file of a folder in the place of another of its files, or the same file of another folder."""
    name = rng.choice(sorted(files))
    donor = rng.choice([files, *others])
    return files | {name: donor[rng.choice(sorted(donor))]}
