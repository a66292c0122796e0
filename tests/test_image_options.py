"""What `nox -s image` decides before any engine is asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from env import gpus, image, labels, variants
from env.errors import Exit, Failure
from env.variants import ROOT

CU130 = variants.load().variants["cu130"]
BASE = f"registry.example/debian@sha256:{'a' * 64}"


def test_an_image_goes_to_a_file_the_engine_or_a_registry() -> None:
    assert image.output("oci:x.tar", "cu130").option.startswith(f"type=oci,dest={Path.cwd()}/x.tar,compression=zstd")
    assert image.output("load", "cu128").place == "dflash:cu128"
    pushed = image.output("push:registry.example/dflash:1", "cu130")
    assert pushed.place == "registry.example/dflash:1"
    assert pushed.option.endswith(",push=,store=false")  # by the builder, and nothing of it stays in the engine
    for text in ("somewhere", "oci:", "push:"):
        with pytest.raises(Failure, match="is no place for an image") as refused:
            image.output(text, "cu130")
        assert refused.value.code == Exit.USAGE


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


def test_what_the_index_needs_goes_in_secrets_and_nothing_of_it_on_the_command_line(tmp_path: Path) -> None:
    settings = {"index-url": "https://somebody:secret@index.example/simple", "find-links": "/some/where"}
    bundle = tmp_path / "ca.pem"
    bundle.write_text("certificates")
    (tmp_path / ".netrc").write_text("machine index.example login a password b")
    environ = {"SSL_CERT_FILE": str(bundle), "HOME": str(tmp_path), "HTTPS_PROXY": "http://proxy.example:3128"}
    options = image.secrets(environ, settings, tmp_path)
    assert "secret@" not in " ".join(options)
    assert [word.partition(",")[0] for word in options[1::2]] == ["id=index", "id=ca", "id=netrc"]
    kept = tmp_path / "index"
    assert kept.read_text().splitlines() == [
        "UV_DEFAULT_INDEX=https://somebody:secret@index.example/simple",
        "HTTPS_PROXY=http://proxy.example:3128",
    ]
    assert kept.stat().st_mode & 0o777 == 0o600


def test_a_folder_of_wheels_that_a_build_cannot_see_is_left_out_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert image.secrets({}, {"find-links": "/some/where"}, tmp_path) == []
    assert "UV_FIND_LINKS names /some/where, which a build cannot see" in capsys.readouterr().err


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
        (Exit.USAGE, "there is no variant `cu13`", run("--variant", "cu13")),
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
def test_a_signal_ends_an_inspection_and_the_engine_s_program_that_it_reads(
    tmp_path: Path, number: signal.Signals, code: Exit
) -> None:
    program, pid = tmp_path / "bin" / "docker", tmp_path / "pid"
    program.parent.mkdir()
    told = '[{"Id": "sha256:0", "Architecture": "amd64"}]'
    saves = f"echo $$ >{pid}.new; mv {pid}.new {pid}; exec sleep 600"
    program.write_text(f"#!/bin/sh\ncase $2 in inspect) echo '{told}';; save) {saves};; esac\n")
    program.chmod(0o755)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    path = f"{program.parent}:{os.environ['PATH']}"
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "TMPDIR": str(scratch)}
    command = [sys.executable, "-m", "env", "image", "--inspect", "x:1"]
    process = subprocess.Popen(command, env=settings, stderr=subprocess.PIPE, text=True)
    while not pid.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in said
    assert not Path("/proc", pid.read_text().strip()).exists()
    assert list(scratch.iterdir()) == []
