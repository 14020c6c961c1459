from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensorgrad.data import documents, fingerprint, prepare, rows
from tensorgrad.data import text as module
from tensorgrad.errors import ArgumentError, DataError


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_a_row_is_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["one\r\ntwo\rthree", "a café \U0001f600", "text <|endoftext|> text"]
    rows = [{"id": 1, "text": text} for text in texts]
    path = write(tmp_path / "a.data", *rows, {"text": None}, {"text": " "})
    expected = ["one\ntwo\nthree", *texts[1:]]
    assert list(documents(path)) == expected
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n\r\n"))
    monkeypatch.setattr(module, "_CHUNK", 7)
    assert list(documents(path)) == expected


def test_the_column_of_the_text_is_chosen_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"id": 1, "body": "one"}, {"id": 2, "body": "two"})
    assert list(documents(path, column="body")) == ["one", "two"]
    assert fingerprint(path, column="body") != fingerprint(path)
    with pytest.raises(DataError, match=r"row 1 has the columns \['id', 'body'\], expected 'text'"):
        list(documents(path))
    with pytest.raises(DataError, match="row 1 has id 1, expected a text"):
        list(documents(path, column="id"))
    with pytest.raises(DataError, match=r"by --text-column"):
        prepare(path, tmp_path / "cache", 300)
    assert prepare(path, tmp_path / "cache", 300, column="body").train


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "cut', r"""line 3 is '{"text": "cut', expected a JSON object"""),
        ("[1]", r"line 3 is '\[1\]', expected a JSON object"),
        ('{"text": "\\ud800"}', "row 3 has half of a surrogate pair in text"),
        ("[" * 100_000, r"line 3 is '\[+', expected a JSON object"),
    ],
)
def test_a_damaged_row_is_an_error_with_its_line(tmp_path: Path, line: str, problem: str) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"})
    path.write_text(path.read_text() + line)
    with pytest.raises(DataError, match=problem):
        list(documents(path))


@pytest.mark.parametrize(
    ("kinds", "column", "found"),
    [
        ({"id": "int64", "story": "string"}, None, "story"),
        ({"title": "string", "text": "large_string"}, None, "text"),
        ({"title": "string", "text": "string"}, "title", "title"),
        ({"title": "string", "body": "string"}, None, None),
        ({"id": "int64"}, None, None),
        ({"id": "int64", "text": "string"}, "id", None),
    ],
)
def test_the_text_column_of_a_data_set(
    kinds: dict[str, str], column: str | None, found: str | None
) -> None:
    data = SimpleNamespace(features={k: SimpleNamespace(dtype=v) for k, v in kinds.items()})
    if found is not None:
        assert rows._text_column("hf:a", data, column) == found
        return
    with pytest.raises(DataError, match=r"'hf:a' has the columns .*choose one by --text-column"):
        rows._text_column("hf:a", data, column)


def test_parquet_is_read_by_its_text_column(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    path = tmp_path / "a.txt"
    texts = [f"text {number}\r\n" for number in range(2500)]
    table = {"number": list(range(2501)), "text": [*texts, None], "title": ["t"] * 2501}
    parquet.write_table(pyarrow.table(table), path, row_group_size=700)
    assert list(documents(tmp_path)) == [text.replace("\r", "") for text in texts]
    assert list(documents(path, column="title")) == ["t"] * 2501
    with pytest.raises(DataError, match=r"columns \['number', 'text', 'title'\], expected 'no'"):
        list(documents(path, column="no"))
    with pytest.raises(DataError, match="row 1 has number 0, expected a text"):
        list(documents(path, column="number"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"cannot read .*a\.txt"):
        list(documents(path))


def test_parquet_that_holds_far_more_than_its_size_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    path = tmp_path / "a.parquet"
    repeated = pyarrow.DictionaryArray.from_arrays([0] * 30, pyarrow.array(["x" * 400_000]))
    for texts, dictionary in ((repeated, True), (["x" * 12_000_000], False)):
        table = pyarrow.table({"text": texts, "other": ["a"] * len(texts)})
        parquet.write_table(table, path, compression="gzip", use_dictionary=dictionary)
        with pytest.raises(DataError, match="decompressed, expected at most 250 times its size"):
            list(documents(path))
        assert list(documents(path, column="other")) == ["a"] * len(texts)
    parquet.write_table(pyarrow.table({"text": [["a"], ["b"]]}), path)
    with pytest.raises(DataError, match=r"row 1 has text \['a'\], expected a text"):
        list(documents(path))
    parquet.write_table(pyarrow.table({"text": repeated.slice(0, 20)}), path)
    assert len(list(documents(path))) == 20


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a").write_bytes(b"PAR1 and more")
    with pytest.raises(DataError, match=r"needs the pyarrow package: pip install -e \"\.\[text\]"):
        list(documents(tmp_path / "a"))


def test_without_a_network_a_data_set_comes_from_the_cache_or_fails_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SimpleNamespace(HF_HUB_OFFLINE=False)

    def load(path: str, *_: Any, **__: Any) -> Any:
        assert config.HF_HUB_OFFLINE  # otherwise the library retries for a minute
        raise ConnectionError(f"Couldn't reach {path}\nat all")

    def refuse(*_: Any) -> Any:
        raise OSError("Name or service not known")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load, config=config))
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr("tensorgrad.data.rows.getproxies", dict)
    with pytest.raises(DataError, match=r"cannot load 'hf:a/b': no network, .* reach a/b at all$"):
        documents("hf:a/b")
    assert not config.HF_HUB_OFFLINE
    monkeypatch.setattr("tensorgrad.data.rows._CONNECT_SECONDS", 0.01)

    def hang(*_: Any) -> Any:
        time.sleep(0.2)
        raise OSError("too late")

    monkeypatch.setattr(socket, "create_connection", hang)
    with pytest.raises(DataError, match="no network"):
        documents("hf:a/b")


class Features:
    """A data set of one split, as the datasets package has it."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns = columns
        self.features = {name: SimpleNamespace(dtype="string") for name in columns}

    def select_columns(self, names: list[str]) -> Features:
        return Features(**{name: self.columns[name] for name in names})

    def iter(self, batch_size: int) -> Any:
        for start in range(0, 3, 2):
            yield {name: values[start : start + 2] for name, values in self.columns.items()}


