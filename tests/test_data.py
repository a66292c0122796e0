from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash import data
from env.errors import Exit, Failure


def sample(length: int, *, name: int = 0) -> data.Sample:
    """A document whose every token is its own: name * 1000 + place."""
    return data.Sample(tokens=torch.arange(length) + name * 1000, response=torch.arange(length) % 3 == 1)


def unpacked(rows: data.Rows) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """Documents by walking over each row's numbers, independently of how they were written."""
    found = []
    for tokens, document, response in zip(rows.tokens, rows.document, rows.response, strict=True):
        for number in range(int(document.max()) + 1):
            places = [place for place, value in enumerate(document.tolist()) if value == number]
            assert places == list(range(places[0], places[-1] + 1))
            found.append((tuple(tokens[places].tolist()), tuple(response[places].tolist())))
    return found


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 50), max_size=40), sequence=st.integers(1, 40))
def test_packing_loses_and_doubles_no_token_and_keeps_documents_whole(lengths: list[int], sequence: int) -> None:
    samples = [sample(length, name=name) for name, length in enumerate(lengths)]
    rows = data.pack(samples, sequence)
    wanted = [(tuple(s.tokens[:sequence].tolist()), tuple(s.response[:sequence].tolist())) for s in samples]
    assert Counter(unpacked(rows)) == Counter(document for document in wanted if document[0])
    assert rows.truncated == sum(length > sequence for length in lengths)
    assert rows.empty == lengths.count(0)
    assert rows.documents == len(lengths) - rows.empty
    assert rows.tokens.shape == rows.document.shape == rows.response.shape == (len(rows.tokens), sequence)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 50), max_size=40), sequence=st.integers(1, 40))
def test_padding_stands_only_at_a_rows_end_and_numbers_rise_from_zero(lengths: list[int], sequence: int) -> None:
    rows = data.pack([sample(length, name=name) for name, length in enumerate(lengths)], sequence)
    for tokens, document, response in zip(rows.tokens, rows.document.tolist(), rows.response, strict=True):
        used = [value for value in document if value != data.PADDING]
        assert document == used + [data.PADDING] * (sequence - len(used))
        assert used == sorted(used)
        assert set(used) == set(range(max(used) + 1))
        assert not tokens[len(used) :].any()
        assert not response[len(used) :].any()


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40), sequence=st.integers(1, 40))
def test_no_two_rows_would_fit_into_one(lengths: list[int], sequence: int) -> None:
    used = (data.pack([sample(length) for length in lengths], sequence).document >= 0).sum(1).sort().values.tolist()
    assert len(used) < 2 or used[0] + used[1] > sequence


def test_the_same_samples_give_the_same_rows() -> None:
    samples = [sample(length, name=name) for name, length in enumerate([9, 3, 9, 1, 12, 9])]
    first, second = data.pack(samples, 12), data.pack(samples, 12)
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.document, second.document)
    assert first.fill == pytest.approx(43 / 48)


def test_no_samples_give_no_rows() -> None:
    rows = data.pack([], 128)
    assert rows.tokens.shape == (0, 128)
    assert rows.fill == 1.0


def test_a_row_of_no_length_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        data.pack([], 0)


def test_a_sample_of_the_wrong_shape_or_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \(T,\)"):
        data.Sample(tokens=torch.zeros(3, dtype=torch.int64), response=torch.zeros(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="must be int64 and bool"):
        data.Sample(tokens=torch.zeros(3), response=torch.zeros(3, dtype=torch.bool))


def test_positions_restart_with_each_document() -> None:
    document = torch.tensor([[0, 0, 0, 1, 2, 2, -1, -1], [0, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    assert data.positions(document).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]]


def test_rows_come_back_from_their_file_and_the_file_is_the_same_each_time(tmp_path: Path) -> None:
    rows = data.pack([sample(length, name=length) for length in (5, 0, 40, 7)], 16)
    data.write(rows, tmp_path / "rows.safetensors")
    data.write(rows, tmp_path / "again.safetensors")
    assert (tmp_path / "rows.safetensors").read_bytes() == (tmp_path / "again.safetensors").read_bytes()
    back = data.read(tmp_path / "rows.safetensors")
    assert torch.equal(back.tokens, rows.tokens)
    assert torch.equal(back.document, rows.document)
    assert torch.equal(back.response, rows.response)
    assert (back.documents, back.truncated, back.empty) == (3, 1, 1)


def test_rows_that_are_missing_or_cut_short_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.safetensors"
    for content in (None, b"", b"something else entirely"):
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(Failure) as caught:
            data.read(file)
        assert caught.value.code is Exit.INPUT
    data.write(data.pack([sample(5)], 16), file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Failure, match="cannot be read"):
        data.read(file)
