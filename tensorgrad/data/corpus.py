"""Preparing a corpus: a tokenizer and two token files, cached on disk for the next run."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import platform
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tensorgrad.core.checks import check_integer, check_number
from tensorgrad.core.errors import ArgumentError, DataError
from tensorgrad.data.published_tokenizer import PublishedTokenizer, load_tokenizer
from tensorgrad.data.split import plan_split
from tensorgrad.data.text import SUFFIXES, documents, fingerprint, folder_files
from tensorgrad.data.token_file import TokenFile, write_tokens
from tensorgrad.data.tokenizer import SMALLEST_VOCABULARY, Tokenizer, check_pattern
from tensorgrad.io.files import delete, hidden_name, locked, make_folder, replacing, sync_folder
from tensorgrad.io.readers import map_array, open_regular, read_json

ProgressCallback = Callable[[str, int, int], None]
CHARACTERS_PER_TOKEN = 1500  # to train a vocabulary on; more makes hardly any difference

_log = logging.getLogger(__name__)
_FORMAT = 3  # version of the prepared folder; part of its key
_FACTS = "corpus.json"
IN_CACHE = f"*/{_FACTS}"  # by which a folder is known as a cache of `prepare`
_FILES = ("tokenizer.json", "train.npy", "validation.npy")
_CHUNK = 1 << 22
_SHOWN = 1 << 30  # bytes; from here on the check takes a second or more


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus.

    Equal digests mean equal tokens and vocabulary, on any machine: a run must resume with the
    digest that it started with.

    Attributes:
        folder: the folder of the files.
        digest: a SHA-256 of the files, in hexadecimal.
        tokenizer: a Tokenizer or PublishedTokenizer.
        train: the tokens to train on.
        validation: the tokens to validate on.
        source_files: how many files of a folder `prepare` read and skipped; "" for other sources.

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.data import Corpus, prepare
        >>> _ = Path("story.txt").write_text("Once upon a time there was a cat.")
        >>> corpus: Corpus = prepare("story.txt", "cache", vocab_size=257, validation=0.25)
        >>> len(corpus.train), len(corpus.validation)
        (26, 9)
    """

    folder: Path
    digest: str
    tokenizer: Any
    train: TokenFile
    validation: TokenFile
    source_files: str = ""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Copy tokenizer.json, train.npy and validation.npy into a folder, for `open_prepared`.

        Raises:
            ArgumentError: the folder has one of these files.
            DataError: a file cannot be written.
        """
        target = Path(folder)
        for name in _FILES:
            if (target / name).exists():
                raise ArgumentError(f"save: {target / name} exists, expected a folder without it")
        try:
            make_folder(target)
            self.tokenizer.save(target / "tokenizer.json")
            for name in _FILES[1:]:
                with (
                    replacing(target / name) as file,
                    open_regular(self.folder / name, links=True) as source,
                ):
                    shutil.copyfileobj(source, file, _CHUNK)
        except OSError as error:
            raise DataError(
                f"save: cannot write {error.filename or target}: {error.strerror}"
            ) from error


def prepare(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    vocab_size: int = 4096,
    *,
    validation: float = 0.05,
    tokenizer: Tokenizer | PublishedTokenizer | None = None,
    pattern: str | None = None,
    suffixes: Sequence[str] = SUFFIXES,
    column: str | None = None,
    progress: ProgressCallback | None = None,
) -> Corpus:
    """Split a source, train a tokenizer, and write train.npy and validation.npy.

    The result is cached in a folder below `folder`, whose name is a hash of the source (for files:
    their sizes and times) and the settings; a second call only opens it. The folder appears in one
    step: an interrupted call leaves nothing. Several processes may call this at the same time: one
    works, the others wait and open the result.

    Cached files are first compared with their SHA-256, which takes about a second per gigabyte of
    tokens. If one has changed, a warning names it and the corpus is prepared again from the source.

    `Corpus.source_files` says how many files of a folder were read and skipped, and why.

    Args:
        source: as for `documents`.
        folder: the folder of the cache; created if missing.
        vocab_size: the number of tokens of the tokenizer to train. From a large source only every
            n-th document is used for that, about CHARACTERS_PER_TOKEN characters for each token.
        validation: the fraction of the text for validation, between 0 and 1.
        tokenizer: use this tokenizer and train none; vocab_size then has no effect. A cached corpus
            of the same text that has trained an equal tokenizer is opened.
        pattern: as for `Tokenizer.train`.
        suffixes, column: as for `documents`.
        progress: called after each document with the stage ("reading", "tokenizer", "encoding"),
            the characters done and their total (0 while unknown); and, for files of more than a
            gigabyte, with "checking" and bytes.

    Returns:
        The opened corpus.

    Raises:
        ArgumentError: an argument is out of its range.
        DataError: the source is missing, empty, too short to split, not UTF-8, or changed
            while it was read; the disk is full; or the prepared files cannot be read.

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.data import prepare
        >>> _ = Path("story.txt").write_text("Once upon a time there was a cat.")
        >>> corpus = prepare("story.txt", "cache", vocab_size=257, validation=0.25)
        >>> corpus.tokenizer.decode(corpus.validation.tokens)
        's a cat.<|endoftext|>'
    """
    check_number("prepare", "validation", validation)
    if not 0 < validation < 1:
        raise ArgumentError(f"prepare: validation has {validation}, expected between 0 and 1")
    if tokenizer is None:
        check_integer("prepare", "vocab_size", vocab_size, SMALLEST_VOCABULARY)
    elif not isinstance(tokenizer, Tokenizer | PublishedTokenizer):
        kind = type(tokenizer).__name__
        raise ArgumentError(f"prepare: tokenizer is a {kind}, expected a Tokenizer")
    elif pattern is not None:
        raise ArgumentError("prepare: pattern is given with a tokenizer, expected one of them")
    check_pattern("prepare", pattern)
    read = partial(documents, source, suffixes=suffixes, column=column)
    settings: dict[str, Any] = {
        "format": _FORMAT,
        "source": fingerprint(source, suffixes=suffixes, column=column),
        "validation": validation,
        "vocab_size": vocab_size if tokenizer is None else None,
        "tokenizer": tokenizer and tokenizer.digest,
        "pattern": pattern,
    }
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", Path(source).name)[:40].strip("-") or "text"
    target = Path(folder, f"{stem}-{key}")
    try:
        corpus, _ = _find(target, settings, progress)
        if corpus is None and tokenizer is not None:
            corpus = _find_encoded(target.parent.glob(f"{stem}-*"), settings, progress)
        if corpus is None:
            with _alone(target):
                corpus, problem = _find(target, settings, progress)  # prepared meanwhile?
                if corpus is None:
                    if problem is not None:
                        _log.warning("%s; making it again from %s", problem, source)
                    with _replacing_folder(target) as new:
                        files = _files_of(source, suffixes)
                        counts = _build(
                            new, read, validation, tokenizer, vocab_size, pattern, progress
                        )
                        now = fingerprint(source, suffixes=suffixes, column=column)
                        if now != settings["source"]:
                            raise DataError(f"prepare: source {source} changed while it was read")
                        sums = _sums(new, progress)
                        facts = {**settings, "counts": counts, "files": sums, "source_files": files}
                        with replacing(new / _FACTS) as file:
                            file.write(json.dumps(facts, indent=2).encode())
                    corpus = _open(target, settings, progress)
    except OSError as error:
        raise DataError(
            f"prepare: cannot read or write {error.filename or target}: {error.strerror}"
        ) from error
    return corpus


def is_prepared(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder has the files of `open_prepared`.

    Args:
        folder: any path.

    Returns:
        True where tokenizer.json, train.npy and validation.npy are there.

    Example:
        >>> from tensorgrad.data import is_prepared
        >>> is_prepared("no such folder")
        False
    """
    return all(Path(folder, name).is_file() for name in _FILES)


