"""The training loop of a drafter on one device: one shape, one graph, the same numbers from the same inputs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash import anchors, caches, checkpoint, compiling, config, winners
from dflash import target as targets
from dflash.data import PADDING, Rows
from dflash.graphs import DTYPES, Batch, micro_step
from dflash.loss import Chunk, decay_weights
from dflash.model import Drafter
from dflash.replay import Observer
from dflash.run import Metrics
from dflash.stopping import Stop
from dflash.strict import strict
from dflash.warm import warm_up
from env.errors import Exit, Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What a step tells whoever watches."""

    step: int
    """Steps done, this one included."""
    total: int
    """Steps of the whole run."""
    loss: float
    """Weighted mean cross-entropy."""
    tokens: int
    """Tokens that the target read for this step."""
    seconds: float
    """Wall time of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What training left behind."""

    drafter: Drafter
    """The trained drafter."""
    steps: int
    """Steps of the whole run."""
    caches: dict[str, Any] | None
    """Which compile cache this process used, what it answered in the first step, and that step's seconds; None when no
    step was left to do."""


def total_steps(rows: int, settings: config.Config) -> int:
    """Optimizer steps of a run over `rows` packed rows; the last of an epoch is filled up with empty rows."""
    per_step = settings.shapes.rows * settings.optimizer.accumulate
    return settings.optimizer.epochs * math.ceil(rows / per_step)


def learning_rate(step: int, total: int, peak: float, warmup: float) -> float:
    """Rate of step 0, 1, ...: a linear rise over the first `warmup` share, then half a cosine to zero (SGDR, eq. 5)."""
    rise = max(1, round(total * warmup))
    if step < rise:
        return peak * (step + 1) / rise
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, total - rise)))


def train(
    settings: config.Config,
    rows: Rows,
    target: targets.Target,
    folder: Path,
    *,
    seed: int,
    device: torch.device,
    stop: Stop,
    watch: Callable[[Step], None],
    say: Callable[[str], None],
) -> Outcome:
    """Train a drafter, from its newest checkpoint in `folder` if there is one.

    Raises:
        Failure: Exit.TRAINING, when a loss is not finite; Exit.HOST, when there is no compiler; Exit.STORAGE, when a
            checkpoint cannot be written; Exit.INPUT, when one cannot be read.
        Stopped: after saving, when a signal asked for it.
    """
    drafter = Drafter(settings.drafter)
    drafter.initialise(seed)
    drafter.to(device)
    optimizers = make_optimizers(drafter, settings.optimizer)
    choice = caches.opened(settings, device)
    for notice in choice.notices:
        say(notice)
    winners.keep_in_cache()
    chunk = compiling.compile_regions(drafter)
    places = folder / "checkpoints"
    total = total_steps(len(rows.tokens), settings)
    begun = checkpoint.resume(places, drafter, optimizers)
    metrics = Metrics(folder, "metrics", begun)
    borrowed = Borrowed(target, device, DTYPES[settings.precision.compute])
    answers, warmed = None, 0.0
    if begun < total:
        before = time.perf_counter()
        warm_up(settings, device)
        warmed = time.perf_counter() - before
    try:
        for step in range(begun, total):
            start = time.perf_counter()
            rate = learning_rate(step, total, settings.optimizer.lr, settings.optimizer.warmup)
            with strict(), Observer() if answers is None else nullcontext() as observer:
                numbers = one_step(
                    drafter, optimizers, chunk, borrowed, rows, settings, seed=seed, step=step, rate=rate
                )
            seconds = time.perf_counter() - start
            if observer is not None:
                answers, problems = caches.judged(choice, observer.counts(), observer.keys, observer.details)
                answers |= {"first_step_seconds": seconds, "warm_up_seconds": warmed}
                for problem in problems:
                    say(problem)
            tokens = settings.shapes.rows * settings.shapes.sequence * settings.optimizer.accumulate
            metrics.add(step + 1, numbers, {"tokens_per_second": tokens / seconds})
            watch(Step(step=step + 1, total=total, loss=numbers["loss"], tokens=tokens, seconds=seconds))
            if (step + 1) % settings.checkpoint.every == 0 or step + 1 == total or stop.asked():
                place = checkpoint.save(places, step + 1, drafter, optimizers, keep=settings.checkpoint.keep)
                if stop.asked():
                    raise stop.stopped(f"step {step + 1} of {total} is saved in `{place}`")
    finally:
        metrics.close()
    return Outcome(drafter=drafter, steps=total, caches=answers)


