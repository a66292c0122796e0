"""What moves which layer, and what gets into none: on a small image of made-up wheels, since layers are layers."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from building import checkout, layers
from engine import Engine
from wheelhouse import Wheelhouse, pin

from env import base, bootstrap, credentials, index, variants
from env import image as images
from env.errors import Exit
from env.parts import PARTS

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]

PACKAGES = ("nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cusparse", "nvidia-nccl-cu13", "triton", "torch", "numpy")
PASSWORD = "open-sesame-8fb1c2"
BUNDLE = """# certificates-of-the-house-41d07e
-----BEGIN CERTIFICATE-----
MIIBejCCAR+gAwIBAgIUHMz66Vw6NzQMMZnRS9N7aM/YJlIwCgYIKoZIzj0EAwIw
ETEPMA0GA1UEAwwGbm9ib2R5MCAXDTI2MTEzMDEwNDYxNloYDzIxMjYxMTA2MTA0
NjE2WjARMQ8wDQYDVQQDDAZub2JvZHkwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNC
AAQewfHs8wEV5LkvUpy8N+OYEkttv0hFqkHJItoM/EdLxhy9NJRN1Z8amMU5esR3
0gzWM9Z6uw39/3KBl61ezD7Io1MwUTAdBgNVHQ4EFgQUm6T7BvrW3XRsUUqPKNM8
EkypTTcwHwYDVR0jBBgwFoAUm6T7BvrW3XRsUUqPKNM8EkypTTcwDwYDVR0TAQH/
BAUwAwEB/zAKBggqhkjOPQQDAgNJADBGAiEA4fJvXN6dBT3AibAtwLognPbgqs7X
+zhtrssJXSDvREQCIQD1zlZjCphrTPXxrgdClM8tLgbFqBhTHKwPUaCEWtU5gA==
-----END CERTIFICATE-----
"""
NETRC = "machine index.example login somebody password spoken-to-nobody-77ab30"
CREDENTIALS = f"somebody:{PASSWORD}"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Wheelhouse, str]]:
    """An index of one package for each part, and its address with a password in it."""
    made = Wheelhouse(tmp_path_factory.mktemp("index"))
    for name in PACKAGES:
        made.add(name, "1.0")
    with made.served() as address:
        yield made, address.replace("://", f"://{CREDENTIALS}@")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, docker_engine: Engine, house: tuple[Wheelhouse, str]) -> Path:
    """A checkout whose lock holds the made-up packages; the tools, which are real, are in the builder's cache."""
    source = checkout(tmp_path_factory.mktemp("small") / "checkout")
    reference = base.ensure().reference
    with pytest.MonkeyPatch.context() as patch:
        use(docker_engine, patch)
        folder = tmp_path_factory.mktemp("secrets")
        shared = credentials.options(dict(docker_engine.environ), index.pip_settings(bootstrap.ensure_tools()), folder)
        run(docker_engine, source, reference, [*shared, "--target=tools", "--output=type=cacheonly"])
    write_lock(source, house[0], {})
    return source


