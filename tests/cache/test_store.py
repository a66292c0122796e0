"""Which cache a process uses, what is listed and why it does not fit, and that only a prune ever frees one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from caches import FACTORS, GPU, identity, make_sealed, make_source, opened

from env.cache import seed, store
from env.cache.canonical import Json
from env.errors import Exit, Failure
from env.variants import ROOT

WANTED = store.Identity(factors=FACTORS, graph_id="graphs", gpu_id="card", gpu=GPU)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"DFLASH_CACHE_HOME": str(tmp_path)}


def used(name: str, value: Json) -> store.Identity:
    """What is wanted, with one factor of another value."""
    return replace(WANTED, factors={**FACTORS, name: value})


def test_the_sealed_cache_that_fits_is_copied_and_used(tmp_path: Path, environ: dict[str, str]) -> None:
    sealed, made = make_sealed(tmp_path)
    choice = store.choose(WANTED, environ=environ)
    assert (choice.kind, choice.path, choice.sealed) == ("seeded", tmp_path / "seeded" / identity(), sealed)
    assert choice.manifest == made
    assert choice.environ == {"TORCHINDUCTOR_CACHE_DIR": str(choice.path), "TRITON_HOME": str(choice.path)}
    assert choice.notices == (f"compile cache {identity()[:16]}, sealed here",)


def test_without_one_that_fits_a_directory_is_made_and_the_nearest_is_explained(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    make_sealed(tmp_path)
    wanted = used("inductor.cpp.cxx", [None, "/usr/bin/g++"])
    choice = store.choose(wanted, environ={**environ, "CXX": "/usr/bin/g++"})
    assert (choice.kind, choice.path) == ("cold", tmp_path / "cold" / wanted.cache_id)
    assert choice.path.is_dir()
    assert choice.notices[0].startswith("no baked cache fits, so this run compiles for itself; nearest is")
    assert "inductor.cpp.cxx: sealed `g++`, here `/usr/bin/g++`" in choice.notices[1]
    assert len(choice.notices) == 2


def test_with_no_baked_cache_at_all_it_is_said_how_to_make_one(environ: dict[str, str]) -> None:
    choice = store.choose(WANTED, environ=environ)
    assert choice.notices == (store.NONE_BAKED,)
    assert "`nox -s bake -- --config NAME [--gpu CARD]` makes one" in choice.notices[0]


def test_what_an_earlier_run_compiled_is_not_said_to_be_compiled_again(environ: dict[str, str]) -> None:
    (store.choose(WANTED, environ=environ).path / "fxgraph").mkdir()
    assert store.choose(WANTED, environ=environ).notices == (store.EARLIER,)


def test_each_identity_has_a_directory_of_its_own_and_none_is_deleted(tmp_path: Path, environ: dict[str, str]) -> None:
    wanted = [used("device.index", index) for index in range(3)]
    paths = [store.choose(one, environ=environ).path for one in wanted]
    for path in paths:
        (path / "filled").touch()
    assert len(set(paths)) == 3
    assert [store.choose(one, environ=environ).path for one in wanted] == paths
    assert all((path / "filled").exists() for path in paths)


def test_a_directory_that_the_user_set_is_taken_as_it_is(environ: dict[str, str]) -> None:
    choice = store.choose(WANTED, environ={**environ, "TORCHINDUCTOR_CACHE_DIR": "/scratch/mine"})
    assert (choice.kind, choice.path, choice.environ) == ("given", Path("/scratch/mine"), {})
    assert "as TORCHINDUCTOR_CACHE_DIR says" in choice.notices[0]


def test_the_cache_that_fits_but_was_changed_is_refused_and_not_passed_over(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    sealed, _ = make_sealed(tmp_path)
    (opened(sealed) / "cache/q1/cq1.py").write_text("import os\n")
    with pytest.raises(Failure, match=r"cq1\.py was changed"):
        store.choose(WANTED, environ=environ)


def test_an_unsigned_one_from_elsewhere_needs_a_policy(tmp_path: Path, environ: dict[str, str]) -> None:
    make_sealed(tmp_path / "image")
    environ["DFLASH_SEALED"] = str(tmp_path / "image/sealed")
    with pytest.raises(Failure, match="not signed by anyone who is trusted"):
        store.choose(WANTED, environ=environ)
    assert store.choose(WANTED, environ=environ, policy="unsigned").kind == "seeded"
    environ["DFLASH_CACHE_TRUST"] = str(tmp_path / "image/trust")
    assert store.choose(WANTED, environ=environ).kind == "seeded"


def test_of_two_that_fit_the_one_with_winners_is_used(tmp_path: Path, environ: dict[str, str]) -> None:
    _, parent = make_sealed(tmp_path)
    harvested = make_source(tmp_path / "harvested")
    (harvested / "q1/more.best_config").write_text("{}")
    better, _ = make_sealed(tmp_path, source=harvested, parent=parent.digest)
    newer = make_source(tmp_path / "newer")
    (newer / "q1/other.py").write_text("x = 1\n")
    make_sealed(tmp_path, source=newer)
    assert store.choose(WANTED, environ=environ).sealed == better


def test_the_list_shows_every_kind_with_size_age_and_problem(tmp_path: Path, environ: dict[str, str]) -> None:
    sealed, made = make_sealed(tmp_path)
    store.choose(WANTED, environ=environ)
    store.choose(used("device.index", 6), environ=environ)
    broken = tmp_path / "sealed" / ("b" * 64)
    broken.mkdir()
    (broken / "manifest.json").write_text("{")
    caches = store.stored(tmp_path, environ)
    kinds = {cache.kind: cache for cache in caches if cache.path != broken}
    assert set(kinds) == {"sealed", "seeded", "cold"}
    assert kinds["sealed"].digest == kinds["seeded"].digest == made.digest
    assert kinds["sealed"].size > made.size
    assert kinds["cold"].identity is not None
    assert kinds["cold"].identity["device.index"] == 6
    (bad,) = [cache for cache in caches if cache.path == broken]
    assert "is not a manifest" in str(bad.problem)
    assert sealed.exists()


def test_what_is_being_built_is_not_listed(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "sealed/.half").mkdir(parents=True)
    (tmp_path / "seeded").mkdir()
    (tmp_path / "seeded/x.lock").touch()
    assert store.stored(tmp_path, environ) == []


def test_the_nearest_cache_is_one_for_the_same_graphs(tmp_path: Path, environ: dict[str, str]) -> None:
    make_sealed(tmp_path, graph_id="other graphs")
    far, _ = make_sealed(tmp_path, factors={**FACTORS, "device.index": 5, "python.minor": "3.12"})
    found = store.nearest(WANTED, [cache for cache in store.stored(tmp_path, environ) if cache.kind == "sealed"])
    assert found is not None
    assert found[0].path == far
    assert [difference.name for difference in found[1]] == ["device.index", "python.minor"]


def test_a_prune_takes_the_longest_unused_of_each_kind_and_never_those_of_an_image(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    make_sealed(tmp_path / "image", graph_id="image")
    environ["DFLASH_SEALED"] = str(tmp_path / "image/sealed")
    for index in range(3):
        path = store.choose(used("device.index", index), environ=environ).path
        os.utime(path.with_name(f"{path.name}.used"), (0, time.time() - index * 86400))
    caches = store.stored(tmp_path, environ)
    going = store.doomed(caches, home=tmp_path, keep=1)
    assert [cache.identity["device.index"] for cache in going if cache.identity] == [1, 2]
    older = store.doomed(caches, home=tmp_path, older_than=1.5 * 86400)
    assert [cache.identity["device.index"] for cache in older if cache.identity] == [2]
    assert len(store.doomed(caches, home=tmp_path)) == 3


USING = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from test_store import WANTED
from env.cache import store
choice = store.choose(WANTED, environ={{"DFLASH_CACHE_HOME": sys.argv[1]}})
print(choice.path, flush=True)
sys.stdin.read()
"""


