"""Real compilations for the CPU: baked in one process, sealed, seeded elsewhere, replayed and disturbed in others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from caches import believed

from env.cache import examine, pins, seal, seed, verify
from env.cache.manifest import Manifest

STEP = Path(__file__).with_name("step.py")
ENVIRON = {
    "TORCHINDUCTOR_VEC_ISA_OK": "1",  # each instruction set would be tried by a compilation
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "OMP_NUM_THREADS": "1",  # the cores that a busy machine gives us may change while the tests run
}
HOSTILE = {
    "CXX": "/usr/bin/g++", "TRITON_DISABLE_LINE_INFO": "1", "TORCHINDUCTOR_MAX_AUTOTUNE": "1", "CI": "true",
    "TORCH_COMPILE_CACHE_KEY_TAG": "hostile", "TORCHINDUCTOR_CACHE_DIR": "/nowhere", "HOME": "/nowhere",
}  # fmt: skip

FACTORS = {
    "an inductor setting": "inductor.max_fusion_size",
    "the compiler's name": "inductor.cpp.cxx",
    "a functorch setting": "functorch.cse",
    "a dynamo setting": "dynamo.capture_scalar_outputs",
    "the default dtype": "torch.default_dtype",
    "deterministic algorithms": "torch.deterministic",
    "the precision of products": "torch.matmul.fp32_precision",
    "the tag of keys": "torch.cache_key_tag",
    "threads": "cpu.threads",
    "a variable of Triton": "triton.env.TRITON_DISABLE_LINE_INFO",
    "another build of torch": "torch.key",
}
"""Each kind of factor that can be changed within a process, and the one that must then be named."""

DETAILS = {"the graph's source": "gm differs", "a shape": "shape"}
"""What is in the keys and is no factor: with the factors equal, the keys' own details tell it."""


def run(cache: Path, *changes: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Take the step in a fresh process, then once more for each change."""
    given = {name: value for name, value in os.environ.items() if pins.feeds(name) is None}
    given |= ENVIRON if environ is None else environ
    done = subprocess.run(
        [sys.executable, str(STEP), str(cache), *changes], env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


@dataclass(frozen=True)
class Baked:
    sealed: Path
    manifest: Manifest
    results: dict[str, Any]
    """What a fresh process found in a seeded copy, disturbed in each way."""
    copy: Path
    added: tuple[str, ...]
    """Shared objects that it built although everything was there."""


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Baked:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("real")
    sealed, manifest = bake(folder, folder / "bake")
    copy, _, _ = seed.seed(sealed, folder / "home", believed(folder))
    before = set(copy.rglob("*.so"))
    environ, _ = pins.pinned({**os.environ, **HOSTILE}, keep=ENVIRON)
    results = run(copy, *FACTORS, *DETAILS, environ={**environ, **ENVIRON})
    added = tuple(sorted(path.name for path in set(copy.rglob("*.so")) - before))
    return Baked(sealed, manifest, results, copy, added)


def bake(folder: Path, source: Path) -> tuple[Path, Manifest]:
    """Compile cold, and seal what a fresh process's first step must find."""
    record = run(source)["as it is"]
    assert record["counts"]["autograd_miss"] == 1, "the premise: nothing was there before"
    keys = {"aot_autograd": record["keys"]["autograd_miss"], "fx": record["keys"]["fx_miss"], "triton": []}
    return seal.seal(
        source,
        folder / "sealed",
        graph_id="small",
        gpu_id="cpu",
        gpu={"name": "cpu"},
        factors=record["factors"],
        counts={"autograd_hit": 1, "fx_hit": 2, "triton_hit": 0},
        keys=keys,
        details=record["details"],
        trust=folder / "trust",
    )


def judged(baked: Baked, name: str) -> verify.Verdict:
    return verify.judge(
        baked.manifest,
        baked.results[name],
        sealed_details=examine.read_details(baked.sealed, baked.manifest),
        variables={"inductor.cpp.cxx": ("CXX",)},
        environ={},
    )


def test_a_sealed_cache_hits_at_another_path_under_a_hostile_environment_that_was_pinned(baked: Baked) -> None:
    verdict = judged(baked, "as it is")
    assert verdict.problems == ()
    assert verdict.sentence() == (
        "AOTAutograd 1 of 1 hit, 0 missed; FX 2 of 2 hit, 0 missed; Triton 0 of 0 hit, 0 missed"
    )


def test_what_was_sealed_is_not_built_again(baked: Baked) -> None:
    assert baked.added == ()


@pytest.mark.parametrize("change", FACTORS)
def test_one_changed_factor_is_named_exactly(baked: Baked, change: str) -> None:
    from env.cache.explain import differences

    result = baked.results[change]
    found = differences(baked.manifest.identity(), result["identity"], environ={})
    assert [difference.name for difference in found] == [FACTORS[change]]
    verdict = judged(baked, change)
    if verdict.problems:  # a setting of dynamo's, for example, is in no key by itself
        assert len(verdict.reasons) == 1
        assert verdict.reasons[0].startswith(f"{FACTORS[change]}: sealed `")


IN_NO_KEY = {"a dynamo setting", "threads", "a variable of Triton"}
"""What torch 2.11 does not put into keys of graphs for the CPU; they decide the identity all the same."""


@pytest.mark.parametrize("change", sorted(set(FACTORS) - IN_NO_KEY))
def test_a_changed_factor_really_misses_and_verify_says_so(baked: Baked, change: str) -> None:
    assert judged(baked, change).problems != ()


@pytest.mark.parametrize("change", DETAILS)
def test_a_miss_in_spite_of_equal_factors_is_explained_by_the_keys_own_details(baked: Baked, change: str) -> None:
    verdict = judged(baked, change)
    assert verdict.problems
    assert verdict.reasons[0].startswith("the factors are equal, but ")
    assert any(DETAILS[change] in reason for reason in verdict.reasons[1:])
    names = [reason.split(":")[0].split(" ")[0].split("[")[0] for reason in verdict.reasons[1:]]
    assert set(names) <= {"gm", "example_inputs", "aot_config"}


def test_the_lines_of_code_that_differ_are_shown(baked: Baked) -> None:
    told = "\n".join(judged(baked, "the graph's source").reasons)
    assert "0.5" in told
    assert "0.75" in told


def test_two_bakes_at_two_paths_seal_to_one_digest(baked: Baked, tmp_path: Path) -> None:
    sealed, manifest = bake(tmp_path, tmp_path / "another-and-longer-place" / "bake")
    assert sealed != baked.sealed
    assert manifest.digest == baked.manifest.digest
    assert manifest.keys == baked.manifest.keys
    assert manifest.cache_id == baked.manifest.cache_id


def test_a_compiler_named_by_the_host_makes_everything_miss_and_is_named(baked: Baked, tmp_path: Path) -> None:
    """The measured case: a machine that sets CXX misses every key, also of kernels for GPUs."""
    import shutil

    copy = shutil.copytree(baked.copy, tmp_path / "copy")
    result = run(copy, environ={**ENVIRON, "CXX": "/usr/bin/g++"})["as it is"]
    verdict = verify.judge(baked.manifest, result, variables={"inductor.cpp.cxx": ("CXX",)}, environ={"CXX": "x"})
    assert verdict.problems
    assert verdict.reasons[0] == "inductor.cpp.cxx: sealed `g++`, here `/usr/bin/g++` — `unset CXX`"
