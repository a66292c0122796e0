"""The machine under the run: memory, processors, limits, user, clock, and what containers hide of them."""

from __future__ import annotations

import getpass
import os
import pwd
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hosts import GB, gpu_host, host, plan, recorded

from env.doctor.checks import clock, limits, memory, processors, system, user
from env.doctor.facts import machine
from env.doctor.facts.folders import parse_mounts, read_mounts
from env.doctor.facts.machine import Clock, Limits, Memory, Processors, System, User
from env.doctor.facts.nvidia import Card
from env.doctor.finding import Finding, Severity
from env.doctor.need import human
from env.variants import ROOT


def found(finding: Finding | None) -> Finding:
    assert finding is not None
    return finding


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


CGROUP2 = parse_mounts("31 25 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw")
CGROUP1 = parse_mounts(
    "32 25 0:29 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "33 25 0:30 /docker/abc /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "34 25 0:31 /docker/abc /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
)
MEMINFO = "MemTotal:       24684100 kB\nMemFree:  1 kB\nMemAvailable:   20000000 kB\n"


# Control groups.


def test_a_limit_anywhere_on_the_way_up_binds(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/container\n",
            "proc/meminfo": MEMINFO,
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{8 * 2**30}\n",
            "sys/fs/cgroup/pod/memory.current": f"{3 * 2**30}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {2**30}\n",
            "sys/fs/cgroup/pod/container/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/pod/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/container/pids.max": "max\n",
            "sys/fs/cgroup/pod/pids.max": "1024\n",
            "sys/fs/cgroup/pod/pids.current": "17\n",
        },
    )
    assert machine.memory(root, CGROUP2) == Memory(
        total=24684100 * 1024, available=20000000 * 1024, limit=8 * 2**30, used=2 * 2**30
    )
    assert machine.processors(root, CGROUP2).quota == 2.5
    seen = machine.limits(root, CGROUP2)
    assert (seen.group, seen.group_used) == (1024, 17)


def test_version_1_groups_are_found_behind_the_machines_own_path(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n2:pids:/docker/abc\n",
            "proc/meminfo": MEMINFO,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * 2**30}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2**30}\n",
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {2**29}\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/pids/pids.max": "max\n",
        },
    )
    seen = machine.memory(root, CGROUP1)
    assert seen.limit == 4 * 2**30
    assert seen.used is not None
    assert seen.used < 2**30
    assert machine.processors(root, CGROUP1).quota is None
    assert machine.limits(root, CGROUP1).group is None


