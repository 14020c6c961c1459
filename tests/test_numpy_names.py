"""NumPy's function list: each name is in the library, or on the page of what is omitted."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad.omitted import _OF_NUMPY
from tests.source_tree import ROOT

PAGE = (ROOT / "docs" / "guides" / "omitted.md").read_text(encoding="utf-8")
OMITTED = set(re.findall(r"`(\w+)`", PAGE.partition("## Names of NumPy")[2]))
NAMES = {name for name in np.__all__ if not name.startswith("__")} - {"dtypes"}
ANOTHER_MEANING = {"load", "save"}  # of safetensors
LATER = {"float128", "complex256", "core", "row_stack"}  # on some platforms or versions


def available() -> set[str]:
    return {name for name in NAMES if name in tg.__all__} - ANOTHER_MEANING


def test_every_name_of_numpy_is_here_or_omitted_with_a_reason() -> None:
    assert NAMES - available() - OMITTED == set()
    assert OMITTED & set(tg.__all__) == ANOTHER_MEANING
    assert OMITTED - NAMES - LATER - {"tg"} == set()


def test_most_names_are_available() -> None:
    functions = {name for name in NAMES if not isinstance(getattr(np, name), type)}
    assert len(available() & functions) >= 0.6 * len(functions)


@pytest.mark.parametrize("module", [tg, tg.nn, tg.nn.functional])
def test_errors_say_what_is_omitted_on_purpose(module: Any) -> None:
    with pytest.raises(
        AttributeError, match="no attribute 'Conv1d': convolutions, pooling and rec"
    ):
        _ = module.Conv1d
    with pytest.raises(AttributeError, match=r"no attribute '_pool'$"):
        _ = module._pool
    assert not hasattr(module, "LSTM")
    assert module.softmax if module is not tg.nn else module.Linear


def test_omitted_names_of_numpy_say_so() -> None:
    module: Any = tg
    with pytest.raises(AttributeError, match="'poly1d': this function of NumPy is omitted on purp"):
        _ = module.poly1d
    with pytest.raises(AttributeError, match=r"module 'tensorgrad' has no attribute 'sums'$"):
        _ = module.sums


def test_names_of_pytorch_lead_to_those_of_numpy() -> None:
    module: Any = tg
    with pytest.raises(AttributeError, match="no attribute 'cat': it is named as in NumPy, concat"):
        _ = module.cat
    for theirs, ours in _OF_NUMPY.items():
        assert not hasattr(tg, theirs)
        place: Any = tg
        for part in [] if ours[:2] in ("x.", "x[", "is") else ours.split("."):
            place = getattr(place, part)
