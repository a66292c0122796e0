"""Driver and cards: how they are read, and what is judged of recorded facts, real ones and data sheets'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hosts import everywhere, gpu_host, host, other_matrix, plan, recorded

from env.doctor.checks import capability, card_memory, cuda, driver
from env.doctor.facts import nvidia
from env.doctor.facts.nvidia import Card, Nvidia
from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.plan import Plan, fitting, numbers, runs_on
from env.variants import load

H200 = Card(name="NVIDIA H200", capability="9.0", memory_mib=143771)
BLACKWELL = Card(name="NVIDIA RTX PRO 6000 Blackwell Server Edition", capability="12.0", memory_mib=97887)


def found(finding: Finding | None) -> Finding:
    assert finding is not None
    return finding


# Reading.


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


PROC = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@host)  Mon Jul 14\n"
    "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n"
)


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({"sys/module/nvidia/version": "580.159.04\n"}, ("580.159.04", "/sys/module/nvidia/version")),
        ({"proc/driver/nvidia/version": PROC}, ("580.159.04", "/proc/driver/nvidia/version")),
        (
            {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.86  Fri Jul 14\n"},
            ("535.86", "/proc/driver/nvidia/version"),
        ),
        ({"sys/module/nvidia/version": "garbage\n"}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_the_kernels_own_files_name_the_driver(
    tmp_path: Path, files: dict[str, str], version: tuple[str | None, str | None]
) -> None:
    assert nvidia.kernel_driver(tree(tmp_path, files)) == version


def smi(folder: Path, text: str) -> dict[str, str]:
    """An environment whose PATH has only this `nvidia-smi`."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_cards_are_read_from_nvidia_smi_in_its_order(tmp_path: Path) -> None:
    environ = smi(tmp_path, 'echo "NVIDIA H200, 580.159.04, 143771, 9.0"; echo "Tesla T4, 580.159.04, 15360, 7.5"')
    cards, said, version = nvidia.ask_smi(environ)
    assert cards == (H200, Card(name="Tesla T4", capability="7.5", memory_mib=15360))
    assert (said, version) == (None, "580.159.04")


def test_a_driver_that_does_not_know_capabilities_is_asked_without_them(tmp_path: Path) -> None:
    text = (
        'case "$1" in *compute_cap*) echo "Field \\"compute_cap\\" is not a valid field to query."; exit 2;; esac\n'
        'echo "Tesla V100-SXM2-16GB, 418.126.02, 16130"'
    )
    cards, _, version = nvidia.ask_smi(smi(tmp_path, text))
    assert cards == (Card(name="Tesla V100-SXM2-16GB", memory_mib=16130),)
    assert version == "418.126.02"


def test_what_nvidia_smi_says_instead_of_cards_is_kept(tmp_path: Path) -> None:
    words = "Failed to initialize NVML: Driver/library version mismatch"
    cards, said, version = nvidia.ask_smi(smi(tmp_path, f'echo "{words}"; exit 18'))
    assert (cards, said, version) == (None, words, None)
    assert nvidia.ask_smi(smi(tmp_path, 'echo "No devices were found"; exit 6')) == ((), "No devices were found", None)


def test_a_hanging_nvidia_smi_and_one_that_talks_rubbish_are_no_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "SMI_SECONDS", 0.3)
    assert nvidia.ask_smi(smi(tmp_path, "sleep 60")) == (None, None, None)
    monkeypatch.setattr(nvidia, "SMI_SECONDS", 10.0)
    cards, said, _ = nvidia.ask_smi(smi(tmp_path, r"printf '\377\376, ,\n,,,,,\nN/A, [N/A], x\n'"))
    assert cards == ()
    assert said is not None


def test_warnings_among_the_cards_are_passed_over_and_unknown_fields_are_unknown() -> None:
    cards, version = nvidia.parse_smi("WARNING: infoROM is corrupted\nNVIDIA GB10, 580.95.05, [N/A], 12.1\n")
    assert cards == (Card(name="NVIDIA GB10", capability="12.1", memory_mib=None),)
    assert version == "580.95.05"


def test_the_cuda_librarys_answers_are_read() -> None:
    output = "init 0\nversion 13000\ncard 9.0 143167 NVIDIA H200\nnoise\n"
    assert nvidia.parse_cuda(output) == (0, "13.0", (Card(name="NVIDIA H200", capability="9.0", memory_mib=143167),))
    assert nvidia.parse_cuda("init 803\nversion 0\n") == (803, None, ())
    assert nvidia.parse_cuda("Traceback (most recent call last):\nOSError: libcuda.so.1") == (None, None, ())