def test_no_limit_as_version_1_writes_it_is_no_limit(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert machine.memory(root, CGROUP1) == Memory()


@pytest.mark.parametrize("rubbish", ["", "\0\0\0", "garbage\nMemTotal: lots kB\n0::\n::::\n9\n", "0::/../../x\n"])
def test_rubbish_in_proc_gives_no_facts_and_no_errors(tmp_path: Path, rubbish: str) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": rubbish, "proc/meminfo": rubbish, "proc/cpuinfo": rubbish})
    assert machine.memory(root, CGROUP2) == Memory()
    assert machine.processors(root, CGROUP2).quota is None
    assert machine.system(root).flags == ()


def test_this_machines_own_memory_is_read() -> None:
    seen = machine.memory(mounts=read_mounts())
    assert seen.total is not None
    assert seen.available is not None
    assert 10**8 < seen.available < seen.total


# Memory.


def test_a_configuration_beyond_the_control_groups_limit_is_an_error_and_beyond_the_machine_a_warning() -> None:
    limited = host(memory=Memory(total=256 * GB, available=200 * GB, limit=16 * GB, used=GB))
    finding = found(memory.judge(limited, plan(config="qwen3-8b")))
    assert finding.severity is Severity.ERROR
    assert finding.message.endswith("there is 16.0 GB by the control group's limit")
    small = host(memory=Memory(total=16 * GB, available=15 * GB))
    finding = found(memory.judge(small, plan(config="qwen3-8b")))
    assert finding.severity is Severity.WARNING
    assert "a virtual machine that grows" in finding.details[1]
    assert found(memory.judge(limited, plan(config="tiny"))).severity is Severity.OK


def test_memory_that_others_hold_is_a_warning() -> None:
    busy = host(memory=Memory(total=64 * GB, available=GB))
    finding = found(memory.judge(busy, plan(config="tiny")))
    assert finding.severity is Severity.WARNING
    assert "1.0 GB of 64.0 GB is free now" in finding.message
    full = host(memory=Memory(total=64 * GB, available=60 * GB, limit=8 * GB, used=7 * GB))
    assert (
        "1.0 GB of 8.0 GB by the control group's limit is free now"
        in found(memory.judge(full, plan(config="tiny"))).message
    )


def test_with_cards_main_memory_only_passes_weights_through() -> None:
    cards = [Card(name="NVIDIA H200", capability="9.0", memory_mib=143771)] * 2
    need, reasons = memory.wanted(plan(config="qwen3-8b").need, len(cards))
    assert need < memory.wanted(plan(config="qwen3-8b").need, 0)[0]
    assert "while loading and saving" in reasons
    seen = replace(gpu_host(*cards), memory=Memory(total=64 * GB, available=60 * GB))
    assert "with 2 cards" in found(memory.judge(seen, plan(config="qwen3-8b"))).message


def test_unknown_memory_is_unknown() -> None:
    assert found(memory.judge(host(memory=None), plan())).severity is Severity.UNKNOWN
    assert found(memory.judge(host(memory=Memory()), plan())).severity is Severity.UNKNOWN
    assert found(memory.judge(host(memory=Memory(limit=GB)), plan())).severity is Severity.ERROR


# Processors.


def test_a_quota_below_the_visible_processors_is_a_warning_that_names_the_variables() -> None:
    finding = found(processors.judge(host(processors=Processors(present=96, allowed=96, quota=4.0)), plan()))
    assert finding.severity is Severity.WARNING
    assert finding.message == "96 processors are visible, time is granted for 4"
    assert finding.remedy is not None
    assert "OMP_NUM_THREADS=4" in finding.remedy


def test_a_quota_that_grants_all_and_an_affinity_are_fine() -> None:
    assert found(processors.judge(host(processors=Processors(present=8, allowed=8, quota=8.0)), plan())).severity is (
        Severity.OK
    )
    finding = found(processors.judge(host(processors=Processors(present=96, allowed=4)), plan()))
    assert (finding.severity, finding.message) == (Severity.OK, "4 of 96 processors")
    assert found(processors.judge(host(processors=Processors()), plan())).severity is Severity.UNKNOWN


# Limits.


def judged(cards: int = 0, config: str = "tiny", **facts: int | None) -> Finding:
    card = Card(name="NVIDIA H200", capability="9.0", memory_mib=143771)
    usual = {"files": 65536, "files_hard": 65536, "processes": 100000}
    seen = gpu_host(*[card] * cards) if cards else host()
    return found(limits.judge(replace(seen, limits=Limits(**{**usual, **facts})), plan(config=config)))


def test_few_open_files_are_a_warning_that_knows_whether_this_shell_can_raise_them() -> None:
    assert judged(files=1024, files_hard=4096).severity is Severity.OK
    finding = judged(cards=8, files=1024, files_hard=None)
    assert finding.severity is Severity.WARNING
    assert finding.remedy == "`ulimit -n 9216`"
    assert "--ulimit nofile=1024" in (judged(files=256, files_hard=256).remedy or "")


def test_few_processes_of_user_or_group_are_a_warning() -> None:
    assert "processes and threads of this user: 100" in judged(processes=100).message
    finding = judged(group=1024, group_used=700)
    assert finding.severity is Severity.WARNING
    assert "1024, 700 taken" in finding.message
    assert judged(group=4096, group_used=700).severity is Severity.OK


def test_a_limit_on_address_space_stops_cuda_and_on_file_size_a_checkpoint() -> None:
    assert judged(cards=1, address=64 * GB).severity is Severity.ERROR
    assert judged(cards=0, address=64 * GB).severity is Severity.OK
    finding = judged(config="qwen3-8b", file_size=GB)
    assert finding.severity is Severity.ERROR
    assert "a checkpoint has 12.6 GB" in finding.message
    assert judged(config="tiny", file_size=GB).severity is Severity.OK


def test_several_low_limits_are_one_finding_with_a_line_each() -> None:
    finding = judged(files=256, files_hard=256, processes=100)
    assert finding.message == "2 limits are low"
    assert len(finding.details) == 2


def test_a_really_lowered_limit_is_read() -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (99, 200))\n"
        "from env.doctor.facts.machine import limits\n"
        "seen = limits(); print(seen.files, seen.files_hard)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["99", "200"]
    assert found(limits.judge(host(limits=None), plan())).severity is Severity.UNKNOWN


