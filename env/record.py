"""What a run ran in, written down without importing torch, and what differs between two such records.

Every launch makes one and the trainer keeps it in the run's folder. Nothing here may be secret: environment variables
are taken by a list of names, and addresses lose their credentials.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from env import drift, identity
from env.errors import Exit, Failure, report

FORMAT = 1
NAME = "environment.json"
"""What the record is called in a run's folder."""

# What enters compile keys, decides which compiler or library is found, or changes what a kernel does. HOME and the
# cache folders stand in here because torch's keys have held paths below them.
_NAMED = frozenset((
    "CC", "CXX", "CPP", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "HOME", "TMPDIR", "XDG_CACHE_HOME", "LANG", "LC_ALL",
    "PYTHONPATH", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONNOUSERSITE", "MALLOC_CONF",
    "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_TF32_OVERRIDE",
))  # fmt: skip
_PREFIXES = (
    "TRITON_", "TORCH", "PYTORCH_", "CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "OMP_", "KMP_", "MKL_", "GOMP_",
    "INDUCTOR_", "AOT_", "PTXAS_", "DFLASH_",
)  # fmt: skip
_SECRET = re.compile(r"(^|_)(TOKENS?|SECRETS?|PASS|PASSWD|PASSWORD|CREDENTIALS?|AUTH|APIKEY|KEY|COOKIE)(_|$)")
_HIDDEN = "(not recorded)"


def environment_record(
    variant: str,
    python: Path,
    drifts: Sequence[drift.Drift] = (),
    *,
    lock: Path | None = None,
    root: Path | None = None,
    allowed: bool = False,
    environ: Mapping[str, str] | None = None,
    host: Path = Path("/"),
) -> dict[str, Any]:
    """The environment of a run that is about to start in the interpreter `python`, ready to be written as JSON.

    `lock` gives it an `env_id`; `root` is the project's folder, whose revision is noted; `allowed` says that the
    drifts were let pass. `environ` are the variables that the run will have, and `host` is where `/proc` and `/sys`
    lie, for tests.

    Raises:
        Failure: the lock cannot be read or judged.
    """
    environ = os.environ if environ is None else environ
    who = drift.interpreter(python)
    site = who.sites[0] if who.sites else None
    torch = drift.torch_build(site) if site else {}
    packages = _packages(who.sites)
    driver, gpus = cards(host, environ)
    full = who.markers["python_full_version"]
    return {
        "format": FORMAT,
        "env_id": identity.env_id(lock, variant=variant, python=full) if lock else None,
        "variant": variant,
        "python": full,
        "abi": who.abi,
        "torch": torch.get("__version__") or packages.get("torch"),
        "torch_git": torch.get("git_version"),
        "cuda": torch.get("cuda"),
        "triton": packages.get("triton"),
        "driver": driver,
        "gpus": gpus,
        "host": {"machine": os.uname().machine, "kernel": os.uname().release, "cpu": _cpu(host)},
        "git": revision(root, environ) if root else {"revision": None, "clean": None},
        "drift_allowed": allowed,
        "drift": [{**asdict(item), "files": list(item.files)} for item in drifts],
        "environment": key_feeding(environ),
        "packages": packages,
    }


