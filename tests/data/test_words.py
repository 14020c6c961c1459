from __future__ import annotations

import gzip
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from tensorgrad.data.text import read_lines
from tensorgrad.data.words import WordVocabulary, read_vectors, split_words
from tensorgrad.errors import ArgumentError, DataError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's GREAT!", "it 's great !"),
        ("I don't; they can't", "i do n't ; they ca n't"),
        ("a well-made 3.5-star film...", "a well-made 3.5-star film ..."),
        ("o'brien's café (really)", "o'brien 's café ( really )"),
        ("why?! -- so", "why ?! -- so"),
        (" \t\n", ""),
    ],
)
def test_words_are_as_in_the_treebank(text: str, words: str) -> None:
    assert split_words(text) == words.split()
    assert split_words(" ".join(split_words(text))) == words.split()


def test_a_vocabulary_has_the_frequent_words() -> None:
    texts = ["b a", "a c", "a b d"]
    vocabulary = WordVocabulary.train(texts, 100)
    assert vocabulary.words == ["a", "b", "c", "d"]
    assert vocabulary.encode_batch(["a D x", ""]) == [[1, 4, 0], []]
    assert WordVocabulary.train(texts, 3).words == ["a", "b"]
    assert WordVocabulary.train(texts, 100, at_least=2).words == ["a", "b"]
    with pytest.raises(DataError, match="words has 0 words"):
        WordVocabulary.train(texts, 100, at_least=4)
    with pytest.raises(ArgumentError, match="vocab_size is 1"):
        WordVocabulary.train(texts, 1)
    with pytest.raises(ArgumentError, match="vocab_size is 'x', expected an integer"):
        WordVocabulary.train(["a"], "x")  # type: ignore[arg-type]  # a user may do it
    with pytest.raises(ArgumentError, match="at_least is 0"):
        WordVocabulary.train(texts, 9, at_least=0)
    with pytest.raises(DataError, match="has 2 words, 1 of them different"):
        WordVocabulary(["a", "a"])


def test_a_vocabulary_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    vocabulary = WordVocabulary(["ä", '"', "n't"])
    vocabulary.save(path)
    assert WordVocabulary.load(path).words == vocabulary.words
    assert WordVocabulary.load(path).vocab_size == 4
    assert repr(vocabulary) == "WordVocabulary(words=3)"
    assert (
        path.read_text(encoding="utf-8")
        == vocabulary.to_json()
        == ('{\n"format": 1,\n"words": [\n"ä",\n"\\"",\n"n\'t"\n]\n}')
    )
    assert vocabulary.digest == WordVocabulary.load(path).digest
    assert vocabulary.digest == sha256(path.read_bytes()).hexdigest()
    with pytest.raises(DataError, match="cannot write"):
        vocabulary.save(tmp_path / "nothing" / "words.json")
    for content, message in (
        ("[]", "holds a list, expected a mapping"),
        ("{", "cannot be read as JSON"),
        ('{"format": 2, "words": ["a"]}', "has format 2, expected 1"),
        ('{"format": 1, "words": [3]}', "expected 1 with words"),
        ('{"format": 1, "words": null}', "expected 1 with words"),
        ('{"format": 1, "words": "abc"}', "expected 1 with words"),
        ('{"format": 1}', "expected 1 with words"),
        ('{"format": 1, "words": ["a", "b", "a"]}', r"words\.json: .* has 3 words, 2 of them diff"),
        ('{"format": 1, "words": []}', r"words\.json: .* has 0 words, 0 of them different"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            WordVocabulary.load(path)


@pytest.mark.parametrize(("head", "tail"), [("", ""), ("4 2\n", ""), ("4 2\n", " "), ("", " ")])
def test_vectors_of_known_words_are_read(tmp_path: Path, head: str, tail: str) -> None:
    path = tmp_path / "vectors.txt.gz"
    lines = (f"{line}{tail}\n" for line in ("b 1 2", ". . 5 6", "d -3 4e-1", "b 9 9"))
    path.write_bytes(gzip.compress(f"{head}{''.join(lines)}".encode()))
    vectors, found = read_vectors(path, ["a", "b", "d"], 2)
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, np.array([[0, 0], [1, 2], [-3, 0.4]], np.float32))
    assert found.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("b 1 2 3\n", "line 1 has 3 numbers, expected 2, the width of the model"),
        ("4 3\nb 1 2 3\n", "line 2 has 3 numbers, expected 2"),
        ("b 1\n", "line 1 has 1 numbers, expected 2"),
        ("b 1 2\nc 1\n", "line 2 has 1 numbers, expected 2"),
        ("b 1 x\n", "line 1 is damaged"),
        ("b 1 nan\n", "expected finite numbers"),
        ("z 1 2\n", "has none of the 2 words, expected some"),
        ("", "has none of the 2 words, expected some"),
    ],
)
def test_vectors_that_do_not_fit_are_an_error(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_vectors(path, ["a", "b"], 2)


def test_missing_vectors_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        read_vectors(tmp_path / "none.txt", ["a"], 2)


@pytest.mark.parametrize("text", ["", "a", "a\n", "a\n\nb", "a\r\nb\u2028c\r", "\n"])
def test_lines_are_those_between_line_feeds(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(text.encode())
    expected = [line.removesuffix("\r") for line in text.split("\n")]
    if text.endswith("\n") or not text:
        expected.pop()
    for chunk in (1, 2, 1000):
        monkeypatch.setattr("tensorgrad.data.text._CHUNK", chunk)
        assert list(read_lines(path)) == expected
