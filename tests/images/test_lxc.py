from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import Engine, give_up

from env.errors import Exit
from env.variants import ROOT

pytestmark = pytest.mark.image

ENTRYPOINT = """\
#!/bin/dash
trap 'echo stopped; exit 143' TERM
echo "ran $* as $(id -u):$(id -g) in $(pwd) with $GREETING"
[ "$1" = fail ] && exit 7
[ "$1" = wait ] && { echo waiting; while :; do sleep 0.1; done; }
touch runs/made || exit 6
touch /made 2>/dev/null && echo "the root can be written"
exit 0
"""


def plant(root: Path, *programs: str) -> None:
    """Copy programs of this machine into a root, with the libraries that they load."""
    for name in programs:
        program = Path(str(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")))
        asked = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
        for path in [program, *map(Path, re.findall(r"(/\S+) \(0x", asked))]:
            place = root / path.relative_to("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path.resolve(), place)


@pytest.fixture(scope="module")
def image(docker_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with a shell, tini and an entrypoint, laid out as Debian is: /bin, /lib and /sbin are links."""
    work = tmp_path_factory.mktemp("rooted")
    root = work / "root"
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    plant(root, "dash", "setpriv", "id", "sleep", "touch", "tini")
    (root / "usr/bin/sh").symlink_to("dash")
    for name in ("proc", "dev", "etc", "tmp", "opt/dflash/runs", "cache"):
        (root / name).mkdir(parents=True)
    (root / "opt/dflash/entrypoint").write_text(ENTRYPOINT)
    (root / "opt/dflash/entrypoint").chmod(0o755)
    subprocess.run(["tar", "-cf", work / "root.tar", "-C", root, "."], check=True)
    lines = ["FROM scratch", "ADD root.tar /", """ENV GREETING="it's \\$HOME" """, "WORKDIR /opt/dflash"]
    lines += [
        "USER 10001:10001",
        'ENTRYPOINT ["/usr/bin/tini", "--", "/opt/dflash/entrypoint"]',
        'CMD ["train", "a b"]',
    ]
    (work / "Dockerfile").write_text("\n".join(lines))
    docker_engine.docker("buildx", "build", "--quiet", "--provenance=false", "--tag", "rooted:1", work)
    return "rooted:1"


COMMAND = [sys.executable, "-m", "env", "rootfs"]


def make(engine: Engine, *arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    environ = {**engine.environ, "PYTHONPATH": str(ROOT), **more}
    return subprocess.run([*COMMAND, *arguments], env=environ, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def archive(docker_engine: Engine, image: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("archive") / "dflash.tar.zst"
    done = make(docker_engine, image, out)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"{out}: [0-9,]+ bytes, sha256 [0-9a-f]{{64}}\n", done.stdout)
    return out


@pytest.fixture
def container(archive: Path, tmp_path: Path) -> Path:
    """The archive unpacked, as `pct create` does, with a run folder that the container's user can write."""
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["tar", "--zstd", "-xpf", archive, "-C", root, "--numeric-owner"], check=True)
    (root / "opt/dflash/runs").chmod(0o777)
    return root


def boot(root: Path, *, writable: str = "opt/dflash/runs") -> subprocess.Popen[str]:
    """Start /sbin/init as process 1 of new namespaces, on a read-only root with one writable mount, and no network."""
    program = f"""
        mount --bind {root} {root} && mount -o remount,ro,bind {root} &&
        mount --bind {root}/{writable} {root}/{writable} && mount -o remount,rw,bind {root}/{writable} &&
        mount -t proc proc {root}/proc && mount --rbind /dev {root}/dev && exec chroot {root} /sbin/init"""
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--uts", "sh", "-c", program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={})


def test_the_container_boots_into_the_image_s_entrypoint_as_its_user(container: Path) -> None:
    process = boot(container)
    said, _ = process.communicate(timeout=30)
    assert said == "ran train a b as 10001:10001 in /opt/dflash with it's $HOME\n"
    assert process.returncode == 0
    assert (container / "opt/dflash/runs/made").stat().st_uid == 10001


def test_another_command_and_its_exit_code_come_through(container: Path) -> None:
    (container / "etc/dflash.env").write_text("export GREETING=bye\nset -- fail\n")
    process = boot(container)
    said, _ = process.communicate(timeout=30)
    assert (said, process.returncode) == ("ran fail as 10001:10001 in /opt/dflash with bye\n", 7)


def test_the_signal_that_stops_the_container_reaches_the_program(container: Path) -> None:
    (container / "etc/dflash.env").write_text("set -- wait\n")
    process = boot(container)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("ran wait")
        assert process.stdout.readline() == "waiting\n"
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert Path(f"/proc/{child}/comm").read_text() == "tini\n"
        os.kill(int(child), signal.SIGTERM)
        assert process.communicate(timeout=30)[0] == "stopped\n"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert process.returncode == 143


def settings() -> list[tuple[str, str]]:
    """What docker/lxc/container.conf adds, as Proxmox writes it: `key: value`."""
    text = (ROOT / "docker" / "lxc" / "container.conf").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.]+: \S.*", line) for line in lines)
    return [(key, value) for key, _, value in (line.partition(": ") for line in lines)]


def test_a_mount_point_is_a_folder_of_the_host_s_that_is_made_with_the_user_s_owner() -> None:
    """`STORAGE:SIZE` allocates a volume in a command alone, and a volume belongs to root."""
    places = dict(value.split(",mp=") for key, value in settings() if re.fullmatch(r"mp\d", key))
    assert {*places.values()} == {"/opt/dflash/runs", "/cache"}
    made = f"#   install -d -o 110001 -g 110001 {' '.join(places)}\n"
    assert made in (ROOT / "docker" / "lxc" / "container.conf").read_text()


def test_the_container_gets_the_driver_s_libraries_by_lxc_s_own_hook() -> None:
    assert ("lxc.hook.mount", "/usr/share/lxc/hooks/nvidia") in settings()


@pytest.fixture
def lxc(container: Path) -> Iterator[tuple[str, ...]]:
    """The container as LXC knows it: read-only, without a network, with the lines of docker/lxc/container.conf."""
    if shutil.which("lxc-start") is None:
        give_up("LXC is not installed (`.ci/engine install`)")
    home = Path(tempfile.mkdtemp(prefix="dflash-lxc-", dir="/tmp"))
    (home / "box").mkdir()
    (home / "mounted").mkdir()
    lines = {
        "lxc.rootfs.path": f"dir:{container}",
        "lxc.rootfs.mount": str(home / "mounted"),
        "lxc.rootfs.options": "ro",
        "lxc.net.0.type": "empty",
        "lxc.apparmor.profile": "unconfined",
        "lxc.mount.auto": "proc:mixed sys:ro",
        "lxc.console.logfile": str(home / "console"),
    }
    told = [*lines.items(), ("lxc.mount.entry", f"{container}/opt/dflash/runs opt/dflash/runs none bind,rw 0 0")]
    # the hook needs the driver's container toolkit; mount points and devices are Proxmox's own words
    told += [(key, value) for key, value in settings() if key.startswith("lxc.") and key != "lxc.hook.mount"]
    (home / "box" / "config").write_text("".join(f"{key} = {value}\n" for key, value in told))
    yield ("--name=box", f"--lxcpath={home}")
    subprocess.run(["lxc-stop", "--name=box", f"--lxcpath={home}", "--kill"], check=False, capture_output=True)
    shutil.rmtree(home)


def console(lxc: tuple[str, ...]) -> Path:
    return Path(lxc[1].partition("=")[2]) / "console"


def test_lxc_starts_it_on_a_read_only_root(container: Path, lxc: tuple[str, ...]) -> None:
    done = subprocess.run(["lxc-start", "--foreground", *lxc], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    said = console(lxc).read_text().replace("\r", "")
    assert said == "ran train a b as 10001:10001 in /opt/dflash with it's $HOME\n"
    assert (container / "opt/dflash/runs/made").stat().st_uid == 10001


def test_lxc_stops_it_with_the_signal_that_saves(container: Path, lxc: tuple[str, ...]) -> None:
    (container / "etc/dflash.env").write_text("set -- wait\n")
    log = console(lxc).with_name("log")
    words = ["lxc-start", "--foreground", *lxc, f"--logfile={log}", "--logpriority=INFO"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (console(lxc).exists() and "waiting" in console(lxc).read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        subprocess.run(["lxc-stop", *lxc, "--timeout=20"], check=True)
        process.wait(30)
    finally:
        process.kill()
        process.wait()
    assert console(lxc).read_text().replace("\r", "").endswith("waiting\nstopped\n")
    assert "ended on error (143)" in log.read_text()


def test_the_archive_holds_the_image_s_files_and_two_more(archive: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.tar"
    subprocess.run(["zstd", "-q", "-d", archive, "-o", plain], check=True)
    with tarfile.open(plain) as held:
        names = held.getnames()
        init = held.extractfile("usr/sbin/init")
        assert init is not None
        assert b"# From the image sha256:" in init.read()
    assert ".dockerenv" not in names
    assert len(names) == len(set(names))
    assert {"opt/dflash/entrypoint", "usr/sbin/init", "etc/dflash.env"} <= set(names)
    assert "sbin/init" not in names


def test_what_it_cannot_use_is_one_sentence_and_leaves_nothing(
    docker_engine: Engine, image: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.tar.zst"
    nowhere = f"unix://{tmp_path}/sock"
    cases = [
        (make(docker_engine, image, "--what"), Exit.USAGE, "usage: "),
        (make(docker_engine, "nothing:1", out), Exit.INPUT, "error: the container engine has no image nothing:1\n"),
        (make(docker_engine, image, out, DOCKER_HOST=nowhere), Exit.HOST, "error: the container engine does not"),
    ]
    for done, code, sentence in cases:
        assert done.returncode == code
        assert done.stderr.startswith(sentence)
    done = make(docker_engine, image, tmp_path / "no" / "folder.tar.zst")
    assert done.returncode == Exit.STORAGE
    assert "cannot write" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert docker_engine.docker("ps", "--all", "--quiet").stdout == ""


def test_the_same_image_gives_the_same_bytes(docker_engine: Engine, image: str, archive: Path, tmp_path: Path) -> None:
    assert make(docker_engine, image, tmp_path / "again").returncode == 0
    assert (tmp_path / "again").read_bytes() == archive.read_bytes()


def test_files_come_through_as_they_are(image: str, container: Path, docker_engine: Engine) -> None:
    for name in ("usr/bin/dash", "lib64/ld-linux-x86-64.so.2", "opt/dflash/entrypoint"):
        made = (container / name).read_bytes()
        assert made == (ENTRYPOINT.encode() if name.startswith("opt") else (Path("/") / name).read_bytes())
    assert (container / "etc/hosts").read_text().startswith("127.0.0.1\tlocalhost\n")


def test_an_archive_that_was_stopped_in_the_middle_leaves_nothing(
    docker_engine: Engine, image: str, tmp_path: Path
) -> None:
    made = tmp_path / "bin"
    made.mkdir()
    (made / "zstd").write_text("#!/bin/sh\ntouch $CALLED; while :; do sleep 0.1; done\n")
    (made / "zstd").chmod(0o755)
    environ = {**docker_engine.environ, "PATH": f"{made}:{docker_engine.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    out = tmp_path / "out.tar.zst"
    process = subprocess.Popen(
        [*COMMAND, image, out], env={**environ, "CALLED": str(tmp_path / "called")}, stderr=subprocess.DEVNULL
    )
    while not (tmp_path / "called").exists():
        assert process.poll() is None
    process.terminate()
    assert process.wait(30) == Exit.TERMINATED
    assert {path.name for path in tmp_path.iterdir()} == {"bin", "called"}
    assert docker_engine.docker("ps", "--all", "--quiet").stdout == ""
