"""The training loop of a drafter: one shape, one graph, the same numbers from the same inputs.

One process on one device runs it alone; drafters that share the passes of a step run it side by side as a `Team`.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dflash import caches, checkpoint, compiling, config, gate, memory, winners
from dflash.data import Packed
from dflash.graphs import DTYPES, Batch, micro_step
from dflash.loss import Chunk, decay_weights
from dflash.model import Drafter
from dflash.passes import Pass, draw, passes, total_steps
from dflash.pulse import START, WORK, Pulse
from dflash.replay import Observer
from dflash.run import Metrics
from dflash.stopping import Stop
from dflash.strict import strict
from dflash.team import ALONE, Team
from dflash.warm import warm_up
from env.cache import store
from env.errors import Exit, Failure

if TYPE_CHECKING:  # drafters that share a run with target workers never load transformers
    from dflash.target import Target


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
    note: str = ""
    """Who waited for whom, where several workers share the step."""


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


def learning_rate(step: int, total: int, peak: float, warmup: float) -> float:
    """Rate of step 0, 1, ...: a linear rise over the first `warmup` share, then half a cosine to zero (SGDR, eq. 5)."""
    rise = max(1, round(total * warmup))
    if step < rise:
        return peak * (step + 1) / rise
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, total - rise)))


class Supply(Protocol):
    """Where a drafter's features come from, and what it borrows of the frozen target."""

    embedding: Tensor
    """(V, H), on the device and in the dtype of training."""
    head: Tensor
    """(V, H), likewise."""

    @property
    def busy(self) -> Mapping[int, float] | None:
        """Share of its time that each target worker worked of late, as far as heard; None where there is none."""

    def features(self, reading: Pass) -> Tensor:
        """Tapped hidden states (b, S, K*H) of a pass, on the device and in the dtype of training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a drafter trains, and with whom; by default alone in its process."""

    device: torch.device
    """Holds its weights."""
    team: Team = ALONE
    """The drafters that share each step."""
    shards: memory.Shards | None = None
    """Among whom the training state is spread; None where this drafter holds all of it."""
    pulse: Pulse = field(default_factory=lambda: Pulse("the drafter"))
    """What it is doing, for whoever watches over it."""
    guard: Callable[[], AbstractContextManager[None]] = strict
    """Entered round each step; `explained` in a thread of a process that is `strict` already."""
    choices: Sequence[store.Choice] = ()
    """The compile caches of all devices, where the process has opened them already, and is warm."""


def train(
    settings: config.Config,
    rows: Packed,
    supply: Callable[[int], Supply],
    folder: Path,
    *,
    seed: int,
    place: Place,
    stop: Stop,
    watch: Callable[[Step], None],
    say: Callable[[str], None],
    saved: Callable[[], None] = lambda: None,
) -> Outcome:
    """Train a drafter, from its newest checkpoint in `folder` if there is one.

    Args:
        settings: the run's configuration.
        rows: packed rows.
        supply: makes the source of features, once the first step to be done (0, 1, ...) is known.
        folder: the run's; drafter 0 of a team writes there.
        seed: the run's seed.
        place: where, and with whom.
        stop: whether a signal has asked to stop; a team stops after the same step, whoever was asked.
        watch: told of each step, by drafter 0.
        say: what must be said aloud.
        saved: called once the run has stopped early and all is saved, before any drafter leaves.

    Raises:
        Failure: Exit.TRAINING, when losses are not finite again and again; Exit.HOST, when there is no compiler;
            Exit.STORAGE, when a checkpoint cannot be written; Exit.INPUT, when one cannot be read.
        Stopped: after saving, when a signal asked for it.
    """
    work = _Work(settings, rows, folder, seed=seed, place=place, stop=stop, say=say, saved=saved)
    metrics = Metrics(folder, "metrics", work.begun) if place.team.number == 0 else None
    source = supply(work.begun)
    try:
        for step in range(work.begun, work.total):
            start = time.perf_counter()
            numbers = work.step(step, source)
            seconds = time.perf_counter() - start
            timing, halt = _together(place, source, stop)
            tokens = settings.shapes.rows * settings.shapes.sequence * settings.optimizer.accumulate
            if metrics is not None:
                use = {"tokens_per_second": tokens / seconds, **memory.peak(place.device)}
                metrics.add(step + 1, numbers, {**use, **timing})
                loss = math.nan if numbers["loss"] is None else numbers["loss"]
                note = flow_note(timing)
                watch(Step(step=step + 1, total=work.total, loss=loss, tokens=tokens, seconds=seconds, note=note))
            work.save(step, halt=halt)
    finally:
        with suppress(Failure):  # only of interest where nothing else went wrong, and then it was raised already
            work.saver.wait()
        if metrics is not None:
            metrics.close()
    return Outcome(drafter=work.drafter, steps=work.total, caches=work.answers)


