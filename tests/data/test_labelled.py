from __future__ import annotations

import gzip
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorgrad.data.labelled import REVIEWS, LabelledTexts, hold_out, read_labelled, sentences_of
from tensorgrad.data.reviews import reviews
from tensorgrad.errors import ArgumentError, DataError

TRAIN = "label\tsentence\n1\ta fine film\n0\t a \u2028 bad one \n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.tsv").write_bytes(TRAIN.encode())
    (tmp_path / "dev.tsv.gz").write_bytes(gzip.compress(b'content\tlabel\r\nso "good"\t1\r\n'))
    return tmp_path


def test_a_folder_gives_its_columns_by_name(folder: Path) -> None:
    train = read_labelled(str(folder), "train")
    assert train.texts == ["a fine film", "a \u2028 bad one"]
    assert train.labels.tolist() == [1, 0]
    validation = read_labelled(str(folder), "validation")
    assert (validation.texts, validation.labels.tolist()) == (['so "good"'], [1])


def test_a_long_column_name_is_quoted_in_part(tmp_path: Path) -> None:
    for others in ("", "\tother"):
        (tmp_path / "train.tsv").write_text("x" * 9000 + others + "\n", encoding="utf-8")
        with pytest.raises(DataError, match="has the columns") as caught:
            read_labelled(tmp_path, "train")
        assert len(str(caught.value)) < 600


def test_the_text_column_is_found_or_named(folder: Path) -> None:
    path = folder / "train.tsv"
    path.write_text("title\ttext\tsentence\tlabel\na\tb\tc\t0\n")
    assert read_labelled(str(folder), "train").texts == ["c"]
    assert read_labelled(str(folder), "train", text_column="title").texts == ["a"]
    path.write_text("title\tstars\tbody\n7\t2\tb\n")
    found = read_labelled(str(folder), "train", text_column="body", label_column="stars", classes=3)
    assert (found.texts, found.labels.tolist()) == (["b"], [2])
    with pytest.raises(DataError, match=r"line 2 has stars '2', expected 0 or 1"):
        read_labelled(folder, "train", text_column="body", label_column="stars")
    path.write_text("text\tlabel\na\t3\n")
    with pytest.raises(DataError, match="line 2 has label '3', expected 0 to 2"):
        read_labelled(folder, "train", classes=3)
    path.write_text("title\tstars\tbody\n7\t2\tb\n")
    for options, message in (
        ({}, r"the columns \['title', 'stars', 'body'\], expected 'label' and one of texts"),
        ({"label_column": "stars"}, r"expected 'stars' and one of texts"),
        ({"label_column": "stars", "text_column": "boddy"}, r"expected 'stars' and 'boddy'"),
    ):
        with pytest.raises(DataError, match=message):
            read_labelled(str(folder), "train", **options)  # type: ignore[arg-type]  # both are text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty, expected a line with names of columns"),
        ("label\tsentence\n", "has no texts, expected some"),
        ("label\tsentence\n1\ta\n2\tb\n", r"train\.tsv: line 3 has label '2', expected 0 or 1"),
        ("label\tsentence\n-1\ta\n", r"line 2 has label '-1', expected 0 or 1"),
        ("label\tsentence\ngood\ta\n", r"line 2 has label 'good', expected 0 or 1"),
        ("text\tlabel\tlabel\nb\t2\t0\n", r"line 2 has label '2', expected 0 or 1"),
        ("label\ta\tb\n1\ta\tb\n", r"the columns \['label', 'a', 'b'\], expected 'label' and on"),
        ("label\tsentence\n1\ta\n\n", r"line 3 has 1 columns, expected 2"),
        ("label\tsentence\n1\ta\tb\n", r"line 2 has 3 columns, expected 2"),
        ("1\ta fine film\n", r"has the columns \['1', 'a fine film'\], expected 'label'"),
    ],
)
def test_a_bad_file_is_an_error_with_its_place(folder: Path, content: str, message: str) -> None:
    (folder / "train.tsv").write_text(content)
    with pytest.raises(DataError, match=message):
        read_labelled(str(folder), "train")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"which is not a folder; expected one with train\.tsv"):
        read_labelled(str(tmp_path / "nothing"), "train")
    with pytest.raises(DataError, match=r"has none of train\.tsv, train\.tsv\.gz"):
        read_labelled(tmp_path, "train")
    with pytest.raises(ArgumentError, match=r"part is 'test', expected one of"):
        read_labelled(str(tmp_path), "test")


class FakeData(dict[str, list[Any]]):
    """The part of a data set that is needed."""

    features = property(lambda self: self)