def test_texts_of_a_data_set_come_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(*names: Any, split: str | None) -> Any:
        asked.append((*names, split))
        return Features(text=["one", "", "two"], other=["a", "b", None])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    monkeypatch.setattr("tensorgrad.data.rows._reaches_hub", lambda: True)
    assert list(rows.dataset_texts("hf:a", None)) == ["one", "two"]
    assert list(rows.dataset_texts("hf:a:b", "other")) == ["a", "b"]
    rows.load_dataset("op", "hf:a::c", "train", names_split=True)
    rows.load_dataset("op", "hf:a:b", None)
    assert asked == [("a", None, "train"), ("a", "b", "train"), ("a", None, "c"), ("a", "b", None)]
    for source, names_split, forms in (
        ("hf:", False, "'hf:NAME' or 'hf:NAME:CONFIG'$"),
        ("hf:a:b:c", False, "'hf:NAME' or 'hf:NAME:CONFIG'$"),
        ("hf:a:b:c:d", True, "'hf:NAME', 'hf:NAME:CONFIG', .* or 'hf:NAME::SPLIT'$"),
    ):
        with pytest.raises(ArgumentError, match=f"op: source has '{source}', expected {forms}"):
            rows.load_dataset("op", source, "train", names_split)


def test_the_hub_is_reached_where_it_answers_or_a_proxy_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def connect(address: Any, seconds: float) -> Any:
        asked.append(address)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr("tensorgrad.data.rows.getproxies", dict)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert rows._reaches_hub() is True
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror:8080/x")
    assert rows._reaches_hub() is True
    assert asked == [("huggingface.co", 443), ("mirror", 8080)]
    monkeypatch.setattr("tensorgrad.data.rows.getproxies", lambda: {"https": "proxy"})
    assert rows._reaches_hub() is True
    assert len(asked) == 2
    hub = SimpleNamespace(HF_HUB_OFFLINE=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", hub)
    with rows._offline_mode(SimpleNamespace()):
        assert hub.HF_HUB_OFFLINE is True
    assert hub.HF_HUB_OFFLINE is False
