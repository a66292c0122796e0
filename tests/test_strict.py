"""Everything that would be slow in silence is seen stopping, on real compiled functions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from dflash import gate, tracing
from dflash.strict import explain, explained, strict
from env.errors import Exit, Failure

ROOT = Path(__file__).parent.parent
compiled_by: Any = torch.compile


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    tracing.cure()
    torch.compiler.reset()
    gate.forget()
    yield
    torch.compiler.reset()


def doubled(x: Tensor) -> Tensor:
    return x * 2


def warm() -> Callable[[Tensor], Tensor]:
    """A compiled function that has been called with four float32 numbers."""
    function: Callable[[Tensor], Tensor] = compiled_by(doubled, backend="eager", fullgraph=True, dynamic=False)
    function(torch.ones(4))
    return function


def stopped(function: Callable[[], object]) -> Failure:
    with pytest.raises(Failure) as caught, strict():
        function()
    assert caught.value.code is Exit.TRAINING
    return caught.value


@pytest.mark.parametrize(
    ("argument", "guard"),
    [
        (torch.ones(5), "tensor 'x' size mismatch at index 0. expected 4, actual 5"),
        (torch.ones(4, dtype=torch.float64), "tensor 'x' dtype mismatch. expected Float, actual Double"),
        (torch.ones(4, requires_grad=True), "tensor 'x' requires_grad mismatch. expected requires_grad=0"),
        (torch.ones(4, device="meta"), "tensor 'x' dispatch key set mismatch. expected"),
    ],
)
def test_a_recompile_stops_the_run_and_names_the_function_and_the_failed_guard(argument: Tensor, guard: str) -> None:
    function = warm()
    failure = stopped(lambda: function(argument))
    assert re.search(r"`doubled` \(.*test_strict.py:\d+\) would be compiled again", failure.message)
    assert len(failure.details) == 1
    assert failure.details[0].startswith(guard)


def test_a_recompile_because_of_a_setting_names_the_setting() -> None:
    function = warm()
    with torch.no_grad():
        assert "grad_mode" in stopped(lambda: function(torch.ones(4))).details[0]


def test_a_module_whose_attribute_changed_is_not_compiled_again() -> None:
    class Scaled(nn.Module):
        scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    module: Any = Scaled()
    module.compile(backend="eager", fullgraph=True, dynamic=False)
    module(torch.ones(2))
    module.scale = 3.0
    assert "scale" in stopped(lambda: module(torch.ones(2))).details[0]


def test_hitting_the_recompile_limit_stops_the_run_and_names_the_failed_guard() -> None:
    """A compilation for a new device is no recompile, but it counts: here the second is one too many."""
    function = warm()

    def on_another_device() -> None:
        with gate.first_call("on meta"):
            function(torch.ones(4, device="meta"))

    with torch._dynamo.config.patch(recompile_limit=1):
        failure = stopped(on_another_device)
    assert "as often as it may" in failure.message
    assert failure.details[0].startswith("`doubled`")
    assert "dispatch key set mismatch" in failure.details[1]


def test_a_graph_break_in_a_function_that_must_be_one_graph_stops_the_run_with_its_reason_and_place() -> None:
    def broken(x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    failure = stopped(lambda: compiled_by(broken, backend="eager", fullgraph=True)(torch.ones(2)))
    assert "Call to `torch._dynamo.graph_break()`" in failure.message
    assert any("test_strict.py" in line and "in broken" in line for line in failure.details)


def test_a_graph_break_stops_the_run_even_where_torch_was_allowed_to_split_the_function() -> None:
    def printing(x: Tensor) -> Tensor:
        x = x + 1
        print(end="")
        return x * 2

    failure = stopped(lambda: compiled_by(printing, backend="eager")(torch.ones(2)))
    assert "print" in "\n".join(failure.details)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # torch says it once, we each time
def test_an_uncompiled_flex_attention_stops_the_run_each_time() -> None:
    q = torch.ones(1, 1, 16, 16)
    for _ in range(2):
        failure = stopped(lambda: flex_attention(q, q, q))
        assert "not fused" in failure.message
        assert failure.details == ("queries (1, 1, 16, 16), torch.float32, on cpu",)


def test_a_flex_attention_compiled_by_a_backend_that_does_not_fuse_it_stops_the_run() -> None:
    q = torch.ones(1, 1, 16, 16)
    function = compiled_by(lambda q: flex_attention(q, q, q), backend="aot_eager", fullgraph=True)
    assert "not fused" in stopped(lambda: function(q)).message


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_outside_of_strict_flex_attention_runs_as_torch_wants() -> None:
    with strict():
        pass
    q = torch.ones(1, 1, 16, 16)
    assert torch.equal(torch.as_tensor(flex_attention(q, q, q)), q)


def test_a_fused_flex_attention_passes() -> None:
    q, k, v = torch.ones(3, 1, 1, 32, 16).unbind()
    with strict(), torch.no_grad():
        assert torch.allclose(compiled_by(flex_attention, fullgraph=True)(q, k, v), v)


def test_a_poisoned_flag_stops_the_run_is_told_with_who_set_it_and_is_healed() -> None:
    from torch._higher_order_ops.utils import _set_compilation_env

    function = warm()
    environment = _set_compilation_env()

    def traced(x: Any) -> Any:
        environment.__enter__()
        return x

    torch.fx.symbolic_trace(traced)
    environment.__exit__(None, None, None)
    failure = stopped(lambda: function(torch.ones(4)))
    assert "FX tracing is active" in failure.message
    assert any("test_strict.py" in line for line in failure.details)
    assert function(torch.ones(4)).sum() == 8


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("torch._dynamo.config.disable = True", "TORCH_COMPILE_DISABLE"),
        ("torch.compiler.set_stance('force_eager')", "'force_eager'"),
        ("torch.compiler.set_stance('eager_on_recompile')", "'eager_on_recompile'"),
        (
            "import torch.nn.attention.flex_attention as m; m._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True",
            "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG",
        ),
    ],
)
def test_a_setting_that_runs_things_uncompiled_is_refused_at_once(setting: str, named: str) -> None:
    program = f"""
