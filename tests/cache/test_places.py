"""Where caches go, for every kind of user and disk: a folder that can be used, or one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from caches import make_sealed
from conftest import mounted

from env.cache import places
from env.doctor.facts import folders
from env.errors import Exit, Failure
from env.variants import ROOT


def test_the_users_cache_folder_is_the_usual_place(tmp_path: Path) -> None:
    assert places.cache_home({"XDG_CACHE_HOME": f"{tmp_path}/x"}) == places.Home(tmp_path / "x/dflash")
    assert places.cache_home({"HOME": f"{tmp_path}/h"}) == places.Home(tmp_path / "h/.cache/dflash")
    assert (tmp_path / "h/.cache/dflash").stat().st_mode & 0o777 == 0o700


def test_a_named_place_counts_before_all(tmp_path: Path) -> None:
    environ = {"DFLASH_CACHE_HOME": f"{tmp_path}/named", "XDG_CACHE_HOME": f"{tmp_path}/x"}
    assert places.cache_home(environ) == places.Home(tmp_path / "named")


def test_without_a_home_a_private_temporary_folder_is_used(tmp_path: Path) -> None:
    found = places.cache_home({"TMPDIR": str(tmp_path)})
    assert found == places.Home(tmp_path / f"dflash-{os.getuid()}")
    assert found.path.stat().st_mode & 0o777 == 0o700


def test_a_home_that_cannot_be_written_is_passed_over_and_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = places.cache_home({"HOME": f"{tmp_path}/file", "TMPDIR": str(tmp_path)})
    assert found.path == tmp_path / f"dflash-{os.getuid()}"
    assert "cannot be written (Not a directory)" in str(found.notice)


def test_a_named_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Failure, match="as DFLASH_CACHE_HOME says: cannot be written") as refusal:
        places.cache_home({"DFLASH_CACHE_HOME": f"{tmp_path}/file/below", "TMPDIR": str(tmp_path)})
    assert refusal.value.code is Exit.STORAGE


def test_a_folder_of_ours_that_others_could_write_is_closed_and_a_named_one_refused(tmp_path: Path) -> None:
    folder = tmp_path / "dflash"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(Failure, match="can be written by other users"):
        places.cache_home({"DFLASH_CACHE_HOME": str(folder)})
    assert folder.stat().st_mode & 0o777 == 0o777, "what the user named is not changed"
    assert places.cache_home({"XDG_CACHE_HOME": str(tmp_path)}) == places.Home(folder)
    assert folder.stat().st_mode & 0o022 == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give folders away")
def test_a_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    planted = tmp_path / f"dflash-{os.getuid()}"
    planted.mkdir()
    os.chown(planted, 54321, 54321)
    with pytest.raises(Failure, match="no folder for caches") as refusal:
        places.cache_home({"TMPDIR": str(tmp_path)})
    assert "belongs to user 54321" in refusal.value.details[0]


NFS = "26 1 0:22 / {point} rw,relatime - nfs4 server:/export rw,vers=4.2\n"


def test_a_home_on_a_network_is_passed_over_and_a_named_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = tmp_path / "share"
    mounts = folders.parse_mounts(NFS.format(point=share))
    monkeypatch.setattr(folders, "read_mounts", lambda: mounts)
    found = places.cache_home({"HOME": str(share), "TMPDIR": str(tmp_path)})
    assert found.path == tmp_path / f"dflash-{os.getuid()}"
    assert "network file system (nfs4)" in str(found.notice)
    with pytest.raises(Failure, match=r"network file system \(nfs4\)"):
        places.cache_home({"DFLASH_CACHE_HOME": str(share), "TMPDIR": str(tmp_path)})
    allowed = {"DFLASH_CACHE_HOME": str(share), "DFLASH_NETWORK_CACHE": "1"}
    assert places.cache_home(allowed) == places.Home(share)


def test_a_folder_with_a_blank_in_its_name_is_not_used_because_torch_breaks_on_it(tmp_path: Path) -> None:
    found = places.cache_home({"HOME": f"{tmp_path}/my home", "TMPDIR": str(tmp_path)})
    assert found.path == tmp_path / f"dflash-{os.getuid()}"
    assert "has a blank in its name" in str(found.notice)
    with pytest.raises(Failure, match="has a blank in its name"):
        places.cache_home({"DFLASH_CACHE_HOME": f"{tmp_path}/my caches"})


def test_a_local_file_system_is_not_taken_for_a_network(tmp_path: Path) -> None:
    assert places.network(tmp_path) is None
    assert places.network(Path("/proc")) is None


def test_a_read_only_root_leaves_the_temporary_folder(tmp_path: Path) -> None:
    for disk in mounted(tmp_path / "root", "size=1m"):
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        found = places.cache_home({"HOME": f"{disk}/user", "TMPDIR": str(tmp_path)})
        assert found.path == tmp_path / f"dflash-{os.getuid()}"
        assert "Read-only file system" in str(found.notice)
        with pytest.raises(Failure, match="no folder for caches"):
            places.cache_home({"HOME": f"{disk}/user", "TMPDIR": str(disk)})


def test_an_images_sealed_caches_and_trust_come_after_the_users_own(tmp_path: Path) -> None:
    environ = {"DFLASH_SEALED": "/opt/a:relative:/opt/b", "DFLASH_CACHE_TRUST": "/opt/trust"}
    assert places.sealed_folders(environ, tmp_path) == (tmp_path / "sealed", Path("/opt/a"), Path("/opt/b"))
    assert places.trust_folders(environ, tmp_path) == (tmp_path / "trust", Path("/opt/trust"))


NOBODY = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from env.cache import places, seed, sign
import env.doctor.facts.folders  # everything is imported while its files can be read
os.setgroups([]); os.setgid(54321); os.setuid(54321)
home = places.cache_home()
place, _, who = seed.seed(Path(sys.argv[2]), home.path, sign.trust(places.trust_folders()))
print(json.dumps([str(home.path), str(place), who, os.listdir(place)]))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="another user id can only be taken by root")
def test_a_user_id_without_a_passwd_entry_and_without_home_gets_a_usable_cache(open_folder: Path) -> None:
    """As an image is run in many clusters: sealed and believed by the image, a random user id, no HOME."""
    sealed, _ = make_sealed(open_folder)
    (open_folder / "sealed").chmod(0o755)
    (open_folder / "trust").chmod(0o755)
    (open_folder / "trust/known").chmod(0o644)
    (open_folder / "tmp").mkdir()
    (open_folder / "tmp").chmod(0o1777)
    environ = {"DFLASH_CACHE_TRUST": str(open_folder / "trust"), "TMPDIR": str(open_folder / "tmp"), "PATH": "/usr/bin"}
    command = [sys.executable, "-I", "-S", "-c", NOBODY, str(ROOT), str(sealed)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    home, place, who, names = json.loads(done.stdout)
    assert home == f"{open_folder}/tmp/dflash-54321"
    assert place.startswith(f"{home}/seeded/")
    assert who == "sealed here"
    assert "fxgraph" in names


def test_the_temporary_folder_is_the_systems_when_no_variable_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    assert places.cache_home({}).path == Path(tempfile.gettempdir()) / f"dflash-{os.getuid()}"
