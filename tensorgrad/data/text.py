"""Text from files, folders, Hugging Face data sets and Python's own source, as documents."""

from __future__ import annotations

import codecs
import hashlib
import io
import itertools
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import TextIO

from tensorgrad.core.errors import ArgumentError, DataError
from tensorgrad.data.content import (
    CHARACTERS,
    DAMAGED,
    JSON_LINES,
    PACKED,
    PARQUET,
    TEXT,
    Content,
    content_of,
)
from tensorgrad.data.rows import COLUMN, dataset_texts, json_texts, parquet_texts, with_newlines
from tensorgrad.io.files import replacing
from tensorgrad.io.readers import VOCABULARY_BYTES

END_OF_TEXT = "<|endoftext|>"
SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", ".jsonl", ".ndjson", ".parquet")
STDLIB_BYTES = 10_000_000
LONGEST_DOCUMENT = 1 << 22  # characters
LONGEST_LINE = 1 << 22
LONGEST_ROW = 1 << 24  # characters of a line of JSON, several copies of which take 4 bytes each

_READABLE = (TEXT, JSON_LINES, PARQUET)
_CHUNK = 1 << 20
# Not Python written to be read: tests, tables, and packages that later versions removed.
_STDLIB_SKIPPED = {
    *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo"),
    *("encodings", "pydoc_data", "ensurepip", "lib2to3", "distutils"),
}


def documents(
    source: str | os.PathLike[str], *, suffixes: Sequence[str] = SUFFIXES, column: str | None = None
) -> Iterator[str]:
    """Yield the documents of a source, always in the same order.

    Documents without any visible character are skipped. One longer than LONGEST_DOCUMENT
    characters is cut between lines into several, so that no source need fit in memory.

    Args:
        source: one of
            a text file: documents are separated by `<|endoftext|>`;
            a file of JSON lines (an object on each) or a Parquet file (needs pyarrow): each row is
            a document;
            a folder: every such file below it with one of the suffixes, sorted, without hidden
            ones and with linked folders (see `folder_files`);
            `hf:NAME[:CONFIG][:SPLIT]`: a Hugging Face data set (split "train" if not named;
            `hf:NAME::SPLIT` names the split alone), which needs the datasets package;
            "stdlib": the source of the Python standard library on this machine, without tests,
            up to STDLIB_BYTES bytes.
            Files are UTF-8, plain or compressed by gzip, xz, bzip2 or Zstandard. What a file is
            follows from its content and not from its name. CR LF and CR become LF.
        suffixes: the ends of the names of files in a folder to read, in any case, also with .gz,
            .xz, .bz2 or .zst appended.
        column: the text column of rows; by default "text", or the only text column of a Hugging
            Face data set.

    Yields:
        The text of a document.

    Raises:
        ArgumentError: the source has a wrong form.
        DataError: the source does not exist, cannot be read, holds no text, is not UTF-8 (at which
            byte), lacks the column, or has another format (JSON, CSV, HTML, a picture, ...).

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.data import documents
        >>> _ = Path("story.txt").write_text("Once upon a time.<|endoftext|>The end.")
        >>> list(documents("story.txt"))
        ['Once upon a time.', 'The end.']
    """
    name = os.fspath(source)
    whole: Iterator[str]
    if name.startswith("hf:"):
        whole = map(with_newlines, dataset_texts(name, column))
    else:
        files, is_folder = _files(name, suffixes), os.path.isdir(name)
        found = (path for path in files if not is_folder or _content(path).kind in _READABLE)
        whole = (text for path in found for text in _file_documents(path, column or COLUMN))
    pieces = (piece for text in whole for piece in _pieces(text))
    return _some((piece for piece in pieces if piece and not piece.isspace()), name)


