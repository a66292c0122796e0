from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from env import lint, variants
from env.drift import Pin, read_lock
from env.lock import FOLDER, read_records

MATRIX = variants.load()
CU130 = MATRIX.variant("cu130")
PINS = read_lock(CU130.lock)
REQUIRES = read_records(FOLDER)["cu130"].requires


def complaints(pins: list[Pin]) -> list[str]:
    return lint.lint_variant(pins, REQUIRES, CU130, MATRIX)


def changed(name: str, change: Callable[[Pin], Pin]) -> list[Pin]:
    assert any(pin.name == name for pin in PINS)
    return [change(pin) if pin.name == name else pin for pin in PINS]


def at(version: str) -> Callable[[Pin], Pin]:
    return lambda pin: replace(pin, version=version)


def without(name: str) -> list[Pin]:
    return [pin for pin in PINS if pin.name != name]


def added(name: str, version: str, via: str = "flashinfer") -> list[Pin]:
    return [*PINS, Pin(name, version, "", ("sha256:" + "0" * 64,), (via,))]


def test_every_committed_variant_is_right_for_every_python_and_platform() -> None:
    records = read_records(FOLDER)
    for variant in MATRIX.variants.values():
        assert lint.lint_variant(read_lock(variant.lock), records[variant.name].requires, variant, MATRIX) == []


def test_each_python_on_each_platform_is_looked_at() -> None:
    served = [(each["python_version"], each["platform_machine"]) for each in lint.served(MATRIX)]
    assert len(served) == 6
    assert ("3.13", "aarch64") in served


def test_a_file_without_a_hash_is_refused() -> None:
    assert complaints(changed("numpy", lambda pin: replace(pin, hashes=()))) == [
        f"numpy {pin.version} has no sha256 hash" for pin in PINS if pin.name == "numpy"
    ]


def test_a_package_that_stands_twice_after_markers_is_refused_with_its_python() -> None:
    unmarked = [replace(pin, marker="python_full_version >= '3.12'") if pin.name == "numpy" else pin for pin in PINS]
    lines = complaints(unmarked)
    assert any(line.startswith("Python 3.12 on x86_64: numpy stands 2 times: 2.") for line in lines)
    assert not any(line.startswith("Python 3.11") for line in lines)


def test_another_torch_than_the_matrix_says_is_refused() -> None:
    assert "Python 3.11 on x86_64: torch is 2.10.0; the matrix says 2.11.0 for cu130" in complaints(
        changed("torch", at("2.10.0"))
    )
    assert "Python 3.11 on x86_64: torch is missing" in complaints(without("torch"))


def test_two_torches_are_refused() -> None:
    lines = complaints([*PINS, *(replace(pin, version="2.10.0") for pin in PINS if pin.name == "torch")])
    assert "Python 3.11 on x86_64: torch stands 2 times: 2.11.0, 2.10.0" in lines


def test_another_triton_than_torch_requires_is_refused() -> None:
    assert "Python 3.13 on aarch64: triton is 3.7.1; torch requires ==3.6.0" in complaints(
        changed("triton", at("3.7.1"))
    )
    assert "Python 3.11 on x86_64: triton is missing; torch requires ==3.6.0" in complaints(without("triton"))


def test_a_triton_that_torch_does_not_ask_for_is_refused() -> None:
    requires = {**REQUIRES, "torch": [line for line in REQUIRES["torch"] if not line.startswith("triton")]}
    lines = lint.lint_variant(PINS, requires, CU130, MATRIX)
    assert "Python 3.11 on x86_64: triton is here, which this torch does not ask for" in lines


@pytest.mark.parametrize(
    ("name", "version", "sentence"),
    [
        ("nvidia-cudnn-cu13", "9.20.0.1", "nvidia-cudnn-cu13 is 9.20.0.1; torch requires ==9.19.0.56"),
        ("nvidia-cublas", "13.2.0.1", "nvidia-cublas is 13.2.0.1; cuda-toolkit requires =="),
        ("cuda-toolkit", "13.2.2", "cuda-toolkit is 13.2.2; torch requires ==13.0.2"),
    ],
)
def test_another_cuda_library_than_torch_requires_is_refused(name: str, version: str, sentence: str) -> None:
    assert any(sentence in line for line in complaints(changed(name, at(version))))
    assert any(f"{name} is missing; " in line for line in complaints(without(name)))


def test_a_cuda_library_that_torch_does_not_ask_for_is_refused() -> None:
    lines = complaints(added("nvidia-cuda-cccl", "13.0.1"))
    assert "Python 3.11 on x86_64: nvidia-cuda-cccl 13.0.1 is a part of CUDA that torch does not ask for" in lines


def test_a_cuda_library_of_another_major_is_refused_by_its_name() -> None:
    lines = complaints(added("nvidia-cublas-cu12", "12.8.4.1"))
    assert "Python 3.11 on x86_64: nvidia-cublas-cu12 is for CUDA 12; cu130 is CUDA 13.0" in lines


def test_majors_are_not_read_off_versions() -> None:
    assert next(pin.version for pin in PINS if pin.name == "nvidia-cufft").startswith("12.")
    assert complaints(list(PINS)) == []


def test_a_library_that_a_cuda_library_brings_is_let_pass() -> None:
    assert complaints(added("cuda-something", "1.0", via="cuda-bindings")) == []


def test_locks_that_are_installed_together_must_agree() -> None:
    dev = read_lock(FOLDER / "dev.txt")
    for variant in MATRIX.variants.values():
        assert lint.lint_together(dev, read_lock(variant.lock), ("dev", variant.name), MATRIX) == []
    older = [replace(pin, version="1.0") if pin.name == "packaging" else pin for pin in dev]
    lines = lint.lint_together(older, PINS, ("dev", "cu130"), MATRIX)
    assert len(lines) == 6
    assert lines[0].startswith("Python 3.11 on aarch64: packaging is 1.0 in dev and ")
