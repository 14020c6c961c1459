"""The methods of Tensor as type checkers see them; `python -m tests.method_stub` writes the stub.

Its source is the table of ops/methods.py, which attaches the methods when the package is imported.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from tensorgrad.ops.methods import METHODS, OPERATORS, PROPERTIES
from tests.source_tree import ROOT

STUB = ROOT / "tensorgrad" / "core" / "tensor_methods.pyi"
WIDTH = 96  # columns of a line in the class
HEADER = '''"""The methods of Tensor for type checkers, written by `python -m tests.method_stub`.

The functions are in ops/methods.py.
"""

import builtins
from collections.abc import Sequence
from typing import Any, Literal, Never, Self, SupportsIndex

from tensorgrad.core.backend import Axis
from tensorgrad.core.dtypes import DtypeLike
from tensorgrad.core.signature import Bool
from tensorgrad.core.tensor import ArrayLike, Tensor

class Methods:
    """Base class of Tensor that only type checkers see."""

'''


def text() -> str:
    """Return the stub."""
    return HEADER + "".join(f"    {line}\n" for line in _lines())


def _lines() -> Iterator[str]:
    for name, (function, _) in PROPERTIES.items():
        yield "@property"
        result = _annotation(inspect.signature(function).return_annotation)
        yield f"def {name}(self) -> {result}: ..."
    for name, function in METHODS.items():
        if name != "__getattr__":  # with it, every name would exist
            yield from _definition(name, function)
    for name, _, symbol in OPERATORS:
        other = "self, other: Any"
        ignored = "  # type: ignore[override]" if name in ("eq", "ne") else ""
        yield f"def __{name}__({other}) -> Tensor: ...{ignored}"
        if symbol:
            yield f"def __r{name}__({other}) -> Tensor: ..."
            yield f"def __i{name}__({other}) -> Self: ..."


def _definition(name: str, function: Callable[..., Any]) -> Iterator[str]:
    signature = inspect.signature(function)
    first, *others = signature.parameters.values()
    parameters = [
        first.replace(name="self", annotation=inspect.Parameter.empty),
        *(p.replace(annotation=_Raw(_annotation(p.annotation))) for p in others),
    ]
    text = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    within, result = text[1:-1].replace("'", '"'), _annotation(signature.return_annotation)
    if len(whole := f"def {name}({within}) -> {result}: ...") <= WIDTH:
        yield whole
        return
    yield f"def {name}("
    if len(within) + 4 <= WIDTH:
        yield f"    {within}"
    else:
        yield from (f"    {parameter}," for parameter in re.split(r", (?![^\[]*\])", within))
    yield f") -> {result}: ..."


class _Raw:
    """An annotation that a signature shows as its text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _annotation(annotation: Any) -> str:
    """Return an annotation as the stub has it, where `float` is a method."""
    return re.sub(r"\bfloat\b", "builtins.float", str(annotation)).replace("'", '"')


if __name__ == "__main__":
    STUB.write_text(text(), encoding="utf-8")
