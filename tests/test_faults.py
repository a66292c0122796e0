"""Workers that are killed, stopped, cut off or asked to end: bounded time, a sentence, and no bit lost."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from launching import STEPS, World, ended, lines, same, wait_for, workers
from torch._C._distributed_c10d import HashStore

from dflash import watch, worker
from dflash.pulse import Pulse
from dflash.stopping import Stop, descendants
from dflash.watch import HUNG, LOST, Peer
from env.errors import Exit


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def whole(world: World) -> Path:
    """A run of one target and two drafters that nothing disturbed."""
    return world.train("whole", "1:2")


@pytest.fixture(autouse=True)
def cleared(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "world" in request.fixturenames:
        request.getfixturevalue("world").clear()


# What is wrong, judged on made-up clocks


def waiting(name: str, since: float, *, waits: bool = True, patience: float = 40.0) -> Pulse:
    pulse = Pulse(name)
    pulse.since, pulse.waiting, pulse.patience, pulse.doing = since, waits, patience, "waiting for drafter 0"
    return pulse


def test_a_worker_that_is_at_one_thing_for_too_long_hangs_but_one_that_waits_does_not() -> None:
    code, said = watch.judge(waiting("target 0", 0, waits=False), [], 41) or (0, "")
    assert code == HUNG
    assert "target 0 hangs: it has been at «waiting for drafter 0» for 41 s" in said
    assert watch.judge(waiting("target 0", 0), [], 41) is None
    assert watch.judge(waiting("target 0", 0, waits=False, patience=1800), [], 41) is None


def test_a_peer_that_is_silent_is_named_with_what_it_did_last() -> None:
    peer = Peer(name="drafter 1", heard=0, moved=0, doing="pass 1 of step 3")
    code, said = watch.judge(waiting("drafter 0", 30), [peer], 31, silence=25) or (0, "")
    assert code == LOST
    assert "drafter 1 has not been heard of for 31 s; it was at «pass 1 of step 3»" in said


def test_when_everybody_waits_and_nothing_moves_the_circle_is_named() -> None:
    peer = Peer(name="drafter 0", heard=60, moved=0, waiting=True, doing="waiting for target 0 to send pass 7")
    code, said = watch.judge(waiting("target 0", 0), [peer], 60) or (0, "")
    assert code == HUNG
    assert "everybody has waited for 60 s: target 0: «waiting for drafter 0»; drafter 0: «waiting for target" in said
    peer.waiting = False
    assert watch.judge(waiting("target 0", 0), [peer], 60) is None


def test_a_beat_is_taken_down_as_news_only_when_it_is() -> None:
    peer = Peer(name="drafter 0")
    watch.hear(peer, b"1|5|1|waiting for | bars", 10.0)
    assert (peer.heard, peer.moved, peer.waiting, peer.doing) == (10.0, 10.0, True, "waiting for | bars")
    watch.hear(peer, b"1|5|1|waiting for | bars", 20.0)
    assert peer.heard == 10.0
    watch.hear(peer, b"2|5|1|waiting for | bars", 30.0)
    assert (peer.heard, peer.moved) == (30.0, 10.0)


@pytest.mark.parametrize("events", [("stop", "step"), ("step", "stop")])
def test_a_stop_and_the_end_of_the_first_step_are_put_in_one_order_for_all(
    events: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def left(_last: Callable[[], int]) -> None:
        raise SystemExit

    monkeypatch.setattr(watch, "leave", left)
    shared = HashStore()
    for stores in ([shared, shared], [None]):  # processes with a store, threads with one watch
        stop = Stop()
        stop.ask(signal.SIGTERM)
        watches = [watch.Watch([Pulse("a worker")], stop, board=store) for store in stores]
        turns = {"stop": [each._answer for each in watches], "step": [watches[0].first_step]}
        for turn in (*turns[events[0]], *turns[events[1]]):
            with pytest.raises(SystemExit) if events[0] == "stop" else nullcontext():
                turn()
        said = capsys.readouterr().err
        assert said == ("" if events[0] == "stop" else "asked to stop: all end the step that they are at, and save\n")


@pytest.mark.parametrize(
    ("visible", "local", "own"), [(None, 3, "3"), ("4,5,6", 1, "5"), ("GPU-a,GPU-b", 0, "GPU-a"), ("7", 1, "")]
)
def test_each_worker_sees_one_of_the_gpus_that_were_visible(visible: str | None, local: int, own: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    worker.own_gpu(environ, local)
    assert environ["CUDA_VISIBLE_DEVICES"] == own


# Real workers


@pytest.mark.timeout(900)  # four starts
def test_workers_that_are_killed_or_stand_still_in_turn_cost_no_bit(world: World, whole: Path) -> None:
    """SIGKILL to the target, then to a drafter, and SIGSTOP to the drafter that saves."""
    run = world.folder / "harmed"
    process = world.start("harmed", "1:2", "max_restarts=3")
    for rank, number, after in ((0, signal.SIGKILL, 5), (2, signal.SIGKILL, 9), (1, signal.SIGSTOP, 13)):
        saved = run / "checkpoints" / f"step-{after - 1:08d}"  # a thread writes it while training goes on
        wait_for(lambda after=after, saved=saved: lines(run) >= after and saved.is_dir(), process)  # type: ignore[misc]
        pid, written = workers(process)[rank], (run / "metrics.jsonl").stat().st_ino
        os.kill(pid, number)
        wait_for(lambda pid=pid: not Path(f"/proc/{pid}").exists(), process, 60)  # type: ignore[misc]
        # drafter 0 writes the file anew when it begins again
        wait_for(lambda old=written: (run / "metrics.jsonl").stat().st_ino != old, process)  # type: ignore[misc]
    code, said = ended(process)
    assert code == 0, said
    assert re.search(r"target 0 was killed by SIGKILL; all start again from step \d+ \(2 of 3 restarts left\)", said)
    assert re.search(r"drafter 1 was killed by SIGKILL; all start again from step \d+ \(1 of 3 restarts left\)", said)
    assert "drafter 0 has not been heard of for" in said
    assert re.search(r"lost a peer; all start again from step \d+ \(0 of 3 restarts left\)", said)
    assert "Traceback" not in said
    assert same(run, whole)


def test_sigterm_stops_all_after_the_same_step_and_the_rerun_ends_as_if_nothing_had_happened(
    world: World, whole: Path
) -> None:
    run = world.folder / "asked"
    process = world.start("asked", "1:2")
    wait_for(lambda: lines(run) >= 6, process)
    process.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    code, said = ended(process)
    assert code == Exit.TERMINATED, said
    assert time.monotonic() - begun < 60
    done = lines(run)
    assert (run / "checkpoints" / f"step-{done:08d}").is_dir()
    assert same(world.train("asked", "1:2"), whole)


@pytest.mark.parametrize(("launcher", "number"), [("processes", signal.SIGINT), ("threads", signal.SIGTERM)])
def test_a_stop_while_the_first_step_compiles_is_answered_at_once_since_nothing_can_be_lost(
    world: World, launcher: str, number: signal.Signals, tmp_path: Path
) -> None:
    """Compiling this step into an empty cache takes longer than the test allows."""
    run = world.folder / f"hurried-{launcher}"
    empty = ("env", f"DFLASH_CACHE_HOME={tmp_path}")
    process = world.start(run.name, "1:2", f'launcher="{launcher}"', prefix=empty)
    wait_for(lambda: any(tmp_path.glob("cold/*/fxgraph")) or any(tmp_path.glob("cold/*/*/*.cpp")), process)
    all_of_them = [
        *workers(process).values(),
        *(child for pid in workers(process).values() for child in descendants(pid)),
    ]
    process.send_signal(number)
    begun = time.monotonic()
    code, said = ended(process)
    assert time.monotonic() - begun < 15
    assert code == {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED}[number], said
    assert "Traceback" not in said
    assert lines(run) == 0
    assert not [pid for pid in all_of_them if Path(f"/proc/{pid}").exists()]


def test_a_failure_that_is_final_is_said_once_and_not_tried_again(world: World, whole: Path) -> None:
    run = world.folder / "broken"
    shutil.copytree(whole, run)
    for checkpoint in sorted((run / "checkpoints").iterdir()):
        file = checkpoint / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:-1])
    code, said = ended(world.start("broken", "1:2"))
    assert code == Exit.INPUT
    assert "is cut short" in said
    assert "start again" not in said
    assert "Traceback" not in said


# Two hosts: network namespaces with a cable between them


class Cable:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, joined by a pair of virtual interfaces."""

    def __init__(self) -> None:
        self.names = [f"dflash{os.getpid()}{letter}" for letter in "ab"]

    def lay(self) -> bool:
        a, b = self.names
        commands = [
            ["ip", "netns", "add", a],
            ["ip", "netns", "add", b],
            ["ip", "-n", a, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", b],
            *(["ip", "-n", name, "addr", "add", f"10.77.0.{n}/24", "dev", "cable"] for n, name in ((1, a), (2, b))),
            *(["ip", "-n", name, "link", "set", link, "up"] for name in (a, b) for link in ("lo", "cable")),
        ]
        return shutil.which("ip") is not None and all(
            subprocess.run(command, check=False, capture_output=True).returncode == 0 for command in commands
        )

    def inside(self, node: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.names[node], "env", "GLOO_SOCKET_IFNAME=cable")

    def cut(self) -> None:
        subprocess.run(["ip", "-n", self.names[1], "link", "set", "cable", "down"], check=True)

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def cable() -> Iterator[Cable]:
    laid = Cable()
    try:
        if not laid.lay():
            pytest.skip("network namespaces need root and iproute2")
        yield laid
    finally:
        laid.remove()


def test_two_hosts_that_are_cut_apart_end_with_a_sentence_and_the_run_goes_on(
    world: World, whole: Path, cable: Cable
) -> None:
    run = world.folder / "hosts"
    nodes = '"nnodes": 2, "rdzv_endpoint": "10.77.0.1:29400", "rdzv_conf": {"join_timeout": "20", "read_timeout": "10"}'
    hosts = [
        world.start(
            "hosts",
            "1:1",
            "max_restarts=1",
            f'nodes={{"node_rank": {node}, "local_addr": "10.77.0.{node + 1}", {nodes}}}',
            prefix=cable.inside(node),
        )
        for node in (0, 1)
    ]
    wait_for(lambda: lines(run) >= 6, hosts[1])
    cable.cut()
    begun = time.monotonic()
    answers = [ended(host, 180) for host in hosts]
    assert time.monotonic() - begun < 150
    for node, (code, said) in enumerate(answers):
        assert code in (Exit.UNREACHABLE, Exit.TRAINING), said
        assert f"node {node} of 2 does not find the others at 10.77.0.1:29400" in said or "has failed" in said, said
        assert "Traceback" not in said
    assert lines(world.train("hosts", "1:1")) == STEPS