def test_a_planted_cuda_library_is_asked_and_its_failure_is_a_fact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import subprocess

    source = "int cuInit(int f) { return 802; } int cuDriverGetVersion(int *v) { *v = 12080; return 0; }\n"
    source += "int cuDeviceGetCount(int *n) { *n = 0; return 3; }\n"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "libcuda.so.1")],
        input=source,
        text=True,
        check=True,
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    import os

    seen = nvidia.look(tree(tmp_path / "root", {"sys/module/nvidia/version": "570.1.2"}), os.environ)
    assert (seen.driver, seen.cuda_init, seen.cuda_version, seen.cards) == ("570.1.2", 802, "12.8", None)


def test_cards_on_the_bus_and_device_files_are_counted(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
            "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
            "sys/bus/pci/devices/0000:01:00.1/vendor": "0x10de\n",
            "sys/bus/pci/devices/0000:01:00.1/class": "0x040300\n",  # the same card's sound
            "sys/bus/pci/devices/0000:02:00.0/vendor": "0x1002\n",
            "sys/bus/pci/devices/0000:02:00.0/class": "0x030000\n",
            "dev/nvidia0": "",
            "dev/nvidia12": "",
            "dev/nvidiactl": "",
            "dev/nvidia-uvm": "",
        },
    )
    seen = nvidia.look(root, {"PATH": ""})
    assert (seen.bus, seen.nodes) == (1, 2)
    nothing = nvidia.look(tmp_path / "nothing", {"PATH": ""})
    assert (nothing.bus, nothing.nodes, nothing.driver) == (None, None, None)


# Judging: which code runs on which card.


@pytest.mark.parametrize(
    ("card", "built_for", "runs"),
    [
        ("9.0", "sm_80 sm_90", True),
        ("8.9", "sm_80 sm_86", True),
        ("8.0", "sm_86", False),
        ("9.0", "sm_80", False),
        ("12.0", "sm_90 sm_100", False),
        ("12.1", "sm_120", True),
        ("12.0", "sm_90 compute_90", True),
        ("7.0", "sm_75 compute_75", False),
        ("9.0", "sm_90a", True),
        ("10.3", "sm_100a", False),
        ("10.3", "sm_100f", True),
        ("12.0", "sm_100f", False),
        ("garbage", "sm_80", False),
        ("9.0", "gfx942 nonsense", False),
    ],
)
def test_machine_code_runs_on_its_own_major_and_ptx_on_anything_newer(card: str, built_for: str, runs: bool) -> None:
    assert runs_on(card, tuple(built_for.split())) is runs


def test_versions_compare_as_numbers_not_as_text() -> None:
    assert numbers("9.0") < numbers("12.0")  # type: ignore[operator]
    assert numbers("525.60.13") < numbers("1000.0")  # type: ignore[operator]
    assert numbers("580-open") is None
    assert numbers(None) is None


# Judging: hosts.


def test_a_real_h200_with_driver_580_is_fine_for_cu130() -> None:
    seen = recorded("h200")
    assert seen.nvidia is not None
    assert seen.nvidia.cards == (H200,)
    assert found(driver.judge(seen, plan("cu130"))).message == "driver 580.159.04; cu130 needs 580 or newer"
    assert found(capability.judge(seen, plan("cu130"))).message == "NVIDIA H200 (9.0): cu130 has code for it"
    assert found(cuda.judge(seen, plan("cu130"))).severity is Severity.OK
    assert found(card_memory.judge(seen, plan("cu130", "qwen3-8b"))).severity is Severity.OK


def test_driver_550_with_cu130_is_an_error_that_names_the_floor_and_the_older_variant() -> None:
    seen = recorded("h100-driver-550")
    finding = found(driver.judge(seen, plan("cu130")))
    assert finding.severity is Severity.ERROR
    assert finding.message == "driver 550.54.15 is older than cu130 needs (580)"
    assert finding.remedy is not None
    assert "`--variant cu128`" in finding.remedy
    assert "580 or newer" in finding.remedy
    assert found(driver.judge(seen, plan("cu128"))).severity is Severity.OK
    assert (
        found(capability.judge(seen, plan("cu130"))).message
        == "8 x NVIDIA H100 80GB HBM3 (9.0): cu130 has code for them"
    )


