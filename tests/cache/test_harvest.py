"""What a device has found out is sealed with the rest: a new cache that names its parent and is preferred to it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from caches import FACTORS, GPU, identity, make_sealed, opened

from env.cache import examine, harvest, sign, store
from env.errors import Exit, Failure

WANTED = store.Identity(factors=FACTORS, graph_id="graphs", gpu_id="card", gpu=GPU)
WINNER = b'{"XBLOCK": 128, "num_warps": 8, "time_taken_ms": 9}'


def chosen(home: Path, policy: str | None = None) -> store.Choice:
    return store.choose(WANTED, environ={"DFLASH_CACHE_HOME": str(home)}, policy=policy)


def benchmarked(choice: store.Choice) -> None:
    """Leave what a first step on a card leaves: a winner, kernels in Triton's own folder, and notes."""
    (choice.path / "q1/new.best_config").write_bytes(WINNER)
    (choice.path / "triton/0/ABC").mkdir(parents=True)
    (choice.path / "triton/0/ABC/kernel.cubin").write_bytes(b"\x7fELF")
    (choice.path / "q1/more.py").write_text("x = 1\n")


def test_winners_are_sealed_with_what_the_directory_was_made_from_and_the_new_cache_is_preferred(
    tmp_path: Path,
) -> None:
    sealed, parent = make_sealed(tmp_path, details={"fabc": ["[aa] gm: x"]})
    choice = chosen(tmp_path)
    benchmarked(choice)
    made = harvest.harvest(choice, tmp_path)
    assert made is not None
    place, manifest = made
    assert place == tmp_path / "sealed" / f"{identity()}.{manifest.digest[:12]}"
    assert manifest.parent == parent.digest
    assert manifest.digest != parent.digest
    assert (manifest.cache_id, manifest.keys, manifest.counts) == (parent.cache_id, parent.keys, parent.counts)
    assert set(manifest.files) == {*parent.files, "q1/new.best_config"}
    assert b'"time_taken_ms": 0' in (place / "cache/q1/new.best_config").read_bytes()
    assert examine.read_details(place, manifest) == {"fabc": ("[aa] gm: x",)}
    examine.examine(place, sign.trust([tmp_path / "trust"]))
    again = chosen(tmp_path)
    assert again.sealed == place
    assert again.path != choice.path
    assert (again.path / "q1/new.best_config").exists()
    assert sealed.exists(), "a launch never deletes a cache"
    assert not list(tmp_path.glob(".harvest*"))


def test_with_nothing_new_nothing_is_sealed(tmp_path: Path) -> None:
    make_sealed(tmp_path)
    choice = chosen(tmp_path)
    # torch writes the time of its search again; the winner is the one that is known
    (choice.path / "q1/abc.best_config").write_bytes(b'{"XBLOCK": 64, "time_taken_ms": 77, "num_warps": 4}')
    assert harvest.news(choice) == {}
    assert harvest.harvest(choice, tmp_path) is None
    assert len(list((tmp_path / "sealed").iterdir())) == 1


def test_a_second_harvest_names_the_first_as_its_parent(tmp_path: Path) -> None:
    make_sealed(tmp_path)
    benchmarked(chosen(tmp_path))
    first = harvest.harvest(chosen(tmp_path), tmp_path)
    assert first is not None
    again = chosen(tmp_path)
    assert again.sealed == first[0]
    assert harvest.harvest(again, tmp_path) is None
    (again.path / "q1/third.best_config").write_bytes(WINNER)
    second = harvest.harvest(again, tmp_path)
    assert second is not None
    assert second[1].parent == first[1].digest
    assert chosen(tmp_path).sealed == second[0]


def test_a_parent_that_was_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    sealed, _ = make_sealed(tmp_path)
    choice = chosen(tmp_path)
    benchmarked(choice)
    (opened(sealed) / "cache/q1/cq1.py").write_text("import os; pass;  \n")
    with pytest.raises(Failure, match=r"cq1\.py was changed"):
        harvest.harvest(choice, tmp_path)


def test_a_directory_that_a_run_filled_itself_has_no_parent(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="was not made from a sealed cache"):
        harvest.harvest(chosen(tmp_path), tmp_path)


def test_where_only_signed_caches_are_used_a_trusted_key_is_needed_first(tmp_path: Path) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    for key in (ours, others):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", key.name, "-f", str(key)], check=True)
    make_sealed(tmp_path, key=ours)
    public = ours.with_suffix(".pub").read_text().split()
    (tmp_path / "trust/allowed_signers").write_text(f"us {public[0]} {public[1]}\n")
    (tmp_path / "trust/policy").write_text("signed\n")
    choice = chosen(tmp_path)
    benchmarked(choice)
    with pytest.raises(Failure, match="only signed caches are used here") as caught:
        harvest.harvest(choice, tmp_path)
    assert caught.value.code is Exit.USAGE
    with pytest.raises(Failure, match="is not that of a trusted signer"):
        harvest.harvest(choice, tmp_path, key=others)
    assert len(list((tmp_path / "sealed").iterdir())) == 1, "nothing that a launch would refuse was left there"
    made = harvest.harvest(choice, tmp_path, key=ours)
    assert made is not None
    again = chosen(tmp_path)
    assert again.sealed == made[0]
    assert "signed by us" in again.notices[0]
