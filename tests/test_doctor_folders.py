"""Folders: what the mounts say, what really can be done there, and what that means."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hosts import DISK, GB, folder, folders, host, plan

from env.doctor.checks import disk, executable, local, shm, writable
from env.doctor.facts.environment import Environment
from env.doctor.facts.folders import Folder, Mount, look, mount_of, parse_mounts, places, read_mounts
from env.doctor.finding import Severity
from env.doctor.host import look_at_folders

MOUNTS = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 25 0:27 / /dev/shm rw - tmpfs old rw,size=1k
31 25 0:28 / /dev/shm rw,nosuid - tmpfs new rw,size=65536k
40 27 0:50 /exports/my\040home /home/a\040b rw master:3 propagate_from:2 - nfs4 server:/exports rw,vers=4.2,username=ada
41 27 0:51 / /data rw - fuse.sshfs ada@host: rw
garbage
42 27 0:52 too few
"""


def test_mounts_are_read_with_blanks_in_names_and_any_number_of_optional_fields() -> None:
    mounts = parse_mounts(MOUNTS)
    assert [mount.point for mount in mounts] == ["/proc", "/", "/dev/shm", "/dev/shm", "/home/a b", "/data"]
    assert mounts[4].kind == "nfs4"
    assert mounts[4].root == "/exports/my home"
    assert mounts[4].options == ("rw", "vers=4.2", "username=ada")


def test_a_path_lies_on_the_longest_mount_point_and_on_the_last_of_equal_ones() -> None:
    mounts = parse_mounts(MOUNTS)

    def source(path: str) -> str | None:
        mount = mount_of(path, mounts)
        return mount.source if mount else None

    assert source("/home/a b/x") == "server:/exports"
    assert source("/home/a bc") == "/dev/vda"
    assert source("/dev/shm") == "new"
    assert source("/data") == "ada@host:"
    assert mount_of("/x", ()) is None


def test_only_options_that_are_judged_are_kept_since_network_mounts_name_users() -> None:
    mount = mount_of("/home/a b", parse_mounts(MOUNTS))
    assert mount is not None
    assert mount.options == ("rw",)


def test_this_process_own_mounts_are_found() -> None:
    mount = mount_of("/proc/self", read_mounts())
    assert mount is not None
    assert mount.kind == "proc"


def paths(
    environ: dict[str, str], home: str | None = None, runs: str | None = None
) -> dict[str, tuple[str, str | None]]:
    found = places(
        environ,
        project=Path("/p"),
        here=Path("/here"),
        home=Path(home) if home else None,
        uid=12345,
        runs=Path(runs) if runs else None,
    )
    return {one.role: (one.path, one.named_by) for one in found}


def test_folders_are_where_the_launch_and_the_libraries_put_them() -> None:
    assert paths({"HOME": "/h"}, home="/h") == {
        "home": ("/h", "HOME"),
        "kernels": ("/h/.cache/dflash", None),
        "temporary": ("/tmp", None),
        "project": ("/p", None),
        "runs": ("/here/runs", None),
        "models": ("/h/.cache/huggingface/hub", None),
        "shm": ("/dev/shm", None),
    }


def test_variables_move_folders_and_are_named() -> None:
    moved = paths(
        {
            "HOME": "/h",
            "XDG_CACHE_HOME": "/c",
            "TORCHINDUCTOR_CACHE_DIR": "k",
            "TRITON_CACHE_DIR": "/t",
            "DFLASH_KEEP": "TORCHINDUCTOR_CACHE_DIR,TRITON_*",
            "TMPDIR": "/x",
            "HF_HOME": "/hf",
        },
        home="/h",
        runs="out/../r",
    )
    assert moved["kernels"] == ("/here/k", "TORCHINDUCTOR_CACHE_DIR")
    assert moved["triton"] == ("/t", "TRITON_CACHE_DIR")
    assert moved["temporary"] == ("/x", "TMPDIR")
    assert moved["models"] == ("/hf/hub", "HF_HOME")
    assert moved["runs"] == ("/here/r", None)
    assert paths({"XDG_CACHE_HOME": "/c"})["kernels"] == ("/c/dflash", "XDG_CACHE_HOME")
    assert paths({"XDG_CACHE_HOME": "/c"})["models"] == ("/c/huggingface/hub", "XDG_CACHE_HOME")


def test_without_a_home_kernels_go_where_the_launch_puts_them() -> None:
    assert paths({})["kernels"] == ("/tmp/dflash-12345", None)
    assert "models" not in paths({})
    # The launch reads HOME only; the hub's library asks the password database too.
    assert paths({}, home="/h")["kernels"] == ("/tmp/dflash-12345", None)
    assert paths({}, home="/h")["models"] == ("/h/.cache/huggingface/hub", None)


