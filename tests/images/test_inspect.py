"""Looking at an image where it is kept: `nox -s image -- --inspect`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import Engine
from toys import LABELS, build, other, use

from env import image, output, sizes, stored
from env.errors import Exit, Failure

pytestmark = pytest.mark.image


@pytest.fixture(autouse=True)
def shell(docker_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands talk to the tests' engine."""
    use(docker_engine, monkeypatch)


@pytest.fixture(scope="module")
def toy(docker_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image that lies in the engine only."""
    name = build(docker_engine, tmp_path_factory.mktemp("toy"), "inspected:1", noise=3_000_000)
    yield name
    docker_engine.docker("image", "rm", name)


def test_an_image_that_was_built_into_the_engine_is_found_there_by_its_name_and_by_its_digest(
    docker_engine: Engine, toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docker_engine.docker("image", "save", "--output", tmp_path / "toy.tar", toy)
    kept = stored.find(f"oci:{tmp_path}/toy.tar")
    for name in (toy, f"{toy}@{kept.digest}", f"inspected@{kept.digest}"):
        assert stored.find(name) == kept
        assert f"reading {name} in the container engine here" in capsys.readouterr().err
    assert image.main(["--inspect", toy]) == Exit.DONE
    said = capsys.readouterr().out
    assert re.search(rf"^digest +{kept.digest}$", said, re.MULTILINE)
    assert re.search(rf"^cache h200 +{'a' * 64}$", said, re.MULTILINE)
    assert "layers              3, 3 MB to pull" in said
    assert [size for _, size in sizes.read(toy)] == [layer["size"] for layer in kept.layers]


def test_labels_of_another_lock_are_refused_in_the_engine_as_in_a_registry(
    docker_engine: Engine, tmp_path: Path
) -> None:
    name = build(docker_engine, tmp_path, "foreign:1", other(env_id="0" * 64))
    with pytest.raises(Failure, match="foreign:1 was built from another lock than this checkout's") as refused:
        image.main(["--inspect", name])
    assert refused.value.code == Exit.DRIFT
    docker_engine.docker("image", "rm", name)


def test_a_name_that_the_engine_does_not_have_is_asked_for_elsewhere_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HTTPS_PROXY", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody answers
    with pytest.raises(Failure) as refused:
        image.main(["--inspect", "dflash:never-built"])
    assert refused.value.code == Exit.UNREACHABLE
    assert "the container engine here has no image dflash:never-built" in capsys.readouterr().err


def test_a_name_with_a_registry_is_not_looked_for_in_the_engine(
    docker_engine: Engine, toy: str, loopback_registry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{loopback_registry}/inspected:1"
    docker_engine.docker("tag", toy, name)
    docker_engine.docker("push", name)
    docker_engine.docker("image", "rm", name)
    assert stored.find(name).labels == LABELS.as_dict()
    assert capsys.readouterr().err == ""


def test_an_engine_that_hands_out_something_else_is_refused(
    toy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that keeps layers unpacked: its id is no manifest's."""
    told = json.dumps([{"Id": f"sha256:{'0' * 64}", "Architecture": "amd64"}])
    program = tmp_path / "docker"
    program.write_text(
        f"#!/bin/sh\ncase $2 in inspect) echo '{told}';; save) exec /usr/bin/docker image save {toy};; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(Failure, match="does not hand out the manifest of inspected:1 that its id names") as refused:
        stored.find(toy)
    assert refused.value.code == Exit.HOST
    assert "--inspect oci:FILE" in (refused.value.hint or "")


def test_an_engine_that_goes_away_while_it_hands_an_image_out_is_said_to_have_gone(
    toy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = json.dumps([{"Id": f"sha256:{'0' * 64}", "Architecture": "amd64"}])
    program = tmp_path / "docker"
    gone = "error during connect: Get http://%2Fvar%2Frun%2Fdocker.sock/v1.45/images/get: EOF"
    program.write_text(f"#!/bin/sh\ncase $2 in inspect) echo '{told}';; save) echo '{gone}' >&2; exit 1;; esac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(Failure, match="the container engine does not answer") as refused:
        stored.find(toy)
    assert refused.value.code == Exit.HOST
    assert gone in refused.value.details


def test_a_registry_that_does_not_have_what_was_built_is_not_called_pushed_to(
    docker_engine: Engine, toy: str, loopback_registry: str
) -> None:
    name = f"{loopback_registry}/arrived:1"
    pushed = output.read(f"push:{name}", "cu130")
    with pytest.raises(Failure) as refused:  # a builder that built and did not push
        pushed.require_arrived(f"sha256:{'0' * 64}")
    assert refused.value.code == Exit.INPUT
    docker_engine.docker("tag", toy, name)
    docker_engine.docker("push", name)
    docker_engine.docker("image", "rm", name)
    with pytest.raises(Failure, match="arrived:1 in the registry is not what was built") as refused:
        pushed.require_arrived(f"sha256:{'0' * 64}")
    assert refused.value.code == Exit.HOST
    pushed.require_arrived(stored.find(toy).digest)


def test_an_engine_that_does_not_have_what_was_built_is_not_called_loaded(toy: str) -> None:
    """As when another builder is the current one: it keeps what it builds, and the older image stays in the engine."""
    for name, found in ((toy, stored.find(toy).digest), ("inspected:none", "has none of that name")):
        with pytest.raises(Failure, match=f"{name} in the engine is not what was built") as refused:
            output.read(f"load:{name}", "cu130").require_arrived(f"sha256:{'0' * 64}")
        assert refused.value.code == Exit.HOST
        assert refused.value.details == (f"built    sha256:{'0' * 64}", f"engine   {found}")
        assert "BUILDX_BUILDER" in str(refused.value.hint)


def test_the_digest_that_the_builder_tells_is_the_one_that_the_engine_has(
    docker_engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    where = output.read("load:told:1", "cu130")
    words = ["--provenance=false", "--output", where.option, "--metadata-file", str(tmp_path / "told.json")]
    docker_engine.docker("buildx", "build", *words, tmp_path)
    where.require_arrived(json.loads((tmp_path / "told.json").read_text())["containerimage.digest"])
    docker_engine.docker("image", "rm", "told:1")
