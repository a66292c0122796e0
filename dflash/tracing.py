# ruff: noqa: SLF001  # torch's private names are what this room is for
"""torch's tracing state, kept per thread, so that one thread may compile while others call what is compiled.

torch before 2.14 keeps «FX tracing is active» in one flag for the whole process, and every call of a compiled function
reads it: while one thread compiles, the others' calls fail; and where two threads save and restore it out of order, it
stays set and every compiled call fails for good. torch from 2.13 on has a second such flag, «compiling», which makes
eager code of other threads (optimizers, hooks) take the branches meant for tracing. And in every version read, a trace
replaces `nn.Module.__call__` for all threads.

`cure` mends what this torch needs mended, in memory: no file of torch is edited, so no cache key moves. Whether it is
needed is decided by what torch looks like, not by its version; a shape that was never read is refused.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock

from dflash import perthread
from dflash.perthread import Frame, symbolic_trace
from env.errors import Exit, Failure

READ_IN = ("2.10.0", "2.11.0", "2.15.0")
"""The versions of torch whose sources these functions were written against."""

compiler: Any = torch.compiler

FLAG = "_is_fx_tracing_flag"
SESSION = "_is_compiling_flag"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cure:
    """What was found in torch and what was done about it."""

    torch: str
    flag: str
    """How torch as shipped keeps the tracing flag: "process-wide" or "per thread"."""

    session: str
    """How it keeps «compiling»: "process-wide", or "unset" where compiling does not set it."""

    done: tuple[str, ...]
    """What `cure` changed, a sentence each."""

    read: bool
    """Whether this very version was read; otherwise it has the shape of one that was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Poison:
    """A tracing flag that was left set although nobody traces: every compiled call here would fail."""

    thread: str
    set_by: tuple[Frame, ...]
    """The stack of whoever set it, innermost first; empty where nobody was watching."""

    def lines(self) -> list[str]:
        """The report, a line each."""
        stack = [f"  {file}:{line} in {name}" for file, line, name in self.set_by]
        return [
            f"thread {self.thread}: «FX tracing is active» was left set although nothing traces",
            *(["set by:", *stack] if stack else ["nobody was watching when it was set: `cure` was not called yet"]),
        ]


_lock = threading.Lock()
_cured: Cure | None = None


def cure() -> Cure:
    """Keep torch's tracing state per thread where torch does not; once a process, later calls return the same answer.

    Raises:
        Failure: Exit.HOST, when torch keeps the state in a shape that was never read, when the cure does not work, or
            when it comes too late: in a worker thread, or while a trace runs.
    """
    global _cured  # noqa: PLW0603  # torch is one to a process, and so is its cure
    with compile_lock, _lock:
        if _cured is None:
            _cured = _install()
        return _cured


def cured() -> Cure | None:
    """What `cure` did in this process; None before it was called."""
    return _cured


def _install() -> Cure:
    flag, session = flag_shape(), session_shape()
    late = "while a trace runs" if _tracing() else ""
    if threading.current_thread() is not threading.main_thread():
        late = "from a worker thread"
    if late:
        raise Failure(
            Exit.HOST,
            f"the cure for torch's tracing state cannot be put in {late}",
            hint="call `dflash.tracing.cure` at the start of the process",
        )
    done = ["one trace at a time", "a trace's nn.Module patches are seen by its own thread only"]
    plan: list[tuple[ModuleType, Callable[..., Any], str, Callable[..., Any]]] = [
        (symbolic_trace, symbolic_trace.Tracer.trace, "create_args_for_root", perthread.trace),
        (symbolic_trace, symbolic_trace._Patcher.patch_method, "patches_made", perthread.patch_method),
    ]
    if flag == "process-wide":
        done.append("the tracing flag is kept per thread")
        plan += [
            (symbolic_trace, symbolic_trace.is_fx_tracing, FLAG, perthread.is_fx_tracing),
            (symbolic_trace, symbolic_trace.is_fx_symbolic_tracing, FLAG, perthread.is_fx_symbolic_tracing),
        ]
    else:
        plan.append((symbolic_trace, symbolic_trace._set_is_fx_tracing, "flag", perthread.set_is_fx_tracing))
    if session == "process-wide":
        done.append("«compiling» is kept per thread")
        plan += [
            (compiler, compiler.is_compiling, SESSION, perthread.is_compiling),
            (compiler, compiler._compile_session_context, SESSION, perthread.session),
        ]
    for function, new in [(_own(module, old, mark, new), new) for module, old, mark, new in plan]:
        perthread.replace(function, new)
    if flag == "process-wide":
        perthread.redirect(symbolic_trace, FLAG, "tracing")
    if session == "process-wide":
        perthread.redirect(compiler, SESSION, "compiling")
    if not torch.cuda.is_available():
        # Without a GPU the first compilation puts up a stand-in for one, which (torch 2.10, 2.11) belongs to the thread
        # that compiles and is gone when it ends: the next thread's compilation then crashes. This thread stays.
        torch._C._ensureCUDADeviceGuardSet()
    _prove()
    read = torch.__version__.split("+")[0] in READ_IN
    return Cure(torch=torch.__version__, flag=flag, session=session, done=tuple(done), read=read)


# What torch looks like