def key_feeding(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that matter to a compilation or a run, sorted, with nothing secret in them."""
    kept = {}
    for name in sorted(environ):
        if name in _NAMED or name.startswith(_PREFIXES):
            kept[name] = _HIDDEN if _SECRET.search(name) else _without_credentials(environ[name])
    return kept


def _without_credentials(value: str) -> str:
    """An address keeps its host and path only: user, password and query may be secrets."""
    value = re.sub(r"(?<=://)[^/@\s]*@", "", value)
    return re.sub(r"(?<=\S)(://[^\s?]*)\?\S*", r"\1", value)


def _packages(sites: Sequence[Path]) -> dict[str, str]:
    """Names and versions as the folders of metadata are called; the first folder on the path wins, as in an import."""
    found: dict[str, str] = {}
    for site in sites:
        for entry in sorted(site.glob("*.dist-info")):
            name, _, version = entry.name.removesuffix(".dist-info").partition("-")
            found.setdefault(drift.normalise(name), version)
    return dict(sorted(found.items()))


def _text(path: Path) -> str:
    """A file's text; empty when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cards(host: Path, environ: Mapping[str, str]) -> tuple[str | None, list[str]]:
    """The driver's version and the cards' names, all of the machine's: CUDA_VISIBLE_DEVICES is recorded beside."""
    driver = _text(host / "sys/module/nvidia/version").strip() or None
    if driver is None:
        match = re.search(r"\b([0-9]{3}\.[0-9.]+)\b", _text(host / "proc/driver/nvidia/version"))
        driver = match[1] if match else None
    cards = []
    for folder in (host / "proc/driver/nvidia/gpus").glob("*"):
        told = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", _text(folder / "information"), re.MULTILINE))
        if told.get("Model"):
            cards.append((told.get("Device Minor", ""), folder.name, told["Model"]))
    cards.sort(key=lambda card: (int(card[0]) if card[0].isdigit() else 0, card[1]))
    if driver and cards:
        return driver, [model for _, _, model in cards]
    return _smi(environ) or (driver, [])


def _smi(environ: Mapping[str, str]) -> tuple[str, list[str]] | None:
    """The same from `nvidia-smi`, which takes a second and so is asked only where the kernel does not tell."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [line.partition(",") for line in done.stdout.splitlines() if "," in line]
    return (rows[0][0].strip(), [name.strip() for _, _, name in rows]) if rows else None


def _cpu(host: Path) -> str | None:
    """The processor's name: kernels for CPUs are built for one instruction set."""
    match = re.search(r"^model name\s*:\s*(.+)$", _text(host / "proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else None


def revision(root: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """The project's commit, and whether its files are those of that commit; None for what cannot be told.

    An image has no `.git`: there `DFLASH_REVISION` names the commit that it was built from, `-dirty` at the end for a
    tree that was not clean.
    """
    git = {"GIT_OPTIONAL_LOCKS": "0", "PATH": environ.get("PATH", os.defpath), "HOME": environ.get("HOME", "/")}
    command = ["git", "-C", str(root), "status", "--porcelain=v2", "--branch", "--untracked-files=normal"]
    try:  # without optional locks, so that looking does not write
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env=git)
    except (OSError, subprocess.SubprocessError):
        told = environ.get("DFLASH_REVISION", "")
        commit = _head(root) or told.removesuffix("-dirty") or None
        known = commit is not None and told.removesuffix("-dirty") == commit
        return {"revision": commit, "clean": not told.endswith("-dirty") if known else None}
    lines = done.stdout.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "")
    changed = [line for line in lines if not line.startswith("#")]
    if not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        return {"revision": None, "clean": None}  # a checkout without a commit
    return {"revision": commit, "clean": not changed}


def _head(root: Path) -> str | None:
    """The commit of a checkout, read where there is no git to ask."""
    folder = root / ".git"
    if folder.is_file():  # a worktree
        folder = root / _text(folder).removeprefix("gitdir:").strip()
    head = _text(folder / "HEAD").strip()
    if not head.startswith("ref:"):
        return head or None
    ref = head.removeprefix("ref:").strip()
    common = folder / (_text(folder / "commondir").strip() or ".")
    packed = re.search(rf"^([0-9a-f]+) {re.escape(ref)}$", _text(common / "packed-refs"), re.MULTILINE)
    return _text(common / ref).strip() or (packed[1] if packed else None)


# ------------------------------------------------------------------------------------------------- kept, and compared


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record, whole or not at all.

    Raises:
        Failure: the folder cannot be written.
    """
    try:
        descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(record, file, indent=2)
                file.write("\n")
            Path(beside).chmod(0o644)
            Path(beside).replace(path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise Failure(Exit.STORAGE, f"`{path}` cannot be written: {error.strerror or error}") from error


def read(run: Path) -> dict[str, Any]:
    """The record of a run, from its folder or from the file itself.

    Raises:
        Failure: there is none, or it is not one.
    """
    path = run / NAME if run.is_dir() else run
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise Failure(Exit.INPUT, f"no environment record in `{run}`: {why}") from error
    if not isinstance(found, dict) or "format" not in found:
        raise Failure(Exit.INPUT, f"`{path}` is not an environment record")
    return found


@dataclass(frozen=True)
class Difference:
    """One value that two records do not share."""

    key: str
    """Where it stands: `environment.CXX`."""
    a: str | None
    """The first record's value; None: it has none."""
    b: str | None


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Every value in which two records differ, in the order of the records; empty: they ran in the same environment."""
    flat_a, flat_b = _flat(a), _flat(b)
    return [
        Difference(key, flat_a.get(key), flat_b.get(key))
        for key in dict.fromkeys((*flat_a, *flat_b))
        if flat_a.get(key) != flat_b.get(key)
    ]


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Values by dotted name. Drifts go by package; a value of None is as good as none.

    What was other in the second start of a run stands under `resumed.1`, and so on.
    """
    flat: dict[str, str] = {}
    for key, value in record.items():
        if key == "drift":
            for item in value or ():
                told = (f"{item['locked'] or 'not locked'} -> {item['found'] or 'not found'}", item.get("why", ""))
                flat[f"{prefix}drift.{item['name']}"] = ", ".join(filter(None, told))
        elif key == "resumed":
            for number, other in enumerate(value, start=1):
                flat.update(_flat(other, f"{key}.{number}."))
        elif isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        elif isinstance(value, list):
            flat[f"{prefix}{key}"] = ", ".join(map(str, value))
        elif value is not None:
            flat[f"{prefix}{key}"] = str(value).lower() if isinstance(value, bool) else str(value)
    return flat


def main(argv: Sequence[str] | None = None) -> int:
    """`nox -s doctor -- --compare RUN_A RUN_B`: print what differs between two runs' environments.

    A difference is an answer and no error: the exit code is 0 either way; `--json` prints a list that is empty when
    there is none.
    """
    parser = argparse.ArgumentParser(prog="compare", description="What differs between two runs' environments.")
    parser.add_argument("a", type=Path, metavar="RUN_A", help="a run's folder, or its environment.json")
    parser.add_argument("b", type=Path, metavar="RUN_B")
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")
    given = parser.parse_args(argv)
    try:
        differences = compare(read(given.a), read(given.b))
    except Failure as refused:
        return report(refused)
    if given.json:
        print(json.dumps([asdict(difference) for difference in differences], indent=2))
    elif not differences:
        print("no difference: both ran in the same environment")
    else:
        print("\n".join(table(differences, str(given.a), str(given.b))))
    return int(Exit.DONE)


def table(differences: Sequence[Difference], a: str, b: str) -> list[str]:
    """Lines with aligned columns; long values go below each other instead, so that they can be compared by eye."""
    short = [d for d in differences if max(len(d.a or ""), len(d.b or "")) <= _SHORT]
    rows = [("", a, b), *((d.key, d.a or "-", d.b or "-") for d in short)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{key:<{widths[0]}}  {x:<{widths[1]}}  {y}" for key, x, y in rows] if short else []
    for d in differences:
        if d not in short:
            lines += [d.key, f"  {a}: {d.a or '-'}", f"  {b}: {d.b or '-'}"]
    return lines


_SHORT = 44
"""Two such columns and a key fit on a terminal that is 120 wide."""


if __name__ == "__main__":
    sys.exit(main())
