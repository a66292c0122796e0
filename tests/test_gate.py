"""One thread compiles at a time, warm threads run on, and three that train at once get what they get alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from racing import race
from torch import Tensor
from torch._dynamo.utils import counters

from dflash import gate, tracing
from dflash.gate import first_call
from dflash.strict import strict

compiled_by: Any = torch.compile


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    tracing.cure()
    torch.compiler.reset()
    gate.forget()
    yield
    torch.compiler.reset()
    gate.forget()


class Holder:
    """A thread in the middle of the first call of a key."""

    def __init__(self, key: str) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.work, args=(key,), name="holder")

    def work(self, key: str) -> None:
        with first_call(key):
            self.inside.set()
            assert self.go_on.wait(120)

    def __enter__(self) -> None:
        self.thread.start()
        assert self.inside.wait(120)

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self.thread.join()


def test_first_calls_of_different_pairs_take_turns() -> None:
    running, most = 0, 0

    def work(key: int) -> None:
        nonlocal running, most
        with first_call(key):
            running += 1
            most = max(most, running)
            time.sleep(0.02)
            running -= 1

    threads = [threading.Thread(target=work, args=(key,)) for key in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_warm_thread_does_not_wait_for_another_threads_first_call() -> None:
    warm = compiled_by(lambda x: x + 1, backend="eager", fullgraph=True)
    with first_call("warm"):
        warm(torch.ones(4))
    longest = 0.0
    with Holder("cold"):
        for _ in range(2000):
            start = time.perf_counter()
            with first_call("warm"):
                warm(torch.ones(4))
            longest = max(longest, time.perf_counter() - start)
    assert longest < 60  # it would have waited for ever


def test_a_warm_thread_runs_on_while_another_really_compiles() -> None:
    warm = compiled_by(lambda x: x + 1, backend="eager", fullgraph=True)
    with first_call("warm"):
        warm(torch.ones(4))
    ended = threading.Event()

    def long(x: Tensor) -> Tensor:
        for _ in range(40):
            x = torch.sin(x) * 1.01
        return x.sum()

    def compile_it() -> None:
        with first_call("long"):
            compiled_by(long, backend="aot_eager", fullgraph=True)(torch.ones(4, requires_grad=True)).backward()
        ended.set()

    thread = threading.Thread(target=compile_it)
    thread.start()
    answered = 0
    while not ended.is_set():
        with first_call("warm"):
            warm(torch.ones(4))
        answered += 1
    thread.join()
    assert answered > 100


def test_three_threads_that_call_the_same_graph_for_the_first_time_compile_it_once() -> None:
    function = compiled_by(lambda x: x.sin().sum(), backend="aot_eager", fullgraph=True, dynamic=False)
    before = counters["stats"]["unique_graphs"]
    failures: list[BaseException] = []
    barrier = threading.Barrier(3)

    def work() -> None:
        barrier.wait()
        try:
            with first_call("same"):
                function(torch.ones(5, requires_grad=True)).backward()
        except BaseException as error:  # noqa: BLE001  # asserted below
            failures.append(error)

    with strict():
        threads = [gate.thread(work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert counters["stats"]["unique_graphs"] == before + 1


def test_a_first_call_that_fails_leaves_the_pair_unknown_and_the_gate_open() -> None:
    with pytest.raises(ZeroDivisionError), first_call("key"):
        _ = 1 // 0
    with first_call("key"):
        assert gate.first_calls() == ("key",)
    with first_call("key"):
        assert gate.first_calls() == ()


def test_a_first_call_inside_another_of_the_same_thread_passes() -> None:
    with first_call("outer"), first_call("inner"):
        assert gate.first_calls() == ("outer", "inner")


def test_nobody_waits_inside_a_backward_whose_thread_holds_the_gate() -> None:
    seen: list[str] = []

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            with first_call("recomputed"):
                seen.append("passed")
            return grads[0]

    x = torch.ones(2, requires_grad=True)
    with Holder("another"):
        Recomputed.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == ["passed"]


def test_who_waits_for_long_says_for_whom(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(gate, "PATIENCE", 0.05)
    caplog.set_level(logging.WARNING, logger="dflash.gate")
    holder = Holder("cuda:0")
    waiting = threading.Thread(target=lambda: holder_passed(first_call("cuda:1")), name="waiting")
    with holder:
        waiting.start()
        while not caplog.records:
            time.sleep(0.01)
    waiting.join()
    message = caplog.records[0].getMessage()
    assert "thread waiting has waited" in message
    assert "first call of cuda:1; thread holder is in the first call of cuda:0" in message


def holder_passed(call: Any) -> None:
    with call:
        pass


def test_a_known_pair_costs_microseconds() -> None:
    with first_call("key"):
        pass
    start = time.perf_counter()
    for _ in range(2000):
        with first_call("key"):
            pass
    assert (time.perf_counter() - start) / 2000 < 1e-3


def test_a_worker_thread_sees_the_configuration_of_the_one_that_made_it() -> None:
    config: Any = torch._dynamo.config
    seen: dict[str, int] = {}

    def look(name: str) -> None:
        seen[name] = config.recompile_limit

    with config.patch(recompile_limit=77):
        threads = [threading.Thread(target=look, args=("plain",)), gate.thread(look, "made by the gate")]
        for thread in threads:
            thread.start()
            thread.join()
    assert seen["made by the gate"] == 77
    # where settings are per thread (torch 2.12 on), a plain thread does not see it: that is what it is for
    per_thread = any("ContextVar" in type(value).__name__ for value in vars(config._config["recompile_limit"]).values())
    assert (seen["plain"] == 77) != per_thread


def test_what_a_worker_thread_sets_stays_its_own_where_settings_are_per_thread() -> None:
    config: Any = torch._dynamo.config
    before = config.recompile_limit

    def change() -> None:
        with config.patch(recompile_limit=78):
            pass

    thread = gate.thread(change)
    thread.start()
    thread.join()
    assert config.recompile_limit == before


def test_three_threads_train_at_once_to_the_bits_of_a_serial_run() -> None:
    assert race("cured", "three") == {"equal": 18, "different": 0, "failed": 0}


def test_three_threads_train_at_once_to_the_bits_of_a_serial_run_with_inductors_kernels() -> None:
    assert race("cured", "three_by_inductor") == {"equal": 3, "different": 0, "failed": 0}


def test_without_the_gate_the_cure_alone_never_lets_bits_differ() -> None:
    """What fails without the gate is torch's bookkeeping of compile times (2.10), loudly; results are right or none."""
    assert race("cured", "three_ungated")["different"] == 0
