"""What torch's functions do once their state is kept per thread, and how they come to do it; `dflash.tracing` decides.

torch's own functions get new code, which also reaches those who hold the functions already, as everything does that
`torch.compile` has wrapped. Where torch's flag is set from outside its module (`_set_compilation_env` saves, clears and
restores it), the module's attribute becomes a property, which answers per thread.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch._dynamo import eval_frame, external_utils
from torch._dynamo.convert_frame import compile_lock

F = TypeVar("F", bound=Callable[..., Any])
Frame = tuple[str, int, str]
"""A file, a line and a function: what is kept of a frame, so that keeping it is cheap."""


class _State(threading.local):
    """What goes on in this thread."""

    tracing = False
    compiling = False
    set_by: tuple[Frame, ...] = ()


state = _State()
symbolic_trace: Any = torch.fx._symbolic_trace  # noqa: SLF001  # torch's private names are what this room is for
originals: dict[str, Callable[..., Any]] = {}
"""torch's functions as they were, by qualified name."""


# How torch's functions are changed


def same_arguments(function: FunctionType, new: Callable[..., Any]) -> bool:
    """Whether `new` can stand in for `function`."""
    old, code = function.__code__, new.__code__
    return code.co_varnames[: code.co_argcount] == old.co_varnames[: old.co_argcount]


def replace(function: FunctionType, new: Callable[..., Any]) -> None:
    """Give torch's function new code; whoever holds the function is cured with it. `originals` keeps the old one.

    The new code carries the old one's names and place, because rules go by them: what Dynamo skips, where TorchScript
    reads the source, which frame counts as a user's.
    """
    old = function.__code__
    original = FunctionType(old, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    originals[function.__qualname__] = original
    function.__globals__["_dflash"] = sys.modules[new.__module__]
    function.__code__ = _placed(new.__code__, old)


def _placed(code: CodeType, old: CodeType) -> CodeType:
    return code.replace(
        co_filename=old.co_filename,
        co_firstlineno=old.co_firstlineno,
        co_name=old.co_name,
        co_qualname=old.co_qualname,
    )


def redirect(module: ModuleType, name: str, field: str) -> None:
    """Let a module's attribute answer for the thread that asks: a property goes before the module's own dictionary."""

    def get(_: ModuleType) -> bool:
        return bool(getattr(state, field))

    def put(_: ModuleType, value: bool) -> None:
        setattr(state, field, value)
        if field == "tracing":
            watch(value)

    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: property(get, put)})


# What torch's functions do from then on


def _hidden(function: F) -> F:
    """Dynamo must not look into this, as it does not look into torch.fx."""
    hidden: F = torch.compiler.disable(function)
    return hidden


@_hidden
def traced(tracer: Any, root: Any, concrete_args: Any) -> Any:
    """What `Tracer.trace` does: torch's own trace with the flag set for this thread, one at a time.

    The lock is the one that torch compiles under, so that locks are taken in one order; its holder may take it again.
    """
    with compile_lock:
        before = state.tracing, state.set_by
        state.tracing, state.set_by = True, _stack()
        try:
            return originals["Tracer.trace"](tracer, root, concrete_args)
        finally:
            state.tracing, state.set_by = before


@_hidden
def patched(patcher: Any, cls: type, name: str, new: Any, deduplicate: bool) -> Any:
    """What `_Patcher.patch_method` does: torch's own patch, but other threads go on calling what was there before."""
    owner, before = threading.get_ident(), getattr(cls, name)

    def here(*args: Any, **kwargs: Any) -> Any:
        return (new if threading.get_ident() == owner else before)(*args, **kwargs)

    here.__code__ = _placed(here.__code__, new.__code__)
    return originals["_Patcher.patch_method"](patcher, cls, name, functools.wraps(new)(here), deduplicate)


@_hidden
def watch(value: bool) -> None:
    """Remember who sets the flag."""
    state.set_by = _stack() if value else ()


def _stack(limit: int = 60) -> tuple[Frame, ...]:
    """The stack, innermost first, from the first frame that is neither this room's nor Dynamo's way into it."""
    ours = (__file__, eval_frame.__file__, external_utils.__file__)
    frame, found = inspect.currentframe(), list[Frame]()
    while frame is not None and len(found) < limit:
        if found or frame.f_code.co_filename not in ours:
            found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back
    return tuple(found)


# The code that torch's functions get. Names in it are looked up in torch's modules, which know `torch` and, from
# `replace`, this room as `_dflash`. The docstrings stay torch's.
# ruff: noqa: D103
_dflash: Any = sys.modules[__name__]


def trace(self: Any, root: Any, concrete_args: Any = None) -> Any:
    return _dflash.traced(self, root, concrete_args)


def patch_method(self: Any, cls: Any, name: Any, new_fn: Any, deduplicate: Any = True) -> Any:
    return _dflash.patched(self, cls, name, new_fn, deduplicate)


def is_fx_tracing() -> bool:
    _dflash.symbolic_trace.is_fx_tracing_warning()
    return bool(_dflash.state.tracing)


def is_fx_symbolic_tracing() -> bool:
    return bool(_dflash.state.tracing) and not torch.compiler.is_compiling()


def set_is_fx_tracing(value: bool) -> None:
    _dflash.symbolic_trace._is_fx_tracing_tls.flag = value  # noqa: SLF001  # what torch's own does
    _dflash.watch(value)


def is_compiling() -> bool:
    return bool(_dflash.state.compiling)


def session() -> Iterator[None]:
    before = _dflash.state.compiling
    try:
        _dflash.state.compiling = True
        yield
    finally:
        _dflash.state.compiling = before
