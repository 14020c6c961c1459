from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tensorgrad.data import text as module
from tensorgrad.data.text import (
    END_OF_TEXT,
    documents,
    find_file,
    fingerprint,
    folder_files,
    read_lines,
    read_text,
    standard_input,
    write_text,
)
from tensorgrad.errors import ArgumentError, DataError

LINES = st.text(st.sampled_from("ab \n\r<|end> ä😀"), max_size=40)
TEXTS = st.lists(LINES, min_size=1, max_size=5).map(END_OF_TEXT.join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for properties, whose examples overwrite each other's files."""
    return tmp_path_factory.mktemp("text")


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def expected(text: str) -> list[str]:
    first, *others = text.replace("\r\n", "\n").replace("\r", "\n").split(END_OF_TEXT)
    others = [t.removeprefix("\n") for t in others]
    return [t for t in (first, *others) if t.strip()]


def test_a_file_is_split_at_the_separators(tmp_path: Path) -> None:
    text = f"one\ntwo\n{END_OF_TEXT}\nthree\n{END_OF_TEXT}{END_OF_TEXT} \n{END_OF_TEXT}four"
    assert list(documents(write(tmp_path / "a.txt", text))) == ["one\ntwo\n", "three\n", "four"]


@given(text=TEXTS, chunk=st.integers(1, 30))
def test_the_size_of_what_is_read_at_once_does_not_matter(
    folder: Path, text: str, chunk: int
) -> None:
    path = write(folder / "a.txt", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        if expected(text):
            assert list(documents(path)) == expected(text)
        else:
            with pytest.raises(DataError, match=r"a\.txt', which holds no text"):
                list(documents(path))


@given(text=TEXTS, chunk=st.integers(1, 30), longest=st.integers(1, 20))
@example(f"{END_OF_TEXT}\r\n<<<<<<\n<<{END_OF_TEXT}", 1, 9)
def test_a_long_document_comes_in_pieces_cut_at_lines(
    folder: Path, text: str, chunk: int, longest: int
) -> None:
    path = write(folder / "b.txt", "x" + text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        patch.setattr(module, "LONGEST_DOCUMENT", longest)
        pieces = list(documents(path))
        patch.setattr(module, "_CHUNK", 1000)
        assert list(documents(path)) == pieces
    assert all(len(piece) <= longest for piece in pieces)
    whole = "".join(expected("x" + text))
    assert "".join("".join(pieces).split()) == "".join(whole.split())  # all that is visible


def test_only_the_line_end_after_a_separator_is_removed_from_a_long_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_DOCUMENT", 3)
    monkeypatch.setattr(module, "_CHUNK", 8)
    path = write(tmp_path / "a.txt", f"a{END_OF_TEXT}\nbc\n" + "\nd" * 20)
    assert "".join(list(documents(path))[1:]) == "bc\n" + "\nd" * 20


def test_a_line_that_is_too_long_is_cut_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_DOCUMENT", 4)
    path = write(tmp_path / "a.txt", "ab\ncdefghij\nk")
    assert list(documents(path)) == ["ab\n", "cdef", "ghij", "\nk"]


@pytest.mark.parametrize(("suffix", "opened"), [(".gz", gzip.open), (".xz", lzma.open)])
def test_compressed_files_are_read(tmp_path: Path, suffix: str, opened: Any) -> None:
    path = tmp_path / f"a.txt{suffix}"
    with opened(path, "wb") as file:
        file.write("ä\n".encode() * 1000)
    assert read_text(path) == "ä\n" * 1000
    assert list(documents(tmp_path)) == ["ä\n" * 1000]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=rf"cannot read .*a\.txt\{suffix}"):
        list(documents(path))
    path.write_bytes(b"plain text")  # a suffix decides nothing
    assert list(documents(path)) == ["plain text"]


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "\ufeffone\ufefftwo")
    assert read_text(path) == "one\ufefftwo"


NO_NUL = st.characters(exclude_characters="\0", codec="utf-8")  # a NUL makes a file binary


@given(
    before=st.text(NO_NUL, max_size=30), after=st.text(NO_NUL, max_size=9), chunk=st.integers(1, 20)
)
def test_text_that_is_not_utf_8_is_an_error_with_its_place(
    folder: Path, before: str, after: str, chunk: int
) -> None:
    path = folder / "c.txt"
    path.write_bytes(before.encode() + b"\xff" + after.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        with pytest.raises(DataError) as caught:
            list(documents(path))
    place = f"c.txt is not UTF-8: byte 0xff at offset {len(before.encode())} ("
    assert place in str(caught.value)


def test_a_character_that_the_end_of_the_file_cuts_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress("abcé".encode()[:-1]))
    with pytest.raises(DataError, match=r"byte 0xc3 at offset 3 of the decompressed text"):
        list(documents(path))


def test_a_folder_gives_its_text_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b.py", "a.txt.gz", "c.bin", ".hidden.txt", ".git/x.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(name.encode()) if ".gz" in name else name.encode())
    os.symlink(tmp_path, tmp_path / "a" / "loop")
    assert list(documents(tmp_path)) == ["a/b.py", "a/z.md", "a.txt.gz", "b.txt"]
    assert folder_files(tmp_path)[1] == {
        ".bin": 1,
        "hidden": 2,
        "a link to a folder that is read": 1,
    }
    assert list(documents(tmp_path, suffixes=(".bin",))) == ["c.bin"]


