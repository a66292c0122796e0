"""What `nox -s image` decides before any engine is asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from env import gpus, image, labels, output, variants
from env.errors import Exit, Failure
from env.variants import ROOT

CU130 = variants.load().variants["cu130"]
BASE = f"registry.example/debian@sha256:{'a' * 64}"


def test_an_image_goes_to_a_file_the_engine_or_a_registry(tmp_path: Path) -> None:
    file = output.read(f"oci:{tmp_path}/x.tar", "cu130")
    assert file.place == f"{tmp_path}/x.tar"
    assert file.option.startswith(f"type=oci,dest={tmp_path}/x.tar.building-{os.getpid()},compression=zstd")
    assert output.read("load", "cu128").place == "dflash:cu128"
    pushed = output.read("push:registry.example/dflash:1", "cu130")
    assert pushed.place == "registry.example/dflash:1"
    assert pushed.option.endswith(",push=,store=false")  # by the builder, and nothing of it stays in the engine
    for text in ("somewhere", "oci:", "push:", "load:", ""):
        with pytest.raises(Failure, match="is no place for an image") as refused:
            output.read(text, "cu130")
        assert refused.value.code == Exit.USAGE


def test_a_file_takes_its_place_when_it_is_whole_and_leaves_the_old_one_there_otherwise(tmp_path: Path) -> None:
    place = tmp_path / "x.tar"
    place.write_text("old")
    file = output.read(f"oci:{place}", "cu130")
    beside = Path(file.option.partition("dest=")[2].partition(",")[0])

    def breaks() -> None:
        beside.write_text("")  # as buildx does while it reads its options
        raise Failure(Exit.BUG, "the build broke")

    with pytest.raises(Failure, match="the build broke"), file.arriving():
        breaks()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"x.tar": "old"}
    with file.arriving():
        beside.write_text("new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"x.tar": "new"}
    with pytest.raises(Failure, match=r"cannot write .*/x\.tar: No such file") as refused, file.arriving():
        pass
    assert refused.value.code == Exit.STORAGE


def test_every_variant_gets_the_cards_that_its_torch_has_code_for() -> None:
    row = gpus.load()["rtx-pro-6000"]
    old = {"old": row.__class__(**{**{name: getattr(row, name) for name in row.__slots__}, "major": 5, "minor": 0})}
    assert image.chosen_gpus(CU130, {**gpus.load(), **old}, ("h200", "old", "rtx-pro-6000")) == ("h200", "rtx-pro-6000")


def test_a_base_that_was_made_here_is_a_context_and_one_of_a_registry_is_completed() -> None:
    wanted = image.target(CU130, ("h200",), "0" * 64)
    own = image.command(wanted, f"oci-layout:///base@sha256:{'a' * 64}", [])
    assert f"base=oci-layout:///base@sha256:{'a' * 64}" in own
    assert "BASE_KIND=slim" not in own
    other = image.command(wanted, BASE, [])
    assert f"BASE={BASE}" in other
    assert "BASE_KIND=slim" in other


def test_the_labels_that_only_a_build_knows_are_read_back() -> None:
    fixed = image.target(CU130, ("h200",), "0" * 64)["labels"]
    caches = {"h200": ["b" * 64, "a" * 64], "cpu": ["c" * 64]}
    told = labels.read({**fixed, **image.told_labels(caches, "d" * 40, f"sha256:{'e' * 64}")}, "it")
    assert told.pairs() == [("cpu", "c" * 64), ("h200", "a" * 64), ("h200", "b" * 64)]
    assert told.gpus == ("h200",)


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "env", "image", *arguments]
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(command, env=settings, capture_output=True, text=True, check=False)


def test_refusals_are_one_sentence_each(tmp_path: Path) -> None:
    silent = f"unix://{tmp_path}/no-engine"
    for code, sentence, done in (
        (Exit.HOST, "the container engine does not answer", run("--base", BASE, DOCKER_HOST=silent)),
        (Exit.USAGE, "is not named by its digest", run("--base", "debian:bookworm-slim", DOCKER_HOST=silent)),
        (Exit.USAGE, "there is no GPU `h2000`", run("--gpu", "h2000")),
        (Exit.USAGE, "there is no GPU ``", run("--gpu", "")),
        (Exit.USAGE, "there is no variant `cu13`", run("--variant", "cu13")),
        # before a base is made or an engine asked
        (Exit.USAGE, "no preset is called `qwen3-8`", run("--config", "qwen3-8", DOCKER_HOST=silent)),
        (Exit.USAGE, "no preset is called `mine.toml`", run("--config", "mine.toml", DOCKER_HOST=silent)),
        (Exit.USAGE, "no preset is called ``", run("--config", "", DOCKER_HOST=silent)),
        (Exit.USAGE, "the base `` is not named by its digest", run("--base", "", DOCKER_HOST=silent)),
        (Exit.USAGE, "is no place for an image", run("--output", "x.tar", DOCKER_HOST=silent)),
        (Exit.USAGE, "is a folder", run("--output", f"oci:{tmp_path}", DOCKER_HOST=silent)),
        (Exit.STORAGE, "nowhere is not there", run("--output", f"oci:{tmp_path}/nowhere/x.tar", DOCKER_HOST=silent)),
        (Exit.USAGE, "names a digest", run("--output", f"push:{BASE}", DOCKER_HOST=silent)),
        (Exit.USAGE, "names a digest", run("--output", f"load:{BASE}", DOCKER_HOST=silent)),
        (Exit.USAGE, "`--sizes` needs the image to draw", run("--sizes", "x.png")),
        (Exit.USAGE, "`--sizes .` is no name of a picture", run("--inspect", f"oci:{tmp_path}/nothing", "--sizes", "")),
        (Exit.INPUT, "is no OCI image", run("--inspect", f"oci:{tmp_path}/nothing")),
        # a variable of a script that is not set: nothing must be built
        (Exit.USAGE, "`` is no reference of an image", run("--inspect", "", DOCKER_HOST=silent)),
        (Exit.USAGE, "there is no variant `cu130\\n`", run("--base", BASE, DFLASH_VARIANT="cu130\n")),
        (Exit.HOST, "there is no `docker` on the PATH", run("--base", BASE, PATH=str(tmp_path))),
    ):
        assert done.returncode == code, done.stderr
        assert [sentence in line for line in done.stderr.splitlines() if line.startswith("error: ")] == [True]
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["--inspect", "x:1", "--variant", "cu128"], "`--inspect` builds nothing, so it takes no `--variant`"),
        (["--inspect", "x:1", "--gpu", "h200", "--no-cache"], "it takes no `--gpu`, `--no-cache`"),
        (["--print", "--variant", "cu128"], "`--print` builds nothing, so it takes no `--variant`"),
        (["--print", "--inspect", "x:1"], "`--print` builds nothing, so it takes no `--inspect`"),
    ],
)
def test_an_option_of_a_build_beside_one_that_builds_nothing_is_refused_not_ignored(
    words: list[str], refused: str
) -> None:
    with pytest.raises(Failure, match=refused) as said:
        image.main(words)
    assert said.value.code == Exit.USAGE


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, Exit.INTERRUPTED), (signal.SIGTERM, Exit.TERMINATED)])
@pytest.mark.parametrize("words", [["--inspect", "x:1"], ["--base", BASE]], ids=["inspection", "build"])
def test_a_signal_ends_what_is_under_way_and_the_engine_s_program_that_it_reads(
    tmp_path: Path, words: list[str], number: signal.Signals, code: Exit
) -> None:
    program, pid = tmp_path / "bin" / "docker", tmp_path / "pid"
    program.parent.mkdir()
    told = '[{"Id": "sha256:0", "Architecture": "amd64"}]'
    waits = f"echo '#1 0.1 said' >&2; echo $$ >{pid}.new; mv {pid}.new {pid}; exec sleep 600"
    program.write_text(f"#!/bin/sh\ncase $2 in inspect) echo '{told}';; save | build) {waits};; esac\n")
    program.chmod(0o755)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    path = f"{program.parent}:{os.environ['PATH']}"
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "TMPDIR": str(scratch)}
    command = [sys.executable, "-m", "env", "image", *words]
    process = subprocess.Popen(command, env=settings, stderr=subprocess.PIPE, text=True)
    while not pid.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    try:
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    assert "Traceback" not in said
    assert not Path("/proc", pid.read_text().strip()).exists()
    assert list(scratch.iterdir()) == []


DOCKER = """#!{python}
import json, pathlib, sys
told = dict(zip(sys.argv, sys.argv[1:]))
if sys.argv[1:3] == ["buildx", "build"] and told["--target"] == "cache-ids":
    folder = pathlib.Path(told["--output"].partition("dest=")[2])
    folder.mkdir()
    (folder / "cache-ids.json").write_text(json.dumps({{"cpu": ["c" * 64], "h200": ["a" * 64]}}))
