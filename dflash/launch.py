"""Start a run's workers under torchrun's elastic agent, and start them again from the last checkpoint when one fails.

The agent runs in this process, so a scheduler's SIGTERM reaches it and the exit code is ours. Nothing is asked of
torchrun's own command line but its names: `--nnodes`, `--node-rank`, `--rdzv-endpoint` and the others mean what they
mean there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousHandler
from torch.distributed.elastic.utils.distributed import get_socket_with_port

from dflash import HANDED, checkpoint, storage
from dflash.stopping import CODES, WORD, Stop, Stopped
from dflash.topology import Nodes, Plan
from dflash.watch import HUNG, LOST
from dflash.worker import FINAL, Job
from env.errors import Exit, Failure, report

JOB = "job.json"
"""What the workers are told, in the run's folder; other nodes wait for it."""

MONITOR = 0.1
"""Seconds between two looks at the workers."""

STILL = 40.0
"""Seconds after which an agent that does not come to look at its workers is given up; it looks ten times a second."""

JOIN = 600
"""Seconds that a node waits for the others to (re)join; `--rdzv-conf join_timeout=N` changes it."""


class Agent(LocalElasticAgent):
    """torchrun's agent, with three differences.

    A worker that has failed takes the others down at once: they have nothing to save, and SIGTERM means something else
    to them. A failure that is final is not tried again. And a signal to stop is handed to the workers, who save first.
    """

    def __init__(self, plan: Plan, stop: Stop, say: Callable[[str], None], progress: Callable[[], str], **kwargs: Any):
        super().__init__(**kwargs)
        self._plan, self._stop, self._say, self._progress = plan, stop, say, progress
        self._deadline = math.inf
        self.over = threading.Event()
        self.failed: int | None = None
        """Exit code of the worker that failed first, in the last round."""

    def look_out(self) -> None:
        """End the launcher when its own work stands still: over a cable that was cut, a store's answer may never come.

        Runs in a thread of its own.
        """
        while not self.over.wait(1.0):
            if time.monotonic() > self._deadline:
                self._kill()
                os._exit(report(_absent(self._plan.nodes, TimeoutError("no answer from the store of the nodes"))))

    def pids(self) -> list[int]:
        """Processes of the workers of this node that run."""
        if self._pcontext is None:
            return []
        handlers = self._pcontext.subprocess_handlers.values()  # type: ignore[attr-defined]  # workers are programs
        return [handler.proc.pid for handler in handlers if handler.proc.poll() is None]

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self._stop.asked():
            raise self._stop.stopped("the workers were about to start again from the newest checkpoint")
        take_signals(_before_workers(self._stop))
        join = float(self._plan.nodes.rdzv_conf.get("join_timeout", JOIN))
        self._deadline = time.monotonic() + join + STILL
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # One name for the round on all nodes: the number of restarts, which torch would take, may differ between them.
        store = worker_group.store
        assert store is not None
        if worker_group.group_rank == 0:
            store.set("dflash/round", uuid.uuid4().hex)
        os.environ["DFLASH_ROUND"] = store.get("dflash/round").decode()
        pids = super()._start_workers(worker_group)
        take_signals(self._forward)  # the agent has just taken them for itself
        if self._stop.asked():
            self._forward(0, None)
        return pids

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if number:
            if self._stop.signal is not None:  # for whoever cannot wait
                self._kill()
            self._stop.note(number, None)
        assert self._stop.signal is not None
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, self._stop.signal)

    def _kill(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # with all that it has started to compile for it

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._deadline = time.monotonic() + STILL
        assert self._pcontext is not None
        handlers = self._pcontext.subprocess_handlers  # type: ignore[attr-defined]
        ended = {local: handler.proc.poll() for local, handler in handlers.items()}
        failed = {local: code for local, code in ended.items() if code}
        if failed:
            local, code = min(failed.items(), key=lambda item: item[1] == LOST)
            rank = worker_group.workers[local].global_rank
            self.failed = code
            if code in FINAL or self._stop.asked():
                self._remaining_restarts = 0
            self._kill()
            self._tell(rank, code)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _tell(self, rank: int, code: int) -> None:
        who = "the worker" if self._plan.launcher == "threads" else str(self._plan.topology.role(rank))
        left = self._remaining_restarts
        then = f"all start again from {self._progress()} ({left - 1} of {self._plan.max_restarts} restarts left)"
        if code in FINAL:
            return  # its own sentence is enough
        self._say(f"{who} {_how(code)}; {then if left else 'no restart is left'}")

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._kill()
        super()._stop_workers(worker_group)


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return {HUNG: "hung", LOST: "lost a peer"}.get(code, f"failed with exit code {code}")


def take_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Let SIGINT and SIGTERM go to `handler`."""
    for number in CODES:
        signal.signal(number, handler)


def hush() -> None:
    """Silence torch's agent: what it would say, we say. Some of its loggers have a level of their own."""
    quiet = ("torch.distributed.elastic", "torch.distributed.launcher")
    for name in (*quiet, *(name for name in logging.root.manager.loggerDict if name.startswith(quiet))):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def run(plan: Plan, job: Job, stop: Stop, *, say: Callable[[str], None], places: Path) -> None:
    """Run the workers until they have trained to the end.

    Args:
        plan: how they are spread.
        job: what they do.
        stop: where a signal is noted.
        say: what must be said aloud.
        places: the folder of the checkpoints.

    Raises:
        Failure: with the code of the worker that failed for good; Exit.UNREACHABLE, when a node does not come (back).
    """
    hush()
    place = Path(job.folder) / JOB
    if plan.nodes.node_rank == 0:
        storage.write(place, json.dumps(asdict(job)).encode())
    before = {number: signal.getsignal(number) for number in CODES}
    with _environment(plan), tempfile.TemporaryDirectory(prefix="dflash-agent-") as logs:
        word = Path(logs, "stopped")
        os.environ[WORD] = str(word)
        handler = rendezvous.get_rendezvous_handler(_rendezvous(plan.nodes))
        spec = WorkerSpec(
            role="dflash",
            local_world_size=plan.local,
            entrypoint=sys.executable,
            args=("-P", "-m", "dflash.worker", str(place.absolute())),
            rdzv_handler=handler,
            max_restarts=plan.max_restarts,
            monitor_interval=MONITOR,
            local_addr=plan.nodes.local_addr,
        )
        agent = Agent(
            plan,
            stop,
            say,
            lambda: f"step {checkpoint.steps(places)[-1]}" if checkpoint.steps(places) else "the beginning",
            spec=spec,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            exit_barrier_timeout=30,
        )
        take_signals(_before_workers(stop))
        if plan.nodes.nnodes > 1:
            threading.Thread(target=agent.look_out, name="look-out", daemon=True).start()
        try:
            result = agent.run()
        except (RendezvousError, RuntimeError, OSError) as error:
            if stop.asked():
                raise stop.stopped("nothing was under way") from None
            raise _absent(plan.nodes, error) from error
        finally:
            if word.exists():
                stop.ask(signal.SIGTERM)  # another node was asked
            agent.over.set()
            closing = threading.Thread(target=_close, args=(handler,), daemon=True)
            closing.start()
            closing.join(10.0)  # over a cable that was cut it would wait for a quarter of an hour
            for number, old in before.items():
                signal.signal(number, old)
    if result is None or result.is_failed():
        if stop.asked() and agent.failed not in FINAL:  # a worker that had hardly begun dies of the signal itself
            raise stop.stopped("nothing was under way that the newest checkpoint does not have")
        raise _failed(agent, plan)


def _close(handler: RendezvousHandler) -> None:
    with contextlib.suppress(RendezvousError, RuntimeError, OSError):
        handler.shutdown()


def _before_workers(stop: Stop) -> Callable[[int, FrameType | None], None]:
    def handler(number: int, frame: FrameType | None) -> None:
        stop.note(number, frame)
        raise Stopped(CODES[signal.Signals(number)], "while the nodes of the run looked for each other")

    return handler


@contextlib.contextmanager
def _environment(plan: Plan) -> Iterator[None]:
    """Workers get the environment that this process was handed: torch has written into ours."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(HANDED)
    if plan.nodes.nnodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name need not lead to the host
    if plan.local > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // plan.local)))
    # those that the agent would take for itself; when it dies of another one, workers see that it has gone
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _rendezvous(nodes: Nodes) -> RendezvousParameters:
    conf: dict[str, Any] = {"join_timeout": str(JOIN), "read_timeout": "20", **nodes.rdzv_conf}
    endpoint = nodes.rdzv_endpoint
    if nodes.nnodes == 1 and not endpoint:
        with contextlib.closing(get_socket_with_port()) as free:
            endpoint = f"localhost:{free.getsockname()[1]}"
    conf["is_host"] = "true" if nodes.node_rank == 0 else "false"
    return RendezvousParameters(
        backend="c10d",
        endpoint=endpoint,
        run_id=nodes.rdzv_id or "dflash",
        min_nodes=nodes.nnodes,
        max_nodes=nodes.nnodes,
        local_addr=nodes.local_addr or ("localhost" if nodes.nnodes == 1 else None),
        **conf,
    )


def _absent(nodes: Nodes, error: Exception) -> Failure:
    where = nodes.rdzv_endpoint or "this host"
    kind = type(error).__name__
    return Failure(
        Exit.UNREACHABLE,
        f"node {nodes.node_rank} of {nodes.nnodes} does not find the others at {where}",
        details=[f"{kind}: {(str(error).strip().splitlines() or ['not all of them came in time'])[0]}"],
        hint="the same command on every node goes on from the newest checkpoint",
    )


def _failed(agent: Agent, plan: Plan) -> Failure:
    code = agent.failed
    if code is not None and code in FINAL:
        return Failure(Exit(code), "the workers were stopped: what one of them said above is final")
    how = "stopped" if code is None else _how(code)
    return Failure(
        Exit.TRAINING,
        f"the last of {plan.max_restarts + 1} starts of the workers has failed: one of them {how}",
        hint="what it said is above; the same command goes on from the newest checkpoint",
    )


def wait_for_job(wanted: Job, nodes: Nodes, say: Callable[[str], None], stop: Stop) -> None:
    """Let a node other than 0 wait until node 0 has done what is done once: target, samples, packing.

    What an earlier start has left there, under another topology perhaps, is not node 0's word for this one.

    Raises:
        Failure: Exit.USAGE, when node 0 prepares something else.
        Stopped: when a signal asked for it.
    """
    place, begun, said = Path(wanted.folder) / JOB, time.time(), False
    patience = float(nodes.rdzv_conf.get("join_timeout", JOIN))
    here = json.loads(json.dumps(asdict(wanted)))
    while True:
        prepared, written = _prepared(place)
        prepared |= {"status": wanted.status} if prepared else {}
        differing = [name for name, value in here.items() if prepared.get(name) != value]
        if not differing:
            return
        if prepared and (written > begun or time.time() - begun > patience):
            raise Failure(
                Exit.USAGE,
                f"node {nodes.node_rank} was given something else than node 0: {', '.join(differing)}",
                details=[f"{name}: {here[name]} here, {prepared.get(name)} there" for name in differing],
                hint="give every node the same command; only `--node-rank` and `--local-addr` differ",
            )
        if not said:
            say(f"node {nodes.node_rank} waits for node 0 to prepare `{wanted.folder}`, which both must share")
            said = True
        if stop.asked():
            raise stop.stopped("while node 0 prepared the run")
        time.sleep(0.5)


def _prepared(place: Path) -> tuple[dict[str, Any], float]:
    """What node 0 has written for the others, and when; nothing where it has not yet."""
    try:
        found: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
        return found, place.stat().st_mtime
    except FileNotFoundError:
        return {}, 0.0