@pytest.mark.parametrize("name", ["nothing-here.txt", "", "stdlib "])
def test_a_missing_source_is_an_error(name: str) -> None:
    with pytest.raises(DataError, match=r"source has .* does not exist; expected a text file"):
        documents(name)


def test_a_folder_without_text_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.bin", "a")
    with pytest.raises(DataError, match=r"a folder without text files; expected .*\.txt"):
        documents(tmp_path)
    with pytest.raises(ArgumentError, match="suffixes has 'txt'"):
        documents(tmp_path, suffixes="txt")
    with pytest.raises(ArgumentError, match="suffixes has"):
        documents(tmp_path, suffixes=("txt",))


@pytest.mark.parametrize("text", ["", " \n\t", END_OF_TEXT * 3])
def test_a_source_without_text_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=r"a\.txt', which holds no text"):
        list(documents(write(tmp_path / "a.txt", text)))


def test_the_standard_library_is_text_on_every_machine() -> None:
    first = next(documents("stdlib"))
    assert "def " in "".join(text for _, text in zip(range(20), documents("stdlib"), strict=False))
    assert first == next(documents("stdlib"))
    paths = [str(path) for path in module._files("stdlib", ())]
    assert paths == sorted(paths, key=lambda path: path.split(os.sep))
    assert any(path.endswith("argparse.py") for path in paths)
    assert not any(f"{os.sep}{skipped}{os.sep}" in path for path in paths for skipped in ("test",))
    assert 3_000_000 < sum(os.stat(path).st_size for path in paths) <= module.STDLIB_BYTES


def test_the_standard_library_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STDLIB_BYTES", 100_000)
    assert 0 < sum(path.stat().st_size for path in module._files("stdlib", ())) <= 100_000


def test_a_python_without_its_source_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for found in (tmp_path, tmp_path / "python311.zip"):
        monkeypatch.setattr("sysconfig.get_path", lambda _, found=found: str(found))
        with pytest.raises(DataError, match=r"'stdlib', but .* has no Python source"):
            documents("stdlib")


def test_the_fingerprint_changes_with_the_files(tmp_path: Path) -> None:
    seen = set()
    for change in (
        lambda: write(tmp_path / "a.txt", "one"),
        lambda: write(tmp_path / "a.txt", "three"),
        lambda: os.utime(tmp_path / "a.txt", (1, 1)),
        lambda: write(tmp_path / "b.txt", "two"),
        lambda: (tmp_path / "b.txt").rename(tmp_path / "c.txt"),
    ):
        change()
        seen.add(fingerprint(tmp_path))
        assert fingerprint(tmp_path) in seen
    assert len(seen) == 5
    assert fingerprint("hf:a") != fingerprint("hf:a", column="b")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have names of text")
def test_names_that_are_not_utf_8_have_a_fingerprint(tmp_path: Path) -> None:
    one, other = (tmp_path / os.fsdecode(name) for name in (b"\xff.txt", b"\xfe.txt"))
    write(one, "text")
    before = fingerprint(tmp_path)
    assert list(documents(tmp_path)) == ["text"]
    one.rename(other)
    assert fingerprint(tmp_path) != before


