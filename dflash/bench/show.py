"""What came of the benchmarks, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from dflash.bench.measure import Figure, quantity, seconds


def show(machine: dict[str, Any], figures: Sequence[Figure], stream: TextIO) -> None:
    """Print the figures: a table on a terminal, a line for each elsewhere."""
    console = Console(file=stream, highlight=False)
    # captured: rich itself would end the process with exit code 1 when whoever reads has gone
    with console.capture() as captured:
        if stream.isatty():
            console.print(_table(figures))
        for figure in figures:
            for line in _lines(figure, brief=stream.isatty()):
                console.print(line, soft_wrap=True, markup=False)
        console.print(_whose(machine), soft_wrap=True, markup=False)
    stream.write(captured.get())
    stream.flush()


def as_json(name: str, machine: dict[str, Any], figures: Sequence[Figure]) -> bytes:
    """All that is known, seconds and bytes throughout."""
    told = {"config": name, "machine": machine, "figures": [figure.as_json() for figure in figures]}
    return json.dumps(told, indent=1).encode() + b"\n"


def _table(figures: Sequence[Figure]) -> Table:
    table = Table(
        title="ours in times of the peer (below 1: faster) and of the floor (1: perfect)", title_justify="left"
    )
    for heading in ("benchmark", "what"):
        table.add_column(heading)
    for heading in ("ours", "spread", "peer", "floor", "of peer", "of floor"):
        table.add_column(heading, justify="right", no_wrap=True)
    for figure in figures:
        table.add_row(
            figure.benchmark,
            figure.what,
            seconds(figure.ours.median),
            f"{figure.ours.spread:.0%}",
            seconds(figure.theirs.median),
            seconds(figure.floor.seconds),
            f"{ratio(figure.to_peer)}",
            f"{ratio(figure.to_floor)}",
        )
    return table


def _lines(figure: Figure, *, brief: bool) -> list[str]:
    """A figure in words; in brief only what the table leaves out."""
    head = f"{figure.benchmark}: {figure.what}"
    taken = f"{seconds(figure.ours.median)}, spread {figure.ours.spread:.0%} of {len(figure.ours.seconds)}"
    peer = f"{figure.peer}: {seconds(figure.theirs.median)}, ours {ratio(figure.to_peer)} of it"
    floor = f"{figure.floor.formula}: {seconds(figure.floor.seconds)}, ours {ratio(figure.to_floor)} of it"
    held = ""
    if figure.memory is not None:
        ours, theirs = (quantity(size, "B") for size in figure.memory)
        held = f"  memory  {ours}, peer {theirs}"
    if brief:
        lines = [head, f"  peer    {figure.peer}", f"  floor   {figure.floor.formula}", held]
    else:
        lines = [f"{head}: {taken}", f"  peer    {peer}", f"  floor   {floor}", held]
    return [line for line in lines if line]


def _whose(machine: dict[str, Any]) -> str:
    return (
        f"on {machine['device']}, {machine['threads']} threads, torch {machine['torch']}; "
        f"load when it began {machine['load']:.1f}"
    )


def ratio(value: float) -> str:
    """Two digits that matter."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
