"""Labelled texts: from tab-separated files, Hugging Face data sets, or synthetic."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad.core.checks import check_number, check_seed
from tensorgrad.core.errors import ArgumentError, DataError
from tensorgrad.data.content import CHARACTERS
from tensorgrad.data.reviews import reviews
from tensorgrad.data.rows import load_dataset
from tensorgrad.data.text import find_file, read_lines
from tensorgrad.io.display import call_text

Labels = np.ndarray[Any, np.dtype[np.int32]]
_Row = tuple[str, Any, Any]  # its place in the source, for errors, its text and its label

REVIEWS = (2000, 400)  # for training and validation
TEXT_COLUMNS = ("sentence", "text")  # tried in this order where none is named

_PARTS = {"train": ("train",), "validation": ("dev", "validation", "valid", "val")}


@dataclass(frozen=True)
class LabelledTexts:
    """Texts, and the number of the class of each.

    Attributes:
        texts: N texts.
        labels: (N,) int32, the classes.

    Example:
        >>> from tensorgrad.data import LabelledTexts
        >>> data = LabelledTexts(["a good film", "a bad film"], np.array([1, 0], np.int32))
        >>> data
        LabelledTexts(texts=2, classes=2)
        >>> data[[1]].texts
        ['a bad film']
    """

    texts: list[str]
    labels: Labels

    def __repr__(self) -> str:
        return call_text(self, texts=len(self.texts), classes=len(set(self.labels.tolist())))

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.texts)

    def __getitem__(self, rows: Sequence[int]) -> LabelledTexts:
        """Return the texts with these numbers."""
        return LabelledTexts([self.texts[row] for row in rows], self.labels[list(rows)])

    @property
    def digest(self) -> str:
        """A SHA-256 in hexadecimal, equal for equal texts with equal labels."""
        digest = hashlib.sha256(self.labels.astype("<i4").tobytes())
        for text in self.texts:
            digest.update(f"{text}\0".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def read_labelled(
    source: str | os.PathLike[str],
    part: str,
    *,
    text_column: str | None = None,
    label_column: str = "label",
    classes: int = 2,
) -> LabelledTexts:
    """Return the labelled texts of a source.

    Args:
        source: one of
            a folder with train.tsv and dev.tsv (or validation.tsv), plain UTF-8 or compressed: a
            line with the names of the columns, then a line for each text, tabs between columns,
            no quotes;
            `hf:NAME[:CONFIG]`: a Hugging Face data set with the splits train and validation,
            which needs the datasets package;
            `reviews`: synthetic sentences about films.
        part: "train" or "validation".
        text_column: the name of the column; by default "sentence", "text", or the only column
            beside the labels.
        label_column: the name of the column of labels, which are 0 to classes - 1.
        classes: the number of classes.

    Returns:
        The texts, without white space around them, and their labels, in the order of the source.

    Raises:
        ArgumentError: the source has a wrong form, or the part is unknown.
        DataError: a file, a column or a text is missing, or a label is not one of the classes.

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.data import read_labelled
        >>> _ = Path("train.tsv").write_text("sentence\\tlabel\\na good film\\t1\\na bad film\\t0")
        >>> data = read_labelled(".", "train")
        >>> data.texts, data.labels.tolist()
        (['a good film', 'a bad film'], [1, 0])
    """
    source = os.fspath(source)
    if part not in _PARTS:
        raise ArgumentError(f"read_labelled: part is {part!r}, expected one of {list(_PARTS)}")
    name, rows = source, _made_rows(part)
    if source.startswith("hf:"):
        rows = _dataset_rows(source, part, text_column, label_column)
    elif source != "reviews":
        names = [f"{stem}.tsv" for stem in _PARTS[part]]
        forms = "one with train.tsv and dev.tsv, 'hf:NAME' or 'reviews'"
        path = find_file("read_labelled", Path(source), names, forms)
        name, rows = str(path), _file_rows(path, text_column, label_column)
    texts, labels = [], []
    for place, text, label in rows:
        if not isinstance(text, str):
            raise DataError(f"read_labelled: {name}: {place} has {text!r:.80}, expected a text")
        texts.append(text.strip())
        labels.append(_class(label, classes, f"{name}: {place}", label_column))
    if not texts:
        raise DataError(f"read_labelled: {name} has no texts, expected some")
    return LabelledTexts(texts, np.array(labels, np.int32))


def hold_out(
    data: LabelledTexts, share: float, seed: int = 0
) -> tuple[LabelledTexts, LabelledTexts]:
    """Split texts into a training set and a held-out set of whole sentences.

    A text may be a phrase of another text, as in SST-2: training on one would leak words of the
    other. So only whole sentences, which are part of no other text, are held out, and the phrases
    that only they contain are dropped from training.

    Args:
        data: the texts to split.
        share: the fraction of the whole sentences to hold out, between 0 and 1.
        seed: the seed of the choice, 0 to 2^64 - 1.

    Returns:
        The training set and the held-out set.

    Raises:
        ArgumentError: share or seed is out of its range.
        DataError: one of the two would be empty.

    Example:
        >>> from tensorgrad.data import LabelledTexts, hold_out
        >>> data = LabelledTexts(["a good film", "good", "bad", "fine"], np.array([1, 1, 0, 1]))
        >>> train, held_out = hold_out(data, 0.34)
        >>> train.texts, held_out.texts  # "good" is part of the first sentence
        (['bad', 'fine'], ['a good film'])
    """
    check_number("hold_out", "share", share)
    if not 0 < share < 1:
        raise ArgumentError(f"hold_out: share is {share}, expected between 0 and 1")
    check_seed("hold_out", seed)
    owners = sentences_of(data.texts)
    whole = sorted({row for rows in owners for row in rows})
    order = np.random.Philox(key=np.array([seed, 0], np.uint64)).random_raw(len(whole))
    held = {whole[i] for i in np.argsort(order, kind="stable")[: round(share * len(whole))]}
    kept = [row for row, rows in enumerate(owners) if not held.issuperset(rows)]
    if not kept or not held:
        raise DataError(
            f"hold_out: data has {len(whole)} sentences, of which {len(held)} would be held out; "
            "expected some on either side"
        )
    return data[kept], data[sorted(held)]


def sentences_of(texts: Sequence[str]) -> list[list[int]]:
    """Return for each text the numbers of the whole sentences that contain it.

    A whole sentence is part of no other text and contains itself; of equal ones only the first
    counts. Words are separated by spaces.
    """
    padded = [f" {' '.join(text.split())} " for text in texts]
    order = sorted(range(len(texts)), key=lambda row: -len(padded[row]))
    having: dict[str, list[int]] = {}  # word -> whole sentences with it
    owners: list[list[int]] = [[] for _ in texts]
    for row in order:
        words = set(texts[row].split())
        candidates = [having.get(word, []) for word in words]
        fewest = min(candidates, key=len, default=[])
        owners[row] = [whole for whole in fewest if padded[row] in padded[whole]]
        if not owners[row]:
            owners[row] = [row]
            for word in words:
                having.setdefault(word, []).append(row)
    return owners


def _made_rows(part: str) -> Iterator[_Row]:
    for number, (text, label) in enumerate(reviews(sum(REVIEWS))):
        if (number < REVIEWS[0]) == (part == "train"):
            yield f"sentence {number}", text, label


def _file_rows(path: Path, text_column: str | None, label_column: str) -> Iterator[_Row]:
    lines = read_lines(path, CHARACTERS)
    first = next(lines, "")
    if not first:
        raise DataError(f"read_labelled: {path} is empty, expected a line with names of columns")
    columns = first.split("\t")
    text, label = _columns(str(path), columns, text_column, label_column)
    for number, line in enumerate(lines, 2):
        cells = line.split("\t")
        if len(cells) != len(columns):
            raise DataError(
                f"read_labelled: {path}: line {number} has {len(cells)} columns, expected "
                f"{len(columns)}"
            )
        yield f"line {number}", cells[text], cells[label]


def _columns(
    name: str, columns: Sequence[str], text_column: str | None, label_column: str
) -> tuple[int, int]:
    """Return the indices of the text column and the label column."""
    others = [column for column in columns if column != label_column]
    if text_column is None and len(others) == 1:
        text_column = others[0]
    if text_column is None:
        text_column = next((one for one in TEXT_COLUMNS if one in others), None)
    if label_column not in columns or text_column not in others:
        texts = "one of texts" if text_column is None else f"{text_column!r:.80}"
        raise DataError(
            f"read_labelled: {name} has the columns {list(columns)!r:.200}, expected "
            f"{label_column!r} and {texts}"
        )
    return columns.index(text_column), columns.index(label_column)


def _class(label: Any, classes: int, place: str, column: str) -> int:
    """Return a label as a number."""
    try:
        number = int(label)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number < classes or (isinstance(label, float) and label != number):
        expected = "0 or 1" if classes == 2 else f"0 to {classes - 1}"
        raise DataError(f"read_labelled: {place} has {column} {label!r:.80}, expected {expected}")
    return number


def _dataset_rows(
    source: str, part: str, text_column: str | None, label_column: str
) -> Iterator[_Row]:
    data = load_dataset("read_labelled", source, part)
    columns = list(data.features)
    text, label = _columns(source, columns, text_column, label_column)
    pairs = zip(data[columns[text]], data[columns[label]], strict=True)
    for number, pair in enumerate(pairs):
        yield f"row {number} of {part}", *pair