def test_what_cannot_be_looked_at_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.txt", "text")

    def refuse(path: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with pytest.raises(DataError, match=r"documents: cannot read .*: Permission denied"):
            documents(tmp_path)
    monkeypatch.setattr(module, "_files", lambda *_: [tmp_path / "gone.txt"])
    with pytest.raises(DataError, match=r"cannot read .*gone\.txt: No such file"):
        fingerprint(tmp_path)


def test_rows_of_a_folder_have_the_column_of_its_name(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", '{"text": "one", "title": "first"}\n')
    assert list(documents(tmp_path)) == ["one"]
    assert list(documents(tmp_path, column="title")) == ["first"]


class FakeData:
    """The part of a data set that documents need."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns = columns
        kinds = {str: "string", int: "int64"}
        self.features = {
            name: SimpleNamespace(dtype=kinds[type(values[0])]) for name, values in columns.items()
        }

    def select_columns(self, names: list[str]) -> FakeData:
        return FakeData(**{name: self.columns[name] for name in names})

    def iter(self, batch_size: int) -> Iterator[dict[str, list[Any]]]:
        assert batch_size > 0
        yield from ({k: [v] for k, v in self.columns.items() for v in self.columns[k]},)


@pytest.fixture
def load_dataset(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[Any]]:
    """Stand in for the datasets package; return what it was asked for."""

    def install(answer: Any) -> list[Any]:
        asked: list[Any] = []

        def load(path: str, name: str | None, split: str) -> Any:
            asked.append((path, name, split))
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
        monkeypatch.setattr("tensorgrad.data.rows._reaches_hub", lambda: True)
        return asked

    return install


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("hf:a/b", ("a/b", None, "train")),
        ("hf:a/b:small", ("a/b", "small", "train")),
        ("hf:a/b:small:test", ("a/b", "small", "test")),
        ("hf:a/b::test", ("a/b", None, "test")),
    ],
)
def test_a_data_set_is_loaded_by_name(load_dataset: Any, source: str, asked: Any) -> None:
    calls = load_dataset(FakeData(label=[1], text=["one"]))
    assert list(documents(source)) == ["one"]
    assert calls == [asked]


def test_the_text_column_is_found_or_named(load_dataset: Any) -> None:
    load_dataset(FakeData(label=[1], story=["one"]))
    assert list(documents("hf:a")) == ["one"]
    load_dataset(FakeData(title=["t"], body=["b"]))
    assert list(documents("hf:a", column="body")) == ["b"]
    with pytest.raises(
        DataError, match=r"columns \['title', 'body'\].*choose one by --text-column"
    ):
        documents("hf:a")
    load_dataset(FakeData(label=[1]))
    for column in (None, "label", "none"):
        with pytest.raises(DataError, match=r"columns \['label'\], of which \[\] are text"):
            documents("hf:a", column=column)


@pytest.mark.parametrize("source", ["hf:", "hf::a", "hf:a:b:c:d"])
def test_a_data_set_name_of_a_wrong_form_is_an_error(source: str) -> None:
    with pytest.raises(ArgumentError, match=r"source has .* expected 'hf:NAME'"):
        documents(source)


def test_a_data_set_that_cannot_be_loaded_is_an_error(
    load_dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_dataset(ConnectionError("no network"))
    with pytest.raises(DataError, match="cannot load 'hf:a': no network"):
        documents("hf:a")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"datasets package: pip install -e \"\.\[text\]"):
        documents("hf:a")


def test_a_fifo_or_device_is_an_error_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    for name in ("a.txt", "zero.txt"):
        path = tmp_path / name
        with pytest.raises(DataError, match=rf"source has '{path}', which is a FIFO or a device"):
            list(documents(path))
        for read in (read_text, lambda path: list(read_lines(path))):
            with pytest.raises(DataError, match=rf"{path} is a FIFO or a device, expected a reg"):
                read(path)
    (tmp_path / "circle.txt").symlink_to("circle.txt")
    with pytest.raises(DataError, match=r"source has .*circle\.txt', which does not exist"):
        list(documents(tmp_path / "circle.txt"))
    with pytest.raises(DataError, match="a folder without text files"):
        list(documents(tmp_path))
    write(tmp_path / "b.txt", "text")
    assert list(documents(tmp_path)) == ["text"]


def test_folders_may_be_nested_deeper_than_functions(tmp_path: Path) -> None:
    folder, here = tmp_path, os.open(tmp_path, os.O_RDONLY)
    try:
        for _ in range(1500):
            folder = folder / "d"
            os.mkdir("d", dir_fd=here)
            inner = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = inner
        with os.fdopen(os.open("a.txt", os.O_WRONLY | os.O_CREAT, dir_fd=here), "w") as file:
            file.write("text")
    finally:
        os.close(here)
    assert list(documents(tmp_path)) == ["text"]
    while folder != tmp_path:  # pytest deletes folders by functions that call themselves
        for path in folder.iterdir():
            path.rmdir() if path.is_dir() else path.unlink()
        folder = folder.parent


def test_an_endless_line_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 7)
    monkeypatch.setattr(module, "LONGEST_LINE", 20)
    path = write(tmp_path / "a.txt", "short\n" * 9 + "x" * 1000)
    lines = read_lines(path)
    assert [next(lines) for _ in range(9)] == ["short"] * 9
    with pytest.raises(DataError, match=rf"{path} has a line of more than 20 characters"):
        next(lines)
    monkeypatch.setattr(module, "_CHUNK", 1 << 20)  # the whole file
    for text in ("x" * 21 + "\nshort\n", "short\n" + "x" * 21 + "\n"):
        lines = read_lines(write(tmp_path / "a.txt", text))
        with pytest.raises(DataError, match="has a line of more than 20 characters"):
            list(lines)
    assert list(read_lines(write(tmp_path / "a.txt", "x" * 20 + "\n"))) == ["x" * 20]


def test_lines_of_old_macs_end_at_cr_where_there_is_no_lf(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for content, lines in (
        (b"a\rb\rc", ["a", "b", "c"]),
        (b"a\rb\r", ["a", "b"]),
        (b"a\r", ["a"]),
        (b"a\rb\nc\n", ["a\rb", "c"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\n\nb", ["a", "", "b"]),
    ):
        path.write_bytes(content)
        assert list(read_lines(path)) == lines
    path.write_bytes(b"\x00\x01\xff" * 20)
    with pytest.raises(DataError, match=r"a\.txt is .*, expected text, a line for each"):
        list(read_lines(path))


def test_files_of_other_kinds_are_named_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "text")
    write(tmp_path / "b.txt", "<!doctype html><html><body>x</body></html>")
    write(tmp_path / "c.tar.gz", "x")
    write(tmp_path / "README", "x")
    os.mkfifo(tmp_path / "fifo.txt")
    files, skipped = folder_files(tmp_path)
    assert [path.name for path in files] == ["a.txt"]
    kind = module._content(tmp_path / "b.txt").kind
    assert skipped == {kind: 1, ".tar.gz": 1, "no suffix": 1, "not a file": 1}
    with pytest.raises(DataError, match=rf"b\.txt is {kind}, expected text, JSON lines \(an obj"):
        list(documents(tmp_path / "b.txt"))
    with pytest.raises(DataError, match=r"or Parquet; extract the text from other formats first"):
        list(documents(tmp_path / "b.txt"))
    assert read_text(tmp_path / "b.txt").startswith("<!doctype")
    (tmp_path / "c.tar.gz").write_bytes(b"\x00\x01\xff" * 20)
    with pytest.raises(DataError, match=r"c\.tar\.gz is [^,]*, expected text$"):
        read_text(tmp_path / "c.tar.gz")
    assert list(documents(tmp_path)) == ["text"]


def test_the_fingerprint_says_what_was_read(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "one")
    write(tmp_path / "b.txt", "one")
    assert fingerprint(tmp_path).startswith(f"{tmp_path} text 2 files ")
    assert fingerprint(tmp_path, column="body").startswith(f"{tmp_path} body 2 files ")
    assert fingerprint("stdlib", suffixes=()).startswith("stdlib text ")
    assert fingerprint("hf:a", column="b") == "hf:a b"
    assert len(fingerprint(tmp_path).split()[-1]) == 64


def test_a_file_of_a_folder_is_found_plain_or_compressed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"op: source has '.*none', which is not a folder; expec"):
        find_file("op", tmp_path / "none", ["a"], "such")
    message = rf"op: {tmp_path / 'a'} is missing: the folder has none of a, a\.gz, .*b\.gz"
    with pytest.raises(DataError, match=message):
        find_file("op", tmp_path, ["a", "b"], "such")
    (tmp_path / "a").mkdir()
    for name in ("b", "b.xz", "a.bz2"):
        write(tmp_path / name, "x")
    assert find_file("op", tmp_path, ["b", "a"], "such").name == "b"
    assert find_file("op", tmp_path, ["a", "b"], "such").name == "a.bz2"
    (tmp_path / "c.bz2").write_bytes(bz2.compress(b"text"))
    assert read_text(tmp_path / "c.bz2") == "text"


def test_text_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_text("op", tmp_path / "a.txt", "ä\n")
    assert (tmp_path / "a.txt").read_bytes() == "ä\n".encode()
    with pytest.raises(DataError, match=r"op: cannot write .*none/a\.txt: No such file or direct"):
        write_text("op", tmp_path / "none" / "a.txt", "x")


def test_lines_of_the_standard_input_do_not_end_at_cr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\rb\r\nc\n")))
    assert list(standard_input()) == ["a\rb\r\n", "c\n"]
    other = io.StringIO("a")
    monkeypatch.setattr(sys, "stdin", other)
    assert standard_input() is other


def test_a_text_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "12345")
    assert read_text(path, 5) == "12345"
    with pytest.raises(DataError, match=rf"{path} has more than 4 characters"):
        read_text(path, 4)