# User.


def unnamed_id() -> int:
    taken = {entry.pw_uid for entry in pwd.getpwall()}
    return next(uid for uid in range(12345, 65000) if uid not in taken)


def test_a_user_with_an_entry_is_fine() -> None:
    seen = machine.user({"HOME": "/h", "USER": "x"}, uid=0)
    assert (seen.name, seen.home, seen.home_from) == ("root", "/h", "HOME")
    assert machine.user({}, uid=0).home_from == "passwd"
    assert found(user.judge(host(user=seen), plan())).severity is Severity.OK


def test_an_id_without_an_entry_and_without_a_name_is_a_note_that_says_what_the_launch_does_about_it() -> None:
    uid = unnamed_id()
    seen = machine.user({}, uid=uid)
    assert seen == User(uid=uid)
    finding = found(user.judge(host(user=seen), plan()))
    assert finding.severity is Severity.NOTE
    assert "the launch sets USER" in finding.message
    assert f"USER=uid{uid}" in (finding.remedy or "")


def test_a_name_and_a_home_from_variables_stand_in_for_an_entry() -> None:
    named = machine.user({"USER": "x"}, uid=unnamed_id())
    assert found(user.judge(host(user=named), plan())).severity is Severity.NOTE
    both = machine.user({"LOGNAME": "x", "HOME": "/h"}, uid=unnamed_id())
    finding = found(user.judge(host(user=both), plan()))
    assert finding.severity is Severity.OK
    assert finding.message.endswith("LOGNAME and HOME stand in for it")
    assert found(user.judge(host(user=None), plan())).severity is Severity.UNKNOWN


