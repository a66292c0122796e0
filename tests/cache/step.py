"""A small function compiled for real, forward and backward, on the CPU: what the tests bake, replay and disturb.

    python step.py CACHE [CHANGE ...]

Prints one JSON object: for the undisturbed step and then for each change alone, counts, keys, details and identity. A
step that would have to compile again is stopped where it would begin: its keys are known by then, and time is saved.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config
from torch._dynamo.utils import counters

from env.cache import factors, store

# as a training process does it: after its imports, before its first compilation
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(sys.argv[1]).absolute())


class WouldCompileError(Exception):
    """Raised where inductor would begin to compile."""


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * w + 0.5).sum()


def another_step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * w + 0.75).sum()


@contextlib.contextmanager
def looked_up() -> Iterator[list[str]]:
    """The keys of the graphs that are looked up, also where AOTAutograd knows them without hashing."""
    from torch._inductor.codecache import FxGraphCache

    keys: list[str] = []
    original = FxGraphCache.load_with_key

    def noting(key: str, *arguments: Any, **more: Any) -> Any:
        keys.append(key)
        return original(key, *arguments, **more)

    setattr(FxGraphCache, "load_with_key", staticmethod(noting))  # noqa: B010  # mypy sees a method
    try:
        yield keys
    finally:
        setattr(FxGraphCache, "load_with_key", staticmethod(original))  # noqa: B010


def run(function: Callable[..., torch.Tensor] = step, rows: int = 64) -> dict[str, Any]:
    """Call a function compiled, as a fresh process would, and say what the caches answered."""
    torch._dynamo.reset()
    counters.clear()
    x, w = torch.ones(rows, 32), torch.ones(32, requires_grad=True)
    compiled = torch.compile(function, fullgraph=True, dynamic=False)
    found = factors.collect("cpu")
    with factors.details() as details, looked_up() as graphs:
        try:
            compiled(x, w).backward()
        except Exception as error:  # torch wraps ours in its own
            if WouldCompileError.__name__ not in str(error):
                raise
    autograd, inductor = counters["aot_autograd"], counters["inductor"]
    counts = {
        **{f"autograd_{kind}": autograd[f"autograd_cache_{kind}"] for kind in ("hit", "miss", "bypass")},
        **{f"fx_{kind}": inductor[f"fxgraph_cache_{kind}"] for kind in ("hit", "miss", "bypass")},
        "triton_hit": 0,
        "triton_miss": 0,
    }
    asked = {"autograd": [key for key in details.lines if key[0] == "a"], "fx": graphs}
    keys = {f"{cache}_{'miss' if counts[f'{cache}_miss'] else 'hit'}": names for cache, names in asked.items() if names}
    identity = store.Identity(factors=found, graph_id="small", gpu_id="cpu", gpu={"name": "cpu"})
    return {"counts": counts, "keys": keys, "details": details.lines, "identity": identity.flat(), "factors": found}


@contextlib.contextmanager
def called(function: Callable[[Any], object], value: object, before: object) -> Iterator[None]:
    function(value)
    try:
        yield
    finally:
        function(before)


def products(precision: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = precision


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


@contextlib.contextmanager
def another_torch_key() -> Iterator[None]:
    from torch._inductor.codecache import torch_key

    before = torch_key()
    torch_key.clear()  # type: ignore[attr-defined]
    torch_key.set(b"another build".ljust(32))  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch_key.clear()  # type: ignore[attr-defined]
        torch_key.set(before)  # type: ignore[attr-defined]


CHANGES: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[Any]], dict[str, Any]]] = {
    "an inductor setting": (lambda: torch._inductor.config.patch(max_fusion_size=3), {}),
    "the compiler's name": (lambda: torch._inductor.config.patch({"cpp.cxx": (None, "/usr/bin/g++")}), {}),
    "a functorch setting": (lambda: torch._functorch.config.patch(cse=False), {}),
    "a dynamo setting": (lambda: torch._dynamo.config.patch(capture_scalar_outputs=True), {}),
    "the default dtype": (lambda: called(torch.set_default_dtype, torch.float64, torch.float32), {}),
    "deterministic algorithms": (lambda: called(torch.use_deterministic_algorithms, True, False), {}),
    "the precision of products": (lambda: called(products, "tf32", torch.backends.cuda.matmul.fp32_precision), {}),
    "the tag of keys": (lambda: getattr(torch.compiler.config, "patch")(cache_key_tag="x"), {}),  # noqa: B009
    "threads": (lambda: called(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()), {}),
    "a variable of Triton": (lambda: variable("TRITON_DISABLE_LINE_INFO", "1"), {}),
    "another build of torch": (another_torch_key, {}),
    "the graph's source": (contextlib.nullcontext, {"function": another_step}),
    "a shape": (contextlib.nullcontext, {"rows": 48}),
}


def main() -> None:
    results = {"as it is": run()}
    if sys.argv[2:]:

        def stop(*_: object, **__: object) -> Any:
            raise WouldCompileError(WouldCompileError.__name__)

        compile_fx.fx_codegen_and_compile = stop
    for name in sys.argv[2:]:
        change, arguments = CHANGES[name]
        with change():
            results[name] = run(**arguments)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
