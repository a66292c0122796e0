from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash import pictures
from env.errors import Exit, Failure

NAMES = ["loss", "accuracy", "tau", "acceptance", "time", "overview"]


def lines(numbers: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(one) + "\n" for one in numbers)


def decoder(name: str, tau: float | None, without: float | None) -> dict[str, Any]:
    return {"name": name, "tau": tau, "tau_without_loops": without, "acceptance": [0.8**k for k in range(1, 16)]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run's numbers: slots never asked for in a step, steps that were skipped, a proposer without a τ."""
    steps = [
        {
            "step": step,
            "loss": None if step in (1, 50) else 1 + 4 * math.exp(-step / 20),
            "accuracy": [None if step == 3 else 1 - math.exp(-step / (20 + k)) for k in range(15)],
        }
        for step in range(1, 121)
    ]
    (tmp_path / "metrics.jsonl").write_text(lines(steps))
    target = [{"step": step, "loss": 1.3 + 4 * math.exp(-step / 20)} for step in range(1, 101)]
    (tmp_path / "target_metrics.jsonl").write_text(lines(target))
    decoders = [decoder("trained", 9.5, 7.5), decoder("prompt lookup", 4.6, None), decoder("untrained", None, None)]
    (tmp_path / "evaluation.json").write_text(json.dumps({"block": 16, "decoders": decoders}))
    (tmp_path / "timing.json").write_text(json.dumps({"target": 80.0, "drafter": 100.5, "something else": 3.2}))
    return tmp_path


def chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    place = 8
    while place < len(png):
        (length,) = struct.unpack_from(">I", png, place)
        yield png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        place += 12 + length


def inked(png: bytes) -> float:
    """Share of a picture's bytes that are not white; a blank one has none. Filters do not matter for that question."""
    parts = list(chunks(png))
    width, height, depth, colour = struct.unpack_from(">IIBB", dict(parts)[b"IHDR"])
    assert (depth, colour) == (8, 6)
    rows = zlib.decompress(b"".join(content for kind, content in parts if kind == b"IDAT"))
    values = np.frombuffer(rows, np.uint8).reshape(height, 1 + 4 * width)[:, 1:]
    return float((values != 0).mean())


def test_a_run_gets_a_picture_of_each_kind_and_one_of_all(folder: Path) -> None:
    paths = pictures.draw(folder)
    assert [path.relative_to(folder).as_posix() for path in paths] == [f"pictures/{name}.png" for name in NAMES]
    for path in paths:
        assert inked(path.read_bytes()) > 0.005, path


def test_the_same_numbers_give_the_same_bytes_and_no_date_or_version_is_in_them(folder: Path) -> None:
    first = [path.read_bytes() for path in pictures.draw(folder)]
    again = [path.read_bytes() for path in pictures.draw(folder)]
    assert first == again
    kinds = {kind for content in first for kind, _ in chunks(content)}
    assert kinds <= {b"IHDR", b"pHYs", b"IDAT", b"IEND"}


def test_a_users_matplotlib_settings_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib as mpl

    expected = [path.read_bytes() for path in pictures.draw(folder)]
    with mpl.rc_context({"font.size": 30, "lines.linewidth": 9, "axes.facecolor": "red"}):
        assert [path.read_bytes() for path in pictures.draw(folder)] == expected
        assert mpl.rcParams["font.size"] == 30


@pytest.mark.parametrize(
    ("missing", "left"),
    [
        (["target_metrics.jsonl"], NAMES),
        (["evaluation.json"], ["loss", "accuracy", "time", "overview"]),
        (["metrics.jsonl"], ["loss", "tau", "acceptance", "time", "overview"]),
        (["metrics.jsonl", "target_metrics.jsonl", "evaluation.json"], ["time", "overview"]),
        (["metrics.jsonl", "target_metrics.jsonl", "evaluation.json", "timing.json"], []),
    ],
)
def test_what_a_run_has_no_numbers_for_is_left_out(missing: list[str], left: list[str], folder: Path) -> None:
    for name in missing:
        (folder / name).unlink()
    assert [path.stem for path in pictures.draw(folder)] == left


def test_a_run_of_one_step_and_blocks_of_two_can_be_drawn(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text(lines([{"step": 1, "loss": 5.0, "accuracy": [0.5]}]))
    evaluation = {"block": 2, "decoders": [{**decoder("trained", 1.5, None), "acceptance": [0.5]}]}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    assert len(pictures.draw(folder)) == len(NAMES)


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluation.json"])
def test_a_file_that_cannot_be_read_is_named(name: str, folder: Path) -> None:
    (folder / name).write_text('{"step": 1')
    with pytest.raises(Failure, match=f"{name}` cannot be read") as caught:
        pictures.draw(folder)
    assert caught.value.code is Exit.INPUT


def test_smoothing_keeps_a_constant_passes_over_gaps_and_flattens_noise() -> None:
    constant = np.full(200, 3.0)
    constant[[0, 50, 199]] = np.nan
    assert np.allclose(pictures.smooth(constant), 3.0)
    noise = np.random.default_rng(0).normal(size=4000)
    assert pictures.smooth(noise).std() < 0.1
    assert np.isnan(pictures.smooth(np.array([np.nan]))).all()
    assert pictures.smooth(np.array([1.0, 5.0])).tolist() == [1.0, 5.0]
