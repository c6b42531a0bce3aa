"""docs/messages.md, every message that the packages raise, from their source: `python -m bench.messages > docs/messages.md`."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("buffers", "graphs", "engine", "bench")
# Title, what to do about messages of this kind, and the files they arise in; the first that fits has a file.
TOPICS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Settings and command line",
        "Nothing has begun yet. Every setting with its values is in [settings.md](settings.md), every option in `--help`.",
        ("engine/settings*", "engine/cli*", "bench/cli*", "engine/config_file*", "engine/compile_cache*"),
    ),
    (
        "Other trainers' hidden states",
        "`dflash-engine data inspect FOLDER` lists all files that cannot be used and all settings that are missing; "
        '`data.on_bad_file = "skip"` leaves bad files out ([data.md](data.md)). A bare reason stands behind its file\'s name.',
        (
            "buffers/foreign*",
            "buffers/raw_sample*",
            "buffers/torch_archive*",
            "buffers/pickle_check*",
            "buffers/untrusted*",
            "engine/convert*",
            "buffers/open_dataset*",
        ),
    ),
    (
        "Hidden states from a model",
        "Records that are left out are counted with their reason, the first five with their line ([extract.md](extract.md)).",
        ("engine/hf_extract*", "engine/hf_target*", "engine/extract_*", "engine/conversations*", "engine/chat_tokens*")
        + ("engine/assistant_turns*", "engine/corpus*"),
    ),
    (
        "Datasets",
        "Our own format is described in [files.md](files.md). What is truncated, changed or half-written is to be copied or "
        "written again; `dflash-engine data inspect FOLDER --verify` reads every byte. Mixtures: [data.md](data.md).",
        ("buffers/dataset*", "buffers/manifest*", "buffers/shard_file*", "buffers/filling*", "buffers/mixture*")
        + ("engine/data_*", "engine/mixture*", "engine/held_out*", "engine/inspection*", "engine/reading_checks*")
        + ("engine/recomputation*", "engine/mixture_agreement*"),
    ),
    (
        "Buckets",
        "`dflash-engine plan --config run.toml` shows what a change makes of the data, in a second.",
        (
            "buffers/planner*",
            "buffers/packing*",
            "buffers/batching*",
            "buffers/shapes*",
            "buffers/anchors*",
            "engine/bucketing*",
        ),
    ),
    (
        "Targets and drafters",
        "What is computed otherwise than training or the servers would is refused by name: [serving.md](serving.md) has what is "
        "read of a config, [extract.md](extract.md) which targets fit.",
        ("engine/target*", "engine/rope*", "engine/drafter_*", "engine/params*", "engine/export*", "engine/assemble*")
        + ("engine/speculators_layout*",),
    ),
    (
        "Memory",
        "See [a plan that does not fit](trouble.md#expected-a-plan-within--gib) and [graphs.md](graphs.md).",
        ("engine/memory_*", "buffers/arena*", "engine/failures*"),
    ),
    (
        "Graphs and kernels",
        "The line names bucket and source line. `run.on_capture_failure` and `run.verify` say what a run does about it "
        "([graphs.md](graphs.md), [reconfigure.md](reconfigure.md)); `dflash-engine doctor` says what works on this machine.",
        ("graphs/*", "engine/graphs_*", "engine/kernels*", "engine/ops/*", "engine/verification*", "engine/precision*")
        + ("engine/warm_up*", "engine/generation*"),
    ),
    (
        "A run",
        "What was saved stays: mend what is named, and the same command goes on from the last checkpoint "
        "([trouble.md](trouble.md), [watch.md](watch.md)).",
        (
            "engine/run*",
            "engine/checkpoint*",
            "engine/changes*",
            "engine/checking*",
            "engine/bad_steps*",
            "engine/sinks*",
        )
        + ("buffers/staging*", "engine/profiling*", "engine/reconfigure*", "engine/optimizer*", "engine/engine*")
        + ("engine/metrics*", "engine/tensor_file*"),
    ),
    (
        "Measuring a drafter",
        "[evaluate.md](evaluate.md) has the figures, and the targets that are refused.",
        (
            "engine/evaluate*",
            "engine/decode*",
            "engine/prompts*",
            "engine/acceptance*",
            "engine/hf_decoding*",
            "engine/plots*",
        ),
    ),
    (
        "Benchmarks",
        "Where the comparison fails no speed is shown: [benchmarks.md](benchmarks.md).",
        ("bench/*",),
    ),
    ("Elsewhere", "From commands and parts that have no page of their own.", ("*",)),
)
# Errors of the language's own protocols: whoever calls us in the wrong way sees them, not a user.
_NOT_FOR_USERS = {"TypeError", "IndexError", "KeyError", "AttributeError", "NotImplementedError", "StopIteration"}
# What is said of errors that others raise: its returns are messages too.
_SAYS = {"message_of"}
_SAME_THING = {"str", "repr", "list", "tuple", "sorted", "int", "float", "set"}


@dataclass(frozen=True, order=True)
class Message:
    """A message with <words> where a value goes, and the file that raises it."""

    text: str
    file: str


def messages() -> list[Message]:
    """All of them, each text once a file."""
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    makers = {name: node for tree in trees.values() for name, node in _makers(tree)}
    words = {name: text for tree in trees.values() for name, text in _constants(tree)}
    found = set()
    for file, tree in trees.items():
        reader = _Reader({**makers, **dict(_makers(tree))}, {**words, **dict(_constants(tree))})
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                texts = reader.of_call(node.exc, {})
            elif isinstance(node, ast.FunctionDef) and node.name in _SAYS:
                texts = reader.of_returns(node, {})
            else:
                continue
            found |= {Message(text, file) for text in map(_one_line, texts) if _says_something(text)}
    return sorted(found)


def _makers(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """What makes errors or their words, by the name it is called by: functions, and classes with an __init__ of their own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef) and any(
            _name(base).endswith(("Error", "Exception")) for base in node.bases
        ):
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                    yield node.name, part


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names of files and the like, which a message should show."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))) if name.isupper():
                yield name, text
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                for one, value in zip(names, values, strict=False):
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        yield _name(one), value.value


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class _Reader:
    """Reads the texts that an expression may give. `given` has those of a function's parameters."""

    def __init__(self, makers: Mapping[str, ast.FunctionDef], constants: Mapping[str, str]) -> None:
        self._makers, self._constants = makers, constants

    def of_call(self, call: ast.Call, given: Mapping[str, list[str]], depth: int = 0) -> list[str]:
        """Of an error that is made: its first argument, or what the function or class makes of its arguments."""
        name = _name(call.func)
        if name in _NOT_FOR_USERS or depth > 3:
            return []
        maker = self._makers.get(name)
        if maker is None:
            return self.texts(call.args[0], given, depth) if call.args else []
        parameters = [argument.arg for argument in maker.args.args if argument.arg not in ("self", "cls")]
        passed = {name: self.texts(value, given, depth + 1) for name, value in zip(parameters, call.args, strict=False)}
        passed |= {word.arg: self.texts(word.value, given, depth + 1) for word in call.keywords if word.arg is not None}
        return self.of_returns(maker, passed, depth + 1)

    def of_returns(self, maker: ast.FunctionDef, given: Mapping[str, list[str]], depth: int = 0) -> list[str]:
        """Of what a function returns, or an error's __init__ hands on to its base."""
        found = []
        for node in ast.walk(maker):
            if isinstance(node, ast.Return) and node.value is not None:
                found += self.texts(node.value, given, depth)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__" and node.args:
                found += self.texts(node.args[0], given, depth)
        return found

    def texts(self, node: ast.expr, given: Mapping[str, list[str]], depth: int = 0) -> list[str]:
        """The texts of an expression; a value becomes <words>."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=values):
                return _joined([self.texts(value, given, depth) for value in values])
            case ast.FormattedValue(value=value):
                return self.texts(value, given, depth)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _joined([self.texts(left, given, depth), self.texts(right, given, depth)])
            case ast.IfExp(body=body, orelse=orelse):
                return self.texts(body, given, depth) + self.texts(orelse, given, depth)
            case ast.Call(func=ast.Name(id="one_line" | "shown" | "shown_names"), args=[value, *_]):
                value = value.elts[0] if isinstance(value, ast.List) and len(value.elts) == 1 else value
                return self.texts(value, given, depth)
            case ast.Name(id=name) if given.get(name):
                return given[name]
            case ast.Name(id=name) if name in self._constants:
                return [self._constants[name]]
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name)) if (
                name in self._makers or name[0].isupper()
            ):
                return self.of_call(node, given, depth + 1) or [f"<{_words(node)}>"]
            case _:
                return [f"<{_words(node)}>"]


def _joined(parts: list[list[str]]) -> list[str]:
    """Each part's texts in turn, the first of the other parts beside them: as many texts as the part with most has."""
    count = max(map(len, parts), default=0)
    return ["".join(part[min(i, len(part) - 1)] for part in parts if part) for i in range(count)]


