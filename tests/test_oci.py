from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from env import base, oci, sizes
from env.errors import Exit, Failure
from env.parts import PARTS

CONFIG = {
    "architecture": "amd64",
    "os": "linux",
    "config": {"Labels": {"dflash.variant": "cu130"}},
    "history": [{"created_by": "RUN |1 VARIANT=cu130 /bin/sh -c PART=torch /media/install"}],
}


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    layer = tmp_path / "layer"
    layer.write_bytes(b"packed")
    oci.write(tmp_path / "image", [(layer, f"sha256:{'0' * 64}")], CONFIG, "test:1")
    return tmp_path / "image"


def test_what_was_written_is_read_from_the_folder_and_from_an_archive_of_it(layout: Path, tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    subprocess.run(["tar", "-C", layout, "-cf", archive, *(path.name for path in layout.iterdir())], check=True)
    for place in (layout, archive):
        image = oci.Layout(place).image()
        assert image.labels == {"dflash.variant": "cu130"}
        assert [layer["size"] for layer in image.layers] == [6]
        manifest = (layout / "blobs" / "sha256" / image.digest.partition(":")[2]).read_bytes()
        assert image.digest == f"sha256:{hashlib.sha256(manifest).hexdigest()}"


def test_the_same_image_is_the_same_bytes(layout: Path, tmp_path: Path) -> None:
    layer = tmp_path / "again"
    layer.write_bytes(b"packed")
    digest = oci.write(tmp_path / "other", [(layer, f"sha256:{'0' * 64}")], CONFIG, "test:1")
    assert digest == oci.Layout(layout).image().digest
    assert (layout / "index.json").read_bytes() == (tmp_path / "other" / "index.json").read_bytes()


def test_an_altered_blob_is_refused_with_both_digests(layout: Path) -> None:
    index = json.loads((layout / "index.json").read_bytes())
    digest = index["manifests"][0]["digest"]
    blob = layout / "blobs" / "sha256" / digest.partition(":")[2]
    blob.write_bytes(blob.read_bytes() + b" ")
    with pytest.raises(Failure, match="was altered") as refused:
        oci.Layout(layout).image()
    assert refused.value.code == Exit.INPUT
    assert digest in refused.value.details[0]


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no tar")
    for place in (tmp_path, tmp_path / "file", tmp_path / "nowhere"):
        with pytest.raises(Failure, match=f"{place} is no OCI image"):
            oci.Layout(place).image()


def described(folder: Path, *blobs: str) -> Path:
    """A layout whose index leads to the first of the blobs, each by its digest."""
    (folder / "blobs" / "sha256").mkdir(parents=True)
    for blob in blobs:
        (folder / "blobs" / "sha256" / hashlib.sha256(blob.encode()).hexdigest()).write_text(blob)
    entry = {"mediaType": oci.MANIFEST, "digest": f"sha256:{hashlib.sha256(blobs[0].encode()).hexdigest()}"}
    (folder / "index.json").write_text(json.dumps({"manifests": [entry]}))
    return folder


def manifest_of(config: str, **more: object) -> str:
    """The manifest of an image with this configuration."""
    digest = f"sha256:{hashlib.sha256(config.encode()).hexdigest()}"
    return json.dumps({"config": {"digest": digest}, "layers": [], **more})


@pytest.mark.parametrize(
    "blobs",
    [
        ("[]",),
        ("no JSON",),
        ("[" * 100_000,),
        ("{}",),
        ('{"config": {}, "layers": []}',),
        (manifest_of("{}", layers=7), "{}"),
        (manifest_of("{}", layers=[{"digest": "sha256:0"}]), "{}"),
        (manifest_of("[]"), "[]"),
        (manifest_of("no JSON"), "no JSON"),
        (manifest_of(text := '{"config": {"Labels": ["one"]}}'), text),
        (manifest_of(text := '{"config": {"Labels": {"dflash.variant": 7}}}'), text),
        (manifest_of(text := '{"history": 7}'), text),
    ],
    ids=range(12),
)
def test_bytes_that_are_what_their_digest_says_and_describe_no_image_are_refused(
    tmp_path: Path, blobs: tuple[str, ...]
) -> None:
    with pytest.raises(Failure, match=f"{tmp_path} is no OCI image") as refused:
        oci.Layout(described(tmp_path, *blobs)).image()
    assert refused.value.code == Exit.INPUT


@pytest.mark.parametrize("index", ["no JSON", "[]", '{"manifests": 7}', '{"manifests": [{}]}', '{"manifests": ["x"]}'])
def test_an_index_of_another_shape_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "index.json").write_text(index)
    with pytest.raises(Failure, match=f"{tmp_path} is no OCI image"):
        oci.Layout(tmp_path).image()


def test_an_image_for_another_machine_is_not_taken_for_ours(layout: Path) -> None:
    with pytest.raises(Failure, match="holds no image for arm64"):
        oci.Layout(layout).image("arm64")


def test_layers_are_called_by_what_is_in_them(layout: Path) -> None:
    assert sizes.read(f"oci:{layout}") == [("wheels: torch", 6)]
    for part in PARTS:
        step = f"RUN |1 VARIANT=cu130 /bin/sh -c PART={part} /media/install …"
        assert sizes.title(step) == f"wheels: {part}"


def test_a_picture_of_the_layers_can_be_drawn(layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from env import environment

    monkeypatch.setattr(environment, "ensure", lambda _variant: Path(sys.executable))
    sizes.picture(f"oci:{layout}", tmp_path / "sizes.png")
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")


def test_the_list_of_packages_decides_the_base_s_label() -> None:
    one, other = base.config(b"a 1 all 00\n"), base.config(b"a 2 all 00\n")
    assert one["config"]["Labels"] != other["config"]["Labels"]
    assert base.config(b"a 1 all 00\n") == one