@pytest.mark.parametrize(
    "environ",
    [
        {"DFLASH_CACHE_HOME": "/named", "XDG_CACHE_HOME": "/x", "HOME": "/h"},
        {"XDG_CACHE_HOME": "/x", "HOME": "/h"},
        {"XDG_CACHE_HOME": "relative", "HOME": "/h"},
        {"HOME": "/h"},
        {"HOME": "", "TMPDIR": "/t"},
        {"TEMP": "/t"},
        {},
        {"HOME": "/h", "TORCHINDUCTOR_CACHE_DIR": "/of/the/host", "TRITON_CACHE_DIR": "/of/the/host"},
    ],
)
def test_the_doctor_and_the_launch_never_disagree_about_where_caches_go(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from env.cache import places as launching

    monkeypatch.setattr(launching, "_problem", lambda *_: "")  # nothing is made, every folder would do
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert paths(environ, home="/h")["kernels"][0] == str(launching.cache_home(environ).path)
    assert "triton" not in paths(environ)


# What really can be done in a folder.


def looked_at(path: Path | str, role: str = "kernels") -> Folder:
    return look(Folder(role=role, path=str(path)), read_mounts())


def test_a_healthy_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    found = looked_at(tmp_path)
    assert (found.exists, found.writable, found.executable, found.trouble) == (True, True, True, None)
    assert found.free is not None
    assert found.size is not None
    assert 0 < found.free < found.size
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_yet_is_judged_by_its_nearest_parent_and_not_made(tmp_path: Path) -> None:
    found = looked_at(tmp_path / "a" / "b")
    assert (found.exists, found.tested, found.writable) == (False, str(tmp_path), True)
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_followed_to_the_file_system_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/shm")
    found = looked_at(tmp_path / "link")
    assert found.mount is not None
    assert found.mount.point == "/dev/shm"


def test_a_file_in_the_place_of_a_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    found = looked_at(tmp_path / "file" / "below")
    assert (found.writable, found.trouble) == (False, f"{tmp_path / 'file'} is not a folder")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """An empty folder that a test may mount upon; unmounted afterwards."""
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    point = tmp_path / "mount"
    point.mkdir()
    yield point
    while subprocess.run(["umount", str(point)], capture_output=True, check=False).returncode == 0:
        pass


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this container may not mount: {done.stderr.strip()}")


def test_a_real_noexec_mount_is_seen_and_is_an_error_that_names_it(mounted: Path) -> None:
    mount("-t", "tmpfs", "-o", "noexec,size=1m", "tmpfs", str(mounted))
    found = looked_at(mounted / "dflash")
    assert (found.writable, found.executable) == (True, False)
    assert found.mount is not None
    assert found.mount.options == ("rw", "noexec")
    finding = executable.judge(host(folders=folders(kernels=found)), plan())
    assert finding is not None
    assert finding.severity is Severity.ERROR
    assert finding.message == f"code cannot be loaded from {mounted}/dflash (compiled kernels)"
    assert finding.details == (f"{mounted} is mounted noexec",)
    assert finding.remedy is not None
    assert f"mount -o remount,exec {mounted}" in finding.remedy


def test_a_library_really_fails_to_load_from_where_the_doctor_says_so(mounted: Path) -> None:
    mount("-t", "tmpfs", "-o", "noexec,size=16m", "tmpfs", str(mounted))
    source = "void f(void) {}\n"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(mounted / "f.so")], input=source, text=True, check=True
    )
    load = [sys.executable, "-c", f"import ctypes; ctypes.CDLL('{mounted / 'f.so'}')"]
    failed = subprocess.run(load, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "failed to map segment" in failed.stderr


def test_a_real_read_only_mount_is_seen(mounted: Path) -> None:
    mount("-t", "tmpfs", "-o", "ro", "tmpfs", str(mounted))
    found = looked_at(mounted)
    assert (found.writable, found.trouble) == (False, "Read-only file system")


def test_a_really_full_disk_is_an_error_that_says_to_free_space(mounted: Path) -> None:
    mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mounted))
    with pytest.raises(OSError, match="No space"):
        (mounted / "filler").write_bytes(b"x" * 128 * 1024)
    found = looked_at(mounted, "runs")
    assert found.free == 0
    assert (found.writable, found.trouble) == (False, "No space left on device")
    finding = writable.judge(host(folders=folders(runs=found)), plan())
    assert finding is not None
    assert finding.severity is Severity.ERROR
    assert finding.remedy == f"free space on {mounted}"


