"""A worker that is a process of its own: it finds the others through the agent's store and is one target or drafter."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore  # public as torch.distributed's, but without types there
from torch.distributed.device_mesh import DeviceMesh

from dflash import flow, passes, run, trainer
from dflash.graphs import DTYPES
from dflash.memory import Shards
from dflash.pulse import START, WORK, Pulse
from dflash.stopping import Stop, leave_word
from dflash.team import Processes
from dflash.topology import Role
from dflash.watch import Watch, end
from dflash.worker import Job, say, status_line
from env.errors import Exit

FOREVER = timedelta(hours=12)
"""What transports are told: whether a peer hangs is judged by the watch, which knows what it is doing."""


def work(job: Job, stop: Stop) -> None:
    """Be the worker of this process's rank until the run ends.

    Raises:
        Failure, Stopped: see `trainer.train`.
        Lost: when a peer has gone.
    """
    rank, shape = int(os.environ["RANK"]), job.shape
    role = shape.role(rank)
    pulse = Pulse(f"{role} ({os.uname().nodename}, process {os.getpid()})")
    board = _store(rank)
    names = [str(shape.role(other)) for other in range(shape.workers)]
    watch = Watch([pulse], stop, board=board, rank=rank, peers=names, ended=None if role.drafts else _over)
    watch.start()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("group", _store(rank)),
        rank=rank,
        world_size=shape.workers,
        timeout=FOREVER,
    )
    drafters = dist.new_group([shape.drafter_rank(number) for number in range(shape.drafters)], timeout=FOREVER)
    assert drafters is not None
    shards = _shards(job, drafters, device)
    if role.drafts:
        team = Processes(role.number, shape.drafters, drafters, pulse)
        place = trainer.Place(device=device, team=team, shards=shards, pulse=pulse)
        _draft(job, role, rank, place, stop, board, watch.first_step)
    else:
        _serve(job, role, rank, device, pulse)
    with pulse.wait("waiting for the others to end", "drafters"), flow.lost("at the end"):
        dist.all_reduce(torch.zeros(1))  # a barrier, over Gloo everywhere
    watch.over.set()
    dist.destroy_process_group()


def _shards(job: Job, drafters: dist.ProcessGroup, device: torch.device) -> Shards | None:
    """Among whom the drafters' state is spread; called by all workers, since all take part in making a group."""
    shape = job.shape
    if not job.settings.optimizer.shard or shape.drafters == 1:
        return None
    ranks = [shape.drafter_rank(number) for number in range(shape.drafters)]
    saving = dist.new_group(ranks, backend="gloo", timeout=FOREVER)
    if dist.get_rank() not in ranks:
        return None
    return Shards(mesh=DeviceMesh.from_group(drafters, device.type), saving=saving)