class _Work:
    """What a drafter has in hand from the first step to the last."""

    def __init__(
        self,
        settings: config.Config,
        rows: Packed,
        folder: Path,
        *,
        seed: int,
        place: Place,
        stop: Stop,
        say: Callable[[str], None],
        saved: Callable[[], None],
    ) -> None:
        self.settings, self.rows, self.seed, self.place = settings, rows, seed, place
        self.stop, self.say, self.saved = stop, say, saved
        self.drafter = Drafter(settings.drafter)
        self.drafter.initialise(seed)
        self.drafter.to(place.device)
        self.choices = place.choices or (caches.opened(settings, place.device),)
        for notice in self.choices[0].notices if not place.choices and place.team.number == 0 else ():
            say(notice)
        winners.keep_in_cache()
        self.chunk = compiling.compile_regions(self.drafter)
        if settings.optimizer.recompute:
            memory.recompute(self.drafter)
        if place.shards is not None:
            memory.shard(self.drafter, place.shards.mesh)
        self.optimizers = make_optimizers(self.drafter, settings.optimizer)
        self.places = folder / "checkpoints"
        group = place.shards.saving if place.shards is not None else None
        self.saver = checkpoint.Saver(self.places, keep=settings.checkpoint.keep, group=group)
        self.total = total_steps(len(rows.tokens), settings)
        self.begun = checkpoint.resume(self.places, self.drafter, self.optimizers)
        _require_one_mind(place.team, self.begun)
        before = time.perf_counter()
        if self.begun < self.total and not place.choices:
            place.pulse.work("warming up", START)
            with stop.at_once(self.nothing_lost()):
                warm_up(settings, place.device)
        self.warmed = time.perf_counter() - before
        self.answers: dict[str, Any] | None = None
        self.skipped = 0

    def step(self, step: int, source: Supply) -> dict[str, Any]:
        """Take one step, the first one under observation; its numbers."""
        recipe, place, first = self.settings.optimizer, self.place, self.answers is None
        rate = learning_rate(step, self.total, recipe.lr, recipe.warmup)
        place.pulse.work(f"step {step + 1}", START if first else WORK)
        start = time.perf_counter()
        hasty = self.stop.at_once(self.nothing_lost()) if first else nullcontext()
        with place.guard(), hasty, Observed(place.team) if first else nullcontext() as observer:
            numbers = one_step(
                self.drafter,
                self.optimizers,
                self.chunk,
                source,
                self.rows,
                self.settings,
                seed=self.seed,
                step=step,
                rate=rate,
                place=place,
            )
        if observer is not None:
            self.answers = {}
            if observer.watches:
                self.answers, problems = caches.judged(self.choices, observer.counts(), observer.keys, observer.details)
                seconds = time.perf_counter() - start
                self.answers |= {"first_step_seconds": seconds, "warm_up_seconds": self.warmed}
                for problem in problems:
                    self.say(problem)
            place.pulse.fresh()
        self.skipped = self.skipped + 1 if "skipped" in numbers else 0
        if self.skipped and place.team.number == 0:
            self.say(f"step {step + 1} is skipped: {numbers['skipped']}")
        if self.skipped >= recipe.skips:
            raise _not_finite(step + 1, self.skipped, numbers)
        return numbers

    def nothing_lost(self) -> str:
        """What is lost by stopping while a process's first step compiles: nothing."""
        kept = f"step {self.begun} of {self.total} is saved in `{checkpoint.where(self.places, self.begun)}`"
        kept = kept if self.begun else f"none of {self.total} steps was trained yet"
        return f"the first step was being compiled, so nothing is lost: {kept}"

    def save(self, step: int, *, halt: bool) -> None:
        """Save when it is due; raises Stopped when a signal has asked for it."""
        team, done = self.place.team, step + 1
        self.saver.check()
        if not (done % self.settings.checkpoint.every == 0 or done == self.total or halt):
            return
        self.place.pulse.work(f"saving after step {done}", START)
        if team.number == 0 or self.place.shards is not None:
            self.saver.save(done, self.drafter, self.optimizers)
            if halt or done == self.total:
                self.saver.wait()
        if halt:
            self.stop.ask(signal.SIGTERM)  # when another worker was asked
            if team.number == 0:
                self.saved()
            team.meet()  # nobody leaves before everything is saved
            raise self.stop.stopped(f"step {done} of {self.total} is saved in `{checkpoint.where(self.places, done)}`")