def test_pythons_own_getuser_really_fails_for_such_an_id() -> None:
    if os.getuid() != 0:
        pytest.skip("becoming another user needs root")
    uid = unnamed_id()
    done = subprocess.run(
        ["/usr/bin/python3", "-c", "import getpass; getpass.getuser()"],
        capture_output=True,
        text=True,
        check=False,
        user=uid,
        group=uid,
        extra_groups=[],
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 1
    assert "uid not found" in done.stderr or "No username set" in done.stderr
    assert getpass.getuser()


# Clock.


def clock_of(**facts: float | str | bool | None) -> Finding:
    usual: dict[str, object] = {"now": 1.8e9, "newest": 1.79e9, "newest_file": "env/x.py", "commit": 1.79e9}
    return found(clock.judge(host(clock=Clock(**{**usual, **facts})), plan()))  # type: ignore[arg-type]


def test_a_clock_before_the_projects_own_files_is_a_warning_and_a_day_before_an_error() -> None:
    assert clock_of(synchronised=True).severity is Severity.OK
    assert clock_of().severity is Severity.OK
    assert clock_of(newest=1.8e9 + 200).severity is Severity.OK
    assert clock_of(newest=1.8e9 + 2000).severity is Severity.WARNING
    finding = clock_of(now=1000.0, commit=1.7e9)
    assert finding.severity is Severity.ERROR
    assert finding.message.startswith("the clock says 1970-01-01 00:16 UTC, but env/x.py is of 2026-")
    assert "the checked-out commit" in clock_of(now=1000.0, newest=None).message


def test_an_unsynchronised_clock_is_a_note_and_an_unknown_one_unknown() -> None:
    assert clock_of(synchronised=False).severity is Severity.NOTE
    assert clock_of(newest=None, commit=None).severity is Severity.UNKNOWN
    assert clock_of(now=1e300, newest=None, commit=None).severity is Severity.UNKNOWN
    assert found(clock.judge(host(clock=None), plan())).severity is Severity.UNKNOWN


def test_the_clock_is_held_against_real_files_and_a_real_commit(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "future.py").touch()
    ahead = time.time() + 10 * 86400
    os.utime(tmp_path / "env" / "future.py", (ahead, ahead))
    seen = machine.clock(tmp_path)
    assert seen.newest == pytest.approx(ahead)
    assert (seen.newest_file, seen.commit) == ("env/future.py", None)
    assert found(clock.judge(host(clock=seen), plan())).severity is Severity.ERROR

    date = {"GIT_AUTHOR_DATE": "2020-01-02T03:04:05Z", "GIT_COMMITTER_DATE": "2020-01-02T03:04:05Z"}
    who = ["-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(
        ["git", "-C", str(tmp_path), *who, "commit", "-q", "--allow-empty", "-m", "x"],
        check=True,
        env={**os.environ, **date},
    )
    assert machine.clock(tmp_path).commit == 1577934245.0


def test_an_empty_folder_has_nothing_to_compare_with(tmp_path: Path) -> None:
    seen = machine.clock(tmp_path / "nothing")
    assert (seen.newest, seen.newest_file, seen.commit) == (None, None, None)
    assert seen.synchronised in (True, False, None)


# System.


def judged_system(**facts: object) -> Finding:
    usual: dict[str, object] = {
        "kernel": "Linux",
        "machine": "x86_64",
        "release": "6",
        "libc": "glibc 2.36",
        "python": "3.11.2",
    }
    return found(system.judge(host(system=System(**{**usual, **facts})), plan()))  # type: ignore[arg-type]


def test_the_wheels_machine_and_c_library_are_asked_for() -> None:
    assert judged_system().severity is Severity.OK
    assert judged_system(machine="riscv64").severity is Severity.ERROR
    assert judged_system(kernel="Darwin").severity is Severity.ERROR
    assert "Alpine" in (judged_system(libc=None).remedy or "")
    assert judged_system(libc="glibc 2.17").message == "glibc 2.17 is older than torch's wheels need (2.28)"
    assert judged_system(python="3.14.0").severity is Severity.NOTE
    assert judged_system(python="3.1.1").severity is Severity.NOTE
    assert found(system.judge(host(system=None), plan())).severity is Severity.UNKNOWN


def test_this_machine_says_what_it_is() -> None:
    seen = machine.system()
    assert seen.python == ".".join(map(str, sys.version_info[:3]))
    assert found(system.judge(host(system=seen), plan())).severity in (Severity.OK, Severity.NOTE)


def test_a_pod_is_seen_through() -> None:
    pod = recorded("kubernetes-pod")
    asked = plan(config="qwen3-8b")
    assert found(memory.judge(pod, asked)).severity is Severity.ERROR
    assert found(processors.judge(pod, asked)).severity is Severity.WARNING
    assert found(limits.judge(pod, asked)).severity is Severity.WARNING
    assert found(user.judge(pod, asked)).severity is Severity.NOTE


@pytest.mark.parametrize(("size", "text"), [(0, "0 kB"), (999e6, "999 MB"), (12.58e9, "12.6 GB"), (2e12, "2.0 TB")])
def test_sizes_are_said_as_people_say_them(size: float, text: str) -> None:
    assert human(size) == text
