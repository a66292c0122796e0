"""A run's folder: what a run was given, what it measured, and how a rerun finds its place in it."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.utils.tensorboard.writer import SummaryWriter

from dflash import config, storage
from env.errors import Exit, Failure

ENVIRONMENT = "DFLASH_ENVIRONMENT"
"""Names the environment record that the launcher wrote; a trainer started without one says so."""

GIVEN = "given.json"
"""What decides a run's numbers: a rerun with anything else is refused. A target goes by its weights, see `TARGET`."""

TARGET = "target.json"
"""The digest of the weights of a target that was named."""

RECORD = "environment.json"
"""The environment that a run began in; what was other in a later start stands there under `resumed`."""


def choose(parent: Path, name: str, given: dict[str, Any]) -> Path:
    """The newest unfinished run of that name that was given the same, or else a new folder's path.

    Raises:
        Failure: Exit.STORAGE, when the parent cannot be read.
    """
    pattern = re.compile(re.escape(name) + r"(?:-(\d+))?")
    try:
        matches = ((pattern.fullmatch(path.name), path) for path in parent.glob(f"{name}*"))
        found = {int(match[1] or 1): path for match, path in matches if match}
    except OSError as error:
        raise storage.refusal(error, "look for runs", parent) from error
    if found:
        newest = found[max(found)]
        if not finished(newest) and _was_given(newest) == _placed(given):
            return newest
    number = max(found, default=0) + 1
    return parent / (name if number == 1 else f"{name}-{number}")


def finished(folder: Path) -> bool:
    """Whether a run has come to its end."""
    return (folder / "summary.json").exists()


@contextmanager
def occupied(folder: Path, settings: config.Config, given: dict[str, Any]) -> Iterator[bool]:
    """Hold a run's folder, made if need be, against a second trainer; yields whether the run had been begun before.

    What writers that were killed have left half-written is removed.

    Raises:
        Failure: Exit.STORAGE, when the folder cannot be written; Exit.USAGE, when another process trains in it, or it
            belongs to a run that was given something else; Exit.DRIFT, when that run began in another environment.
    """
    message = f"another process is training in `{folder}`"
    busy = Failure(Exit.USAGE, message, hint="name another folder with `--run`")
    with storage.held(folder / ".lock", "keep a run", busy):
        before, now = _was_given(folder), _placed(given)
        if before is not None and before.get("target") and now.get("target") and (folder / TARGET).exists():
            before["target"] = now["target"]  # whether it is the same one, its weights say: `keep_target`
        if before is not None and before != now:
            raise Failure(
                Exit.USAGE,
                f"`{folder}` holds a run that was given something else",
                details=list(_differences(before, now)),
                hint="name another folder with `--run`, or give the same again to resume",
            )
        if before is None:
            storage.write(folder / "config.json", _json(config.to_tables(settings)))
            write_json(folder / RECORD, _handed())
            storage.write(folder / GIVEN, _json(given))
        else:
            _go_on_in(folder, _handed())
            for place in (folder, folder / "checkpoints", folder / "samples", *folder.glob("target-training-*")):
                storage.sweep(place)
        yield before is not None


def keep_target(folder: Path, name: str, sha256: str) -> None:
    """Hold a run to the weights of the target that it began with, whatever path they are read from.

    Args:
        folder: the run's, which is held.
        name: what the target is called now.
        sha256: its weights' (`target.digest`).

    Raises:
        Failure: Exit.USAGE, when the run began with others; Exit.STORAGE, when the disk refuses.
    """
    kept = _read(folder / TARGET)
    if kept is None:
        write_json(folder / TARGET, {"sha256": sha256})
    elif kept.get("sha256") != sha256:
        raise Failure(
            Exit.USAGE,
            f"the target `{name}` is not the one that the run in `{folder}` began with",
            details=[f"sha256 of its weights: was {kept.get('sha256')}, is {sha256}"],
            hint="name another folder with `--run`, or give the same target again to resume",
        )


def environment(folder: Path) -> dict[str, Any]:
    """The environment record that a run keeps, with what was other in later starts."""
    return _read(folder / RECORD) or {}


def drifted(folder: Path) -> str:
    """What every status line of a run must say of its environments; empty when each start's was the same locked one."""
    return _status(environment(folder))


def drifted_now() -> str:
    """What every status line of a program without a run's folder must say about its environment."""
    handed = os.environ.get(ENVIRONMENT)
    return _status((_read(Path(handed)) if handed else None) or {})


def _status(record: dict[str, Any]) -> str:
    starts = [record, *record.get("resumed", [])]
    if any(start.get("drift") for start in starts):
        return "environment drifted"
    began = record.get("env_id")
    seen = {start.get("env_id", began) for start in starts}
    if len(seen - {None}) > 1:
        return "environment changed"
    return "environment not checked" if None in seen else ""


def caches(folder: Path) -> dict[str, Any]:
    """What the compile caches answered in the newest start that trained; empty when none has."""
    return _read(folder / "caches.json") or {}