class Observed(Observer):
    """What the caches answer in a first step.

    Drafters that are threads share counters, so they all begin and end it together.
    """

    def __init__(self, team: Team) -> None:
        super().__init__()
        self._team = team
        self.watches = not team.together or team.number == 0

    def __enter__(self) -> Observed:
        if self.watches:
            super().__enter__()
        if self._team.together:
            self._team.meet()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._team.together and error is None:
            self._team.meet()
        if self.watches:
            super().__exit__(kind, error, trace)


def _require_one_mind(team: Team, begun: int) -> None:
    """All drafters must go on from the same step."""
    mine = torch.zeros(team.size, dtype=torch.float64)
    mine[team.number] = begun
    found = [int(step) for step in team.share(mine).tolist()]
    if len(set(found)) > 1:
        raise Failure(
            Exit.INPUT,
            "the drafters do not find the same newest checkpoint",
            details=[f"drafter {number}: step {step}" for number, step in enumerate(found)],
            hint="the run's folder must be one that all nodes share",
        )


def _together(place: Place, source: Supply, stop: Stop) -> tuple[dict[str, float], bool]:
    """Who waited for whom so far, and whether anybody was asked to stop: the same answer for every drafter."""
    team, pulse = place.team, place.pulse
    if team.size == 1 and source.busy is None:
        return {}, stop.asked()
    elapsed = max(time.monotonic() - pulse.begun, 1e-9)
    heard = source.busy or {}
    mine = torch.tensor(
        [
            float(stop.asked()),
            1 - min(pulse.idle() / elapsed, 1.0),
            pulse.waited.get("targets", 0.0) / elapsed,
            pulse.waited.get("drafters", 0.0) / elapsed,
            sum(heard.values()),
            len(heard),
        ],
        dtype=torch.float64,
    )
    asked, busy, for_targets, for_drafters, targets, known = team.share(mine).tolist()
    timing = {
        "drafters_busy": busy / team.size,
        "drafters_wait_for_targets": for_targets / team.size,
        "drafters_wait_for_drafters": for_drafters / team.size,
    }
    if known:
        timing["targets_busy"] = targets / known
    return timing, bool(asked)


def flow_note(timing: dict[str, float]) -> str:
    """Who waits for whom, for the status line; empty where nobody could."""
    if not timing:
        return ""
    said = [f"drafters busy {timing['drafters_busy']:.0%}"]
    if "targets_busy" in timing:
        said.insert(0, f"targets busy {timing['targets_busy']:.0%}")
    return ", ".join(said)


def _not_finite(step: int, skipped: int, numbers: dict[str, Any]) -> Failure:
    often = "" if skipped == 1 else f" {skipped} times in a row"
    return Failure(
        Exit.TRAINING,
        f"step {step}: numbers are not finite{often}: {numbers['skipped']}",
        hint="a lower `optimizer.lr` or a lower `optimizer.clip` may help; the newest checkpoint is untouched",
    )


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
    """Features computed where the drafter trains, by a target of its own."""

    busy = None
    """Nobody works for it."""

    def __init__(self, target: Target, device: torch.device, settings: config.Config) -> None:
        from dflash import target as targets

        self._features = targets.features
        self.target = target
        self.device = device
        self.dtype = DTYPES[settings.precision.compute]
        self.layer_ids = settings.drafter.target_layer_ids
        self.embedding = targets.embedding(target).to(device, self.dtype)
        self.head = targets.head(target).to(device, self.dtype)

    def features(self, reading: Pass) -> Tensor:
        """See `Supply`."""
        tokens, document = reading.tokens.to(self.device), reading.document.to(self.device)
        return self._features(self.target, tokens, document, self.layer_ids).to(self.device, self.dtype)