def flag_shape() -> str:
    """How this torch keeps «FX tracing is active»: "process-wide" or "per thread".

    Raises:
        Failure: Exit.HOST, when it is neither of the two that were read.
    """
    if not isinstance(compile_lock, type(threading.RLock())):
        raise _unknown(f"the compile lock is a {type(compile_lock).__name__}")
    names, mentions = vars(symbolic_trace), _mentions(symbolic_trace, FLAG)
    if FLAG in names or mentions:
        expected = {"is_fx_tracing", "is_fx_symbolic_tracing", "Tracer.trace"}
        if mentions != expected or not isinstance(names.get(FLAG), bool):
            raise _unknown(f"{FLAG} is used by {', '.join(sorted(mentions)) or 'nobody'}")
        return "process-wide"
    local = names.get("_is_fx_tracing_tls")
    users = _mentions(symbolic_trace, "_is_fx_tracing_tls")
    if isinstance(local, threading.local) and users == {"_set_is_fx_tracing", "_get_is_fx_tracing"}:
        return "per thread"
    raise _unknown("torch.fx._symbolic_trace has neither of the two flags that were read")


def session_shape() -> str:
    """How this torch keeps «compiling»: "process-wide", or "unset" where only export sets it.

    Raises:
        Failure: Exit.HOST, when it is neither of the two that were read.
    """
    mentions = _mentions(compiler, SESSION)
    if not isinstance(vars(compiler).get(SESSION), bool) or not mentions <= {
        "is_compiling",
        "_compile_session_context",
    }:
        raise _unknown(f"torch.compiler.{SESSION} is used by {', '.join(sorted(mentions)) or 'nobody'}")
    return "process-wide" if "_compile_session_context" in mentions else "unset"


def _mentions(module: ModuleType, name: str) -> set[str]:
    """The functions of a module whose code names a global, qualified; read from its source, so that none is missed."""
    found: set[str] = set()
    try:
        rest = [compile(inspect.getsource(module), str(module.__file__), "exec", dont_inherit=True)]
    except OSError as error:
        raise _unknown(f"the source of {module.__name__} is not there") from error
    while rest:
        code = rest.pop()
        if name in code.co_names and code.co_name != "<module>":
            found.add(code.co_qualname)
        rest += [part for part in code.co_consts if isinstance(part, CodeType)]
    return found


def _own(module: ModuleType, function: Callable[..., Any], mark: str, new: Callable[..., Any]) -> FunctionType:
    """The function under its decorators, if it is still torch's: of the module, naming `mark`, called as `new` is."""
    inner = inspect.unwrap(function)
    if not isinstance(inner, FunctionType):
        raise _unknown(f"{function!r} is no function")
    names = inner.__code__.co_names + inner.__code__.co_consts
    if inner.__globals__ is not vars(module) or mark not in names or not perthread.same_arguments(inner, new):
        where = f"{inner.__code__.co_filename}:{inner.__code__.co_firstlineno}"
        raise _unknown(f"{inner.__qualname__}{inspect.signature(inner)} in {where} is not as it was read")
    return inner


def _unknown(found: str) -> Failure:
    return Failure(
        Exit.HOST,
        f"torch {torch.__version__} keeps its tracing state in a shape that was never read",
        details=(f"found: {found}", f"read in torch {', '.join(READ_IN)}"),
        hint="use one of those versions, and call `dflash.tracing.cure` before anything else patches torch.fx; "
        "`nox -s doctor -- --compile` shows the code",
    )


def _prove() -> None:
    """A trace of this thread sees the flag, another thread does not, and it is gone afterwards."""
    seen: list[bool] = []

    def function(x: Any) -> Any:
        seen.append(symbolic_trace.is_fx_symbolic_tracing())
        other = threading.Thread(target=lambda: seen.append(flag()))
        other.start()
        other.join()
        return x

    symbolic_trace.Tracer().trace(function)
    if (*seen, flag()) != (True, False, False):
        raise _unknown(f"after the cure a trace saw {seen} and left {flag()}; expected [True, False] and False")


# Poison


def flag() -> bool:
    """Whether «FX tracing is active», as the next compiled call of this thread would see it."""
    get = getattr(symbolic_trace, "_get_is_fx_tracing", None)
    return bool(get() if get is not None else getattr(symbolic_trace, FLAG))


def poison() -> Poison | None:
    """The flag, if it is set although nobody who could have set it traces."""
    if not flag() or _tracing():
        return None
    return Poison(thread=threading.current_thread().name, set_by=perthread.state.set_by)


def heal() -> Poison | None:
    """Clear a poisoned flag and return what was found, or None: cheap enough for every step of every thread."""
    found = poison()
    if found is not None:
        if hasattr(symbolic_trace, "_set_is_fx_tracing"):
            symbolic_trace._set_is_fx_tracing(False)
        else:
            setattr(symbolic_trace, FLAG, False)
        perthread.state.set_by = ()
    return found


def _tracing() -> bool:
    """Whether a trace runs: in this thread, or in any where the flag is the process's."""
    shared = _cured is None and hasattr(symbolic_trace, FLAG)
    code = inspect.unwrap(symbolic_trace.Tracer.trace).__code__
    frames = sys._current_frames()
    for thread in frames if shared else [threading.get_ident()]:
        frame: FrameType | None = frames[thread]
        while frame is not None:
            if frame.f_code is code:
                return True
            frame = frame.f_back
    return False
