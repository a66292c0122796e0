"""Seeding: many at once, killed, full disks, read-only roots, users without a name: a usable cache or one sentence."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from caches import believed, identity, make_sealed, make_source, opened
from conftest import mounted

from env.cache import manifest, seed, sign
from env.errors import Exit, Failure
from env.variants import ROOT

SEEDING = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from env.cache import seed, sign
from env.errors import Failure, report
try:
    print(seed.seed(Path(sys.argv[2]), Path(sys.argv[3]), sign.trust([Path(sys.argv[4])]))[0], flush=True)
except Failure as failure:
    sys.exit(report(failure))
"""


def start(sealed: Path, home: Path, trust: Path) -> subprocess.Popen[str]:
    """A process that seeds."""
    command = [sys.executable, "-I", "-S", "-c", SEEDING, str(ROOT), str(sealed), str(home), str(trust)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def whole(place: Path, sealed: Path) -> bool:
    """Whether a copy holds every promised file."""
    return not seed.damaged(place, manifest.read(sealed)[0])


def test_a_copy_is_whole_writable_and_ours_alone(tmp_path: Path) -> None:
    sealed, made = make_sealed(tmp_path)
    place, found, who = seed.seed(sealed, tmp_path / "home", believed(tmp_path))
    assert (found, who) == (made, "sealed here")
    assert place == tmp_path / "home/seeded" / identity()
    assert whole(place, sealed)
    assert not (place / "triton").exists()
    assert place.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o200 for path in place.rglob("*"))


def test_a_copy_is_used_again_without_copying(tmp_path: Path) -> None:
    sealed, _ = make_sealed(tmp_path)
    place, _, _ = seed.seed(sealed, tmp_path / "home", believed(tmp_path))
    (place / "triton/0").mkdir(parents=True)
    before = {path: path.stat().st_ino for path in place.rglob("*")}
    assert seed.seed(sealed, tmp_path / "home", believed(tmp_path))[0] == place
    assert {path: path.stat().st_ino for path in place.rglob("*")} == before


def test_a_damaged_copy_gets_back_what_it_lacks_and_keeps_the_rest(tmp_path: Path) -> None:
    sealed, _ = make_sealed(tmp_path)
    place, _, _ = seed.seed(sealed, tmp_path / "home", believed(tmp_path))
    (place / "q1/cq1.py").write_text("changed")
    (place / "xy/cxyz.py").unlink()
    shutil.rmtree(place / "fxgraph/ab")
    (place / "xy/made by a run.py").write_text("mine")
    untouched = (place / "q1/abc.best_config").stat().st_ino
    seed.seed(sealed, tmp_path / "home", believed(tmp_path))
    assert whole(place, sealed)
    assert (place / "xy/made by a run.py").read_text() == "mine"
    assert (place / "q1/abc.best_config").stat().st_ino == untouched


def test_another_cache_of_the_same_identity_does_not_touch_the_first_copy(tmp_path: Path) -> None:
    sealed, _ = make_sealed(tmp_path)
    harvested = make_source(tmp_path / "harvested")
    (harvested / "q1/more.best_config").write_text("{}")
    other, _ = make_sealed(tmp_path, source=harvested)
    first, _, _ = seed.seed(sealed, tmp_path / "home", believed(tmp_path))
    second, _, _ = seed.seed(other, tmp_path / "home", believed(tmp_path))
    assert first != second
    assert seed.seed(other, tmp_path / "home", believed(tmp_path))[0] == second
    assert whole(first, sealed)
    assert whole(second, other)


def test_sixteen_processes_at_once_with_one_killed_in_the_middle_end_with_one_whole_copy(tmp_path: Path) -> None:
    sealed, _ = make_sealed(tmp_path, source=make_source(tmp_path / "source", big=60_000_000))
    home = tmp_path / "home"
    victim = start(sealed, home, tmp_path / "trust")
    while not list(home.glob("seeded/.*/q1/big.so")):
        assert victim.poll() is None
        time.sleep(0.001)
    others = [start(sealed, home, tmp_path / "trust") for _ in range(15)]
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    answers = [process.communicate()[0].strip() for process in others]
    assert set(answers) == {str(home / "seeded" / identity())}
    assert whole(home / "seeded" / identity(), sealed)
    assert not list(home.glob("seeded/.*")), "what the killed one left is gone"


