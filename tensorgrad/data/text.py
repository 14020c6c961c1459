"""Text from files, folders, Hugging Face data sets and Python's own source, as documents."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import importlib
import io
import lzma
import os
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from tensorgrad.errors import ArgumentError, DataError
from tensorgrad.files import replacing
from tensorgrad.readers import VOCABULARY_BYTES, open_regular

END_OF_TEXT = "<|endoftext|>"
SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
STDLIB_BYTES = 10_000_000
LONGEST_DOCUMENT = 1 << 22  # characters
LONGEST_LINE = 1 << 22

PACKED = ("", ".gz", ".xz")  # suffixes of compressed files
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
            a folder: every file below it with one of the suffixes, sorted, without hidden ones;
            `hf:NAME[:CONFIG][:SPLIT]`: a Hugging Face data set (split "train" if not named;
            `hf:NAME::SPLIT` names the split alone), which needs the datasets package;
            `stdlib`: the source of the Python standard library on this machine, without tests,
            up to STDLIB_BYTES bytes.
            Files are UTF-8; those that end in .gz or .xz are decompressed.
        suffixes: of the files in a folder to read, also with .gz or .xz appended.
        column: the text column of a data set; by default "text", or else its only text column.
    Returns:
        An iterator over the documents.
    Raises:
        ArgumentError: the source has a wrong form.
        DataError: the source does not exist, cannot be read, holds no text, or is not UTF-8
            (at which byte).
    """
    name = os.fspath(source)
    if name.startswith("hf:"):
        whole = _dataset_documents(name, column)
    else:
        whole = (text for path in _files(name, suffixes) for text in _file_documents(path))
    pieces = (piece for text in whole for piece in _pieces(text))
    return _some((piece for piece in pieces if piece and not piece.isspace()), name)


def fingerprint(
    source: str | os.PathLike[str], *, suffixes: Sequence[str] = SUFFIXES, column: str | None = None
) -> str:
    """Return a text that changes when the source does: for files, when a size or a time does.

    Args:
        source, suffixes, column: as for `documents`.
    Raises:
        DataError: the source does not exist or cannot be read.
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
    readable = name.encode("utf-8", "backslashreplace").decode()
    return f"{readable} {len(files)} files {digest.hexdigest()}"


def read_text(path: str | os.PathLike[str], limit: int = VOCABULARY_BYTES) -> str:
    """Return a whole UTF-8 file, decompressed if it ends in .gz or .xz.

    Args:
        path: the file.
        limit: the largest number of characters allowed.
    Raises:
        DataError: it is missing, damaged, longer than the limit or not UTF-8.
    """
    parts, length = [], 0
    for part in _chunks(Path(path)):
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


def read_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, decompressed if it ends in .gz or .xz, without their ends.

    Only LF and CR LF end a line: text may hold U+2028. The file is read in chunks.

    Raises:
        DataError: it is missing, damaged or not UTF-8, or a line has more than LONGEST_LINE
            characters.
    """
    rest = ""
    for chunk in _chunks(Path(path)):
        *lines, rest = (rest + chunk).split("\n")
        yield from (line.removesuffix("\r") for line in lines)
        if len(rest) > LONGEST_LINE:
            raise DataError(
                f"documents: {path} has a line of more than {LONGEST_LINE:,} characters, expected "
                "shorter ones"
            )
    if rest:
        yield rest.removesuffix("\r")


