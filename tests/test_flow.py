"""Queues from targets to drafters, sums over drafters, steps that all must skip: in threads, uncompiled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import BOUND, MICRO, ROWS, write_rows
from torch import Tensor

from dflash import checkpoint, compiling, config, data, flow, loss, team, trainer
from dflash.passes import Pass, total_steps
from dflash.pulse import Pulse
from dflash.stopping import Stop, Stopped
from dflash.topology import Topology
from env.cache import store
from env.errors import Exit, Failure

CPU = torch.device("cpu")
CHOICES = (store.Choice(cache_id="", path=Path(), kind="given"),)
"""A process opens its caches before its threads begin; nothing is compiled here."""


def together(size: int, body: Callable[[int], Any]) -> list[Any]:
    """What `body` gives in each of `size` threads; the first exception is raised."""
    found: list[Any] = [None] * size

    def run(number: int) -> None:
        try:
            found[number] = body(number)
        except BaseException as error:  # noqa: BLE001  # raised again below
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for answer in found:
        if isinstance(answer, BaseException):
            raise answer
    return found


def test_buckets_hold_what_they_may_and_lose_nothing() -> None:
    gradients = [torch.arange(7.0), torch.arange(25.0).view(5, 5), torch.arange(3.0)]
    found = team.buckets(gradients, limit=10)
    assert all(sum(piece.numel() for piece in pieces) <= 10 for pieces in found)
    for pieces in found:
        buffer = team.flat(pieces, 4)
        assert len(buffer) % 4 == 0
        team.put_back(buffer * 2, pieces)
    assert torch.equal(gradients[1], torch.arange(25.0).view(5, 5) * 2)
    assert torch.equal(gradients[2], torch.arange(3.0) * 2)


def test_threads_add_in_the_order_of_their_numbers_and_all_get_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "BUCKET", 16)
    generator = torch.Generator().manual_seed(0)
    theirs = [[torch.randn(5, 7, generator=generator), torch.randn(11, generator=generator)] for _ in range(3)]
    expected = [sum(parts[1:], start=parts[0].clone()) for parts in zip(*theirs, strict=True)]
    circle = team.Circle(3, 30)

    def body(number: int) -> list[Tensor]:
        mine = [part.clone() for part in theirs[number]]
        team.Threads(number, 3, circle, Pulse("a drafter")).add(mine)
        return mine

    for mine in together(3, body):
        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def test_a_drafter_that_leaves_lets_nobody_wait_for_ever() -> None:
    circle = team.Circle(2, 30)

    def body(number: int) -> None:
        if number:
            circle.leave()
        else:
            team.Threads(0, 2, circle, Pulse("a drafter")).meet()

    with pytest.raises(Failure, match="waited for the others in vain"):
        together(2, body)


def test_a_target_waits_for_a_slow_drafter_and_the_drafter_for_a_slow_target() -> None:
    shape = Topology(targets=1, drafters=1)
    channels = flow.Channels(shape)
    fast, slow = Pulse("target 0"), Pulse("drafter 0")
    outlet, take = flow.ThreadOutlet(channels, 0, fast), flow.ThreadTake(channels, 0, CPU, slow)
    passes = 3 * flow.DEPTH

    def body(number: int) -> list[int]:
        if number == 0:
            for passed in range(passes):
                outlet.put(0, flow.header(passed, torch.ones(1), fast), torch.full((2,), float(passed)))
            return []
        taken = []
        time.sleep(0.3)
        for passed in range(passes):
            head, features = take(passed, 0)
            taken.append(int(head[0]))
            assert features.tolist() == [passed, passed]
        return taken

    assert together(2, body)[1] == list(range(passes))
    assert fast.waited["drafters"] > 0.2
    assert slow.waited["targets"] < 0.2


def test_a_queue_that_is_closed_wakes_whoever_waits() -> None:
    channels = flow.Channels(Topology(targets=1, drafters=1))

    def body(number: int) -> None:
        if number:
            channels.close()
        else:
            channels.get(0, 0)

    with pytest.raises(flow.Lost, match="the run has ended"):
        together(2, body)


def test_features_of_another_pass_or_of_other_tokens_are_refused() -> None:
    tokens = torch.arange(4)
    for head, passed in ((flow.header(3, tokens, Pulse("t")), 4), (flow.header(4, tokens + 1, Pulse("t")), 4)):
        inlet = flow.Inlet(lambda due, target, head=head: (head, torch.zeros(1)), [(4, 0)])  # type: ignore[misc]
        with pytest.raises(Failure, match="pass 4 was due from target 0") as caught:
            inlet.take(passed, tokens)
        assert caught.value.code == Exit.BUG


# Whole steps, shared by threads; uncompiled, since nothing here is about graphs


class Source:
    """Features that depend on the pass alone; `spoilt` passes have one that is no number."""

    busy = None

    def __init__(self, settings: config.Config, spoilt: tuple[int, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(0)
        sizes = settings.drafter
        self.embedding = torch.randn(sizes.vocab_size, sizes.hidden_size, generator=generator)
        self.head = torch.randn(sizes.vocab_size, sizes.hidden_size, generator=generator)
        self.width = len(sizes.target_layer_ids) * sizes.hidden_size
        self.spoilt = spoilt

    def features(self, reading: Pass) -> Tensor:
        drawn = torch.randn(*reading.tokens.shape, self.width, generator=torch.Generator().manual_seed(reading.number))
        if reading.number in self.spoilt:
            drawn[0, 0, 0] = torch.nan
        return drawn


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "compile_regions", lambda _: loss.chunk_loss)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> data.Rows:
    return data.read(write_rows(tmp_path_factory.mktemp("rows") / "rows.safetensors"))


def settings(**changes: Any) -> config.Config:
    optimizer = {**MICRO["optimizer"], **changes}
    return config.parse({**MICRO, "optimizer": optimizer}, "micro")


def train(
    folder: Path,
    rows: data.Rows,
    size: int,
    *,
    spoilt: tuple[int, ...] = (),
    stop: Stop | None = None,
    said: list[str] | None = None,
    **changes: Any,
) -> list[trainer.Outcome]:
    """Train with `size` drafters in threads; what each of them has in the end."""
    circle, wanted = team.Circle(size, 60), settings(**changes)

    def body(number: int) -> trainer.Outcome:
        pulse = Pulse(f"drafter {number}")
        own = team.Threads(number, size, circle, pulse) if size > 1 else team.ALONE
        return trainer.train(
            wanted,
            rows,
            lambda _: Source(wanted, spoilt),
            folder,
            seed=0,
            place=trainer.Place(device=CPU, team=own, pulse=pulse, guard=nullcontext, choices=CHOICES),
            stop=(stop if stop is not None and number == size - 1 else Stop()),
            watch=lambda _: None,
            say=(said if said is not None else []).append,
        )

    answers: list[trainer.Outcome] = together(size, body)
    return answers


def flat(outcome: trainer.Outcome) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in outcome.drafter.parameters()])


def distance(one: trainer.Outcome, other: trainer.Outcome) -> float:
    return float((flat(one) - flat(other)).norm() / flat(other).norm())


def test_drafters_with_one_pass_each_train_as_one_alone_to_the_bit(
    tmp_path: Path, rows: data.Rows, plain: None
) -> None:
    (alone,) = train(tmp_path / "alone", rows, 1)
    three = train(tmp_path / "three", rows, 3)
    for outcome in three:
        assert torch.equal(flat(outcome), flat(alone))
    assert (tmp_path / "three/metrics.jsonl").read_bytes() == (tmp_path / "alone/metrics.jsonl").read_bytes()


def test_drafters_with_several_passes_differ_from_one_alone_by_the_order_of_additions_only(
    tmp_path: Path, rows: data.Rows, plain: None
) -> None:
    (alone,) = train(tmp_path / "alone", rows, 1)
    two = train(tmp_path / "two", rows, 2)
    assert torch.equal(flat(two[0]), flat(two[1]))
    assert 0 < distance(two[0], alone) < BOUND
    (faster,) = train(tmp_path / "faster", rows, 1, lr=1.1e-3)
    assert distance(faster, alone) > 10 * BOUND  # what the bound would catch: a rate that is a tenth higher


def test_rows_without_a_valid_anchor_teach_nothing_and_put_no_drafter_out_of_step(
    tmp_path: Path, rows: data.Rows, plain: None
) -> None:
    silent = replace(rows, response=rows.response.clone())
    silent.response[:20] = False  # of three rows a step has sometimes one without, sometimes none with
    said: list[str] = []
    (alone,) = train(tmp_path / "alone", silent, 1, said=said)
    for outcome in train(tmp_path / "three", silent, 3, said=said):
        assert torch.equal(flat(outcome), flat(alone))
    assert bool(flat(alone).isfinite().all())
    assert (tmp_path / "three/metrics.jsonl").read_bytes() == (tmp_path / "alone/metrics.jsonl").read_bytes()
    assert '"loss": 0.0' in (tmp_path / "alone/metrics.jsonl").read_text()
    assert not [line for line in said if "skipped" in line]


@pytest.mark.parametrize("size", [1, 3])
def test_a_step_whose_numbers_are_not_finite_is_skipped_by_all_and_said(
    tmp_path: Path, rows: data.Rows, plain: None, size: int
) -> None:
    said: list[str] = []
    outcomes = train(tmp_path, rows, size, spoilt=(4,), said=said)  # the middle pass of the second step
    assert len([line for line in said if "step 2 is skipped: the loss is nan" in line]) == 1
    assert all(bool(flat(outcome).isfinite().all()) for outcome in outcomes)
    assert all(torch.equal(flat(outcome), flat(outcomes[0])) for outcome in outcomes)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert '"loss": null' in lines[1]
    assert "from the packed rows" in lines[1]
    assert "skipped" not in lines[2]


def test_too_many_skipped_steps_in_a_row_stop_the_run_and_leave_the_checkpoint(
    tmp_path: Path, rows: data.Rows, plain: None
) -> None:
    with pytest.raises(Failure, match=r"step 7: numbers are not finite 2 times in a row") as caught:
        train(tmp_path, rows, 3, spoilt=(3, 15, 18), skips=2)
    assert caught.value.code == Exit.TRAINING
    assert checkpoint.steps(tmp_path / "checkpoints") == [4]


def test_all_drafters_stop_after_the_same_step_whoever_was_asked(tmp_path: Path, rows: data.Rows, plain: None) -> None:
    stop = Stop()
    stop.ask(15)  # the last drafter alone
    with pytest.raises(Stopped) as caught:
        train(tmp_path, rows, 3, stop=stop)
    assert caught.value.code == Exit.TERMINATED
    assert checkpoint.steps(tmp_path / "checkpoints") == [1]
    whole = train(tmp_path, rows, 3)
    assert torch.equal(flat(whole[0]), flat(train(tmp_path / "undisturbed", rows, 3)[0]))


def test_layers_that_are_computed_again_give_the_same_bits(tmp_path: Path, rows: data.Rows, plain: None) -> None:
    (kept,) = train(tmp_path / "kept", rows, 1)
    (again,) = train(tmp_path / "again", rows, 1, recompute=True)
    assert torch.equal(flat(kept), flat(again))


def test_drafters_that_find_different_checkpoints_do_not_begin(tmp_path: Path, rows: data.Rows, plain: None) -> None:
    train(tmp_path / "0", rows, 1)
    circle, wanted = team.Circle(2, 60), settings()

    def body(number: int) -> None:
        own = team.Threads(number, 2, circle, Pulse("a drafter"))
        trainer.train(
            wanted,
            rows,
            lambda _: Source(wanted),
            tmp_path / str(number),
            seed=0,
            place=trainer.Place(device=CPU, team=own, guard=nullcontext, choices=CHOICES),
            stop=Stop(),
            watch=lambda _: None,
            say=lambda _: None,
        )

    with pytest.raises(Failure, match="do not find the same newest checkpoint") as caught:
        together(2, body)
    assert caught.value.details == (f"drafter 0: step {total_steps(ROWS, wanted)}", "drafter 1: step 0")