def test_a_copy_that_was_killed_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    sealed, _ = make_sealed(tmp_path, source=make_source(tmp_path / "source", big=60_000_000))
    home = tmp_path / "home"
    for _ in range(3):
        victim = start(sealed, home, tmp_path / "trust")
        while not list(home.glob("seeded/.*/q1/big.so")):
            assert victim.poll() is None
            time.sleep(0.001)
        victim.kill()
        victim.communicate()
        assert not (home / "seeded" / identity()).exists()
    place, _, _ = seed.seed(sealed, home, believed(tmp_path))
    assert whole(place, sealed)
    assert len(list(home.glob("seeded/.*"))) == 0


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path, small_disk: Path) -> None:
    sealed, _ = make_sealed(tmp_path, source=make_source(tmp_path / "source", big=3_000_000))
    with pytest.raises(Failure, match="is full") as refusal:
        seed.seed(sealed, small_disk, believed(tmp_path))
    assert refusal.value.code is Exit.STORAGE
    assert "DFLASH_CACHE_HOME" in str(refusal.value.hint)
    assert not list((small_disk / "seeded").glob("[!.]*/*"))
    assert shutil.disk_usage(small_disk).used < 100_000


def test_a_disk_that_fills_up_while_copying_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed, _ = make_sealed(tmp_path, source=make_source(tmp_path / "source", big=3_000_000))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Plenty())  # as a quota shows it
    with pytest.raises(Failure, match="is full"):
        seed.seed(sealed, small_disk, believed(tmp_path))
    assert not list((small_disk / "seeded").glob(".*"))


class _Plenty:
    free = 1 << 40


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A real file system that nobody can write."""
    for disk in mounted(tmp_path / "read-only", "size=1m"):
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        yield disk


def test_a_read_only_file_system_is_one_sentence(tmp_path: Path, read_only: Path) -> None:
    sealed, _ = make_sealed(tmp_path)
    with pytest.raises(Failure, match="Read-only file system") as refusal:
        seed.seed(sealed, read_only / "home", believed(tmp_path))
    assert refusal.value.code is Exit.STORAGE


def test_a_sealed_cache_on_a_read_only_file_system_is_copied(tmp_path: Path) -> None:
    for disk in mounted(tmp_path / "image", "size=8m"):
        sealed, _ = make_sealed(disk)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        place, _, _ = seed.seed(sealed, tmp_path / "home", believed(disk))
        assert whole(place, sealed)


def test_a_copy_that_another_user_can_write_is_refused(tmp_path: Path) -> None:
    sealed, _ = make_sealed(tmp_path)
    place, _, _ = seed.seed(sealed, tmp_path / "home", believed(tmp_path))
    place.chmod(0o777)
    with pytest.raises(Failure, match="cannot hold code for us"):
        seed.seed(sealed, tmp_path / "home", believed(tmp_path))


def test_a_planted_link_in_place_of_the_copy_is_refused(tmp_path: Path) -> None:
    sealed, made = make_sealed(tmp_path)
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / seed.MARK).write_bytes(made.to_bytes())
    (tmp_path / "home/seeded").mkdir(parents=True)
    (tmp_path / "home/seeded" / identity()).symlink_to(target)
    with pytest.raises(Failure, match="cannot hold code for us"):
        seed.seed(sealed, tmp_path / "home", believed(tmp_path))


def test_an_untrusted_cache_is_not_copied(tmp_path: Path) -> None:
    sealed, _ = make_sealed(tmp_path)
    with pytest.raises(Failure, match="not signed by anyone who is trusted"):
        seed.seed(sealed, tmp_path / "home", sign.Trust())
    assert not (tmp_path / "home").exists()


def test_a_promised_file_that_was_changed_after_sealing_is_not_given_a_name(tmp_path: Path) -> None:
    sealed, _ = make_sealed(tmp_path)
    (opened(sealed) / "cache/q1/cq1.py").write_text("def kernel(): evi\n")
    with pytest.raises(Failure, match=r"cq1\.py was changed"):
        seed.seed(sealed, tmp_path / "home", believed(tmp_path))
    assert not list((tmp_path / "home/seeded").glob("[!.]*/")), "no folder has the cache's name"
    assert not list((tmp_path / "home/seeded").glob(".*"))
