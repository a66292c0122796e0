"""What torch does with several threads, stock or cured: `python tests/racing.py stock|cured SCENARIO...` prints JSON.

Each scenario is a function without arguments; a fresh process runs them in the order given, so that the stock ones may
leave the process broken.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], capture_output=True, text=True, check=False, env=environment
    )


def race(kind: str, *scenarios: str, **variables: str) -> Any:
    """What scenarios of tests/racing.py gave in one fresh process, stock or cured: a dictionary, or the only answer."""
    done = run(__file__, kind, *scenarios, **variables)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found if len(scenarios) > 1 else found[scenarios[0]]


compiled_by: Any = torch.compile  # without its types, which do not take a lambda


def chain(length: int) -> Callable[[Tensor], Tensor]:
    """A function whose graph is as long as one likes."""

    def function(x: Tensor) -> Tensor:
        for _ in range(length):
            x = torch.sin(x) * 1.01 + x.cos()
        return x.sum()

    return function


def calls(wanted: int = 100_000) -> dict[str, int]:
    """One thread calls a warm compiled function, `wanted` times at least, while another traces six graphs or more."""
    count: Counter[str] = Counter()
    warm: Any = compiled_by(lambda x: torch.sin(x) + 1, backend="eager")
    x = torch.ones(4)
    warm(x)
    compiled_by(chain(1), backend="aot_eager")(torch.ones(8, requires_grad=True)).backward()  # what imports it needs
    ended = threading.Event()

    def caller() -> None:
        while not ended.is_set() or count["answered"] + count["failed"] < wanted:
            try:
                warm(x)
                count["answered"] += 1
            except RuntimeError as error:
                count["failed" if "FX to symbolically trace" in str(error) else str(error)] += 1

    sys.setswitchinterval(0.0005)
    thread = threading.Thread(target=caller)
    thread.start()
    compiled = 0
    while compiled < 6 or count["answered"] + count["failed"] < wanted:
        compiled_by(chain(6 + compiled % 6), backend="aot_eager")(
            torch.ones(8 + compiled, requires_grad=True)
        ).backward()
        compiled += 1
    ended.set()
    thread.join()
    return {"failed": 0, **count, "compiled": compiled}


def held(trace: Callable[[Callable[[], None]], object], meanwhile: Callable[[], Any]) -> Any:
    """Run `trace` in another thread, stop it in the middle, run `meanwhile` here, let it end."""
    inside, go_on = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def stop() -> None:
        inside.set()
        assert go_on.wait(120)

    def work() -> None:
        try:
            trace(stop)
        except BaseException as error:  # noqa: BLE001  # raised below, in the thread that can fail
            failures.append(error)
            inside.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(120)
    try:
        answer = meanwhile()
    finally:
        go_on.set()
        thread.join()
    if failures:
        raise failures[0]
    return answer


def attempt(function: Callable[[], object]) -> str:
    try:
        return str(function())
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the answer
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"


def traced_with(stop: Callable[[], None]) -> None:
    def function(x: Any) -> Any:
        stop()
        return x + 1

    torch.fx.symbolic_trace(function)


def compiled_with(stop: Callable[[], None]) -> None:
    def backend(module: Any, inputs: Any) -> Any:
        stop()
        return module.forward

    compiled_by(lambda x: x + 1, backend=backend)(torch.ones(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def other_modules() -> str:
    """An ordinary module of this thread, called while another thread traces a function."""
    net, x = Net(), torch.ones(1, 2)
    return held(traced_with, lambda: attempt(lambda: tuple(net(x).shape)))  # type: ignore[no-any-return]


def compiling_seen() -> bool:
    """Whether this thread believes that it compiles, while another does."""
    return bool(held(compiled_with, torch.compiler.is_compiling))


def optimizer() -> str:
    """An optimizer's step in this thread while another compiles; how far it is from one taken in peace."""

    def step() -> Tensor:
        weight = nn.Parameter(torch.linspace(-1, 1, 7))
        adam = torch.optim.AdamW([weight], lr=0.1, foreach=False)
        for turn in range(3):
            weight.grad = torch.cos(weight.detach() * 3 + turn)
            adam.step()
        return weight.detach()

    return attempt(lambda: float((held(compiled_with, step) - step()).abs().max()))


def poison() -> dict[str, object]:
    """This thread enters the environment of an eager higher-order op while another traces, and leaves it afterwards."""
    import torch.fx._symbolic_trace as symbolic_trace
    from torch._higher_order_ops.utils import _set_compilation_env

    warm: Any = compiled_by(lambda x: x * 2, backend="eager")
    warm(torch.ones(2))
    environment = _set_compilation_env()
    held(traced_with, environment.__enter__)
    environment.__exit__(None, None, None)
    return {"flag": symbolic_trace.is_fx_symbolic_tracing(), "call": attempt(lambda: warm(torch.ones(2)).sum().item())}


def wrapped_before() -> str:
    """Wrapped by torch.compile before the cure (if any) is put in: called while another thread traces."""
    return held(traced_with, lambda: attempt(lambda: EARLY(torch.ones(2)).sum().item()))  # type: ignore[no-any-return]


class Body(nn.Module):
    """A graph of its own for each depth: attention without a mask, a gate, a normalisation."""

    def __init__(self, depth: int, generator: torch.Generator) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(depth))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = x + nn.functional.scaled_dot_product_attention(y, x, y) * torch.sigmoid(y)
        return nn.functional.rms_norm(x, (8,)).square().sum()