def test_another_user_id_really_cannot_write_and_is_told_so(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("becoming another user needs root")
    # A python that every user may run, and a folder that only root may write.
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from env.doctor.facts.folders import Folder, look\n"
        "found = look(Folder(role='runs', path=sys.argv[2]), ())\n"
        "print(found.writable, found.trouble)\n"
    )
    place = Path("/tmp") / f"doctor-{os.getpid()}"  # pytest's own folder is closed to other users
    place.mkdir(mode=0o755)
    (place / "closed").mkdir(mode=0o755)
    try:
        subprocess.run(
            [
                "cp",
                "-r",
                "--parents",
                "env/__init__.py",
                "env/errors.py",
                "env/variants.py",
                "env/variants.toml",
                "env/cache",
                "env/doctor",
                str(place),
            ],
            check=True,
            cwd=Path(__file__).parent.parent,
        )
        subprocess.run(["chmod", "-R", "a+rX", str(place)], check=True)
        done = subprocess.run(
            ["/usr/bin/python3", "-c", script, str(place), str(place / "closed")],
            capture_output=True,
            text=True,
            check=False,
            user=12345,
            group=12345,
            extra_groups=[],
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},
        )
    finally:
        subprocess.run(["rm", "-rf", str(place)], check=True)
    assert done.stdout.split(maxsplit=1) == ["False", "Permission denied\n"], done.stderr


def test_a_folder_that_never_answers_is_named_by_its_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from env.doctor.facts import folders as facts

    def hangs(one: Folder, mounts: object) -> Folder:
        time.sleep(30)
        return one

    monkeypatch.setattr(facts, "look", hangs)
    mounts = parse_mounts(MOUNTS)
    (found,) = look_at_folders((Folder(role="home", path="/home/a b/x"),), mounts, seconds=0.2)
    assert found.mount is not None
    assert found.mount.kind == "nfs4"
    assert (found.writable, found.trouble) == (None, "no answer within 0.2 s")
    finding = writable.judge(host(folders=(found,)), plan())
    assert finding is not None
    assert finding.severity is Severity.NOTE
    assert "no answer" in finding.details[0]


# What it means.


def test_a_healthy_host_has_nothing_worse_than_ok_about_its_folders() -> None:
    for check in (writable, executable, local, disk, shm):
        finding = check.judge(host(), plan(config="tiny"))
        assert finding is not None
        assert finding.severity is Severity.OK, finding


def test_a_cache_folder_that_cannot_be_written_is_a_warning_while_the_launch_has_another() -> None:
    kernels = folder("kernels", "/home/ada/.cache/dflash", writable=False, trouble="Permission denied")
    finding = writable.judge(host(folders=folders(kernels=kernels)), plan())
    assert finding is not None
    assert finding.severity is Severity.WARNING
    assert "kernels go to /tmp" in finding.message
    named = replace(kernels, named_by="TORCHINDUCTOR_CACHE_DIR")
    finding = writable.judge(host(folders=folders(kernels=named)), plan())
    assert finding is not None
    assert finding.severity is Severity.ERROR
    assert finding.remedy is not None
    assert "TORCHINDUCTOR_CACHE_DIR" in finding.remedy


def test_a_read_only_project_matters_only_until_the_environment_is_made() -> None:
    project = folder("project", "/opt/dflash", writable=False, trouble="Read-only file system")
    made = writable.judge(host(folders=folders(project=project)), plan())
    assert made is not None
    assert made.severity is Severity.NOTE
    unmade = writable.judge(host(folders=folders(project=project), environment=Environment()), plan())
    assert unmade is not None
    assert unmade.severity is Severity.ERROR


def test_a_noexec_temporary_folder_is_a_note_as_long_as_kernels_go_elsewhere() -> None:
    temporary = folder("temporary", "/tmp", executable=False)
    finding = executable.judge(host(folders=folders(temporary=temporary)), plan())
    assert finding is not None
    assert finding.severity is Severity.NOTE


def test_a_noexec_mount_is_believed_where_nothing_could_be_written() -> None:
    noexec = replace(DISK, point="/c", options=("rw", "noexec"))
    kernels = folder("kernels", "/c/dflash", writable=False, executable=None, mount=noexec)
    finding = executable.judge(host(folders=folders(kernels=kernels)), plan())
    assert finding is not None
    assert finding.severity is Severity.ERROR


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "fuse", "9p"]
)
def test_kernels_on_a_network_file_system_are_a_warning_that_names_it(kind: str) -> None:
    far = Mount(point="/home", root="/", kind=kind, source="server:/home", options=("rw",))
    kernels = folder("kernels", "/home/ada/.cache/dflash", mount=far)
    finding = local.judge(host(folders=folders(kernels=kernels)), plan())
    assert finding is not None
    assert finding.severity is Severity.WARNING
    assert finding.message == "on a network file system: /home/ada/.cache/dflash (compiled kernels)"
    assert finding.details == (f"/home/ada/.cache/dflash: {kind}, mounted at /home from server:/home",)
    assert finding.remedy == "set XDG_CACHE_HOME to a folder on a local disk"