def one_step(
    drafter: Drafter,
    optimizers: Sequence[torch.optim.Optimizer],
    chunk: Chunk,
    source: Supply,
    rows: Packed,
    settings: config.Config,
    *,
    seed: int,
    step: int,
    rate: float,
    place: Place,
) -> dict[str, Any]:
    """One optimizer step; returns its numbers, which depend on nothing but the arguments.

    Of the step's passes, a drafter of a team has those whose number leaves its own as the remainder. When the loss or
    the gradient is not finite, the weights stay as they are and `skipped` says why: for all drafters alike, since all
    have the same sums.
    """
    shapes, team, device = settings.shapes, place.team, place.device
    weights = decay_weights(shapes.block, settings.loss.gamma).repeat(shapes.rows * shapes.anchors)
    readings = list(passes(rows, settings, seed=seed, step=step))
    draws = [draw(reading, settings, seed=seed) for reading in readings]
    # the weights of a whole step are known beforehand, so each part can be divided by them at once
    norm = float(sum((weights * drawn.predicts.flatten()).sum() for drawn in draws))
    losses = torch.zeros(len(readings), device=device)
    right = torch.zeros(shapes.block, device=device)
    asked = torch.zeros(shapes.block, device=device)
    for micro in range(team.number, len(readings), team.size):
        reading, drawn = readings[micro], draws[micro]
        features = source.features(reading)
        place.pulse.work(f"pass {micro + 1} of step {step + 1}", place.pulse.patience)
        predicts = drawn.predicts.to(device)
        batch = Batch(
            embedded=source.embedding[drawn.ids.to(device)],
            positions=drawn.positions.to(device),
            features=features,
            position=drawn.position.to(device),
            start=drawn.start.to(device),
            labels=drawn.labels.flatten().to(device),
            weight=weights.to(device) * predicts.flatten() / max(norm, 1e-9),
            head=source.head,
        )
        with gate.first_call(("drafter", str(device))):
            losses[micro], hit = micro_step(drafter, chunk, settings, batch)
        right += (hit.view_as(predicts) & predicts).view(-1, shapes.block).sum(0)
        asked += predicts.view(-1, shapes.block).sum(0)
    parameters = list(drafter.parameters())
    if place.shards is None:
        team.add([parameter.grad for parameter in parameters if parameter.grad is not None])
    shared = team.share(torch.cat((losses, right, asked)).to("cpu", torch.float64)).float()
    each, right, asked = shared.split([len(readings), shapes.block, shapes.block])
    norm_of_gradient = torch.nn.utils.clip_grad_norm_(parameters, settings.optimizer.clip)
    if isinstance(norm_of_gradient, DTensor):
        norm_of_gradient = norm_of_gradient.full_tensor()
    # in the order of the passes, as one device alone adds them up
    lost, steep = float(sum(each, start=torch.zeros(()))), norm_of_gradient.item()
    numbers: dict[str, Any] = {
        "epoch": readings[0].epoch,
        "loss": lost if math.isfinite(lost) else None,
        "lr": rate,
        "grad_norm": steep if math.isfinite(steep) else None,
        "accuracy": [r / a if a else None for r, a in zip(right[1:].tolist(), asked[1:].tolist(), strict=True)],
    }
    if math.isfinite(lost) and math.isfinite(steep):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
    else:
        bad = [
            reading.samples for reading, part in zip(readings, each.tolist(), strict=True) if not math.isfinite(part)
        ]
        where = f", from the packed rows {', '.join(str(n) for part in bad for n in part)}" if bad else ""
        numbers["skipped"] = f"the loss is {lost}, the gradient's norm {steep}{where}"
    for optimizer in optimizers:
        optimizer.zero_grad()
    return numbers
