from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad.data import documents, folder_files, prepare
from tensorgrad.data.content import SAMPLE, check_unpacked, content_of, kind_of, most_unpacked
from tensorgrad.data.text import read_lines
from tensorgrad.errors import DataError

ROOT = Path(__file__).parents[2]
ROW = json.dumps({"id": 1, "text": "a café"})


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo("a.txt"), "text")  # a fixed date
    return file.getvalue()


def array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(3))
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (zipped(), "a ZIP archive"),
        (array(), "a NumPy array"),
        (pickle.dumps({"a": [1]}), "a pickle"),
        (pickle.dumps([1, 2], 2), "a pickle"),
        (b"%PDF-1.7\n", "PDF"),
        (b"\x89PNG\r\n\x1a\n", "a PNG image"),
        (b"\xff\xd8\xff\xe0", "a JPEG image"),
        (b"GIF89a", "a GIF image"),
        (b"\x7fELF\x02", "an ELF program"),
        (b"SQLite format 3\0", "an SQLite database"),
        (b"PAR1", "Parquet"),
        ("text".encode("utf-16"), "UTF-16"),
        ("text".encode("utf-32"), "UTF-32"),
        (b"\xfe\xff\0t", "UTF-16"),
        ("text".encode("utf-16-le"), "binary: it has NUL bytes"),
        (b"text\0", "binary: it has NUL bytes"),
        (f"{ROW}\n{ROW}\n".encode(), "JSON lines"),
        (f"\ufeff{ROW}\r\n\r\n{ROW}".encode(), "JSON lines"),
        (ROW.encode(), "JSON lines"),
        (json.dumps({"text": "long " * SAMPLE}).encode(), "JSON lines"),
        (f"{ROW}\n{json.dumps({'text': 'long ' * SAMPLE})}".encode(), "JSON lines"),
        (json.dumps([{"a": 1}, {"a": None}]).encode(), "JSON"),
        (json.dumps([{"text": "long " * 9}] * SAMPLE).encode(), "JSON"),
        (json.dumps({"a": [1.5, "x"]}, indent=2).encode(), "JSON"),
        (json.dumps({f"key {i}": i for i in range(SAMPLE)}, indent=1).encode(), "JSON"),
        (b'["a", "b"]\n["c", "d"]\n', "JSON"),
        (b"<!DOCTYPE html>\n<p>text", "HTML or XML"),
        (b"\n<!-- a comment -->\n<html lang='en'>", "HTML or XML"),
        (b"<?xml version='1.0'?><a/>", "HTML or XML"),
        (b'<TEI xmlns="http://www.tei-c.org/ns/1.0"><p>' + b"text " * 99, "HTML or XML"),
        (b"<div><p>one</p><p>two</p></div>", "HTML or XML"),
        (b"id,text\n1,one\n2,two\n", "CSV"),
        (b'id,text\n1,"one, and\nmore"\n2,"two ""quoted"""\n', "CSV"),
        (b"id;text\r\n1;one\r\n2;two\r\n", "CSV"),
        (b"1,2.5\n3,4e-5\n1,2.5\n", "CSV"),
        (b"a,b,c\n1,one,x\n2,two,x\n", "CSV"),
        (b"a b,a b\n1,2\n3,4\n", "text"),  # no names, and no numbers alone
        (b"a b,c d\n1,2\n", "text"),  # two rows
        (b"a,b\n1,2\n3\n", "text"),
        (b"a\tb\n\t2\n3\t4 and, more\n", "tab-separated values"),
        (b"a a\ta a\n\t2\n3\t4 and more\n", "text"),
        (b'a,b\n1,"' + b"x" * 200_000 + b'"\n2,3\n', "text"),  # a cell that csv refuses
        (b"{}", "JSON lines"),
        (b"{} \n{}\n[1]\n", "JSON lines"),
        (b'{"a": 1}\n3\n', "JSON"),
        (b"[1, 2", "JSON"),
        (b"<p>one</p> and ten words of text that a tag does not hold", "text"),
        (b"<p>one</p><b>t</b> and words", "HTML or XML"),
        (b"<b>bold text without an end", "text"),
        (b"<template>\n<a></a></template>", "text"),
        (b"RIFF", "a RIFF file (audio, video or an image)"),
        (b"0000ftyp", "MP4 video"),
        (b"0" * 257 + b"ustar", "a tar archive"),
        (b"\x80\x01}", "text"),
        (b"sentence\tlabel\nGood, I think.\t1\nBad.\t0\n", "tab-separated values"),
        (b"id,text\n" + b"1,some words\n" * SAMPLE, "CSV"),
    ],
)
def test_names_what_is_not_text(data: bytes, kind: str) -> None:
    assert kind_of(data[:SAMPLE]) == kind


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\ufeffOnce, upon a time.\nThere, was a cat.\nIt, sat.\n",
        "Roses are red, violets are blue,\nSugar is sweet, and so are you,\nYes, indeed\n",
        "[1] Smith et al., 2016\n[2] Jones, 2017\n",
        "[section]\nkey = 1\n",
        "[A link](https://example.org) and text\n",
        '[{"a": 1}] is JSON, and this is a sentence.',
        "{curly} words\n",
        '{"a": 1}\nis what it printed, and this is a sentence\n',
        "{\n  return 1;\n}\n",
        "<|endoftext|>\ntext",
        '<p align="center">\n<img src="a.png">\n</p>\n\n# A project\n\nText.\n',
        "<unk> of the <unk> words, " * 9,
        "< 3 is less than > 2\n",
        "all:\n\tcc a.c\n\ncheck:\n\t./a.out\n",
        "\tone\ttwo\n\tthree\tfour\n\tfive\tsix\n",
        "a, b = 1, 2\nc, d = 3, 4\ne, f = 5, 6\n",
        "- one\n- two\n",
        "BZh is not an archive\n",
    ],
)
def test_prose_code_and_markup_for_readers_are_text(text: str) -> None:
    assert kind_of(text.encode()) == "text"


