"""Where a first step's time goes, cold against baked: two fresh processes, timed by torch's own events, and a picture.

torch tells its log when each part of a compilation begins and ends (read in 2.10, 2.11 and 2.15). At each moment the
part that began last counts; what no part covers is the step itself running.
"""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash import storage
from env.errors import Exit, Failure

PHASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "tracing": ("#0072B2", ("dynamo", "entire_frame_compile", "compile_attempt", "bytecode_tracing", "build_guards")),
    "AOTAutograd": (
        "#56B4E9",
        ("backend_compile", "create_aot_dispatcher_function", "aot_", "AOTAutogradCache", "compile_fx.",
         "entire_backward_compile", "min_cut", "_recursive_joint", "_recursive_pre_grad"),
    ),
    "Inductor": (
        "#009E73",
        ("inductor_compile", "fx_codegen_and_compile", "GraphLowering", "Scheduler", "code_gen", "_recursive_post_grad",
         "additional_fake", "PythonWrapper", "CppWrapper", "pass."),
    ),
    "compilers": ("#E69F00", ("async_compile", "compile_file", "triton", "CompiledTriton", "precompile", "cutlass")),
    "loading": ("#CC79A7", ("AOTAutogradCache.inductor_load", "TritonBundler", "PyCodeCache", "fx_graph_cache")),
    "benchmarks": ("#D55E00", ("CachingAutotuner", "benchmark", "autotune", "TritonTemplate")),
    "running": ("#999999", ()),
}  # fmt: skip
"""The phases with their colours (Okabe and Ito's) and how their events' names begin; the longest beginning counts."""

TOLD = {
    "tracing": "tracing (Dynamo)",
    "AOTAutograd": "forward and backward graphs (AOTAutograd)",
    "Inductor": "lowering, scheduling, code (Inductor)",
    "compilers": "g++, Triton and ptxas",
    "loading": "loading from the cache",
    "benchmarks": "benchmarking kernels",
    "running": "running the step",
}
BEFORE = ("imports", "identity", "warm_up", "construction")
"""What a replay does before its first step, as it reports it."""

Span = tuple[str, int, int]
"""An event's name, its begin and its end, in nanoseconds since 1970."""


@contextmanager
def watched() -> Iterator[list[Span]]:
    """Collect torch's events, of all threads, while the block runs.

    Raises:
        Failure: Exit.HOST, when this torch tells its events in another shape.
    """
    from torch._dynamo import utils

    spans: list[Span] = []
    lock = threading.Lock()
    kind: Any = getattr(utils, "ChromiumEventLogger", None)
    original = getattr(kind, "log_event_end", None)
    if original is None:
        raise Failure(Exit.HOST, "this torch tells the events of a compilation in a way that was never read")

    def end(self: Any, name: str, ended: int, metadata: Any, begun: int, *more: Any, **named: Any) -> Any:
        with lock:
            spans.append((name, begun, ended))
        return original(self, name, ended, metadata, begun, *more, **named)

    kind.log_event_end = end
    try:
        yield spans
    finally:
        kind.log_event_end = original


def phase(name: str) -> str | None:
    """The phase of an event; None for one that is no part of a compilation."""
    found = [(len(start), key) for key, (_, starts) in PHASES.items() for start in starts if name.startswith(start)]
    return max(found)[1] if found else None


def segments(spans: Sequence[Span], begun: int, ended: int) -> list[tuple[str, float, float]]:
    """From begin to end without a gap: phase, and when it begins and ends in seconds after `begun`."""
    known = [(start, stop, kind) for name, start, stop in spans if (kind := phase(name)) is not None]
    edges = sorted({begun, ended, *(edge for span in known for edge in span[:2] if begun < edge < ended)})
    found: list[tuple[str, float, float]] = []
    for left, right in itertools.pairwise(edges):
        active = [span for span in known if span[0] <= left and span[1] >= right]
        # of those that began together the shortest is the inner one
        name = max(active, key=lambda span: (span[0], -span[1]))[2] if active else "running"
        start, stop = (left - begun) / 1e9, (right - begun) / 1e9
        if found and found[-1][0] == name:
            found[-1] = (name, found[-1][1], stop)
        else:
            found.append((name, start, stop))
    return found


