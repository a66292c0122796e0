"""What a bake compiles is what training compiles, and its identity is what decides it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash import anchors, compiling, config, graphs, trainer, warm, winners
from dflash.data import Rows
from dflash.model import Drafter
from dflash.passes import Pass

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
# dynamo looks at the gradient of every input and hides the warning by itself, which an error filter precedes
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def small() -> config.Config:
    tables = config.to_tables(config.load("tiny"))
    tables["drafter"] |= {"hidden_size": 64, "intermediate_size": 96, "heads": 2, "kv_heads": 1, "head_dim": 32}
    tables["shapes"] |= {"rows": 2, "sequence": 256, "anchors": 8}
    tables["loss"] |= {"chunk_blocks": 8}
    tables["data"] |= {"prompt_tokens": 32, "response_tokens": 32}
    tables.pop("target")
    return config.parse(tables, "test")


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Each graph that would be compiled: its code, and what AOTAutograd's key has of its inputs."""
    import torch._inductor.compile_fx as compile_fx

    seen: list[tuple[Any, ...]] = []

    def capture(graph: Any, inputs: Any, **_: Any) -> Any:
        facts = [
            (tuple(one.shape), one.stride(), one.dtype, one.device, one.requires_grad, type(one).__name__)
            for one in inputs
            if isinstance(one, Tensor)
        ]
        seen.append((graph.code, facts, torch.is_grad_enabled()))
        return graph.forward

    monkeypatch.setattr(compile_fx, "compile_fx", capture)
    torch._dynamo.reset()
    yield seen
    torch._dynamo.reset()


class Borrowed:
    """What a trainer borrows, without a target."""

    busy = None

    def __init__(self, settings: config.Config) -> None:
        generator = torch.Generator().manual_seed(0)
        sizes = settings.drafter
        self.embedding = torch.randn(sizes.vocab_size, sizes.hidden_size, generator=generator)
        self.head = torch.randn(sizes.vocab_size, sizes.hidden_size, generator=generator)
        self.width = len(sizes.target_layer_ids) * sizes.hidden_size

    def features(self, reading: Pass) -> Tensor:
        return torch.randn(*reading.tokens.shape, self.width, generator=torch.Generator().manual_seed(1))


def packed(settings: config.Config) -> Rows:
    count, length = 2, settings.shapes.sequence
    known = {
        "tokens": torch.arange(count * length).view(count, length) % 200,
        "document": torch.zeros(count, length, dtype=torch.int32),
        "response": torch.ones(count, length, dtype=torch.bool),
    }
    return Rows(**{one.name: known.get(one.name, 0) for one in dataclasses.fields(Rows)})  # type: ignore[arg-type]


def test_a_trainers_step_compiles_exactly_the_graphs_of_the_rehearsal(captured: list[tuple[Any, ...]]) -> None:
    settings = small()
    graphs.Rehearsal(settings, CPU)()
    rehearsed = captured.copy()
    assert len(rehearsed) == 2  # one layer for all, one chunk of the loss
    captured.clear()
    torch._dynamo.reset()
    drafter = Drafter(settings.drafter)
    chunk = compiling.compile_regions(drafter)
    optimizers = trainer.make_optimizers(drafter, settings.optimizer)
    borrowed = Borrowed(settings)
    place = trainer.Place(device=CPU)
    rows = packed(settings)
    trainer.one_step(drafter, optimizers, chunk, borrowed, rows, settings, seed=0, step=0, rate=1e-3, place=place)
    assert captured == rehearsed


def test_a_rehearsed_batch_has_the_shapes_and_types_that_anchors_have() -> None:
    settings = small()
    batch = graphs.example(settings, CPU)
    rows = packed(settings)
    drawn = anchors.draw(
        rows.tokens,
        rows.document,
        rows.response,
        samples=[0, 1],
        seed=0,
        epoch=0,
        slots=settings.shapes.anchors,
        block=settings.shapes.block,
        mask_token=settings.drafter.mask_token_id,
    )
    for name in ("position", "start", "positions"):
        real, ours = getattr(drawn, name), getattr(batch, name)
        assert (real.shape, real.dtype) == (ours.shape, ours.dtype), name
    assert (batch.labels.shape, batch.labels.dtype) == (drawn.labels.flatten().shape, drawn.labels.dtype)
    assert batch.weight.sum() == pytest.approx(1.0)


def test_the_identity_of_graphs_changes_with_everything_that_they_contain_and_with_nothing_else() -> None:
    base = config.to_tables(small())
    identity = graphs.graph_id(config.parse(base, "test"))

    def changed(table: str, name: str, value: Any) -> str:
        tables = json.loads(json.dumps(base))
        tables[table][name] = value
        return graphs.graph_id(config.parse(tables, "test"))

    deciding: list[tuple[str, str, Any]] = [
        ("drafter", "hidden_size", 128),
        ("drafter", "rms_norm_eps", 1e-5),
        ("drafter", "vocab_size", 300),
        ("shapes", "sequence", 512),
        ("shapes", "anchors", 16),
        ("loss", "chunk_blocks", 4),
        ("precision", "compute", "bfloat16"),
    ]
    for table, name, value in deciding:
        assert changed(table, name, value) != identity, name
    steering: list[tuple[str, str, Any]] = [
        ("drafter", "rope_theta", 5e5),
        ("drafter", "mask_token_id", 9),
        ("drafter", "target_layer_ids", [1, 2, 3]),
        ("loss", "gamma", 3.0),
        ("optimizer", "lr", 1.0),
        ("checkpoint", "every", 7),
    ]
    for table, name, value in steering:
        assert changed(table, name, value) == identity, name
    assert graphs.graph_id(small(), "cpu") != identity
    assert graphs.describe("tiny")["graph_ids"]["cuda"] == graphs.graph_id(config.load("tiny"))