def test_a_driver_that_no_variant_takes_can_only_be_updated() -> None:
    finding = found(driver.judge(gpu_host(H200, driver="470.57.02", cuda_version="11.4"), plan("cu128")))
    assert finding.severity is Severity.ERROR
    assert finding.remedy == "update the driver to 525.60.13 or newer"


def test_a_newer_cuda_library_over_an_older_kernel_driver_is_believed() -> None:
    assert found(driver.judge(gpu_host(H200, driver="550.54.15"), plan("cu130"))).severity is Severity.OK
    broken = gpu_host(H200, driver="550.54.15", cuda_init=803)
    assert found(driver.judge(broken, plan("cu130"))).severity is Severity.ERROR


def test_volta_under_cu130_is_an_error_that_names_cu128() -> None:
    finding = found(capability.judge(recorded("v100"), plan("cu130")))
    assert finding.severity is Severity.ERROR
    assert finding.message.startswith("4 x Tesla V100-SXM2-32GB (7.0): cu130's torch 2.11.0 has no code")
    assert finding.details == ("built for sm_75 sm_80 sm_86 sm_90 sm_100 sm_120",)
    assert finding.remedy == "use `--variant cu128` (torch 2.10.0)"
    assert found(capability.judge(recorded("v100"), plan("cu128"))).severity is Severity.OK


def test_blackwell_under_wheels_without_its_code_is_an_error_that_names_a_variant_with_it() -> None:
    matrix = other_matrix(cu128=("sm_80", "sm_90"))
    asked = Plan(variant=matrix.variant("cu128"), matrix=matrix)
    finding = found(capability.judge(recorded("rtx-pro-6000"), asked))
    assert finding.severity is Severity.ERROR
    assert finding.remedy == "use `--variant cu130` (torch 2.11.0)"
    assert found(capability.judge(recorded("rtx-pro-6000"), plan("cu130"))).severity is Severity.OK


def test_a_fitting_variant_that_needs_a_newer_driver_says_so() -> None:
    matrix = other_matrix(cu128=("sm_80", "sm_90"))
    asked = Plan(variant=matrix.variant("cu128"), matrix=matrix)
    finding = found(capability.judge(gpu_host(BLACKWELL, driver="570.1.1"), asked))
    assert finding.remedy == "update the driver to 580 or newer and use `--variant cu130`"


def test_a_card_that_no_variant_serves_is_told_so() -> None:
    finding = found(capability.judge(recorded("gtx-1080-ti"), plan("cu128")))
    assert finding.severity is Severity.ERROR
    assert finding.remedy == "no variant runs on it: train on another card, or on the CPU"


def test_one_unfit_card_among_others_can_be_hidden() -> None:
    finding = found(capability.judge(recorded("a100-beside-v100"), plan("cu130")))
    assert finding.message.startswith("Tesla V100-SXM2-32GB (7.0): ")
    assert finding.remedy is not None
    assert "`export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0`" in finding.remedy
    # Done as told, the CUDA library shows the other card alone, and the host is fine.
    mixed = recorded("a100-beside-v100").nvidia
    assert mixed is not None
    assert mixed.cards is not None
    told = host(nvidia=replace(mixed, visible="0", shown=mixed.cards[:1]))
    assert found(capability.judge(told, plan("cu130"))).severity is Severity.OK


def test_cards_of_two_kinds_are_noted_for_their_caches() -> None:
    finding = found(capability.judge(gpu_host(H200, BLACKWELL), plan("cu130")))
    assert finding.severity is Severity.NOTE


def test_a_host_without_a_gpu_is_a_note_and_nothing_more() -> None:
    for seen in (host(), host(nvidia=Nvidia())):
        assert found(driver.judge(seen, plan())).severity is Severity.NOTE
        assert capability.judge(seen, plan()) is None
        assert cuda.judge(seen, plan()) is None
        assert card_memory.judge(seen, plan(config="tiny")) is None


def test_a_card_without_a_driver_is_a_warning() -> None:
    finding = found(driver.judge(recorded("card-without-driver"), plan()))
    assert finding.severity is Severity.WARNING
    assert finding.message.startswith("an NVIDIA card is on the bus")