def test_a_home_on_a_network_file_system_is_fine_while_kernels_are_local() -> None:
    far = Mount(point="/home", root="/", kind="nfs4", source="server:/home", options=("rw",))
    finding = local.judge(host(folders=folders(home=folder("home", "/home/ada", mount=far))), plan())
    assert finding is not None
    assert finding.severity is Severity.OK
    assert "slower: /home/ada (HOME)" in finding.message


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "fuse.fuse-overlayfs"])
def test_local_file_systems_and_containers_layers_are_local(kind: str) -> None:
    assert not local.is_network(kind)


def test_no_mounts_mean_no_claim() -> None:
    finding = local.judge(host(folders=(replace(folder("kernels", "/k"), mount=None),)), plan())
    assert finding is not None
    assert finding.severity is Severity.UNKNOWN


# Disk.


def test_what_lies_on_one_file_system_is_added_up() -> None:
    finding = disk.judge(host(environment=Environment()), plan("cu130", "qwen3-8b"))
    assert finding is not None
    assert finding.severity is Severity.OK
    (line,) = finding.details
    assert line.startswith("/: 200 GB free, 64.5 GB wanted (")
    assert "41.9 GB run at its largest" in line
    assert "16.4 GB target" in line
    assert "cu130 environment" in line


def test_too_little_for_a_whole_run_is_a_warning_and_for_one_checkpoint_an_error() -> None:
    runs = folder("runs", "/r", mount=replace(DISK, point="/r"), free=30 * GB)
    finding = disk.judge(host(folders=folders(runs=runs)), plan(config="qwen3-8b"))
    assert finding is not None
    assert finding.severity is Severity.WARNING
    assert finding.message == "too little free disk for `qwen3-8b` on /r"
    assert finding.details[0].startswith("/r: 30.0 GB free, 41.9 GB wanted")
    finding = disk.judge(host(folders=folders(runs=replace(runs, free=5 * GB))), plan(config="qwen3-8b"))
    assert finding is not None
    assert finding.severity is Severity.ERROR


def test_too_few_inodes_for_an_environment_are_a_warning() -> None:
    project = folder("project", "/p", inodes=1000)
    finding = disk.judge(host(folders=folders(project=project), environment=Environment()), plan())
    assert finding is not None
    assert finding.severity is Severity.WARNING
    assert "1000 more files" in finding.message
    made = disk.judge(host(folders=folders(project=project)), plan())
    assert made is not None
    assert made.severity is Severity.OK


def test_unknown_free_space_is_said_to_be_unknown() -> None:
    unknown = tuple(replace(one, free=None) for one in folders())
    finding = disk.judge(host(folders=unknown), plan(config="tiny"))
    assert finding is not None
    assert finding.severity is Severity.UNKNOWN


# Shared memory.


def judged_shm(**facts: object) -> tuple[Severity, str]:
    finding = shm.judge(host(folders=folders(shm=folder("shm", "/dev/shm", **facts))), plan())
    assert finding is not None
    return finding.severity, finding.message


def test_dockers_default_of_64_mb_of_shared_memory_is_a_warning_that_says_who_needs_more() -> None:
    severity, message = judged_shm(size=64 * 2**20, free=64 * 2**20)
    assert severity is Severity.WARNING
    assert message == "/dev/shm has 67.1 MB: one process is fine, NCCL between processes wants 1 GB"


def test_shared_memory_that_is_missing_full_closed_or_unreadable_is_told_apart() -> None:
    assert judged_shm(exists=False)[1].startswith("there is no /dev/shm")
    assert "nearly full" in judged_shm(size=8 * GB, free=2**20)[1]
    assert "cannot be written" in judged_shm(writable=False, trouble="Permission denied")[1]
    assert judged_shm(size=None, free=None, trouble="no answer within 15 s")[0] is Severity.UNKNOWN
    nothing = shm.judge(host(folders=()), plan())
    assert nothing is not None
    assert nothing.severity is Severity.UNKNOWN


def test_a_gibibyte_of_shared_memory_is_enough() -> None:
    assert judged_shm(size=2**30, free=2**30)[0] is Severity.OK
