from __future__ import annotations

import gzip
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensorgrad.data import Tokenizer, encode_pairs, language_token, read_pairs, train_tokenizer
from tensorgrad.errors import ArgumentError, DataError

LINES = {
    "train.de": "Eins\nZwei \u2028 drei\n\nVier\n",
    "train.en": "One\nTwo \u2028 three\nempty\nFour\n",
    "valid.de": "Ja\r\nNein\r\n",
    "valid.en": "Yes\r\nNo",
    "test.de": "Gut\n\n",
    "test.en": "Good\n\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in LINES.items():
        (tmp_path / name).write_bytes(text.encode())
    return tmp_path


def test_a_folder(folder: Path) -> None:
    corpus = read_pairs(str(folder))
    # U+2028 does not end a line; a pair with an empty side is for tests, not for training.
    assert corpus.train == [
        ("Eins", "One"),
        ("Zwei \u2028 drei", "Two \u2028 three"),
        ("Vier", "Four"),
    ]
    assert corpus.validation == [("Ja", "Yes"), ("Nein", "No")]
    assert corpus.test == [("Gut", "Good"), ("", "")]
    assert read_pairs(str(folder), "en", "de").train[0] == ("One", "Eins")
    assert read_pairs(str(folder), lowercase=True).train[0] == ("eins", "one")
    seen: list[Any] = []
    read_pairs(folder, parts=["train"], progress=lambda *told: seen.append(told))
    assert seen == [("reading", 0, 0)]


def test_compressed_files_and_other_names(folder: Path) -> None:
    before = read_pairs(str(folder))
    for key in ("de", "en"):
        text = (folder / f"valid.{key}").read_bytes()
        (folder / f"valid.{key}").unlink()
        (folder / f"dev.{key}.gz").write_bytes(gzip.compress(text))
    after = read_pairs(str(folder))
    assert after == before
    assert after.digest == before.digest


def test_only_the_parts_that_are_wanted(folder: Path) -> None:
    for name in ("valid.de", "test.en"):
        (folder / name).unlink()
    corpus = read_pairs(str(folder), parts=["train"])
    assert (len(corpus.train), corpus.validation, corpus.test) == (3, [], [])


def test_the_digest_tells_corpora_apart(folder: Path) -> None:
    before = read_pairs(str(folder))
    (folder / "test.en").write_text("Well\n\n")
    assert read_pairs(folder).digest != before.digest  # a path does as well as its name


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train.de", "Eins", r"train\.de has 1 lines and .*train\.en 4, expected equally many"),
        ("train.en", "One\n", r"train\.de has 4 lines and .*train\.en 1, expected equally many"),
        ("valid.de", None, r"valid\.de is missing"),
        ("test.de", b"\xff\n\n", "is not UTF-8: byte 0xff"),
        ("train.de", "\n\n\n\n", "has no pairs for train"),
    ],
)
def test_bad_files_are_named(
    folder: Path, name: str, text: str | bytes | None, message: str
) -> None:
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(DataError, match=message):
        read_pairs(str(folder))


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="which is not a folder; expected one with train, valid"):
        read_pairs(str(tmp_path / "none"))
    with pytest.raises(ArgumentError, match="target_key is 'de', expected another"):
        read_pairs("phrases", "de", "de")
    for source in ("phrases", str(tmp_path)):
        with pytest.raises(ArgumentError, match="parts has 'dev', expected some of"):
            read_pairs(source, parts=["train", "dev"])
    with pytest.raises(ArgumentError, match="phrases are in 'de' and 'en'"):
        read_pairs("phrases", "de", "fr")
    with pytest.raises(ArgumentError, match="expected 'hf:NAME' or 'hf:NAME:CONFIG'"):
        read_pairs("hf:a:b:c")


def test_held_out_phrases_are_not_in_the_training_set() -> None:
    corpus = read_pairs("phrases")
    assert (len(corpus.train), len(corpus.validation), len(corpus.test)) == (12_000, 500, 500)
    for side in (0, 1):
        seen = {pair[side] for pair in corpus.train}
        assert not seen & {pair[side] for pair in corpus.validation + corpus.test}
    assert read_pairs("phrases", "en", "de").test[0] == corpus.test[0][::-1]
    assert sum("the " in english for _, english in corpus.train) > 1000
    assert not any("the " in german for german, _ in corpus.train)
    assert repr(corpus) == "PairCorpus(train=12000, validation=500, test=500)"


class Column(list[Any]):
    """A split of a data set: rows by number, columns by name."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__(rows)
        self.features = list(rows[0])

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand in for the datasets package: what is put here is what it loads."""
    found: dict[str, Any] = {}

    def load(path: str, config: str | None, split: str | None) -> Any:
        assert split is None
        return found[f"{path}:{config}"]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    monkeypatch.setattr("tensorgrad.data.rows._reaches_hub", lambda: True)
    return found


def test_a_data_set(datasets: dict[str, Any]) -> None:
    rows = [{"de": "Ja", "en": "Yes"}, {"de": "Nein", "en": "No"}]
    parts = {name: Column(rows) for name in ("train", "validation", "test")}
    nested = {name: Column([{"translation": row} for row in rows]) for name in parts}
    datasets |= {"some/name:None": parts, "other:de-en": nested}
    for source in ("hf:some/name", "hf:other:de-en"):
        corpus = read_pairs(source)
        assert corpus.train == corpus.test == [("Ja", "Yes"), ("Nein", "No")]


def test_bad_data_sets_are_named(datasets: dict[str, Any]) -> None:
    datasets["columns:None"] = {"train": Column([{"text": "a"}])}
    datasets["splits:None"] = {"all": Column([{"de": "a", "en": "b"}])}
    datasets["rows:None"] = {"train": Column([{"de": "a", "en": None}])}
    pair = {"translation": {"de": "a", "en": "b"}}
    datasets["gap:None"] = {"train": Column([pair, {"translation": None}])}
    datasets["text:None"] = {"train": Column([{"translation": "a"}])}
    for source, message in (
        ("hf:columns", r"has the columns \['text'\], expected 'de' and 'en', or 'translation'"),
        ("hf:splits", r"has the splits \['all'\], expected 'train'"),
        ("hf:rows", r"row 0 of train is \{'de': 'a', 'en': None\}, expected texts under 'de' and"),
        ("hf:gap", r"row 1 of train is None, expected texts under 'de' and 'en'"),
        ("hf:text", r"row 0 of train is 'a', expected texts under 'de' and 'en'"),
        ("hf:missing", "cannot load 'hf:missing'"),
    ):
        with pytest.raises(DataError, match=message):
            read_pairs(source)


def test_the_tokenizer_has_a_token_for_each_language() -> None:
    pairs = [("der Zug", "the train"), ("die Uhr", "the watch")]
    tokenizer = train_tokenizer(pairs * 3, 300, ("de", "en"))
    assert language_token(tokenizer, "de") != language_token(tokenizer, "en")
    (source, target), _ = encode_pairs(tokenizer, pairs)
    assert (tokenizer.decode(source), tokenizer.decode(target)) == pairs[0]
    with pytest.raises(DataError, match=r"expected '<\|fr\|>' among them"):
        language_token(tokenizer, "fr")
    with pytest.raises(DataError, match=r"expected '<\|en\|>' among them"):
        language_token(Tokenizer.train(["text"], 257), "en")
