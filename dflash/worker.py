"""One worker process of a run: `python -m dflash.worker JOB`, started by the launcher's agent (see `dflash.launch`).

Under the launcher `processes` it is one target or one drafter and sees one GPU; under `threads` it holds all of them, a
thread each. Ends with 0 when the run is done or was asked to stop, with a Failure's own code when that is final, and
with another one when the agent may start it again from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash import config, shortage
from dflash.stopping import Stop, Stopped, hear, leave_word
from dflash.topology import Topology
from env.errors import Exit, Failure, report

if TYPE_CHECKING:
    from dflash.data import Packed
    from dflash.trainer import Step

GRACE = 20.0
"""Seconds that a worker which has lost a peer keeps silent: the peer's own words come first, and the agent ends it."""

HUSH = 2.0
"""Seconds that a worker waits which has nothing to add to what another is saying: the first to end ends the others."""

FINAL = frozenset(Exit) - {Exit.DONE, Exit.BUG, Exit.INTERRUPTED, Exit.TERMINATED}
"""Exit codes after which starting again would only fail again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What the launcher tells every worker."""

    tables: dict[str, Any]
    """The configuration (`config.to_tables`)."""
    seed: int
    """The run's seed."""
    target: str
    """Folder or hub name of the target."""
    rows: str
    """File of the packed rows, or folder of prepared data."""
    folder: str
    """The run's folder."""
    topology: list[int]
    """Targets and drafters."""
    launcher: str
    """`processes` or `threads`."""
    status: str
    """What every status line says of the environment."""
    features: str = ""
    """Folder of features to read instead of having targets compute them, with rows of their own; empty for none."""

    @property
    def settings(self) -> config.Config:
        """The configuration."""
        return config.parse(self.tables, "the configuration of the run")

    def packed(self) -> Packed:
        """The packed rows."""
        if self.features:
            from dflash import features

            return features.found(Path(self.features))[0].rows
        if Path(self.rows).is_dir():
            from dflash import prepared

            return prepared.opened(Path(self.rows))
        from dflash import data

        return data.read(Path(self.rows))

    @property
    def shape(self) -> Topology:
        """The topology."""
        return Topology(targets=self.topology[0], drafters=self.topology[1])


def main(argv: Sequence[str]) -> int:
    """Be the worker that the environment names, and return its exit code."""
    job = Job(**json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    stop = Stop()
    hear(stop)
    if job.launcher == "processes":
        own_gpu(os.environ, int(os.environ["LOCAL_RANK"]))
    try:
        if job.launcher == "processes":
            from dflash import processes

            processes.work(job, stop)
        else:
            from dflash import threads

            threads.work(job, stop)
    except Stopped:
        leave_word()
        return 0
    except Failure as failure:
        if job.launcher == "processes" and not processes.first_to_say(str(failure)):
            time.sleep(HUSH)
            return int(failure.code)
        return report(failure)
    except Exception as error:  # noqa: BLE001  # the last frame: it decides what the agent sees, and prints the trace
        return _ended_by(error)
    return 0


def own_gpu(environ: Any, local: int) -> None:
    """Leave one GPU visible, so that it is `cuda:0` for every worker and one baked cache serves all of them."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    environ["CUDA_VISIBLE_DEVICES"] = str(local) if visible is None else ([*visible.split(","), *[""] * local])[local]


def _ended_by(error: Exception) -> int:
    from dflash.flow import Lost
    from dflash.watch import LOST, first

    said = isinstance(error, Lost) or any(word in str(error) for word in ("Connection", "connect", "gloo", "NCCL"))
    if said:
        time.sleep(GRACE)  # whoever went down speaks first, and the agent ends this process meanwhile
        print(f"error: a worker has lost a peer: {first(error)}", file=sys.stderr, flush=True)
        return LOST
    if (short := shortage.told(error)) is not None:
        code = report(short)
        # memory is not final: what took it may be gone, and steps that were saved are not lost
        return int(Exit.BUG) if short.code is Exit.HOST else code
    traceback.print_exc()
    return int(Exit.BUG)


@contextlib.contextmanager
def status_line(job: Job, total: int, first: Callable[[], None]) -> Iterator[Callable[[Step], None]]:
    """The progress of training, drawn by drafter 0; yields what it must be told of each step.

    `first` is called before anything else when this start's first step is done, and there is something to lose.
    """
    from dflash import progress

    begun = False
    with progress.track("training the drafter", total, status=job.status) as bar:

        def watch(step: Step) -> None:
            nonlocal begun
            if not begun:
                first()
            begun = True
            bar.reached(step.step, loss=step.loss, tokens=step.tokens, note=step.note)

        yield watch


def say(line: str) -> None:
    """One line on standard error."""
    with contextlib.suppress(BrokenPipeError):
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code) if code else sys.exit(0)
