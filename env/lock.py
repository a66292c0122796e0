"""Resolve what we ask for (requirements/*.in) into what we get (requirements/*.txt), every file hashed.

`requirements/locks.json` is the record beside the locks: what was asked when each was made, a digest of every pin, and
torch's own requirements. uv keeps the pins that it finds in its output file, so a lock edited to an older, valid
version would resolve to itself; only a record tells. And with it, checking needs neither network nor resolver.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from env import bootstrap, index, lint, variants
from env.building import run, say
from env.drift import Pin, normalise, read_lock
from env.errors import Exit, Failure, report
from env.variants import ROOT, Matrix, Variant

FOLDER = ROOT / "requirements"
RECORD = "locks.json"
HEADER = """\
# Written by `nox -s lock` from {name}.in; `nox -s lock -- --check` tells a stale lock and one edited by hand.
"""
DELEGATES = ("cuda-toolkit",)
"""Packages that torch leaves CUDA's exact pins to: its `cuda-toolkit[cublas,…]==13.0.2` says which cuBLAS."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What is remembered about one lock."""

    inputs: tuple[str, ...]
    """What was asked: requirement lines and the Pythons and platforms that the lock serves, sorted."""

    pins: Mapping[str, str]
    """`name==version ; marker` to a digest of its hashes."""

    requires: Mapping[str, Sequence[str]]
    """`Requires-Dist` of torch and its delegates; empty for locks without torch."""


def main(argv: Sequence[str]) -> int:
    """`nox -s lock`: write the locks, or check them."""
    parser = argparse.ArgumentParser(prog="nox -s lock --", description="Resolve requirements/*.in into hashed locks.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--check", action="store_true", help="change nothing; fail on a lock that is stale, edited or wrong"
    )
    what.add_argument("--cross-check", action="store_true", help="change nothing; let pip-tools resolve the same sets")
    what.add_argument("--upgrade", action="store_true", help="move every package to the newest version that fits")
    what.add_argument("--upgrade-package", metavar="NAME", action="append", help="move this package only; repeatable")
    options = parser.parse_args(argv)
    try:
        if options.check:
            return check(FOLDER)
        if options.cross_check:
            return cross_check(FOLDER)
        return write(FOLDER, upgrade=options.upgrade, packages=options.upgrade_package or [])
    except Failure as failure:
        return report(failure)


def names(matrix: Matrix) -> list[str]:
    """Every lock, in the order in which they are made: the default variant leads, the others follow its versions."""
    return [matrix.default, *(name for name in matrix.variants if name != matrix.default), "dev", "tools", "images"]


def variant_input(variant: Variant) -> str:
    """The text of `requirements/<variant>.in`, which derives from the matrix."""
    return f"# Written by `nox -s lock` from env/variants.toml.\n-r train.in\ntorch=={variant.torch}\n"


# ------------------------------------------------------------------------------------------------------------ writing


def write(folder: Path, *, upgrade: bool = False, packages: Sequence[str] = ()) -> int:
    """Make every lock anew, keeping the versions that are there unless told otherwise, and print what moved.

    All of them or none: the locks are replaced when each has been resolved and linted. A damaged lock is made anew from
    the record, a damaged record from nothing.
    """
    matrix = variants.load()
    for name in names(matrix):
        inputs(folder, name, matrix)  # refuses what is not there
    records = _known_records(folder)
    before = {name: _known_pins(folder, name, records.get(name)) for name in names(matrix)}
    known = {pin.name for pins in before.values() for pin in pins}
    for package in packages:
        if normalise(package) not in known:
            hint = "what is asked for stands in requirements/*.in"
            raise Failure(Exit.USAGE, f"no lock holds `{package}`", hint=hint)
    for name in (*index.MORE_INDEXES, *index.MORE_WHEELS):
        if os.environ.get(name):
            say(f"{name} has no say here: locks are made from the main index alone")
    seeds = {name: [] if upgrade else _untouched(before[name], records.get(name)) for name in before}
    with tempfile.TemporaryDirectory(prefix="dflash-lock-") as scratch:
        work = _workplace(Path(scratch), folder, matrix)
        uv = bootstrap.ensure_tools().with_name("uv")
        environ = index.uv_environment(os.environ, index.pip_settings(uv.with_name("python")), only_main_index=True)
        made = {}
        for name in names(matrix):
            say(f"resolving {name}")
            _compile(work, name, matrix, seeds[name], packages, (uv, environ))
            made[name] = _remember(work, name, matrix, records.get(name))
        texts = {name: (work / f"{name}.txt").read_text(encoding="utf-8") for name in made}
    for name, record in made.items():
        if name in matrix.variants:
            _replace(folder / f"{name}.in", variant_input(matrix.variants[name]))
        _replace(folder / f"{name}.txt", HEADER.format(name=name) + texts[name])
        for move in moves(before[name], read_lock(folder / f"{name}.txt")):
            print(f"{name}: {move}")
        records[name] = record
    _replace(folder / RECORD, _encode(records))
    return int(Exit.DONE)