def test_a_cache_that_a_process_is_using_is_not_freed(tmp_path: Path, environ: dict[str, str]) -> None:
    make_sealed(tmp_path)
    program = USING.format(root=str(ROOT), tests=str(Path(__file__).parent))
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        (seeded,) = [cache for cache in store.stored(tmp_path, environ) if cache.kind == "seeded"]
        assert seeded.path == path
        assert store.free(seeded) == "a process is using it"
        assert path.is_dir()
        process.communicate()
    assert store.free(seeded) is None
    assert not path.exists()


def test_a_freed_sealed_cache_is_gone_although_it_was_read_only(tmp_path: Path, environ: dict[str, str]) -> None:
    sealed, _ = make_sealed(tmp_path)
    (cache,) = store.stored(tmp_path, environ)
    assert store.free(cache) is None
    assert not sealed.exists()
    assert not list((tmp_path / "sealed").glob(".*"))


def test_a_copy_freed_while_in_doubt_is_made_again(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sealed(tmp_path)
    real: Callable[..., object] = seed.seed
    calls = []

    def once(*arguments: object) -> object:
        result = real(*arguments)
        calls.append(result)
        if len(calls) == 1:
            for cache in store.stored(tmp_path, environ):
                if cache.kind == "seeded":
                    store.free(cache)
        return result

    monkeypatch.setattr(store, "seed", once)
    assert store.choose(WANTED, environ=environ).path.is_dir()
    assert len(calls) == 2


def test_an_identity_survives_being_written_and_read() -> None:
    assert store.read_identity(store.identity_bytes(WANTED)) == WANTED
    with pytest.raises(Failure, match="no identity") as refusal:
        store.read_identity(b'{"factors": 3}')
    assert refusal.value.code is Exit.USAGE
