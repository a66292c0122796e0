"""`python -m dflash.diagnose`: what compiling in several threads does on this torch, as it is and cured.

Needs nothing but torch, and looks rather than knows: each line is what was just seen in this process.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import platform
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from env.errors import Exit, Failure, report

PATIENCE = 120.0
"""Seconds that one thread waits for the other before it gives up; a trace takes milliseconds."""


def main(argv: Sequence[str]) -> int:
    """Look at torch, put the cure in, look again, and print both; exit code 5 where the cure is refused or fails."""
    parser = argparse.ArgumentParser(prog="python -m dflash.diagnose", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-cure", action="store_true", help="only look at torch as it is")
    options = parser.parse_args(argv)
    try:
        import torch  # noqa: F401  # whether it can be imported is the first finding
    except ImportError as error:
        return report(Failure(Exit.HOST, f"this Python has no torch: {error}", details=(sys.executable,)))
    found = diagnose(cure=not options.no_cure)
    print(json.dumps(found, indent=2, ensure_ascii=False) if options.json else "\n".join(told(found)))
    return int(Exit.DONE if found["sound"] or options.no_cure else Exit.HOST)


def diagnose(*, cure: bool = True) -> dict[str, Any]:
    """Everything that was seen: a JSON object. With `cure`, this process is cured afterwards."""
    import torch

    warm, early = compiled(), []
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "settings": settings(),
        "guard": guard(),
        "set_by": set_by(),
        "as it is": observe(warm),
        "cured": None,
        "refused": None,
    }
    if cure:
        try:
            from dflash import tracing

            done = tracing.cure()
        except (ImportError, AttributeError) as error:
            early = [f"{type(error).__name__}: {error}", "this torch lacks what the cure is made of"]
        except Failure as failure:
            early = str(failure).splitlines()
        else:
            found["cure"] = {"flag": done.flag, "compiling": done.session, "done": list(done.done), "read": done.read}
            found["cured"] = observe(warm)
    found["refused"] = early or None
    found["sound"] = found["cured"] is not None and sound(found["cured"])
    return found


# What is seen


def observe(warm: Callable[[], str]) -> dict[str, str]:
    """The flag and a compiled call, at rest and while another thread traces or compiles."""
    import torch

    seen: dict[str, str] = {"flag here": flag()}
    module = torch.nn.Identity()
    module.register_forward_pre_hook(lambda *_: seen.update({"flag inside a forward": flag()}))
    module(torch.ones(1))
    seen["flag inside a compiled call"] = warm().partition("|")[2]
    seen["a compiled call"] = warm().partition("|")[0]
    inside: list[str] = []
    seen["flag while another thread traces"] = held(tracing_with, flag, inside)
    seen["flag inside that trace"] = inside[0]
    seen["a compiled call while another thread traces"] = held(tracing_with, warm).partition("|")[0]
    seen["a module's call while another thread traces"] = held(tracing_with, lambda: attempt(module, torch.ones(1)))
    seen["is_compiling() while another thread compiles"] = held(
        compiling_with, lambda: str(torch.compiler.is_compiling())
    )
    seen["flag afterwards"] = flag()
    return seen


def sound(seen: dict[str, str]) -> bool:
    """Whether one thread's work leaves another's alone."""
    return (
        all(seen[name] == "clear" for name in seen if name.startswith("flag") and name != "flag inside that trace")
        and all(seen[name] == "runs compiled" for name in seen if name.startswith("a compiled call"))
        and seen["a module's call while another thread traces"] == "runs"
        and seen["is_compiling() while another thread compiles"] == "False"
    )


def flag() -> str:
    """«FX tracing is active», asked as a compiled call asks: "set" or "clear"."""
    import torch

    return "set" if torch.fx._symbolic_trace.is_fx_symbolic_tracing() else "clear"  # noqa: SLF001  # the guard's own


def compiled() -> Callable[[], str]:
    """A compiled function, warm: called, it tells whether it ran compiled, and the flag inside."""
    import torch

    inside: list[str] = []

    def backend(module: Any, _: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            inside.append(flag())
            return module.forward(*inputs)

        return run

    wrap: Any = torch.compile
    function = wrap(lambda x: x + 1, backend=backend)

    def call() -> str:
        inside.clear()
        answer = attempt(function, torch.ones(1))
        return f"runs compiled|{inside[0]}" if inside else "runs as it is, uncompiled" if answer == "runs" else answer

    call()
    return call


def attempt(function: Callable[..., object], *arguments: object) -> str:
    """Whether it "runs", or the exception."""
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the finding
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "runs"


def held(work: Callable[[Callable[[], None]], object], look: Callable[[], str], inside: list[str] | None = None) -> str:
    """What `look` sees here while another thread is in the middle of `work`."""
    arrived, go_on = threading.Event(), threading.Event()

    def stop() -> None:
        if inside is not None:
            inside.append(flag())
        arrived.set()
        go_on.wait(PATIENCE)

    thread = threading.Thread(target=work, args=(stop,), daemon=True)
    thread.start()
    seen = look() if arrived.wait(PATIENCE) else "the other thread did not get there"
    go_on.set()
    thread.join(PATIENCE)
    return seen


def tracing_with(stop: Callable[[], None]) -> None:
    """Trace a function that stops in the middle."""
    import torch

    def function(x: Any) -> Any:
        stop()
        return x

    torch.fx.symbolic_trace(function)


def compiling_with(stop: Callable[[], None]) -> None:
    """Compile a function with a backend that stops in the middle."""
    import torch

    def backend(module: Any, _: Any) -> Any:
        stop()
        return module.forward

    wrap: Any = torch.compile
    wrap(lambda x: x - 1, backend=backend)(torch.ones(1))


def set_by() -> list[str]:
    """Who sets the flag in an ordinary torch.compile: the stack seen by an operation's fake, the setter first."""
    import torch

    stacks: list[list[traceback.FrameSummary]] = []

    def fake(x: Any) -> Any:
        frames = list(reversed(traceback.extract_stack()))
        trace = [i for i, f in enumerate(frames) if f.name == "trace" and f.filename.endswith("_symbolic_trace.py")]
        if trace:
            stacks.append(frames[trace[0] :])
        return torch.empty_like(x)

    operation: Any = torch.library.custom_op(
        f"dflash_diagnosis::look_{threading.get_ident()}", torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    operation.register_fake(fake)
    wrap: Any = torch.compile
    attempt(wrap(lambda x: operation(x), backend="aot_eager"), torch.ones(1))  # noqa: PLW0108  # Dynamo wants a function
    lines: list[str] = []
    before = ""
    for frame in stacks[0] if stacks else []:
        if frame.filename != before:  # one line for each room on the way
            lines.append(f"{short(frame.filename)}:{frame.lineno} in {frame.name}")
        if frame.filename == __file__:
            break
        before = frame.filename
    return lines


def guard() -> dict[str, str]:
    """The source of the check that every compiled call makes."""
    import torch
    from torch._dynamo import eval_frame

    def excerpt(module: ModuleType, wanted: Callable[[ast.AST], bool]) -> str:
        source = inspect.getsource(module)
        nodes = [node for node in ast.walk(ast.parse(source)) if wanted(node)]
        if not nodes:
            return "not found"
        lines = source.splitlines()[nodes[0].lineno - 1 : nodes[0].end_lineno]  # type: ignore[attr-defined]
        return f"{short(str(module.__file__))}:{nodes[0].lineno}\n" + inspect.cleandoc("\n" + "\n".join(lines))  # type: ignore[attr-defined]

    def checks(node: ast.AST) -> bool:
        return isinstance(node, ast.If) and "is_fx_symbolic_tracing" in ast.unparse(node.test)

    def answers(node: ast.AST) -> bool:
        return isinstance(node, ast.FunctionDef) and node.name == "is_fx_symbolic_tracing"

    found = {}
    for name, module, wanted in (
        ("the check in every compiled call", eval_frame, checks),
        ("what it asks", torch.fx._symbolic_trace, answers),  # noqa: SLF001
    ):
        try:
            found[name] = excerpt(module, wanted)
        except OSError as error:
            found[name] = f"no source: {error}"
    return found


def settings() -> dict[str, str]:
    """What decides about a call while the flag is set, and whether a plain thread sees a setting made here."""
    from torch._dynamo import config

    names = (
        "error_on_nested_fx_trace",
        "force_compile_during_fx_trace",
        "error_on_recompile",
        "suppress_errors",
        "disable",
    )
    found = {name: str(getattr(config, name, "unknown here")) for name in names}
    seen: list[int] = []
    with config.patch(recompile_limit=config.recompile_limit + 1):
        thread = threading.Thread(target=lambda: seen.append(config.recompile_limit))
        thread.start()
        thread.join()
        reaches = seen[0] == config.recompile_limit
    found["a setting made in one thread"] = (
        "reaches all" if reaches else "stays there (start workers with dflash.gate.thread)"
    )
    return found


def short(path: str) -> str:
    """A path from torch on, or from the working directory."""
    _, found, rest = path.rpartition(f"{os.sep}torch{os.sep}")
    return f"torch{os.sep}{rest}" if found else os.path.relpath(path) if Path(path).is_absolute() else path


# How it is told


def told(found: dict[str, Any]) -> list[str]:
    """The report, a line each."""
    lines = [f"torch {found['torch']}, Python {found['python']}", ""]
    before, after = found["as it is"], found["cured"] or {}
    width = max(map(len, before))
    wide = max(len(word) for word in ["as torch is", *(shortened(text) for text in before.values())])
    lines += [f"{'':{width}}  {'as torch is':{wide}}  {'cured' if after else ''}".rstrip()]
    for name, text in before.items():
        lines.append(f"{name:{width}}  {shortened(text):{wide}}  {shortened(after.get(name, ''))}".rstrip())
    for title, text in found["guard"].items():
        place, _, source = text.partition("\n")
        lines += ["", f"{title} ({place})", *(f"  {line}" for line in source.splitlines())]
    lines += [
        "",
        "who sets the flag in an ordinary torch.compile, innermost first",
        *(f"  {line}" for line in found["set_by"]),
    ]
    lines += ["", "settings", *(f"  {name:<32}{value}" for name, value in found["settings"].items())]
    if found["refused"]:
        lines += ["", "the cure is refused", *(f"  {line}" for line in found["refused"])]
    elif found["cured"]:
        cure = found["cure"]
        read = "" if cure["read"] else "; this version was not read, but has the shape of one that was"
        lines += [
            "",
            f"the cure is in: the tracing flag is {cure['flag']} in torch, «compiling» {cure['compiling']}{read}",
        ]
        lines += [f"  {line}" for line in cure["done"]]
        lines += ["", verdict(found)]
    return lines


def verdict(found: dict[str, Any]) -> str:
    """One sentence."""
    if not found["sound"]:
        return "the cure does not hold: compile in one thread only, or use one process for each GPU"
    if sound(found["as it is"]):
        return "threads may compile at once; this torch did not need the cure"
    return "threads may compile at once, once `dflash.tracing.cure` was called; as it is, this torch does not allow it"


def shortened(text: str) -> str:
    """The start of a long answer."""
    return text if len(text) <= 46 else text[:45] + "…"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
