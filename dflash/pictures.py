"""Pictures of a run, drawn from the files in its folder: loss, accuracy, acceptance, time, and all of them at once.

Colours are Okabe and Ito's, which people with any common colour blindness can tell apart, and no curve is told by its
colour alone. The same files give the same bytes.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from dflash import storage
from dflash.progress import duration
from env.errors import Exit, Failure

FOLDER = "pictures"
BLUE, ORANGE, GREEN, VERMILLION, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#777777"
LOOKS = {
    "trained": (BLUE, "-", "o"),
    "prompt lookup": (VERMILLION, "--", "s"),
    "blanked features": (GREEN, "-.", "^"),
    "untrained": (GREY, ":", "x"),
}
"""Colour, line and mark of each proposer, best known first."""
PHASES = {
    "target": "train the target",
    "samples": "write samples",
    "drafter": "train the drafter",
    "decoding": "decode and compare",
    "pictures": "draw pictures",
}
"""How the phases of `timing.json` are told."""
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "figure.constrained_layout.h_pad": 0.12,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.12,
    "font.size": 10.5,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
}
DOTS = 110
"""Dots an inch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run's folder tells; empty where a file is missing."""

    steps: list[dict[str, Any]]
    """`metrics.jsonl`: a drafter's training steps."""
    target: list[dict[str, Any]]
    """`target_metrics.jsonl`: the small target's."""
    evaluation: dict[str, Any]
    """`evaluation.json`."""
    seconds: dict[str, float]
    """`timing.json`: phases in their order."""


def draw(folder: Path) -> tuple[Path, ...]:
    """Draw `pictures/*.png` in a run's folder, each picture for which there are numbers; returns their paths.

    Raises:
        Failure: Exit.INPUT, when a file cannot be read; Exit.STORAGE, when a picture cannot be written.
    """
    # a machine that draws for the first time is otherwise told that fonts are being looked up
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    run = read(folder)
    panels = {name: panel for name, (panel, has) in PANELS.items() if has(run)}
    paths = []
    with matplotlib.style.context(["default", STYLE]):
        for name, panel in panels.items():
            figure = Figure(figsize=(7.2, 4.2))
            panel(figure.add_subplot(), run)
            paths.append(_save(figure, folder / FOLDER / f"{name}.png"))
        if panels:
            paths.append(_save(_overview(panels, run), folder / FOLDER / "overview.png"))
    return tuple(paths)


def read(folder: Path) -> Run:
    """Read what there is in a run's folder.

    Raises:
        Failure: Exit.INPUT, naming the file that cannot be read.
    """
    return Run(
        steps=_lines(folder / "metrics.jsonl"),
        target=_lines(folder / "target_metrics.jsonl"),
        evaluation=_table(folder / "evaluation.json"),
        seconds=_table(folder / "timing.json"),
    )