def open_prepared(
    folder: str | os.PathLike[str], progress: ProgressCallback | None = None
) -> Corpus:
    """Open a corpus that is ready: tokenizer.json, train.npy and validation.npy in a folder.

    `Corpus.save` and the cache of `prepare` make such folders; the files may be anyone's.

    Args:
        folder: a folder with the three files; the tokens are uint16 or uint32, with one axis.
        progress: as for `prepare`, with the stage "checking".

    Returns:
        The opened corpus, whose `source_files` is "".

    Raises:
        DataError: a file is missing or damaged, or a token is outside the vocabulary.

    Example:
        >>> from tensorgrad.data import Tokenizer, open_prepared, write_tokens
        >>> tokenizer = Tokenizer.train(["the cat sat on the mat"], 257)
        >>> tokenizer.save("tokenizer.json")
        >>> for name, text in ("train", "the cat"), ("validation", "the mat"):
        ...     _ = write_tokens(f"{name}.npy", [text], tokenizer)
        >>> open_prepared(".").train
        TokenFile('train.npy', tokens=8, vocab_size=257)
    """
    folder = Path(folder)
    for name in _FILES:
        if not (folder / name).is_file():
            raise DataError(f"open_prepared: {folder / name} is missing, expected a file")
        if name.endswith(".npy"):
            map_array(folder / name)  # a length that does not fit is an error before all is read
    return _corpus(folder, _sums(folder, progress))


def _find(
    folder: Path, settings: Mapping[str, Any], progress: ProgressCallback | None
) -> tuple[Corpus | None, DataError | None]:
    """Return the corpus of a folder, or None and the error if the folder is damaged."""
    if not folder.is_dir():
        return None, None
    try:
        return _open(folder, settings, progress), None
    except DataError as error:
        return None, error


def _find_encoded(
    folders: Iterable[Path], settings: Mapping[str, Any], progress: ProgressCallback | None
) -> Corpus | None:
    """Return the corpus of the same text and an equal tokenizer, which was trained on it; or None.

    Evaluating a run needs it: the run has trained the tokenizer, and the evaluation gives it.
    """
    text = {name: settings[name] for name in ("format", "source", "validation")}
    for folder in sorted(folders):
        try:
            facts = read_json(folder / _FACTS, links=True)
            same = all(facts.get(name) == value for name, value in text.items())
            if same and load_tokenizer(folder).digest == settings["tokenizer"]:
                return _open(folder, text, progress)
        except DataError:  # damaged, or of another program
            continue
    return None


