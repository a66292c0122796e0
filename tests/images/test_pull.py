from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import Engine, engine, give_up, registry
from hosts import card
from toys import LABELS, Keys, build, make_keys, other, slow, use

from env import pull, remote
from env.errors import Exit, Failure
from env.variants import ROOT

pytestmark = pytest.mark.image


@pytest.fixture(autouse=True)
def node(empty_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands talk to an engine that has no image, and it has none again when the test is over."""
    use(empty_engine, monkeypatch)
    clear(empty_engine)  # of what other tests have left
    yield
    clear(empty_engine)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host without a driver."""
    return tmp_path / "host"


def images(node: Engine) -> list[str]:
    """All that the engine lists, dangling ones too."""
    return node.docker("images", "--all", "--no-trunc", "--quiet").stdout.split()


def clear(node: Engine) -> None:
    """Remove all that the engine lists."""
    for each in images(node):
        node.docker("image", "rm", "--force", each, check=False)
    assert images(node) == []


def refused(host: Path, node: Engine, *argv: str) -> Failure:
    """The refusal, after which the engine has nothing."""
    with pytest.raises(Failure) as caught:
        pull.main(argv, host)
    assert images(node) == []
    return caught.value


def shipped(
    builder: Engine, place: str, folder: Path, key: Path | None, *, noise: int = 150_000, **changes: str
) -> str:
    """Build an image with these labels and bring it into a registry, without the checks of `push`; its pin."""
    build(builder, folder, f"{place}:2", other(**changes), noise=noise)
    builder.docker("push", f"{place}:2")
    with pytest.MonkeyPatch.context() as patch:
        use(builder, patch)
        pinned = remote.reference(place).pinned(remote.digest_of(remote.reference(f"{place}:2")))
        if key is not None:
            remote.cosign("sign", "--key", str(key), "--tlog-upload=false", "--yes", str(pinned))
    return str(pinned)


def test_a_signed_image_of_this_lock_is_pulled_and_its_pin_printed(
    empty_engine: Engine, signed: remote.Reference, keys: Keys, host: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert pull.main([str(signed), "--key", str(keys.public)], host) == 0
    said = capfd.readouterr()
    assert said.out == f"{signed}\n"
    assert "no NVIDIA driver is loaded here, so the floor of the image (580) was not checked" in said.err
    assert remote.local_labels(str(signed)) == LABELS.as_dict()
    assert pull.main([str(signed), "--key", str(keys.public)], host) == 0


def test_a_bare_tag_is_refused_unless_told_and_then_pinned(
    empty_engine: Engine, signed: remote.Reference, keys: Keys, host: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failure = refused(host, empty_engine, f"{signed.name}:1", "--key", str(keys.public))
    assert failure.code == Exit.USAGE
    assert failure.message == f"{signed.name}:1 is a tag, which can stand for another image tomorrow"
    assert pull.main([f"{signed.name}:1", "--key", str(keys.public), "--allow-tag"], host) == 0
    said = capfd.readouterr()
    assert said.out == f"{signed}\n"
    assert f"{signed.name}:1 stands for {signed} right now" in said.err


def test_whose_signature_counts_must_be_said(
    empty_engine: Engine, signed: remote.Reference, keys: Keys, host: Path, tmp_path: Path
) -> None:
    for more in ([], ["--unsigned", "--key", str(keys.public)], ["--key", str(tmp_path / "none.pub")]):
        assert refused(host, empty_engine, str(signed), *more).code == Exit.USAGE
    (tmp_path / "bad.pub").write_text("no key")
    failure = refused(host, empty_engine, str(signed), "--key", str(tmp_path / "bad.pub"))
    assert (failure.code, failure.message) == (Exit.USAGE, "that key cannot be read")


def test_a_signature_by_another_key_is_refused(
    empty_engine: Engine, signed: remote.Reference, host: Path, tmp_path: Path
) -> None:
    stranger = make_keys(tmp_path, "stranger")
    failure = refused(host, empty_engine, str(signed), "--key", str(stranger.public))
    assert failure.code == Exit.INPUT
    assert failure.message == f"{signed} is not signed by the key {stranger.public}"
    assert "invalid signature" in failure.details[0]


def test_an_unsigned_image_is_refused_unless_told(
    docker_engine: Engine, empty_engine: Engine, loopback_registry: str, keys: Keys, host: Path, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pin = shipped(docker_engine, f"{loopback_registry}/unsigned", tmp_path / "x", None)
    failure = refused(host, empty_engine, pin, "--key", str(keys.public))
    assert failure.code == Exit.INPUT
    assert failure.details == ("Error: no signatures found",)
    assert pull.main([pin, "--unsigned"], host) == 0
    assert f"nobody vouches for {pin}" in capfd.readouterr().err


def copy(name: str, old: str, new: str) -> None:
    """Give what a tag stands for in the registry another tag."""
    place, _, repository = name.partition("/")
    kind = "application/vnd.oci.image.manifest.v1+json"
    ask = urllib.request.Request(f"http://{place}/v2/{repository}/manifests/{old}", headers={"Accept": kind})
    with urllib.request.urlopen(ask, timeout=20) as answer:
        content = answer.read()
    put = urllib.request.Request(
        f"http://{place}/v2/{repository}/manifests/{new}", content, {"Content-Type": kind}, method="PUT"
    )
    urllib.request.urlopen(put, timeout=20).close()


def test_another_image_s_signature_does_not_count(
    docker_engine: Engine, empty_engine: Engine, signed: remote.Reference, keys: Keys, host: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    pin = shipped(docker_engine, signed.name, tmp_path / "x", None, revision="e" * 40)
    mine, theirs = (each.rpartition("@")[2].replace(":", "-") for each in (pin, str(signed)))
    copy(signed.name, f"{theirs}.sig", f"{mine}.sig")
    assert refused(host, empty_engine, pin, "--key", str(keys.public)).code == Exit.INPUT


@pytest.mark.parametrize(
    ("changes", "code", "sentence"),
    [
        ({"env_id": "0" * 64}, Exit.DRIFT, "was built from another lock than this checkout's (cu130, Python 3.11)"),
        ({"driver": "1"}, Exit.INPUT, "asks for driver 1, and env/variants.toml says 580 for cu130"),
    ],
)
def test_labels_of_another_lock_are_refused_also_when_signed(
    docker_engine: Engine, empty_engine: Engine, loopback_registry: str, keys: Keys, host: Path, tmp_path: Path,
    changes: dict[str, Any], code: Exit, sentence: str,
) -> None:  # fmt: skip
    pin = shipped(docker_engine, f"{loopback_registry}/other", tmp_path / "x", keys.private, **changes)
    failure = refused(host, empty_engine, pin, "--key", str(keys.public))
    assert failure.code == code
    assert sentence in failure.message
    if code is Exit.DRIFT:
        assert pull.main([pin, "--key", str(keys.public), "--allow-other-lock"], host) == 0


def test_a_driver_below_the_floor_is_refused_with_need_have_and_what_to_do(
    empty_engine: Engine, signed: remote.Reference, keys: Keys, host: Path
) -> None:
    card(host, "570.86.15", "NVIDIA H200")
    failure = refused(host, empty_engine, str(signed), "--key", str(keys.public))
    assert failure.code == Exit.HOST
    assert failure.message == "the image (cu130) needs NVIDIA driver 580 or newer, and this host has 570.86.15"
    assert str(failure.hint).startswith("update the driver, or take an image of a variant with a lower floor")


def test_a_card_without_kernels_in_the_image_is_refused_unless_told(
    empty_engine: Engine, signed: remote.Reference, keys: Keys, host: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    card(host, "580.95.05", "NVIDIA H200", "NVIDIA GeForce RTX 5090")
    failure = refused(host, empty_engine, str(signed), "--key", str(keys.public))
    assert failure.code == Exit.HOST
    assert failure.message.startswith("this host has NVIDIA GeForce RTX 5090, and its kernels are for h200: ")
    assert "`nox -s image -- --gpu rtx-5090`" in str(failure.hint)
    assert pull.main([str(signed), "--key", str(keys.public), "--allow-cold"], host) == 0
    assert "there are no kernels for NVIDIA GeForce RTX 5090 in it" in capfd.readouterr().err


def test_a_host_that_fits_hears_nothing_about_it(
    empty_engine: Engine, signed: remote.Reference, keys: Keys, host: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    card(host, "580.95.05", "NVIDIA H200", "NVIDIA H200")
    assert pull.main([str(signed), "--key", str(keys.public)], host) == 0
    assert "driver" not in capfd.readouterr().err


# ----------------------------------------------------------------------------------------------- what cannot be reached


def test_an_engine_that_is_not_running_is_one_sentence(
    signed: remote.Reference, keys: Keys, host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/sock")
    with pytest.raises(Failure, match="the container engine does not answer") as caught:
        pull.main([str(signed), "--key", str(keys.public)], host)
    assert caught.value.code == Exit.HOST


def test_a_program_that_is_not_installed_is_one_sentence(
    signed: remote.Reference, keys: Keys, host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = shutil.which("docker")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("docker", "cosign"):
        with pytest.raises(Failure, match=f"there is no `{name}` on the PATH") as caught:
            pull.main([str(signed), "--key", str(keys.public)], host)
        assert caught.value.code == Exit.HOST
        if name == "docker":
            (tmp_path / "docker").symlink_to(str(docker))


def test_a_registry_that_is_down_is_one_sentence(empty_engine: Engine, keys: Keys, host: Path) -> None:
    failure = refused(host, empty_engine, f"127.0.0.1:9/x@sha256:{'0' * 64}", "--key", str(keys.public))
    assert (failure.code, failure.message) == (Exit.UNREACHABLE, "the registry does not answer")


def test_a_digest_that_is_not_there_is_one_sentence(
    empty_engine: Engine, signed: remote.Reference, keys: Keys, host: Path
) -> None:
    failure = refused(host, empty_engine, f"{signed.name}@sha256:{'0' * 64}", "--key", str(keys.public))
    assert (failure.code, failure.message) == (Exit.INPUT, "there is no such image")


# ----------------------------------------------------------------------------------------- bytes that are not the ones


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a registry that a test may damage."""
    return tmp_path_factory.mktemp("store")


def blob(store: Path, digest: str) -> Path:
    """The file of a registry's storage that holds what a digest names."""
    number = digest.removeprefix("sha256:")
    return next(store.glob(f"**/blobs/sha256/{number[:2]}/{number}/data"))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("what", ["layer", "configuration", "manifest"])
def test_bytes_that_were_changed_in_the_registry_are_refused(
    docker_engine: Engine, empty_engine: Engine, keys: Keys, host: Path, store: Path, tmp_path: Path, what: str
) -> None:
    with registry(store) as address:
        pin = shipped(docker_engine, f"{address}/tampered", tmp_path / "x", keys.private)
        manifest = remote.manifest(remote.reference(pin))
        digests = {
            "layer": manifest["layers"][1]["digest"],
            "configuration": manifest["config"]["digest"],
            "manifest": pin.rpartition("@")[2],
        }
        flip(blob(store, digests[what]))
        failure = refused(host, empty_engine, pin, "--key", str(keys.public))
    assert failure.code in (Exit.INPUT, Exit.UNREACHABLE)
    if what == "layer":
        assert failure.code == Exit.INPUT
        assert failure.message.startswith("the registry serves other bytes than the digest names")


def test_labels_that_a_registry_forges_do_not_help_it(
    docker_engine: Engine, empty_engine: Engine, keys: Keys, host: Path, store: Path, tmp_path: Path
) -> None:
    """The configuration in the registry is replaced by one with this checkout's labels."""
    with registry(store) as address:
        pin = shipped(docker_engine, f"{address}/forged", tmp_path / "x", keys.private, env_id="0" * 64)
        file = blob(store, remote.manifest(remote.reference(pin))["config"]["digest"])
        file.write_text(file.read_text().replace("0" * 64, LABELS.env_id))
        failure = refused(host, empty_engine, pin, "--key", str(keys.public))
    assert failure.code == Exit.INPUT
    assert failure.message.startswith("the registry serves other bytes than the digest names")


# ------------------------------------------------------------------------------------------------ stopped in the middle


@pytest.fixture
def small() -> Iterator[Engine]:
    """An engine whose disk holds 48 MB."""
    place = Path(tempfile.mkdtemp(prefix="dflash-small-", dir="/tmp"))  # short, since a socket lies below it
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", place], capture_output=True, check=False)
    if done.returncode != 0:
        give_up("no file system can be mounted here")
    try:
        with engine(place) as made:
            yield made
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)
        place.rmdir()


def test_a_disk_that_fills_while_pulling_is_one_sentence_and_is_empty_again(
    docker_engine: Engine, small: Engine, loopback_registry: str, keys: Keys, host: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, signed: remote.Reference,
) -> None:  # fmt: skip
    use(small, monkeypatch)
    build(docker_engine, tmp_path / "x", f"{loopback_registry}/wide:1", zeros=80_000_000)
    docker_engine.docker("push", f"{loopback_registry}/wide:1")
    wide = remote.reference(f"{loopback_registry}/wide").pinned(
        remote.digest_of(remote.reference(f"{loopback_registry}/wide:1"))
    )
    failure = refused(host, small, str(wide), "--unsigned")
    assert (failure.code, failure.message) == (Exit.STORAGE, "the container engine's disk is full")
    assert "no space left on device" in failure.details[0]
    end = time.monotonic() + 20
    while shutil.disk_usage(small.folder).used > 5_000_000:
        assert time.monotonic() < end, "what was half pulled is still there"
        time.sleep(0.2)
    assert pull.main([str(signed), "--key", str(keys.public)], host) == 0


def test_an_image_that_cannot_fit_is_refused_before_a_byte_is_fetched(
    docker_engine: Engine, small: Engine, loopback_registry: str, host: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    use(small, monkeypatch)
    build(docker_engine, tmp_path / "x", f"{loopback_registry}/large:1", noise=30_000_000)
    docker_engine.docker("push", f"{loopback_registry}/large:1")
    failure = refused(host, small, f"{loopback_registry}/large:1", "--allow-tag", "--unsigned")
    assert failure.code == Exit.STORAGE
    assert failure.message.startswith("the image takes at least 0.1 GB in ")
    assert shutil.disk_usage(small.folder).used < 5_000_000


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, Exit.TERMINATED), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_pull_that_is_stopped_in_the_middle_leaves_nothing_and_goes_through_the_next_time(
    docker_engine: Engine, empty_engine: Engine, loopback_registry: str, keys: Keys, host: Path, tmp_path: Path,
    number: signal.Signals, code: int,
) -> None:  # fmt: skip
    # other layers than any image before: what an engine has it does not ask for
    pin = shipped(
        docker_engine, f"{loopback_registry}/slow{number}", tmp_path / "x", keys.private, noise=200_000 + number
    )
    program = "import sys; from pathlib import Path; from env import pull; "
    program += f"sys.exit(pull.main(sys.argv[1:], Path({str(host)!r})))"
    with slow(loopback_registry, 100_000) as proxy:
        pin = pin.replace(loopback_registry, proxy.address)
        process = subprocess.Popen(
            [sys.executable, "-c", program, pin, "--key", str(keys.public)],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        assert proxy.halfway.wait(8), "no layer was asked for"
        (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)
        assert process.wait(30) == code
        proxy.on.set()
        time.sleep(1)
        assert images(empty_engine) == []
        assert pull.main([pin, "--key", str(keys.public)], host) == 0
    assert json.loads(remote.docker("image", "inspect", pin))[0]["RepoDigests"] == [pin]
