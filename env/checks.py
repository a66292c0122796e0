"""The project's own checks, each in the environment that its lock describes: tests, lint, types."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from env import bootstrap, environment, variants
from env.building import say
from env.errors import Exit, Failure
from env.launch import Options, take
from env.variants import ROOT

EVERY = "--all-variants"


def tests(argv: Sequence[str]) -> int:
    """Run pytest in a variant's environment, or in each; what is not ours goes to pytest."""
    options, arguments = _take([word for word in argv if word != EVERY])
    matrix = variants.load()
    if EVERY in argv and options.variant is not None:
        raise Failure(Exit.USAGE, f"`{EVERY}` and `--variant {options.variant}` exclude each other")
    if EVERY not in argv:
        python = environment.ensure(matrix.variant(options.variant).name, ["dev"], options.python)
        _become(python, "pytest", arguments)
    rows = []
    for variant in matrix.variants.values():
        python = environment.ensure(variant.name, ["dev"], options.python)
        say(f"testing {variant.name} (torch {variant.torch})")
        start = time.monotonic()
        code = _call(python, "pytest", arguments)
        rows.append((variant, code, time.monotonic() - start))
        if code == Exit.INTERRUPTED:
            break
    print(f"\n{'variant':<9}{'torch':<9}{'CUDA':<7}{'seconds':>8}  result")
    for variant, code, seconds in rows:
        result = "passed" if code == 0 else f"failed (exit code {code})"
        print(f"{variant.name:<9}{variant.torch:<9}{variant.cuda:<7}{seconds:>8.0f}  {result}")
    return next((code for _, code, _ in rows if code != 0), 0)


def lint(argv: Sequence[str]) -> int:
    """Check style and format with ruff; `--fix` mends what can be mended."""
    options, arguments = _take(argv)
    if options.variant is not None:
        say(f"style and format need no torch, so `--variant {options.variant}` changes nothing here")
    python = environment.ensure(None, ["dev"], options.python)  # ruff needs no torch
    shape = [word for word in arguments if not word.startswith("-")] or ["."]
    checked = _call(python, "ruff", ["check", *arguments])
    formatted = _call(python, "ruff", ["format", *([] if "--fix" in arguments else ["--check"]), *shape])
    return checked or formatted


def typecheck(argv: Sequence[str]) -> int:
    """Check types with mypy, where torch and all the others are."""
    options, arguments = _take(argv)
    variant = variants.load().variant(options.variant)
    _become(environment.ensure(variant.name, ["dev"], options.python), "mypy", arguments)


def _take(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """As `launch.take`, without what only a launch heeds: an environment of ours follows its locks unasked."""
    options, arguments = take(argv)
    for name, given in (("--repair", options.repair), ("--allow-drift", options.allow_drift)):
        if given:
            said = f"`{name}` is of the environment that trains; that of the checks follows its locks by itself"
            raise Failure(Exit.USAGE, said, hint="leave it out; `nox -s train` heeds it")
    return options, arguments


def _become(python: Path, module: str, arguments: Sequence[str]) -> NoReturn:
    os.chdir(ROOT)
    bootstrap.become([str(python), "-m", module, *arguments], bootstrap.environment(os.environ))


def _call(python: Path, module: str, arguments: Sequence[str]) -> int:
    """Run a program as a child, for where another one follows; its exit code."""
    process = subprocess.Popen([python, "-m", module, *arguments], cwd=ROOT, env=bootstrap.environment(os.environ))
    try:
        return process.wait()
    except KeyboardInterrupt:  # the child got it, too, and has something to say before it goes
        process.wait()
        return int(Exit.INTERRUPTED)
    finally:
        if process.poll() is None:
            process.terminate()
