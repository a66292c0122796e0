"""Which worker does what: roles by rank, and which pass of which step belongs to whom. Nothing here knows a device.

A step has `optimizer.accumulate` forward passes of `shapes.rows` packed rows each. A pass is the unit that is handed
out, so the shapes of the compiled graphs, and with them the baked cache, are the same under any topology. Which pass
goes where follows from its number alone, never from who is ready first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from dflash.config import Optimizer
from env.errors import Exit, Failure

Launcher = Literal["processes", "threads"]
MOST = 64
"""Workers on a node without GPUs: each takes a gigabyte, and a slip of the finger must not start a thousand."""
NUMBERS = frozenset((
    "join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "read_timeout",
    "keep_alive_interval", "keep_alive_max_attempt",
))  # fmt: skip
"""Settings of torch's rendezvous that are whole numbers."""
FORMS = "`T:D` (targets:drafters, as in `5:3`) or `colocated` (`colocated:N` for N workers)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """What one worker is."""

    kind: Literal["target", "drafter", "both"]
    """Runs the target, trains a drafter, or does both by turns."""
    number: int
    """Its number among those of its kind."""

    @property
    def drafts(self) -> bool:
        """Whether it trains a drafter."""
        return self.kind != "target"

    def __str__(self) -> str:
        return f"{'worker' if self.kind == 'both' else self.kind} {self.number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """How many workers there are of each kind."""

    targets: int
    """Workers that run the target and nothing else; 0 when each drafter has a target of its own."""
    drafters: int
    """Workers that train."""

    def __post_init__(self) -> None:
        if self.targets < 0 or self.drafters < 1:
            raise ValueError(f"{self.targets}:{self.drafters}: at least one worker must train")

    @property
    def colocated(self) -> bool:
        """Whether each worker does both."""
        return self.targets == 0

    @property
    def workers(self) -> int:
        """How many there are in all."""
        return self.targets + self.drafters

    def role(self, rank: int) -> Role:
        """The role of a global rank: targets come first, so that drafters are neighbours."""
        if self.colocated:
            return Role(kind="both", number=rank)
        if rank < self.targets:
            return Role(kind="target", number=rank)
        return Role(kind="drafter", number=rank - self.targets)

    def target_rank(self, number: int) -> int:
        """Global rank of a target."""
        return number

    def drafter_rank(self, number: int) -> int:
        """Global rank of a drafter."""
        return self.targets + number

    def drafter_of(self, micro: int) -> int:
        """The drafter that has pass `micro` (0, 1, ...) of every step."""
        return micro % self.drafters

    def target_of(self, passed: int) -> int:
        """The target that has pass `passed`, counted from the beginning of the run."""
        return passed % self.targets

    def __str__(self) -> str:
        if self.colocated:
            return "colocated" if self.drafters == 1 else f"colocated:{self.drafters}"
        return f"{self.targets}:{self.drafters}"


ONE = Topology(targets=0, drafters=1)
"""One worker that does both: today's laptop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """How many nodes there are and how they find each other; the names are torchrun's."""

    nnodes: int = 1
    """Nodes of the run."""
    node_rank: int = 0
    """This node's number; node 0 hosts the store and does all that is done once."""
    rdzv_endpoint: str = ""
    """HOST:PORT of node 0."""
    rdzv_id: str = ""
    """The same on all nodes of a run."""
    rdzv_conf: dict[str, str] = field(default_factory=dict)
    """Further settings of the rendezvous, such as `join_timeout`."""
    local_addr: str | None = None
    """This node's address, where its host name does not lead to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a run is spread."""

    topology: Topology
    """Who does what."""
    launcher: Launcher = "processes"
    """A process a worker, or one process with a thread a worker."""
    nodes: Nodes = field(default_factory=Nodes)
    """Over which nodes."""
    max_restarts: int = 3
    """How often the workers are started again after one has failed."""

    @property
    def local(self) -> int:
        """Processes on this node."""
        return 1 if self.launcher == "threads" else self.topology.workers // self.nodes.nnodes


def parse(text: str, *, visible: int) -> Topology:
    """Read `--topology`.

    Args:
        text: what stands there.
        visible: workers that the visible devices of all nodes have room for; what `colocated` alone means.

    Raises:
        Failure: Exit.USAGE.
    """
    split = re.fullmatch(r"(\d{1,5}):(\d{1,5})", text)
    together = re.fullmatch(r"colocated(?::(\d{1,5}))?", text)
    if split:
        targets, drafters = int(split[1]), int(split[2])
        if targets == 0 or drafters == 0:
            raise Failure(
                Exit.USAGE,
                f"--topology {text}: there must be at least one target and one drafter",
                hint="`--topology colocated` lets every worker do both",
            )
        return Topology(targets=targets, drafters=drafters)
    if together and together[1] != "0":
        return Topology(targets=0, drafters=int(together[1] or max(visible, 1)))
    raise Failure(Exit.USAGE, f"--topology {text}: must be {FORMS}")


