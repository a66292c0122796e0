"""Factors are collected from the real torch, as plain values that two processes can compare."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from env.cache import factors  # noqa: E402
from env.cache.canonical import canonical  # noqa: E402
from env.errors import Exit, Failure  # noqa: E402
from env.variants import ROOT  # noqa: E402


@pytest.fixture(scope="module")
def collected() -> dict[str, Any]:
    return dict(factors.collect("cpu"))


@pytest.fixture
def a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card's capability and name without a card: enough to ask the real ptxas."""
    from torch._inductor.codecache import CacheBase

    system = {"device": {"name": "NVIDIA H200"}, "version": {"cuda": "13.0", "triton": "x"}}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    monkeypatch.setattr(CacheBase, "get_system", lambda: system)


def test_every_kind_of_factor_is_there(collected: dict[str, Any]) -> None:
    expected = {
        "device.type", "python.abi", "python.minor", "torch.version", "torch.git", "torch.cuda", "torch.key",
        "torch.cache_key_tag", "torch.default_dtype", "torch.deterministic", "torch.matmul.fp32_precision",
        "system.gpu", "system.cuda", "triton.key", "inductor.cpp.cxx", "functorch.cse", "dynamo.capture_scalar_outputs",
        "cpu.capability", "cpu.native", "cpu.compiler", "cpu.command", "cpu.threads",
    }  # fmt: skip
    assert expected <= set(collected)
    assert collected["torch.version"] == torch.__version__
    assert len(collected["torch.key"]) == 64
    assert "gcc" in collected["cpu.compiler"].lower() or "g++" in collected["cpu.compiler"].lower()


def test_the_settings_are_those_that_torch_hashes_and_no_others(collected: dict[str, Any]) -> None:
    inductor = {name for name in collected if name.startswith("inductor.")}
    saved = torch._inductor.config.save_config_portable(ignore_private_configs=False)
    assert inductor == {f"inductor.{name}" for name in saved if name not in factors.NO_SETTING}
    assert "inductor.compile_threads" not in inductor
    assert "functorch.TYPE_CHECKING" not in collected
    assert "dynamo.recompile_limit" not in collected, "torch itself says that it changes no graph"
    assert "dynamo.force_compile_during_fx_trace" not in collected, "a cure of the race must not move a key"


def test_nothing_of_this_process_alone_is_in_a_value(collected: dict[str, Any]) -> None:
    assert " at 0x" not in json.dumps(collected)
    assert canonical(collected) == canonical(json.loads(json.dumps(collected)))


def test_another_process_finds_the_same_and_so_the_same_identity(collected: dict[str, Any]) -> None:
    program = "import json; from env.cache import factors; print(json.dumps(factors.collect('cpu')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    other = json.loads(done.stdout.splitlines()[-1])
    mine = {name: value for name, value in collected.items() if other.get(name) != value}
    assert mine == {}, "other tests of this process may have left a setting changed"
    assert factors.cache_id(other, "g", "c") == factors.cache_id(collected, "g", "c")


def test_an_identity_depends_on_every_factor_the_graphs_and_the_card() -> None:
    base = factors.cache_id({"a": 1, "b": [1, 2]}, "g", "c")
    others = [
        factors.cache_id({"a": 2, "b": [1, 2]}, "g", "c"),
        factors.cache_id({"a": 1, "b": [2, 1]}, "g", "c"),
        factors.cache_id({"a": 1, "b": [1, 2], "c": None}, "g", "c"),
        factors.cache_id({"a": 1, "b": [1, 2]}, "h", "c"),
        factors.cache_id({"a": 1, "b": [1, 2]}, "g", "d"),
    ]
    assert len({base, *others}) == 6
    assert factors.cache_id({"b": [1, 2], "a": 1}, "g", "c") == base


