"""A cache is verified by what a fresh process counted: hits as promised, nothing missed, nothing bypassed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from caches import make_sealed

from env.cache import verify
from env.cache.manifest import Manifest
from env.errors import Exit, Failure


@pytest.fixture
def sealed(tmp_path: Path) -> Manifest:
    return make_sealed(tmp_path)[1]


def replay(**more: Any) -> dict[str, Any]:
    """The record of a replay in which everything hits, with other counts if they are given."""
    counts = {
        "autograd_hit": 1, "autograd_miss": 0, "autograd_bypass": 0,
        "fx_hit": 2, "fx_miss": 0, "fx_bypass": 0, "triton_hit": 3, "triton_miss": 0,
    }  # fmt: skip
    keys = {
        "autograd_hit": ["aaaa"], "autograd_miss": [], "fx_hit": ["fabc", "fcde"], "fx_miss": [],
        "triton_hit": [], "triton_miss": [],
    }  # fmt: skip
    keys |= more.pop("keys", {})
    return {"counts": {**counts, **more}, "keys": keys}


def test_a_replay_in_which_every_promised_key_hits_is_good(sealed: Manifest) -> None:
    verdict = verify.judge(sealed, replay())
    assert verdict.problems == ()
    assert verdict.sentence() == (
        "AOTAutograd 1 of 1 hit, 0 missed; FX 2 of 2 hit, 0 missed; Triton 3 of 3 hit, 0 missed"
    )


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing was asked": (
        {"autograd_hit": 0, "fx_hit": 0, "triton_hit": 0, "keys": {"autograd_hit": [], "fx_hit": []}},
        "AOTAutograd: 1 hits promised, 0 counted",
    ),
    "AOTAutograd missed": ({"autograd_hit": 0, "autograd_miss": 1}, "AOTAutograd: 1 missed"),
    "FX missed": ({"fx_hit": 1, "fx_miss": 1}, "FX: 1 missed"),
    "Triton compiled": ({"triton_miss": 1}, "Triton: 1 missed"),
    "AOTAutograd was bypassed": ({"autograd_bypass": 1}, "AOTAutograd: 1 could not be cached"),
    "FX was bypassed": ({"fx_bypass": 1}, "FX: 1 could not be cached"),
    "fewer kernels than promised": ({"triton_hit": 2}, "Triton: 3 hits promised, 2 counted"),
    "more hits than promised": ({"fx_hit": 3}, "FX: 2 hits promised, 3 counted"),
    "another key hit instead": (
        {"keys": {"fx_hit": ["fabc", "fzzz"]}},
        "FX was asked for fzzz, which is not promised",
    ),
    "a promised key did not hit": ({"keys": {"fx_hit": ["fabc"]}}, "FX did not hit fcde, which is promised"),
    "an unpromised kernel was compiled": (
        {"triton_miss": 1, "keys": {"triton_miss": ["OTHER"]}},
        "Triton was asked for OTHER, which is not promised",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_way_of_not_keeping_a_promise_is_a_problem_of_its_own(sealed: Manifest, name: str) -> None:
    more, sentence = CASES[name]
    verdict = verify.judge(sealed, replay(**more))
    assert sentence in verdict.problems
    failure = verdict.failure("x")
    assert failure.code is Exit.CACHE
    assert sentence in failure.details


def test_counts_alone_are_judged_where_a_record_has_no_keys(sealed: Manifest) -> None:
    assert verify.judge(sealed, {"counts": replay()["counts"]}).problems == ()
    assert verify.judge(sealed, {"counts": {"fx_hit": 2}}).problems != ()


def test_of_many_fields_that_differ_for_one_reason_only_some_are_shown(sealed: Manifest) -> None:
    record = replay(autograd_hit=0, autograd_miss=1, keys={"autograd_hit": [], "autograd_miss": ["anew"]})
    record["details"] = {"anew": [f"[1] example_inputs[{place}]: here" for place in range(40)]}
    lines = tuple(f"[2] example_inputs[{place}]: there" for place in range(40))
    reasons = verify.judge(sealed, record, sealed_details={"aaaa": lines}).reasons
    assert len(reasons) == 10
    assert reasons[-1] == "and 32 more fields"


def test_a_record_without_counts_proves_nothing(sealed: Manifest) -> None:
    with pytest.raises(Failure, match="proves nothing"):
        verify.judge(sealed, {"keys": {}})


def test_a_manifest_that_promises_nothing_verifies_nothing(tmp_path: Path) -> None:
    empty = make_sealed(tmp_path, counts={"autograd_hit": 0, "fx_hit": 0, "triton_hit": 0})[1]
    verdict = verify.judge(empty, {"counts": {}, "keys": {"autograd_hit": ["aaaa"], "fx_hit": ["fabc", "fcde"]}})
    assert any("promises no hit at all" in problem for problem in verdict.problems)


def test_a_miss_is_explained_by_the_factor_that_differs(sealed: Manifest) -> None:
    here: dict[str, Any] = {**sealed.identity(), "inductor.cpp.cxx": [None, "/usr/bin/g++"]}
    verdict = verify.judge(
        sealed, replay(fx_miss=1), here=here, variables={"inductor.cpp.cxx": ("CXX",)}, environ={"CXX": "/usr/bin/g++"}
    )
    assert verdict.reasons == ("inductor.cpp.cxx: sealed `g++`, here `/usr/bin/g++` — `unset CXX`",)


def test_a_replay_may_bring_its_own_factors(sealed: Manifest) -> None:
    record = {**replay(fx_miss=1), "identity": {**sealed.identity(), "device.index": 6}}
    assert verify.judge(sealed, record).reasons[0].startswith("device.index: sealed `0`, here `6`")


def test_a_miss_in_spite_of_equal_factors_is_explained_by_the_keys_own_details(sealed: Manifest) -> None:
    record = replay(autograd_hit=0, autograd_miss=1, keys={"autograd_hit": [], "autograd_miss": ["anew"]})
    record |= {"identity": sealed.identity(), "details": {"anew": ["[1] x: 1", "[9] shape: [8]"]}}
    verdict = verify.judge(sealed, record, sealed_details={"aaaa": ("[1] x: 1", "[2] shape: [4]")})
    assert verdict.reasons == (
        "the factors are equal, but anew is not aaaa, the nearest sealed key:",
        "shape: sealed `[4]`, here `[8]`",
    )


def test_where_nothing_can_be_said_that_is_said(sealed: Manifest) -> None:
    verdict = verify.judge(sealed, replay(fx_miss=1), here=sealed.identity())
    assert "every factor is equal" in verdict.failure("x").details[-1]