def check(topology: Topology, *, accumulate: int, nodes: int, devices: int | None) -> None:
    """Refuse what cannot be.

    Args:
        topology: what was asked for.
        accumulate: forward passes of a step.
        nodes: nodes that share the workers equally.
        devices: GPUs visible on this node; None on CPUs, which hold any number of workers.

    Raises:
        Failure: Exit.USAGE, or Exit.HOST when there are too few GPUs.
    """
    if topology.drafters > accumulate:
        passes = "one forward pass" if accumulate == 1 else f"{accumulate} forward passes"
        raise Failure(
            Exit.USAGE,
            f"--topology {topology}: {topology.drafters} drafters cannot share a step of {passes}",
            hint=f"set `optimizer.accumulate` to {topology.drafters} or a multiple of it (and `shapes.rows` lower, to "
            "keep the rows of a step), or take fewer drafters",
        )
    if topology.workers % nodes:
        raise Failure(
            Exit.USAGE,
            f"--topology {topology}: {topology.workers} workers cannot be spread equally over {nodes} nodes",
        )
    here = topology.workers // nodes
    if devices is not None and here > devices:
        raise Failure(
            Exit.HOST,
            f"--topology {topology}: {here} workers on this node, but {devices} visible GPUs",
            hint="each worker has a GPU of its own; CUDA_VISIBLE_DEVICES says which are visible",
        )
    if here > MOST:
        raise Failure(
            Exit.HOST,
            f"--topology {topology}: {here} workers on this node, which has no GPU; at most {MOST} share a node's CPUs",
        )


def planned(
    text: str,
    launcher: Literal["processes", "threads"],
    nodes: Nodes,
    max_restarts: int,
    *,
    recipe: Optimizer,
    run: object,
) -> Plan:
    """The plan that the command line asks for, checked against what is here.

    Raises:
        Failure: see `parse`, `check` and `require_shardable`; Exit.USAGE, when the nodes could not find each other.
    """
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else None
    topology = parse(text, visible=(devices or 1) * nodes.nnodes)
    check(topology, accumulate=recipe.accumulate, nodes=nodes.nnodes, devices=devices)
    if recipe.shard and topology.drafters > 1:
        require_shardable(topology, launcher, recipe.accumulate)
    if nodes.nnodes > 1:
        missing = [] if nodes.rdzv_endpoint else ["--rdzv-endpoint HOST:PORT of node 0"]
        named = run is not None or nodes.rdzv_id
        missing += [] if named else ["--run FOLDER that all nodes share (or --rdzv-id, which then names one in runs/)"]
        if missing:
            raise Failure(Exit.USAGE, f"{nodes.nnodes} nodes need {' and '.join(missing)}")
        if launcher == "threads":
            raise Failure(Exit.USAGE, "--launcher threads: threads of one process are on one node, not on several")
    _require_rendezvous(nodes)
    if nodes.node_rank >= nodes.nnodes:
        raise Failure(Exit.USAGE, f"--node-rank {nodes.node_rank} is not one of {nodes.nnodes} nodes (0 is the first)")
    return Plan(topology=topology, launcher=launcher, nodes=nodes, max_restarts=max_restarts)


def _require_rendezvous(nodes: Nodes) -> None:
    """Refuse settings that torch would stumble over once all is prepared."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    for key, value in nodes.rdzv_conf.items():
        if key in NUMBERS and not re.fullmatch(r"0*[1-9]\d{0,8}", value.strip()):
            message = f"--rdzv-conf {key}={value}: must be a whole number from 1 on"
            raise Failure(Exit.USAGE, message, hint="as in `--rdzv-conf join_timeout=600`")
    store = nodes.rdzv_conf.get("store_type", "tcp").strip().lower()
    if store not in {"tcp", "file"}:
        raise Failure(Exit.USAGE, f"--rdzv-conf store_type={store}: must be `tcp` or `file`")
    if store == "tcp":
        try:
            parse_rendezvous_endpoint(nodes.rdzv_endpoint, default_port=0)
        except ValueError:
            message = f"--rdzv-endpoint {nodes.rdzv_endpoint}: must be HOST:PORT, the port a number below 65536"
            raise Failure(Exit.USAGE, message, hint="as in `--rdzv-endpoint node0:29400`") from None


def require_shardable(topology: Topology, launcher: Literal["processes", "threads"], accumulate: int) -> None:
    """Refuse a topology that `optimizer.shard` cannot have.

    Raises:
        Failure: Exit.USAGE.
    """
    if launcher == "threads":
        raise Failure(
            Exit.USAGE,
            "--launcher threads: threads have no process group, over which `optimizer.shard` spreads the state",
            hint="take the launcher `processes`, or set `optimizer.shard = false`",
        )
    if accumulate % topology.drafters:
        raise Failure(
            Exit.USAGE,
            f"--topology {topology}: with `optimizer.shard`, {topology.drafters} drafters cannot share {accumulate} "
            "passes a step: all gather a layer's weights together, so each needs as many passes as the others",
            hint=f"set `optimizer.accumulate` to a multiple of {topology.drafters}",
        )


def remarks(topology: Topology, recipe: Optimizer) -> list[str]:
    """What must be said of a recipe under a topology: drafters that idle, an option without effect."""
    rest = recipe.accumulate % topology.drafters
    said = []
    if rest:
        said.append(
            f"{recipe.accumulate} passes a step do not divide among {topology.drafters} drafters: "
            f"{topology.drafters - rest} of them wait for the others in every step; the numbers are the same"
        )
    if recipe.shard and topology.drafters == 1:
        said.append("`optimizer.shard` changes nothing: one drafter has nobody to spread its state over")
    return said