def totals(parts: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Seconds of each phase, in the order of `PHASES`."""
    return {name: sum(stop - start for kind, start, stop in parts if kind == name) for name in PHASES}


def compare(config: str, device: str, seeded: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Replay a first step in two fresh processes, one with an empty cache and one with a seeded one; both records.

    `seeded` are the variables that choose the seeded cache, `environ` is the environment for everything else.

    Raises:
        Failure: what a replay could not do.
    """
    outcomes: dict[str, Any] = {"config": Path(config).stem}
    with tempfile.TemporaryDirectory(prefix="dflash-cold-") as empty:
        for name, cache in (("cold", dict.fromkeys(seeded, empty)), ("baked", dict(seeded))):
            command = [
                sys.executable,
                "-P",
                "-m",
                "dflash.replay",
                "--config",
                config,
                "--device",
                device,
                "--timeline",
            ]
            done = subprocess.run(
                command,
                env={**environ, **cache},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                lines = done.stderr.strip().splitlines()
                code = Exit(done.returncode) if done.returncode in set(Exit) else Exit.BUG
                raise Failure(code, f"the {name} process could not take its step", details=lines[-3:])
            answer = json.loads(done.stdout)
            outcomes[name] = {key: answer[key] for key in ("seconds", "counts", "timeline", "device", "torch")}
    return outcomes


def lines(outcomes: Mapping[str, Any]) -> list[str]:
    """The figures as a table for the terminal."""
    cold, baked = outcomes["cold"], outcomes["baked"]
    rows = [("first step", cold["seconds"]["first_step"], baked["seconds"]["first_step"])]
    both = totals(cold["timeline"]), totals(baked["timeline"])
    rows += [(f"  {TOLD[name]}", both[0][name], both[1][name]) for name in PHASES if max(both[0][name], both[1][name])]
    rows += [(f"before it: {name}", cold["seconds"][name], baked["seconds"][name]) for name in BEFORE]
    width = max(len(row[0]) for row in rows)
    head = f"{'seconds':{width}}  {'cold':>8}  {'baked':>8}"
    return [head, *(f"{name:{width}}  {one:8.2f}  {other:8.2f}" for name, one, other in rows)]


def draw(outcomes: Mapping[str, Any], path: Path) -> None:
    """Draw both first steps on one scale, and the baked one on its own; the figures go beside it as JSON.

    Raises:
        Failure: Exit.STORAGE, when a file cannot be written.
    """
    import logging

    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from dflash.pictures import DOTS, STYLE

    # a machine that draws for the first time is otherwise told that fonts are being looked up
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    cold, baked = outcomes["cold"], outcomes["baked"]
    long, short = cold["seconds"]["first_step"], baked["seconds"]["first_step"]
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(9.6, 4.6))
        upper, lower = figure.subplots(2, 1, height_ratios=[2, 1])
        for row, (label, one) in enumerate((("cold", cold), ("baked", baked))):
            _bar(upper, one["timeline"], row)
            seconds = one["seconds"]["first_step"]
            told = f"{label}  {seconds:.{2 if seconds < 10 else 1}f} s"
            upper.text(seconds + long * 0.008, row, told, va="center", fontweight="bold")
        _bar(lower, baked["timeline"], 0)
        upper.set(title=f"First step of `{outcomes['config']}` on {cold['device']}", xlim=(0, long * 1.13))
        upper.set(ylim=(1.55, -0.55), yticks=[])
        lower.set(title="The baked one, enlarged", xlim=(0, short * 1.13), ylim=(0.5, -0.5), yticks=[])
        lower.set(xlabel="seconds after the first call (imports and warm-up, the same in both, lie before it)")
        for axes in (upper, lower):
            axes.grid(visible=False, axis="y")
        used = [name for name in PHASES if any(totals(one["timeline"])[name] > long * 1e-4 for one in (cold, baked))]
        marks = [Patch(color=PHASES[name][0], label=TOLD[name]) for name in used]
        figure.legend(handles=marks, loc="outside lower center", ncols=3, fontsize=9)
        content = io.BytesIO()
        FigureCanvasAgg(figure)
        figure.savefig(content, format="png", dpi=DOTS, metadata={"Software": None})
    storage.write(path, content.getvalue())
    storage.write(path.with_suffix(".json"), json.dumps(outcomes, indent=1).encode() + b"\n")


def _bar(axes: Any, parts: Sequence[tuple[str, float, float]], row: int) -> None:
    for name in PHASES:
        spans = [(start, stop - start) for kind, start, stop in parts if kind == name]
        if spans:
            axes.broken_barh(spans, (row - 0.38, 0.76), color=PHASES[name][0], linewidth=0)


def now() -> int:
    """The clock of torch's events: nanoseconds since 1970."""
    return time.time_ns()