def loss(axes: Axes, run: Run) -> None:
    """Loss of every step, thin, and its course, thick; the small target's beside the drafter's."""
    curves = [("drafter", run.steps, BLUE, "-"), ("target", run.target, ORANGE, "--")]
    top = 0.0
    for name, steps, colour, line in curves:
        if steps:
            x, y = _column(steps, "step"), _column(steps, "loss")
            axes.plot(x, y, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(x, smooth(y), line, color=colour, label=f"{name}, {smooth(y)[-1]:.2f} at the end")
            top = max([top, *y[np.isfinite(y)][:1]])  # a step that was skipped has no loss
    axes.set(title="Loss", xlabel="step", ylabel="nats a token", ylim=(0, top * 1.05), xlim=(0, None))
    axes.legend(loc="upper right")


def accuracy(axes: Axes, run: Run) -> None:
    """Share of right guesses for some slots of a block, as training goes on."""
    table = np.array([step["accuracy"] for step in run.steps], dtype=float)
    x = _column(run.steps, "step")
    slots = table.shape[1]
    shown = sorted({1, 2, *(round(slots * share) for share in (0.27, 0.53, 1.0))})
    # from dark to light: told apart by lightness alone, and labelled where the curves end
    shades = ["#08306b", "#08519c", "#2171b5", "#4292c6", "#82b9dc"]
    ends: list[tuple[float, str, str]] = []
    for slot, shade in zip([slot for slot in shown if 1 <= slot <= slots], shades, strict=False):
        y = smooth(table[:, slot - 1])
        axes.plot(x, y, color=shade)
        ends.append((float(y[-1]), f"slot {slot}", shade))
    _label_ends(axes, float(x[-1]), ends, gap=0.06)
    axes.set(title="Accuracy in training", xlabel="step", ylabel="right guesses", ylim=(0, 1), xlim=(0, x[-1] * 1.13))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def tau(axes: Axes, run: Run) -> None:
    """Tokens kept a cycle by each proposer: all responses, and those that do not loop."""
    decoders = _decoders(run)
    for row, decoder in enumerate(decoders):
        colour = LOOKS.get(decoder["name"], (GREY, "-", "o"))[0]
        parts = [(decoder["tau"], -0.19, colour, ""), (decoder["tau_without_loops"], 0.19, colour, "////")]
        for value, shift, edge, hatch in parts:
            if value is not None:
                face = "white" if hatch else edge
                axes.barh(row + shift, value, 0.36, color=face, edgecolor=edge, hatch=hatch)
                note = "  without loops" if hatch else "  all responses"
                axes.text(value, row + shift, f" {value:.2f}{note}", va="center", fontsize=9.5)
    longest = max((decoder["tau"] or 0 for decoder in decoders), default=1)
    axes.axvline(1, color="#444444", linewidth=1)
    axes.set(
        title="τ: tokens kept a cycle",
        xlabel=f"tokens, at most {run.evaluation['block']}; the line is the target alone",
    )
    axes.set(xlim=(0, longest * 1.45), ylim=(len(decoders) - 0.45, -0.55))
    axes.set_yticks(range(len(decoders)), [decoder["name"].replace(" ", "\n") for decoder in decoders])
    axes.grid(visible=False, axis="y")


def acceptance(axes: Axes, run: Run) -> None:
    """Share of cycles in which each slot was accepted."""
    for decoder in _decoders(run):
        colour, line, mark = LOOKS.get(decoder["name"], (GREY, "-", "o"))
        y = decoder["acceptance"]
        x = range(1, len(y) + 1)
        axes.plot(x, y, linestyle=line, marker=mark, markersize=4.5, color=colour, label=decoder["name"])
    axes.set(title="Acceptance by position", xlabel="slot of the block", ylabel="cycles that accept it", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(loc="upper right")


def phases(axes: Axes, run: Run) -> None:
    """When each phase ran and how long it took."""
    total = sum(run.seconds.values())
    units = [(1, "seconds", "s"), (60, "minutes", "min"), (3600, "hours", "h")]
    scale, unit, short = units[0 if total < 600 else 1 if total < 3 * 3600 else 2]
    begin = 0.0
    for row, taken in enumerate(run.seconds.values()):
        length = taken / scale
        axes.barh(row, length, 0.62, left=begin, color=BLUE)
        axes.text(begin + length, row, f" {length:.{0 if length >= 10 else 1}f} {short}", va="center")
        begin += length
    axes.set(
        title=f"Time by phase, {duration(total)} in all",
        xlabel=unit,
        xlim=(0, begin * 1.08),
        ylim=(len(run.seconds) - 0.4, -0.6),
    )
    axes.set_yticks(range(len(run.seconds)), [PHASES.get(name, name) for name in run.seconds])
    axes.grid(visible=False, axis="y")


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean of each value and its neighbours, a fortieth of all to either side, fewer at the ends, no NaN."""
    reach = len(values) // 40
    known = ~np.isnan(values)
    window = np.ones(2 * reach + 1)
    total = np.convolve(np.where(known, values, 0.0), window)[reach : reach + len(values)]
    count = np.convolve(known.astype(float), window)[reach : reach + len(values)]
    mean: NDArray[np.float64] = np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)
    return mean


PANELS: dict[str, tuple[Callable[[Axes, Run], None], Callable[[Run], bool]]] = {
    "loss": (loss, lambda run: bool(run.steps or run.target)),
    "accuracy": (accuracy, lambda run: bool(run.steps)),
    "tau": (tau, lambda run: bool(run.evaluation)),
    "acceptance": (acceptance, lambda run: bool(run.evaluation)),
    "time": (phases, lambda run: bool(run.seconds)),
}
"""Each picture's name, who draws it, and whether a run has the numbers for it."""


def _overview(panels: dict[str, Callable[[Axes, Run], None]], run: Run) -> Figure:
    """Two pictures a row, and the last one in a row of its own where they are odd in number."""
    names = list(panels)
    rows: list[Any] = [[names[i], names[min(i + 1, len(names) - 1)]] for i in range(0, len(names), 2)]
    heights = [0.55 if row == ["time", "time"] else 1.0 for row in rows]
    figure = Figure(figsize=(13, 3.7 * sum(heights) + 0.4))
    for name, axes in figure.subplot_mosaic(rows, height_ratios=heights).items():
        panels[str(name)](axes, run)
    return figure


def _label_ends(axes: Axes, x: float, ends: Sequence[tuple[float, str, str]], gap: float) -> None:
    """Name curves where they end, from the top down, moved apart where they would overlap."""
    above = float("inf")
    for y, text, colour in sorted(ends, reverse=True):
        above = min(y, above - gap)
        axes.text(x, above, f" {text}", color=colour, va="center", fontsize=9.5)


def _decoders(run: Run) -> list[dict[str, Any]]:
    """Proposers in the order of LOOKS, others after them."""
    order = list(LOOKS)
    return sorted(run.evaluation["decoders"], key=lambda one: order.index(one["name"]) if one["name"] in order else 99)


def _column(lines: Sequence[dict[str, Any]], key: str) -> NDArray[np.float64]:
    return np.array([line[key] for line in lines], dtype=float)


def _save(figure: Figure, path: Path) -> Path:
    content = io.BytesIO()
    FigureCanvasAgg(figure)
    # no version of matplotlib in the file: the same numbers are the same bytes
    figure.savefig(content, format="png", dpi=DOTS, metadata={"Software": None})
    storage.write(path, content.getvalue())
    return path


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise Failure(Exit.INPUT, f"`{path}` cannot be read: {error}") from None


def _table(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Failure(Exit.INPUT, f"`{path}` cannot be read: {error}") from None
    return table
