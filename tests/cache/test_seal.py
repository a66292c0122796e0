"""Sealing: what goes in, that it is whole, read-only and repeatable."""

from __future__ import annotations

import dataclasses
import errno
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from caches import COUNTS, FACTORS, GPU, believed, identity, make_sealed, make_source, opened

from env.cache import examine, manifest, normal, seal, store
from env.errors import Exit, Failure
from env.variants import ROOT


def test_a_sealed_cache_holds_the_entries_and_code_but_nothing_of_tritons(tmp_path: Path) -> None:
    place, sealed = make_sealed(tmp_path)
    assert place == tmp_path / "sealed" / identity()
    tops = {name.split("/")[0] for name in sealed.files}
    assert tops == {"fxgraph", "aotautograd", "xy", "q1"}
    assert not [name for name in sealed.files if name.endswith((".lock", ".tmp"))]
    assert sealed.keys == {"aot_autograd": ("aaaa",), "fx": ("fabc", "fcde"), "triton": ("KERNELHASH",)}


def test_a_sealed_cache_is_read_only(tmp_path: Path) -> None:
    place, _ = make_sealed(tmp_path)
    for folder, _, names in os.walk(place):
        assert Path(folder).stat().st_mode & 0o777 == 0o555
        for name in names:
            assert Path(folder, name).stat().st_mode & 0o777 == 0o444


def test_two_bakes_at_one_path_seal_to_the_same_bytes_although_their_times_differ(tmp_path: Path) -> None:
    source = tmp_path / "source"
    first, one = make_sealed(tmp_path / "one", source=make_source(source, elapsed=12345678901))
    source.rename(tmp_path / "before")
    second, other = make_sealed(tmp_path / "two", source=make_source(source, elapsed=99))
    assert (first / manifest.NAME).read_bytes() == (second / manifest.NAME).read_bytes()
    assert one == other


def test_two_bakes_at_different_paths_have_one_digest(tmp_path: Path) -> None:
    _, one = make_sealed(tmp_path / "one", source=make_source(tmp_path / "here"))
    _, other = make_sealed(tmp_path / "two", source=make_source(tmp_path / "a longer path" / "there"))
    assert one.files != other.files
    assert one.digest == other.digest
    assert "folder in which it was baked" in one.digest_over


def test_two_bakes_of_code_at_different_paths_have_one_digest(tmp_path: Path) -> None:
    made = []
    for name in ("here", "a longer path/there"):
        source, code = make_source(tmp_path / name / "cache"), tmp_path / name
        (source / "fxgraph/ab/fabc" / ("x" * 51)).write_bytes(pickle.dumps({"graph": f"# File: {code}/model.py:35"}))
        made.append(make_sealed(tmp_path / name / "sealed", source=source, code=[code])[1])
        made.append(make_sealed(tmp_path / name / "told", source=source)[1])
    one, path_told, other, other_told = (manifest.digest for manifest in made)
    assert one == other
    assert len({one, path_told, other_told}) == 3  # nothing else was equal in them


def test_a_cache_filled_through_a_link_has_the_same_digest(tmp_path: Path) -> None:
    _, one = make_sealed(tmp_path / "one", source=make_source(tmp_path / "here"))
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    _, other = make_sealed(tmp_path / "two", source=make_source(tmp_path / "link/there"))
    assert one.digest == other.digest


@pytest.mark.skipif(os.getuid() != 0, reason="another user id can only be taken by root")
def test_a_user_who_is_not_root_seals_and_frees_as_well(open_folder: Path) -> None:
    """Root may write in folders that are read-only; whoever else seals, renames one that it cannot write in."""
    source = make_source(open_folder / "source")
    for place in (open_folder, source, *source.rglob("*")):
        os.chown(place, 54321, 54321)
    child = os.fork()
    if child == 0:  # pragma: no cover  # in another process
        code = 1
        try:
            os.setgid(54321)
            os.setuid(54321)
            place, sealed = make_sealed(open_folder, source=source)
            assert make_sealed(open_folder, source=source) == (place, sealed)
            caches = store.stored(open_folder, {})
            assert [store.free(cache) for cache in caches] == [None]
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list((open_folder / "sealed").iterdir()) == []


def test_another_content_has_another_digest(tmp_path: Path) -> None:
    _, one = make_sealed(tmp_path / "one", source=make_source(tmp_path / "source"))
    changed = make_source(tmp_path / "changed")
    (changed / "q1/cq1.py").write_text("def kernel(): return 1\n")
    _, other = make_sealed(tmp_path / "two", source=changed)
    assert one.digest != other.digest


def test_sealed_entries_mean_what_they_meant(tmp_path: Path) -> None:
    place, sealed = make_sealed(tmp_path)
    name = next(name for name in sealed.files if name.startswith("fxgraph/cd/fcde/"))
    data = (place / "cache" / name).read_bytes()
    assert pickle.loads(data) == {"_time_taken_ns": 0, "code": "def f(): pass", "other": 1}
    assert name.endswith("/" + normal.entry_name(data))


def test_sealing_unpickles_nothing(tmp_path: Path) -> None:
    make_sealed(tmp_path, source=make_source(tmp_path / "source", trap=tmp_path / "sprung"))
    assert not (tmp_path / "sprung").exists()


