"""The command line of training: arguments in, a run out, an exit code for the shell.

torch is imported only once the arguments are known to be right: a wrong flag should not take four seconds to be told.
"""

from __future__ import annotations

import errno
import itertools
import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dflash import cli_bench, cli_data, shortage
from dflash.stopping import Stopped, tell
from env.cache import fitting
from env.errors import Exit, Failure, full_output, nobody_reads, report

EXAMPLES = """
Examples:

  nox -s train                                   the small preset, on this machine

  nox -s train -- --seed 1 --run runs/second     another seed, another folder

  nox -s train -- --config mine.toml             your own, on top of a preset

  nox -s train -- --target FOLDER_OR_HUB_NAME    a target that is already there

  nox -s train -- --text ~/notes                 another text to train on

  nox -s train -- --target T --data chats.jsonl  chats or texts of your own, as JSON lines

  nox -s train -- --target T --features DIR      features that `nox -s data -- features` wrote

  nox -s train -- --config qwen3-8b --target T --topology 4:4   four GPUs run the target, four train the drafter

A run that was stopped goes on where it was when the same command is given again.
"""

USAGE_ERRORS: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if issubclass(kind, Exception) and kind.__name__ == "ClickException"
)
"""What every complaint about the command line derives from; typer brings its own click, which has no public name."""

WORKERS = "Workers"

LARGEST_SEED = 2**63 - 1
"""What torch takes."""

PATHS = ("--run", "--text", "--data", "--features", "--out", "--key", "--timeline")
"""Options that name a place. An empty one would be the folder where the user stands, with a run spread out in it."""

OF_WORKERS = ("max_restarts", "node_rank", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "local_addr")
"""Options that mean nothing to a run of one worker."""


class Launcher(StrEnum):
    """What a worker is."""

    processes = "processes"
    threads = "threads"


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train DFlash drafters.",
)
app.add_typer(cli_data.app, name="data")
app.command(epilog=cli_bench.EXAMPLES)(cli_bench.bench)


@app.command(epilog=EXAMPLES)
def train(
    context: typer.Context,
    config: Annotated[str, typer.Option(help="Preset (tiny, qwen3-4b, qwen3-8b) or a TOML file.")] = "tiny",
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of everything that is drawn.")] = 0,
    run: Annotated[
        Path | None, typer.Option(help="Folder of the run. By default in runs/: an unfinished or a new one.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Target: folder or hub name. By default a small one is trained.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 file or folder of them. By default the shipped text.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Chats or texts: a file of JSON lines, or a folder of .jsonl files.")
    ] = None,
    features: Annotated[
        Path | None, typer.Option(help="Folder that `nox -s data -- features` wrote: no forward pass of the target.")
    ] = None,
    faulty: cli_data.FaultyOption = 0.1,
    topology: Annotated[
        str | None,
        typer.Option(
            metavar="T:D|colocated",
            help="Workers: T targets and D drafters, or `colocated` for GPUs that do both. By default one.",
            rich_help_panel=WORKERS,
        ),
    ] = None,
    launcher: Annotated[
        Launcher, typer.Option(help="A process a worker, or one process with a thread a GPU.", rich_help_panel=WORKERS)
    ] = Launcher.processes,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="PET_MAX_RESTARTS",
            help="How often workers are started again after one failed.",
            rich_help_panel=WORKERS,
        ),
    ] = 3,
    nnodes: Annotated[
        int, typer.Option(min=1, envvar="PET_NNODES", help="Nodes of the run.", rich_help_panel=WORKERS)
    ] = 1,
    node_rank: Annotated[
        int, typer.Option(min=0, envvar="PET_NODE_RANK", help="This node's number.", rich_help_panel=WORKERS)
    ] = 0,
    rdzv_endpoint: Annotated[
        str, typer.Option(envvar="PET_RDZV_ENDPOINT", help="HOST:PORT of node 0.", rich_help_panel=WORKERS)
    ] = "",
    rdzv_id: Annotated[
        str, typer.Option(envvar="PET_RDZV_ID", help="The same on all nodes of a run.", rich_help_panel=WORKERS)
    ] = "",
    rdzv_conf: Annotated[
        str,
        typer.Option(envvar="PET_RDZV_CONF", help="As in `join_timeout=600,read_timeout=60`.", rich_help_panel=WORKERS),
    ] = "",
    local_addr: Annotated[
        str | None,
        typer.Option(
            envvar="PET_LOCAL_ADDR",
            help="This node's address, if its name does not lead to it.",
            rich_help_panel=WORKERS,
        ),
    ] = None,
) -> None:
    """Train a drafter for a target, decode with it speculatively, and export it."""
    from dflash import config as configs

    if topology is None:
        _require_no(OF_WORKERS, context, "only heeded with a `--topology`", "as in `--topology 5:3`")
    if data is None:
        _require_no(("faulty",), context, "about the lines of a `--data`", "as in `--data chats.jsonl`")
    settings = configs.load(config)
    from dflash.pipeline import RUNS, Request, follow

    plan = None
    if topology is not None:
        from dflash.topology import Nodes, planned

        nodes = Nodes(
            nnodes=nnodes,
            node_rank=node_rank,
            rdzv_endpoint=rdzv_endpoint,
            rdzv_id=rdzv_id,
            rdzv_conf=dict(part.partition("=")[::2] for part in rdzv_conf.split(",") if part),
            local_addr=local_addr,
        )
        plan = planned(topology, launcher.value, nodes, max_restarts, recipe=settings.optimizer, run=run)
    elif nnodes > 1 or launcher is not Launcher.processes:
        raise Failure(Exit.USAGE, "--nnodes and --launcher need a `--topology`", hint="as in `--topology 5:3`")
    name = f"{Path(config).stem}-seed{seed}"
    if nnodes > 1 and run is None:
        run = RUNS / f"{name}-{rdzv_id}"  # the same on all nodes, and when the scheduler starts the job again
    follow(
        Request(
            settings=settings,
            name=name,
            seed=seed,
            run=run,
            target=target,
            text=text,
            plan=plan,
            data=data,
            features=features,
            faulty=faulty,
        )
    )