def _open(folder: Path, settings: Mapping[str, Any], progress: ProgressCallback | None) -> Corpus:
    """Return the corpus of a folder, if its files have the recorded SHA-256."""
    for name in (_FACTS, *_FILES):
        if not (folder / name).is_file():
            raise DataError(f"prepare: {folder / name} is missing, expected a file")
    facts = read_json(folder / _FACTS, links=True)
    if any(facts.get(name) != value for name, value in settings.items()):
        raise DataError(f"prepare: {folder / _FACTS} was prepared with different settings")
    found, written = _sums(folder, progress), facts.get("files")
    for name, digest in found.items():
        if not isinstance(written, dict) or written.get(name) != digest:
            raise DataError(
                f"prepare: {folder / name} is damaged: it has another SHA-256 than {_FACTS} says"
            )
    return _corpus(folder, found, str(facts.get("source_files", "")))


def _corpus(folder: Path, sums: Mapping[str, str], source_files: str = "") -> Corpus:
    """Return the corpus in files whose SHA-256 are known."""
    tokenizer = load_tokenizer(folder)
    train, validation = (
        TokenFile.open(folder / name, tokenizer.vocab_size)
        for name in ("train.npy", "validation.npy")
    )
    whole = hashlib.sha256(b"".join(map(bytes.fromhex, sums.values())))
    return Corpus(folder, whole.hexdigest(), tokenizer, train, validation, source_files)


def _sums(folder: Path, progress: ProgressCallback | None) -> dict[str, str]:
    """Return the SHA-256 of each file (1.4 GB/s; CRC-32 has 2.5 but would miss intent)."""
    total, done, sums = sum((folder / name).stat().st_size for name in _FILES), 0, {}
    for name in _FILES:
        digest = hashlib.sha256()
        with open_regular(folder / name, links=True) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                if progress and total >= _SHOWN:
                    progress("checking", done, total)
        sums[name] = digest.hexdigest()
    return sums


def _files_of(source: str | os.PathLike[str], suffixes: Sequence[str]) -> str:
    """Return how many files of a folder are read and skipped, and why; "" for other sources."""
    if not os.path.isdir(source):
        return ""
    files, skipped = folder_files(source, suffixes=suffixes)
    reasons = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(skipped.items()))
    why = f" ({reasons})" if reasons else ""
    if not files:
        raise DataError(
            f"prepare: source has {os.fspath(source)!r}, a folder in which no file is text, JSON "
            f"lines or Parquet{why}"
        )
    return f"files read: {len(files):,}, skipped: {sum(skipped.values()):,}{why}"


def _build(
    folder: Path,
    read: Callable[[], Iterator[str]],
    validation: float,
    tokenizer: Tokenizer | PublishedTokenizer | None,
    vocab_size: int,
    pattern: str | None,
    progress: ProgressCallback | None,
) -> dict[str, int]:
    """Write the tokenizer and both token files; return their counts."""

    done: Counter[str] = Counter()

    def report(stage: str, texts: Iterable[str], total: int) -> Iterator[str]:
        for text in texts:
            yield text
            done[stage] += len(text)
            if progress:
                progress(stage, done[stage], total)

    split = plan_split(report("reading", read(), 0), validation)
    if tokenizer is None:
        texts = filter(None, map(split.train, read()))
        every = -(-split.characters // (CHARACTERS_PER_TOKEN * vocab_size))
        sample = itertools.islice(texts, 0, None, every)
        tokenizer = Tokenizer.train(
            report("tokenizer", sample, split.characters // every), vocab_size, pattern=pattern
        )
    tokenizer.save(folder / "tokenizer.json")
    counts = {"documents": split.documents, "characters": split.characters}
    for name, part in (("train", split.train), ("validation", split.validation)):
        parts = report("encoding", filter(None, map(part, read())), split.characters)
        counts[name] = write_tokens(folder / f"{name}.npy", parts, tokenizer)
    return counts


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Hold the lock of a folder; delete temporary folders that killed processes left.

    The lock only keeps processes from doing the same work twice: nothing breaks without it.
    """
    make_folder(target.parent)
    with locked(hidden_name(target, ".lock"), wait=True) as alone:
        if alone:
            for left in target.parent.glob(_temporary(target, "?" * 8).name):  # by a killed process
                delete(left)
        yield


@contextlib.contextmanager
def _replacing_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `target` at the end.

    A damaged target is renamed away before. One that another process has made meanwhile, on a file
    system without locks, stays.
    """
    damaged = target.is_dir()
    new, old = (_temporary(target, secrets.token_hex(4)) for _ in range(2))
    new.mkdir()
    try:
        yield new
        sync_folder(new)
        if damaged:
            target.rename(old)
        try:
            new.rename(target)
        except OSError:
            if not target.is_dir():
                raise
        sync_folder(target.parent)
    finally:
        for left in (new, old):
            delete(left)


def _temporary(target: Path, end: str) -> Path:
    return hidden_name(target, f"-{platform.node()}-{end}.tmp")
