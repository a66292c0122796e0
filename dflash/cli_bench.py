"""The command line of benchmarks: names in, a table out, and the figures in a file for whoever compares."""

from __future__ import annotations

import difflib
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from dflash.bench import NAMES
from dflash.cli_data import say
from env.errors import Exit, Failure

EXAMPLES = """
Examples:

  nox -s bench                                     all of them, at the shapes of the small preset

  nox -s bench -- pass loss                        two of them

  nox -s bench -- --config qwen3-8b pass mask      at the shapes of another configuration

  nox -s bench -- --json figures.json              and every single time, for a program to read

  nox -s bench -- --list                           what there is
"""


def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Which; by default all.")] = None,
    config: Annotated[str, typer.Option(help="Preset (tiny, qwen3-4b, qwen3-8b) or a TOML file.")] = "tiny",
    json: Annotated[Path | None, typer.Option(help="Write the figures there, too.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Name the benchmarks and what they are about.")] = False,
) -> None:
    """Measure the product's own code against the least it could take on this machine, and against a peer.

    On the first GPU, or else on the CPU. Results are compared with the peer's before anything is timed.
    """
    chosen = list(dict.fromkeys(names or NAMES))
    for name in chosen:
        if name not in NAMES:
            close = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(NAMES)}"
            raise Failure(Exit.USAGE, f"no benchmark is called `{name}`", hint=hint)
    if listed:
        for name in chosen:
            print(f"{name:<10} {NAMES[name]}")
        return
    from dflash import config as configs

    settings = configs.load(config)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        from dflash import progress, run, storage
        from dflash.bench import show, suite
        from env.cache import places

        home = places.cache_home()
        if home.notice:
            say(home.notice)
        with progress.track("benchmarks", len(chosen), unit="done", status=run.drifted_now()) as bar:
            done = -1

            def begun(name: str) -> None:
                nonlocal done
                bar.advance(1 if done >= 0 else 0, note=name)
                done += 1

            machine, figures = suite.run(chosen, settings, home.path / "bench", begun)
            bar.advance(note="all equal to their peers")
        show.show(machine, figures, sys.stdout)
        if json is not None:
            storage.write(json, show.as_json(config, machine, figures))
            say(f"figures in `{json}`")
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(_number: int, _frame: FrameType | None) -> None:
    """What was written is removed on the way out."""
    raise SystemExit(int(Exit.TERMINATED))