def make_optimizers(drafter: Drafter, recipe: config.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers of a recipe, over all of the drafter's float32 parameters."""
    matrices = [weight for weight in drafter.parameters() if weight.ndim == 2 and recipe.kind == "muon"]
    others = [weight for weight in drafter.parameters() if weight.ndim != 2 or recipe.kind != "muon"]
    adamw = torch.optim.AdamW(others, lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True)
    if not matrices:
        return [adamw]
    muon = torch.optim.Muon(matrices, lr=recipe.lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, adamw]


class Borrowed:
    """What the drafter borrows of its frozen target, in the dtype and on the device of training."""

    def __init__(self, target: targets.Target, device: torch.device, dtype: torch.dtype) -> None:
        self.target = target
        self.device = device
        self.dtype = dtype
        self.embedding = targets.embedding(target).to(device, dtype)
        self.head = targets.head(target).to(device, dtype)

    def features(self, tokens: Tensor, document: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
        """Tapped hidden states (b, S, K*H) of packed rows (b, S)."""
        tokens, document = tokens.to(self.device), document.to(self.device)
        return targets.features(self.target, tokens, document, layer_ids).to(self.device, self.dtype)


def one_step(
    drafter: Drafter,
    optimizers: Sequence[torch.optim.Optimizer],
    chunk: Chunk,
    borrowed: Borrowed,
    rows: Rows,
    settings: config.Config,
    *,
    seed: int,
    step: int,
    rate: float,
) -> dict[str, Any]:
    """One optimizer step; returns its numbers, which depend on nothing but the arguments.

    Raises:
        Failure: Exit.TRAINING, when the loss or the gradient is not finite; the weights are then untouched.
    """
    shapes = settings.shapes
    weights = decay_weights(shapes.block, settings.loss.gamma).repeat(shapes.rows * shapes.anchors)
    batches = list(micro_batches(rows, settings, seed=seed, step=step))
    # the weights of a whole step are known beforehand, so each part can be divided by them at once
    norm = float(sum((weights * drawn.predicts.flatten()).sum() for *_, drawn in batches))
    loss = torch.zeros((), device=borrowed.device)
    right = torch.zeros(shapes.block, device=borrowed.device)
    asked = torch.zeros(shapes.block, device=borrowed.device)
    for tokens, document, drawn in batches:
        features = borrowed.features(tokens, document, settings.drafter.target_layer_ids)
        predicts = drawn.predicts.to(borrowed.device)
        batch = Batch(
            embedded=borrowed.embedding[drawn.ids.to(borrowed.device)],
            positions=drawn.positions.to(borrowed.device),
            features=features,
            position=drawn.position.to(borrowed.device),
            start=drawn.start.to(borrowed.device),
            labels=drawn.labels.flatten().to(borrowed.device),
            weight=weights.to(borrowed.device) * predicts.flatten() / max(norm, 1e-9),
            head=borrowed.head,
        )
        part, hit = micro_step(drafter, chunk, settings, batch)
        loss += part
        right += (hit.view_as(predicts) & predicts).view(-1, shapes.block).sum(0)
        asked += predicts.view(-1, shapes.block).sum(0)
    norm_of_gradient = torch.nn.utils.clip_grad_norm_(drafter.parameters(), settings.optimizer.clip)
    lost, steep = loss.item(), norm_of_gradient.item()
    if not (math.isfinite(lost) and math.isfinite(steep)):
        raise Failure(
            Exit.TRAINING,
            f"step {step + 1}: the loss is {lost}, the gradient's norm {steep}",
            hint="a lower `optimizer.lr` or a lower `optimizer.clip` may help; the newest checkpoint is untouched",
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return {
        "epoch": _place(len(rows.tokens), settings, step)[0],
        "loss": lost,
        "lr": rate,
        "grad_norm": steep,
        "accuracy": [r / a if a else None for r, a in zip(right[1:].tolist(), asked[1:].tolist(), strict=True)],
    }


def micro_batches(
    rows: Rows, settings: config.Config, *, seed: int, step: int
) -> Iterator[tuple[Tensor, Tensor, anchors.Anchors]]:
    """Tokens (b, S), documents (b, S) and anchors of each forward pass of a step."""
    shapes = settings.shapes
    epoch, first = _place(len(rows.tokens), settings, step)
    order = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch)))).permutation(len(rows.tokens))
    for micro in range(settings.optimizer.accumulate):
        begin = first + micro * shapes.rows
        samples = order[begin : begin + shapes.rows].tolist()
        missing = shapes.rows - len(samples)
        tokens, document, response = (part[samples] for part in (rows.tokens, rows.document, rows.response))
        if missing:
            tokens = torch.cat((tokens, tokens.new_zeros(missing, shapes.sequence)))
            document = torch.cat((document, document.new_full((missing, shapes.sequence), PADDING)))
            response = torch.cat((response, response.new_zeros(missing, shapes.sequence)))
            samples += [len(rows.tokens)] * missing
        drawn = anchors.draw(
            tokens,
            document,
            response,
            samples=samples,
            seed=seed,
            epoch=epoch,
            slots=shapes.anchors,
            block=shapes.block,
            mask_token=settings.drafter.mask_token_id,
        )
        yield tokens, document, drawn


def _place(rows: int, settings: config.Config, step: int) -> tuple[int, int]:
    """Epoch of a step and the first of its rows in the epoch's order."""
    per_step = settings.shapes.rows * settings.optimizer.accumulate
    epoch, within = divmod(step, math.ceil(rows / per_step))
    return epoch, within * per_step
