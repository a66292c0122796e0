"""The look at a sealed cache: each kind of harm is refused by name, and nothing is unpickled before or meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from caches import COUNTS, FACTORS, GPU, believed, make_sealed, make_source, opened

from env.cache import examine, seal, seed
from env.errors import Exit, Failure


def flip_a_bit(place: Path) -> str:
    path = place / "cache/q1/cq1.py"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    return r"q1/cq1\.py was changed: (its sha256|its bytes)"


def append(place: Path) -> str:
    with (place / "cache/q1/cq1.py").open("a") as file:
        file.write("#")
    return r"q1/cq1\.py was changed"


def truncate(place: Path) -> str:
    os.truncate(place / "cache/q1/cq1.py", 3)
    return r"q1/cq1\.py was (truncated: it has 3 bytes|changed)"


def remove(place: Path) -> str:
    (place / "cache/q1/cq1.py").unlink()
    return r"q1/cq1\.py is missing"


def to_link(place: Path) -> str:
    path = place / "cache/q1/cq1.py"
    path.rename(place.parent / "moved")
    path.symlink_to(place.parent / "moved")
    return r"q1/cq1\.py is a symbolic link"


def to_hard_link(place: Path) -> str:
    os.link(place / "cache/q1/cq1.py", place.parent / "second name")
    return r"q1/cq1\.py is a hard link: it has 2 names"


def to_pipe(place: Path) -> str:
    (place / "cache/q1/cq1.py").unlink()
    os.mkfifo(place / "cache/q1/cq1.py")
    return r"q1/cq1\.py is a pipe"


def to_device(place: Path) -> str:
    (place / "cache/q1/cq1.py").unlink()
    os.mknod(place / "cache/q1/cq1.py", 0o20644, os.makedev(1, 5))  # /dev/zero: reading it would never end
    return r"q1/cq1\.py is a device"


def to_folder(place: Path) -> str:
    (place / "cache/q1/cq1.py").unlink()
    (place / "cache/q1/cq1.py").mkdir()
    return r"q1/cq1\.py is (missing|a folder)"


HARMS = [flip_a_bit, append, truncate, remove, to_link, to_hard_link, to_pipe, to_device, to_folder]
ONLY_SEEN_BY_LOOKING = {
    "an added file": "cache/q1/added.py",
    "an added entry": "cache/fxgraph/ab/fabc/" + "w" * 51,
    "a file beside": "run-me.sh",
    "a hidden file": "cache/.hidden",
}


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_a_harmed_file_is_refused_by_name_when_looked_at_and_when_copied(
    tmp_path: Path, harm: Callable[[Path], str]
) -> None:
    source = make_source(tmp_path / "source", trap=tmp_path / "sprung")
    place = opened(make_sealed(tmp_path, source=source)[0])
    try:
        sentence = harm(place)
    except PermissionError:
        pytest.skip("device files cannot be made here")
    with pytest.raises(Failure, match=sentence) as refusal:
        examine.examine(place, believed(tmp_path))
    assert refusal.value.code is Exit.CACHE
    assert refusal.value.hint
    with pytest.raises(Failure, match=sentence):
        seed.seed(place, tmp_path / "home", believed(tmp_path))
    assert not list((tmp_path / "home/seeded").glob("[!.]*/*")), "nothing half copied looks like a cache"
    assert not (tmp_path / "sprung").exists(), "nothing was unpickled"


@pytest.mark.parametrize("name", ONLY_SEEN_BY_LOOKING)
def test_what_was_added_is_refused_by_name_and_never_copied(tmp_path: Path, name: str) -> None:
    place = opened(make_sealed(tmp_path)[0])
    added = place / ONLY_SEEN_BY_LOOKING[name]
    added.write_text("import os")
    with pytest.raises(Failure, match=rf"{added.name} is not in the manifest: it was added"):
        examine.examine(place, believed(tmp_path))
    copy, _, _ = seed.seed(place, tmp_path / "home", believed(tmp_path))
    assert not list(copy.rglob(added.name))


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    place = opened(make_sealed(tmp_path)[0])
    (place / "cache/q1").rename(tmp_path / "q1")
    (place / "cache/q1").symlink_to(tmp_path / "q1")
    with pytest.raises(Failure, match="q1 is a symbolic link"):
        examine.examine(place, believed(tmp_path))


def test_a_whole_cache_passes_and_says_who_vouches_for_it(tmp_path: Path) -> None:
    place, sealed = make_sealed(tmp_path)
    assert examine.examine(place, believed(tmp_path)) == (sealed, "sealed here")


def test_the_manifest_is_believed_before_any_file_is_read(tmp_path: Path) -> None:
    place = opened(make_sealed(tmp_path)[0])
    flip_a_bit(place)
    (tmp_path / "trust/known").unlink()
    with pytest.raises(Failure, match="is not signed by anyone who is trusted"):
        examine.examine(place, believed(tmp_path))


def test_a_manifest_made_to_fit_a_changed_file_is_not_believed(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    make_sealed(tmp_path, source=source)
    (source / "q1/cq1.py").write_text("import os; os.system('id')\n")
    planted, _ = seal.seal(
        source, tmp_path / "planted", graph_id="graphs", gpu_id="card", gpu=GPU, factors=FACTORS, counts=COUNTS,
        trust=tmp_path / "trust of another user",
    )  # fmt: skip
    with pytest.raises(Failure, match="is not signed by anyone who is trusted"):
        examine.examine(planted, believed(tmp_path))
    with pytest.raises(Failure, match="is not signed by anyone who is trusted"):
        seed.seed(planted, tmp_path / "home", believed(tmp_path))


def test_an_unreadable_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"manifest\.json is missing"):
        examine.examine(tmp_path / "nowhere", believed(tmp_path))