def function_from(source: str, folder: Path) -> Any:
    path = folder / "source.py"
    path.write_text(source)
    code = compile(source, str(path), "exec")
    module = types.ModuleType("source")
    exec(code, module.__dict__)
    import linecache

    linecache.checkcache(str(path))
    return module.__dict__["f"]


def test_comments_layout_and_docstrings_do_not_enter_a_digest_of_source_but_code_does(tmp_path: Path) -> None:
    bare = graphs.source_digest(function_from("def f(x):\n    return x + 1\n", tmp_path))
    dressed = 'def f(x):  # adds\n    """Adds one."""\n\n    # one more\n    return (\n        x\n        + 1\n    )\n'
    assert graphs.source_digest(function_from(dressed, tmp_path)) == bare
    assert graphs.source_digest(function_from("def f(x):\n    return x + 2\n", tmp_path)) != bare


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_digest_of_source_is_the_same_under_every_python(version: str) -> None:
    found = shutil.which(f"python{version}")
    if found is None or subprocess.run([found, "--version"], capture_output=True, check=False).returncode:
        pytest.skip(f"python{version} is not on the PATH, or only a name for none")
    code = (
        "import ast, sys, re; source = open('dflash/graphs.py').read(); "
        "body = re.search(r'def _canonical.*?def _is_real', source, re.S)[0].removesuffix('def _is_real'); "
        "exec('from __future__ import annotations\\nimport ast\\n' + body); "
        "print(_canonical(ast.parse(open('dflash/model.py').read())))"
    )
    said = [
        subprocess.run([one, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for one in (sys.executable, found)
    ]
    assert said[0] == said[1]


def test_a_micro_step_fills_every_gradient_with_numbers_whether_compiled_or_not(
    captured: list[tuple[Any, ...]],
) -> None:
    rehearsal = graphs.Rehearsal(small(), CPU)
    loss, right = graphs.micro_step(rehearsal.drafter, rehearsal.chunk, rehearsal.settings, rehearsal.batch)
    assert captured
    assert torch.isfinite(loss)
    assert right.shape == rehearsal.batch.labels.shape
    assert all(one.grad is not None and torch.isfinite(one.grad).all() for one in rehearsal.drafter.parameters())


def test_warming_up_asks_no_cache_and_compiles_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from dflash import config, warm; from dflash.replay import Observer\n"
        "with Observer() as seen: warm.warm_up(config.load('tiny'), torch.device('cpu'))\n"
        "assert not any(seen.counts().values()), seen.counts()\n"
        "assert 'torch._dynamo.backends.distributed' in sys.modules\n"
    )
    # torch tries each instruction set in a process of its own, unless it is told that they work
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "fxgraph").exists()
    assert not (tmp_path / "aotautograd").exists()


def test_a_failure_in_the_model_is_not_swallowed_by_warming_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("no chunk today")

    torch._dynamo.reset()
    monkeypatch.setattr(warm, "_stop", broken)
    with pytest.raises(Exception, match="no chunk today"):
        warm._trace(small(), CPU)
    torch._dynamo.reset()


def test_a_kernels_winner_is_kept_in_the_cache_in_use_and_not_where_it_was_baked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.autotune_cache import AutotuneCache
    from torch._inductor.runtime.triton_compat import Config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "here"))
    baked = tmp_path / "elsewhere" / "ab" / "cabc.py"
    cache = AutotuneCache.create({}, str(baked), "hash of the configurations")
    assert cache is not None
    kernel = types.SimpleNamespace(filename=str(baked), save_cache_hook=cache.save)
    winners._move(kernel)
    kernel.save_cache_hook(Config({"XBLOCK": 64}, num_warps=4, num_stages=1), 1000)
    assert kernel.filename == str(tmp_path / "here" / "ab" / "cabc.py")
    assert [path.suffix for path in (tmp_path / "here" / "ab").iterdir()] == [".best_config"]
    assert not (tmp_path / "elsewhere").exists()
    again = AutotuneCache.create({}, kernel.filename, "hash of the configurations")
    assert again is not None
    assert again._read() is not None
    winners._move(types.SimpleNamespace(filename=None))


def test_kernels_are_moved_once_and_an_unknown_autotuner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    from env.errors import Failure

    winners.keep_in_cache()
    moved = CachingAutotuner.recheck_autotune_cache
    winners.keep_in_cache()
    assert CachingAutotuner.recheck_autotune_cache is moved
    monkeypatch.delattr(CachingAutotuner, "recheck_autotune_cache")
    with pytest.raises(Failure, match="in a way that was never read"):
        winners.keep_in_cache()


def test_replaying_on_a_gpu_that_is_not_there_is_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dflash.replay", "--config", "tiny", "--device", "cuda"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert "error: there is no GPU here to replay on" in done.stderr
