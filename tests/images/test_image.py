"""The whole way on the real lock: build, push, pull by digest elsewhere, run without rights; then build once more.

The longest tests of the project: minutes, and gigabytes while they run. They go through one build in the order in
which they stand; the ones that need no real wheels are in the files beside this one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from building import checkout, image, layers
from engine import Engine, engine
from toys import Keys, use

from env import base, pull, remote
from env.variants import ROOT

pytestmark = [pytest.mark.image, pytest.mark.timeout(1800)]

STEPS = """
preset = "tiny"
[optimizer]
epochs = 1
[checkpoint]
every = 4
[target]
steps = 4
[data]
prompts = 24
[evaluation]
prompts = 2
"""
"""The main job's graphs, so that what was baked for it serves, and few steps of them."""

LOCKED_DOWN = ("--read-only", "--network=none", "--cap-drop=ALL", "--security-opt=no-new-privileges")
NOBODY = ("--user=12345:12345",)
"""Without a passwd entry."""


@dataclass
class Built:
    """An image that went to the registry."""

    reference: str
    seconds: float

    @property
    def digest(self) -> str:
        return self.reference.partition("@")[2]


def run(engine: Engine, name: str, *command: str, options: Sequence[str] = (), check: bool = True) -> str:
    """Run a command in a container that may do nothing, as nobody; what it printed."""
    done = engine.docker("run", "--rm", *LOCKED_DOWN, *NOBODY, *options, name, *command, check=False)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return f"{done.stdout}{done.stderr}" if check else f"{done.returncode}\n{done.stdout}{done.stderr}"


def taken(engine: Engine) -> str:
    """What it and all the other engines and registries take of the disk by now."""
    folders = list(engine.folder.parent.glob("dflash-*-*"))
    done = subprocess.run(["du", "-smx", "--total", *folders], capture_output=True, text=True, check=False)
    return f"{int(done.stdout.splitlines()[-1].split()[0]) / 1e3:.1f} GB on the disk"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(tmp_path_factory.mktemp("source") / "checkout")


@pytest.fixture(scope="module")
def built(docker_engine: Engine, loopback_registry: str, source: Path) -> Built:
    """The image of the default variant, from the real lock, pushed."""
    base.ensure()
    start = time.monotonic()
    done = image(docker_engine, source, "--network=host", "--output", f"push:{loopback_registry}/dflash:first")
    made = Built(reference=done.stdout.strip(), seconds=time.monotonic() - start)
    print(f"\nimage: built and pushed in {made.seconds:.0f} s, {taken(docker_engine)}")
    return made


