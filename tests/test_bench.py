"""Benchmarks: each gives the peer's result, says what it measured, refuses to time a wrong one. No time is judged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import micro
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dflash import cli, compiling, config, data, graphs, mask, storage, target
from dflash.bench import NAMES, disk, losses, machine, masks, measure, show, suite, targets, training
from dflash.bench.measure import Bench, Contender, Figure, Floor, Times
from dflash.loss import chunk_loss
from dflash.model import Drafter
from env.errors import Exit, Failure

CPU = torch.device("cpu")
TOYS: dict[str, Callable[[Bench], list[Figure]]] = {
    **suite.RUNS,
    "loss": partial(losses.run, vocabulary=256, tokens=32),
    "responses": partial(targets.responses, prompts=2, new_tokens=4),
    "packing": partial(disk.packing, documents=50),
    "shards": partial(disk.features, size=1 << 18),
    "seeding": partial(disk.seeding, files=8, size=1 << 16),
}
"""The same benchmarks at sizes that take no time."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> config.Config:
    file = tmp_path_factory.mktemp("bench") / "micro.toml"
    short = {"prompt_tokens": 16, "response_tokens": 16}
    file.write_text(micro.toml(data=short, evaluation=short))
    return config.load(str(file))


@pytest.fixture
def bench(settings: config.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_HOME"):  # put back what choosing a compile cache sets
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(masks, "PAPER", "tiny")
    # compiling takes longest, and that compiled layers compute the same is another room's test
    monkeypatch.setattr(compiling, "compile_regions", lambda _: chunk_loss)
    toy = machine.Machine(CPU, tmp_path, scale=0.01)
    return Bench(settings=settings, device=CPU, folder=tmp_path, machine=toy, budget=0.01)


def figure(**changed: Any) -> Figure:
    rate = machine.Rate(value=2e9, unit="B", how="a copy")
    return Figure(
        **{
            "benchmark": "toy",
            "what": "1 GB moved",
            "ours": Times(seconds=(3.0, 1.0, 2.0)),
            "floor": Floor(amount=1e9, what="bytes", rate=rate),
            "peer": "somebody",
            "theirs": Times(seconds=(4.0,)),
            **changed,
        }
    )


# ------------------------------------------------------------------------------------------------------- the closed set


def test_every_name_runs_something_and_nothing_runs_without_a_name() -> None:
    assert list(NAMES) == list(suite.RUNS)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_gives_the_peer_s_result_and_says_what_it_measured(name: str, bench: Bench) -> None:
    figures = TOYS[name](bench)
    assert figures
    for one in figures:
        assert one.benchmark == name
        told = json.loads(json.dumps(one.as_json()))
        assert told["ours"]["median"] > 0
        assert told["peer"]["median"] > 0
        assert told["floor"]["seconds"] > 0
        assert told["floor"]["rate"]["value"] > 0
        assert told["ratios"]["to_peer"] == pytest.approx(told["ours"]["median"] / told["peer"]["median"])
        assert told["ratios"]["to_floor"] == pytest.approx(told["ours"]["median"] / told["floor"]["seconds"])


def test_a_mask_that_is_not_torch_s_is_told_before_it_is_timed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    right = mask.tiled
    # the first call's function about pairs is what torch asks; later calls are what is compared and timed
    positions = iter((1, 0))
    monkeypatch.setattr(mask, "tiled", lambda at, start, **sizes: right(at * next(positions), start * 0, **sizes))
    with pytest.raises(AssertionError, match="tiles of the mask"):
        masks.run(bench)


def test_packed_rows_that_lose_a_token_are_told_before_they_are_timed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = data.pack

    def lossy(*arguments: Any) -> data.Rows:
        rows = right(*arguments)
        rows.tokens[0, 1] = 12345
        return rows

    monkeypatch.setattr(data, "pack", lossy)
    with pytest.raises(AssertionError, match="packed tokens"):
        disk.packing(bench, documents=20)


# ------------------------------------------------------------------------------------------------------------- floors


@pytest.mark.parametrize("shapes", [{}, {"rows": 1, "anchors": 16}])
def test_a_pass_s_operations_are_those_that_torch_counts(settings: config.Config, shapes: dict[str, int]) -> None:
    """All but attention's: torch counts what a kernel does, which computes what nobody sees."""
    settings = replace(settings, shapes=replace(settings.shapes, **shapes))
    drafter, batch = Drafter(settings.drafter), graphs.example(settings, CPU)
    with FlopCounterMode(display=False) as counter:
        training.plainly(drafter, settings, batch)
    counted = sum(count for name, count in counter.get_flop_counts()["Global"].items() if str(name) == "aten.mm")
    sizes, block = settings.drafter, settings.shapes.rows * settings.shapes.queries
    # the first layer's input has a gradient, so that all layers share a graph; nobody needs it
    spare = 2 * block * sizes.hidden_size * (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    assert training.operations(settings, seen=0, asked=block) + spare == counted


def test_what_a_pass_sees_is_what_its_mask_lets_it_see(settings: config.Config) -> None:
    batch, shapes = graphs.example(settings, CPU), settings.shapes
    dense = mask.dense(batch.position, batch.start, sequence=shapes.sequence, block=shapes.block)
    assert training.seen(settings, batch) == int(dense.sum())


def test_a_target_s_operations_are_those_that_torch_counts(bench: Bench) -> None:
    whole, layer_ids = targets.drawn_target(bench, torch.float32), [1]
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        target.features(whole, tokens, None, layer_ids)
    counted = sum(count for name, count in counter.get_flop_counts()["Global"].items() if str(name) == "aten.mm")
    assert 2 * targets.layer_operations(whole, tokens.numel(), seen=0) == counted


def test_every_rate_of_a_machine_is_measured_and_says_how(tmp_path: Path) -> None:
    here = machine.Machine(CPU, tmp_path, scale=0.001)
    rates = [here.products(torch.float32), here.copying, here.copying_on_host, here.hashing, here.writing, here.sending]
    assert all(rate.value > 0 and rate.how for rate in rates)
    assert not list(tmp_path.iterdir())
    assert {"device", "threads", "torch", "load"} == here.describe().keys()


# ---------------------------------------------------------------------------------------------------------- measuring


def test_ratios_are_of_medians() -> None:
    one = figure()
    assert (one.ours.median, one.ours.spread) == (2.0, 1.0)
    assert one.floor.seconds == 0.5
    assert one.floor.formula == "bytes: 1 GB / 2 GB/s (a copy)"
    assert (one.to_floor, one.to_peer) == (4.0, 0.5)


def test_contenders_run_by_turns_and_what_must_be_reset_is_reset_before_each_call(bench: Bench) -> None:
    called: list[str] = []
    one = Contender(call=lambda: called.append("ours"), before=lambda: called.append("reset"))
    other = Contender(call=lambda: called.append("theirs"), before=lambda: called.append("reset"))
    ours, theirs = measure.race(bench, one, other)
    assert len(ours.seconds) == len(theirs.seconds) == (len(called) // 4) - 2
    assert called == ["reset", "ours", "reset", "theirs"] * (len(called) // 4)


def test_a_short_call_is_repeated_within_a_measurement(bench: Bench) -> None:
    count = 0

    def call() -> None:
        nonlocal count
        count += 1

    measured, _ = measure.race(bench, call, call)
    assert count > 100 * len(measured.seconds)


def test_memory_is_the_most_that_a_call_took_at_once(bench: Bench) -> None:
    taken = measure.memory(bench, lambda: torch.ones(64 << 20, dtype=torch.uint8).fill_(2))
    assert taken is None or 60 << 20 <= taken < 160 << 20


@pytest.mark.parametrize(
    ("ours", "theirs", "tolerance"),
    [
        (torch.ones(3), torch.ones(4), 1.0),
        (torch.ones(3), torch.tensor([1.0, 1.0, 1.001]), 0.0),
        (torch.ones(3), torch.tensor([1.0, 1.0, 1.1]), 0.01),
        (torch.tensor([1.0, torch.nan]), torch.ones(2), 1.0),
    ],
)
def test_different_results_are_refused(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    with pytest.raises(AssertionError, match="a thing"):
        measure.require_equal("a thing", ours, theirs, tolerance=tolerance)


def test_equal_and_nearly_equal_results_are_let_pass() -> None:
    measure.require_equal("a thing", torch.ones(3), torch.ones(3))
    measure.require_equal("a thing", torch.ones(3), torch.tensor([1.0, 1.0, 1.001]), tolerance=0.01)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (measure.quantity(1.234e12, "FLOP"), "1.23 TFLOP"),
        (measure.quantity(36.7e6, "B"), "36.7 MB"),
        (measure.quantity(3, "B"), "3 B"),
        (measure.seconds(1.5), "1.5 s"),
        (measure.seconds(0.01234), "12.3 ms"),
        (measure.seconds(4.2e-6), "4.2 µs"),
        (show.ratio(1623.4), "1,623"),
        (show.ratio(0.416), "0.42"),
    ],
)
def test_numbers_are_written_as_people_read_them(said: str, wanted: str) -> None:
    assert said == wanted


# --------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite whose benchmarks are done at once, and the home of its caches."""
    monkeypatch.setenv("DFLASH_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv("DFLASH_ENVIRONMENT", raising=False)
    monkeypatch.setattr(suite, "RUNS", {name: lambda _, name=name: [figure(benchmark=name)] for name in NAMES})
    return tmp_path


def test_all_run_when_none_is_named_and_their_figures_are_printed_and_written(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--json", str(toy / "figures.json")]) == Exit.DONE
    out, err = capsys.readouterr()
    for name in NAMES:
        assert f"{name}: 1 GB moved: 2 s, spread 100% of 3\n  peer    somebody: 4 s, ours 0.5 of it\n" in out
    assert "  floor   bytes: 1 GB / 2 GB/s (a copy): 500 ms, ours 4 of it\n" in out
    assert f"{len(NAMES)} of {len(NAMES)} done" in err
    told = json.loads((toy / "figures.json").read_text())
    assert [one["benchmark"] for one in told["figures"]] == list(NAMES)
    assert told["config"] == "tiny"
    assert told["machine"]["device"]
    assert not (toy / "caches" / "bench" / "files").exists()


def test_two_at_once_are_refused_and_what_a_killed_one_left_is_removed(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (toy / "caches" / "bench" / "files" / "pass").mkdir(parents=True)
    with storage.held(toy / "caches" / "bench" / "lock", "test", Failure(Exit.BUG, "held by nobody")):
        assert cli.main(["bench", "pass"]) == Exit.USAGE
    assert "another benchmark runs on this machine" in capsys.readouterr().err
    assert cli.main(["bench", "pass"]) == Exit.DONE
    assert not (toy / "caches" / "bench" / "files").exists()


def test_a_home_that_cannot_be_written_is_one_sentence(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toy / "caches").mkdir()
    (toy / "caches" / "bench").write_text("a file in the way")
    assert cli.main(["bench", "pass"]) == Exit.STORAGE
    assert "cannot measure in" in capsys.readouterr().err


def test_those_that_are_named_run_once_each_in_their_order(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "seeding", "pass", "seeding"]) == Exit.DONE
    heads = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if " moved" in line]
    assert heads == ["seeding", "pass"]


def test_memory_is_told_where_it_was_looked_at(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite.RUNS["loss"] = lambda _: [figure(benchmark="loss", memory=(1_000_000, 50_000_000))]
    assert cli.main(["bench", "loss"]) == Exit.DONE
    assert "  memory  1 MB, peer 50 MB\n" in capsys.readouterr().out


def test_the_list_names_each_and_runs_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--list"]) == Exit.DONE
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(NAMES)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lost"], "did you mean `loss`?"),
        (["xyz"], "there are pass, mask, loss"),
        (["--config", "tinny"], "did you mean `--config tiny`?"),
        (["--jsn", "x"], "`nox -s bench -- --help` lists what there is"),
    ],
)
def test_a_wrong_word_is_refused_with_the_right_one(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == Exit.USAGE
    assert said in capsys.readouterr().err


def test_on_a_terminal_there_is_one_table_and_what_it_leaves_out_below(capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal:
        """Where a person looks."""

        written = ""
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            self.written += text
            return len(text)

        def flush(self) -> None: ...

    terminal: Any = Terminal()
    show.show(machine.Machine(CPU, Path()).describe(), [figure()], terminal)
    assert "1 GB moved" in terminal.written
    assert "of floor" in terminal.written
    assert "somebody" in terminal.written
    assert "a copy" in terminal.written


def test_a_terminated_run_leaves_nothing_behind(tmp_path: Path) -> None:
    environ = {**os.environ, "DFLASH_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent.parent)}
    with subprocess.Popen(
        [sys.executable, "-m", "dflash", "bench", "mask"], env=environ, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        running.stderr.readline()
        while not list(tmp_path.glob("bench/files/mask")):
            assert running.poll() is None
        running.send_signal(signal.SIGTERM)
        assert running.wait() == Exit.TERMINATED
    assert not (tmp_path / "bench" / "files").exists()