def _require_no(names: Sequence[str], context: typer.Context, why: str, hint: str) -> None:
    """Refuse options that would do nothing; a job system may set their variables (`PET_…`) for every process."""
    for name in names:
        if str(getattr(context.get_parameter_source(name), "name", "")) == "COMMANDLINE":
            raise Failure(Exit.USAGE, f"`--{name.replace('_', '-')}` is {why}", hint=hint)


VERIFY_EXAMPLES = """
Examples:

  nox -s verify                                       the small preset, on this machine

  nox -s verify -- --config qwen3-8b --harvest        and bring back which kernels won here

  nox -s verify -- --timeline first.png               and draw where a first step's time goes, cold and baked

  nox -s verify -- --config qwen3-8b --device cuda:5  for a process that sees several cards
"""


@app.command(epilog=VERIFY_EXAMPLES)
def verify(
    config: Annotated[str, typer.Option(help="Preset (tiny, qwen3-4b, qwen3-8b) or a TOML file.")] = "tiny",
    device: Annotated[str, typer.Option(help="cpu, cuda:0, cuda:5; by default the first GPU, or the CPU.")] = "",
    harvest: Annotated[
        bool,
        typer.Option("--harvest", help="Then seal the kernels' winners that this device has found, as a new cache."),
    ] = False,
    key: Annotated[
        Path | None, typer.Option(help="With --harvest: a private SSH key that signs the new cache.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Draw a first step's time, cold against baked: a PNG, and JSON beside it.")
    ] = None,
) -> None:
    """Replay one training step from the baked cache: every promised key must hit, and nothing may miss."""
    from dflash import config as configs

    if key is not None and not harvest:
        raise Failure(
            Exit.USAGE, "`--key` signs what `--harvest` seals, which is not asked for", hint="add `--harvest`"
        )
    configs.load(config)  # a wrong one is told before torch is imported
    if not re.fullmatch(r"|cpu|cuda(:\d{1,3})?", device):
        raise Failure(Exit.USAGE, f"--device {device}: must be `cpu`, or a GPU as in `cuda:0`")
    from dflash.caches import verified

    for line in verified(config, device, harvest=harvest, key=key, picture=timeline):
        print(line)


def _session(argv: Sequence[str]) -> str:
    return argv[0] if argv and argv[0] in {"bench", "data", "verify"} else "train"


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; whatever a user can mend is one sentence, not a traceback."""
    try:
        _require_names(argv)
        code = typer.main.get_command(app).main(list(argv), prog_name="dflash", standalone_mode=False)
    except Failure as failure:
        return report(failure)
    except Stopped as stopped:
        return tell(stopped.code, stopped.where)
    except USAGE_ERRORS as error:
        return _misused(error, argv)
    except SystemExit as ended:
        return _cut_off(ended)
    except (typer.Abort, KeyboardInterrupt):
        return int(Exit.INTERRUPTED)
    except Exception as error:
        refused = _refused(error)
        if refused is None:
            raise
        return report(refused)
    if (refused := full_output()) is not None:
        return report(refused)
    return int(code or 0)


def _cut_off(ended: SystemExit) -> int:
    """What click's end with 1, without a word, for any pipe that broke, comes to; other ends are as they were."""
    broken = ended.__context__
    if not isinstance(broken, BrokenPipeError):
        raise ended
    if not nobody_reads():
        raise broken from None
    return int(Exit.DONE)


def _require_names(argv: Sequence[str]) -> None:
    for option, value in itertools.pairwise([*argv, "-"]):
        if (option in PATHS and not value) or option in {f"{name}=" for name in PATHS}:
            name = option.removesuffix("=")
            raise Failure(Exit.USAGE, f"`{name}` names nothing", hint="if a variable stands there, it is empty")


def _misused(error: Exception, argv: Sequence[str]) -> int:
    said = error.format_message() if hasattr(error, "format_message") else str(error)
    if not said:  # a command without its own: the help, which is all there is to say, has been printed
        return int(Exit.USAGE)
    return report(Failure(Exit.USAGE, said, hint=f"`nox -s {_session(argv)} -- --help` lists what there is"))


def _refused(error: Exception) -> Failure | None:
    """What an error that is no bug of ours comes to: full disk or memory, a kernel that does not fit; or None."""
    if isinstance(error, OSError):
        # an error without a file's name may be that of what was printed; then not even a line end can be written
        if error.filename is None and (refused := full_output(b"\n")) is not None:
            return refused
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS}:
            place = f" in `{error.filename}`" if error.filename else ""
            return Failure(Exit.STORAGE, f"cannot write{place}: {error.strerror}")
    return fitting.misfit(error) or shortage.told(error)