class Metrics:
    """Numbers of each step: JSON lines that are the same for the same inputs, and TensorBoard for the eye."""

    def __init__(self, folder: Path, name: str, step: int) -> None:
        """Go on after `step`; lines past it come from a run that died before its next checkpoint."""
        path = folder / f"{name}.jsonl"
        try:
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            _require_whole(path, lines[:step], step)
            storage.write(path, b"".join(lines[:step]))
            self._file = path.open("ab", buffering=0)
            self._board = SummaryWriter(str(folder / "tensorboard" / name), purge_step=step + 1)
        except OSError as error:
            raise storage.refusal(error, "keep metrics", folder) from error
        self._place = folder

    def add(self, step: int, numbers: dict[str, Any], timing: dict[str, float] | None = None) -> None:
        """Append one step's numbers; `timing` goes to TensorBoard only, since it differs between equal runs.

        Raises:
            Failure: Exit.STORAGE, when the disk refuses.
        """
        try:
            self._file.write(json.dumps({"step": step, **numbers}).encode() + b"\n")
            for key, value in {**numbers, **(timing or {})}.items():
                if isinstance(value, float | int):
                    self._board.add_scalar(key, value, step)
        except OSError as error:
            raise storage.refusal(error, "keep metrics", self._place) from error

    def close(self) -> None:
        """Write out what is buffered."""
        self._file.close()
        self._board.close()


class Phases:
    """Seconds that each phase of a run took, over all its starts."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "timing.json"
        self.seconds: dict[str, float] = _read(self._path) or {}

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Add the block's seconds to the phase `name`, also when it ends early."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - begun)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to the phase `name`."""
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 3)
        storage.write(self._path, _json(self.seconds))


def write_json(path: Path, content: Any) -> None:
    """Write a value as readable JSON, atomically.

    Raises:
        Failure: Exit.STORAGE, when the disk refuses.
    """
    storage.write(path, _json(content))


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=1, sort_keys=False).encode() + b"\n"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise Failure(Exit.INPUT, f"`{path}` cannot be read: {error}", hint="name another folder: `--run`") from None
    if not isinstance(content, dict):
        message = f"`{path}` cannot be read: it holds a {type(content).__name__}, not an object"
        raise Failure(Exit.INPUT, message, hint="name another folder: `--run`")
    return content


def _placed(given: dict[str, Any]) -> dict[str, Any]:
    """The same with a target's folder by its place, however that is spelled."""
    target = given.get("target")
    if isinstance(target, str) and os.path.isdir(target):  # noqa: PTH112  # unlike `Path.is_dir`, it never raises
        return {**given, "target": os.path.realpath(target)}
    return given


def _was_given(folder: Path) -> dict[str, Any] | None:
    """What a run was given, as `_placed` has it; keys that its configuration did not know yet have their defaults."""
    before = _read(folder / GIVEN)
    if before is not None and isinstance(before.get("config"), dict):
        with suppress(Failure):  # one that is no configuration any more differs as it is
            before["config"] = config.to_tables(config.parse(before["config"], str(folder / GIVEN)))
    return None if before is None else _placed(before)


def _require_whole(path: Path, lines: Sequence[bytes], step: int) -> None:
    try:
        numbers = [json.loads(line)["step"] for line in lines]
    except (ValueError, TypeError, KeyError, RecursionError):
        numbers = []
    if numbers != list(range(1, step + 1)):
        raise Failure(
            Exit.INPUT,
            f"`{path}` was damaged: it does not have one line for each of the {step} steps that were trained",
            hint="begin anew in another folder: `--run`",
        )


def _handed() -> dict[str, Any]:
    """The record of the environment that this start runs in."""
    handed = os.environ.get(ENVIRONMENT)
    if handed is None:
        return {"env_id": None, "drift": [], "note": "started without the launcher, compared with no lock"}
    record = _read(Path(handed))
    if record is None:
        raise Failure(Exit.INPUT, f"{ENVIRONMENT} names `{handed}`, which does not exist")
    return record


def _go_on_in(folder: Path, now: dict[str, Any]) -> None:
    """Add to a run's record what is other in this start; another locked set is refused, unless that was asked for."""
    began = environment(folder)
    earlier = began.pop("resumed", [])
    old, new = began.get("env_id"), now.get("env_id")
    if old and new and old != new and not now.get("drift_allowed"):
        keys = ("variant", "python", "torch", "env_id")
        was, is_ = ({key: record.get(key) for key in keys} for record in (began, now))
        raise Failure(
            Exit.DRIFT,
            f"the run in `{folder}` began in another environment than this one",
            details=list(_differences(was, is_)),
            hint=f"{_back(was, is_)}`--allow-drift` goes on in this one and records that; `--run` names another folder",
        )
    other = _other(began, now)
    if other and other not in earlier:
        write_json(folder / RECORD, {**began, "resumed": [*earlier, other]})


def _back(began: dict[str, Any], now: dict[str, Any]) -> str:
    """How to get the environment that a run began in, as far as options of the launcher can say it."""
    was, python = (str(record["python"] or "").split(".")[:2] for record in (began, now))
    options = [f"--variant {began['variant']}"] if began["variant"] and began["variant"] != now["variant"] else []
    options += [f"--python {'.'.join(was)}"] if any(was) and was != python else []
    command = " ".join(["nox -s train --", *options])
    return f"`{command}` goes on in the one that it began in; " if options else ""


def _other(began: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Values that are other than they were, tables by their entries; None for what there is no more."""
    found = {}
    for key in dict.fromkeys((*began, *now)):
        old, new = began.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            old, new = {}, _other(old, new)
        if old != new:
            found[key] = new
    return found


def _differences(before: dict[str, Any], now: dict[str, Any], place: str = "") -> Iterator[str]:
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{place}{key}.")
        elif old != new:
            yield f"{place}{key}: was {json.dumps(old)}, is {json.dumps(new)}"
