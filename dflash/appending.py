"""A file that grows by whole pieces: killed at any moment, it goes on after the last one.

Until it is whole it is called `NAME.partial`. `NAME.json` beside it says what it is made of, how long it is, its
sha256, and what its maker needs to go on.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from dflash import storage
from env.errors import Exit, Failure


class Appended:
    """The file and its journal; to be used while it is `occupied`."""

    def __init__(self, out: Path, key: dict[str, Any], state: dict[str, Any]) -> None:
        """Find what an earlier process left, and cut off what it had begun beyond its last whole piece.

        Args:
            out: the file.
            key: all that decides its content, as plain data.
            state: what the maker begins with.

        Raises:
            Failure: Exit.USAGE, when what is there was made of something else; Exit.INPUT, when it was changed.
        """
        self.out, self.key, self.state = out, key, state
        self.partial, self.journal = out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.json")
        self.whole = out.exists()
        self._digest = hashlib.sha256()
        self._bytes = 0
        record = self._record()
        if record is None and self.whole:
            message = f"`{out}` is there already, and nothing says what it was made of"
            raise Failure(Exit.USAGE, message, hint="name another file with `--out`, or remove it")
        if record is None:
            self.partial.unlink(missing_ok=True)
            return
        if record["key"] != key:
            raise Failure(
                Exit.USAGE,
                f"`{out if self.whole else self.partial}` was made of something else",
                details=_differences(record["key"], key),
                hint=f"name another file with `--out`, or remove it: `{self._remove()}`",
            )
        self._verify(out if self.whole else self.partial, record)
        self.state = record["state"]

    def append(self, content: bytes, state: dict[str, Any]) -> None:
        """Add a piece; once this returns it is there whatever happens.

        Raises:
            Failure: Exit.STORAGE, when the disk refuses.
        """
        try:
            with self.partial.open("ab") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise storage.refusal(error, f"write `{self.out.name}`", self.out.parent) from error
        self._digest.update(content)
        self._bytes += len(content)
        record = {"key": self.key, "bytes": self._bytes, "sha256": self._digest.hexdigest(), "state": state}
        storage.write(self.journal, json.dumps(record).encode())

    def finish(self, state: dict[str, Any]) -> None:
        """Give the file its name.

        Raises:
            Failure: Exit.STORAGE, when the disk refuses.
        """
        self.append(b"", state)
        try:
            self.partial.rename(self.out)
            storage.sync(self.out.parent)
        except OSError as error:
            raise storage.refusal(error, f"write `{self.out.name}`", self.out.parent) from error
        self.whole = True

    def _record(self) -> dict[str, Any] | None:
        try:
            record = json.loads(self.journal.read_bytes())
            dict(record["key"]), dict(record["state"]), int(record["bytes"]), str(record["sha256"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            hint = f"remove it, and all is written anew: `{self._remove()}`"
            raise Failure(Exit.INPUT, f"`{self.journal}` was changed", hint=hint) from None
        return dict(record)

    def _verify(self, path: Path, record: dict[str, Any]) -> None:
        there = path.stat().st_size if path.exists() else 0
        if there < record["bytes"]:
            message = f"`{path}` is cut short: it has {there} bytes, {record['bytes']} were written"
            raise Failure(Exit.INPUT, message, hint=f"remove it: `{self._remove()}`")
        if path.exists() and not self.whole:
            os.truncate(path, record["bytes"])
        if path.exists():
            with path.open("rb") as file:
                while piece := file.read(1 << 20):
                    self._digest.update(piece)
        if self._digest.hexdigest() != record["sha256"]:
            raise Failure(
                Exit.INPUT,
                f"`{path}` was changed since it was written",
                hint=f"name another file with `--out`, or remove it: `{self._remove()}`",
            )
        self._bytes = record["bytes"]

    def _remove(self) -> str:
        return f"rm -f {self.out} {self.partial} {self.journal}"


def occupied(out: Path) -> AbstractContextManager[None]:
    """Hold a file against a second writer.

    Raises:
        Failure: Exit.USAGE, when there is one; Exit.STORAGE, when the folder cannot be written.
    """
    busy = Failure(Exit.USAGE, f"another process writes `{out}`", hint="name another file with `--out`")
    return storage.held(out.with_name(f".{out.name}.lock"), f"write `{out.name}`", busy)


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    return [f"{name}: was {_short(before.get(name))}, is {_short(now.get(name))}" for name in names]


def _short(value: Any) -> str:
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else str(value)
