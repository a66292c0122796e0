"""Nothing turns into slow code in silence: what torch would let pass with a warning, or without, stops the run.

torch.compile goes on without being fast in several ways: it compiles anew when a guard fails, gives up after the eighth
time and runs the function as it is, splits a function where it cannot follow, skips everything when it is switched off,
and flex attention that is not fused computes the whole score matrix. Inside `strict` each of these raises, and the
failed guard or the reason is printed.

Not covered: operations for which Inductor has no kernel and calls eager code. torch has no public signal for it but a
setting that is part of every cache key.
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
import torch._dynamo  # its configuration and exceptions are documented under this name
from torch._dynamo import convert_frame, exc

from dflash import gate, perthread, tracing
from env.cache import fitting
from env.errors import Exit, Failure

_lock = threading.Lock()
_inside = 0
_dflash: Any = sys.modules[__name__]
_reasons: Any = convert_frame.get_and_maybe_log_recompilation_reasons  # type: ignore[attr-defined]
_watching = False


class _Latest(threading.local):
    """What this thread compiled again last, for the message of a limit that was hit."""

    code: CodeType | None = None
    reasons: tuple[str, ...] = ()


_latest = _Latest()


@contextmanager
def strict() -> Iterator[None]:
    """Stop on a recompile, the recompile limit, a graph break, an unfused flex attention, or a poisoned tracing flag.

    A worker thread that `gate.thread` makes inside it is covered too; wrap its work in `explained` for the sentences.
    A compilation for another device is no recompile while `gate.first_call` covers it: each device has its own.

    Raises:
        Failure: Exit.TRAINING, with the failed guard; also at once, when a setting makes torch.compile run things as
            they are.
    """
    global _inside  # noqa: PLW0603  # one process, one torch
    _refuse_what_switches_compiling_off()
    _watch()
    settings: dict[str, Any] = {
        "error_on_recompile": True,
        "fail_on_recompile_limit_hit": True,
        "suppress_errors": False,
        "error_on_nested_fx_trace": True,
    }
    with torch._dynamo.config.patch(settings), torch._dynamo.error_on_graph_break(True):  # noqa: SLF001  # torch's own names
        with _lock:
            _inside += 1
        try:
            with explained():
                yield
        finally:
            with _lock:
                _inside -= 1


@contextmanager
def explained() -> Iterator[None]:
    """Turn what torch raises when `strict` stops it into a Failure that says why; other exceptions pass.

    Raises:
        Failure: Exit.TRAINING; Exit.HOST, when a kernel does not fit the card.
    """
    try:
        yield
    except Exception as error:
        failure = explain(error)
        if failure is None:
            raise
        raise failure from error


def explain(error: BaseException) -> Failure | None:
    """What an exception of torch's compiler says, as a Failure; None for one about neither slow code nor what fits."""
    text = str(error)
    if isinstance(error, exc.RecompileError):
        return Failure(
            Exit.TRAINING,
            f"{_function(text)} would be compiled again in the middle of the run",
            details=_guards(text),
            hint="keep shapes, types and settings as they were when it was compiled: one configuration is one graph",
        )
    if isinstance(error, exc.FailOnRecompileLimitHit):
        return Failure(
            Exit.TRAINING,
            "torch has compiled one function as often as it may, and would run it uncompiled from here on",
            details=_latest_guards(),
            hint="keep shapes, types and settings as they were when it was compiled",
        )
    if isinstance(error, exc.Unsupported | exc.UncapturedHigherOrderOpError):
        return Failure(
            Exit.TRAINING,
            f"torch cannot compile this as one graph: {text.splitlines()[0]}",
            details=_place(text),
            hint="a graph break would run a part uncompiled: move what cannot be compiled out of the region",
        )
    if isinstance(error, RuntimeError) and "FX to symbolically trace" in text:
        poison = tracing.heal()
        return Failure(
            Exit.TRAINING,
            "a compiled function was called while «FX tracing is active» was set",
            details=poison.lines()
            if poison
            else ("a trace runs in this thread, or `dflash.tracing.cure` was not called",),
            hint="`nox -s doctor -- --compile` shows the flag, who sets it, and whether the cure is in",
        )
    if isinstance(error, RuntimeError) and "found no compiled frames" in text:
        lines = [line.strip(" -") for line in text.splitlines()]
        return Failure(Exit.TRAINING, "a function that should be compiled ran as it is", details=lines)
    return fitting.misfit(error)


