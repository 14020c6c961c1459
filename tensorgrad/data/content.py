"""The content of a file, by its first bytes and not by its name: text, rows or something else.

Compressed files are decompressed. Tests: tests/data/test_content.py.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import importlib
import io
import lzma
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from tensorgrad.distribution import install
from tensorgrad.errors import DataError
from tensorgrad.readers import json_object, open_regular

SAMPLE = 1 << 16  # bytes that decide
TEXT, JSON_LINES, PARQUET = "text", "JSON lines", "Parquet"
_JSON, _CSV, _TSV, _MARKUP = "JSON", "CSV", "tab-separated values", "HTML or XML"
CHARACTERS = (TEXT, JSON_LINES, _JSON, _CSV, _TSV, _MARKUP)  # the kinds that are not binary
PACKED = ("", ".gz", ".xz", ".bz2", ".zst")  # suffixes of compressed files
# Errors of damaged compressed files, beside OSError.
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)

# What cannot be text, by the bytes at an offset.
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
_HEADER = re.compile(r"\w(?:[\w .()/%#:-]{0,62}[\w)%#])?")  # of a column
_NUMBER = re.compile(r"\s*[-+]?[\d.]+(?:[eE][-+]?\d+)?\s*")


@dataclass(frozen=True)
class Content:
    """What a file holds.

    Attributes:
        kind: TEXT, JSON_LINES or PARQUET, which can be read, or the name of another kind.
        head: the first SAMPLE bytes.
        open: returns the content as a binary stream, decompressed.
        packed: whether the file is compressed.
    """

    kind: str
    head: bytes
    open: Callable[[], BinaryIO]
    packed: bool


def content_of(path: Path) -> Content:
    """Return the kind of a file, compressed or not, by its first bytes and not by its name.

    Raises:
        DataError: it is a FIFO or a device, or needs zstandard, which is not installed.
        OSError, EOFError, zlib.error, lzma.LZMAError: it cannot be read, or is damaged.
    """
    with open_regular(path, links=True) as file:
        head = file.read(SAMPLE)
    unpack = _decompressor(head)
    if unpack is None:
        return Content(kind_of(head), head, partial(open_regular, path, links=True), False)
    with unpack(path) as file:
        head = file.read(SAMPLE)
    nested = head.startswith(b"PAR1") or _decompressor(head) is not None
    kind = "a compressed file in another" if nested else kind_of(head)
    return Content(kind, head, partial(unpack, path), True)


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


def _decompressor(head: bytes) -> Callable[[Path], BinaryIO] | None:
    """Return the function that opens a file which begins so, if it is compressed."""
    opener: Any = None
    if head.startswith(b"\x1f\x8b\x08"):
        opener = gzip.open
    elif head.startswith(b"\xfd7zXZ\0"):
        opener = lzma.open
    elif head.startswith(b"BZh") and head[4:10] in (b"1AY&SY", b"\x17rE8P\x90"):
        opener = bz2.open
    elif head.startswith(b"\x28\xb5\x2f\xfd"):
        opener = _open_zstd
    return cast(Callable[[Path], BinaryIO] | None, opener)


def _open_zstd(path: Path) -> BinaryIO:
    """Open a Zstandard file by Python 3.14's module, or by the zstandard package.

    Raises:
        DataError: there is neither.
    """
    try:
        return cast(BinaryIO, importlib.import_module("compression.zstd").open(path))
    except ImportError:
        pass
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError as error:
        raise DataError(
            f"documents: {path} is compressed by Zstandard, which needs the zstandard package: "
            f"{install('text')}"
        ) from error
    return cast(BinaryIO, io.BufferedReader(_ZstdFile(open_regular(path, links=True), zstandard)))


class _ZstdFile(io.RawIOBase):
    """The frames of a Zstandard file. Unlike zstandard's own reader it sees a cut end."""

    def __init__(self, file: BinaryIO, zstandard: Any) -> None:
        self._file, self._zstandard = file, zstandard
        self._frame: Any = None  # the decompressor of an open frame
        self._packed, self._data = b"", b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read up to the size of the buffer; return the number of bytes, 0 at the end."""
        while not self._data:
            self._packed = self._packed or self._file.read(_PACKED_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the file ended inside a Zstandard frame")
                return 0
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._data = self._frame.decompress(self._packed)
            except self._zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            self._packed = b""
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._data))
        buffer[:count], self._data = self._data[:count], self._data[count:]
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()
