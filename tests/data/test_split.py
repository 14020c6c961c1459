from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorgrad.data.split import plan_split
from tensorgrad.errors import ArgumentError, DataError

DOCUMENTS = st.lists(st.text(st.sampled_from("ab\n"), min_size=1, max_size=30), min_size=2)
FRACTIONS = st.floats(0.01, 0.99)


def books(count: int, lines: int) -> list[str]:
    return ["".join(f"book {b}, line {n}\n" for n in range(lines)) for b in range(count)]


@given(documents=DOCUMENTS, fraction=FRACTIONS)
def test_every_character_is_on_one_side(documents: list[str], fraction: float) -> None:
    split = plan_split(documents, fraction)
    assert (split.documents, split.characters) == (len(documents), len("".join(documents)))
    for document in documents:
        assert split.train(document) + split.validation(document) == document
    assert any(split.train(document) for document in documents)
    if len(set(documents)) == len(documents):  # equal ones must stay together
        assert any(split.validation(document) for document in documents)


@given(documents=DOCUMENTS, fraction=FRACTIONS, random=st.randoms())
def test_the_order_does_not_matter(documents: list[str], fraction: float, random: Random) -> None:
    split = plan_split(documents, fraction)
    random.shuffle(documents)
    assert plan_split(documents, fraction) == split


@pytest.mark.parametrize("fraction", [0.02, 0.05, 0.5, 0.9])
def test_many_documents_stay_whole_and_the_share_is_right(fraction: float) -> None:
    documents = books(1000, 3)
    split = plan_split(documents, fraction)
    parts = [split.validation(document) for document in documents]
    assert all(part in ("", document) for part, document in zip(parts, documents, strict=True))
    assert len("".join(parts)) / len("".join(documents)) == pytest.approx(fraction, abs=1e-3)
    assert any(parts[:200])
    assert any(parts[-200:])


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("fraction", [0.05, 0.1])
def test_a_few_big_documents_are_cut_once_at_a_line(count: int, fraction: float) -> None:
    documents = books(count, 1000)
    split = plan_split(documents, fraction)
    cut = [d for d in documents if 0 < len(split.validation(d)) < len(d)]
    assert len(cut) == 1
    assert split.validation(cut[0]).startswith("book")
    assert split.train(cut[0]).endswith("\n")
    share = sum(len(split.validation(d)) for d in documents) / split.characters
    assert share == pytest.approx(fraction, abs=0.01)


def test_one_long_line_is_cut_anywhere() -> None:
    split = plan_split(["a" * 50 + "b" * 50], 0.1)
    assert split.validation("a" * 50 + "b" * 50) == "b" * 10


def test_copies_of_a_document_stay_together() -> None:
    documents = books(20, 5) * 3
    split = plan_split(documents, 0.3)
    train = {split.train(d) for d in documents} - {""}
    validation = {split.validation(d) for d in documents} - {""}
    assert train
    assert validation
    assert not train & validation
    copies = ["x\n" * 50] * 10
    split = plan_split(copies, 0.5)
    assert (split.train(copies[0]), split.validation(copies[0])) == ("x\n" * 25, "x\n" * 25)


def test_the_choice_never_changes() -> None:
    documents = books(30, 2)
    split = plan_split(documents, 0.2)
    assert [n for n, d in enumerate(documents) if split.validation(d)] == [3, 5, 7, 8, 13, 28]


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan")])
def test_a_share_outside_its_range_is_an_error(fraction: float) -> None:
    with pytest.raises(ArgumentError, match=r"fraction has .*, expected between 0 and 1"):
        plan_split(["ab"], fraction)


@pytest.mark.parametrize("documents", [[], ["a"]])
def test_too_little_to_split_is_an_error(documents: list[str]) -> None:
    with pytest.raises(DataError, match="documents has"):
        plan_split(documents, 0.5)