def _workplace(scratch: Path, folder: Path, matrix: Matrix) -> Path:
    """A copy of what is asked for, with a project file that names the platforms: uv reads them nowhere else."""
    environments = [f"sys_platform == 'linux' and platform_machine == '{machine}'" for machine in matrix.platforms]
    last = matrix.python[-1].split(".")
    ceiling = f"python_full_version < '{last[0]}.{int(last[1]) + 1}'"
    lines = ",\n".join(f'  "{environment} and {ceiling}"' for environment in environments)
    (scratch / "pyproject.toml").write_text(f"[tool.uv]\nenvironments = [\n{lines}\n]\n", encoding="utf-8")
    for source in folder.glob("*.in"):
        (scratch / source.name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    for variant in matrix.variants.values():
        (scratch / f"{variant.name}.in").write_text(variant_input(variant), encoding="utf-8")
    return scratch


def _compile(
    work: Path,
    name: str,
    matrix: Matrix,
    seeds: Sequence[Pin],
    packages: Sequence[str],
    uv: tuple[Path, Mapping[str, str]],
) -> None:
    """Let uv write one lock in the workplace; it prefers the versions that its output file holds, and their hashes."""
    lock = work / f"{name}.txt"
    if name in matrix.variants and name != matrix.default:  # the variants agree wherever torch lets them
        leading = read_lock(work / f"{matrix.default}.txt")
        taken = {pin.name for pin in leading}
        seeds = [*leading, *(pin for pin in seeds if pin.name not in taken)]
    lock.write_text("".join(map(_render, seeds)), encoding="utf-8")
    options = ["--quiet", "--universal", "--generate-hashes", "--no-build", "--no-header"]
    options += ["--python-version", matrix.python[0], *(f"--upgrade-package={package}" for package in packages)]
    run([str(uv[0]), "pip", "compile", *options, f"{name}.in", "-o", lock.name], uv[1], cwd=work)


def _remember(work: Path, name: str, matrix: Matrix, before: Record | None) -> Record:
    """Lint a lock that was just written, and return what is to be remembered about it."""
    pins = read_lock(work / f"{name}.txt")
    asked = [pin for pin in pins if name in matrix.variants and pin.name in {"torch", *DELEGATES}]
    if before and before.requires and all(before.pins.get(key) == it for key, it in _digests(asked).items()):
        requires = before.requires
    else:
        requires = _requires(asked)
    complaints = _lint(work, name, requires, matrix)
    if complaints:
        raise Failure(Exit.LOCK, f"uv's set for {name} is not one that we can use", details=complaints)
    return Record(inputs=inputs(work, name, matrix), pins=_digests(pins), requires=requires)


def _requires(pins: Sequence[Pin]) -> dict[str, list[str]]:
    """What torch and its delegates require, from the index's metadata of their wheels for Linux on x86_64.

    pip is asked, since uv has no command that prints them. For one platform, whatever this machine is: the record must
    not depend on who makes the lock.
    """
    if not pins:
        return {}
    wanted = [f"{pin.name}=={pin.version}" for pin in pins]
    with tempfile.TemporaryDirectory(prefix="dflash-lock-") as scratch:
        report_file = Path(scratch) / "report.json"
        pip = [str(bootstrap.ensure_tools()), "-m", "pip", "install"]
        which = ["--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64", "--python-version", "3.11"]
        options = ["--dry-run", "--no-deps", "--ignore-installed", "--target", scratch, "--report", str(report_file)]
        run([*pip, *which, *options, *wanted], bootstrap.pip_environment(os.environ), show=False)
        installs = json.loads(report_file.read_text(encoding="utf-8"))["install"]
    return {normalise(each["metadata"]["name"]): each["metadata"].get("requires_dist", []) for each in installs}


def moves(before: Sequence[Pin], after: Sequence[Pin]) -> Iterator[str]:
    """What differs between two states of a lock, a line a package."""
    old, new = _versions(before), _versions(after)
    for name in sorted(old.keys() | new.keys()):
        if name not in old:
            yield f"+ {name} {new[name]}"
        elif name not in new:
            yield f"- {name} {old[name]}"
        elif old[name] != new[name]:
            yield f"{name} {old[name]} -> {new[name]}"


def _versions(pins: Sequence[Pin]) -> dict[str, str]:
    """Each package's version; several, where Pythons differ, in one text."""
    versions: dict[str, set[str]] = {}
    for pin in pins:
        versions.setdefault(pin.name, set()).add(pin.version)
    return {name: " and ".join(sorted(found)) for name, found in versions.items()}


def _render(pin: Pin) -> str:
    marker = f" ; {pin.marker}" if pin.marker else ""
    return f"{pin.name}=={pin.version}{marker}" + "".join(f" \\\n    --hash={digest}" for digest in pin.hashes) + "\n"


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all; one that says so already keeps its time stamp."""
    try:
        if _says(path, text):
            return
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        raise Failure(Exit.STORAGE, f"cannot write {path}: {error.strerror}") from error


def _says(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()


# ------------------------------------------------------------------------------------------------------------- record


def inputs(folder: Path, name: str, matrix: Matrix) -> tuple[str, ...]:
    """What a lock is asked to hold and to serve, sorted; comments and order decide nothing."""
    if name in matrix.variants:
        lines = [*_requirements(folder / "train.in"), f"torch=={matrix.variants[name].torch}"]
    else:
        lines = _requirements(folder / f"{name}.in")
    served = [*(f"Python {python}" for python in matrix.python), *(f"Linux {machine}" for machine in matrix.platforms)]
    return tuple(sorted([*lines, *served]))


def _requirements(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        hint = f"`git checkout -- requirements/{path.name}` brings it back"
        raise Failure(Exit.LOCK, f"what is asked for in {path} cannot be read: {why}", hint=hint) from error
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line]


def _digests(pins: Sequence[Pin]) -> dict[str, str]:
    return {_key(pin): _digest(pin) for pin in pins}


def _digest(pin: Pin) -> str:
    return hashlib.sha256("\n".join(pin.hashes).encode()).hexdigest()[:16]


def _key(pin: Pin) -> str:
    return f"{pin.name}=={pin.version} ; {pin.marker}" if pin.marker else f"{pin.name}=={pin.version}"


def _untouched(pins: Sequence[Pin], record: Record | None) -> list[Pin]:
    """The pins that are as they were locked: what was edited by hand has no say in the next lock.

    Those without hashes come from the record itself.
    """
    recorded = record.pins if record else {}
    return [pin for pin in pins if not pin.hashes or recorded.get(_key(pin)) == _digest(pin)]


def _pins(folder: Path, name: str) -> tuple[Pin, ...]:
    path = folder / f"{name}.txt"
    return read_lock(path) if path.exists() else ()


def _known_pins(folder: Path, name: str, record: Record | None) -> tuple[Pin, ...]:
    """A lock's pins; of one that cannot be read, those that its record knows, without their hashes."""
    try:
        return _pins(folder, name)
    except Failure as damaged:
        say(f"{damaged.message}; {name} is made anew{' from the record' if record else ''}")
    pins = []
    for key in record.pins if record else ():
        pin, _, marker = key.partition(" ; ")
        package, _, version = pin.partition("==")
        pins.append(Pin(package, version, marker, (), ()))
    return tuple(pins)


def _known_records(folder: Path) -> dict[str, Record]:
    """What is remembered about the locks, for making them; nothing when that cannot be read."""
    try:
        return read_records(folder)
    except Failure as damaged:
        say(f"{damaged.message}; without it no version counts as locked, and each may move")
        return {}


def read_records(folder: Path) -> dict[str, Record]:
    """What is remembered about the locks; {} where nothing is."""
    path = folder / RECORD
    if not path.exists():
        return {}
    try:
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: Record(inputs=tuple(row["inputs"]), pins=dict(row["pins"]), requires=dict(row["requires"]))
            for name, row in table.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Failure(Exit.LOCK, f"{path} is not what `nox -s lock` wrote: {error}", hint="`nox -s lock`") from error


def _encode(records: Mapping[str, Record]) -> str:
    table = {
        name: {"inputs": list(record.inputs), "pins": dict(record.pins), "requires": dict(record.requires)}
        for name, record in records.items()
    }
    return json.dumps(table, indent=1, sort_keys=True) + "\n"


# ----------------------------------------------------------------------------------------------------------- checking


def check(folder: Path) -> int:
    """Fail on a lock that is stale, edited by hand or wrong, with each difference; needs no network."""
    matrix = variants.load()
    records = read_records(folder)
    wrong = {name: _differences(folder, name, records.get(name), matrix) for name in names(matrix)}
    wrong = {name: lines for name, lines in wrong.items() if lines}
    if wrong:
        raise Failure(
            Exit.LOCK,
            f"{_listed(wrong)} {'is' if len(wrong) == 1 else 'are'} not what `nox -s lock` writes",
            details=[f"{name}: {line}" for name, lines in wrong.items() for line in lines],
            hint="`nox -s lock` writes the locks anew, `git diff requirements` shows what it changed",
        )
    print(f"{_listed(names(matrix))}: as locked, and right for Python {', '.join(matrix.python)}")
    return int(Exit.DONE)


def _differences(folder: Path, name: str, record: Record | None, matrix: Matrix) -> list[str]:
    """Everything in which one lock is not what it should be."""
    if record is None or not (folder / f"{name}.txt").exists():
        return ["never locked"]
    lines = []
    if name in matrix.variants and not _says(folder / f"{name}.in", variant_input(matrix.variants[name])):
        lines.append(f"{name}.in is not what env/variants.toml says (torch=={matrix.variants[name].torch})")
    asked = inputs(folder, name, matrix)
    lines += [f"stale: `{line}` is asked for since it was locked" for line in asked if line not in record.inputs]
    lines += [f"stale: `{line}` is no longer asked for" for line in record.inputs if line not in asked]
    pins = read_lock(folder / f"{name}.txt")
    found = _digests(pins)
    lines += [f"edited: `{key}` was locked and is gone" for key in record.pins if key not in found]
    lines += [f"edited: `{key}` was never locked" for key in found if key not in record.pins]
    lines += [f"edited: hashes of `{key}`" for key in found if record.pins.get(key, found[key]) != found[key]]
    lines += [f"edited: line {line} is an option, and a lock has pins only" for line in _options(folder, name)]
    return lines + _lint(folder, name, record.requires, matrix)


def _options(folder: Path, name: str) -> list[int]:
    """The lines that say how to install, such as `--extra-index-url`: reading a lock for its pins passes them over."""
    lines = map(str.lstrip, (folder / f"{name}.txt").read_text(encoding="utf-8").splitlines())
    return [n for n, line in enumerate(lines, start=1) if line.startswith("-") and not line.startswith("--hash=")]


def _lint(folder: Path, name: str, requires: Mapping[str, Sequence[str]], matrix: Matrix) -> list[str]:
    pins = read_lock(folder / f"{name}.txt")
    if name in matrix.variants:
        return lint.lint_variant(pins, requires, matrix.variants[name], matrix)
    complaints = lint.lint(pins, matrix)
    if name == "dev":
        for other in matrix.variants:
            complaints += lint.lint_together(pins, _pins(folder, other), (name, other), matrix)
    return complaints


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


# ----------------------------------------------------------------------------------------------------- second opinion


def cross_check(folder: Path) -> int:
    """Let pip-tools resolve each variant for this Python and platform, and compare: two resolvers must agree."""
    matrix = variants.load()
    here = [each for each in lint.served(matrix) if _is_here(each)]
    if not here:
        raise Failure(Exit.HOST, f"the locks do not serve this machine ({sys.platform}, {platform.machine()})")
    for name in matrix.variants:
        mine = {pin.name: pin.version for pin in lint.chosen(read_lock(folder / f"{name}.txt"), here[0]).values()}
        theirs = _resolve_with_pip_tools(folder, name, mine, matrix)
        lines = [
            f"{package}: uv {mine.get(package, 'leaves it out')}, pip-tools {theirs.get(package, 'leaves it out')}"
            for package in sorted(mine.keys() | theirs.keys())
            if mine.get(package) != theirs.get(package)
        ]
        if lines:
            raise Failure(Exit.LOCK, f"uv and pip-tools disagree about {name}", details=lines)
        print(f"{name}: pip-tools accepts the same {len(mine)} packages")
    return int(Exit.DONE)


def _is_here(markers: Mapping[str, str]) -> bool:
    return (
        sys.platform == "linux"
        and markers["platform_machine"] == platform.machine()
        and markers["python_version"] == bootstrap.python_version()
    )


def _resolve_with_pip_tools(folder: Path, name: str, mine: Mapping[str, str], matrix: Matrix) -> dict[str, str]:
    say(f"resolving {name} with pip-tools")
    with tempfile.TemporaryDirectory(prefix="dflash-lock-") as scratch:
        work = _workplace(Path(scratch), folder, matrix)
        constraints = work / "constraints.txt"
        constraints.write_text("".join(f"{one}=={version}\n" for one, version in mine.items()), encoding="utf-8")
        command = [str(bootstrap.ensure_tools()), "-m", "piptools", "compile", "--no-header", "--no-annotate"]
        command += ["--allow-unsafe", "--strip-extras", "--pip-args", "--only-binary :all:"]
        command += ["-c", constraints.name, "-o", "theirs.txt", f"{name}.in"]
        try:
            run(command, bootstrap.pip_environment(os.environ), cwd=work, show=False)
        except Failure as failure:
            if failure.code != Exit.LOCK:
                raise
            raise Failure(Exit.LOCK, f"pip-tools does not accept the set of {name}", details=failure.details) from None
        lines = _requirements(work / "theirs.txt")
    # It also writes down the options and settings that it ran with.
    pins = [line.partition("==") for line in lines if not line.startswith("-")]
    return {normalise(name): version for name, _, version in pins}
