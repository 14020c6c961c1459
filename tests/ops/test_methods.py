from __future__ import annotations

import doctest
import inspect
import operator
import pickle
from typing import Any, assert_type, get_type_hints

import numpy as np
import pytest

import tensorgrad
from tensorgrad import Tensor
from tensorgrad.dtypes import bfloat16
from tensorgrad.errors import ArgumentError
from tensorgrad.ops.methods import METHODS, OPERATORS, PROPERTIES
from tests.method_stub import STUB, text

X = np.arange(1.0, 7).reshape(2, 3)


def test_the_stub_is_up_to_date() -> None:
    assert STUB.read_text(encoding="utf-8") == text(), "run python -m tests.method_stub"


def test_every_row_is_a_method() -> None:
    for name, function in METHODS.items():
        method = vars(Tensor)[name]
        assert method.__code__.co_code == function.__code__.co_code
        assert (method.__name__, method.__qualname__) == (name, f"Tensor.{name}")
        assert method.__doc__ == function.__doc__
        (own, *others), (_, *ops) = (
            inspect.signature(f).parameters.values() for f in (method, function)
        )
        assert own.name == "self"
        assert others == ops
    for name in PROPERTIES:
        assert vars(Tensor)[name].__doc__
    assert get_type_hints(Tensor.mean)["return"] is Tensor


def test_examples_run() -> None:
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    runner = doctest.DocTestRunner(optionflags=options)
    for name in METHODS:
        for test in doctest.DocTestFinder().find(getattr(Tensor, name), globs={}):
            test.globs.update(tg=tensorgrad, np=np)
            assert runner.run(test).failed == 0, name
    assert runner.summarize(verbose=False).attempted > 60


@pytest.mark.parametrize("name", [name for name, *_ in OPERATORS])
def test_operators_exchange_operands_and_assign(name: str) -> None:
    values: Any = np.array([[3, 1], [2, 5]])
    other = np.array([[1, 2], [1, 3]])
    op = getattr(operator, {"and": "and_", "or": "or_"}.get(name, name))
    np.testing.assert_array_equal(op(Tensor(values), other).numpy(), op(values, other))
    symbol = next(symbol for row, _, symbol in OPERATORS if row == name)
    if symbol:
        reflected = getattr(Tensor(values), f"__r{name}__")(other)
        np.testing.assert_array_equal(reflected.numpy(), op(other, values))
    if symbol and name != "truediv":  # whose result is not of integers
        held = Tensor(values.copy())
        memory = held.data
        assert getattr(held, f"__i{name}__")(other) is held
        assert held.data is memory
        np.testing.assert_array_equal(memory, op(values, other))


def test_methods_beside_the_table_give_what_they_say() -> None:
    x: Any = Tensor(X)
    assert +x is x
    np.testing.assert_array_equal(x.gather(1, np.array([[2], [0]])).numpy(), [[3], [4]])
    assert x.unsqueeze(1).shape == (2, 1, 3)
    for name, dtype in (("half", "float16"), ("float", "float32"), ("double", "float64")):
        assert getattr(x, name)().dtype == dtype
    assert x.bfloat16().dtype == bfloat16
    assert x.numel() == 6
    assert x.reshape(6).shape == x.reshape((6,)).shape == x.flatten().shape == (6,)
    assert not np.shares_memory(x.flatten().data, x.data)
    assert x.transpose().shape == x.transpose(1, 0).shape == x.transpose((1, 0)).shape == (3, 2)
    assert x.cpu() is x
    assert x.to_device("cpu") is x
    np.testing.assert_array_equal(x.dot(X.T).numpy(), X @ X.T)
    for part, numpys in zip(divmod(7.0, x), divmod(7.0, X), strict=True):
        np.testing.assert_array_equal(part.numpy(), numpys)
    held: Any = Tensor(X.copy())
    held.sort(0)
    held[:, 0].sort()
    np.testing.assert_array_equal(held.numpy(), X)
    Tensor(held.data[:, ::-1]).sort()
    np.testing.assert_array_equal(held.numpy(), X[:, ::-1])
    held.fill(2)
    assert held.tolist() == [[2] * 3] * 2
    with pytest.raises(ArgumentError, match="sort: got dim=1, expected axis=1"):
        held.sort(dim=1)
    with pytest.raises(ArgumentError, match="gather: got dim=1, expected axis=1"):
        x.gather(1, [[0]], dim=1)
    with pytest.raises(ArgumentError, match="unsqueeze: got dim=1, expected axis=1"):
        x.unsqueeze(1, dim=1)


def test_protocols_lead_to_the_ops() -> None:
    x: Any = Tensor(X)
    for y in (np.exp(x), np.mean(x, 0), np.add(X, x)):
        assert type(y) is Tensor
    for y, expected in ((np.multiply(2, x), 2 * X), (np.transpose(x), X.T)):
        assert type(y) is Tensor
        np.testing.assert_array_equal(y, expected)
    for version in (None, "2021.12", "2022.12", "2023.12", "2024.12"):
        assert x.__array_namespace__(api_version=version) is tensorgrad
    with pytest.raises(ArgumentError, match=r"api_version is '2030.12', expected up to"):
        x.__array_namespace__(api_version="2030.12")
    assert np.shares_memory(np.from_dlpack(x), X)
    assert not np.shares_memory(np.from_dlpack(x, copy=True), X)


class Kind(Tensor):
    def sum(self, *args: Any, **options: Any) -> Tensor:
        return super().sum(*args, **options) * 2


def test_methods_work_in_subclasses_and_as_pickles() -> None:
    x = Kind(X)
    assert_type(x @ x.T, Tensor)
    assert x.sum().item() == 2 * X.sum()
    assert pickle.loads(pickle.dumps(x.mean))().item() == X.mean()
    assert pickle.loads(pickle.dumps(x.reshape))(3, 2).shape == (3, 2)
    for method in (Tensor.flatten, Tensor.sum, Tensor.__add__):
        assert pickle.loads(pickle.dumps(method)) is method
    assert hash(x) == object.__hash__(x)


def test_methods_take_what_their_ops_take() -> None:
    x = Tensor(X)
    np.testing.assert_allclose(x.sum(where=X > 2).numpy(), X[X > 2].sum())
    np.testing.assert_allclose(x.permute(1, 0).numpy(), X.T)
    assert x.argsort(descending=True).tolist() == [[2, 1, 0]] * 2
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'nothing'"):
        getattr(x, "nothing")  # noqa: B009
