"""Pinning the environment: what feeds a key is taken away or fixed, the rest is untouched, and every change is said."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env.cache import pins

HOSTILE = {
    "CXX": "/usr/bin/g++",
    "TRITON_DISABLE_LINE_INFO": "1",
    "TRITON_CACHE_DIR": "/scratch/triton",
    "TORCHINDUCTOR_CACHE_DIR": "/scratch/inductor",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCH_COMPILE_CACHE_KEY_TAG": "x",
    "PTXAS_OPTIONS": "-O0",
    "DISABLE_LLVM_OPT": "1",
    "CI": "true",
}
ORDINARY = {
    "PATH": "/usr/bin:/bin", "HOME": "/home/me", "CC": "gcc-12", "CUDA_VISIBLE_DEVICES": "3", "OMP_NUM_THREADS": "4",
    "TORCH_LOGS": "+inductor", "TORCHINDUCTOR_COMPILE_THREADS": "4", "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCHELASTIC_RUN_ID": "x", "LANG": "C", "LD_LIBRARY_PATH": "/opt/lib",
}  # fmt: skip


def test_what_feeds_keys_is_taken_away_and_said() -> None:
    result, overridden = pins.pinned({**HOSTILE, **ORDINARY})
    assert result == ORDINARY
    assert {override.name: (override.old, override.new) for override in overridden} == {
        name: (value, None) for name, value in HOSTILE.items()
    }
    sentence = next(override.sentence() for override in overridden if override.name == "CXX")
    assert sentence.startswith("took away CXX=/usr/bin/g++: its text is inductor's `cpp.cxx`")
    assert "`DFLASH_KEEP=CXX` keeps it" in sentence


def test_an_ordinary_environment_is_untouched_and_nothing_is_said() -> None:
    assert pins.pinned(ORDINARY) == (ORDINARY, ())


def test_what_the_user_keeps_stays_and_is_said() -> None:
    environ = {**HOSTILE, "PATH": "/usr/bin", "DFLASH_KEEP": "CXX, TORCHINDUCTOR_MAX*"}
    result, overridden = pins.pinned(environ)
    assert result["CXX"] == "/usr/bin/g++"
    assert result["TORCHINDUCTOR_MAX_AUTOTUNE"] == "1"
    assert "TRITON_CACHE_DIR" not in result
    said = {override.name: override.sentence() for override in overridden}
    assert said["CXX"].startswith("kept CXX=/usr/bin/g++")
    assert "DFLASH_KEEP keeps it" in said["CXX"]
    again, _ = pins.pinned({**HOSTILE, "PATH": "/usr/bin"}, keep=["TRITON_*"])
    assert {name for name in again if name.startswith("TRITON")} == {"TRITON_DISABLE_LINE_INFO", "TRITON_CACHE_DIR"}


def test_the_only_way_to_a_compiler_is_not_taken_away(tmp_path: Path) -> None:
    result, overridden = pins.pinned({"CXX": "/opt/gcc/bin/g++", "PATH": str(tmp_path)})
    assert result["CXX"] == "/opt/gcc/bin/g++"
    assert "there is no `g++` on the PATH" in overridden[0].sentence()


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment's Python, a link out of it as they are, and torch's ptxas beside it."""
    python = tmp_path / "v/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    ptxas = tmp_path / "v/lib/python3.11/site-packages/torch/bin/ptxas"
    ptxas.parent.mkdir(parents=True)
    ptxas.touch()
    return python


def test_torchs_ptxas_is_fixed_whatever_the_host_had(environment: Path) -> None:
    ptxas = str(environment.parent.parent / "lib/python3.11/site-packages/torch/bin/ptxas")
    result, overridden = pins.pinned({"TRITON_PTXAS_PATH": "/usr/local/cuda/bin/ptxas"}, environment)
    assert result == {"TRITON_PTXAS_PATH": ptxas, **pins.PROBING}
    assert f"set TRITON_PTXAS_PATH to `{ptxas}` (was `/usr/local/cuda/bin/ptxas`)" in overridden[-1].sentence()
    result, overridden = pins.pinned({}, environment)
    assert result == {"TRITON_PTXAS_PATH": ptxas, **pins.PROBING}
    assert "(was unset)" in overridden[-1].sentence()


def test_the_cpu_is_believed_rather_than_probed_in_each_process(environment: Path) -> None:
    result, overridden = pins.pinned({"TORCHINDUCTOR_VEC_ISA_OK": "0"}, environment)
    assert result["TORCHINDUCTOR_VEC_ISA_OK"] == "1"
    assert "set TORCHINDUCTOR_VEC_ISA_OK to `1` (was `0`)" in overridden[0].sentence()


def test_pinning_twice_is_pinning_once(environment: Path) -> None:
    once, _ = pins.pinned({**HOSTILE, **ORDINARY}, environment)
    assert pins.pinned(once, environment) == (once, ())


def test_a_user_without_a_name_gets_one_because_torch_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    result, overridden = pins.pinned({"PATH": "/usr/bin"})
    assert result == {"PATH": "/usr/bin", "USER": "uid54321"}
    assert "no passwd entry" in overridden[0].sentence()
    assert pins.pinned(result) == (result, ())


@given(st.dictionaries(st.from_regex(r"[A-Z][A-Z_]{0,20}", fullmatch=True), st.text(max_size=5)))
def test_nothing_is_invented_and_every_change_is_listed(environ: dict[str, str]) -> None:
    result, overridden = pins.pinned(environ)
    changed = {name for name in {*environ, *result} if environ.get(name) != result.get(name)}
    assert changed <= {override.name for override in overridden}
    assert set(result) <= set(environ)


def test_it_needs_nothing_but_the_standard_library() -> None:
    program = (
        "import sys; from env.cache import pins, places, store; print(sorted({'torch', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_variable_that_torch_and_triton_ask_for_where_they_are_configured_is_decided_upon() -> None:
    """A new torch brings new variables: each must be one that is taken away, or one that is known to be harmless."""
    torch = pytest.importorskip("torch")
    root = Path(torch.__file__).parent
    sources = [root / "_inductor/config.py", root / "_functorch/config.py", root / "_dynamo/config.py"]
    sources += [root / "compiler/config.py", root.parent / "triton/knobs.py"]
    asked = set()
    for source in sources:
        asked |= set(_variables(ast.parse(source.read_text(encoding="utf-8"))))
    assert len(asked) > 150
    known = {name for name in asked if pins.feeds(name) is not None} | pins_harmless(asked)
    # what compiles launchers, and where traces and ids are written
    left = asked - known - {"CC", "ROLE_RANK", "MAST_HPC_JOB_NAME", "PT2_COMPILE_ID_PREFIX"}
    assert left == set()


def pins_harmless(names: set[str]) -> set[str]:
    """Those that match a pattern of harmless ones."""
    import fnmatch

    return {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in pins.HARMLESS)}


def _variables(tree: ast.AST) -> list[str]:
    """Texts that look like variables where the environment, or a setting fed by it, is spelled out."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            texts = [argument for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            texts += [
                part
                for keyword in node.keywords
                if keyword.arg in ("env_name_force", "env_name_default")
                for part in ast.walk(keyword.value)
                if isinstance(part, ast.Constant)
            ]
            if "environ" in called or "getenv" in called or "env_" in called or called == "Config":
                found += [text.value for text in texts if isinstance(text.value, str) and text.value.isupper()]
        if (
            isinstance(node, ast.Subscript)
            and "environ" in ast.unparse(node.value)
            and isinstance(node.slice, ast.Constant)
        ):
            found.append(str(node.slice.value))
    return found