def use(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    for name, value in engine.environ.items():
        patch.setenv(name, value)


def write_lock(source: Path, house: Wheelhouse, versions: dict[str, str], variant: str = "cu130") -> None:
    pins = []
    for name in PACKAGES:
        version = versions.get(name, "1.0")
        digest = house.add(name, version)
        pins.append(pin(name, version, digest))
    (source / "requirements" / f"{variant}.txt").write_text("".join(pins))


def run(engine: Engine, source: Path, reference: str, more: Sequence[str], variant: str = "cu130") -> None:
    """One of the commands that `nox -s image` prints."""
    wanted = images.target(variants.load().variant(variant), (), "0" * 64)
    network = ["--network=host", "--allow=network.host"]
    command = images.command(wanted, reference, [*network, *more])
    done = subprocess.run(command, cwd=source, env=dict(engine.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def environment(engine: Engine, source: Path, address: str, folder: Path, output: str, *, fresh: bool = False) -> None:
    """Build the environment alone: every layer below the caches and the project."""
    told = {"index": f"UV_DEFAULT_INDEX={address}", "ca": BUNDLE, "netrc": NETRC}
    for name, text in told.items():
        (folder / name).write_text(f"{text}\n")
    run(
        engine,
        source,
        base.ensure().reference,
        [
            *(["--no-cache-filter=parts,environment"] if fresh else []),
            *(f"--secret=id={name},src={folder / name}" for name in told),
            "--target=environment",
            f"--output={output}",
        ],
    )


def test_after_a_changed_pin_only_the_layers_from_that_pin_on_move(
    small: Path, house: tuple[Wheelhouse, str], docker_engine: Engine, loopback_registry: str, tmp_path: Path
) -> None:
    def built(tag: str) -> list[str]:
        name = f"{loopback_registry}/small:{tag}"
        packing = "compression=zstd,oci-mediatypes=true"
        environment(docker_engine, small, house[1], tmp_path, f"type=image,name={name},push=true,{packing}")
        return [layer["digest"] for layer in layers(docker_engine, name)]

    before = built("before")
    write_lock(small, house[0], {"triton": "1.1"})
    after = built("after")
    write_lock(small, house[0], {})
    moved = [number for number, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    # the base, the empty environment, a layer for each part, the stamp; parts above are installed anew to equal bytes
    assert len(before) == 2 + len(PARTS) + 1
    assert moved == [2 + list(PARTS).index("triton"), len(before) - 1]


def test_a_comment_in_the_lock_moves_no_layer_of_packages(
    small: Path, house: tuple[Wheelhouse, str], docker_engine: Engine, loopback_registry: str, tmp_path: Path
) -> None:
    lock = small / "requirements" / "cu130.txt"
    found = []
    for tag in ("plain", "commented"):
        name = f"{loopback_registry}/small:{tag}"
        environment(docker_engine, small, house[1], tmp_path, f"type=image,name={name},push=true,compression=zstd")
        found.append([layer["digest"] for layer in layers(docker_engine, name)])
        lock.write_text(f"# a comment\n{lock.read_text()}")
    assert found[0] == found[1]


def test_every_layer_below_the_caches_is_the_same_bytes_when_it_is_made_again(
    small: Path, house: tuple[Wheelhouse, str], docker_engine: Engine, loopback_registry: str, tmp_path: Path
) -> None:
    found = []
    for tag in ("one", "other"):
        name = f"{loopback_registry}/small:{tag}"
        packing = "compression=zstd,oci-mediatypes=true"
        where = f"type=image,name={name},push=true,{packing}"
        environment(docker_engine, small, house[1], tmp_path, where, fresh=True)
        found.append([layer["digest"] for layer in layers(docker_engine, name)])
    assert found[0] == found[1]


def test_no_layer_and_no_line_of_history_holds_what_was_secret(
    small: Path, house: tuple[Wheelhouse, str], docker_engine: Engine, tmp_path: Path
) -> None:
    archive = tmp_path / "image.tar"
    environment(docker_engine, small, house[1], tmp_path, f"type=oci,dest={archive},compression=uncompressed")
    marker, _, certificate, *_ = BUNDLE.splitlines()
    secrets = (PASSWORD, "somebody:", house[1], marker, certificate, NETRC, "/srv/index=")
    words = [word.encode() for word in secrets]
    seen = 0
    with tarfile.open(archive) as packed:
        for member in packed:
            file = packed.extractfile(member)
            data = file.read() if file else b""
            if data.startswith(b"(\xb5/\xfd"):  # the base keeps its own packing
                data = subprocess.run(["zstd", "-dc"], input=data, capture_output=True, check=True).stdout
            seen += len(data)
            assert not [word for word in words if word in data], member.name
    assert seen > 100e6


def test_a_wheel_that_the_index_serves_under_another_hash_is_not_installed(
    small: Path, house: tuple[Wheelhouse, str], docker_engine: Engine, tmp_path: Path
) -> None:
    lock = small / "requirements" / "cu130.txt"
    text = lock.read_text()
    lock.write_text(re.sub(r"sha256:[0-9a-f]{64}", f"sha256:{hashlib.sha256(b'').hexdigest()}", text, count=1))
    try:
        with pytest.raises(AssertionError, match=r"[Hh]ash"):
            environment(docker_engine, small, house[1], tmp_path, "type=cacheonly")
    finally:
        lock.write_text(text)


def test_an_image_of_another_variant_than_the_default_is_that_variant_without_an_option(
    small: Path, house: tuple[Wheelhouse, str], docker_engine: Engine, tmp_path: Path
) -> None:
    write_lock(small, house[0], {}, "cu132")
    (tmp_path / "index").write_text(f"UV_DEFAULT_INDEX={house[1]}\n")
    (tmp_path / "baked" / "caches").mkdir(parents=True)  # no caches: they know no variant
    more = [f"--secret=id=index,src={tmp_path}/index", f"--build-context=bake={tmp_path}/baked", "--target=image"]
    # packed as the product packs: the builder hands a layer of the same content out again as it was packed first
    output = "--output=type=image,name=other:cu132,compression=zstd,oci-mediatypes=true"
    run(docker_engine, small, base.ensure().reference, [*more, output], "cu132")

    def said(*command: str, code: int, options: Sequence[str] = ()) -> str:
        limits = ("--user=12345", "--read-only", "--network=none", "--cap-drop=ALL")
        done = docker_engine.docker("run", "--rm", *limits, *options, "other:cu132", *command, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return f"{done.stdout}{done.stderr}"

    ask = "from env import environment, variants; print(environment.ensure(variants.load().variant().name))"
    assert said("python3", "-P", "-c", ask, code=0) == "/opt/dflash/.nox/environments/cu132-py3.11/bin/python\n"
    verify = "nox -s verify -- --variant cu130"
    assert "error: this image holds cu132, not cu130\n" in said(*verify.split(), code=Exit.USAGE)
    changed = said("nox", "-s", "verify", code=Exit.USAGE, options=("--env=DFLASH_VARIANT=cu130",))
    assert changed.startswith(
        "error: /opt/dflash/.nox/environments holds cu132-py3.11, not cu130-py3.11, and cannot be"
    )
    assert "\n  DFLASH_VARIANT names cu130\n" in changed
    below = said("sh", "-c", verify, code=Exit.USAGE)  # as from a shell in the container
    assert "environments holds cu132-py3.11, not cu130-py3.11, and cannot be written\n" in below
    assert "dflash doctor: cu132 (torch 2.15.0" in said("nox", "-s", "doctor", "--", "--only", "user", code=0)
    docker_engine.docker("image", "rm", "other:cu132")


def test_the_bake_file_derives_from_the_two_tables() -> None:
    text = images.BAKE_FILE.read_text(encoding="utf-8")
    assert text == images.as_text(images.derived()), "run `nox -s image -- --print > docker/bake.json`"
    told = json.loads(text)
    matrix = variants.load()
    assert list(told["target"]) == list(matrix.variants)
    assert told["group"]["default"]["targets"] == [matrix.default]


def test_the_image_names_its_variant_above_everything_that_takes_long() -> None:
    """A variable of an earlier stage would be in the environment of every step after it, the bake's among them."""
    stages = re.split(r"(?m)^FROM ", (variants.ROOT / "docker" / "Dockerfile").read_text())
    (last,) = (stage for stage in stages if variants.NAMED in stage)
    assert last is stages[-1]
    assert f"{variants.NAMED}=${{VARIANT}}" in last.partition("ARG REVISION")[2], "only configuration follows"
    assert not re.search(r"(?m)^(RUN|COPY|ADD|WORKDIR) ", last.partition("ARG REVISION")[2])