def _refuse_what_switches_compiling_off() -> None:
    from torch._dynamo import eval_frame
    from torch.nn.attention import flex_attention

    reasons = []
    if torch._dynamo.config.disable:  # noqa: SLF001
        reasons.append("torch.compile is switched off (TORCH_COMPILE_DISABLE, or torch._dynamo.config.disable)")
    stance = eval_frame._stance.stance  # noqa: SLF001  # torch can set it but not tell it
    if stance not in {"default", "fail_on_recompile"}:
        reasons.append(f"torch.compiler.set_stance is at {stance!r}")
    if flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG:  # noqa: SLF001  # named in torch's own warning
        reasons.append("flex attention is in its debug mode (_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG)")
    if reasons:
        raise Failure(
            Exit.TRAINING,
            "a setting would run uncompiled code in silence",
            details=reasons,
            hint="unset it, or leave compilation out of the configuration",
        )


# What is watched


def _watch() -> None:
    """Be asked when torch is about to compile again, and when flex attention runs unfused. Once a process."""
    global _watching  # noqa: PLW0603
    with _lock:
        if _watching:
            return
        unfused: Any = importlib.import_module("torch._higher_order_ops.flex_attention").sdpa_dense
        if not perthread.same_arguments(unfused, sdpa_dense):
            raise Failure(
                Exit.HOST,
                f"torch {torch.__version__} computes unfused flex attention in a shape that was never read",
                details=(f"read in torch {', '.join(tracing.READ_IN)}",),
            )
        perthread.replace(unfused, sdpa_dense)
        convert_frame.get_and_maybe_log_recompilation_reasons = _recompiling  # type: ignore[attr-defined]
        _watching = True


def _recompiling(*args: Any, **kwargs: Any) -> Any:
    """Let a compilation through that is for another device and expected; else what torch does."""
    try:
        reasons: list[str] = _reasons(*args, **kwargs)
    except exc.RecompileError as error:
        if gate.first_calls() and all(_is_about_the_device(guard) for guard in _guards(str(error))):
            reasons = _reasons(*args, **{**kwargs, "skip_logging": True})  # asked not to log, it does not raise either
        else:
            raise
    _latest.code, _latest.reasons = args[1].f_code, tuple(reasons)
    return reasons


def _is_about_the_device(guard: str) -> bool:
    return any(text in guard for text in ("device index mismatch", "dispatch key set mismatch", "device(type="))


def refuse_unfused(query: Any) -> None:
    """Called from torch's own code for unfused flex attention, with the queries.

    Raises:
        Failure: Exit.TRAINING, inside `strict`.
    """
    if _inside:
        raise Failure(
            Exit.TRAINING,
            "flex attention is not fused: it would compute the whole score matrix",
            details=(f"queries {tuple(query.shape)}, {query.dtype}, on {query.device}",),
            hint="call it inside a function compiled by torch.compile, with the backend `inductor`",
        )


def sdpa_dense(  # noqa: D103  # the code that torch's function gets, see `dflash.perthread`
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    scale: Any,
    kernel_options: Any,
    score_mod_other_buffers: Any = (),
    mask_mod_other_buffers: Any = (),
) -> Any:
    _dflash.refuse_unfused(query)
    buffers = score_mod_other_buffers, mask_mod_other_buffers
    return _dflash.perthread.originals["sdpa_dense"](
        query, key, value, score_mod, block_mask, scale, kernel_options, *buffers
    )


# What torch's messages say


def _function(text: str) -> str:
    found = re.match(r"Recompiling function (\S+) in (.+:\d+)", text)
    return f"`{found[1]}` ({found[2]})" if found else "a compiled function"


def _guards(text: str) -> list[str]:
    """The failed guards of a message, a line each, without the number of the compilation."""
    lines = [line.strip() for line in text.splitlines()]
    return [re.sub(r"^- (\d+/\d+: )?", "", line) for line in lines if line.startswith("- ")]


def _latest_guards() -> list[str]:
    """The function that this thread compiled again last, and the guards that failed."""
    code = _latest.code
    if code is None:
        return []
    guards = _guards("\n".join(f"- {reason}" for reason in _latest.reasons))
    return [f"`{code.co_name}` ({code.co_filename}:{code.co_firstlineno})", *guards]


def _place(text: str) -> list[str]:
    """Explanation and place of a graph break."""
    explanation = re.search(r"Explanation: (.+)", text)
    _, _, place = text.partition("from user code:\n")
    place, _, _ = place.partition("\n\n")
    return [*([explanation[1]] if explanation else []), *(line.strip() for line in place.splitlines() if line.strip())]
