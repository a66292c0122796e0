"""Baking for GPUs that are not here: real kernels, real processes, on a machine without a driver."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clones import Clone

from env import bake, bakers, gpus
from env.bake import Baked, Example, Kitchen, Recipe
from env.cache import examine, several, sign, store
from env.errors import Exit, Failure

ROOT = Path(__file__).resolve().parents[1]
H200 = gpus.find("h200")
BLOCK = Recipe(name="block", factory="tests.bakesteps:block", examples=(Example(shape=(64, 256), requires_grad=True),))


def kitchen(folder: Path) -> Kitchen:
    return Kitchen(python=Path(sys.executable), home=folder / "baking", out=folder / "sealed")


@pytest.fixture(scope="module")
def cooked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Kitchen, Baked, list[str]]:
    said: list[str] = []
    place = kitchen(tmp_path_factory.mktemp("bake"))
    return place, bake.bake(BLOCK, H200, place, say=said.append), said


def test_a_step_is_compiled_for_a_gpu_that_is_not_here_and_hits_in_a_fresh_process(
    cooked: tuple[Kitchen, Baked, list[str]],
) -> None:
    _, baked, said = cooked
    promised = baked.manifest
    assert promised.counts["autograd_hit"] == 1
    assert promised.counts["fx_hit"] == 2  # forward and backward
    assert promised.counts["triton_hit"] >= 3
    assert [len(promised.keys[family]) for family in ("aot_autograd", "fx")] == [1, 2]
    assert promised.factors["device.index"] == 0
    assert promised.factors["system.gpu"] == "NVIDIA H200"
    assert promised.factors["triton.arch"] == "sm_90a"
    assert promised.gpu_id == gpus.gpu_id(H200)
    assert any("replaying in a fresh process" in line for line in said)
    assert "2 graphs" in baked.sentence()
    examine.examine(baked.folder, sign.Trust(policy="unsigned"))  # whole, and every byte as its manifest says


def test_what_was_baked_before_is_found_again_until_it_is_gone(cooked: tuple[Kitchen, Baked, list[str]]) -> None:
    place, baked, _ = cooked
    again = bake.bake(BLOCK, H200, place)
    assert again.folder == baked.folder
    assert again.seconds is None
    assert "baked before" in again.sentence()
    assert bake._earlier(place.home / "never.sealed", place, lambda _: None) is None


def test_what_was_baked_for_another_folder_or_without_a_signature_is_not_what_was_asked_for(
    cooked: tuple[Kitchen, Baked, list[str]], tmp_path: Path
) -> None:
    place, baked, _ = cooked
    (note := tmp_path / "note").write_text(str(baked.folder))
    said: list[str] = []
    assert bake._earlier(note, place, said.append) is not None
    assert bake._earlier(note, dataclasses.replace(place, out=tmp_path / "share"), said.append) is None
    assert bake._earlier(note, dataclasses.replace(place, key=tmp_path / "key"), said.append) is None
    assert said == [
        f"baking anew, as what was baked before is in {place.out}, and not in {tmp_path / 'share'}",
        "baking anew, as what was baked before is not signed",
    ]


def test_what_was_baked_before_and_is_damaged_is_not_taken_for_it(
    cooked: tuple[Kitchen, Baked, list[str]], tmp_path: Path
) -> None:
    """A launch that refuses a cache says to bake it; then baking must not say that it was baked before."""
    folder, note = tmp_path / "sealed" / "it", tmp_path / "note"
    place, said = kitchen(tmp_path), list[str]()
    shutil.copytree(cooked[1].folder, folder)
    note.write_text(str(folder))
    assert bake._earlier(note, place, said.append) is not None
    file = next(path for path in sorted((folder / "cache").rglob("*")) if path.is_file() and path.stat().st_size)
    file.chmod(0o644)
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    assert bake._earlier(note, place, said.append) is None
    assert said[-1].startswith(f"baking anew, as what was baked before is damaged: {file}")


def test_a_bake_that_was_killed_goes_on_and_ends_in_the_same_cache(
    cooked: tuple[Kitchen, Baked, list[str]], tmp_path: Path
) -> None:
    _, baked, _ = cooked
    place = kitchen(tmp_path)
    code = (
        "from tests.test_bake import *; from pathlib import Path; "
        f"bake.bake(BLOCK, H200, kitchen(Path({str(tmp_path)!r})))"
    )
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environ, start_new_session=True)
    deadline = time.monotonic() + 300
    while not list(place.home.glob("*/cache/triton/0/*/*.cubin")):
        assert process.poll() is None, "it ended before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not list(place.out.glob("*/manifest.json")) if place.out.exists() else True
    done = bake.bake(BLOCK, H200, place)
    assert done.manifest.digest == baked.manifest.digest
    assert done.manifest.keys == baked.manifest.keys
    assert not [path for path in place.home.iterdir() if path.is_dir() and not path.name.startswith("stub")]


def test_another_device_index_has_its_own_graphs_and_the_same_kernels(
    cooked: tuple[Kitchen, Baked, list[str]], tmp_path: Path
) -> None:
    _, baked, _ = cooked
    sixth = bake.bake(BLOCK, H200, kitchen(tmp_path), index=5, count=8, kernels=tmp_path / "kernels")
    assert sixth.manifest.factors["device.index"] == 5
    assert sixth.manifest.cache_id != baked.manifest.cache_id
    assert not set(sixth.manifest.keys["fx"]) & set(baked.manifest.keys["fx"])
    assert sixth.manifest.keys["triton"] == baked.manifest.keys["triton"]


def test_a_card_of_another_kind_gets_kernels_for_its_own_architecture(tmp_path: Path) -> None:
    recipe = Recipe(
        name="step", factory="tests.bakesteps:step", examples=(Example(shape=(32, 128), requires_grad=True),)
    )
    baked = bake.bake(recipe, gpus.find("rtx-pro-6000"), kitchen(tmp_path))
    assert baked.manifest.factors["triton.arch"] == "sm_120a"
    assert baked.manifest.counts["autograd_hit"] == 1  # two modules, one graph pair
    assert baked.manifest.counts["fx_hit"] == 2
    held = b"".join(path.read_bytes() for path in (baked.folder / "cache" / "fxgraph").rglob("*") if path.is_file())
    assert b".target sm_120a" in held
    assert b".target sm_90a" not in held


def test_attention_is_compiled_forward_and_backward_where_the_cpu_could_not_run_it(tmp_path: Path) -> None:
    example = Example(shape=(1, 2, 128, 64), dtype="bfloat16", requires_grad=True)
    recipe = Recipe(name="attention", factory="tests.bakesteps:attention", examples=(example,))
    baked = bake.bake(recipe, H200, kitchen(tmp_path))
    assert (baked.manifest.counts["autograd_hit"], baked.manifest.counts["fx_hit"]) == (1, 2)


def test_without_a_gpu_row_the_cpu_kernels_are_built_by_really_running(tmp_path: Path) -> None:
    recipe = Recipe(
        name="step", factory="tests.bakesteps:step", examples=(Example(shape=(8, 128), requires_grad=True),)
    )
    baked = bake.bake(recipe, None, kitchen(tmp_path))
    assert baked.manifest.gpu_id == "cpu"
    assert (baked.manifest.counts["autograd_hit"], baked.manifest.counts["fx_hit"]) == (1, 2)
    assert baked.manifest.keys["triton"] == ()
    assert "kernels" not in baked.sentence()


def refused(recipe: Recipe, folder: Path) -> Failure:
    with pytest.raises(Failure) as caught:
        bake.bake(recipe, H200, kitchen(folder))
    return caught.value


def test_a_step_that_differs_from_process_to_process_is_not_sealed(tmp_path: Path) -> None:
    recipe = Recipe(name="changing", factory="tests.bakesteps:changing", examples=(Example(shape=(8, 128)),))
    failure = refused(recipe, tmp_path)
    assert failure.code == Exit.CACHE
    assert "autograd_miss: 1" in failure.details
    assert not (tmp_path / "sealed").exists()


def test_a_step_without_fixed_shapes_is_refused(tmp_path: Path) -> None:
    failure = refused(
        Recipe(name="growing", factory="tests.bakesteps:growing", examples=(Example(shape=(8,)),)), tmp_path
    )
    assert "fixed shapes" in str(failure)


@pytest.mark.parametrize(
    ("factory", "code", "words"),
    [("broken", Exit.BUG, "this step needs a grail"), ("gone", Exit.HOST, "killed by signal 9")],
)
def test_a_step_that_breaks_says_so(tmp_path: Path, factory: str, code: Exit, words: str) -> None:
    failure = refused(Recipe(name=factory, factory=f"tests.bakesteps:{factory}"), tmp_path)
    assert failure.code == code
    assert words in str(failure)


def test_without_a_compiler_for_the_stand_in_driver_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Failure) as caught:
        bakers.stub_library(tmp_path)
    assert caught.value.code == Exit.HOST
    assert "`g++` is not on the PATH" in str(caught.value)
    assert "apt-get install g++" in str(caught.value)


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "g++").write_text("#!/bin/sh\necho 'out of cheese' >&2\nexit 1\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(Failure, match="out of cheese"):
        bakers.stub_library(tmp_path)


def test_a_full_or_closed_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "baking").write_text("a file where a folder should be")
    failure = refused(BLOCK, tmp_path)
    assert failure.code == Exit.STORAGE
    assert "No space left on device" not in str(failure)
    assert bakers._failure(1, "OSError: [Errno 28] No space left on device").code == Exit.STORAGE


def test_a_torch_that_was_never_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from env import offline

    monkeypatch.setattr(offline, "READ_IN", {"1.13": "2.0"})
    with pytest.raises(Failure, match=r"read and tried: torch 1\.13 with Triton 2\.0"):
        offline.require_known_versions()


def test_a_name_that_torch_no_longer_has_is_refused_by_name() -> None:
    from env import offline

    with pytest.raises(Failure, match=r"has no `.*\.teleport`"):
        offline._put(subprocess, teleport=None)


def test_nothing_is_pretended_without_the_stand_in_driver(tmp_path: Path) -> None:
    from env import offline

    with pytest.raises(Failure, match="stand-in driver is not preloaded"):
        offline.pretend(H200, index=0, count=1, outputs=tmp_path)


def test_identity_of_a_recipe_is_what_it_compiles_unless_it_brings_its_own() -> None:
    other = dataclasses.replace(BLOCK, name="another name")
    assert other.identity() == BLOCK.identity()
    assert dataclasses.replace(BLOCK, arguments={"width": 512}).identity() != BLOCK.identity()
    assert dataclasses.replace(BLOCK, graph_id="abc").identity() == "abc"


def command(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from env.bake import main; from env.errors import *\ntry: sys.exit(main(sys.argv[1:]))\n"
    code += "except Failure as failure: sys.exit(report(failure))"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "DFLASH_CACHE_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )


TINY = """preset = "tiny"
[drafter]
layers = 1
[shapes]
rows = 1
sequence = 256
anchors = 16
[data]
prompt_tokens = 32
response_tokens = 32
[loss]
chunk_blocks = 16
"""


def test_the_command_bakes_a_configuration_for_each_device_of_a_card(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(TINY)
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    done = command(
        *("--config", str(tmp_path / "small.toml"), "--gpu", "h200", "--devices", "5,7"),
        *("--interpreter", sys.executable, "--jobs", "2"),
        home=home,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all("3 graphs" in line for line in lines)  # a layer forward and backward, a chunk of the loss
    manifests = [json.loads(path.read_text()) for path in (home / "sealed").glob("*/manifest.json")]
    assert sorted(one["factors"]["device.index"] for one in manifests) == [5, 7]
    for family in ("aot_autograd", "fx"):
        assert not set(manifests[0]["keys"][family]) & set(manifests[1]["keys"][family]), "each index has its own"
    assert manifests[0]["keys"]["triton"] == manifests[1]["keys"]["triton"]
    assert manifests[0]["graph_id"] == manifests[1]["graph_id"]
    assert all(one["counts"]["autograd_hit"] == 2 and one["counts"]["fx_hit"] == 3 for one in manifests)
    assert not list((home / "baking").glob("*.kernels"))
    shutil.rmtree(tmp_path / "home" / "baking")
    wanted = [
        store.Identity(
            factors=one["factors"],
            graph_id=one["graph_id"],
            gpu_id=one["gpu_id"],
            gpu={name: one["gpu"][name] for name in gpus.DECIDES},
        )
        for one in manifests
    ]
    choices = several.choose(wanted, environ={"DFLASH_CACHE_HOME": str(home)})
    assert [choice.kind for choice in choices] == ["seeded", "seeded"]
    assert choices[0].path == choices[1].path, "a process has one directory for all of its devices"
    assert len(list((choices[0].path / "fxgraph").glob("*/*"))) == 6
    assert several.together([choice.manifest for choice in choices if choice.manifest]).counts["fx_hit"] == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "tiny", "--gpu", "rtx-pro-600"], "did you mean `--gpu rtx-pro-6000`?"),
        (["--config", "tiny", "--key", "none"], "`--key none`: there is no such file"),
        (["--config", "tiny", "--gpu", "h200", "--devices", "x"], "'x' is no list of indices, as in 5,6,7"),
        (["--config", "tiny", "--gpu", "h200", "--devices", "0,0"], "'0,0' names one twice"),
        ([], "no configuration is given"),
        (["--config", "tiny", "--devices", "1,2"], "`--devices` is given without a card"),
        (["--config", "tiny", "--repair", "--interpreter", sys.executable], "`--interpreter` names the environment"),
        (["--config", "tinny", "--gpu", "h200", "--interpreter", sys.executable], "did you mean `--config tiny`?"),
    ],
)
def test_wrong_commands_are_told_what_would_be_right(tmp_path: Path, arguments: list[str], words: str) -> None:
    tmp_path.chmod(0o700)
    done = command(*arguments, home=tmp_path)
    assert done.returncode == Exit.USAGE
    assert words in done.stderr


def test_a_drifted_environment_is_not_baked_with_and_the_command_that_is_named_mends_it(clone: Clone) -> None:
    asked = ["--config", "my tiny", "--gpu", "h200"]
    clone.env("bake", *asked)  # makes the environment; there is nothing in the clone that it could bake
    (planted := clone.site("cu130") / "sitecustomize.py").write_text("")
    refused = clone.env("bake", *asked, DFLASH_FRONT_DOOR="python3 noxfile.py")
    assert refused.returncode == Exit.DRIFT
    hint = refused.stderr.splitlines()[-1]
    named = "python3 noxfile.py -s bake -- --config 'my tiny' --gpu h200 --repair"
    assert hint == f"hint: `{named}` installs the locked set"
    mended = clone.env("bake", *shlex.split(named.partition(" -- ")[2]))
    assert "is not the locked one" not in mended.stderr
    assert not planted.exists()


def test_help_shows_examples_and_the_list_says_which_rows_were_read_off_a_card(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert "--gpu h200 --gpu rtx-pro-6000" in command("--help", home=tmp_path).stdout
    rows = command("--list", home=tmp_path).stdout.splitlines()
    assert len(rows) == len(gpus.load())
    assert [row.split()[0] for row in rows if "read off a card" in row] == ["h200"]
    assert command("--config", "tiny", "--devices", "1,1", home=tmp_path).returncode == Exit.USAGE
