"""Which packed rows each forward pass of a run reads: a function of the seed and the pass's number, of nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash import anchors, config
from dflash.data import PADDING, Packed


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """The packed rows that one forward pass of a step reads."""

    number: int
    """Counted from the beginning of the run, over all drafters."""
    epoch: int
    """Passes over the data so far."""
    samples: list[int]
    """Number of each row in the whole data set; one past the last for a row that only fills up."""
    tokens: Tensor
    """(b, S) int64."""
    document: Tensor
    """(b, S) int32."""
    response: Tensor
    """(b, S) bool."""


def total_steps(rows: int, settings: config.Config) -> int:
    """Optimizer steps of a run over `rows` packed rows; the last of an epoch is filled up with empty rows."""
    per_step = settings.shapes.rows * settings.optimizer.accumulate
    return settings.optimizer.epochs * math.ceil(rows / per_step)


def passes(rows: Packed, settings: config.Config, *, seed: int, step: int, only: int | None = None) -> Iterator[Pass]:
    """What each forward pass of a step reads, or only pass `only` of it; the last step of an epoch is filled up."""
    shapes, count = settings.shapes, len(rows.tokens)
    epoch, first = place(count, settings, step)
    order = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch)))).permutation(count)
    for micro in range(settings.optimizer.accumulate) if only is None else (only,):
        begin = first + micro * shapes.rows
        samples = order[begin : begin + shapes.rows].tolist()
        missing = shapes.rows - len(samples)
        tokens, document, response = (part[samples] for part in (rows.tokens, rows.document, rows.response))
        if missing:
            tokens = torch.cat((tokens, tokens.new_zeros(missing, shapes.sequence)))
            document = torch.cat((document, document.new_full((missing, shapes.sequence), PADDING)))
            response = torch.cat((response, response.new_zeros(missing, shapes.sequence)))
            samples += [count] * missing
        yield Pass(
            number=step * settings.optimizer.accumulate + micro,
            epoch=epoch,
            samples=samples,
            tokens=tokens,
            document=document,
            response=response,
        )


def draw(reading: Pass, settings: config.Config, *, seed: int) -> anchors.Anchors:
    """The anchors of a pass."""
    return anchors.draw(
        reading.tokens,
        reading.document,
        reading.response,
        samples=reading.samples,
        seed=seed,
        epoch=reading.epoch,
        slots=settings.shapes.anchors,
        block=settings.shapes.block,
        mask_token=settings.drafter.mask_token_id,
    )


def place(rows: int, settings: config.Config, step: int) -> tuple[int, int]:
    """Epoch of a step and the first of its rows in the epoch's order."""
    per_step = settings.shapes.rows * settings.optimizer.accumulate
    epoch, within = divmod(step, math.ceil(rows / per_step))
    return epoch, within * per_step
