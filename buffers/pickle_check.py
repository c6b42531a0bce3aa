"""What a pickle of torch.save would do, read from its opcodes without doing it.

torch.load(weights_only=True) runs no code, but what it calls may be asked for any amount of memory: a storage or a bytearray of
a number that the pickle names, a tensor larger than its storage, which is then enlarged. Here a pickle passes that makes dense
tensors within storages of the archive, and plain values; anything else is refused before torch sees it.
"""

import math
import pickletools
from collections.abc import Mapping
from typing import Any

from buffers.untrusted import shown_names

# Bytes of an element, by the storage's class.
_STORAGES = {
    **{"BoolStorage": 1, "ByteStorage": 1, "CharStorage": 1, "ShortStorage": 2, "HalfStorage": 2, "BFloat16Storage": 2},
    **{"IntStorage": 4, "FloatStorage": 4, "LongStorage": 8, "DoubleStorage": 8},
}
_TENSOR = "torch._utils _rebuild_tensor_v2"
_CALLED = (_TENSOR, "torch._utils _rebuild_parameter", "collections OrderedDict", "torch Size", "_codecs encode")
_MARK = object()
_OTHER = object()


class _Global(str):
    """`module name` of something that the pickle imports."""


class _Storage(int):
    """Elements of a storage."""


def check_pickle(content: bytes, sizes: Mapping[str, int]) -> None:
    """sizes: bytes of the archive's storages by key. Raises ValueError, saying what the pickle asks for or what is wrong."""
    asked: list[str] = []
    try:
        _walk(content, sizes, asked)
    except _Refused:
        if not asked:
            raise
    except Exception as error:  # what is no opcode, or finds something else on the stack than it needs
        if not asked:
            raise _Refused("expected a whole file of torch.save, found a damaged pickle in it") from error
    # What it asks for says more than what is wrong behind it.
    if asked:
        names = shown_names(name.replace(" ", ".", 1) if " (" not in name else name for name in dict.fromkeys(asked))
        raise _Refused(
            f"expected a pickle of dense tensors and plain values, found one that asks for {names}, which could run code or take "
            "memory. It was not opened; save it again as a dictionary of tensors"
        )


class _Refused(ValueError):
    """What a whole pickle does that none of ours would."""


def _walk(content: bytes, sizes: Mapping[str, int], asked: list[str]) -> None:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, told, _ in pickletools.genops(content):
        argument: Any = told
        match opcode.name:
            case "GLOBAL":
                stack.append(_Global(argument))
                module, _, name = argument.partition(" ")
                if argument not in _CALLED and not (module == "torch" and name in _STORAGES):
                    asked.append(argument)
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "MARK":
                stack.append(_MARK)
            case "TUPLE":
                stack.append(tuple(_to_mark(stack)))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" | "EMPTY_TUPLE":
                count = int(opcode.name[5:]) if opcode.name != "EMPTY_TUPLE" else 0
                items = [stack.pop() for _ in range(count)][::-1]
                stack.append(tuple(items))
            case "BINPERSID":
                stack.append(_storage(stack.pop(), sizes))
            case "REDUCE":
                arguments, called = stack.pop(), stack.pop()
                if called not in _CALLED:
                    asked.append(str(called) if isinstance(called, _Global) else "a call of what is no function")
                elif called == _TENSOR:
                    _check_tensor(*arguments[:4])
                stack.append(_OTHER)
            case "NEWOBJ" | "NEWOBJ_EX" | "OBJ" | "INST" | "STACK_GLOBAL" | "EXT1" | "EXT2" | "EXT4":
                asked.append(f"objects of its own ({opcode.name})")
                break
            case "APPENDS" | "SETITEMS":
                _to_mark(stack)
            case "BUILD" | "APPEND" | "POP":
                stack.pop()
            case "SETITEM":
                del stack[-2:]
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "PROTO" | "STOP" | "FRAME":
                pass
            case (
                "NONE"
                | "NEWTRUE"
                | "NEWFALSE"
                | "EMPTY_DICT"
                | "EMPTY_LIST"
                | "EMPTY_SET"
                | "BINFLOAT"
                | "SHORT_BINSTRING"
            ):
                stack.append(_OTHER)
            case name:
                raise _Refused(f"expected a pickle of torch.save, found one with {name} in it")


def _to_mark(stack: list[Any]) -> list[Any]:
    items = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _storage(told: Any, sizes: Mapping[str, int]) -> _Storage:
    """("storage", class, key, device, elements) must be the archive's part of that key, whole."""
    kind, storage, key, device, elements = told
    width = _STORAGES[storage.partition(" ")[2]] if isinstance(storage, _Global) else 0
    if kind != "storage" or not width or device != "cpu" or sizes[key] != elements * width:
        raise _Refused(
            f"expected storages on the CPU of the archive's own sizes, found another ({sizes.get(key)} bytes)"
        )
    return _Storage(elements)


def _check_tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    if not isinstance(storage, _Storage) or len(size) != len(stride) or min((offset, *size, *stride)) < 0:
        raise _Refused("expected tensors within their storages, found one without")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if math.prod(size) else offset - 1
    if last >= storage:
        raise _Refused(
            f"expected tensors within their storages, found one of {storage} elements for an offset of {offset}, sizes "
            f"{list(size[:8])} and strides {list(stride[:8])}"
        )