def test_each_whole_line_of_a_sample_decides() -> None:
    cut = "x" * SAMPLE
    for second, kind in (('{"b": 2}', "JSON lines"), ("no JSON", "text")):
        assert kind_of(f'{{"a": 1}}\n{second}\n{cut}'[:SAMPLE].encode()) == kind


def test_sources_and_documents_of_python_and_ours_are_text() -> None:
    stdlib = Path(sysconfig.get_path("stdlib"))
    paths = [*stdlib.glob("[a-m]*.py"), *ROOT.glob("**/*.md"), *ROOT.glob("tensorgrad/**/*.cu")]
    paths = [path for path in paths if ".venv" not in path.parts and path.stat().st_size]
    assert len(paths) > 100
    assert [path for path in paths if content_of(path).kind != "text"] == []


def test_a_compressed_file_is_known_by_its_content(tmp_path: Path) -> None:
    packed: dict[str, Any] = {"gzip": gzip.compress, "xz": lzma.compress, "bzip2": bz2.compress}
    for name, compress in packed.items():
        path = tmp_path / name
        path.write_bytes(compress(b"text"))
        assert list(documents(path)) == ["text"]
        path.write_bytes(compress(f"{ROW}\n".encode() * 2))
        assert list(documents(path)) == ["a café"] * 2
        path.write_bytes(compress(gzip.compress(b"text")))
        with pytest.raises(DataError, match="is a compressed file in another, expected text"):
            list(documents(path))


def test_a_file_that_is_decompressed_to_far_more_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorgrad.data.content._UNPACKED_BYTES", 100_000)
    for compress in (gzip.compress, lzma.compress, bz2.compress):
        (tmp_path / "a.txt").write_bytes(compress(b"text\n" * 20_000))  # at the limit
        assert len(list(read_lines(tmp_path / "a.txt"))) == 20_000
        (tmp_path / "a.txt").write_bytes(compress(b"text\n" * 2_000_000)[:2000])
        with pytest.raises(DataError, match="decompressed, expected at most 250 times its size"):
            list(read_lines(tmp_path / "a.txt"))
    assert [most_unpacked(size) for size in (0, 400, 401)] == [100_000, 100_000, 100_250]
    check_unpacked(tmp_path, 5, 5)
    with pytest.raises(DataError, match="has more than 5,000 bytes when it is decompressed"):
        check_unpacked(tmp_path, 5001, 5000)


def test_what_a_file_begins_with_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"text" * SAMPLE)
    (tmp_path / "b").write_bytes(gzip.compress(b"text" * SAMPLE))
    for name, packed in (("a", False), ("b", True)):
        found = content_of(tmp_path / name)
        assert (found.kind, found.packed) == ("text", packed)
        assert found.head == (b"text" * SAMPLE)[:SAMPLE]
        assert b"".join(found.chunks(1000)) == b"text" * SAMPLE
        assert max(map(len, found.chunks(1000))) == 1000


@pytest.mark.parametrize("frames", [1, 2])
def test_zstandard_is_read(tmp_path: Path, frames: int) -> None:
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    whole = b"".join(zstandard.compress(b"text " * 50_000) for _ in range(frames))
    path = tmp_path / "a.txt.zst"
    path.write_bytes(whole)
    assert "".join(documents(tmp_path)) == "text " * 50_000 * frames
    for damaged, problem in ((whole[:-3], "ended inside"), (whole + b"more", "cannot read")):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=problem):
            list(documents(path))


def test_zstandard_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("zstandard", "compression.zstd"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    (tmp_path / "a.txt").write_bytes(b"\x28\xb5\x2f\xfd rest")
    with pytest.raises(DataError, match="needs the zstandard package: pip install"):
        list(documents(tmp_path / "a.txt"))


def test_a_file_of_another_kind_is_an_error_and_skipped_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"id,text\n1,one\n2,two\n")
    for read in (documents, read_lines):
        with pytest.raises(DataError, match=re.escape(f"{tmp_path}/a.txt is CSV, expected text")):
            list(read(tmp_path / "a.txt"))
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / "c.html").write_text("<html>")
    (tmp_path / "LICENSE").write_text("text")
    assert list(documents(tmp_path)) == ["text"]
    files, skipped = folder_files(tmp_path)
    assert files == [tmp_path / "b.txt"]
    assert skipped == {"CSV": 1, ".html": 1, "no suffix": 1}
    corpus = prepare(tmp_path, tmp_path / ".cache", 300)
    counts = "files read: 1, skipped: 4 (.html: 1, CSV: 1, hidden: 1, no suffix: 1)"
    assert corpus.source_files == counts
    assert prepare(tmp_path, tmp_path / ".cache", 300).source_files == counts
    (tmp_path / "b.txt").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"no file is text, .*\(.*binary: it has NUL bytes: 1"):
        prepare(tmp_path, tmp_path / ".cache", 300)


def test_upper_case_suffixes_and_linked_folders_are_read_once(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    for path in (folder, other / "deep"):
        path.mkdir(parents=True)
    (folder / "BOOK.TXT").write_text("book")
    (folder / "b.txt.GZ").write_bytes(gzip.compress(b"packed"))
    (other / "deep" / "c.txt").write_text("linked")
    for link in ("link", "same"):
        (folder / link).symlink_to(other)
    (other / "deep" / "up").symlink_to(folder)
    (folder / "circle").symlink_to("circle")
    assert sorted(documents(folder)) == ["book", "linked", "packed"]
    assert folder_files(folder)[1] == {"a link to a folder that is read": 2, "not a file": 1}
