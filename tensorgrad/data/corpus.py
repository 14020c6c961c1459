"""From a source of text to a tokenizer and two token files, kept on disk for the next run."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import platform
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tensorgrad.data.split import plan_split
from tensorgrad.data.text import SUFFIXES, documents, fingerprint, read_text
from tensorgrad.data.tokenizer import SMALLEST_VOCABULARY, Tokenizer
from tensorgrad.data.tokens import TokenFile, write_tokens
from tensorgrad.errors import ArgumentError, DataError
from tensorgrad.files import locked, make_folder, replacing, sync_folder
from tensorgrad.ops.operand import check_integer, check_number

Progress = Callable[[str, int, int], None]
CHARACTERS_PER_TOKEN = 1500  # to learn a vocabulary from; more makes hardly any difference

_FORMAT = 1  # of the prepared folder; part of its key


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus.

    Equal digests mean the same tokens and vocabulary, wherever they were made; a run that is
    resumed should have the digest that it began with.
    """

    folder: Path
    digest: str
    tokenizer: Tokenizer
    train: TokenFile
    validation: TokenFile


def prepare(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    vocab_size: int = 4096,
    *,
    validation: float = 0.05,
    tokenizer: Tokenizer | None = None,
    suffixes: Sequence[str] = SUFFIXES,
    column: str | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """Split a source, train a tokenizer, and write train.npy and validation.npy.

    The result is kept in a folder of its own below `folder`, under a name made from the source
    (for files: their sizes and times) and the settings; a second call only opens it. It appears
    there in one step, so an interrupted call leaves no result, never a part of one. Several
    processes may call this at once: one works, the others wait and open what it made.

    Args:
        source, suffixes, column: as for `documents`.
        folder: where prepared corpora are kept; created if missing.
        vocab_size: of the tokenizer to train. A large source trains it with every n-th document,
            so that there are about CHARACTERS_PER_TOKEN characters for each token.
        validation: the share of the text for validation, between 0 and 1.
        tokenizer: use this one and train none; vocab_size then has no effect.
        progress: called after each document with the stage ("reading", "tokenizer", "encoding"),
            the characters done, and the characters in all (0 while unknown).
    Returns:
        The opened corpus.
    Raises:
        ArgumentError: an argument is out of its range.
        DataError: the source is missing, empty, too short to split, not UTF-8, or changed
            while it was read; or the disk is full.
    """
    check_number("prepare", "validation", validation)
    if not 0 < validation < 1:
        raise ArgumentError(f"prepare: validation has {validation}, expected between 0 and 1")
    if tokenizer is None:
        check_integer("prepare", "vocab_size", vocab_size, SMALLEST_VOCABULARY)
    elif not isinstance(tokenizer, Tokenizer):
        kind = type(tokenizer).__name__
        raise ArgumentError(f"prepare: tokenizer is a {kind}, expected a Tokenizer")
    read = partial(documents, source, suffixes=suffixes, column=column)
    settings: dict[str, Any] = {
        "format": _FORMAT,
        "source": fingerprint(source, suffixes=suffixes, column=column),
        "validation": validation,
        "vocab_size": vocab_size if tokenizer is None else None,
        "tokenizer": tokenizer and hashlib.sha256(tokenizer.to_json().encode()).hexdigest(),
    }
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", Path(source).name)[:40].strip("-") or "text"
    target = Path(folder, f"{stem}-{key}")
    try:
        if not target.is_dir():
            with _making(target) as new:
                if new:
                    counts = _build(new, read, validation, tokenizer, vocab_size, progress)
                    if fingerprint(source, suffixes=suffixes, column=column) != settings["source"]:
                        raise DataError(f"prepare: source {source} changed while it was read")
                    facts = {**settings, "counts": counts, "digest": _digest(new)}
                    with replacing(new / "corpus.json") as file:
                        file.write(json.dumps(facts, indent=2).encode())
    except OSError as error:
        raise DataError(
            f"prepare: cannot write {error.filename or target}: {error.strerror}"
        ) from error
    return _open(target)


def _open(folder: Path) -> Corpus:
    try:
        digest = json.loads(read_text(folder / "corpus.json"))["digest"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(f"prepare: {folder / 'corpus.json'} is damaged: {error!r}") from error
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    train, validation = (
        TokenFile.open(folder / name, tokenizer.vocab_size, check_ids=False)  # we wrote them
        for name in ("train.npy", "validation.npy")
    )
    return Corpus(folder, digest, tokenizer, train, validation)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "train.npy", "validation.npy"):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _build(
    folder: Path,
    read: Callable[[], Iterator[str]],
    validation: float,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    progress: Progress | None,
) -> dict[str, int]:
    """Write the tokenizer and both token files; return what is worth knowing about them."""

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
            report("tokenizer", sample, split.characters // every), vocab_size
        )
    tokenizer.save(folder / "tokenizer.json")
    counts = {"documents": split.documents, "characters": split.characters}
    for name, part in (("train", split.train), ("validation", split.validation)):
        parts = report("encoding", filter(None, map(part, read())), split.characters)
        counts[name] = write_tokens(folder / f"{name}.npy", parts, tokenizer)
    return counts


@contextlib.contextmanager
def _making(target: Path) -> Iterator[Path | None]:
    """Give an empty folder that becomes `target` at the end, or None if another made it meanwhile.

    That nothing breaks follows from the rename alone: a folder appears whole, and only where
    none is. The lock only keeps processes from doing the same work twice.
    """
    make_folder(target.parent)
    ours = f".{target.name}-{platform.node()}"
    with locked(target.with_name(f".{target.name}.lock"), wait=True) as alone:
        if alone:
            for left in target.parent.glob(f"{ours}-*.tmp"):  # by a process that was killed
                shutil.rmtree(left)
        if target.is_dir():
            yield None
            return
        new = target.with_name(f"{ours}-{secrets.token_hex(4)}.tmp")
        new.mkdir()
        try:
            yield new
            sync_folder(new)
            try:
                new.rename(target)
            except OSError:
                if not target.is_dir():  # another process was first where there are no locks
                    raise
            sync_folder(target.parent)
        finally:
            shutil.rmtree(new, ignore_errors=True)
