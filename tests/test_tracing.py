"""The race between one thread's compilation and another's calls: as torch is, and cured. The same on every torch."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from racing import race, run

from dflash import perthread, tracing
from env.errors import Exit, Failure

SCENARIOS = ("calls", "other_modules", "compiling_seen", "optimizer", "wrapped_before", "traceable", "poison")


@cache
def answers(kind: str) -> dict[str, Any]:
    """The answers of every scenario above."""
    found: dict[str, Any] = race(kind, *SCENARIOS)
    return found


def test_cured_no_call_fails_while_another_thread_compiles() -> None:
    calls = answers("cured")["calls"]
    assert calls["failed"] == 0
    assert calls["answered"] >= 100_000
    assert calls["compiled"] >= 6


def test_where_torch_keeps_one_flag_for_the_process_stock_calls_fail_while_another_thread_compiles() -> None:
    failed = answers("stock")["calls"]["failed"]
    assert (failed > 0) == (tracing.flag_shape() == "process-wide"), failed


def test_a_function_wrapped_before_the_cure_is_cured_too() -> None:
    assert answers("cured")["wrapped_before"] == "4.0"
    stock = answers("stock")["wrapped_before"]
    assert ("FX to symbolically trace" in stock) == (tracing.flag_shape() == "process-wide"), stock


def test_saving_and_restoring_the_flag_out_of_order_does_not_poison_it() -> None:
    assert answers("cured")["poison"] == {"flag": False, "call": "4.0"}
    stock = answers("stock")["poison"]
    assert stock["flag"] == (tracing.flag_shape() == "process-wide")
    assert ("FX to symbolically trace" in stock["call"]) == stock["flag"]


def test_an_ordinary_module_of_another_thread_is_not_taken_into_a_trace() -> None:
    assert answers("stock")["other_modules"].startswith("NameError")
    assert answers("cured")["other_modules"] == "(1, 2)"


def test_a_thread_does_not_believe_that_it_compiles_because_another_does() -> None:
    assert answers("stock")["compiling_seen"] == (tracing.session_shape() == "process-wide")
    assert not answers("cured")["compiling_seen"]


def test_an_optimizer_steps_to_the_same_bits_while_another_thread_compiles() -> None:
    assert (answers("stock")["optimizer"] != "0.0") == (tracing.session_shape() == "process-wide")
    assert answers("cured")["optimizer"] == "0.0"


def test_what_stock_torch_traces_is_traced_the_same() -> None:
    stock, cured = answers("stock")["traceable"], answers("cured")["traceable"]
    for name in ("flex", "cond", "scan", "while", "gradient", "checkpoint"):
        assert "def forward" in stock[f"{name}, real"], stock[f"{name}, real"]
    assert cured == stock


def test_no_cache_key_moves_a_cured_process_finds_everything_that_a_stock_one_cached(tmp_path: Path) -> None:
    stock, cured = (race(kind, "keys", TORCHINDUCTOR_CACHE_DIR=str(tmp_path)) for kind in ("stock", "cured"))
    assert stock["counts"] == {"autograd_hit": 0, "autograd_miss": 1, "fx_miss": 2}
    assert cured["counts"] == {"autograd_hit": 1, "autograd_miss": 0, "fx_miss": 0}
    for name in ("torch_key", "entries", "sources"):
        assert cured[name] == stock[name]
    assert len(stock["entries"]) >= 3


# In this process, cured from here on


@pytest.fixture(autouse=True)
def cured(request: pytest.FixtureRequest) -> tracing.Cure:
    return tracing.cure()


def test_the_cure_is_put_in_once_and_tells_what_it_found(cured: tracing.Cure) -> None:
    assert tracing.cure() is cured
    assert tracing.cured() is cured
    assert cured.torch == torch.__version__
    assert cured.read
    assert ("the tracing flag is kept per thread" in cured.done) == (cured.flag == "process-wide")
    assert ("«compiling» is kept per thread" in cured.done) == (cured.session == "process-wide")


def test_the_flag_read_as_an_attribute_answers_for_its_thread(cured: tracing.Cure) -> None:
    seen: list[bool] = []
    name = tracing.FLAG if cured.flag == "process-wide" else None

    def read(times: int = 5000) -> list[bool]:  # often enough for the interpreter to have specialised the attribute
        module: Any = perthread.symbolic_trace
        return [bool(getattr(module, name)) if name else module._get_is_fx_tracing() for _ in range(times)]

    def function(x: Any) -> Any:
        seen.extend(read(2))
        return x

    assert not any(read())
    torch.fx.symbolic_trace(function)
    assert seen == [True, True]
    assert not any(read(2))


def test_torchs_functions_still_look_like_torchs() -> None:
    trace = inspect.unwrap(torch.fx.Tracer.trace)
    assert trace.__code__.co_qualname == "Tracer.trace"
    assert trace.__code__.co_filename == perthread.symbolic_trace.__file__
    assert "def trace(" in inspect.getsource(trace)
    assert list(inspect.signature(trace).parameters) == ["self", "root", "concrete_args"]


# Poison


def poisoned(function: Callable[[], None]) -> None:
    """Leave the flag set: the environment of an eager higher-order op is entered in a trace and left after it."""
    from torch._higher_order_ops.utils import _set_compilation_env

    environment = _set_compilation_env()

    def traced(x: Any) -> Any:
        environment.__enter__()
        return x + 1

    torch.fx.symbolic_trace(traced)
    function()
    environment.__exit__(None, None, None)


def test_a_flag_left_set_is_found_reported_with_who_set_it_and_healed() -> None:
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    warm = torch.compile(triple, backend="eager")
    warm(torch.ones(2))
    assert tracing.heal() is None
    poisoned(lambda: None)
    with pytest.raises(RuntimeError, match="FX to symbolically trace"):
        warm(torch.ones(2))
    found = tracing.heal()
    assert found is not None
    names = [name for _, _, name in found.set_by]
    assert "_set_compilation_env" in names[:2]
    assert "poisoned" in names
    assert any("test_tracing.py" in line for line in found.lines())
    assert warm(torch.ones(2)).sum() == 6
    assert tracing.heal() is None


def test_a_flag_set_by_a_trace_that_runs_is_not_poison() -> None:
    seen: list[object] = []

    def traced(x: Any) -> Any:
        seen.append(tracing.heal())
        seen.append(tracing.flag())
        return x

    torch.fx.symbolic_trace(traced)
    assert seen == [None, True]


def test_looking_for_poison_costs_next_to_nothing() -> None:
    import timeit

    assert min(timeit.repeat(tracing.heal, number=1000, repeat=5)) / 1000 < 50e-6


# Refusals, each in a process of its own, where torch was changed beforehand


def refused(change: str) -> str:
    program = f"""
        import torch, torch.fx._symbolic_trace as symbolic_trace
        {change}
        from dflash import tracing
        from env.errors import Failure, report
        import sys
        try:
            tracing.cure()
        except Failure as failure:
            sys.exit(report(failure))
    """
    done = run("-c", textwrap.dedent(program))
    assert done.returncode == Exit.HOST, done.stderr
    return done.stderr


def test_a_torch_whose_guard_somebody_else_has_replaced_is_refused() -> None:
    text = refused("symbolic_trace.is_fx_symbolic_tracing = lambda: False")
    if tracing.flag_shape() == "process-wide":
        assert "is not as it was read" in text


@pytest.mark.parametrize(
    "change",
    [
        "vars(symbolic_trace).pop('_is_fx_tracing_flag', None); vars(symbolic_trace).pop('_is_fx_tracing_tls', None)",
        "torch.compiler._is_compiling_flag = None",
        "symbolic_trace.Tracer.trace = lambda self, root, concrete_args=None, more=None: None",
        "symbolic_trace._Patcher.patch_method = print",
    ],
)
def test_an_unknown_shape_of_torch_is_refused_with_its_version_the_versions_read_and_a_way_out(change: str) -> None:
    text = refused(change)
    assert f"torch {torch.__version__} keeps its tracing state in a shape that was never read" in text
    assert f"read in torch {', '.join(tracing.READ_IN)}" in text
    assert "`nox -s doctor -- --compile`" in text


def test_the_cure_is_refused_in_a_worker_thread_but_one_that_is_in_can_be_asked_for_there() -> None:
    program = """
        import threading
        from dflash import tracing
        from env.errors import Failure
        def work():
            try:
                print(tracing.cure().torch)
            except Failure as failure:
                print(int(failure.code), failure.message)
        for _ in range(2):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            tracing.cure()
    """
    first, second = run("-c", textwrap.dedent(program)).stdout.splitlines()
    assert first == f"{Exit.HOST:d} the cure for torch's tracing state cannot be put in from a worker thread"
    assert second == torch.__version__


def test_the_cure_is_refused_while_a_trace_runs() -> None:
    program = """
        import sys, torch
        from dflash import tracing
        from env.errors import Failure, report
        def traced(x):
            tracing.cure()
            return x
        try:
            torch.fx.symbolic_trace(traced)
        except Failure as failure:
            sys.exit(report(failure))
    """
    done = run("-c", textwrap.dedent(program))
    assert done.returncode == Exit.HOST
    assert "while a trace runs" in done.stderr


def test_a_refusal_changes_nothing() -> None:
    program = """
        import torch
        before = torch.fx.Tracer.trace.__code__, torch.fx._symbolic_trace.is_fx_tracing.__code__
        torch.compiler._is_compiling_flag = None
        from dflash import tracing
        from env.errors import Failure
        try:
            tracing.cure()
        except Failure:
            assert tracing.cured() is None
            assert before == (torch.fx.Tracer.trace.__code__, torch.fx._symbolic_trace.is_fx_tracing.__code__)
            print("unchanged")
    """
    assert run("-c", textwrap.dedent(program)).stdout == "unchanged\n"


def test_failures_name_the_exit_code_of_a_host_that_does_not_fit() -> None:
    with pytest.raises(Failure) as caught:
        tracing._own(perthread.symbolic_trace, print, "x", print)
    assert caught.value.code is Exit.HOST
