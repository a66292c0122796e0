"""The command line of data: chats are prepared, their responses rewritten, a target's features of them kept; freed."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from env.errors import Exit, Failure

if TYPE_CHECKING:  # torch takes seconds, and a wrong option should not take them
    from dflash import preparing
    from dflash.config import Config
    from dflash.prepared import Stored
    from dflash.stopping import Stop
    from dflash.target import Target

EPILOG = """
Examples:

  nox -s data -- prepare --target T --data chats.jsonl                       what is left of the lines, and why

  nox -s data -- regenerate --target T --data chats.jsonl --out ours.jsonl   the target's own responses

  nox -s data -- features --target T --data ours.jsonl --out features        for `train --features features`

  nox -s data -- prune --older-than 30 --yes                                 free prepared data unused for so many days

Each goes on where it was stopped or killed when the same command is given again.
"""


class Dtype(StrEnum):
    """Number format of the target's weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


app = typer.Typer(
    no_args_is_help=True,
    help="Prepare chats and texts, rewrite their responses, keep a target's features of them.",
    epilog=EPILOG,
)

TargetOption = Annotated[str, typer.Option(help="Target: folder or hub name.")]
DataOption = Annotated[Path, typer.Option(help="File of JSON lines, chats or texts; or a folder of .jsonl files.")]
ConfigOption = Annotated[str, typer.Option(help="Preset (tiny, qwen3-4b, qwen3-8b) or a TOML file.")]
FaultyOption = Annotated[float, typer.Option(min=0, max=1, help="Share of the lines that may be of no use.")]


@app.command(epilog=EPILOG)
def prepare(
    target: TargetOption,
    data: DataOption,
    config: ConfigOption = "tiny",
    faulty: FaultyOption = 0.1,
) -> None:
    """Make packed rows of chats or texts, and say what was left out. Needs the target's tokenizer, not its weights.

    `train` and `features` do the same when they are given `--data`, and find what was prepared by its content.
    """
    from dflash import config as configs

    settings = configs.load(config)
    from dflash import prepared, stock
    from dflash import target as targets
    from dflash.rendering import Renderer
    from dflash.stopping import listening

    tokenizer, ends = targets.reader(target)
    whole = Renderer(tokenizer=tokenizer, name=target, ends=ends, sequence=settings.shapes.sequence)
    with listening() as stop:
        rows = _preparing(
            data,
            stop,
            lambda watch: prepared.prepare(
                data, whole, _recipe(settings, faulty), stock.home(say), watch=watch, say=say
            ),
        )
    prepared.report(rows, say)
    say(f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10:,} MiB of memory were in use")
    print(rows.folder)


