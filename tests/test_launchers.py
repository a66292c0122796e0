"""Real workers as processes and as threads, Gloo between them: the same numbers under any topology."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from launching import BOUND, ROOT, World, distance, ended, lines, same, wait_for
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from env.errors import Exit


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("launchers"))


@pytest.fixture(scope="module")
def alone(world: World) -> Path:
    """One worker that does both, after three that compiled cold into one cache at once: see the first test."""
    world.train("cold", "colocated:3")
    return world.train("alone", "colocated:1")


def test_three_processes_that_compile_cold_into_one_cache_at_once_train_as_one_alone_to_the_bit(
    world: World, alone: Path
) -> None:
    caches = json.loads((world.folder / "cold" / "caches.json").read_text())
    assert len({drafter["path"] for drafter in caches["drafters"]}) == 1
    assert all(drafter["fx_bypass"] == 0 for drafter in caches["drafters"])
    assert any(drafter["fx_miss"] for drafter in caches["drafters"])
    warm = json.loads((alone / "caches.json").read_text())
    assert (warm["autograd_miss"], warm["fx_miss"]) == (0, 0)
    assert warm["fx_hit"] > 0
    assert same(world.folder / "cold", alone)


def test_two_targets_that_feed_one_drafter_change_no_bit(world: World, alone: Path) -> None:
    assert same(world.train("2-1", "2:1"), alone)


def test_two_drafters_train_within_the_bound_as_processes_and_as_threads_alike(world: World, alone: Path) -> None:
    processes = world.train("1-2", "1:2")
    threads = world.train("1-2-threads", "1:2", 'launcher="threads"')
    assert same(processes, threads)
    assert distance(processes, alone) < BOUND
    caches = json.loads((processes / "caches.json").read_text())
    assert all(drafter["fx_miss"] + drafter["fx_bypass"] == 0 for drafter in caches["drafters"])


def test_a_state_that_is_spread_over_drafters_trains_within_the_bound_from_the_same_kernels(
    world: World, alone: Path
) -> None:
    spread = world.train("spread", "colocated:3", optimizer={"shard": True})
    far = distance(spread, alone)
    print(f"state spread over three, distance from one alone: {far:.1e}")
    assert far < BOUND
    caches = json.loads((spread / "caches.json").read_text())
    for drafter in caches["drafters"]:
        assert (drafter["autograd_miss"], drafter["fx_miss"], drafter["fx_bypass"]) == (0, 0, 0)
        assert drafter["autograd_hit"] > 0
    saved = FileSystemReader(spread / "checkpoints" / "step-00000020").read_metadata().state_dict_metadata
    weight = saved["model.layers.0.mlp.up_proj.weight"]
    assert isinstance(weight, TensorStorageMetadata)
    assert [tuple(chunk.sizes) for chunk in weight.chunks] == [(16, 32)] * 3


def test_a_checkpoint_of_a_state_that_was_spread_serves_any_topology_and_any_other_serves_one_that_will_be(
    world: World, alone: Path
) -> None:
    def stopped_after(steps: int, run: str, topology: str, **changes: Any) -> None:
        process = world.start(run, topology, **changes)
        wait_for(lambda: lines(world.folder / run) >= steps, process)
        process.send_signal(signal.SIGTERM)
        code, said = ended(process)
        assert (code, "saved" in said) == (Exit.TERMINATED, True), said

    stopped_after(3, "handed on", "colocated:3", optimizer={"shard": True})
    stopped_after(lines(world.folder / "handed on") + 3, "handed on", "1:1")
    handed_on = world.train("handed on", "colocated:3", optimizer={"shard": True})
    assert lines(handed_on) == lines(alone)
    assert distance(handed_on, alone) < BOUND


def as_kubernetes_starts(node: int, port: int) -> dict[str, str]:
    """The variables that `docker/kubernetes/job.yaml` gives a node, for two that are on this host."""
    given = {
        "HF_HUB_OFFLINE": "1",
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(node),
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
        "PET_RDZV_ID": "a-controller",
        "PET_LOCAL_ADDR": "127.0.0.1",
    }
    job = (ROOT / "docker" / "kubernetes" / "job.yaml").read_text()
    assert set(re.findall(r"- name: ((?:PET|HF)_\w+)", job)) == set(given)
    return given


def test_a_full_run_stops_on_sigterm_to_any_node_and_comes_to_its_summary_on_two_as_kubernetes_starts_them(
    world: World,
) -> None:
    from test_pipeline import MICRO, Trainer

    trainer = Trainer(world.folder)
    # one pass of two rows fewer, but two of them: drafters need a pass each
    spread = MICRO.replace("epochs = 2", "epochs = 8\naccumulate = 2").replace("rows = 2", "rows = 1", 1)
    trainer.config.write_text(spread.replace("chunk_blocks = 16", "chunk_blocks = 8"))
    trainer.environ |= {"OMP_NUM_THREADS": "1"}
    folder = world.folder / "full"
    process = trainer.start("--run", str(folder), "--topology", "1:2")
    wait_for(lambda: lines(folder) >= 2, process)
    process.send_signal(signal.SIGTERM)
    code, said = ended(process)
    assert code == Exit.TERMINATED, said
    assert "stopped: step " in said

    def reached(count: int) -> bool:
        return lines(folder) >= count

    def two_nodes() -> list[subprocess.Popen[str]]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        nodes = []
        for node in (0, 1):
            trainer.environ |= as_kubernetes_starts(node, port)
            nodes.append(trainer.start("--run", str(folder), "--topology", "1:1"))
        return nodes

    more = lines(folder) + 1
    nodes = two_nodes()
    wait_for(partial(reached, more), nodes[0])
    nodes[1].send_signal(signal.SIGTERM)  # as when a scheduler takes back one node
    for node in nodes:
        code, said = ended(node)
        assert code == Exit.TERMINATED, said
        assert "stopped: step " in said
    done = lines(folder)
    (code, said), (other, heard) = (ended(node) for node in two_nodes())
    assert (code, other) == (0, 0), said + heard
    assert "targets busy" in said + heard  # by drafter 0, which is on the second one
    content = json.loads((folder / "summary.json").read_text())
    assert lines(folder) == content["steps"] > done


@pytest.mark.skipif(not os.environ.get("DFLASH_SLOW_TESTS"), reason="eight workers: set DFLASH_SLOW_TESTS=1")
def test_five_targets_and_three_drafters_train_as_one_alone_to_the_bit(world: World, alone: Path) -> None:
    assert same(world.train("5-3", "5:3"), alone)
    assert same(world.train("5-3-threads", "5:3", 'launcher="threads"'), alone)
    far = distance(world.train("5-2", "5:2"), alone)
    print(f"5:2, distance from one alone: {far:.1e}")
    assert far < BOUND


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not os.environ.get("DFLASH_SLOW_TESTS"), reason="eight workers: set DFLASH_SLOW_TESTS=1")
def test_the_tiny_preset_on_five_targets_and_three_drafters_trains_as_one_alone_to_the_bit(tmp_path: Path) -> None:
    """A step's six rows in three passes, so that three drafters can share it; some steps only."""
    tables = tomllib.loads((ROOT / "dflash" / "presets" / "tiny.toml").read_text())
    tables["shapes"]["rows"] = 2
    tables["loss"]["chunk_blocks"] //= 3
    tables["optimizer"] |= {"accumulate": 3, "epochs": 4}
    world = World(tmp_path / "tiny", tables)
    changes = {name: tables[name] for name in ("drafter", "shapes", "loss", "optimizer")}
    alone = world.train("alone", "colocated:1", **changes)
    assert same(world.train("5-3", "5:3", **changes), alone, tables)
    assert same(world.train("5-3-threads", "5:3", 'launcher="threads"', **changes), alone, tables)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--topology", "0:2"], "there must be at least one target and one drafter"),
        (["--topology", "1:2"], "2 drafters cannot share a step of one forward pass"),
        (["--launcher", "threads"], "need a `--topology`"),
        (["--topology", "1:1", "--nnodes", "2"], "2 nodes need --rdzv-endpoint"),
    ],
)
def test_an_impossible_request_is_refused_before_anything_starts(options: list[str], sentence: str) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "dflash", "train", "--config", "tiny", *options]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == Exit.USAGE, done.stderr
    assert sentence in done.stderr
