"""A wrong value of any argument of an op is a result or an error that says what was expected.

The calls are those of the examples in docstrings, with one argument replaced.
"""

from __future__ import annotations

import ast
import doctest
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad.errors import TensorgradError

NAMESPACES = {
    "tensorgrad": tg,
    "functional": tg.nn.functional,
    "linalg": tg.linalg,
    "fft": tg.fft,
    "random": tg.random,
}
WRONG = {
    "None": None,
    "a text": "abc",
    "an object": object(),
    "NaN": float("nan"),
    "a negative number": -7,
    "ragged lists": [[1], [1, 2]],
    "three axes": np.ones((7, 5, 3), np.float32),
    "no elements": np.ones(0, np.float32),
    "complex numbers": np.ones((2, 3), complex),
    "texts": np.array(["a", "b"]),
}
# The gradient check of an example fails with another tolerance, which is its purpose.
PURPOSES = {"gradcheck"}


def _functions(namespace: str) -> Iterator[tuple[str, Any]]:
    module = NAMESPACES[namespace]
    for name in module.__all__:
        function = getattr(module, name)
        own = namespace == "tensorgrad" or not hasattr(tg, name)
        if inspect.isroutine(function) and own and name not in PURPOSES:
            yield name, function


def _example(name: str, function: Any) -> inspect.BoundArguments | None:
    """Return the arguments of a call in the example of a function; None where none is simple."""
    names: dict[str, Any] = {"tg": tg, "np": np}
    for example in doctest.DocTestParser().get_examples(inspect.getdoc(function) or ""):
        for node in ast.walk(ast.parse(example.source)):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if called and node.func.attr == name:  # type: ignore[attr-defined]
                arguments = f"capture({ast.unparse(node).partition('(')[2]}"
                bind = inspect.signature(function).bind
                bound: inspect.BoundArguments = eval(arguments, {**names, "capture": bind})
                return bound
        exec(example.source, names)
    return None


def _replaced(bound: inspect.BoundArguments, name: str, value: Any) -> inspect.BoundArguments:
    changed = bound.signature.bind_partial()
    values = {**bound.arguments, name: value}
    changed.arguments = {p: values[p] for p in bound.signature.parameters if p in values}
    return changed


def _problems(name: str, function: Any, bound: inspect.BoundArguments) -> Iterator[str]:
    for parameter in bound.signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        for what, value in WRONG.items():
            call = _replaced(bound, parameter.name, value)
            try:
                function(*call.args, **call.kwargs)
            except TensorgradError as error:
                if ": " not in str(error) or "expected" not in str(error):
                    yield f"{name}({parameter.name}={what}) says {error}"
            except Exception as error:
                yield f"{name}({parameter.name}={what}) raises {type(error).__name__}: {error}"


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_wrong_arguments_are_named(
    namespace: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tried, problems = 0, list[str]()
    state = tg.random.get_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, function in _functions(namespace):
            bound = _example(name, function)
            if bound is not None:
                tried += 1
                problems += _problems(name, function, bound)
    tg.random.set_state(state)
    assert tried > (200 if namespace == "tensorgrad" else 10)
    assert not problems, "\n".join(problems)