@app.command(epilog=EPILOG)
def regenerate(
    target: TargetOption,
    data: DataOption,
    out: Annotated[Path, typer.Option(help="File to write, JSON lines in the form they were read.")],
    response_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 2048,
    temperature: Annotated[float, typer.Option(min=0, max=10, help="0 for the target's greedy choice.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Draw from the likeliest tokens of this share.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="With a line's content all that decides what is drawn.")] = 0,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Prompts in one forward pass.")] = 32,
    dtype: Annotated[Dtype, typer.Option(help="By default bfloat16 on a GPU, float32 on a CPU.")] = Dtype.auto,
) -> None:
    """Let the target write every response anew, each in the light of those before it."""
    from dflash import progress, rewriting, run
    from dflash.stopping import listening

    wanted = rewriting.Wanted(
        response_tokens=response_tokens, temperature=temperature, top_p=top_p, seed=seed, batch=batch
    )
    total = rewriting.count(data)
    whole = _loaded(target, dtype.value)
    with (
        listening() as stop,
        progress.track("rewriting responses", total, unit="lines", status=run.drifted_now()) as bar,
    ):
        told = False

        def watch(lines: int, tokens: int) -> None:
            nonlocal told
            bar.advance(lines, tokens=tokens) if told else bar.skip(lines)
            told = True
            if stop.asked():
                raise stop.stopped(f"what is whole of the {bar.done} of {total} lines is kept beside `{out}`")

        state = rewriting.rewrite(whole, data, out, wanted, watch=watch, say=say)
        bar.done = total
    for sentence in state.sentences():
        say(sentence)
    if not state.written:
        raise Failure(
            Exit.INPUT,
            f"nothing was written of the {total} lines of `{data}`: `{out}` is empty",
            hint="the formats that are read are in docs/data.md; a target that ends at once has nothing to say",
        )
    print(out)


@app.command(epilog=EPILOG)
def features(
    target: TargetOption,
    data: DataOption,
    out: Annotated[Path, typer.Option(help="Folder to write, for `train --features`.")],
    config: ConfigOption = "tiny",
    faulty: FaultyOption = 0.1,
    split: Annotated[int, typer.Option(min=1, help="GPUs to split the target over, if it is larger than one.")] = 1,
) -> None:
    """Write the features that a training would have the target compute, and say first how much disk they take."""
    from dflash import config as configs

    settings = configs.load(config)
    if split > 1 and "DFLASH_SPLIT" not in os.environ:
        raise typer.Exit(_together(split, target, data, out, config, faulty))
    from dflash import features as kept
    from dflash import progress, run, sources
    from dflash import target as targets
    from dflash.stopping import listening

    whole = _loaded(target, settings.precision.compute, split=split > 1)
    targets.check(whole, settings.drafter)
    with listening() as stop:
        rows = _preparing(
            data,
            stop,
            lambda watch: sources.stored(data, settings, whole, faulty=faulty, watch=watch, say=say),
        )
        total = len(rows.tokens)
        with progress.track("computing features", total, unit="rows", status=run.drifted_now()) as bar:
            told = False

            def watch(count: int) -> None:
                nonlocal told
                bar.advance(count, tokens=count * settings.shapes.sequence) if told else bar.skip(count)
                told = True
                if stop.asked():
                    raise stop.stopped(f"whole files of the {bar.done} of {total} rows that are done stay in `{out}`")

            kept.write(settings, whole, rows, out, watch=watch, say=say)
            bar.done = total
    print(out)


@app.command(epilog=EPILOG)
def prune(
    keep: Annotated[int, typer.Option(min=0, help="Keep the so many last used.")] = 0,
    older_than: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Only those unused for so many days.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it.")] = False,
) -> None:
    """Free prepared data. Shows what it would free, with size and age, unless --yes is given.

    What a process reads or makes at the moment stays. A run keeps its own hold of the rows that it trains on.
    """
    from dflash import stock
    from env.cache.cli import age, megabytes

    days = None if older_than is None else older_than * 86400
    going = stock.doomed(stock.entries(stock.home(say)), keep=keep, older_than=days)
    freed = 0
    for entry in going:
        stays = stock.free(entry) if yes else None
        freed += 0 if stays else entry.size
        what = f"kept, {stays}" if stays else ("freed" if yes else "would be freed")
        print(f"{what}: {entry.path}  {megabytes(entry.size)}, last used {age(entry.used)} ago, {entry.what}")
    verb = "freed" if yes else "would be freed; `--yes` does it"
    print(f"{megabytes(freed)} {verb}" if going else "nothing to free")


def say(line: str) -> None:
    """One line for whoever watches, beside the results on standard output."""
    with suppress(BrokenPipeError):  # whoever read the log has gone; the work need not
        print(line, file=sys.stderr, flush=True)


def _recipe(settings: Config, faulty: float) -> preparing.Recipe:
    from dflash import sources

    return sources.recipe(settings, faulty)


def _preparing(data: Path, stop: Stop, make: Callable[[Callable[[int], None]], Stored]) -> Stored:
    """Prepare with a bar over the bytes of the data."""
    from dflash import chats, progress, run

    total = chats.size(chats.files(data))
    with progress.track("preparing data", total, unit="bytes", status=run.drifted_now()) as bar:

        def watch(read: int) -> None:
            bar.advance(read)
            if stop.asked():
                raise stop.stopped("nothing of the data is prepared yet")

        rows = make(watch)
        bar.done = total
    return rows


def _together(split: int, target: str, data: Path, out: Path, config: str, faulty: float) -> int:
    """Run `features` in several processes of one group; the exit code."""
    from dflash import cli, tensor_parallel
    from dflash.stopping import listening

    options = {"target": target, "data": data, "out": out, "config": config, "faulty": faulty, "split": split}
    arguments = ["data", "features", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    with listening() as stop:
        return tensor_parallel.run(split, cli.main, arguments, stop)


def _loaded(name: str, dtype: str, *, split: bool = False) -> Target:
    import torch

    from dflash import target as targets
    from dflash import tensor_parallel
    from dflash.graphs import DTYPES

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", tensor_parallel.rank()) if cuda else torch.device("cpu")
    if dtype == Dtype.auto:
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    say(f"the target `{name}` on {device.type} in {dtype}")
    return targets.load(name, device=device, dtype=DTYPES[dtype], split=split)
