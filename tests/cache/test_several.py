"""A process with several devices has one cache directory that holds every device's sealed cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from caches import COUNTS, FACTORS, GPU, make_sealed, make_source

from env.cache import seed, several, store, verify
from env.cache.manifest import Manifest
from env.errors import Exit, Failure


def wanted(index: int) -> store.Identity:
    return store.Identity(factors={**FACTORS, "device.index": index}, graph_id="graphs", gpu_id="card", gpu=GPU)


def sealed(folder: Path, index: int, more: Mapping[str, bytes] | None = None) -> tuple[Path, Manifest]:
    """A cache for one device: graphs of its own, and the kernels that all devices share."""
    source = make_source(folder / f"source{index}")
    for name in ("fxgraph/ab/fabc", "fxgraph/cd/fcde", "aotautograd/aaaa"):
        (source / name).rename(source / f"{name}{index}")
    (source / "xy/cxyz.py").write_bytes(f"# for device {index}\n".encode())
    (source / "xy/cxyz.py").rename(source / f"xy/cxyz{index}.py")
    for name, data in (more or {}).items():
        (source / "q1" / name).write_bytes(data)
    return make_sealed(folder, source=source, factors={**FACTORS, "device.index": index})


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"DFLASH_CACHE_HOME": str(tmp_path)}


def test_every_devices_cache_lies_in_one_directory_and_shared_kernels_stand_there_once(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    made = [sealed(tmp_path, index) for index in (5, 6, 7)]
    choices = several.choose([wanted(index) for index in (5, 6, 7)], environ=environ)
    assert [choice.manifest for choice in choices] == [manifest for _, manifest in made]
    assert [choice.sealed for choice in choices] == [place for place, _ in made]
    assert {choice.kind for choice in choices} == {"seeded"}
    (path,) = {choice.path for choice in choices}
    assert all(not seed.damaged(path, manifest) for _, manifest in made)
    assert len(list((path / "fxgraph").glob("*/*"))) == 6
    assert len(list(path.glob("*/cq1.py"))) == 1
    assert choices[0].environ == choices[2].environ == {"TORCHINDUCTOR_CACHE_DIR": str(path), "TRITON_HOME": str(path)}
    assert ["for cuda:5" in choice.notices[0] for choice in choices] == [True, False, False]


def test_the_directory_is_found_again_and_mended_where_it_lacks_something(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    made = [sealed(tmp_path, index) for index in (0, 1)]
    path = several.choose([wanted(0), wanted(1)], environ=environ)[0].path
    (path / "xy/cxyz1.py").unlink()
    (path / "xy/of a run.py").write_text("mine")
    assert several.choose([wanted(0), wanted(1)], environ=environ)[1].path == path
    assert not seed.damaged(path, made[1][1])
    assert (path / "xy/of a run.py").read_text() == "mine"
    alone = store.choose(wanted(0), environ=environ).path
    assert alone != path, "a process with one device has a directory of its own"
    kinds = [(cache.kind, cache.problem) for cache in store.stored(tmp_path)]
    assert sorted(kinds) == [("sealed", None), ("sealed", None), ("seeded", None), ("seeded", None)]


def test_a_device_without_a_baked_cache_compiles_into_the_same_directory_and_is_named(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    sealed(tmp_path, 5)
    one, other = several.choose([wanted(5), wanted(6)], environ=environ)
    assert (one.kind, other.kind) == ("seeded", "cold")
    assert one.path == other.path
    assert other.notices[0].startswith("cuda:6: no baked cache fits")
    assert "device.index: sealed `5`, here `6`" in other.notices[1]


def test_without_any_baked_cache_they_share_one_directory_to_fill(environ: dict[str, str]) -> None:
    choices = several.choose([wanted(0), wanted(1)], environ=environ)
    assert {choice.kind for choice in choices} == {"cold"}
    assert len({choice.path for choice in choices}) == 1


def test_one_identity_wanted_twice_is_chosen_for_as_once(tmp_path: Path, environ: dict[str, str]) -> None:
    sealed(tmp_path, 0)
    choices = several.choose([wanted(0), wanted(0)], environ=environ)
    assert choices[0] is choices[1]
    assert choices[0].path == store.choose(wanted(0), environ=environ).path


def test_a_directory_that_the_user_set_is_taken_for_all(environ: dict[str, str]) -> None:
    choices = several.choose([wanted(0), wanted(1)], environ={**environ, "TORCHINDUCTOR_CACHE_DIR": "/scratch/mine"})
    assert {(choice.kind, str(choice.path)) for choice in choices} == {("given", "/scratch/mine")}


def test_winners_of_a_shared_kernel_may_differ_and_nothing_else_may(tmp_path: Path, environ: dict[str, str]) -> None:
    sealed(tmp_path, 0, {"abc.best_config": b'{"XBLOCK": 64}'})
    sealed(tmp_path, 1, {"abc.best_config": b'{"XBLOCK": 128}'})
    path = several.choose([wanted(0), wanted(1)], environ=environ)[0].path
    assert (path / "q1/abc.best_config").read_bytes() == b'{"XBLOCK": 64}'
    sealed(tmp_path, 2, {"cq1.py": b"def another(): pass\n"})
    with pytest.raises(Failure, match=r"cq1\.py is not .*cq1\.py, so these caches cannot share a directory") as caught:
        several.choose([wanted(0), wanted(2)], environ=environ)
    assert caught.value.code is Exit.CACHE


def test_a_cache_that_was_changed_is_refused_also_among_several(tmp_path: Path, environ: dict[str, str]) -> None:
    sealed(tmp_path, 0)
    place, _ = sealed(tmp_path, 1)
    kernel = place / "cache/xy/cxyz1.py"
    kernel.chmod(0o644)
    kernel.write_bytes(b"import os\n")
    with pytest.raises(Failure, match=r"cxyz1\.py was changed"):
        several.choose([wanted(0), wanted(1)], environ=environ)


def test_what_several_devices_promise_is_added_up(tmp_path: Path) -> None:
    manifests = [sealed(tmp_path, index)[1] for index in (0, 1)]
    promised = several.together([*manifests, manifests[0]])  # the same one twice promises nothing more
    assert promised.counts == {name: 2 * count for name, count in COUNTS.items()}
    assert set(promised.keys["fx"]) == {"fabc0", "fabc1", "fcde0", "fcde1"}
    keys = {"fx_hit": list(promised.keys["fx"]), "autograd_hit": list(promised.keys["aot_autograd"])}
    record: dict[str, Any] = {"counts": {**promised.counts}, "keys": keys}
    assert verify.judge(promised, record).problems == ()
    assert verify.judge(manifests[0], record).problems != ()


def test_devices_are_named_as_torch_names_them() -> None:
    assert several.device(wanted(6)) == "cuda:6"
    on_cpu = replace(wanted(0), factors={"device.type": "cpu"})
    assert several.device(on_cpu) == "cpu"
