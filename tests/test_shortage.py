"""Memory or a disk that has run out is a sentence with an exit code of its own; anything else stays what it is."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import micro
import pytest
import torch

from dflash import shortage, worker
from dflash.cli import main
from env.errors import Exit

ROOT = Path(__file__).parent.parent
MORE_THAN_ANY_ADDRESS = 1 << 50


def refused_by_torch() -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(MORE_THAN_ANY_ADDRESS)
    return caught.value


def test_a_configuration_too_large_for_this_machine_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {**micro.TABLES["drafter"], "hidden_size": (1 << 31) - 2, "vocab_size": 1 << 17}
    Path("huge.toml").write_text(micro.toml(drafter=sizes, data={"prompt_tokens": 32, "response_tokens": 32}))
    assert main(["train", "--config", "huge.toml"]) == Exit.HOST
    said = capfd.readouterr().err
    assert "error: the memory of this machine has run out: 1,048,576.0 GiB more were asked for\n" in said
    assert "shapes.rows" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), "the memory of this machine has run out"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "the memory of this machine has run out"),
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which "
                "1.30 GiB is free."
            ),
            "the memory of the GPU has run out: 20.00 GiB more were asked for",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "the memory of the GPU has run out",
        ),
    ],
)
def test_each_way_of_saying_it_is_understood(error: BaseException, sentence: str) -> None:
    failure = shortage.told(error)
    assert failure is not None
    assert (failure.code, failure.message) == (Exit.HOST, sentence)


def test_it_is_found_behind_the_error_that_it_caused() -> None:
    outer = ValueError("a compiler failed")
    outer.__cause__ = refused_by_torch()
    assert shortage.told(outer) is not None


@pytest.mark.parametrize("error", [ValueError("out of memory"), RuntimeError("no"), OSError(errno.EIO, "broken")])
def test_another_error_is_left_alone(error: BaseException) -> None:
    assert shortage.told(error) is None


def test_a_worker_says_it_without_a_traceback_and_may_be_started_again(capfd: pytest.CaptureFixture[str]) -> None:
    error = refused_by_torch()
    assert isinstance(error, Exception)
    assert worker._ended_by(error) not in worker.FINAL
    assert capfd.readouterr().err.startswith("error: the memory of this machine has run out")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_that_fills_up_in_a_compiler_is_named_without_a_traceback(tmp_path: Path) -> None:
    """The compile cache lies on a disk of one page, in a name space of its own; torch wraps what the disk says."""
    code = """
import sys, torch
from dflash import worker
try:
    torch.compile(lambda x: (x.sin() + 1).cos())(torch.ones(100))
except Exception as error:
    sys.exit(worker._ended_by(error))
"""
    mounted = f'mount -t tmpfs -o size=4k tmpfs "{tmp_path}" && exec "$0" -c "$1"'
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted, sys.executable, code],
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if "mount: " in done.stderr or "unshare: " in done.stderr:
        pytest.skip("no file system may be mounted here")
    assert done.returncode == Exit.STORAGE
    assert f"error: a disk is full while `{tmp_path}" in done.stderr
    assert "Traceback" not in done.stderr.partition("error: ")[2]
    assert Exit.STORAGE in worker.FINAL


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_compilers_words_for_a_full_disk_are_understood(number: int) -> None:
    failure = shortage.told(RuntimeError(f"C++ compile error: {os.strerror(number)}"))
    assert failure is not None
    assert failure.code is Exit.STORAGE