def _store(rank: int) -> PrefixStore:
    """A connection of its own to the agent's store; what an earlier round wrote there is out of sight."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with flow.lost(f"connecting worker {rank} to the store of {host}:{port}"):
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)
    store.set_timeout(timedelta(seconds=10))
    return PrefixStore(os.environ["DFLASH_ROUND"], store)


def first_to_say(sentence: str) -> bool:
    """Whether no other worker has said the same before, as all that share a state or a checkpoint may have to."""
    rank = int(os.environ["RANK"])
    try:
        said = _store(rank).compare_set(f"said/{hashlib.sha256(sentence.encode()).hexdigest()}", "", str(rank))
    except (RuntimeError, OSError, flow.Lost):
        return True
    return said.decode() == str(rank)


def _over() -> None:
    """A target has nothing to save: when the drafters have saved and stopped, what is under way is of no use."""
    leave_word()
    end(int(Exit.DONE), "")


def _draft(
    job: Job,
    role: Role,
    rank: int,
    place: trainer.Place,
    stop: Stop,
    board: PrefixStore,
    first: Callable[[], None],
) -> None:
    settings, rows = job.settings, job.packed()
    total, device, pulse = passes.total_steps(len(rows.tokens), settings), place.device, place.pulse

    def own_target(_begun: int) -> trainer.Supply:
        from dflash import features
        from dflash import target as targets

        pulse.work("loading the target", START)
        home = torch.device("cpu") if job.features else device  # where only its tables are needed
        target = targets.load(job.target, device=home, dtype=DTYPES[settings.precision.compute])
        if job.features:
            return features.Shelved(features.found(Path(job.features))[0], target, device)
        return trainer.Borrowed(target, device, settings)

    def received(begun: int) -> trainer.Supply:
        return Received(job, role, rank, device, begun, total, pulse)

    with status_line(job, total, first) if role.number == 0 else nullcontext(lambda _: None) as watch:
        try:
            outcome = trainer.train(
                settings,
                rows,
                own_target if role.kind == "both" else received,
                Path(job.folder),
                seed=job.seed,
                place=place,
                stop=stop,
                watch=watch,
                say=say,
                saved=lambda: board.set("ended", "1"),
            )
        finally:
            pulse.work("ending", START)
    board.set(f"caches/{role.number}", json.dumps(outcome.caches))
    if role.number == 0 and outcome.caches is not None:
        with pulse.wait("waiting for what the other drafters' caches answered", "drafters"):
            told = board.multi_get([f"caches/{number}" for number in range(place.team.size)])
        run.write_json(
            Path(job.folder) / "caches.json", {**outcome.caches, "drafters": [json.loads(one) for one in told]}
        )


class Received(flow.Inlet):
    """What a drafter borrows of a target that other workers run."""

    def __init__(
        self, job: Job, role: Role, rank: int, device: torch.device, begun: int, total: int, pulse: Pulse
    ) -> None:
        settings, shape = job.settings, job.shape
        sizes, dtype = settings.drafter, DTYPES[settings.precision.compute]
        self.embedding, self.head = (
            torch.empty(sizes.vocab_size, sizes.hidden_size, device=device, dtype=dtype) for _ in range(2)
        )
        with pulse.wait("waiting for target 0 to load and send its tables", "targets"):
            _start(begun, self.embedding, self.head, job, rank, device)
        width = len(sizes.target_layer_ids) * sizes.hidden_size
        like = torch.empty(settings.shapes.rows, settings.shapes.sequence, width, device=device, dtype=dtype)
        accumulate = settings.optimizer.accumulate
        due, ahead = (flow.order(shape, accumulate, begun, total, drafter=role.number) for _ in range(2))
        super().__init__(flow.ProcessTake(shape, ahead, like, pulse), due)

    def features(self, reading: passes.Pass) -> Tensor:
        """See `trainer.Supply`."""
        return self.take(reading.number, reading.tokens)


def _start(begun: int | None, embedding: Tensor, head: Tensor, job: Job, rank: int, device: torch.device) -> int:
    """What all workers do together before the first pass: agree on the first step, share tables, connect."""
    shape = job.shape
    first = torch.tensor([begun or 0])
    with flow.lost("at the start"):
        dist.broadcast(first, shape.drafter_rank(0))
        for table in (embedding, head):
            dist.broadcast(table, shape.target_rank(0))
    flow.greet(shape, rank, device)
    return int(first)


def _serve(job: Job, role: Role, rank: int, device: torch.device, pulse: Pulse) -> None:
    """Be a target: features of its passes, in their order, to the drafters that they belong to."""
    from dflash import target as targets

    settings, shape, rows = job.settings, job.shape, job.packed()
    dtype = DTYPES[settings.precision.compute]
    pulse.work("loading the target", START)
    borrowed = trainer.Borrowed(targets.load(job.target, device=device, dtype=dtype), device, settings)
    with pulse.wait("waiting for the drafters to start", "drafters"):
        begun = _start(None, borrowed.embedding.contiguous(), borrowed.head.contiguous(), job, rank, device)
    outlet = flow.ProcessOutlet(shape, pulse)
    pulse.fresh()
    accumulate, total = settings.optimizer.accumulate, passes.total_steps(len(rows.tokens), settings)
    for passed, drafter in flow.own(shape, accumulate, begun, total, target=role.number):
        step, micro = divmod(passed, accumulate)
        pulse.work(f"pass {micro + 1} of step {step + 1}", WORK)
        (reading,) = passes.passes(rows, settings, seed=job.seed, step=step, only=micro)
        features = borrowed.features(reading)
        if features.is_cuda:
            torch.cuda.current_stream().synchronize()  # or its work would count as the wait for its transfer
        outlet.put(drafter, flow.header(passed, reading.tokens, pulse), features)
    outlet.close()