import sys, torch
from dflash.strict import strict
from env.errors import Failure, report
{setting}
try:
    with strict():
        pass
except Failure as failure:
    sys.exit(report(failure))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == Exit.TRAINING, done.stderr
    assert named in done.stderr


def test_what_is_not_about_slow_code_passes_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), strict():
        _ = 1 // 0
    with pytest.raises(RuntimeError, match="size of tensor"), strict():
        torch.ones(2) + torch.ones(3)
    assert explain(RuntimeError("no memory")) is None


def test_leaving_strict_puts_every_setting_back_and_compiles_nothing_anew() -> None:
    function = warm()
    config = torch._dynamo.config
    before = (config.error_on_recompile, config.fail_on_recompile_limit_hit, config.suppress_errors)
    with strict():
        inside = (config.error_on_recompile, config.fail_on_recompile_limit_hit, config.suppress_errors)
        function(torch.ones(4))
    assert inside == (True, True, False)
    assert (config.error_on_recompile, config.fail_on_recompile_limit_hit, config.suppress_errors) == before
    function(torch.ones(4))
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    function(torch.ones(5))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled + 1


def test_the_first_call_on_another_device_is_no_recompile_but_its_second_shape_is() -> None:
    function = warm()
    with strict(), gate.first_call(("doubled", "meta")):
        function(torch.ones(4, device="meta"))
    with strict():
        function(torch.ones(4))
        function(torch.ones(4, device="meta"))

    def another_shape() -> None:
        with gate.first_call(("doubled", "cpu, longer")):
            function(torch.ones(5))

    assert "tensor 'x' size mismatch at index 0. expected 4, actual 5" in stopped(another_shape).details


def test_a_worker_thread_is_as_strict_as_the_one_that_made_it() -> None:
    function = warm()
    caught: list[BaseException] = []

    def work() -> None:
        try:
            with explained():
                function(torch.ones(6))
        except Failure as failure:
            caught.append(failure)

    with strict():
        thread = gate.thread(work, name="worker")
        thread.start()
        thread.join()
    assert len(caught) == 1
    assert "expected 4, actual 6" in str(caught[0])
