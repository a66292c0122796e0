from __future__ import annotations

import tomllib

import pytest

from env import variants
from env.errors import Exit, Failure


def test_the_default_is_cu130_and_the_three_sets_are_the_ones_the_index_serves() -> None:
    matrix = variants.load()
    assert matrix.default == variants.DEFAULT == "cu130"
    assert {name: (v.torch, v.cuda) for name, v in matrix.variants.items()} == {
        "cu128": ("2.10.0", "12.8"),
        "cu130": ("2.11.0", "13.0"),
        "cu132": ("2.15.0", "13.2"),
    }


def test_a_variant_is_called_after_its_cuda() -> None:
    for name, variant in variants.load().variants.items():
        assert name == "cu" + variant.cuda.replace(".", "")


def test_driver_floors_compare_as_numbers() -> None:
    floors = {name: v.driver_floor for name, v in variants.load().variants.items()}
    assert floors["cu128"] == (525, 60, 13) < floors["cu130"] == (580,) < (580, 159)


def test_an_unknown_variant_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(Failure, match="there is no variant `cu131`; there are cu128, cu130, cu132") as refusal:
        variants.load().variant("cu131")
    assert refusal.value.code == Exit.USAGE
    assert refusal.value.hint in {"did you mean `--variant cu130`?", "did you mean `--variant cu132`?"}


def test_a_name_like_no_other_gets_no_guess() -> None:
    with pytest.raises(Failure) as refusal:
        variants.load().variant("rocm")
    assert refusal.value.hint is None


def test_without_a_name_the_environment_variable_decides_and_without_that_the_default() -> None:
    matrix = variants.load()
    assert matrix.variant(environ={"DFLASH_VARIANT": "cu132"}).name == "cu132"
    assert matrix.variant("cu128", environ={"DFLASH_VARIANT": "cu132"}).name == "cu128"
    for unset in ({}, {"DFLASH_VARIANT": ""}):
        assert matrix.variant(environ=unset).name == "cu130"


def test_an_unknown_variant_in_the_environment_variable_is_refused_with_its_source() -> None:
    with pytest.raises(Failure) as refusal:
        variants.load().variant(environ={"DFLASH_VARIANT": "cu12"})
    assert refusal.value.code == Exit.USAGE
    assert (
        refusal.value.message == "there is no variant `cu12`, which DFLASH_VARIANT names; there are cu128, cu130, cu132"
    )
    assert (refusal.value.hint or "").startswith("did you mean `DFLASH_VARIANT=cu1")
    assert variants.load().variant("cu130", environ={"DFLASH_VARIANT": "cu12"}).name == "cu130", "nobody asked it"


def test_a_default_that_is_no_variant_is_refused_when_the_matrix_is_read() -> None:
    text = variants.MATRIX.read_text().replace('default = "cu130"', 'default = "cu999"')
    with pytest.raises(ValueError, match="cu999"):
        variants.parse(text)


def test_a_row_with_an_unknown_or_missing_value_is_refused() -> None:
    text = variants.MATRIX.read_text()
    with pytest.raises(TypeError, match="colour"):
        variants.parse(text + 'colour = "blue"\n')
    with pytest.raises(TypeError, match="cuda"):
        variants.parse("\n".join(line for line in text.splitlines() if not line.startswith("cuda = ")))
    with pytest.raises(tomllib.TOMLDecodeError):
        variants.parse(text + "[")


def test_the_wheels_of_this_environment_are_what_the_matrix_says() -> None:
    """Run in each variant's own environment by `nox -s tests -- --all-variants`."""
    torch = pytest.importorskip("torch")
    rows = {variant.torch: variant for variant in variants.load().variants.values()}
    variant = rows[torch.__version__.partition("+")[0]]
    assert torch.version.cuda == variant.cuda
    assert tuple(torch._C._cuda_getArchFlags().split()) == variant.capabilities
