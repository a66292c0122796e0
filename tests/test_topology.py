"""Which worker does what, what cannot be, and that nothing depends on timing."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dflash import config, flow, launch, topology
from dflash.stopping import Stop
from dflash.topology import Nodes, Topology
from dflash.worker import Job
from env.errors import Exit, Failure

shapes = some.builds(Topology, targets=some.integers(1, 9), drafters=some.integers(1, 9))


def refusal(call: object, *arguments: object, **named: object) -> Failure:
    assert callable(call)
    with pytest.raises(Failure) as caught:
        call(*arguments, **named)
    return caught.value


@pytest.mark.parametrize(
    ("text", "visible", "expected"),
    [
        ("5:3", 8, Topology(targets=5, drafters=3)),
        ("1:1", 1, Topology(targets=1, drafters=1)),
        ("colocated", 4, Topology(targets=0, drafters=4)),
        ("colocated", 0, topology.ONE),
        ("colocated:2", 8, Topology(targets=0, drafters=2)),
    ],
)
def test_a_topology_is_read_as_it_is_written(text: str, visible: int, expected: Topology) -> None:
    found = topology.parse(text, visible=visible)
    assert found == expected
    assert topology.parse(str(found), visible=1) == found


@pytest.mark.parametrize("text", ["", "5", "5:3:1", "a:b", "0:3", "3:0", "colocated:0", "together", "-1:2", "5 : 3"])
def test_anything_else_is_refused_in_one_sentence(text: str) -> None:
    failure = refusal(topology.parse, text, visible=8)
    assert failure.code == Exit.USAGE
    assert f"--topology {text}" in failure.message


def test_targets_come_first_and_every_rank_has_one_role() -> None:
    shape = Topology(targets=2, drafters=2)
    assert [str(shape.role(rank)) for rank in range(4)] == ["target 0", "target 1", "drafter 0", "drafter 1"]
    assert [shape.role(rank).drafts for rank in range(4)] == [False, False, True, True]
    both = Topology(targets=0, drafters=2)
    assert [str(both.role(rank)) for rank in range(2)] == ["worker 0", "worker 1"]


@pytest.mark.parametrize(
    ("shape", "others", "code", "sentence"),
    [
        ((1, 3), {"accumulate": 2}, Exit.USAGE, "3 drafters cannot share a step of 2 forward passes"),
        ((1, 2), {"accumulate": 1}, Exit.USAGE, "2 drafters cannot share a step of one forward pass"),
        ((2, 1), {"nodes": 2}, Exit.USAGE, "3 workers cannot be spread equally over 2 nodes"),
        ((5, 3), {"devices": 4}, Exit.HOST, "8 workers on this node, but 4 visible GPUs"),
        ((99999, 1), {}, Exit.HOST, "100000 workers on this node, which has no GPU; at most 64 share a node's CPUs"),
    ],
)
def test_what_cannot_be_is_refused_with_both_values(
    shape: tuple[int, int], others: dict[str, int], code: Exit, sentence: str
) -> None:
    wanted = Topology(targets=shape[0], drafters=shape[1])
    failure = refusal(topology.check, wanted, **{"accumulate": 8, "nodes": 1, "devices": None, **others})
    assert failure.code == code
    assert sentence in failure.message


@pytest.mark.parametrize(
    ("nodes", "launcher", "run", "sentence"),
    [
        (Nodes(nnodes=2), "processes", None, "2 nodes need --rdzv-endpoint HOST:PORT of node 0 and --run FOLDER"),
        (Nodes(nnodes=2, rdzv_endpoint="a:1"), "threads", "runs/a", "threads of one process are on one node"),
        (
            Nodes(rdzv_conf={"join_timeout": "abc"}),
            "processes",
            None,
            "--rdzv-conf join_timeout=abc: must be a whole number",
        ),
        (Nodes(rdzv_conf={"read_timeout": "0"}), "processes", None, "read_timeout=0: must be a whole number from 1 on"),
        (Nodes(rdzv_conf={"store_type": "etcd"}), "processes", None, "store_type=etcd: must be `tcp` or `file`"),
        (Nodes(rdzv_endpoint="node0:abc"), "processes", None, "--rdzv-endpoint node0:abc: must be HOST:PORT"),
        (Nodes(rdzv_endpoint="node0:65536"), "processes", None, "the port a number below 65536"),
        (Nodes(node_rank=1), "processes", None, "--node-rank 1 is not one of 1 nodes"),
    ],
)
def test_nodes_that_could_not_find_each_other_are_refused(
    nodes: Nodes, launcher: topology.Launcher, run: str | None, sentence: str
) -> None:
    failure = refusal(topology.planned, "1:1", launcher, nodes, 3, recipe=config.load("tiny").optimizer, run=run)
    assert failure.code == Exit.USAGE
    assert sentence in failure.message


def test_what_torch_s_rendezvous_takes_is_let_through() -> None:
    for endpoint in ("node0:29400", "10.0.0.1", "[::1]:29400"):
        nodes = Nodes(nnodes=2, rdzv_endpoint=endpoint, rdzv_conf={"join_timeout": " 20", "timeout": "any"})
        plan = topology.planned("1:1", "processes", nodes, 3, recipe=config.load("tiny").optimizer, run="runs/a")
        assert plan.nodes == nodes
    file = Nodes(rdzv_endpoint="a/file:with:colons", rdzv_conf={"store_type": "file"})
    topology.planned("1:1", "processes", file, 3, recipe=config.load("tiny").optimizer, run=None)


def test_an_uneven_split_and_an_option_without_effect_are_said() -> None:
    recipe = config.load("tiny").optimizer
    four, shared = replace(recipe, accumulate=4), replace(recipe, kind="adamw", shard=True)
    assert topology.remarks(Topology(targets=1, drafters=2), four) == []
    assert "2 of them wait" in topology.remarks(Topology(targets=1, drafters=3), four)[0]
    assert "changes nothing" in topology.remarks(topology.ONE, shared)[0]


@given(shapes, some.integers(1, 12), some.integers(0, 4), some.integers(0, 4))
def test_both_ends_agree_on_every_pass_whatever_the_shape_and_the_start(
    shape: Topology, accumulate: int, begun: int, steps: int
) -> None:
    total = begun + steps
    sent = {
        (passed, target, drafter)
        for target in range(shape.targets)
        for passed, drafter in flow.own(shape, accumulate, begun, total, target=target)
    }
    taken = {
        (passed, target, drafter)
        for drafter in range(shape.drafters)
        for passed, target in flow.order(shape, accumulate, begun, total, drafter=drafter)
    }
    assert sent == taken
    assert sorted(passed for passed, _, _ in sent) == list(range(begun * accumulate, total * accumulate))


@given(shapes, some.integers(1, 8), some.integers(1, 6))
def test_no_order_of_sending_and_asking_can_end_in_a_circle(shape: Topology, accumulate: int, steps: int) -> None:
    """Targets send in their order and drafters take in theirs, with a barrier after each step: all gets through."""
    outgoing = [list(flow.own(shape, accumulate, 0, steps, target=t)) for t in range(shape.targets)]
    due = [list(flow.order(shape, accumulate, 0, steps, drafter=d)) for d in range(shape.drafters)]
    waiting: dict[tuple[int, int], list[int]] = {}
    step = 0
    while any(due):
        moved = False
        for target, passes in enumerate(outgoing):
            while passes and len(waiting.setdefault((target, passes[0][1]), [])) < flow.DEPTH:
                passed, drafter = passes.pop(0)
                waiting[target, drafter].append(passed)
                moved = True
        for drafter, passes in enumerate(due):
            while passes and passes[0][0] // accumulate == step and waiting.get((passes[0][1], drafter)):
                passed, target = passes.pop(0)
                assert waiting[target, drafter].pop(0) == passed
                moved = True
        if not any(passes and passes[0][0] // accumulate == step for passes in due):
            step += 1
            moved = True
        assert moved, f"{shape}: everybody waits in step {step}"


def test_a_state_that_is_spread_needs_a_process_group_and_as_many_passes_for_each() -> None:
    topology.require_shardable(Topology(targets=1, drafters=2), "processes", 4)
    threads = refusal(topology.require_shardable, Topology(targets=1, drafters=2), "threads", 4)
    assert (threads.code, "no process group" in threads.message) == (Exit.USAGE, True)
    uneven = refusal(topology.require_shardable, Topology(targets=1, drafters=3), "processes", 4)
    assert (uneven.code, "3 drafters cannot share 4 passes" in uneven.message) == (Exit.USAGE, True)


def job(folder: Path, *, drafters: int) -> Job:
    """What a launcher would tell its workers."""
    names = {name: str(folder / name) for name in ("target", "rows")}
    return Job(tables={}, seed=0, **names, folder=str(folder), topology=[1, drafters], launcher="processes", status="")


def test_a_node_waits_for_what_node_0_prepares_now_whatever_an_earlier_start_has_left(tmp_path: Path) -> None:
    place, nodes = tmp_path / launch.JOB, Nodes(nnodes=2, node_rank=1)
    earlier, wanted = job(tmp_path, drafters=2), job(tmp_path, drafters=1)
    place.write_text(json.dumps(asdict(earlier)))
    os.utime(place, (time.time() - 60,) * 2)
    told: list[str] = []

    def say(line: str) -> None:
        told.append(line)
        place.write_text(json.dumps(asdict(wanted)))

    launch.wait_for_job(wanted, nodes, say, Stop())
    assert told == [f"node 1 waits for node 0 to prepare `{tmp_path}`, which both must share"]


def test_a_node_that_was_given_something_else_than_node_0_is_refused(tmp_path: Path) -> None:
    place, nodes = tmp_path / launch.JOB, Nodes(nnodes=2, node_rank=1, rdzv_conf={"join_timeout": "1"})
    wanted = job(tmp_path, drafters=1)
    place.write_text(json.dumps(asdict(job(tmp_path, drafters=2))))
    for age in (-60, 60):  # written after the node has begun to wait, and long before, by a node 0 that came first
        os.utime(place, (time.time() - age,) * 2)
        failure = refusal(launch.wait_for_job, wanted, nodes, lambda _: None, Stop())
        assert failure.code is Exit.USAGE
        assert failure.details == ("topology: [1, 1] here, [1, 2] there",)
