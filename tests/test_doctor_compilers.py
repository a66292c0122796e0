"""Compilers: tried for real, with the real ones, with broken ones, and with none."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest
from hosts import compiler, host, plan

from env.doctor.checks import compiler as check
from env.doctor.facts import compilers
from env.doctor.facts.compilers import Compilers
from env.doctor.finding import Severity

INCLUDE = Path(sysconfig.get_path("include"))


def judged(found: Compilers) -> tuple[Severity, str, str | None]:
    finding = check.judge(host(compilers=found), plan())
    assert finding is not None
    return finding.severity, finding.message, finding.remedy


def without(*variables: str, **more: str) -> dict[str, str]:
    return {**{key: value for key, value in os.environ.items() if key not in variables}, **more}


def wrapper(folder: Path, name: str, text: str) -> Path:
    """A compiler that is a script; what it can do, the real one does."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    file.chmod(0o755)
    return file


def test_the_real_compilers_compile_and_link_all_three() -> None:
    found = compilers.look(INCLUDE, without("CXX", "CC"))
    assert (found.cxx.command, found.cxx.plain, found.cxx.header, found.cxx.parallel) == ("g++", True, True, True)
    assert (found.cc.command, found.cc.plain, found.cc.header, found.cc.parallel) == ("gcc", True, True, None)
    assert found.cxx.version is not None
    severity, message, _ = judged(found)
    assert severity is Severity.OK
    assert message == "`g++` and `gcc` compile and link, with Python.h and OpenMP"


def test_a_path_without_compilers_is_an_error_with_the_packages_that_bring_one(tmp_path: Path) -> None:
    found = compilers.look(INCLUDE, {"PATH": str(tmp_path)})
    assert found.cxx.path is None
    severity, message, remedy = judged(found)
    assert severity is Severity.ERROR
    assert message == "no C++ compiler: `g++` is not on PATH, compiled CPU kernels need it"
    assert remedy is not None
    assert "apt-get install g++" in remedy


def test_gcc_without_g_plus_plus_is_not_enough(tmp_path: Path) -> None:
    gcc = shutil.which("gcc")
    assert gcc is not None
    (tmp_path / "gcc").symlink_to(gcc)
    found = compilers.look(INCLUDE, {"PATH": str(tmp_path)})
    assert found.cc.path == str(tmp_path / "gcc")
    assert judged(found)[1].startswith("no C++ compiler")


def test_a_compiler_named_by_cxx_that_is_not_there_is_named_with_its_variable() -> None:
    found = compilers.look(INCLUDE, without("CC", CXX="/opt/none/g++"))
    severity, message, remedy = judged(found)
    assert severity is Severity.ERROR
    assert "`/opt/none/g++` (from CXX) is not on PATH" in message
    assert remedy is not None
    assert remedy.startswith("unset CXX")


def test_a_missing_python_h_is_told_apart_from_a_broken_compiler(tmp_path: Path) -> None:
    found = compilers.look(tmp_path / "no-headers", without("CXX", "CC"))
    assert (found.cxx.plain, found.cxx.header, found.cxx.parallel) == (True, False, True)
    severity, message, remedy = judged(found)
    assert severity is Severity.ERROR
    assert message.startswith("Python.h is missing")
    assert remedy is not None
    assert "python3-dev" in remedy
    assert found.cxx.said is not None
    assert "Python.h" in found.cxx.said


def test_a_compiler_that_cannot_link_is_found_by_linking(tmp_path: Path) -> None:
    broken = wrapper(tmp_path, "broken", f'exec {shutil.which("g++")} "$@" -lnonexistent')
    found = compilers.look(INCLUDE, without("CC", CXX=str(broken)))
    assert found.cxx.plain is False
    assert found.cxx.said is not None
    assert "nonexistent" in found.cxx.said
    assert judged(found)[0] is Severity.ERROR


def test_a_compiler_without_openmp_is_found(tmp_path: Path) -> None:
    refuse = 'case "$*" in *-fopenmp*) echo "error: unsupported option -fopenmp"; exit 1;; esac'
    text = f'{refuse}; exec {shutil.which("g++")} "$@"'
    found = compilers.look(INCLUDE, without("CC", CXX=str(wrapper(tmp_path, "clang++", text))))
    assert (found.cxx.plain, found.cxx.header, found.cxx.parallel) == (True, True, False)
    severity, message, _ = judged(found)
    assert severity is Severity.ERROR
    assert "OpenMP" in message


def test_a_hanging_compiler_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "SECONDS", 0.3)
    found = compilers.look(INCLUDE, without("CC", CXX=str(wrapper(tmp_path, "slow", "sleep 60"))))
    assert found.cxx.plain is False
    assert found.cxx.said is not None
    assert "did not end" in found.cxx.said


def test_a_compiler_that_says_nothing_and_makes_nothing_is_no_compiler(tmp_path: Path) -> None:
    found = compilers.look(INCLUDE, without("CC", CXX=str(wrapper(tmp_path, "mute", "exit 0"))))
    assert found.cxx.plain is False
    assert found.cxx.version is None


def test_clang_is_triton_s_choice_only_where_gcc_is_missing(tmp_path: Path) -> None:
    wrapper(tmp_path, "clang", f'exec {shutil.which("gcc")} "$@"')
    assert compilers.look(INCLUDE, {"PATH": str(tmp_path)}).cc.command == "clang"
    assert compilers.look(INCLUDE, without("CC", PATH=f"{os.environ['PATH']}:{tmp_path}")).cc.command == "gcc"


def test_each_fault_has_its_own_sentence_and_a_host_that_could_not_be_tried_is_unknown() -> None:
    healthy = Compilers(cxx=compiler("g++"), cc=compiler("gcc"), include="/i")
    assert judged(healthy)[0] is Severity.OK
    cc = Compilers(cxx=compiler("g++"), cc=compiler("gcc", path=None), include="/i")
    assert judged(cc)[1] == "no C compiler: `gcc` is not on PATH, Triton's launchers need it"
    unknown = check.judge(host(compilers=None, trouble={"compilers": "OSError: full"}), plan())
    assert unknown is not None
    assert (unknown.severity, unknown.details) == (Severity.UNKNOWN, ("OSError: full",))