def _words(node: ast.AST) -> str:
    """A value's name in words."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_").replace("_", " ")
        case ast.Call(func=ast.Name(id="len"), args=[value]):
            return f"number of {_words(value)}"
        case ast.Call(func=ast.Attribute(attr="join"), args=[value]):
            return _words(value)
        case ast.Call(func=ast.Name(id="map"), args=[_, value]):
            return _words(value)
        case ast.Call(func=ast.Name(id=name), args=[value, *_]) if name in _SAME_THING:
            return _words(value)
        case ast.Call(func=ast.Attribute(value=value)):
            return _words(value)
        case ast.Call(func=called):
            return _words(called)
        case ast.Subscript(value=value) | ast.Starred(value=value):
            return _words(value)
        case ast.GeneratorExp(generators=[first, *_]) | ast.ListComp(generators=[first, *_]):
            return _words(first.iter)
        case ast.BinOp(left=left):
            return _words(left)
        case _:
            return "..."


def _one_line(text: str) -> str:
    return " ".join(text.replace("`", "'").split())


def _says_something(text: str) -> bool:
    return len(re.findall(r"[a-z]{3,}", re.sub(r"<[^>]*>", "", text))) >= 2


def topic_of(file: str) -> str:
    """The title under which a file's messages stand."""
    return next(title for title, _, patterns in TOPICS if any(fnmatch(file, pattern) for pattern in patterns))


def page() -> str:
    """docs/messages.md."""
    found = messages()
    lines = [
        "# Messages",
        "",
        "Written by `python -m bench.messages > docs/messages.md` from the source; do not edit.",
        "",
        "An error is one line: what was expected, what was found, what to do. All that the packages raise are here, with <words>",
        "where a value goes: search for words of yours that are no name or number. `dflash-engine --traceback COMMAND` shows",
        "where it arose; [trouble.md](trouble.md) goes by symptoms.",
    ]
    for title, advice, _ in TOPICS:
        of_topic = [message for message in found if topic_of(message.file) == title]
        if of_topic:
            lines += ["", f"## {title}", "", advice, ""]
            lines += [f"- `{message.text}` ({message.file})" for message in of_topic]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
