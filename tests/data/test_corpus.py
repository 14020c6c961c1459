from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad.data import (
    END_OF_TEXT,
    Corpus,
    Tokenizer,
    documents,
    is_prepared,
    open_prepared,
    prepare,
)
from tensorgrad.data import corpus as module
from tensorgrad.errors import ArgumentError, DataError
from tests.disk import full_disk
from tests.source_tree import ROOT

# Prepares argv[1] in argv[2]; says so with a line for each stage, and kills itself in argv[3].
SCRIPT = """
import os, signal, sys
from tensorgrad.data import prepare

stages = []

def progress(stage, done, total):
    if stage not in stages:
        stages.append(stage)
    if stage == sys.argv[3] and (done > 10_000 or not total):
        os.kill(os.getpid(), getattr(signal, sys.argv[4]))

prepare(sys.argv[1], sys.argv[2], 300, progress=progress)
print(stages)
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a source of some hundred documents."""
    path = tmp_path_factory.mktemp("source") / "text.txt"
    books = (f"book {n}\n" + f"line of book {n}\n" * (n % 7 + 1) for n in range(400))
    path.write_text(f"{END_OF_TEXT}\n".join(books))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def made(home: Path) -> list[Path]:
    return [path for path in home.iterdir() if not path.name.startswith(".")]


def half_made(home: Path) -> list[Path]:
    return [path for path in home.iterdir() if path.name.endswith(".tmp")]


def texts(corpus: Corpus, part: str) -> list[str]:
    ids = getattr(corpus, part).tokens
    found: list[str] = corpus.tokenizer.decode(ids).split(END_OF_TEXT)
    *parts, end = found
    assert end == ""
    return parts


