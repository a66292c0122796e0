from __future__ import annotations

import base64
import json
import tarfile
from pathlib import Path

import pytest
from engine import Engine
from toys import LABELS, STATUS, Keys, build, closed, other, use

from env import bom, buildx, labels, output, push, remote, stored
from env.errors import Exit, Failure

pytestmark = pytest.mark.image


@pytest.fixture(autouse=True)
def shell(docker_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    use(docker_engine, monkeypatch)


def refused(*argv: str) -> Failure:
    with pytest.raises(Failure) as caught:
        push.main(argv)
    return caught.value


def tags(registry: str, repository: str) -> str:
    """What the registry has of a repository: nothing may be there after a refusal."""
    try:
        return remote.docker("buildx", "imagetools", "inspect", "--raw", f"{registry}/{repository}:1")
    except Failure as failure:
        return failure.details[0].rpartition(": ")[2]


def test_the_pushed_image_is_signed_and_carries_its_papers(signed: remote.Reference, keys: Keys) -> None:
    remote.cosign("verify", "--key", str(keys.public), "--insecure-ignore-tlog=true", str(signed))
    for kind, wanted in (("cyclonedx", bom.make(LABELS, STATUS)), ("slsaprovenance1", bom.provenance(LABELS))):
        options = ["--key", str(keys.public), "--insecure-ignore-tlog=true", "--type", kind]
        envelope = json.loads(remote.cosign("verify-attestation", *options, str(signed)))
        statement = json.loads(base64.b64decode(envelope["payload"]))
        assert statement["subject"][0]["digest"] == {"sha256": str(signed.digest).removeprefix("sha256:")}
        assert statement["predicate"] == json.loads(wanted)


def test_pushing_again_gives_the_same_digest_and_prints_it_last(
    docker_engine: Engine, signed: remote.Reference, keys: Keys, capfd: pytest.CaptureFixture[str]
) -> None:
    assert push.main([f"{signed.name}:1", "--key", str(keys.private)]) == 0
    assert capfd.readouterr().out == f"{signed}\n"
    options = ["--key", str(keys.public), "--insecure-ignore-tlog=true", "--type", "cyclonedx"]
    assert len(remote.cosign("verify-attestation", *options, str(signed)).splitlines()) == 1


def test_an_archive_of_the_image_is_pushed_under_the_digest_that_it_has(
    docker_engine: Engine, loopback_registry: str, signed: remote.Reference, keys: Keys, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    docker_engine.docker("save", "--output", tmp_path / "image.tar", f"{signed.name}:1")
    name = f"{loopback_registry}/archived:1"
    assert push.main([name, "--archive", str(tmp_path / "image.tar"), "--key", str(keys.private)]) == 0
    assert capfd.readouterr().out == f"{loopback_registry}/archived@{signed.digest}\n"


def test_an_archive_that_buildx_wrote_keeps_its_digest_and_its_layers(
    docker_engine: Engine, loopback_registry: str, keys: Keys, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    build(docker_engine, tmp_path / "x", "toy:1")
    archive = tmp_path / "image.tar"
    output = f"type=oci,dest={archive},compression=zstd,force-compression=true,oci-mediatypes=true"
    docker_engine.docker("buildx", "build", "--provenance=false", "--output", output, tmp_path / "x")
    with tarfile.open(archive) as held:
        index = held.extractfile("index.json")
        assert index is not None
        (written,) = json.load(index)["manifests"]
    name = f"{loopback_registry}/written:1"
    assert push.main([name, "--archive", str(archive), "--key", str(keys.private)]) == 0
    assert capfd.readouterr().out == f"{loopback_registry}/written@{written['digest']}\n"
    kinds = {layer["mediaType"] for layer in remote.manifest(remote.reference(name))["layers"]}
    assert kinds == {"application/vnd.oci.image.layer.v1.tar+zstd"}


def test_a_push_without_a_signature_must_be_asked_for_and_says_so(
    docker_engine: Engine, loopback_registry: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = build(docker_engine, tmp_path, f"{loopback_registry}/bare:1", other(revision="c" * 40 + "-dirty"))
    failure = refused(name)
    assert failure.code == Exit.USAGE
    assert failure.message == "one of `--key FILE` and `--unsigned` must say whether it is signed"
    assert tags(loopback_registry, "bare") == "not found"
    assert push.main([name, "--unsigned"]) == 0
    said = capfd.readouterr().err
    assert "is not signed (`--unsigned`)" in said
    assert "was built from a tree that was not clean" in said


@pytest.mark.parametrize(
    ("changes", "code", "sentence"),
    [
        ({"env_id": "0" * 64}, Exit.DRIFT, "was built from another lock than this checkout's (cu130, Python 3.11)"),
        ({"variant": "cu126"}, Exit.INPUT, "is of variant `cu126`, and this checkout has cu128, cu130, cu132"),
    ],
)
def test_an_image_of_another_lock_does_not_leave_this_checkout(
    docker_engine: Engine, loopback_registry: str, keys: Keys, tmp_path: Path, changes: dict[str, str], code: Exit,
    sentence: str,
) -> None:  # fmt: skip
    name = build(docker_engine, tmp_path, f"{loopback_registry}/foreign:1", other(**changes))
    failure = refused(name, "--key", str(keys.private))
    assert failure.code == code
    assert sentence in failure.message
    assert tags(loopback_registry, "foreign") == "not found"


def test_an_image_that_is_none_of_ours_is_not_pushed(
    docker_engine: Engine, loopback_registry: str, keys: Keys, tmp_path: Path
) -> None:
    name = build(docker_engine, tmp_path, f"{loopback_registry}/alien:1", {"maintainer": "somebody"})
    failure = refused(name, "--key", str(keys.private))
    assert failure.code == Exit.INPUT
    assert f"{name} is no image of this project: it has no label {labels.ENV_ID}" in failure.message
    assert tags(loopback_registry, "alien") == "not found"


def test_what_cannot_be_pushed_is_one_sentence(
    loopback_registry: str, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ["--key", str(keys.private)]
    name = f"{loopback_registry}/nothing:1"
    failure = refused(name, *key)
    assert (failure.code, failure.message) == (Exit.INPUT, f"the container engine here has no image {name}")
    assert f"`nox -s image -- --output load:{name}` puts it there" in str(failure.hint)
    assert refused(name, "--image", "", *key).message == "`` is no reference of an image"
    assert refused(f"{loopback_registry}/x@sha256:{'0' * 64}", *key).code == Exit.USAGE
    assert refused("Not A Reference", *key).code == Exit.USAGE
    assert refused("x:1", "--archive", str(tmp_path / "none.tar"), *key).message.startswith("there is no archive")
    assert "there is no such file" in refused("x:1", "--key", str(tmp_path / "none.key")).message
    (tmp_path / "no.key").write_text("not a key")
    assert refused("x:1", "--key", str(tmp_path / "no.key")).message.endswith("no.key cannot be opened")
    monkeypatch.setenv("COSIGN_PASSWORD", "wrong")
    failure = refused("x:1", *key)
    assert failure.code == Exit.USAGE
    assert "decryption failed" in failure.details[0]


def test_a_registry_that_is_down_is_one_sentence(docker_engine: Engine, keys: Keys, tmp_path: Path) -> None:
    name = build(docker_engine, tmp_path, "127.0.0.1:9/image:1")
    failure = refused(name, "--key", str(keys.private))
    assert failure.code == Exit.UNREACHABLE
    assert failure.message == "the registry does not answer"


def pushing(folder: Path, name: str) -> Failure:
    """What is said when the builder itself pushes, as for `nox -s image -- --output push:REF`."""
    option = output.read(f"push:{name}", "cu130").option
    with pytest.raises(Failure) as caught:
        buildx.run(
            ["docker", "buildx", "build", "--progress=plain", "--provenance=false", "--output", option, str(folder)]
        )
    return caught.value


def test_a_builder_that_cannot_push_says_so_in_one_sentence(docker_engine: Engine, tmp_path: Path) -> None:
    build(docker_engine, tmp_path, "toy:1")
    failure = pushing(tmp_path, "127.0.0.1:9/x:1")
    assert (failure.code, failure.message) == (Exit.UNREACHABLE, "the registry does not answer")
    assert "connection refused" in failure.details[0]
    with closed() as address:
        failure = pushing(tmp_path, f"{address}/x:1")
    assert (failure.code, failure.message) == (Exit.INPUT, "the registry does not let us in")
    assert "docker login" in str(failure.hint)


def test_a_build_that_breaks_leaves_the_archive_that_was_there(docker_engine: Engine, tmp_path: Path) -> None:
    build(docker_engine, tmp_path / "x", "toy:1")
    place = tmp_path / "image.tar"
    place.write_text("an older one")
    file = output.read(f"oci:{place}", "cu130")
    words = ["docker", "buildx", "build", "--progress=plain", "--provenance=false", "--output", file.option]
    recipe = (tmp_path / "x" / "Dockerfile").read_text()
    (tmp_path / "x" / "Dockerfile").write_text(f'{recipe}RUN ["/nothing"]\n')
    with pytest.raises(Failure), file.arriving():
        buildx.run([*words, str(tmp_path / "x")])
    assert {path.name for path in tmp_path.iterdir()} == {"x", "image.tar"}
    assert place.read_text() == "an older one"
    (tmp_path / "x" / "Dockerfile").write_text(recipe)
    with file.arriving():
        buildx.run([*words, str(tmp_path / "x")])
    assert {path.name for path in tmp_path.iterdir()} == {"x", "image.tar"}
    assert stored.find(f"oci:{place}").labels == LABELS.as_dict()