def test_sealing_the_same_again_returns_what_is_there(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    first = make_sealed(tmp_path, source=source)
    assert make_sealed(tmp_path, source=source) == first
    assert [path.name for path in (tmp_path / "sealed").iterdir()] == [identity()]


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "add"])
def test_sealing_the_same_again_mends_what_was_damaged(tmp_path: Path, harm: str) -> None:
    source = make_source(tmp_path / "source")
    place, made = make_sealed(tmp_path, source=source)
    file = opened(place) / "cache" / next(iter(made.files))
    if harm == "flip":
        file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    elif harm == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif harm == "remove":
        file.unlink()
    else:
        (file.parent / "added").write_bytes(b"")
    with pytest.raises(Failure):
        examine.examine(place, believed(tmp_path))
    assert make_sealed(tmp_path, source=source) == (place, made)
    assert examine.examine(place, believed(tmp_path))[0] == made
    assert [path.name for path in (tmp_path / "sealed").iterdir()] == [identity()]


def test_another_cache_of_the_same_identity_gets_a_place_of_its_own(tmp_path: Path) -> None:
    first, one = make_sealed(tmp_path)
    harvested = make_source(tmp_path / "harvested")
    (harvested / "q1/more.best_config").write_text("{}")
    second, other = make_sealed(tmp_path, source=harvested, parent=one.digest)
    assert second.name == f"{identity()}.{other.digest[:12]}"
    assert other.parent == one.digest
    assert examine.examine(first, believed(tmp_path))[0] == one


def test_a_planted_folder_with_the_right_digest_is_not_taken_for_ours(tmp_path: Path) -> None:
    _, honest = make_sealed(tmp_path / "honest", source=make_source(tmp_path / "source"))
    planted = tmp_path / "sealed" / identity()
    planted.mkdir(parents=True)
    lying = dataclasses.replace(honest, counts={**COUNTS, "fx_hit": 9})
    (planted / manifest.NAME).write_bytes(lying.to_bytes())
    place, _ = make_sealed(tmp_path, source=tmp_path / "source")
    assert place != planted


def test_an_empty_directory_is_nothing_to_seal(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(Failure, match="no compiled graphs") as refusal:
        make_sealed(tmp_path, source=tmp_path / "source")
    assert refusal.value.code is Exit.CACHE
    assert not list(tmp_path.glob("sealed/*"))


def test_a_promised_key_without_an_entry_is_refused_by_name(tmp_path: Path) -> None:
    keys = {"aot_autograd": ["aaaa"], "fx": ["fabc", "fgone"], "triton": []}
    with pytest.raises(Failure, match="not complete") as refusal:
        make_sealed(tmp_path, keys=keys)
    assert refusal.value.details == ("fx fgone",)


@pytest.mark.parametrize("where", ["q1/link.py", "fxgraph/ab/link"])
def test_a_link_in_the_source_is_refused(tmp_path: Path, where: str) -> None:
    source = make_source(tmp_path / "source")
    (source / where).symlink_to("/etc")
    with pytest.raises(Failure, match="symbolic link"):
        make_sealed(tmp_path, source=source)


def test_a_source_file_with_a_name_that_no_cache_has_is_refused(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    (source / "q1" / "a b;c.py").write_text("x")
    with pytest.raises(Failure, match="characters that no cache's file has"):
        make_sealed(tmp_path, source=source)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, small_disk: Path) -> None:
    source = make_source(tmp_path / "source", big=3_000_000)
    with pytest.raises(Failure, match="is full") as refusal:
        seal.seal(
            source, small_disk / "sealed", graph_id="g", gpu_id="c", gpu=GPU, factors=FACTORS, counts=COUNTS,
            trust=tmp_path / "trust",
        )  # fmt: skip
    assert refusal.value.code is Exit.STORAGE
    assert not list((small_disk / "sealed").iterdir())


SEALING = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
from caches import make_sealed
print("begun", flush=True)
make_sealed(Path(sys.argv[1]), source=Path(sys.argv[2]))
"""


def test_a_killed_sealing_leaves_no_cache_that_looks_whole(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", big=150_000_000)
    program = SEALING.format(root=str(ROOT), tests=str(Path(__file__).parent))
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), str(source)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while not list(tmp_path.glob("sealed/.*/cache/fxgraph")):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "sealed" / identity()).exists()
    place, sealed = make_sealed(tmp_path, source=source)
    assert examine.examine(place, believed(tmp_path))[0] == sealed


def test_two_who_seal_the_same_at_once_end_with_one_whole_cache(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    program = SEALING.format(root=str(ROOT), tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", program, str(tmp_path), str(source)]
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert [path.name for path in (tmp_path / "sealed").iterdir()] == [identity()]
    examine.examine(tmp_path / "sealed" / identity(), believed(tmp_path))


def test_details_are_kept_once_a_line_and_come_back(tmp_path: Path) -> None:
    details = {"aaaa": ["[1] x: 1", "[2] y: 2"], "fabc": ["[1] x: 1"]}
    place, sealed = make_sealed(tmp_path, details=details)
    assert examine.read_details(place, sealed) == {key: tuple(lines) for key, lines in details.items()}
    assert (place / manifest.DETAILS).read_text().count("[1] x: 1") == 1


def test_changed_details_are_refused(tmp_path: Path) -> None:
    place, sealed = make_sealed(tmp_path, details={"fabc": ["[1] x: 1"]})
    (opened(place) / manifest.DETAILS).write_text("{}")
    with pytest.raises(Failure, match=r"details\.json is not what the manifest says"):
        examine.read_details(place, sealed)


def test_an_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    failure = seal.unwritable(tmp_path, OSError(errno.EROFS, os.strerror(errno.EROFS)))
    assert failure.code is Exit.STORAGE
    assert "Read-only file system" in failure.message


def test_what_is_written_can_always_be_read(tmp_path: Path) -> None:
    bad: dict[str, Any] = {**FACTORS, "x": float("nan")}
    with pytest.raises((Failure, ValueError)):
        make_sealed(tmp_path, factors=bad)
    assert not list(tmp_path.glob("sealed/*"))
