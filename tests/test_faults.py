"""Workers that are killed, stopped, cut off or asked to end: bounded time, a sentence, and no bit lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from launching import BOUND, ROOT, STEPS, World, distance, ended, lines, same, wait_for, workers
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


def running(pid: int) -> bool:
    """Whether a process is there and no zombie, which whoever inherited it has not looked at yet."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    return False


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


HARM = """
import os
if os.environ.get("RANK") == "0":  # the target
    import time
    from dflash import pulse
    pulse.WORK = 6.0
    first, begin = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", pulse.Pulse.work
    def never_comes_back():
        time.sleep(3600)
    def spoil_once():
        from dflash.flow import ProcessOutlet
        put = ProcessOutlet.put
        def spoilt(self, drafter, head, features):
            ProcessOutlet.put = put
            put(self, drafter, head, features * float("nan"))
        ProcessOutlet.put = spoilt
    def work(self, what, patience=pulse.WORK):
        begin(self, what, patience)
        if what == "pass 2 of step 2" and first:
            spoil_once()
        if what == "pass 1 of step 6":
            if first:
                never_comes_back()
            raise RuntimeError("a mistake of the target's own")
    pulse.Pulse.work = work
"""
"""Put into a worker as it starts. Of three passes the second is drafter 1's, so its loss alone is not finite."""


@pytest.mark.timeout(600)  # two starts
def test_a_worker_that_hangs_or_fails_says_where_before_anybody_else_until_no_restart_is_left(
    world: World, whole: Path, tmp_path: Path
) -> None:
    run = world.folder / "hanging"
    (tmp_path / "sitecustomize.py").write_text(HARM)
    process = world.start("hanging", "1:2", "max_restarts=1", prefix=("env", f"PYTHONPATH={tmp_path}:{ROOT}"))
    wait_for(lambda: lines(run) >= 5, process)
    begun, pid = time.monotonic(), workers(process)[0]
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), process, 26)  # its patience is 40 s, here 6
    print(f"ended after {time.monotonic() - begun:.0f} s")
    code, said = ended(process)
    assert code == Exit.TRAINING, said
    order = [
        "step 2 is skipped: the loss is nan",
        "hangs: it has been at «pass 1 of step 6» for",
        "in never_comes_back",
        "target 0 hung; all start again from step 4 (0 of 1 restarts left)",
        "RuntimeError: a mistake of the target's own",
        "target 0 failed with exit code 1; no restart is left",
        "error: the last of 2 starts of the workers has failed: one of them failed with exit code 1",
        "hint: what it said is above; the same command goes on from the newest checkpoint",
    ]
    found = [said.find(sentence) for sentence in order]
    assert -1 not in found, said
    assert found == sorted(found), said
    assert said.count("Traceback") == 1
    assert "lost a peer" not in said
    spoilt, next_one = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[1:3])
    undisturbed = json.loads((whole / "metrics.jsonl").read_text().splitlines()[2])
    assert spoilt["loss"] is None
    assert "from the packed rows" in spoilt["skipped"]
    assert next_one["loss"] == pytest.approx(undisturbed["loss"], rel=0.1), "all go on in step"


ORPHAN = """
import os, time
from dflash.pulse import Pulse
from dflash.stopping import Stop
from dflash.watch import Watch
if os.fork():
    time.sleep(600)
Watch([Pulse("target 0")], Stop()).start()
print("watching", flush=True)
time.sleep(600)
"""


def test_a_worker_whose_launcher_was_killed_ends_with_a_sentence() -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ORPHAN]
    launcher = subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "watching\n"
    launcher.kill()
    _, said = launcher.communicate(timeout=10)  # until the worker, which has the same pipes, has ended
    assert said == "error: the launcher of target 0 has gone\n"


