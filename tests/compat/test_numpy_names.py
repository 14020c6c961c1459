"""NumPy's function list: each name is in the library, or on the page of what is omitted."""

from __future__ import annotations

import importlib
import re
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad.compat import omitted
from tests.source_tree import ROOT

PAGE = (ROOT / "docs" / "guides" / "not-supported.md").read_text(encoding="utf-8")
OMITTED = set(re.findall(r"`(\w+)`", PAGE.partition("## Names of NumPy")[2]))
FORMER = {"in1d", "trapz"}  # which NumPy 2.4 removed
NAMES = {name for name in np.__all__ if not name.startswith("__")} - {"dtypes"} - FORMER
ANOTHER_MEANING = {"load", "save", "testing"}  # safetensors; the harness for ops
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
    with pytest.raises(AttributeError, match=r"module 'tensorgrad' has no attribute 'sums'; docs/"):
        _ = module.sums


def test_names_of_pytorch_lead_to_those_of_numpy() -> None:
    module: Any = tg
    with pytest.raises(AttributeError, match="no attribute 'cat': it is named as in NumPy, concat"):
        _ = module.cat
    for theirs, ours in omitted._NAMED.items():
        assert not hasattr(tg, theirs)
        place: Any = importlib.import_module("tensorgrad.parallel") if "parallel" in ours else tg
        for part in ours.removeprefix("parallel.").split("."):
            place = getattr(place, part)
    for name in omitted._DTYPES:
        assert not hasattr(tg, name)
        assert getattr(tg, omitted._DTYPES[name])


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (tg, "inverse", "it is named as in NumPy, linalg.inv"),
        (tg, "compile", "here it is tensorgrad.graph.capture"),
        (tg, "binary_cross_entropy", "here it is tensorgrad.nn.functional.binary_cross_entropy"),
        (tg, "masked_fill", "here it is a method, x.masked_fill"),
        (tg, "FloatTensor", "it is the dtype 'float32', a name"),
        (tg, "sparse_coo_tensor", "sparse tensors are omitted on purpose"),
        (tg.linalg, "eig", "write linalg.eigh, of symmetric matrices"),
        (tg.random, "randn", "it is named as in NumPy, random.standard_normal"),
        (tg.random, "power", "docs/guides/not-supported.md lists what is omitted"),
        (tg.fft, "mean", "here it is tensorgrad.mean"),
        (tg, "gradient", "this function of NumPy is omitted on purpose"),
        (tg.nn.functional, "unfold", "convolutions, pooling and recurrent layers are omitted"),
        (tg.optim, "RMSprop", "docs/guides/not-supported.md lists what is omitted"),
        (tg.nn, "SmoothL1Loss", "here it is a function, tensorgrad.nn.functional.smooth_l1_loss"),
        (tg.nn, "DataParallel", "here it is tensorgrad.parallel.DataParallel"),
        (tg.ones(1), "softmax", "here it is tensorgrad.softmax"),
        (tg.ones(1), "expand", "it is named as in NumPy, broadcast_to"),
        (tg.ones(1), "long", "write x.astype('int64')"),
        (tg.ones(1), "exp_", "a tensor changes by assignment, x[...] = y"),
        (tg.ones(1), "is_cuda", "write x.device != 'cpu'"),
        (tg.ones(1), "strides", "write x.numpy().strides"),
        (tg.ones(1), "anything", "docs/guides/not-supported.md lists what is omitted"),
    ],
)
def test_missing_names_lead_to_what_is_there(owner: Any, name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=rf"'{name}'[:;] {re.escape(instead)}"):
        getattr(owner, name)
    assert not hasattr(owner, "_" + name)


def test_every_name_of_pytorch_is_here_or_explained() -> None:
    torch = pytest.importorskip("torch")
    for owner, theirs in ((tg, torch), (tg.ones((1, 1)), torch.Tensor), (tg.linalg, torch.linalg),
                          (tg.nn, torch.nn), (tg.nn.functional, torch.nn.functional)):  # fmt: skip
        for name in dir(theirs):
            if not name.startswith("_") and not hasattr(owner, name):
                with pytest.raises(AttributeError, match=f"no attribute '{name}'[:;] .{{9}}"):
                    getattr(owner, name)