def test_a_data_set_is_loaded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(path: str, name: str | None, split: str) -> FakeData:
        asked.append((path, name, split))
        labels = ([1.0, 0] if name else [1, 0.7]) if split == "train" else [1, -1]
        return FakeData(idx=[7, 8], sentence=[" a ", "b"], label=labels)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    monkeypatch.setattr("tensorgrad.data.rows._reaches_hub", lambda: True)
    found = read_labelled("hf:glue:sst2", "train")
    assert (found.texts, found.labels.tolist()) == (["a", "b"], [1, 0])
    assert asked == [("glue", "sst2", "train")]
    with pytest.raises(DataError, match=r"row 1 of validation has label -1, expected 0 or 1"):
        read_labelled("hf:sst2", "validation")
    with pytest.raises(DataError, match=r"row 1 of train has label 0\.7, expected 0 or 1"):
        read_labelled("hf:sst", "train")
    gap = FakeData(sentence=["a", None], label=[1, 0])
    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", lambda *_, **__: gap)
    with pytest.raises(DataError, match="row 1 of train has None, expected a text"):
        read_labelled("hf:sst2", "train")
    with pytest.raises(ArgumentError, match="expected 'hf:NAME'"):
        read_labelled("hf:a:b:train", "train")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"read_labelled: .* needs the datasets package"):
        read_labelled("hf:sst2", "train")


def test_made_reviews_are_distinct_and_the_same_every_time() -> None:
    train, validation = (read_labelled("reviews", part) for part in ("train", "validation"))
    assert (len(train), len(validation)) == REVIEWS
    assert len({*train.texts, *validation.texts}) == sum(REVIEWS)
    assert 0.45 < train.labels.mean() < 0.55
    assert read_labelled("reviews", "train").digest == train.digest != validation.digest
    assert list(reviews(3, seed=1)) != list(reviews(3, seed=2))
    with pytest.raises(ArgumentError, match="count is -1"):
        next(reviews(-1))
    half: Any = 1.5  # which never comes down to 0
    with pytest.raises(ArgumentError, match=r"count is 1\.5, expected an integer"):
        next(reviews(half))


def test_the_digest_sees_texts_and_labels() -> None:
    labels = np.array([1, 0], np.int32)
    made = [
        LabelledTexts(["a", "b"], labels),
        LabelledTexts(["a", "c"], labels),
        LabelledTexts(["ab", ""], labels),
        LabelledTexts(["a", "b"], 1 - labels),
    ]
    assert len({one.digest for one in made}) == 4


def test_a_phrase_belongs_to_all_sentences_with_it() -> None:
    texts = ["film", "a good film", "a bad film", "good", "bad  film", "a good film", "", "od f"]
    assert sentences_of(texts) == [[1, 2], [1], [2], [1], [2], [1], [6], [7]]


def test_spaces_do_not_make_a_phrase_a_sentence() -> None:
    assert sentences_of(["a    b", "a b c", "\ta\t\t\t\tb "]) == [[1], [1], [1]]


def test_held_out_sentences_are_unseen() -> None:
    sentences = [f"the {noun} is {word} {noun}" for noun in "abcdefghij" for word in ("so", "not")]
    phrases = [" ".join(text.split()[first:]) for text in sentences for first in range(5)]
    data = LabelledTexts(phrases, np.arange(len(phrases), dtype=np.int32) % 2)
    train, held = hold_out(data, 0.25, seed=3)
    assert len(held) == 5
    assert set(held.texts) <= set(sentences)
    assert not any(
        f" {text} " in f" {sentence} " and len(text.split()) > 2
        for text in train.texts
        for sentence in held.texts
    )
    owned = [text for text in phrases if any(text in s for s in sentences if s not in held.texts)]
    assert train.texts == owned
    both = {*zip(train.texts, train.labels.tolist(), strict=True)}
    assert both < {*zip(phrases, data.labels.tolist(), strict=True)}
    assert hold_out(data, 0.25, seed=3)[1].texts == held.texts
    assert hold_out(data, 0.25, seed=4)[1].texts != held.texts


def test_nothing_can_be_held_out_of_one_sentence() -> None:
    data = LabelledTexts(["a b", "a"], np.zeros(2, np.int32))
    for share in (0.4, 0.9):
        with pytest.raises(DataError, match="data has 1 sentences, of which"):
            hold_out(data, share)
    with pytest.raises(ArgumentError, match="share is 'x', expected a number"):
        hold_out(data, "x")  # type: ignore[arg-type]  # a user may do it
    for share in (0, 1, -0.5):
        with pytest.raises(ArgumentError, match=f"share is {share}, expected between 0 and 1"):
            hold_out(data, share)
    assert repr(data) == "LabelledTexts(texts=2, classes=1)"
    with pytest.raises(ArgumentError, match="seed is -1, expected 0 to"):
        hold_out(data, 0.4, -1)