@pytest.fixture(scope="module")
def node(built: Built, docker_engine: Engine, keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Another engine, with nothing but what `nox -s pull` believed, and pulled by digest.

    What the builder keeps goes first: from here on nothing builds, and the two together take 9 GB more of the disk.
    """
    docker_engine.docker("builder", "prune", "--all", "--force")
    with engine() as made:
        with pytest.MonkeyPatch.context() as patch:
            use(made, patch)
            signing = ["--key", str(keys.private), "--tlog-upload=false", "--yes"]
            remote.cosign("sign", *signing, built.reference)
            start = time.monotonic()
            host = tmp_path_factory.mktemp("host")  # one without cards
            assert pull.main([built.reference, "--key", str(keys.public)], host) == 0
        print(f"\nimage: verified, pulled and unpacked in {time.monotonic() - start:.0f} s, {taken(made)}")
        yield made


def test_the_image_tells_what_it_is_without_being_run(built: Built, docker_engine: Engine, source: Path) -> None:
    said = image(docker_engine, source, "--inspect", built.reference).stdout
    assert built.digest in said
    assert docker_engine.docker("image", "inspect", built.reference, check=False).returncode != 0  # it passed through
    for card in ("cpu", "h200", "rtx-pro-6000"):
        assert re.search(rf"^cache {card} +[0-9a-f]{{64}}$", said, re.MULTILINE)
    print(f"\n{said}")


def test_no_layer_is_so_large_that_it_serialises_a_pull(built: Built, docker_engine: Engine) -> None:
    found = layers(docker_engine, built.reference)
    assert all(layer["mediaType"].endswith("tar+zstd") for layer in found)
    assert max(layer["size"] for layer in found) < 1e9


def test_an_edit_that_touches_no_graph_moves_the_last_layer_only(
    built: Built, docker_engine: Engine, loopback_registry: str, source: Path
) -> None:
    before = layers(docker_engine, built.reference)
    edited = source / "dflash" / "pipeline.py"
    text = edited.read_text()
    edited.write_text(f"{text}\n# edited\n")
    start = time.monotonic()
    try:
        done = image(docker_engine, source, "--network=host", "--output", f"push:{loopback_registry}/dflash:edited")
    finally:
        edited.write_text(text)
    seconds = time.monotonic() - start
    after = layers(docker_engine, done.stdout.strip())
    moved = [layer for layer in after if layer not in before]
    size = sum(layer["size"] for layer in moved) / 1e6
    print(f"\nimage: after an edit, built and pushed in {seconds:.1f} s, {size:.2f} MB of new layers")
    assert len(moved) == 1
    assert moved == after[-1:]
    assert size <= 5
    assert seconds < 60  # 15 s on a machine that does nothing else


def test_two_builds_that_share_nothing_have_one_digest(
    built: Built, docker_engine: Engine, loopback_registry: str, source: Path, tmp_path: Path
) -> None:
    docker_engine.docker("builder", "prune", "--all", "--force")
    other = shutil.copytree(source, tmp_path / "another folder" / "with" / "another name", symlinks=True)
    start = time.monotonic()
    done = image(
        docker_engine, other, "--network=host", "--no-cache", "--output", f"push:{loopback_registry}/dflash:second"
    )
    print(f"\nimage: built again from nothing in {time.monotonic() - start:.0f} s, {taken(docker_engine)}")
    again = done.stdout.strip()
    one, other_one = layers(docker_engine, built.reference), layers(docker_engine, again)
    assert [layer["digest"] for layer in one] == [layer["digest"] for layer in other_one]
    assert built.digest == again.partition("@")[2]


def test_it_trains_decodes_and_ends_well_as_nobody_on_a_read_only_root_without_a_network(
    built: Built, node: Engine, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(0o777)
    (tmp_path / "steps.toml").write_text(STEPS)
    options = [f"--volume={runs}:/opt/dflash/runs", f"--volume={tmp_path}/steps.toml:/steps.toml:ro"]
    start = time.monotonic()
    said = run(node, built.reference, "nox", "-s", "train", "--", "--config", "/steps.toml", options=options)
    print(f"\nimage: a few steps of the main job took {time.monotonic() - start:.0f} s")
    folder = runs / "steps-seed0"
    counted = json.loads((folder / "caches.json").read_text())
    assert counted["kind"] == "seeded", said
    assert counted["autograd_hit"] > 0
    assert counted["fx_hit"] > 0
    assert sum(counted[f"{kind}_miss"] for kind in ("autograd", "fx", "triton")) == 0
    assert (folder / "drafter" / "model.safetensors").is_file()
    told = json.loads((folder / "environment.json").read_text())
    assert told["git"]["revision"] == revision(built, node).removesuffix("-dirty")
    assert not told["drift"]


def test_verify_finds_the_cpu_s_kernels_in_the_image(built: Built, node: Engine) -> None:
    said = run(node, built.reference, "nox", "-s", "verify")
    assert re.search(r"AOTAutograd (\d+) of \1 hit, 0 missed; FX (\d+) of \2 hit, 0 missed", said), said


def test_the_fixed_user_needs_no_more(built: Built, node: Engine) -> None:
    done = node.docker(
        "run", "--rm", *LOCKED_DOWN, built.reference, "sh", "-c", "id -un; echo $HOME; nox -s id || true"
    )
    assert done.stdout.splitlines()[0] == "dflash"


def test_a_signal_reaches_the_trainer_and_its_exit_code_comes_out(built: Built, node: Engine, tmp_path: Path) -> None:
    name = "stopped"
    node.docker("run", "--detach", "--name", name, *LOCKED_DOWN, *NOBODY, built.reference)
    try:
        end = time.monotonic() + 120
        while "training a target" not in (said := node.docker("logs", name).stderr):
            assert time.monotonic() < end, said
            time.sleep(0.5)
        node.docker("stop", "--time=60", name)
        assert node.docker("inspect", "--format", "{{.State.ExitCode}}", name).stdout.strip() == "143"
        assert "stopped: " in node.docker("logs", name).stderr
    finally:
        node.docker("rm", "--force", name)


def test_a_host_that_does_not_fit_gets_one_sentence(built: Built, node: Engine, tmp_path: Path) -> None:
    for row, sentence in (
        ("NVIDIA H200, 535.104.05, 143771, 9.0", "driver 535.104.05 is older than cu130 needs (580)"),
        ("NVIDIA L40S, 580.95.05, 46068, 8.9", "this image has no kernels for NVIDIA L40S"),
        ("Tesla V100-SXM2-32GB, 580.95.05, 32768, 7.0", "torch 2.11.0 has no code for that capability"),
    ):
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\necho '{row}'\n")
        smi.chmod(0o755)
        options = [f"--volume={smi}:/usr/local/bin/nvidia-smi:ro"]
        said = run(node, built.reference, "nox", "-s", "train", options=options, check=False)
        code, *lines = said.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        assert code == "5", said
        assert len(errors) == 1, said
        assert sentence in errors[0]
        assert "Traceback" not in said


def test_a_tampered_cache_is_refused_by_name(built: Built, node: Engine) -> None:
    spoil = "find /opt/dflash-caches/sealed -name '*.cubin' -o -path '*fxgraph*' -type f | head -n 1"
    container = node.docker("create", "--user=0", built.reference, "true").stdout.strip()
    try:
        place = node.docker("run", "--rm", "--network=none", built.reference, "sh", "-c", spoil).stdout.strip()
        said = node.docker(
            "run", "--rm", "--user=0", "--network=none", built.reference,
            "sh", "-c", f"echo x >>{place} && exec /opt/dflash/docker/entrypoint nox -s verify", check=False,
        )  # fmt: skip
        assert said.returncode == 7, said.stdout + said.stderr
        assert f"error: {place} was changed" in said.stderr
    finally:
        node.docker("rm", container)


def test_a_cards_cache_is_the_one_that_is_baked_outside(built: Built, node: Engine, tmp_path: Path) -> None:
    """Factor by factor and key by key: by another build of Python 3.11, at another path, with no engine.

    The digest, which is over the entries' bytes too, has been seen to differ between two installations of Python 3.11;
    with the image's own it is the same, as the second build's layers are.
    """
    command = [sys.executable, "noxfile.py", "-s", "bake", "--", "--config", "qwen3-8b", "--gpu", "h200"]
    environ = {**os.environ, "DFLASH_CACHE_HOME": str(tmp_path)}
    subprocess.run(command, cwd=ROOT, env=environ, check=True, capture_output=True)
    (sealed,) = (tmp_path / "sealed").iterdir()
    outside = json.loads((sealed / "manifest.json").read_text())
    inside = json.loads(run(node, built.reference, "cat", f"/opt/dflash-caches/sealed/{sealed.name}/manifest.json"))
    assert inside["factors"] == outside["factors"]
    assert inside["keys"] == outside["keys"]


def test_what_it_weighs_is_little_more_than_its_wheels(built: Built, node: Engine) -> None:
    said = run(node, built.reference, "python3", "-m", "env.weigh")
    print(f"\n{said}")
    told = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert told["ratio"] <= 1.08, said


def revision(built: Built, engine: Engine) -> str:
    told = json.loads(engine.docker("image", "inspect", built.reference).stdout)[0]["Config"]["Labels"]
    return str(told["org.opencontainers.image.revision"])