def trained(depth: int, seed: int, backend: str, gated: bool) -> list[Tensor]:
    """Four steps of a compiled body, the first one through the gate: the losses, and the parameters they end with."""
    from dflash.gate import first_call

    generator = torch.Generator().manual_seed(seed * 100 + depth)
    body = Body(depth, generator)
    body.compile(backend=backend, fullgraph=True, dynamic=False)
    adam = torch.optim.AdamW(body.parameters(), lr=0.05, foreach=False)
    losses = []
    for _ in range(4):
        with first_call((depth, seed)) if gated else nullcontext():
            loss = body(torch.randn(2, 5, 8, generator=generator))
            adam.zero_grad()
            loss.backward()
        adam.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in body.parameters())]


def together(seed: int, backend: str, gated: bool, at_once: bool) -> list[list[Tensor] | str]:
    """Three threads train three bodies, at once or one after the other: what each has, or why it failed."""
    from dflash.gate import forget, thread

    torch.compiler.reset()
    forget()
    answers: list[list[Tensor] | str] = ["not done"] * 3
    barrier = threading.Barrier(3 if at_once else 1)

    def work(index: int) -> None:
        barrier.wait()
        try:
            answers[index] = trained(index + 1, seed, backend, gated)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the answer
            answers[index] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"

    threads = [thread(work, index) for index in range(3)]
    for worker in threads:
        worker.start()
        if not at_once:
            worker.join()
    for worker in threads:
        worker.join()
    return answers


def three(seeds: int = 6, backend: str = "aot_eager", gated: bool = True) -> dict[str, int]:
    """How many of the results of three threads at once equal a serial run's bit for bit."""
    count: Counter[str] = Counter({"equal": 0, "different": 0, "failed": 0})
    sys.setswitchinterval(0.0005)
    for seed in range(seeds):
        alone, at_once = (together(seed, backend, gated, again) for again in (False, True))
        for one, other in zip(alone, at_once, strict=True):
            assert isinstance(one, list), one
            if isinstance(other, str):
                count["failed"] += 1
            else:
                same = all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
                count["equal" if same else "different"] += 1
    return dict(count)


def three_ungated() -> dict[str, int]:
    return three(gated=False)


def three_by_inductor() -> dict[str, int]:
    return three(seeds=1, backend="inductor")


def traceable() -> dict[str, str]:
    """What make_fx and symbolic_trace make of what torch can trace, and how it refuses what it cannot."""
    from torch._higher_order_ops.scan import scan
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.nn.attention.flex_attention import flex_attention
    from torch.utils.checkpoint import checkpoint

    q, x = torch.linspace(0, 1, 64).view(1, 1, 8, 8), torch.linspace(0, 1, 4)
    compiled: Any = compiled_by(lambda x: x * 2, backend="eager")
    functions: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "flex": (lambda q: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + (i - j)), (q,)),
        "cond": (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), (x,)),
        "scan": (lambda x: scan(lambda c, y: (c + y, c * y), torch.zeros(()), x), (x,)),
        "while": (
            lambda x: torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x)),
            (x,),
        ),
        "gradient": (torch.func.grad(curve), (x,)),
        "checkpoint": (partial(checkpoint, torch.sin, use_reentrant=False), (x,)),
        "compiled": (compiled, (x,)),
        "module": (Net(), (torch.ones(1, 2),)),
    }
    answers = {}
    for name, (function, inputs) in functions.items():
        for mode in ("real", "symbolic"):
            answers[f"{name}, {mode}"] = attempt(lambda: make_fx(function, tracing_mode=mode)(*inputs).code)  # noqa: B023
        torch.compiler.reset()
    answers["symbolic_trace"] = str(torch.fx.symbolic_trace(Net()).graph)
    answers["scripted"] = attempt(lambda: torch.jit.script(scripted)(x).sum().item())
    answers["eager flex"] = attempt(lambda: torch.as_tensor(flex_attention(q, q, q)).sum().item())
    return answers


def curve(x: Tensor) -> Tensor:
    return (x.sin() * x).sum()


def scripted(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return x
    return x + 1


def keys() -> dict[str, object]:
    """The cache entries and generated sources of a small training step, by name, and what was found in the cache.

    The directory is the caller's.
    """
    from torch._dynamo.utils import counters
    from torch._inductor.codecache import torch_key
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    x = torch.linspace(0, 1, 16, requires_grad=True)
    compiled_by(lambda x: torch.softmax(x * 3, 0).square().sum())(x).backward()
    root = Path(cache_dir())
    names = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    # an entry is <cache>/.../<key>/<hash of contents that hold elapsed times>: the key is what counts
    entries = {str(Path(name).parent) for name in names if name.startswith(("fxgraph", "aotautograd"))}
    sources = {name for name in names if name.endswith((".py", ".cpp"))}
    counts = {
        "autograd_hit": counters["aot_autograd"]["autograd_cache_hit"],
        "autograd_miss": counters["aot_autograd"]["autograd_cache_miss"],
        "fx_miss": counters["inductor"]["fxgraph_cache_miss"],
    }
    return {"torch_key": torch_key().hex(), "entries": sorted(entries), "sources": sorted(sources), "counts": counts}


def main(kind: str, names: list[str]) -> None:
    if kind == "cured":
        from dflash.tracing import cure

        cure()
    print(json.dumps({name: globals()[name]() for name in names}))


if __name__ == "__main__":
    EARLY: Any = compiled_by(lambda x: x + 1, backend="eager")
    torch.set_num_threads(1)
    EARLY(torch.ones(2))
    main(sys.argv[1], sys.argv[2:])