def test_a_source_becomes_two_token_files(text: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    corpus = prepare(text, tmp_path, 300, validation=0.1, progress=lambda *a: calls.append(a))
    assert corpus.tokenizer.vocab_size == 300
    assert corpus.source_files == ""  # a single file
    train, validation = texts(corpus, "train"), texts(corpus, "validation")
    assert sorted(train + validation) == sorted(documents(text))
    size = len("".join(documents(text)))
    assert 0.05 * size < len("".join(validation)) <= 0.1 * size
    assert [s for n, (s, _, _) in enumerate(calls) if n == 0 or s != calls[n - 1][0]] == [
        *("reading", "tokenizer", "encoding")
    ]
    assert calls[-1] == ("encoding", size, size)
    facts = json.loads((corpus.folder / "corpus.json").read_text())
    assert facts["counts"] == {
        "documents": 400,
        "characters": size,
        "train": len(corpus.train),
        "validation": len(corpus.validation),
    }


def test_the_second_call_only_opens(text: Path, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the corpus is made again")

    first = prepare(text, tmp_path / "a" / "b", 300)
    before = contents(first.folder)
    second = prepare(str(text), str(tmp_path / "a" / "b"), 300, progress=fail)
    assert (second.digest, second.folder) == (first.digest, first.folder)
    assert second.train.tokens.tolist() == first.train.tokens.tolist()
    assert contents(first.folder) == before
    assert made(tmp_path / "a" / "b") == [first.folder]


def test_equal_sources_give_equal_bytes(text: Path, tmp_path: Path) -> None:
    shutil.copy(text, tmp_path / "text.txt")
    one, other = prepare(text, tmp_path / "a", 300), prepare(tmp_path / "text.txt", tmp_path, 300)
    assert one.digest == other.digest
    assert one.folder.name != other.folder.name
    for name in ("tokenizer.json", "train.npy", "validation.npy"):
        assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes()


def test_a_tokenizer_that_the_text_has_trained_finds_its_tokens(text: Path, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the corpus is made again")

    first = prepare(text, tmp_path / "cache", 300)
    given = Tokenizer.load(first.folder)
    again = prepare(text, tmp_path / "cache", tokenizer=given, progress=fail)
    assert (again.folder, again.digest) == (first.folder, first.digest)
    fresh = prepare(text, tmp_path / "other", tokenizer=given)
    assert fresh.digest == first.digest
    split = prepare(text, tmp_path / "cache", tokenizer=given, validation=0.2)
    assert split.digest != first.digest
    (first.folder / "train.npy").write_bytes(b"damaged")
    repaired = prepare(text, tmp_path / "cache", tokenizer=given)
    assert (repaired.digest, repaired.folder != first.folder) == (first.digest, True)


def test_what_changes_the_tokens_changes_folder_and_digest(text: Path, tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    shutil.copy(text, source)
    given = Tokenizer.train(["some text\n" * 20], 290)
    corpora = [
        prepare(source, tmp_path / "cache", 300),
        prepare(source, tmp_path / "cache", 310),
        prepare(source, tmp_path / "cache", 300, validation=0.2),
        prepare(source, tmp_path / "cache", tokenizer=given),
        prepare(source, tmp_path / "cache", tokenizer=Tokenizer.train(["a b a b"], 290)),
    ]
    source.write_text(source.read_text() + "more")
    corpora.append(prepare(source, tmp_path / "cache", 300))
    assert len({corpus.folder for corpus in corpora}) == 6
    assert len({corpus.digest for corpus in corpora}) == 6
    again = prepare(source, tmp_path / "cache", 999, tokenizer=given)
    assert again.tokenizer.to_json() == given.to_json()


def test_a_large_corpus_trains_the_tokenizer_on_a_part(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(corpus_home: Path) -> int:
        calls: list[tuple[str, int, int]] = []
        prepare(text, corpus_home, 300, progress=lambda *a: calls.append(a))
        return max(done for stage, done, _ in calls if stage == "tokenizer")

    whole = read(tmp_path / "a")
    monkeypatch.setattr(module, "CHARACTERS_PER_TOKEN", whole // 4 // 300)
    assert 0.1 * whole < read(tmp_path / "b") < 0.4 * whole


@pytest.mark.parametrize("stage", ["reading", "tokenizer", "encoding"])
def test_an_exception_leaves_nothing(text: Path, tmp_path: Path, stage: str) -> None:
    def interrupt(now: str, done: int, total: int) -> None:
        if now == stage and done > 5000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(text, tmp_path, 300, progress=interrupt)
    assert made(tmp_path) == half_made(tmp_path) == []


@pytest.mark.parametrize(("stage", "sign"), [("tokenizer", "SIGKILL"), ("encoding", "SIGINT")])
def test_a_stopped_process_leaves_no_result_and_the_next_cleans_up(
    text: Path, tmp_path: Path, stage: str, sign: str
) -> None:
    args = [sys.executable, "-c", SCRIPT, str(text), str(tmp_path), stage, sign]
    assert subprocess.run(args, cwd=ROOT, capture_output=True, check=False).returncode < 0
    assert made(tmp_path) == []
    assert len(half_made(tmp_path)) == (sign == "SIGKILL")
    corpus = prepare(text, tmp_path, 300)
    assert made(tmp_path) == [corpus.folder]
    assert half_made(tmp_path) == []


def test_processes_that_prepare_at_once_do_the_work_once(text: Path, tmp_path: Path) -> None:
    args = [sys.executable, "-c", SCRIPT, str(text), str(tmp_path), "none", ""]
    running = [
        subprocess.Popen(args, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    said = sorted(process.communicate()[0].strip() for process in running)
    assert [process.returncode for process in running] == [0, 0, 0]
    assert said == ["['reading', 'tokenizer', 'encoding']", "[]", "[]"]
    assert len(made(tmp_path)) == 1
    assert half_made(tmp_path) == []


def test_without_locks_the_first_result_stays(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "locked", lambda *_, **__: nullcontext(False))
    others: list[Corpus] = []

    def interfere(stage: str, done: int, total: int) -> None:
        if stage == "encoding" and not others:
            others.append(prepare(text, tmp_path, 300))
            (others[0].folder / "mark").touch()

    corpus = prepare(text, tmp_path, 300, progress=interfere)
    assert corpus.folder == others[0].folder
    assert (corpus.folder / "mark").exists()
    assert half_made(tmp_path) == []


def test_the_lock_follows_no_symbolic_link(text: Path, tmp_path: Path) -> None:
    (made_once,) = [prepare(text, tmp_path / "one", 300).folder]
    other = tmp_path / "other"
    other.write_text("of another user")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / f".{made_once.name}.lock").symlink_to(other)
    with pytest.raises(DataError, match=r"\.lock: Too many levels of symbolic links"):
        prepare(text, tmp_path / "two", 300)
    assert other.read_text() == "of another user"


def test_a_full_disk_is_an_error_that_leaves_nothing(text: Path, tmp_path: Path) -> None:
    with full_disk(10_000), pytest.raises(DataError, match=r"cannot write .*File too large"):
        prepare(text, tmp_path, 300)
    assert made(tmp_path) == half_made(tmp_path) == []


def test_a_result_that_cannot_be_renamed_is_an_error_that_leaves_nothing(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(target))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(DataError, match="Permission denied"):
        prepare(text, tmp_path / "cache", 300)
    assert made(tmp_path / "cache") == []


def test_a_folder_of_other_files_is_an_error_that_counts_them(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "in" / name).write_text("<!DOCTYPE html>\n<html></html>\n")
    with pytest.raises(DataError, match=r"no file is text.* \(HTML or XML: 2\)"):
        prepare(tmp_path / "in", tmp_path / "cache", 300)


def test_a_folder_that_cannot_be_made_is_an_error(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"prepare: cannot read or write .*file: File exists"):
        prepare(text, tmp_path / "file", 300)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)


def other_dtype(path: Path) -> None:
    np.save(path, np.load(path).astype(np.uint32))


def outside(path: Path) -> None:
    tokens = np.load(path)
    tokens[7] = 300
    np.save(path, tokens)


def swap(path: Path) -> None:
    shutil.copy(path.with_name("validation.npy"), path)


def other_digest(path: Path) -> None:
    facts = json.loads(path.read_text())
    facts["files"]["train.npy"] = "0" * 64
    path.write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("train.npy", flip),
        ("validation.npy", flip),
        ("train.npy", other_dtype),
        ("train.npy", outside),
        ("train.npy", swap),
        ("train.npy", lambda path: os.truncate(path, 1000)),
        ("train.npy", Path.unlink),
        ("tokenizer.json", lambda path: path.write_text(path.read_text() + "\n")),
        ("tokenizer.json", lambda path: path.write_text("{}")),
        ("corpus.json", lambda path: path.write_text("{}")),
        ("corpus.json", lambda path: path.write_text("[" * 100_000)),
        ("corpus.json", Path.unlink),
        ("corpus.json", other_digest),
    ],
)
def test_a_damaged_result_is_named_and_made_again(
    text: Path, tmp_path: Path, name: str, edit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = prepare(text, tmp_path, 300)
    before = contents(first.folder)
    edit(first.folder / name)
    assert contents(first.folder) != before
    again = prepare(text, tmp_path, 300)
    (warning,) = caplog.messages
    named = "train.npy" if edit is other_digest else name
    assert f"{first.folder / named} " in warning
    assert warning.endswith(f"making it again from {text}")
    assert contents(first.folder) == before
    assert again.digest == first.digest
    assert made(tmp_path) == [first.folder]
    assert half_made(tmp_path) == []


def test_ids_outside_the_vocabulary_are_noticed_though_the_sums_are_right(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = prepare(text, tmp_path, 300)
    before = contents(first.folder)
    outside(first.folder / "train.npy")
    facts = json.loads((first.folder / "corpus.json").read_text())
    data = (first.folder / "train.npy").read_bytes()
    facts["files"]["train.npy"] = hashlib.sha256(data).hexdigest()
    (first.folder / "corpus.json").write_text(json.dumps(facts))
    prepare(text, tmp_path, 300)
    assert "train.npy has the id 300 at position 7, expected 0 to 299" in caplog.text
    assert contents(first.folder) == before


def test_a_damaged_result_stays_where_its_source_cannot_be_read(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "text.txt"
    shutil.copy(text, source)
    first = prepare(source, tmp_path / "cache", 300)
    flip(first.folder / "train.npy")
    damaged, status = contents(first.folder), source.stat()
    source.write_bytes(b"\xff" * status.st_size)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DataError, match=r"text\.txt is not UTF-8"):
        prepare(source, tmp_path / "cache", 300)
    assert f"{first.folder / 'train.npy'} is damaged" in caplog.text
    assert contents(first.folder) == damaged
    assert half_made(tmp_path / "cache") == []


def test_a_damaged_result_is_made_again_once_by_many_processes(text: Path, tmp_path: Path) -> None:
    first = prepare(text, tmp_path, 300)
    before = contents(first.folder)
    flip(first.folder / "train.npy")
    args = [sys.executable, "-c", SCRIPT, str(text), str(tmp_path), "none", ""]
    running = [
        subprocess.Popen(args, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    said = sorted(process.communicate()[0].strip() for process in running)
    assert said == ["['reading', 'tokenizer', 'encoding']", "[]", "[]"]
    assert contents(first.folder) == before
    assert half_made(tmp_path) == []


def test_comparing_large_files_is_shown(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(text, tmp_path, 300).folder
    monkeypatch.setattr(module, "_SHOWN", 1)
    calls: list[tuple[str, int, int]] = []
    prepare(text, tmp_path, 300, progress=lambda *a: calls.append(a))
    size = sum(len(data) for name, data in contents(folder).items() if name != "corpus.json")
    assert calls[-1] == ("checking", size, size)


def test_a_source_whose_name_is_not_utf8_is_kept_too(text: Path, tmp_path: Path) -> None:
    source = tmp_path / os.fsdecode(b"text-\xff.txt")
    shutil.copy(text, source)
    first = prepare(source, tmp_path / "cache", 300)
    assert prepare(source, tmp_path / "cache", 300).digest == first.digest


def test_a_source_that_changes_meanwhile_is_an_error(text: Path, tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    shutil.copy(text, source)

    def edit(stage: str, done: int, total: int) -> None:
        os.utime(source, (1, 1))

    with pytest.raises(DataError, match=r"text\.txt changed while it was read"):
        prepare(source, tmp_path / "cache", 300, progress=edit)
    assert made(tmp_path / "cache") == half_made(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"holds no text"),
        (b"a", r"1 character, expected 2 or more"),
        (b"good \xff", r"text\.txt is not UTF-8: byte 0xff at offset 5"),
    ],
)
def test_bad_text_is_an_error_that_leaves_nothing(
    tmp_path: Path, data: bytes, message: str
) -> None:
    (tmp_path / "text.txt").write_bytes(data)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "text.txt", tmp_path / "cache", 300)
    assert made(tmp_path / "cache") == half_made(tmp_path / "cache") == []


def test_a_missing_source_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        prepare(tmp_path / "none", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_tokenizer_has_its_own_pattern(text: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ArgumentError, match="pattern is given with a tokenizer, expected one of th"
    ):
        prepare(text, tmp_path, tokenizer=Tokenizer.train(["a"], 257), pattern="a")


def test_the_files_of_a_folder_are_counted_with_reasons(tmp_path: Path) -> None:
    assert module._files_of(tmp_path / "none", (".txt",)) == ""
    (tmp_path / "a.txt").write_text("text")
    assert module._files_of(tmp_path, (".txt",)) == "files read: 1, skipped: 0"
    for name in ("b.c", "d.c", "e"):
        (tmp_path / name).write_text("text")
    found = module._files_of(tmp_path, (".txt",))
    assert found == "files read: 1, skipped: 3 (.c: 2, no suffix: 1)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 256}, "vocab_size is 256, expected 257 or more"),
        ({"vocab_size": 300.5}, "vocab_size is 300.5, expected an integer"),
        ({"vocab_size": None}, "vocab_size is None, expected an integer"),
        ({"validation": "x"}, "validation is 'x', expected a number"),
        ({"tokenizer": 3}, "tokenizer is a int, expected a Tokenizer"),
        ({"validation": 0}, "validation has 0, expected between 0 and 1"),
        ({"validation": 1}, "validation has 1, expected between 0 and 1"),
        ({"pattern": "(a"}, "prepare: pattern is '.a', expected a regular expression"),
    ],
)
def test_bad_settings_are_errors(
    text: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        prepare(text, tmp_path / "cache", **change)
    assert not (tmp_path / "cache").exists()


def test_one_book_is_split(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("".join(f"line {n}\n" for n in range(1000)))
    corpus = prepare(tmp_path / "book.txt", tmp_path, 300, validation=0.1)
    (train,), (validation,) = texts(corpus, "train"), texts(corpus, "validation")
    assert train + validation == (tmp_path / "book.txt").read_text()
    assert validation.startswith("line")
    assert corpus.folder.name.startswith("book-txt-")


@pytest.fixture(autouse=True)
def _no_part_left_behind(tmp_path: Path) -> Iterator[None]:
    yield
    assert [path for path in tmp_path.rglob("*.npy-*.tmp") if path.parent.name[0] != "."] == []


def test_a_saved_corpus_is_ready(text: Path, tmp_path: Path) -> None:
    corpus = prepare(text, tmp_path / "cache", 300)
    ready = tmp_path / "ready"
    assert not is_prepared(ready)
    corpus.save(ready)
    assert is_prepared(ready)
    found = open_prepared(ready)
    assert found.digest == corpus.digest
    np.testing.assert_array_equal(found.train.tokens, corpus.train.tokens)
    assert open_prepared(corpus.folder).digest == corpus.digest
    with pytest.raises(ArgumentError, match=r"tokenizer\.json exists, expected a folder without"):
        corpus.save(ready)


def test_a_ready_corpus_may_come_from_elsewhere(text: Path, tmp_path: Path) -> None:
    prepare(text, tmp_path / "cache", 300).tokenizer.save(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"train\.npy is missing"):
        open_prepared(tmp_path)
    for name in ("train", "validation"):
        np.save(tmp_path / f"{name}.npy", np.arange(50, dtype=np.uint16))
    assert len(open_prepared(tmp_path).validation) == 50
    np.save(tmp_path / "train.npy", np.full(50, 300, np.uint16))
    with pytest.raises(DataError, match="300"):
        open_prepared(tmp_path)
    np.save(tmp_path / "train.npy", np.zeros((5, 5), np.uint16))
    with pytest.raises(DataError, match="shape"):
        open_prepared(tmp_path)


def test_a_corpus_that_cannot_be_written_is_named(text: Path, tmp_path: Path) -> None:
    corpus = prepare(text, tmp_path / "cache", 300)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write .*file"):
        corpus.save(tmp_path / "file")
