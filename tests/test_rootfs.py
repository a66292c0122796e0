from __future__ import annotations

import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from env import rootfs
from env.errors import Exit, Failure

CONFIG: dict[str, Any] = {
    "Env": ["PATH=/usr/bin:/bin", "WORDS=it's $HOME", "EMPTY="],
    "User": "10001:10002",
    "WorkingDir": "/opt/a b",
    "Entrypoint": ["/usr/bin/tini", "--", "/entry point"],
    "Cmd": ["nox", "-s", "train; rm"],
}


def exported(*members: tuple[str, bytes | str | None], mtime: int = 7) -> io.BytesIO:
    """A root as the engine exports it: content for a file, a target for a link, None for a folder."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.mtime = mtime
            if content is None:
                member.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    stream.seek(0)
    return stream


def copied(source: io.BytesIO) -> tarfile.TarFile:
    target = io.BytesIO()
    rootfs.copy(source, target, CONFIG, "sha256:123")
    target.seek(0)
    return tarfile.open(fileobj=target)


def text(archive: tarfile.TarFile, name: str) -> str:
    member = archive.extractfile(name)
    assert member is not None
    return member.read().decode()


def test_files_come_through_whole_and_the_engine_s_own_do_not() -> None:
    large = bytes(range(256)) * 5000
    engine = [(".dockerenv", b""), ("dev/", None), ("dev/console", b""), ("etc/hostname", b""), ("etc/hosts", b"x")]
    with copied(exported(("etc/", None), *engine, ("sbin", "usr/sbin"), ("a", b"1"), ("large", large))) as made:
        assert made.getnames() == [
            "etc", "sbin", "a", "large", "dev", "proc", "sys", "usr/sbin/init", "etc/dflash.env", "etc/hosts",
        ]  # fmt: skip
        assert text(made, "etc/hosts").startswith("127.0.0.1\tlocalhost\n")
        member = made.extractfile("large")
        assert member is not None
        assert member.read() == large


def test_the_image_s_own_init_is_replaced_where_it_lies() -> None:
    with copied(exported(("sbin", None), ("sbin/init", b"systemd"))) as made:
        assert "sbin/init" in made.getnames()
        assert "usr/sbin/init" not in made.getnames()
        assert "systemd" not in text(made, "sbin/init")


def test_the_time_of_the_export_does_not_show() -> None:
    def of(mtime: int) -> bytes:
        target = io.BytesIO()
        folders = [("./", None), ("etc/", None), ("etc/hosts", b"")]
        rootfs.copy(exported(*folders, mtime=mtime), target, CONFIG, "sha256:123")
        return target.getvalue()

    assert of(1) == of(2)


def test_an_export_that_ends_early_is_one_sentence() -> None:
    whole = exported(("a", b"1" * 5000)).getvalue()
    with pytest.raises(Failure, match="the engine's export of the image ends early") as caught:
        rootfs.copy(io.BytesIO(whole[:3000]), io.BytesIO(), CONFIG, "sha256:123")
    assert caught.value.code == Exit.INPUT


def test_init_hands_on_variables_folder_user_and_words_as_they_are(tmp_path: Path) -> None:
    program = rootfs.init({**CONFIG, "WorkingDir": str(tmp_path)}, "sha256:123")
    shown = tmp_path / "setpriv"
    shown.write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$WORDS" "[$EMPTY]" "$@"\n')
    shown.chmod(0o755)
    program = program.replace("PATH=/usr/bin:/bin", f"PATH={tmp_path}:/usr/bin:/bin")
    done = subprocess.run(["/bin/sh", "-c", program], capture_output=True, text=True, check=True, env={})
    assert done.stdout.splitlines() == [
        str(tmp_path), "it's $HOME", "[]", "--reuid", "10001", "--regid", "10002", "--clear-groups", "--no-new-privs",
        "--inh-caps=-all", "--", "/usr/bin/tini", "--", "/entry point", "nox", "-s", "train; rm",
    ]  # fmt: skip


def test_an_archive_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    if shutil.which("zstd") is None:
        monkeypatch.setenv("PATH", "")
        with pytest.raises(Failure, match="there is no `zstd` on the PATH"):
            rootfs.main(["image", str(tmp_path / "out")])
        pytest.skip("there is no zstd here")
    out = tmp_path / "out.tar.zst"
    with rootfs.written(out) as pipe:
        pipe.write(b"content")
        assert not out.exists()
    assert subprocess.run(["zstd", "-dc", out], capture_output=True, check=True).stdout == b"content"
    with pytest.raises(ZeroDivisionError), rootfs.written(tmp_path / "other") as pipe:
        raise ZeroDivisionError
    with pytest.raises(Failure, match="cannot write") as caught, rootfs.written(tmp_path / "no" / "folder") as pipe:
        pipe.write(b"content")
    assert caught.value.code == Exit.STORAGE
    assert [path.name for path in tmp_path.iterdir()] == ["out.tar.zst"]


DOCKER = """\
#!/bin/sh
case "$1 $2" in
    "image inspect") cat "$HERE/inspected" ;;
    "create "*) echo box ;;
    "export box") cat "$HERE/exported"; exit "$(cat "$HERE/code")" ;;
esac
"""
ZSTD = """\
#!/bin/sh
for out; do :; done
exec cat >"$out"
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of what an engine says: its export and the exit code of that."""
    made = tmp_path / "bin"
    made.mkdir()
    for name, program in (("docker", DOCKER), ("zstd", ZSTD)):
        (made / name).write_text(program)
        (made / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{made}:/usr/bin:/bin")
    monkeypatch.setenv("HERE", str(tmp_path))
    (tmp_path / "inspected").write_text(json.dumps([{"Config": CONFIG, "Id": "sha256:123"}]))
    return tmp_path


WHOLE = exported(*((name, name.encode() * 2000) for name in "abc")).getvalue()


@pytest.mark.parametrize("length", [2560, 2860, len(WHOLE)], ids=["between-members", "in-a-header", "at-the-end"])
def test_an_export_that_the_engine_did_not_finish_makes_no_archive(host: Path, length: int) -> None:
    (host / "exported").write_bytes(WHOLE[:length])
    (host / "code").write_text("1")
    before = {*host.iterdir()}
    with pytest.raises(Failure, match=r"export of the image ends early: .* exit code 1") as caught:
        rootfs.main(["image", str(host / "out")])
    assert caught.value.code == Exit.INPUT
    assert {*host.iterdir()} == before


def test_an_export_that_is_padded_like_a_tape_is_read_to_its_end(host: Path) -> None:
    (host / "exported").write_bytes(WHOLE + bytes(1 << 20))
    (host / "code").write_text("0")
    assert rootfs.main(["image", str(host / "out")]) == Exit.DONE
    with tarfile.open(host / "out") as made:
        assert made.getnames()[:3] == ["a", "b", "c"]


def test_a_folder_in_the_archive_s_place_is_refused_before_anything_is_exported(host: Path) -> None:
    (host / "out").mkdir()
    with pytest.raises(Failure, match="is a folder") as caught:
        rootfs.main(["image", str(host / "out")])
    assert caught.value.code == Exit.USAGE