def test_sigterm_stops_all_after_the_same_step_and_the_rerun_ends_as_if_nothing_had_happened_also_elsewhere(
    world: World, whole: Path
) -> None:
    run = world.folder / "asked"
    process = world.start("asked", "1:2")
    wait_for(lambda: lines(run) >= 6, process)
    for pid in (*workers(process).values(), process.pid):  # as a scheduler does that reaches all of a job's processes
        os.kill(pid, signal.SIGTERM)
    begun = time.monotonic()
    code, said = ended(process)
    assert code == Exit.TERMINATED, said
    assert time.monotonic() - begun < 60
    done = lines(run)
    assert (run / "checkpoints" / f"step-{done:08d}").is_dir()
    shutil.copytree(run, world.folder / "elsewhere")
    assert same(world.train("asked", "1:2"), whole)
    assert distance(world.train("elsewhere", "1:1"), whole) < BOUND


@pytest.mark.parametrize(
    ("launcher", "topology", "number", "who"),
    [("processes", "colocated:2", signal.SIGINT, "worker 0"), ("threads", "1:2", signal.SIGTERM, "the worker")],
)
def test_a_worker_killed_at_the_start_comes_back_and_a_stop_while_the_first_step_compiles_is_answered_at_once(
    world: World, tmp_path: Path, launcher: str, topology: str, number: signal.Signals, who: str
) -> None:
    """Compiling this step into an empty cache takes longer than the test allows, and then nothing can be lost."""
    run = world.folder / f"hurried-{launcher}"
    empty = ("env", f"DFLASH_CACHE_HOME={tmp_path}")
    process = world.start(run.name, topology, f'launcher="{launcher}"', "max_restarts=1", prefix=empty)
    wait_for(lambda: 0 in workers(process), process)
    os.kill(workers(process)[0], signal.SIGKILL)
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
    assert f"{who} was killed by SIGKILL; all start again from the beginning (0 of 1 restarts left)" in said
    assert "Traceback" not in said
    assert lines(run) == 0
    assert not [pid for pid in all_of_them if running(pid)]


def test_a_failure_that_is_final_is_said_once_and_not_tried_again(world: World, whole: Path) -> None:
    run = world.folder / "broken"
    shutil.copytree(whole, run)
    for checkpoint in sorted((run / "checkpoints").iterdir()):
        file = checkpoint / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:-1])
    code, said = ended(world.start("broken", "1:2"))
    assert code == Exit.INPUT
    assert said.count("is cut short") == 1
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


# A disk that is full


@pytest.fixture
def disk(world: World) -> Iterator[Callable[[str, int], Path]]:
    """Makes a run's folder a file system of its own, or gives the one that is there another size in bytes."""
    mounted: list[Path] = []

    def mount(run: str, size: int) -> Path:
        folder = world.folder / run
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}{',remount' if folder in mounted else ''}"]
        if shutil.which("mount") is None or subprocess.run([*command, "tmpfs", folder], check=False).returncode:
            pytest.skip("mounting a small file system needs root, and a kernel that lets it")
        mounted.append(folder)
        return folder

    yield mount
    world.clear()
    for folder in set(mounted):
        subprocess.run(["umount", folder], check=True)


@pytest.mark.timeout(900)  # three starts
def test_a_full_disk_is_one_sentence_no_restart_and_the_run_goes_on_under_another_topology_once_there_is_room(
    world: World, whole: Path, disk: Callable[[str, int], Path]
) -> None:
    size = sum(file.stat().st_size for file in max((whole / "checkpoints").iterdir()).iterdir())
    run = disk("full", size * 3 // 2 + (64 << 10))  # room for one checkpoint, and for metrics
    # three that each save a share, and would each say so; then from their checkpoint two threads
    for topology, launcher, shard in (("colocated:3", "processes", True), ("1:1", "threads", False)):
        code, said = ended(world.start("full", topology, f'launcher="{launcher}"', optimizer={"shard": shard}))
        assert code == Exit.STORAGE, said
        refused = f"error: cannot write `step-00000008` in `{run / 'checkpoints'}`: the disk is full"
        assert [line for line in said.splitlines() if "the disk is full" in line] == [refused]
        assert "hint: free some space and start again: the run goes on from its newest checkpoint" in said
        assert "start again from" not in said
        assert "Traceback" not in said
        assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["step-00000004"]
    disk("full", 64 << 20)
    world.train("full", "colocated:1")
    assert lines(run) == STEPS
    assert distance(run, whole) < BOUND
