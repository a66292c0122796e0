from __future__ import annotations

import pytest
from clones import Clone
from wheelhouse import pin

from env.errors import Exit

TOOL = """
import os, sys
print(os.path.basename(os.path.dirname(os.path.dirname(sys.executable))), "{name}", *sys.argv[1:], flush=True)
sys.exit(int(os.environ.get("{name}_code".upper(), 0)))
"""


@pytest.fixture
def clone(clone: Clone) -> Clone:
    """A clone whose checkers say where they were run and how, and fail when told to."""
    names = ("pytest", "ruff", "mypy")
    tools = [(name, {f"{name}/__main__.py": TOOL.format(name=name)}) for name in names]
    pins = [pin(name, "1.0", clone.house.add(name, "1.0", files=files)) for name, files in tools]
    clone.write("requirements/dev.txt", "".join(pins))
    clone.write("requirements/cu132.txt", pin("torch", "2.15.0", clone.house.add("torch", "2.15.0")))
    return clone


def name(clone: Clone, variant: str) -> str:
    return clone.environment(variant).name


def test_tests_run_in_the_default_variant_s_environment_and_get_what_is_not_ours(clone: Clone) -> None:
    done = clone.env("tests", "-q", "tests/test_x.py", "-k", "this", PYTEST_CODE="5")
    assert done.stdout == f"{name(clone, 'cu130')}-dev pytest -q tests/test_x.py -k this\n"
    assert done.returncode == 5


def test_tests_run_in_another_variant_s_environment(clone: Clone) -> None:
    assert clone.env("tests", "--variant", "cu128").stdout == f"{name(clone, 'cu128')}-dev pytest\n"


def test_tests_run_on_each_torch_and_one_table_tells_how_it_went(clone: Clone) -> None:
    done = clone.env("tests", "--all-variants", "-x", PYTEST_CODE="1")
    lines = done.stdout.splitlines()
    assert lines[:3] == [f"{name(clone, variant)}-dev pytest -x" for variant in ("cu128", "cu130", "cu132")]
    assert [line.split()[:3] for line in lines[5:]] == [
        ["cu128", "2.10.0", "12.8"],
        ["cu130", "2.11.0", "13.0"],
        ["cu132", "2.15.0", "13.2"],
    ]
    assert all(line.endswith("failed (exit code 1)") for line in lines[5:])
    assert done.returncode == 1
    assert clone.env("tests", "--all-variants").returncode == 0
    both = clone.env("tests", "--all-variants", "--variant", "cu128")
    assert (both.returncode, both.stdout) == (Exit.USAGE, "")
    assert both.stderr == "error: `--all-variants` and `--variant cu128` exclude each other\n"


def test_lint_checks_style_and_format_without_any_torch(clone: Clone) -> None:
    done = clone.env("lint")
    place = f"py{name(clone, 'cu130').rpartition('py')[2]}-dev"
    assert done.stdout.splitlines() == [f"{place} ruff check", f"{place} ruff format --check ."]
    assert done.returncode == 0
    assert clone.env("lint", RUFF_CODE="1").returncode == 1


def test_lint_mends_what_it_can_when_asked(clone: Clone) -> None:
    done = clone.env("lint", "--fix", "env")
    assert [line.split()[1:] for line in done.stdout.splitlines()] == [
        ["ruff", "check", "--fix", "env"],
        ["ruff", "format", "env"],
    ]


def test_an_option_that_would_do_nothing_is_refused_or_said(clone: Clone) -> None:
    for session in ("tests", "lint", "typecheck"):
        for option in ("--repair", "--allow-drift"):
            done = clone.env(session, option)
            assert (done.returncode, done.stdout) == (Exit.USAGE, "")
            assert done.stderr.startswith(f"error: `{option}` is of the environment that trains; ")
    done = clone.env("lint", "--variant", "cu128")
    assert done.returncode == 0
    assert "style and format need no torch, so `--variant cu128` changes nothing here" in done.stderr


def test_types_are_checked_where_torch_is(clone: Clone) -> None:
    done = clone.env("typecheck", "env", MYPY_CODE="2")
    assert done.stdout == f"{name(clone, 'cu130')}-dev mypy env\n"
    assert done.returncode == Exit.USAGE