def test_a_card_brings_its_index_and_the_text_of_the_real_ptxas(a_card: None) -> None:
    found = factors.collect("cuda:5")
    assert found["device.index"] == 5
    assert found["triton.arch"] == "sm_90a"
    assert found["system.gpu"] == "NVIDIA H200"
    assert "release" in str(found["triton.ptxas"])
    assert "/" not in str(found["triton.ptxas"]).replace("NVIDIA (R)", "").replace("compiler.", "").split("Build")[0]
    assert not [name for name in found if name.startswith("cpu.")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_without_a_card_there_are_no_factors_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Failure, match="torch sees no GPU 3 here") as refusal:
        factors.collect("cuda:3")
    assert refusal.value.code is Exit.HOST
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    with pytest.raises(Failure, match="hold no GPU's name"):
        factors.collect("cuda:0")


def test_a_ptxas_that_does_not_run_is_one_sentence(a_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import compiler  # type: ignore[import-untyped]

    def gone(arch: int = 80) -> str:
        raise FileNotFoundError("/nowhere/ptxas")

    monkeypatch.setattr(compiler, "get_ptxas_version", gone)
    with pytest.raises(Failure, match="no ptxas that runs") as refusal:
        factors.collect("cuda:0")
    assert refusal.value.code is Exit.HOST


def test_a_torch_that_was_never_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(Failure, match=r"torch 2\.99\.0: what enters its cache keys is known only for 2\.10") as refusal:
        factors.collect("cpu")
    assert refusal.value.code is Exit.HOST


@pytest.mark.parametrize("name", ["torch_key", "CacheBase"])
def test_a_private_part_that_has_moved_is_refused_and_not_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache

    monkeypatch.delattr(codecache, name)
    with pytest.raises(Failure, match=f"has no {name}") as refusal:
        factors.collect("cpu")
    assert refusal.value.code is Exit.HOST


def test_a_missing_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    def none(*_: object, **__: object) -> None:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(cpp_builder, "CppTorchOptions", none)
    with pytest.raises(Failure, match=r"no C\+\+ compiler") as refusal:
        factors.collect("cpu")
    assert "apt-get install g++" in str(refusal.value.hint)


def test_which_variables_feed_a_setting_is_read_off_torchs_source() -> None:
    found = factors.variables()
    assert found["inductor.cpp.cxx"] == ("CXX",)
    assert found["functorch.enable_autograd_cache"] == ("TORCHINDUCTOR_AUTOGRAD_CACHE",)
    if not torch.__version__.startswith("2.10."):  # it is new in 2.11, and got a variable of its own later
        assert "CI" in found["functorch.error_on_custom_op_aliasing"]
    assert "TORCHINDUCTOR_MAX_AUTOTUNE" in found["inductor.max_autotune"]


def test_values_are_made_plain() -> None:
    assert factors.plain({"b", "a"}) == ["a", "b"]
    assert factors.plain((1, None, 2.5)) == [1, None, 2.5]
    assert factors.plain({2: {"x"}}) == {"2": ["x"]}
    assert factors.plain(float("inf")) == "inf"
    assert factors.plain(Path.exists) == "pathlib.Path.exists"
    assert factors.plain(json) == "json"
    assert factors.plain(torch.float32) == "torch.float32"
    assert " at 0x" not in str(factors.plain(object()))


def test_details_note_what_torch_hashes_and_leave_nothing_behind() -> None:
    from torch._functorch._aot_autograd import autograd_cache
    from torch._inductor import codecache

    before = (autograd_cache.autograd_cache_key, codecache.compiled_fx_graph_hash)
    noted = factors.Details()
    noted.note("akey", ["[1] f: <function x at 0x7f93ad744720>"])
    noted.note("akey", ["again"])
    assert noted.lines == {"akey": ("[1] f: <function x>",)}
    with factors.details():
        assert codecache.compiled_fx_graph_hash is not before[1]
    with contextlib.suppress(ZeroDivisionError), factors.details():
        raise ZeroDivisionError
    assert (autograd_cache.autograd_cache_key, codecache.compiled_fx_graph_hash) == before
