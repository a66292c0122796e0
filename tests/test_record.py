"""What a run's record holds, what it must never hold, and what is said of two of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tinywheels import Workshop, processor_seconds

from env import drift, identity, record
from env.errors import Exit, Failure

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """`/proc` of a machine with two cards, in the words that driver 580.159.04 was seen to use for an H200."""
    root = tmp_path / "host"
    for place, minor, model in (("0000:9b:00.0", 1, "NVIDIA H200"), ("0000:1b:00.0", 0, "NVIDIA H200 NVL")):
        folder = root / "proc/driver/nvidia/gpus" / place
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t {model}\nIRQ:   \t\t 41\nGPU UUID: \t GPU-09dcc829-67db-7c4e-0e9d-7f6ff978b984\n"
            f"Video BIOS: \t 96.00.a5.00.1a\nBus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\n"
            f"Bus Location: \t {place}\nDevice Minor: \t {minor}\nGPU Firmware: \t 580.159.04\nGPU Excluded:\t No\n"
        )
    (root / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)  \n"
        "GCC version:  gcc version 15.3.0 (GCC) \n"
    )
    (root / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: INTEL(R) XEON(R) PLATINUM 8558\n")
    return root


def test_a_record_says_what_a_run_ran_in_without_importing_torch(
    workshop: Workshop, tmp_path: Path, host: Path
) -> None:
    prefix = workshop.copy(tmp_path / "environment")
    drifts = [drift.Drift("numpy", "2.4.6", "1.26.4", origin="installed by pip")]
    found = record.environment_record(
        "cu130",
        prefix / "bin/python",
        drifts,
        lock=workshop.lock,
        root=ROOT,
        allowed=True,
        environ={**os.environ, "CXX": "g++-12", "TORCHINDUCTOR_CACHE_DIR": "/scratch/cache", "EDITOR": "vi"},
        host=host,
    )
    assert found == json.loads(json.dumps(found))
    python = ".".join(map(str, sys.version_info[:3]))
    assert found["env_id"] == identity.env_id(workshop.lock, variant="cu130", python=python)
    assert (found["variant"], found["python"], found["torch"], found["cuda"]) == (
        "cu130",
        python,
        "2.11.0+cu130",
        "13.0",
    )
    assert (found["triton"], found["driver"]) == ("3.6.0", "580.159.04")
    assert found["gpus"] == ["NVIDIA H200 NVL", "NVIDIA H200"]
    assert found["host"]["cpu"] == "INTEL(R) XEON(R) PLATINUM 8558"
    assert found["packages"]["nvidia-cudnn-cu13"] == "9.19.0.56"
    assert found["drift_allowed"] is True
    assert found["drift"][0]["name"] == "numpy"
    assert found["environment"]["CXX"] == "g++-12"
    assert found["environment"]["TORCHINDUCTOR_CACHE_DIR"] == "/scratch/cache"
    assert "EDITOR" not in found["environment"]


def test_a_record_of_a_broken_environment_is_still_one(tmp_path: Path) -> None:
    found = record.environment_record("cu130", tmp_path / "bin/python", environ={"PATH": ""}, host=tmp_path)
    assert (found["torch"], found["triton"], found["driver"], found["gpus"]) == (None, None, None, [])
    assert found["git"] == {"revision": None, "clean": None}


def test_a_record_takes_less_than_a_tenth_of_a_second(workshop: Workshop, tmp_path: Path, host: Path) -> None:
    prefix = workshop.copy(tmp_path / "environment")
    took = []
    for _ in range(5):
        start = processor_seconds()
        record.environment_record("cu130", prefix / "bin/python", lock=workshop.lock, root=ROOT, host=host)
        took.append(processor_seconds() - start)
    assert min(took) < 0.1


# ------------------------------------------------------------------------------------------------------------- secrets


def test_no_secret_is_recorded() -> None:
    kept = record.key_feeding(
        {
            "HF_TOKEN": "secret",
            "UV_INDEX_URL": "https://user:secret@index.example/simple",
            "PIP_EXTRA_INDEX_URL": "https://user:secret@index.example/simple",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "DFLASH_SIGNING_KEY": "secret",
            "TORCHINDUCTOR_REDIS_PASSWORD": "secret",
            "TORCH_HUB_AUTH_TOKEN": "secret",
            "TRITON_REMOTE_CACHE": "redis://user:secret@cache.example:6379/0?password=secret",
            "TORCHX_URL": "https://secret@host.example/path?token=secret&x=secret next",
            "TORCHINDUCTOR_CACHE_KEY_TAG": "fine",
            "CUDA_VISIBLE_DEVICES": "0,1",
        }
    )
    assert "secret" not in json.dumps(kept)
    assert kept["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert kept["DFLASH_SIGNING_KEY"] == "(not recorded)"
    assert kept["TRITON_REMOTE_CACHE"] == "redis://cache.example:6379/0"
    assert kept["TORCHX_URL"] == "https://host.example/path next"
    assert set(kept) & {"HF_TOKEN", "UV_INDEX_URL", "PIP_EXTRA_INDEX_URL", "AWS_SECRET_ACCESS_KEY"} == set()


# ----------------------------------------------------------------------------------------------------- driver and cards


def test_the_driver_is_read_from_sys_first(host: Path) -> None:
    (host / "sys/module/nvidia").mkdir(parents=True)
    (host / "sys/module/nvidia/version").write_text("570.86.15\n")
    assert record.cards(host, {"PATH": ""})[0] == "570.86.15"


def test_nvidia_smi_is_asked_where_the_kernel_does_not_tell(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '580.95.05, NVIDIA H200'\necho '580.95.05, NVIDIA H200'\n")
    program.chmod(0o755)
    assert record.cards(tmp_path, {"PATH": str(tmp_path)}) == ("580.95.05", ["NVIDIA H200", "NVIDIA H200"])
    program.write_text("#!/bin/sh\necho 'No devices were found' >&2\nexit 6\n")
    assert record.cards(tmp_path, {"PATH": str(tmp_path)}) == (None, [])


# ---------------------------------------------------------------------------------------------------------- git


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *who, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch", "main")
    (folder / "file").write_text("one\n")
    git(folder, "add", "file")
    git(folder, "commit", "--quiet", "-m", "One")
    return folder


NO_GIT = {"PATH": "/nowhere"}


def test_the_revision_is_noted_and_whether_the_tree_is_clean(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    assert record.revision(checkout, os.environ) == {"revision": commit, "clean": True}
    (checkout / "new").write_text("")
    assert record.revision(checkout, os.environ) == {"revision": commit, "clean": False}
    (checkout / "new").unlink()
    (checkout / "file").write_text("two\n")
    assert record.revision(checkout, os.environ) == {"revision": commit, "clean": False}


def test_a_checkout_without_a_commit_has_no_revision(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    assert record.revision(tmp_path, os.environ) == {"revision": None, "clean": None}


def test_looking_at_a_checkout_does_not_write_into_it(checkout: Path) -> None:
    os.utime(checkout / "file")  # git would refresh its index now
    index = checkout / ".git" / "index"
    before = (index.stat().st_ino, index.stat().st_mtime_ns)
    record.revision(checkout, os.environ)
    assert (index.stat().st_ino, index.stat().st_mtime_ns) == before


def test_without_git_the_revision_is_read_and_cleanness_is_not_claimed(checkout: Path, tmp_path: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    assert record.revision(checkout, NO_GIT) == {"revision": commit, "clean": None}
    git(checkout, "pack-refs", "--all")
    assert record.revision(checkout, NO_GIT) == {"revision": commit, "clean": None}
    git(checkout, "worktree", "add", "--quiet", "-b", "other", str(tmp_path / "tree"))
    assert record.revision(tmp_path / "tree", NO_GIT) == {"revision": commit, "clean": None}
    git(checkout, "checkout", "--quiet", "--detach")
    assert record.revision(checkout, NO_GIT) == {"revision": commit, "clean": None}


def test_an_image_tells_the_revision_that_it_was_built_from(tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    assert record.revision(tmp_path, {**NO_GIT, "DFLASH_REVISION": commit}) == {"revision": commit, "clean": True}
    dirty = {**NO_GIT, "DFLASH_REVISION": f"{commit}-dirty"}
    assert record.revision(tmp_path, dirty) == {"revision": commit, "clean": False}
    assert record.revision(tmp_path, NO_GIT) == {"revision": None, "clean": None}


# ------------------------------------------------------------------------------------------------------ kept, compared


def sample(**changes: object) -> dict[str, object]:
    plain: dict[str, object] = {
        "format": 1,
        "variant": "cu130",
        "torch": "2.11.0+cu130",
        "driver": "580.95.05",
        "gpus": ["NVIDIA H200", "NVIDIA H200"],
        "git": {"revision": "abc", "clean": True},
        "drift": [],
        "environment": {"CXX": "g++"},
        "packages": {"numpy": "2.4.6"},
    }
    return {**plain, **changes}


def run_folder(folder: Path, found: dict[str, object]) -> Path:
    folder.mkdir()
    record.write(folder / record.NAME, found)
    return folder


def test_a_record_is_read_as_it_was_written_and_written_whole(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", sample())
    assert record.read(run) == record.read(run / record.NAME) == sample()
    with pytest.raises(TypeError):
        record.write(run / record.NAME, sample(torch=object()))
    assert record.read(run) == sample()
    assert [path.name for path in run.iterdir()] == [record.NAME]


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="cannot be written: No such file or directory") as refused:
        record.write(tmp_path / "gone" / record.NAME, sample())
    assert refused.value.code == Exit.STORAGE


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}"])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "run", sample())
    other = tmp_path / "other"
    other.mkdir()
    if text is not None:
        (other / record.NAME).write_text(text)
    assert record.main([str(run), str(other)]) == Exit.INPUT
    assert str(other) in capsys.readouterr().err


def test_each_value_that_differs_is_found_and_no_other() -> None:
    numpy = {"name": "numpy", "locked": "2.4.6", "found": "1.26.4", "why": "", "origin": "installed by pip"}
    other = sample(
        torch="2.10.0+cu128",
        gpus=["NVIDIA H200"],
        git={"revision": "abc", "clean": False},
        drift=[numpy],
        environment={"CXX": "clang++", "TORCH_LOGS": "recompiles"},
        driver=None,
    )
    assert record.compare(sample(), other) == [
        record.Difference("torch", "2.11.0+cu130", "2.10.0+cu128"),
        record.Difference("driver", "580.95.05", None),
        record.Difference("gpus", "NVIDIA H200, NVIDIA H200", "NVIDIA H200"),
        record.Difference("git.clean", "true", "false"),
        record.Difference("environment.CXX", "g++", "clang++"),
        record.Difference("drift.numpy", None, "2.4.6 -> 1.26.4"),
        record.Difference("environment.TORCH_LOGS", None, "recompiles"),
    ]
    assert record.compare(sample(), sample()) == []


def test_what_was_other_in_a_later_start_of_a_run_is_a_difference() -> None:
    six = {"name": "six", "locked": None, "found": "1.17.0", "why": ""}
    other = sample(
        resumed=[{"variant": "cu128", "drift": [six], "packages": {"numpy": None}}, {"driver": "590.1", "drift": None}]
    )
    assert record.compare(sample(), other) == [
        record.Difference("resumed.1.variant", None, "cu128"),
        record.Difference("resumed.1.drift.six", None, "not locked -> 1.17.0"),
        record.Difference("resumed.2.driver", None, "590.1"),
    ]


def test_two_runs_differences_are_printed_side_by_side_and_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    long = "/opt/compilers/bin:/usr/local/sbin:/usr/local/bin:/usr/bin"
    run_folder(Path("a"), sample())
    run_folder(Path("b"), sample(torch="2.10.0+cu128", environment={"CXX": "clang++", "PATH": long}))
    assert record.main(["a", "b"]) == Exit.DONE
    assert capsys.readouterr().out.splitlines() == [
        "                 a             b",
        "torch            2.11.0+cu130  2.10.0+cu128",
        "environment.CXX  g++           clang++",
        "environment.PATH",
        "  a: -",
        f"  b: {long}",
    ]
    assert record.main(["a", "a"]) == Exit.DONE
    assert capsys.readouterr().out == "no difference: both ran in the same environment\n"
    assert record.main(["a", "b", "--json"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out)[0] == {"key": "torch", "a": "2.11.0+cu130", "b": "2.10.0+cu128"}


def test_git_itself_is_there() -> None:
    assert shutil.which("git") is not None, "the tests above need it"
