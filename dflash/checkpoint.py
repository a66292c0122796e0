"""Training state on disk: whole or not there, checked before it is read, the newest few kept."""

from __future__ import annotations

import json
import re
import shutil
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from dflash import storage
from env.errors import Exit, Failure

MANIFEST = "manifest.json"
ANNOUNCED = ("TypedStorage is deprecated", "torch.distributed is (disabled|unavailable)")
"""torch's own warnings, of its planner and that one process saves alone, which is meant. Filtered by what they say, and
for good: `catch_warnings` is the process's, and a thread that leaves it while another is inside undoes the other's."""


def save(
    folder: Path, step: int, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, keep: int
) -> Path:
    """Write weights and optimizer state as `folder/step-NNNNNNNN` and drop all but the newest `keep`.

    Raises:
        Failure: Exit.STORAGE, when the disk refuses; earlier checkpoints are untouched.
    """
    _expect_warnings()
    return _write(folder, step, _state(model, optimizers), keep)


class Saver:
    """Saves in a thread of its own, over a copy on the CPU, so that training goes on meanwhile; one at a time.

    Where each process holds a share of the state, all of them save at the same steps, each its share, over a `group`
    that nothing else uses; its first process then makes the checkpoint whole.
    """

    def __init__(self, folder: Path, *, keep: int, group: dist.ProcessGroup | None = None) -> None:
        self._folder, self._keep, self._group = folder, keep, group
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    def save(self, step: int, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Copy the state and begin to write it as `save` does; waits for the one before.

        Raises:
            Failure: Exit.STORAGE, when the disk refused the one before.
        """
        self.wait()
        _expect_warnings()
        state = _copy(_state(model, optimizers))
        self._thread = threading.Thread(target=self._run, args=(step, state), name=f"saving step {step}")
        self._thread.start()

    def check(self) -> None:
        """Raise what the disk has refused so far; waits for nothing."""
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def wait(self) -> None:
        """Wait until everything is written; raises as `check` does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _run(self, step: int, state: dict[str, Any]) -> None:
        try:
            if self._group is None or self._group.rank() == 0:
                _write(self._folder, step, state, self._keep, self._group)
            else:
                _write_share(where(self._folder, step), state, self._group)
        except BaseException as error:  # noqa: BLE001  # raised in the thread that trains
            self._failed = error


def _expect_warnings() -> None:
    for message in ANNOUNCED:
        warnings.filterwarnings("ignore", message=message)


def _state(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    weights, moments = get_state_dict(model, list(optimizers))
    return {"model": weights, "optimizer": moments}


def _copy(value: Any) -> Any:
    """The same on the CPU, in memory of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy(part) for key, part in value.items()}
    return [_copy(part) for part in value] if isinstance(value, list) else value


def _write(folder: Path, step: int, state: dict[str, Any], keep: int, group: dist.ProcessGroup | None = None) -> Path:
    place = where(folder, step)
    with storage.new_folder(place) as beside:
        if group is not None:
            dist.broadcast_object_list([str(beside)], group=group, group_src=0)
        _save(state, beside, group)
        files = {
            file.name: {"size": file.stat().st_size, "sha256": storage.sha256(file)}
            for file in sorted(beside.iterdir())
        }
        (beside / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1), encoding="utf-8")
    for old in steps(folder)[:-keep]:
        shutil.rmtree(folder / _name(old))
    return place


def _write_share(place: Path, state: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Write this process's share into the folder that the first one has made."""
    beside: list[Any] = [None]
    dist.broadcast_object_list(beside, group=group, group_src=0)
    try:
        _save(state, Path(beside[0]), group)
    except OSError as error:
        raise storage.refusal(error, f"write `{place.name}`", place.parent) from error


def _save(state: dict[str, Any], beside: Path, group: dist.ProcessGroup | None) -> None:
    """Let torch write the state; its last word, over a group, comes when all have written."""
    try:
        save_state(state, checkpoint_id=beside, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise _behind(error) from error


def resume(folder: Path, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Load the newest checkpoint in place and return its step; 0 when there is none.

    Raises:
        Failure: Exit.INPUT, when a file of it is missing, cut short or changed; nothing has been loaded then.
    """
    saved = steps(folder)
    if not saved:
        return 0
    place = folder / _name(saved[-1])
    _verify(place, earlier=saved[:-1])
    weights, moments = get_state_dict(model, list(optimizers))
    _expect_warnings()
    load({"model": weights, "optimizer": moments}, checkpoint_id=place, no_dist=True)
    set_state_dict(model, list(optimizers), model_state_dict=weights, optim_state_dict=moments)
    return saved[-1]


def where(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return folder / _name(step)


def steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint, oldest first."""
    found = (re.fullmatch(r"step-(\d{8})", path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def _behind(error: CheckpointException) -> BaseException:
    """The disk's own error where there is one: torch's archive writer reports a full disk as a wrong position."""
    causes = [cause for cause, _ in error.failures.values()]
    while causes:
        cause: BaseException = causes.pop()
        if isinstance(cause, OSError):
            return cause
        causes += [deeper for deeper in (cause.__cause__, cause.__context__) if deeper is not None]
    return error


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _verify(place: Path, earlier: list[int]) -> None:
    way_back = f"; step {earlier[-1]} is the one before" if earlier else ""
    hint = f"remove it to go on from what is left: `rm -r {place}`{way_back}"
    try:
        files = json.loads((place / MANIFEST).read_text(encoding="utf-8"))["files"]
        promises = {name: (promised["size"], promised["sha256"]) for name, promised in files.items()}
        promises[".metadata"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Failure(Exit.INPUT, f"the checkpoint `{place}` has no readable {MANIFEST}", hint=hint) from None
    for name, (promised_size, promised_sha256) in promises.items():
        file = place / name
        if not file.is_file():
            raise Failure(Exit.INPUT, f"the checkpoint `{place}` lacks its file {name}", hint=hint)
        size = file.stat().st_size
        if size != promised_size:
            message = f"the checkpoint `{place}` is cut short: {name} has {size} bytes, {promised_size} were saved"
            raise Failure(Exit.INPUT, message, hint=hint)
        if storage.sha256(file) != promised_sha256:
            raise Failure(Exit.INPUT, f"the checkpoint `{place}` was changed: {name} has another sha256", hint=hint)
