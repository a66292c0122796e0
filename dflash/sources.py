"""What a training reads its rows from, apart from the shipped text: a user's data, or features that were kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash import chats, config, data, features, prepared, run, stock, storage
from dflash import target as targets
from dflash.prepared import Stored
from dflash.preparing import Recipe
from dflash.rendering import Renderer
from dflash.target import Target


def recipe(settings: config.Config, faulty: float) -> Recipe:
    """What a configuration says about its rows; `faulty` is the share of lines that may be of no use."""
    return Recipe(
        sequence=settings.shapes.sequence,
        held_out=settings.evaluation.prompts,
        prompt_tokens=settings.evaluation.prompt_tokens,
        faulty=faulty,
    )


def stored(
    path: Path,
    settings: config.Config,
    target: Target,
    *,
    faulty: float,
    watch: Callable[[int], None],
    say: Callable[[str], None],
) -> Stored:
    """The packed rows of a user's data for a configuration and a target; says what was left out.

    Raises:
        Failure: see `prepared.prepare`.
    """
    whole = Renderer(
        tokenizer=target.tokenizer,
        name=target.name,
        ends=targets.stop_tokens(target),
        sequence=settings.shapes.sequence,
    )
    rows = prepared.prepare(path, whole, recipe(settings, faulty), stock.home(say), watch=watch, say=say)
    prepared.report(rows, say)
    return rows


def given(lines: Path | None, kept: Path | None) -> dict[str, Any]:
    """What decides a run's numbers of the two, by content; empty when there is neither.

    Raises:
        Failure: Exit.INPUT, when one cannot be read.
    """
    if lines is not None:
        return {"data": chats.digest(chats.files(lines))}
    return {} if kept is None else {"features": features.digest(kept)}


def keep(folder: Path, rows: Stored) -> None:
    """Write into a run's folder what its data are and what was left out of them."""
    content = {
        "key": rows.key,
        "rows": len(rows.tokens),
        "documents": rows.documents,
        "cut": rows.truncated,
        "fill": round(rows.fill, 4),
        "held_out": len(rows.held_out),
        "left_out": {kind.name.lower(): list(found) for kind, found in rows.faults.found.items()},
    }
    run.write_json(folder / "data.json", content)


def place(rows: data.Packed, path: Path) -> None:
    """Put a run's packed rows where its workers find them, at `path`: a file, or a folder for those from the disk.

    Raises:
        Failure: Exit.STORAGE, when the disk refuses.
    """
    if isinstance(rows, data.Rows):
        data.write(rows, path)
    elif isinstance(rows, Stored) and rows.numbers is None and not (path / prepared.MANIFEST).exists():
        with storage.new_folder(path) as beside:
            for name in (prepared.MANIFEST, *(shard.file for shard in rows.shelf.shards)):
                try:
                    os.link(rows.folder / name, beside / name)
                except OSError:  # another file system, or one without links
                    shutil.copyfile(rows.folder / name, beside / name)