elif sys.argv[1:3] == ["buildx", "build"]:
    if told["--output"].startswith("type=oci"):
        pathlib.Path(told["--output"].split(",")[1].removeprefix("dest=")).write_text("new")
    pathlib.Path(told["--metadata-file"]).write_text(json.dumps({{"containerimage.digest": "{built}"}}))
elif sys.argv[1:3] == ["image", "inspect"]:
    print("{kept}")
"""
"""An engine's program that builds at once, and whose engine has what it is told to have."""


@pytest.mark.parametrize("kept", ["a", "b"])
def test_a_build_ends_well_only_if_the_engine_has_what_was_built(tmp_path: Path, kept: str) -> None:
    built = f"sha256:{'a' * 64}"
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(DOCKER.format(python=sys.executable, built=built, kept=f"sha256:{kept * 64}"))
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    done = run("--base", BASE, PATH=path)
    if kept == "a":
        assert (done.returncode, done.stdout) == (Exit.DONE, f"dflash:cu130@{built}\n"), done.stderr
    else:
        assert (done.returncode, done.stdout) == (Exit.HOST, "")
        assert "error: dflash:cu130 in the engine is not what was built\n" in done.stderr
    place = tmp_path / "image.tar"
    place.write_text("old")
    done = run("--base", BASE, "--output", f"oci:{place}", PATH=path)
    assert (done.returncode, done.stdout) == (Exit.DONE, f"{place} {built}\n"), done.stderr
    assert {each.name for each in tmp_path.iterdir()} == {"bin", "image.tar"}
    assert place.read_text() == "new"
