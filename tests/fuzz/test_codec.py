"""A run reads back what it wrote as it was, or it refuses to write it."""

from __future__ import annotations

import json
import os
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tensorgrad as tg
from tensorgrad.errors import ArgumentError, DtypeError
from tensorgrad.io.files import to_json, write_json
from tensorgrad.io.readers import JSON_DEPTH, parse_json, read_json
from tensorgrad.train import config
from tensorgrad.train.checkpoint import RESERVED, load_checkpoint
from tensorgrad.train.language import LanguageSettings
from tensorgrad.train.log import StepLog, read_metrics, read_samples
from tensorgrad.train.sentiment import SentimentSettings
from tensorgrad.train.translation import TranslationSettings
from tests.checkpoints import save_checkpoint
from tests.fuzz.cases import cases

REFUSALS = (ArgumentError, DtypeError)
TEXT = st.text(st.characters(exclude_categories=()), max_size=6)  # with halves of surrogate pairs
INTEGERS = st.integers() | st.builds(
    lambda sign, power, more: sign * 2**power + more,  # Python does not print the largest
    st.sampled_from([-1, 1]), st.sampled_from([53, 63, 64, 20_000]), st.integers(-1, 1),
)  # fmt: skip
NUMPY = st.sampled_from(
    [
        *(np.float32(0.1), np.float64("nan"), np.float16("inf"), np.longdouble(1) / 3),
        *(np.int64(-(2**63)), np.uint64(2**64 - 1), np.bool_(True), np.str_("\udcff")),
        *(np.longdouble(3), np.complex64(1), np.datetime64("2020"), np.ones(2), np.array(1.5)),
    ]
)
LEAVES = (
    st.none() | st.booleans() | INTEGERS | st.floats() | TEXT | NUMPY
    | st.sampled_from([b"x", 1j, {1}, Path("a"), ..., range(2)])
)  # fmt: skip
KEYS = TEXT | st.sampled_from(["step", "1", 1, 1.0, True, None, (1,), "true", "null", "a\x00"])


def nested(leaf: Any, depth: int, in_list: bool) -> Any:
    for _ in range(depth):
        leaf = [leaf] if in_list else {"a": leaf}
    return leaf


def branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=3)
    return (
        lists
        | lists.map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.builds(nested, inner, st.integers(0, JSON_DEPTH + 3), st.booleans())
    )


VALUES = st.recursive(LEAVES, branches, max_leaves=6)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=4)


def plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.floating):
        return float(value)
    return value.item() if isinstance(value, np.generic) else value


def same(read: Any, value: Any) -> bool:
    """Whether values are equal in their types too: 1, 1.0 and True are not."""
    return repr(read) == repr(plain(value))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # no file outlives the test
        yield tmp_path_factory.mktemp("codec")


def attempt(act: Callable[[], Any], *errors: type[Exception]) -> Any:
    """Return the result, or the error where it is one of these."""
    try:
        return act()
    except errors as error:
        return error


@cases(100)
@given(value=OBJECTS)
def test_json_is_read_back_as_it_was_written(value: dict[Any, Any]) -> None:
    text = attempt(lambda: to_json(value), *REFUSALS)
    if isinstance(text, str):
        assert same(parse_json(text, "it"), value)
    else:
        assert str(text).startswith("to_json: ")
        read = attempt(lambda: parse_json(json.dumps(value), "it"), ValueError, TypeError)
        assert isinstance(read, Exception) or not same(read, value), f"{text}, but it can be read"


def checkpoint_state(folder: Path, value: dict[Any, Any]) -> Any:
    path = save_checkpoint(folder / "checkpoints", 1, {}, value, keep=1)
    return without_reserved(load_checkpoint(path).state)


def without_reserved(value: dict[Any, Any]) -> dict[Any, Any]:
    return {name: value[name] for name in value if name not in RESERVED}


def json_file(folder: Path, value: dict[Any, Any]) -> Any:
    write_json(folder / "facts.json", value, 2)
    return read_json(folder / "facts.json")


def log_line(folder: Path, value: dict[Any, Any], text: bool) -> Any:
    path = folder / "log.jsonl"
    path.unlink(missing_ok=True)  # a line of a negative step would stay
    log = StepLog(path, -1, text)
    try:
        log.write(value)
    finally:
        log.close()
    (read,) = read_samples(path) if text else read_metrics(path)
    return read


def of_steps(value: dict[Any, Any]) -> dict[Any, Any]:
    return {"step": 3, **value}


def of_samples(value: dict[Any, Any]) -> dict[Any, Any]:
    return {"step": 3, "prompt": "", "text": "", **value}


def saved_tree(folder: Path, value: dict[Any, Any]) -> Any:
    tg.save(value, folder / "tree")
    return as_arrays(tg.load(folder / "tree"))


def as_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_arrays(item) for key, item in value.items()}
    return value.numpy() if isinstance(value, tg.Tensor) else value


FILES: dict[str, tuple[Callable[[Path, dict[Any, Any]], Any], Callable[[Any], dict[Any, Any]]]] = {
    "state": (checkpoint_state, without_reserved),
    "facts": (json_file, dict),
    "metrics": (lambda folder, value: log_line(folder, value, False), of_steps),
    "samples": (lambda folder, value: log_line(folder, value, True), of_samples),
    "tree": (saved_tree, dict),
}


@pytest.mark.parametrize("name", FILES)
@cases(40)
@given(value=OBJECTS | st.dictionaries(TEXT, LEAVES, max_size=3))
def test_files_are_read_back_as_they_were_written(
    name: str, folder: Path, value: dict[Any, Any]
) -> None:
    write_and_read, complete = FILES[name]
    value = complete(value)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    read = attempt(lambda: write_and_read(folder, value), *REFUSALS)
    if not isinstance(read, Exception):
        assert same(read, value)
    elif name in ("state", "facts", "tree"):  # nothing was written
        assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def settings() -> Iterator[st.SearchStrategy[Any]]:
    """Yield what makes settings of each task from one of their fields and a value for it."""
    for kind in (LanguageSettings, SentimentSettings, TranslationSettings):
        for f in fields(kind):
            if f.metadata["saved"]:
                yield st.tuples(st.just(kind), st.just(f.name), LEAVES | long_text() | VALUES)


def long_text() -> st.SearchStrategy[Any]:
    return st.builds(lambda part, times: part * times, TEXT, st.integers(0, 20_000))


@cases(100)
@given(case=st.one_of(*settings()), more=st.sampled_from(string.printable))
def test_settings_are_read_back_or_the_option_is_named(
    folder: Path, case: tuple[Any, str, Any], more: str
) -> None:
    kind, name, value = case
    value = value + more if isinstance(value, str) else value
    option = f"{config.option_name(name)}: got "
    made = attempt(lambda: kind(**{name: value}), ArgumentError)
    if isinstance(made, ArgumentError):
        is_its_own = isinstance(value, str) or (isinstance(value, int) and abs(value) >= 2**64)
        assert str(made).startswith(option if is_its_own else "--")
    else:
        config.save(made, folder)
        assert config.load(kind, folder) == made
        assert same(parse_json(to_json(asdict(made)), "it"), asdict(made))