def test_what_could_not_be_read_is_unknown_and_never_an_error() -> None:
    unread = host(nvidia=None)
    assert found(driver.judge(unread, plan())).severity is Severity.UNKNOWN
    assert found(capability.judge(unread, plan())).severity is Severity.UNKNOWN
    assert cuda.judge(unread, plan()) is None
    odd = gpu_host(Card(name="NVIDIA GB10"), driver="not a version")
    assert found(driver.judge(odd, plan())).severity is Severity.UNKNOWN
    assert found(capability.judge(odd, plan())).severity is Severity.UNKNOWN
    assert found(card_memory.judge(odd, plan(config="tiny"))).severity is Severity.UNKNOWN
    silent = host(nvidia=Nvidia(driver="580.1", nodes=1))
    assert found(capability.judge(silent, plan())).severity is Severity.UNKNOWN
    none = host(nvidia=Nvidia(driver="580.1", cards=(), smi="No devices were found"))
    assert found(capability.judge(none, plan())).severity is Severity.WARNING
    behind = host(nvidia=Nvidia(cards=(H200,)))
    assert found(driver.judge(behind, plan())).severity is Severity.UNKNOWN


@pytest.mark.parametrize("code", [100, 46, 802, 803, 804, 999, 35])
def test_a_cuda_library_that_does_not_start_is_an_error_with_its_number(code: int) -> None:
    finding = found(cuda.judge(gpu_host(H200, cuda_init=code), plan()))
    assert finding.severity is Severity.ERROR
    assert f"error {code}" in finding.message
    assert finding.remedy is not None


def test_a_mismatch_that_only_nvidia_smi_names_is_found() -> None:
    words = "Failed to initialize NVML: Driver/library version mismatch"
    seen = host(nvidia=Nvidia(driver="580.1.1", smi=words, nodes=1))
    assert "error 803" in found(cuda.judge(seen, plan())).message


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles", "-1,0"])
def test_cards_hidden_on_purpose_are_a_note_and_the_run_is_judged_as_one_on_the_cpu(visible: str) -> None:
    seen = gpu_host(H200, cuda_init=100, visible=visible)
    assert found(cuda.judge(seen, plan())).severity is Severity.NOTE
    assert capability.judge(seen, plan()) is None
    assert card_memory.judge(seen, plan(config="tiny")) is None


def test_a_card_that_is_named_but_not_there_is_an_error() -> None:
    finding = found(cuda.judge(gpu_host(H200, cuda_init=100, visible="7"), plan()))
    assert (finding.severity, finding.details) == (Severity.ERROR, ("CUDA_VISIBLE_DEVICES is `7`",))


def test_a_driver_whose_library_is_missing_is_a_warning_but_not_in_a_container_without_gpus() -> None:
    assert found(cuda.judge(gpu_host(H200, cuda_init=None), plan())).severity is Severity.WARNING
    assert cuda.judge(recorded("container-without-gpus"), plan()) is None


# Judging: the cards' memory.


def memory_of(cards: int, mib: int, config: str = "qwen3-8b", capability: str = "9.0") -> Finding:
    card = Card(name="card", capability=capability, memory_mib=mib)
    return found(card_memory.judge(gpu_host(*[card] * cards), plan(config=config)))


def test_drafter_and_target_on_one_card_or_on_two_or_nowhere() -> None:
    assert memory_of(1, 80 * 1024).severity is Severity.OK
    two = memory_of(2, 40 * 1024)
    assert two.severity is Severity.OK
    assert "a card for the drafter" in two.message
    assert memory_of(1, 40 * 1024).severity is Severity.WARNING
    alone = memory_of(1, 16 * 1024)
    assert alone.severity is Severity.ERROR
    assert alone.message == "`qwen3-8b` has 18.9 GB of weights and optimizer state, the card 17.2 GB"


def test_the_tiny_configuration_fits_any_card() -> None:
    assert memory_of(1, 4096, "tiny").severity is Severity.OK


def test_bfloat16_on_a_card_without_it_is_a_warning_and_float32_is_not() -> None:
    assert "bfloat16" in memory_of(4, 32768, "qwen3-8b", "7.0").message
    assert memory_of(4, 32768, "tiny", "7.0").severity is Severity.OK


def test_the_fitting_variants_are_the_default_first_and_then_the_newest() -> None:
    assert [one.name for one in fitting(gpu_host(H200), load())] == ["cu130", "cu132", "cu128"]
    assert [one.name for one in fitting(recorded("h100-driver-550"), load())] == ["cu128"]
    assert fitting(Host(), load()) == []


@pytest.mark.parametrize("name", everywhere())
def test_every_recorded_host_says_where_its_facts_come_from(name: str) -> None:
    assert recorded(name).origin