def folder_files(
    folder: str | os.PathLike[str], *, suffixes: Sequence[str] = SUFFIXES
) -> tuple[list[Path], dict[str, int]]:
    """Return the files of a folder that `documents` reads, and how many it skips for which reason.

    A linked folder is read where it is met first, so that links in a circle do no harm.

    Args:
        folder, suffixes: as for `documents`.

    Returns:
        The files in the order of their documents, and the number of skipped ones by reason: a
        suffix, "hidden", or the kind of their content.

    Raises:
        ArgumentError, DataError: as for `documents`.

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.data import folder_files
        >>> Path("texts").mkdir()
        >>> for name in "a.txt", "b.csv":
        ...     _ = Path("texts", name).write_text("1,2")
        >>> files, skipped = folder_files("texts")
        >>> [path.name for path in files], skipped
        (['a.txt'], {'.csv': 1})
    """
    skipped: Counter[str] = Counter()
    files: list[Path] = []
    for path in _files(os.fspath(folder), suffixes, skipped):
        kind = _content(path).kind
        if kind in _READABLE:
            files.append(path)
        else:
            skipped[kind] += 1
    return files, dict(skipped)


def fingerprint(
    source: str | os.PathLike[str], *, suffixes: Sequence[str] = SUFFIXES, column: str | None = None
) -> str:
    """Return a text that changes when the source does: for files, when a size or a time does.

    Args:
        source, suffixes, column: as for `documents`.

    Returns:
        The source, the column, and a SHA-256 of the paths, sizes and times of the files.

    Raises:
        DataError: the source does not exist or cannot be read.

    Example:
        >>> from tensorgrad.data import fingerprint
        >>> fingerprint("hf:stanfordnlp/imdb", column="text")
        'hf:stanfordnlp/imdb text'
    """
    name = os.fspath(source)
    if name.startswith("hf:"):
        return f"{name} {column}"
    digest = hashlib.sha256()
    files = _files(name, suffixes)
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise _unreadable(path, error) from error
        digest.update(os.fsencode(path.absolute()))  # a name need not be UTF-8
        digest.update(f"\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    readable = name if name == "stdlib" else os.path.abspath(name)
    readable = readable.encode("utf-8", "backslashreplace").decode()
    return f"{readable} {column or COLUMN} {len(files)} files {digest.hexdigest()}"


def read_text(path: str | os.PathLike[str], limit: int = VOCABULARY_BYTES) -> str:
    """Return a whole UTF-8 file, decompressed if it is compressed.

    Args:
        path: the file.
        limit: the largest number of characters allowed.
    Raises:
        DataError: it is missing, damaged, longer than the limit or not UTF-8.
    """
    parts, length = [], 0
    for part in _chunks(Path(path), CHARACTERS):
        parts.append(part)
        length += len(part)
        if length > limit:
            raise DataError(
                f"documents: {path} has more than {limit:,} characters, expected at most that"
            )
    return "".join(parts)


def write_text(op: str, path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 file, or raise DataError and leave what was there unchanged."""
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise DataError(f"{op}: cannot write {path}: {error.strerror}") from error


def read_lines(path: str | os.PathLike[str], kinds: Sequence[str] = (TEXT,)) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, decompressed if it is compressed, without their ends.

    LF and CR LF end a line: text may hold CR and U+2028. In a file without LF, CR ends a line. The
    file is read in chunks.

    Args:
        path: the file.
        kinds: the kinds that it may have, of content.CHARACTERS.
    Raises:
        DataError: it is missing, damaged, not UTF-8 or of another kind, or a line has more than
            LONGEST_LINE characters.
    """
    path = Path(path)
    content = _content(path)
    chunks: Iterable[str] = _chunks(path, kinds, content)
    if b"\r" in content.head[:-1] and b"\n" not in content.head:
        chunks = (chunk.replace("\r", "\n") for chunk in chunks)
    yield from _lines(path, chunks, LONGEST_LINE)


def find_file(op: str, folder: Path, names: Sequence[str], forms: str) -> Path:
    """Return the first of some files that a folder has, plain or compressed.

    Args:
        op: the name of the caller, for errors.
        folder: the source.
        names: of the files, without the suffix of a compressed file.
        forms: what sources the caller reads, for errors.
    Raises:
        DataError: the folder or the file is missing.
    """
    if not folder.is_dir():
        raise DataError(
            f"{op}: source has {str(folder)!r}, which is not a folder; expected {forms}"
        )
    files = [f"{name}{packed}" for name in names for packed in PACKED]
    found = next((folder / file for file in files if (folder / file).is_file()), None)
    if found is None:
        raise DataError(
            f"{op}: {folder / files[0]} is missing: the folder has none of {', '.join(files)}, "
            "expected one"
        )
    return found


def standard_input() -> TextIO:
    """Return the standard input, where lines end as in `read_lines`: not at CR alone."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(newline="\n")
    return sys.stdin


def _some(texts: Iterator[str], name: str) -> Iterator[str]:
    """Yield the texts; raise DataError if there are none."""
    text = None
    for text in texts:
        yield text
    if text is None:
        raise DataError(f"documents: source has {name!r}, which holds no text; expected some")


def _files(name: str, suffixes: Sequence[str], skipped: Counter[str] | None = None) -> list[Path]:
    """Return the files of a source in their order; count the others of a folder in `skipped`."""
    skipped = Counter() if skipped is None else skipped
    if name == "stdlib":
        return _stdlib_files(Path(sysconfig.get_path("stdlib")))
    path = Path(name)
    if path.is_file():
        return [path]
    if not (name and path.is_dir()):
        problem = "is a FIFO or a device" if name and path.exists() else "does not exist"
        raise DataError(
            f"documents: source has {name!r}, which {problem}; expected a text file, "
            "a folder, 'hf:NAME' or 'stdlib'"
        )
    if isinstance(suffixes, str) or not all(suffix.startswith(".") for suffix in suffixes):
        raise ArgumentError(f"documents: suffixes has {suffixes!r}, expected such as ('.txt',)")
    endings = tuple(suffix.lower() + packed for suffix in suffixes for packed in PACKED)
    files = []
    for file in _walk(path, skipped):
        if file.name.lower().endswith(endings):
            files.append(file)
        else:
            skipped[_suffix(file.name)] += 1
    if not files:
        raise DataError(
            f"documents: source has {name!r}, a folder without text files; "
            f"expected names that end in {', '.join(suffixes)}"
        )
    return files


def _suffix(name: str) -> str:
    """Return the suffix of a file, with that of its compression."""
    stem, last = os.path.splitext(name.lower())
    return (os.path.splitext(stem)[1] + last if last in PACKED[1:] else last) or "no suffix"


def _walk(folder: Path, skipped: Counter[str], names: Set[str] = frozenset()) -> Iterator[Path]:
    """Yield the files below a folder, sorted, except hidden ones and the names to skip."""
    waiting = [(folder, True)]  # a stack: folders may be nested deeper than calls
    seen: set[tuple[int, int]] = set()  # folders: links may lead to one twice, or in a circle
    while waiting:
        path, is_folder = waiting.pop()
        if not is_folder:
            yield path
            continue
        try:
            status = path.stat()
            if (status.st_dev, status.st_ino) in seen:
                skipped["a link to a folder that is read"] += 1
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(path) as entries:
                found = [entry.name for entry in entries if entry.name not in names]
        except OSError as error:
            raise _unreadable(path, error) from error
        for name in sorted(found, reverse=True):
            inner = path / name
            if name.startswith("."):
                skipped["hidden"] += 1
            elif inner.is_dir():
                waiting.append((inner, True))
            elif inner.is_file():
                waiting.append((inner, False))
            else:
                skipped["not a file"] += 1


def _stdlib_files(folder: Path) -> list[Path]:
    """Return the modules of the standard library up to STDLIB_BYTES bytes."""
    files: list[Path] = []
    size = 0
    if folder.is_dir():
        for path in _walk(folder, Counter(), _STDLIB_SKIPPED):
            if path.suffix == ".py":
                size += path.stat().st_size
                if size > STDLIB_BYTES:
                    break
                files.append(path)
    if not files:
        raise DataError(
            f"documents: source has 'stdlib', but {folder} has no Python source; "
            "expected a text file, a folder or 'hf:NAME' instead"
        )
    return files


def _content(path: Path) -> Content:
    try:
        return content_of(path)
    except DAMAGED as error:
        raise _unreadable(path, error) from error


def _chunks(
    path: Path, kinds: Sequence[str], content: Content | None = None, newlines: bool = False
) -> Iterator[str]:
    """Yield the text of a file piece by piece; a byte order mark at its start is dropped.

    Args:
        path: the file.
        kinds: the kinds that it may have.
        content: of the file, if it is known.
        newlines: whether CR LF and CR become LF.
    """
    content = content or _content(path)
    if content.kind not in kinds:
        raise DataError(f"documents: {path} is {content.kind}, expected {_expected(kinds)}")
    utf8 = codecs.getincrementaldecoder("utf-8")()
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True) if newlines else utf8
    position = 0
    try:
        first = True
        for data in itertools.chain(content.chunks(_CHUNK), [b""]):
            position += len(data)
            text = decoder.decode(data, final=not data)
            if text and first:
                text, first = text.removeprefix("\ufeff"), False
            yield text
    except UnicodeDecodeError as error:
        # The decoder's last input ends at `position`, and begins with bytes it kept before.
        offset = position - len(error.object) + error.start
        packed = " of the decompressed text" if content.packed else ""
        raise DataError(
            f"documents: {path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset "
            f"{offset}{packed} ({error.reason}); expected UTF-8 text"
        ) from error
    except DAMAGED as error:
        raise _unreadable(path, error) from error


def _expected(kinds: Sequence[str]) -> str:
    """Return what a file of another kind should have been, and how to get there."""
    if JSON_LINES not in kinds:
        return "text, a line for each"
    rows = "text, JSON lines (an object on each) or Parquet"
    return f"{rows}; extract the text from other formats first" if PARQUET in kinds else "text"


def _lines(path: Path, chunks: Iterable[str], longest: int) -> Iterator[str]:
    """Yield the lines of a text that comes in chunks."""
    parts: list[str] = []  # parts of a line
    length = 0
    for chunk in chunks:
        for number, line in enumerate(chunk.split("\n")):
            if number:
                yield "".join(parts).removesuffix("\r")
                parts, length = [], 0
            parts.append(line)
            length += len(line)
            if length > longest:
                raise DataError(
                    f"documents: {path} has a line of more than {longest:,} characters, expected "
                    "shorter ones"
                )
    if length:
        yield "".join(parts).removesuffix("\r")


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"documents: cannot read {path}: {getattr(error, 'strerror', None) or error}")


def _file_documents(path: Path, column: str) -> Iterator[str]:
    """Yield the documents of a file: those between separators, or those of its rows."""
    content = _content(path)
    if content.kind == PARQUET:
        return map(with_newlines, parquet_texts(path, column))
    chunks = _chunks(path, _READABLE, content, newlines=True)
    if content.kind == JSON_LINES:
        lines = _lines(path, chunks, LONGEST_ROW)
        return map(with_newlines, json_texts(path, lines, column))
    return _separated(chunks)


def _separated(chunks: Iterable[str]) -> Iterator[str]:
    """Yield the text between separators; a line end right after a separator belongs to it."""
    rest = ""
    after_separator = False
    for chunk in chunks:
        *finished, rest = (rest + chunk).split(END_OF_TEXT)
        for text in finished:
            yield text.removeprefix("\n") if after_separator else text
            after_separator = True
        # A long document is yielded in pieces; `rest` may end with a part of a separator. The line
        # end is removed first: as a part of a piece, it would make cuts depend on the chunks.
        longest = LONGEST_DOCUMENT + len(END_OF_TEXT)
        if after_separator and len(rest) > longest:
            rest, after_separator = rest.removeprefix("\n"), False
        while len(rest) > longest:
            end = _line_end(rest, 0)
            yield rest[:end]
            rest = rest[end:]
    yield rest.removeprefix("\n") if after_separator else rest


def _pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of at most LONGEST_DOCUMENT characters."""
    start = 0
    while len(text) - start > LONGEST_DOCUMENT:
        end = _line_end(text, start)
        yield text[start:end]
        start = end
    yield text[start:]


def _line_end(text: str, start: int) -> int:
    """Return the end of the last line that ends within LONGEST_DOCUMENT characters of start."""
    limit = start + LONGEST_DOCUMENT
    return text.rfind("\n", start, limit) + 1 or limit