def find_file(op: str, folder: Path, names: Sequence[str], forms: str) -> Path:
    """Return the first of some files that a folder has, plain or compressed.

    Args:
        op: the name of the caller, for errors.
        folder: the source.
        names: of the files, without .gz and .xz.
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


def _files(name: str, suffixes: Sequence[str]) -> list[Path]:
    """Return the files of a source in their order."""
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
    endings = tuple(suffix + packed for suffix in suffixes for packed in PACKED)
    files = [file for file in _walk(path) if file.name.endswith(endings)]
    if not files:
        raise DataError(
            f"documents: source has {name!r}, a folder without text files; "
            f"expected names that end in {', '.join(suffixes)}"
        )
    return files


def _walk(folder: Path, skipped: Set[str] = frozenset()) -> Iterator[Path]:
    """Yield the files below a folder, sorted, except names to skip and hidden ones."""
    waiting = [(folder, True)]  # a stack: folders may be nested deeper than calls
    while waiting:
        path, is_folder = waiting.pop()
        if not is_folder:
            yield path
            continue
        try:
            with os.scandir(path) as entries:
                kept = [e for e in entries if not (e.name.startswith(".") or e.name in skipped)]
            for entry in sorted(kept, key=lambda e: e.name, reverse=True):
                inner = entry.is_dir(follow_symlinks=False)
                # Unlike that of the entry, is_file of a path survives symbolic links in a circle.
                if inner or (path / entry.name).is_file():
                    waiting.append((path / entry.name, inner))
        except OSError as error:
            raise _unreadable(path, error) from error


def _stdlib_files(folder: Path) -> list[Path]:
    """Return the modules of the standard library up to STDLIB_BYTES bytes."""
    files: list[Path] = []
    size = 0
    if folder.is_dir():
        for path in _walk(folder, _STDLIB_SKIPPED):
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


def _open(path: Path) -> BinaryIO:
    file = open_regular(path)
    if path.suffix not in PACKED[1:]:
        return file
    file.close()
    return cast(BinaryIO, gzip.open(path, "rb") if path.suffix == ".gz" else lzma.open(path, "rb"))


def _chunks(path: Path) -> Iterator[str]:
    """Yield the text of a file piece by piece; a byte order mark at its start is dropped."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    try:
        with _open(path) as file:
            while True:
                data = file.read(_CHUNK)
                position += len(data)
                text = decoder.decode(data, final=not data)
                yield text.removeprefix("\ufeff") if position == len(data) else text
                if not data:
                    return
    except UnicodeDecodeError as error:
        # The decoder's last input ends at `position`, and begins with bytes it kept before.
        offset = position - len(error.object) + error.start
        packed = " of the decompressed text" if path.suffix in PACKED[1:] else ""
        raise DataError(
            f"documents: {path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset "
            f"{offset}{packed} ({error.reason}); expected UTF-8 text"
        ) from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"documents: cannot read {path}: {getattr(error, 'strerror', None) or error}")


def _file_documents(path: Path) -> Iterator[str]:
    """Yield the text between separators; a line end right after a separator belongs to it."""
    rest = ""
    after_separator = False
    for chunk in _chunks(path):
        *finished, rest = (rest + chunk).split(END_OF_TEXT)
        for text in finished:
            yield _without_line_end(text) if after_separator else text
            after_separator = True
        # A long document is yielded in pieces; `rest` may end with a part of a separator. The line
        # end is removed first: as a part of a piece, it would make cuts depend on the chunks.
        longest = LONGEST_DOCUMENT + len(END_OF_TEXT)
        if after_separator and len(rest) > longest:
            rest, after_separator = _without_line_end(rest), False
        while len(rest) > longest:
            end = _line_end(rest, 0)
            yield rest[:end]
            rest = rest[end:]
    yield _without_line_end(rest) if after_separator else rest


def _without_line_end(text: str) -> str:
    return text[2:] if text.startswith("\r\n") else text.removeprefix("\n")


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


def _dataset_documents(name: str, column: str | None) -> Iterator[str]:
    """Return the texts of a Hugging Face data set."""
    data = load_dataset("documents", name, "train", names_split=True)
    column = _text_column(name, data, column)
    batches = data.select_columns([column]).iter(batch_size=1000)
    return (text for batch in batches for text in batch[column] if text)


def load_dataset(op: str, source: str, split: str | None, names_split: bool = False) -> Any:
    """Return one split of a Hugging Face data set, or a mapping of all splits.

    Args:
        op: the name of the caller, for errors.
        source: `hf:NAME[:CONFIG]`.
        split: such as "train"; None: all.
        names_split: whether the source may name another split: `hf:NAME[:CONFIG][:SPLIT]`.
    Raises:
        ArgumentError: the source has a wrong form.
        DataError: the datasets package is missing, or it cannot load this.
    """
    path, *options = source.removeprefix("hf:").split(":")
    if not path or len(options) > 1 + names_split:
        more = ", 'hf:NAME:CONFIG', 'hf:NAME:CONFIG:SPLIT' or 'hf:NAME::SPLIT'"
        forms = "'hf:NAME'" + (more if names_split else " or 'hf:NAME:CONFIG'")
        raise ArgumentError(f"{op}: source has {source!r}, expected {forms}")
    config, named = (*options, "", "")[:2]
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"{op}: source has {source!r}, which needs the datasets package: "
            "pip install 'tensorgrad-cupy[text]'"
        ) from error
    try:
        return datasets.load_dataset(path, config or None, split=named or split)
    except Exception as error:  # network, names, formats: the library raises nearly anything
        raise DataError(f"{op}: cannot load {source!r}: {error}") from error


def _text_column(name: str, data: Any, column: str | None) -> str:
    texts = [
        key
        for key, feature in data.features.items()
        if getattr(feature, "dtype", None) in ("string", "large_string")
    ]
    if column is None:
        column = "text" if "text" in texts or len(texts) != 1 else texts[0]
    if column not in texts:
        raise DataError(
            f"documents: {name!r} has the columns {list(data.features)!r:.200}, of which "
            f"{texts!r:.200} are text; expected {column!r} (name one with column)"
        )
    return column
