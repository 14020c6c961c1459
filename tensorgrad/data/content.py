"""The content of a file, by its first bytes and not by its name: text, rows or something else.

Compressed files are decompressed. Tests: tests/data/test_content.py.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import importlib
import lzma
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tensorgrad.core.errors import DataError
from tensorgrad.io.readers import json_object, needed, open_regular

SAMPLE = 1 << 16  # bytes that decide
TEXT, JSON_LINES, PARQUET = "text", "JSON lines", "Parquet"
_JSON, _CSV, _TSV, _MARKUP = "JSON", "CSV", "tab-separated values", "HTML or XML"
CHARACTERS = (TEXT, JSON_LINES, _JSON, _CSV, _TSV, _MARKUP)  # the kinds that are not binary
PACKED = ("", ".gz", ".xz", ".bz2", ".zst")  # suffixes of compressed files
# Errors of damaged compressed files, beside OSError.
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)

# Bytes at an offset that no text has.
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"PAR1", PARQUET),
    (0, b"PK\x03\x04", "a ZIP archive"),
    (0, b"PK\x05\x06", "a ZIP archive"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"Rar!\x1a\x07", "a RAR archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"%PDF-", "PDF"),
    (0, b"%!PS", "PostScript"),
    (0, b"{\\rtf", "RTF"),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GIF87a", "a GIF image"),
    (0, b"GIF89a", "a GIF image"),
    (0, b"RIFF", "a RIFF file (audio, video or an image)"),
    (0, b"ID3", "MP3 audio"),
    (0, b"OggS", "Ogg audio"),
    (0, b"fLaC", "FLAC audio"),
    (4, b"ftyp", "MP4 video"),
    (0, b"\x7fELF", "an ELF program"),
    (0, b"\xca\xfe\xba\xbe", "a program"),
    (0, b"\xcf\xfa\xed\xfe", "a program"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"\x89HDF\r\n\x1a\n", "HDF5"),
    (0, b"SQLite format 3\0", "an SQLite database"),
    (0, b"ARROW1", "an Arrow file"),
    (0, b"Obj\x01", "Avro"),
    (0, b"ORC", "ORC"),
    (0, b"\xff\xfe\0\0", "UTF-32"),
    (0, b"\0\0\xfe\xff", "UTF-32"),
    (0, b"\xff\xfe", "UTF-16"),
    (0, b"\xfe\xff", "UTF-16"),
)
_PICKLE = re.compile(rb"\x80[\x02-\x05][\x95c}\](KX\x8c]")  # protocols 2 to 5 and a first opcode
# How compressed files begin, and what opens them; None: _read_zstd.
_OPENERS: tuple[tuple[re.Pattern[bytes], Any], ...] = (
    (re.compile(rb"\x1f\x8b\x08"), gzip.open),
    (re.compile(rb"\xfd7zXZ\0"), lzma.open),
    (re.compile(rb"BZh.(?:1AY&SY|\x17rE8P\x90)", re.S), bz2.open),
    (re.compile(rb"\x28\xb5\x2f\xfd"), None),
)
_UNPACKED_BYTES, _RATIO = 1 << 23, 250  # text has a tenth of this ratio
_PACKED_BYTES = 1 << 12  # compressed bytes at a time, of up to 128 MiB

_JSON_TOKENS = re.compile(
    r'(?:[\s\[\]{},:]+|"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null)*+', re.S
)
_CUT_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*\\?|[-+.\w]*', re.S)  # a token that the sample's end cuts
_JSON_OBJECT = re.compile(r'\{\s*(?:"|\})')
_COMMENTS = re.compile(r"(?:\s+|<!--.*?-->)+", re.S)
_HTML = re.compile(
    r"<(?:(?:!doctype|\?xml|html|head|body|svg|rss|feed)\b|[\w:]+\s[^<>]*\bxmlns\b)", re.I
)
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_NOT_HTML = re.compile(r"^<(?:template|script|style)\b|^#{1,6} |^```|\]\(", re.M)  # Vue, Markdown
_HEADER = re.compile(r"\w(?:[\w .()/%#:-]{0,62}[\w)%#])?")  # the header of a column
_NUMBER = re.compile(r"\s*[-+]?[\d.]+(?:[eE][-+]?\d+)?\s*")


@dataclass(frozen=True)
class Content:
    """The content of a file.

    Attributes:
        kind: TEXT, JSON_LINES or PARQUET, which can be read, or the name of another kind.
        head: the first SAMPLE bytes.
        chunks: yields the content, decompressed, in pieces of about a number of bytes.
        packed: whether the file is compressed.
    """

    kind: str
    head: bytes
    chunks: Callable[[int], Iterator[bytes]]
    packed: bool


def content_of(path: Path) -> Content:
    """Return the kind of a file, compressed or not, by its first bytes and not by its name.

    Raises:
        DataError: it is a FIFO or a device, needs zstandard, which is not installed, or holds more
            than 8 MB and 250 times its size.
        OSError, EOFError, zlib.error, lzma.LZMAError: it cannot be read, or is damaged.
    """
    with open_regular(path, links=True) as file:
        head = file.read(SAMPLE)
    unpack = _decompressor(head)
    if unpack is None:
        return Content(kind_of(head), head, partial(_read, open_regular, path, links=True), False)
    chunks, head = partial(_unpacked, unpack, path), b""
    with closing(chunks(SAMPLE)) as beginning:
        while len(head) < SAMPLE and (data := next(beginning, b"")):
            head += data
    head = head[:SAMPLE]
    nested = head.startswith(b"PAR1") or _decompressor(head) is not None
    kind = "a compressed file in another" if nested else kind_of(head)
    return Content(kind, head, chunks, True)


def kind_of(head: bytes) -> str:
    """Return the kind of a file from its first SAMPLE bytes, or all of a shorter one."""
    for offset, magic, kind in _MAGIC:
        if head.startswith(magic, offset):
            return kind
    if _PICKLE.match(head):
        return "a pickle"
    if b"\0" in head:
        return "binary: it has NUL bytes"
    whole = len(head) < SAMPLE
    # A character that the end of the sample cuts is dropped; other bytes are errors of the reader.
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(head).removeprefix("\ufeff")
    text = text.lstrip()
    if text.startswith(("{", "[")):
        return _json_kind(text, whole)
    if text.startswith("<") and _is_markup(text):
        return _MARKUP
    return _table_kind(text, whole)


def _json_kind(text: str, whole: bool) -> str:
    """Return the kind of a text that begins with a brace or a bracket."""
    lines = _lines(text)
    if len(lines) > 1 or whole:
        complete = lines if whole else lines[:-1]
        if all(json_object(line) is not None for line in complete[:2]):
            return JSON_LINES
    elif _JSON_OBJECT.match(text):  # a row that is longer than the sample
        return JSON_LINES if _is_json(text, whole) else TEXT
    if text[0] == "{" and not _JSON_OBJECT.match(text):
        return TEXT
    return _JSON if _is_json(text, whole) else TEXT


def _lines(text: str) -> list[str]:
    """Return the lines that have a visible character; text may hold U+2028."""
    return [line for line in re.split(r"\r\n?|\n", text) if line.strip()]


def _is_json(text: str, whole: bool) -> bool:
    """Whether a text has only tokens of JSON; the last may be cut."""
    match = _JSON_TOKENS.match(text)
    rest = text[match.end() :] if match else text
    return not rest or (not whole and _CUT_TOKEN.fullmatch(rest) is not None)


def _is_markup(text: str) -> bool:
    """Whether a text is HTML or XML by its head, or for a fourth tags, as Markdown is not."""
    comments = _COMMENTS.match(text)
    text = text[comments.end() :] if comments else text
    if _HTML.match(text):
        return True
    if _NOT_HTML.search(text):
        return False
    tags = sum(len(tag) for tag in _TAG.findall(text))
    return _TAG.match(text) is not None and "</" in text and 4 * tags > len(text)


def _table_kind(text: str, whole: bool) -> str:
    """Return the kind of a text that may be a table: three rows or more of equally many cells."""
    lines = _lines(text) if whole else _lines(text)[:-1]
    first = lines[0] if lines else ""
    for delimiter, kind in (("\t", _TSV), (",", _CSV), (";", _CSV)):
        if delimiter not in first or len(lines) < 3:
            continue
        try:
            rows = list(csv.reader((f"{line}\n" for line in lines), delimiter=delimiter))
        except csv.Error:
            continue
        if not whole and len(rows) > 3:
            rows.pop()  # a quoted cell may be cut
        if len({len(row) for row in rows}) > 1 or len(rows) < 3:
            continue
        header, numbers = rows[0], all(_NUMBER.fullmatch(cell) for row in rows for cell in row)
        named = len(set(header)) == len(header) and all(map(_HEADER.fullmatch, header))
        if numbers or named or (kind == _TSV and all(row[0].strip() for row in rows)):
            return kind
    return TEXT


def _decompressor(head: bytes) -> Callable[..., Generator[bytes]] | None:
    """Return the function that reads a file which begins so, if it is compressed."""
    for magic, opener in _OPENERS:
        if magic.match(head):
            return _read_zstd if opener is None else partial(_read, opener)
    return None


def _unpacked(unpack: Callable[..., Generator[bytes]], path: Path, size: int) -> Generator[bytes]:
    """Yield what a compressed file holds.

    Raises:
        DataError: it is far more than text would be: 200 KB may hold 200 MB of empty lines.
    """
    with open_regular(path, links=True) as packed, closing(unpack(packed, size)) as chunks:
        most, total = most_unpacked(os.fstat(packed.fileno()).st_size), 0
        for data in chunks:
            total += len(data)
            check_unpacked(path, total, most)
            yield data


def most_unpacked(size: int) -> int:
    """Return the most bytes that a compressed file of `size` bytes may hold."""
    return max(_UNPACKED_BYTES, _RATIO * size)


def check_unpacked(path: Path, total: int, most: int) -> None:
    """Check how much a compressed file holds.

    Raises:
        DataError: it has more than `most` bytes.
    """
    if total > most:
        raise DataError(
            f"documents: {path} has more than {most:,} bytes when it is decompressed, "
            f"expected at most {_RATIO} times its size: decompress it, if you trust it"
        )


def _read(opener: Any, source: Path | BinaryIO, size: int, **options: Any) -> Generator[bytes]:
    with opener(source, **options) as file:
        yield from iter(partial(file.read, size), b"")


def _read_zstd(source: BinaryIO, size: int) -> Generator[bytes]:
    """Read a Zstandard file by Python 3.14's module, or by the zstandard package.

    Unlike the package's own reader this sees a cut end.

    Raises:
        DataError: there is neither.
    """
    try:
        yield from _read(importlib.import_module("compression.zstd").open, source, size)
        return
    except ImportError:
        pass
    zstandard = needed(
        "zstandard", f"documents: {source.name} is compressed by Zstandard, which", "text"
    )
    frame = None  # the decompressor of an open frame
    for packed in iter(partial(source.read, _PACKED_BYTES), b""):
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                data = frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            if data:
                yield data
            packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("the file ended inside a Zstandard frame")
