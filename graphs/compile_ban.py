"""Compile first, threads later: after the warm-up whoever compiles is told so, instead of racing with the others.

torch.compile is not thread-safe, and a compilation in the middle of training stalls it by seconds: neither may happen unseen.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CompilationError(RuntimeError):
    """Something was compiled after the warm-up; says what, where and what to do."""


_lock = threading.Lock()
_bans = 0
_exempt: Counter[int] = Counter()  # threads
_torch_compile = torch.compile


@contextmanager
def no_compilation() -> Iterator[None]:
    """Inside, in every thread, what torch.compile would trace and what Triton would make ready for a new combination of types
    and constants raises CompilationError. May be nested, and held by several threads."""
    _watch()
    _count(1)
    try:
        yield
    finally:
        _count(-1)


@contextmanager
def compilation_allowed() -> Iterator[None]:
    """Inside, the calling thread compiles all the same, and so does autograd's, which runs its backward passes: a new generation
    is warmed up, one thread at a time."""
    thread = threading.get_ident()
    _exempt[thread] += 1
    try:
        yield
    finally:
        _exempt[thread] -= 1
        _watch()  # what was loaded only now


def refuse_if_forbidden(what: str) -> None:
    """Raises CompilationError about `what` where compiling is over."""
    if _bans and not _is_exempt():
        raise CompilationError(
            f"{what} is being compiled in thread {threading.current_thread().name} after the warm-up: expected everything to be "
            "compiled by then; give every shape to an engine before warm_up(), or use engine.regenerate() for new ones"
        )


def _is_exempt() -> bool:
    if _exempt[threading.get_ident()]:
        return True
    # Backward passes run in threads that autograd has started, one for each device, which work for whoever asks and are
    # nobody's in Python. Nobody else's backward pass has anything to compile: it was warmed up.
    return any(_exempt.values()) and isinstance(threading.current_thread(), threading._DummyThread)


def _count(by: int) -> None:
    global _bans
    with _lock:
        _bans += by
        torch.compile = _compile_watched if _bans else _torch_compile  # type: ignore[assignment]


def _compile_watched(*args: Any, **kwargs: Any) -> Any:
    """torch.compile for whoever loads its compiler while compiling is over."""
    import torch._dynamo  # noqa: F401 - what is watched must be there

    _watch()
    return _torch_compile(*args, **kwargs)


def _watch() -> None:
    """Puts our question before every compilation of the compilers that are loaded. Loading Dynamo takes seconds, so nothing is
    loaded for this."""
    with _lock:
        dynamo = sys.modules.get("torch._dynamo.callback")
        # torch._dynamo.reset() forgets who wanted to know.
        if dynamo is not None and _ask_for_dynamo not in dynamo.callback_handler.start_callbacks:
            dynamo.on_compile_start(_ask_for_dynamo)
        triton = sys.modules.get("triton")
        if triton is not None and not hasattr(triton.knobs.runtime.jit_cache_hook, "asks_for_dflash_engine"):
            _watch_triton(triton)


def _ask_for_dynamo(*_: Any) -> None:
    refuse_if_forbidden("a function under torch.compile")


def _watch_triton(triton: Any) -> None:
    earlier = triton.knobs.runtime.jit_cache_hook

    def ask(*args: Any, **kwargs: Any) -> Any:
        refuse_if_forbidden(f"the Triton kernel {getattr(kwargs.get('fn'), 'name', '')}".strip())
        return earlier(*args, **kwargs) if earlier is not None else None

    ask.asks_for_dflash_engine = True  # type: ignore[attr-defined]
    triton.knobs.runtime.jit_cache_hook = ask
