"""What the packages say to people, read from their source: the errors that they raise, and the lines that they print."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("buffers", "graphs", "engine", "bench")
# Errors of the language's own protocols: whoever calls us in the wrong way sees them, not a user.
_NOT_FOR_USERS = {"TypeError", "IndexError", "KeyError", "AttributeError", "NotImplementedError", "StopIteration"}
# What is said of errors that others raise: its returns are messages too.
_MESSAGES_OF_OTHERS = {"message_of"}
# What prints its last argument, and what holds a line that is printed elsewhere as its last argument.
_SAYS = {"say", "_say", "print", "echo"}
_HOLDS = {"Works", "Setting"}
# Lines that are gathered before they are printed: in lists and tables, under keys, and returned by functions of these names.
_LISTS = {"warnings", "warning", "notes", "_IN_THE_WAY"}
_KEYS = {"warning", "told"}
_RETURNED = {"warnings_about", "_warnings", "_norm_warning", "memory_holders"}
_SAME_THING = {"str", "repr", "list", "tuple", "sorted", "int", "float", "set"}

Texts = list[str]
Scope = Mapping[str, Sequence[ast.expr]]


@dataclass(frozen=True, order=True)
class Message:
    """A message with <words> where a value goes, and the file that it is from. said: printed, no error."""

    text: str
    file: str
    said: bool = False


def messages() -> list[Message]:
    """All of them, each text once a file."""
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    makers = {name: node for tree in trees.values() for name, node in _makers(tree)}
    words = {name: text for tree in trees.values() for name, text in _constants(tree)}
    found: set[Message] = set()
    for file, tree in trees.items():
        reader = _Reader({**makers, **dict(_makers(tree))}, {**words, **dict(_constants(tree))})
        for node, scope in _with_scopes(tree):
            found |= {Message(text, file) for text in reader.raised(node, scope)}
            if not file.startswith("bench/"):
                found |= {Message(text, file, said=True) for text in reader.said(node, scope)}
    lines = {replace(message, text=_one_line(message.text)) for message in found if _says_something(message.text)}
    # What is raised under one condition and printed under another stands among the errors.
    return sorted(m for m in lines if not (m.said and replace(m, said=False) in lines))


def _with_scopes(tree: ast.Module) -> Iterator[tuple[ast.AST, Scope]]:
    """Every node, with what the innermost function around it assigns to its names."""

    def walk(node: ast.AST, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
        for child in ast.iter_child_nodes(node):
            yield child, scope
            yield from walk(child, _assigned(child) if isinstance(child, ast.FunctionDef) else scope)

    yield from walk(tree, {})


def _assigned(function: ast.FunctionDef) -> Scope:
    found: dict[str, list[ast.expr]] = defaultdict(list)
    for node in ast.walk(function):
        match node:
            case ast.AugAssign(target=ast.Name(id=name), value=ast.Constant() | ast.JoinedStr() as value) if found[
                name
            ]:
                found[name].append(ast.BinOp(found[name][-1], ast.Add(), value))
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AugAssign(target=ast.Name(id=name), value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                found[name].append(value)
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Call() as value):
                for one in names:  # lines of their own, no part of another
                    found[f"{_name(one)} of several"].append(value)
            case ast.For(target=ast.Name(id=name), iter=ast.Tuple() | ast.Call(func=ast.Name()) as value):
                found[name].append(value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value]):
                found[name].append(value)
    return found


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

    def raised(self, node: ast.AST, scope: Scope) -> Texts:
        """Of a raise, and of a function that words the errors of others."""
        match node:
            case ast.Raise(exc=ast.Call() as call):
                return self.of_call(call, {}, scope=scope)
            case ast.FunctionDef(name=name) if name in _MESSAGES_OF_OTHERS:
                return self.of_returns(node, {})
        return []

    def said(self, node: ast.AST, scope: Scope) -> Texts:
        """Of what prints a line, or keeps one to be printed."""
        match node:
            case ast.Call(func=called, args=[*_, text]) if (
                _name(called) in _SAYS | _HOLDS and ast.unparse(called) != "print"  # which is for programs
            ):
                return self.whole(text, scope)
            case ast.Call(func=ast.Attribute(value=kept, attr="append"), args=[text]) if _name(kept) in _LISTS:
                return self.whole(text, scope)
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                named = [v for k, v in pairs if isinstance(k, ast.Constant) and k.value in _KEYS]
                return [text for value in named for text in self.whole(value, scope)]
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AugAssign(target=ast.Name(id=name), value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if name in _LISTS:
                return self.whole(value, scope)
            case ast.FunctionDef(name=name) if name in _RETURNED:
                return self.of_returns(node, {})
        return []

    def whole(self, node: ast.expr, scope: Scope, depth: int = 0) -> Texts:
        """The lines that an expression may be, alone or in a list; a name is what was assigned to it."""
        if depth > 6:
            return []
        match node:
            case ast.Name(id=name) if name in scope or f"{name} of several" in scope:
                values = [*scope.get(name, ()), *scope.get(f"{name} of several", ())]
                return [text for value in values for text in self.whole(value, scope, depth + 1)]
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [text for part in parts for text in self.whole(part, scope, depth + 1)]
            case ast.Dict(values=parts):
                return [text for part in parts for text in self.whole(part, scope, depth + 1)]
            case ast.IfExp(body=one, orelse=other):
                return self.whole(one, scope, depth + 1) + self.whole(other, scope, depth + 1)
            case ast.BoolOp(values=parts):
                return [text for part in parts for text in self.whole(part, scope, depth + 1)]
            case ast.ListComp(elt=part) | ast.GeneratorExp(elt=part) | ast.Starred(value=part):
                return self.whole(part, scope, depth + 1)
            case ast.JoinedStr(values=values):
                return _joined([self._part(value, scope, depth) for value in values])
            case ast.BinOp(left=left, op=ast.Mult()):  # a list of one, or of none
                return self.whole(left, scope, depth + 1)
            case ast.BinOp(left=ast.Call(func=ast.Attribute(attr="join"), args=[parts])):
                return self.whole(parts, scope, depth + 1)
            case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[parts]):
                return self.whole(parts, scope, depth + 1)
        return self.texts(node, {}, depth)

    def _part(self, node: ast.expr, scope: Scope, depth: int) -> Texts:
        """Of a value in a text: what it may be where that is words, else its name."""
        if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name) and node.value.id in scope:
            found = self.whole(node.value, scope, depth + 1)
            if any(map(_says_something, found)):
                return [text if _says_something(text) else f"<{_words(node.value)}>" for text in found]
        return self.texts(node, {}, depth)

    def of_call(self, call: ast.Call, given: Mapping[str, Texts], depth: int = 0, scope: Scope | None = None) -> Texts:
        """Of an error that is made: its first argument, or what the function or class makes of its arguments."""
        name = _name(call.func)
        if name in _NOT_FOR_USERS or depth > 6:
            return []
        maker = self._makers.get(name)
        if maker is None:
            first = call.args[0] if call.args else None
            if scope and isinstance(first, ast.Name) and first.id in scope:
                return self.whole(first, scope)
            return self.texts(first, given, depth) if first is not None else []
        parameters = [argument.arg for argument in maker.args.args if argument.arg not in ("self", "cls")]
        passed = {name: self.texts(value, given, depth + 1) for name, value in zip(parameters, call.args, strict=False)}
        passed |= {word.arg: self.texts(word.value, given, depth + 1) for word in call.keywords if word.arg is not None}
        return self.of_returns(maker, passed, depth + 1)

    def of_returns(self, maker: ast.FunctionDef, given: Mapping[str, Texts], depth: int = 0) -> Texts:
        """Of what a function returns, or an error's __init__ hands on to its base."""
        found, scope = [], _assigned(maker)
        for node in ast.walk(maker):
            if isinstance(node, ast.Return) and node.value is not None:
                lines = self.whole(node.value, scope, depth)
                lines = [] if given and not _is_put_together(node.value) else lines
                found += lines if any(map(_says_something, lines)) else self.texts(node.value, given, depth)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__" and node.args:
                found += self.texts(node.args[0], given, depth)
        return found

    def texts(self, node: ast.expr, given: Mapping[str, Texts], depth: int = 0) -> Texts:
        """The texts of an expression; a value becomes <words>."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=values):
                return _joined([self.texts(value, given, depth) for value in values])
            case ast.FormattedValue(value=ast.Call() as value):
                found = self.texts(value, given, depth)
                return found if all(re.search("[a-z]", text) for text in found if text) else [f"<{_words(value)}>"]
            case ast.FormattedValue(value=value):
                return self.texts(value, given, depth)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _joined([self.texts(left, given, depth), self.texts(right, given, depth)])
            case ast.IfExp(body=body, orelse=orelse):
                return self.texts(body, given, depth) + self.texts(orelse, given, depth)
            case ast.Call(func=ast.Name(id="one_line" | "shown" | "shown_names" | "printable"), args=[value, *_]):
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


def _is_put_together(node: ast.expr) -> bool:
    """Whether lines were gathered under a name before."""
    match node:
        case ast.Call(func=ast.Attribute(attr="join"), args=[ast.Name()]) | ast.Name() | ast.Tuple() | ast.ListComp():
            return True
        case ast.BinOp(left=left):
            return _is_put_together(left)
    return False


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
