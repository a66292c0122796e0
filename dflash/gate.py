"""One thread compiles at a time, and a thread that has compiled never waits.

torch's compiler is not made for several threads: beyond the flag that `dflash.tracing` cures there are maps, caches and
environment variables that it keeps for the process. So the first call of each (graph, device) pair passes a gate, one
pair at a time; afterwards the pair is known and its calls pass without touching a lock.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds after which a waiting thread says whom it waits for; a cold compile of one graph takes less."""

_turn = threading.RLock()
_known: set[Hashable] = set()
_holder = ""


class _Here(threading.local):
    keys: tuple[Hashable, ...] = ()


_here = _Here()


@contextmanager
def first_call(key: Hashable) -> Iterator[None]:
    """Hold the gate while `key`, a (graph, device) pair, is called for the first time; pass at once ever after.

    What it covers should be a forward and the backward that belongs to it, as both compile; never a barrier or a
    collective that waits for other threads, which may wait at the gate. A call that fails leaves the key unknown.
    Inside a backward nobody waits: the thread that runs the backward holds the gate, or knows the key.
    """
    if key in _known or torch._C._current_graph_task_id() != -1:  # noqa: SLF001  # the only way to ask
        yield
        return
    with _taken(key):
        if key in _known:  # another thread called it meanwhile
            yield
            return
        before, _here.keys = _here.keys, (*_here.keys, key)
        try:
            yield
        finally:
            _here.keys = before
        _known.add(key)


def first_calls() -> tuple[Hashable, ...]:
    """The keys that this thread calls for the first time just now; while there are any, it may compile."""
    return _here.keys


def forget() -> None:
    """Take every pair for new again, as after `torch.compiler.reset`."""
    _known.clear()


def thread(target: Callable[..., object], *args: Any, name: str | None = None) -> threading.Thread:
    """A thread, not yet started, that sees the configuration of the one that makes it.

    torch from 2.12 on keeps overrides of its configuration in context variables, which a plain thread starts without:
    it would compile with other settings, and under other cache keys.
    """
    return threading.Thread(target=contextvars.copy_context().run, args=(target, *args), name=name)


@contextmanager
def _taken(key: Hashable) -> Iterator[None]:
    global _holder  # noqa: PLW0603  # for the message below; written under the gate
    waited = 0.0
    while not _turn.acquire(timeout=PATIENCE):
        waited += PATIENCE
        log.warning("%s has waited %.0f s for the first call of %s; %s", _name(), waited, key, _holder)
    before, _holder = _holder, f"{_name()} is in the first call of {key}"
    try:
        yield
    finally:
        _holder = before
        _turn.release()


def _name() -> str:
    return f"thread {threading.current_thread().name}"
