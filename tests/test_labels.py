from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from env import identity, labels, variants
from env.errors import Exit, Failure

CU130 = variants.load().variants["cu130"]
GOOD = labels.Labels(
    env_id=identity.env_id(CU130.lock, variant="cu130", python="3.11"),
    variant="cu130",
    python="3.11",
    driver=CU130.driver,
    caches={"cpu": ("b" * 64,), "h200": ("1" * 64, "a" * 64)},
    revision="c" * 40,
    base="sha256:" + "d" * 64,
)


def test_labels_come_back_as_they_were_written() -> None:
    assert labels.read(GOOD.as_dict(), "image") == GOOD
    assert GOOD.gpus == ("h200",)
    assert GOOD.driver_floor == (580,)
    turned = dataclasses.replace(GOOD, caches=dict(sorted(GOOD.caches.items(), reverse=True)))
    assert turned.as_dict() == GOOD.as_dict()


def test_an_image_without_caches_says_so_with_an_empty_label() -> None:
    bare = dataclasses.replace(GOOD, caches={})
    assert bare.as_dict()[labels.CACHES] == ""
    assert labels.read(bare.as_dict(), "image").caches == {}


@pytest.mark.parametrize("name", list(GOOD.as_dict()))
def test_a_missing_label_is_named(name: str) -> None:
    lacking = {key: value for key, value in GOOD.as_dict().items() if key != name}
    with pytest.raises(Failure, match=f"alpine is no image of this project: it has no label {name}") as caught:
        labels.read(lacking, "alpine")
    assert caught.value.code == Exit.INPUT


@pytest.mark.parametrize("name", list(GOOD.as_dict()))
def test_a_misshapen_label_is_named_with_what_it_reads(name: str) -> None:
    with pytest.raises(Failure, match=f"the label {name} reads `.*\\$\\(x\\)=?`, which is not ") as caught:
        labels.read({**GOOD.as_dict(), name: "$(x)"}, "image")
    assert caught.value.code == Exit.INPUT


def test_this_checkout_s_own_image_passes() -> None:
    labels.require_locked(GOOD, "image")


def test_an_image_of_another_lock_is_refused_with_both_identities(tmp_path: Path) -> None:
    text = CU130.lock.read_text()
    assert "numpy==2.4.6" in text
    (tmp_path / "cu130.txt").write_text(text.replace("numpy==2.4.6", "numpy==2.4.5"))
    with pytest.raises(Failure, match=r"image was built from another lock than this checkout's \(cu130") as caught:
        labels.require_locked(GOOD, "image", tmp_path)
    assert caught.value.code == Exit.DRIFT
    assert [line.split()[-1] for line in caught.value.details] == [
        identity.env_id(tmp_path / "cu130.txt", variant="cu130", python="3.11"),
        GOOD.env_id,
        GOOD.revision,
    ]
    assert f"`git checkout {GOOD.revision}`" in str(caught.value.hint)


def test_an_image_of_an_unknown_variant_or_with_another_driver_floor_is_refused() -> None:
    with pytest.raises(Failure, match="image is of variant `cu999`, and this checkout has cu128, cu130, cu132"):
        labels.require_locked(dataclasses.replace(GOOD, variant="cu999"), "image")
    with pytest.raises(Failure, match=r"image asks for driver 1, and env/variants\.toml says 580 for cu130"):
        labels.require_locked(dataclasses.replace(GOOD, driver="1"), "image")
