from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from env import entry, variants
from env.doctor import Host, Plan
from env.doctor.facts.nvidia import Card, Nvidia
from env.errors import Exit, Failure
from env.variants import ROOT

CPU = entry.Sealed(gpu="cpu", instruction_sets=("avx2", "avx512", "of-tomorrow"))
H200 = entry.Sealed(gpu="NVIDIA H200")


def host(driver: str, name: str, capability: str) -> Host:
    card = Card(name=name, capability=capability)
    return Host(nvidia=Nvidia(driver=driver, cards=(card,)))


def plan() -> Plan:
    matrix = variants.load()
    return Plan(variant=matrix.variant("cu130"), matrix=matrix)


def test_a_driver_below_the_floor_is_refused_with_need_have_and_what_to_do() -> None:
    with pytest.raises(Failure, match=r"driver 570.86 is older than cu130 needs \(580\)") as refused:
        entry.refuse_unfit(host("570.86", "NVIDIA H200", "9.0"), plan())
    assert refused.value.code == Exit.HOST
    assert "update the driver to 580 or newer, or use `--variant cu128`" in (refused.value.hint or "")
    assert (refused.value.hint or "").endswith("that is another image")


def test_a_card_without_code_is_refused() -> None:
    with pytest.raises(Failure, match=r"Tesla V100.*has no code for that capability") as refused:
        entry.refuse_unfit(host("580.95.05", "Tesla V100", "7.0"), plan())
    assert refused.value.code == Exit.HOST


def test_a_card_for_which_nothing_was_baked_is_refused_unless_it_may_compile(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unknown = host("580.95.05", "NVIDIA L40S", "8.9")
    with pytest.raises(Failure, match="no kernels for NVIDIA L40S; it has them for NVIDIA H200") as refused:
        entry.refuse_unbaked(unknown, [CPU, H200], allowed=False)
    assert "-e DFLASH_ALLOW_COLD=1" in (refused.value.hint or "")
    entry.refuse_unbaked(unknown, [CPU, H200], allowed=True)
    assert "they are compiled in the first step" in capsys.readouterr().err


def test_the_card_that_was_baked_for_passes() -> None:
    fit = host("580.95.05", "NVIDIA H200", "9.0")
    entry.refuse_unfit(fit, plan())
    entry.refuse_unbaked(fit, [CPU, H200], allowed=False)
    assert entry.notices(fit, [CPU, H200], frozenset()) == []


def test_another_processor_than_the_builder_s_is_said() -> None:
    bare = Host(nvidia=Nvidia())
    assert entry.notices(bare, [CPU], frozenset({"avx2", "avx512f"})) == [
        "no card is visible here: this runs on the CPU"
    ]
    said = entry.notices(bare, [CPU], frozenset({"avx2"}))
    assert "the processor has avx512, and this one has not" in said[1]


def test_only_what_trains_or_verifies_is_guarded() -> None:
    assert entry.guarded(["nox", "-s", "train", "--", "--seed", "1"])
    assert entry.guarded(["/some/where/nox", "-s", "verify"])
    assert not entry.guarded(["nox", "-s", "doctor"])
    assert not entry.guarded(["nox", "-s", "train", "--", "--help"])
    assert not entry.guarded(["bash"])


def test_a_variant_that_the_image_does_not_hold_is_refused() -> None:
    for words in (["--variant", "cu128"], ["--variant=cu128"]):
        with pytest.raises(Failure, match="this image holds cu130, not cu128") as refused:
            entry.refuse_other_variant(["nox", "-s", "train", "--", *words], "cu130")
        assert refused.value.code == Exit.USAGE
    entry.refuse_other_variant(["nox", "-s", "train", "--", "--variant", "cu130"], "cu130")
    entry.refuse_other_variant(["nox", "-s", "train"], "cu130")


def test_every_session_that_is_launched_keeps_to_the_image_s_variant(tmp_path: Path) -> None:
    for session in entry.LAUNCHED:
        done = run(
            "nox", "-s", session, "--", "--variant", "cu130", DFLASH_VARIANT="cu132", DFLASH_CACHE_HOME=str(tmp_path)
        )
        assert done.returncode == Exit.USAGE
        assert done.stderr.splitlines() == [
            "error: this image holds cu132, not cu130",
            "hint: each variant has an image of its own: `nox -s image -- --variant cu130` builds that one",
        ]


def test_an_image_s_variant_that_is_none_is_refused_with_its_source(tmp_path: Path) -> None:
    done = run("nox", "-s", "train", DFLASH_VARIANT="cu13", DFLASH_CACHE_HOME=str(tmp_path))
    assert done.returncode == Exit.USAGE
    assert "error: there is no variant `cu13`, which DFLASH_VARIANT names; " in done.stderr
    assert "Traceback" not in done.stderr


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(
        [sys.executable, "-P", "-m", "env.entry", *command], env=settings, capture_output=True, text=True, check=False
    )


def test_the_command_takes_the_place_of_the_entrypoint(tmp_path: Path) -> None:
    done = run("sh", "-c", "echo $HOME; exit 42", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 42
    assert done.stdout == f"{tmp_path}/dflash/home\n"
    assert run("no-such-program", XDG_CACHE_HOME=str(tmp_path)).returncode == Exit.USAGE


def test_without_a_folder_to_write_it_stops_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("true", DFLASH_CACHE_HOME=str(tmp_path / "file" / "below"))
    assert done.returncode == Exit.STORAGE
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr
