"""`fuse`: a Python function of elementwise ops as one kernel forward and one backward.

The function runs once on symbols (see `trace.py`), which record the expressions of the rows that it
calls; the gradients follow from those of the rows by the chain rule, as expressions of the same
arguments. Together they form one more row of the elementwise table.
Tests: tests/ops/test_fuse.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np

from tensorgrad.core.checks import check_function
from tensorgrad.core.dtypes import SCALARS, compute_dtype, is_float
from tensorgrad.core.errors import ArgumentError, DtypeError
from tensorgrad.core.operands import array_beside
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels.expression import Formula
from tensorgrad.ops.elementwise.row import Row
from tensorgrad.ops.elementwise.trace import Symbol, Trace

__all__ = ["fuse"]


def fuse(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return f as a function that reads its arguments once and saves only them for backward.

        @fuse
        def swiglu(gate, up):
            return silu(gate) * up

    On the GPU, forward is one kernel and backward another; on the CPU both are computed block by
    block in cache, on all cores. Backward recomputes what it needs from the arguments. A common
    subexpression is computed once.

    f may use arithmetic, comparisons, `where`, `clip`, all other functions of ops/elementwise/,
    casts to float types, Python control flow over its keyword arguments, and other fused
    functions; gradients stop at `detach` and inside `no_grad`. Everything is computed in float32
    (float64 where an argument is float64) and only the result is rounded: 16-bit arguments give
    more accurate results than unfused ops, which round at each step. Integers combined with
    floats are converted to floats.

    Args:
        f: takes tensors, arrays or Python numbers by position, which broadcast, and constants by
            keyword. Returns one tensor. It must compute the same for the same dtypes and constants:
            it runs once for each. Arguments that the result does not depend on are ignored.

    Returns:
        A function with the arguments of f.

    Raises:
        ArgumentError: f is not a function.
        ArgumentError: when called, f uses other ops than elementwise ones, or arrays that are not
            its arguments, or tests whether an element is true.
        DtypeError: when called, an argument is not a tensor, array or number, f returns something
            other than one tensor, or casts to integers.

    Example:
        >>> gated = tg.fuse(lambda gate, up: tg.sigmoid(gate) * up)
        >>> gated([0.0, 0.0], [2.0, 3.0]).tolist()
        [1.0, 1.5]
    """
    check_function("fuse", f, "give it the function first: fuse(f)(x)")
    rows: dict[Any, tuple[Row, list[int]]] = {}

    @wraps(f, updated=())
    def run(*operands: Any, **constants: Any) -> Tensor:
        kinds: list[Any] = []
        for operand in operands:
            value = operand.data if isinstance(operand, Tensor) else operand
            kind = type(value)
            if kind is Symbol:
                return f(*operands, **constants)  # inside another fused function
            kinds.append(kind if kind in SCALARS else getattr(value, "dtype", None))
        key = (*kinds, *[(name, _constant_key(value)) for name, value in constants.items()])
        try:
            row, used = rows[key]
        except (KeyError, TypeError):
            if any([isinstance(operand, (list, tuple)) for operand in operands]):
                return run(*_plain(f, operands), **constants)
            row, used = rows[key] = row_of(f, kinds, constants)
        return row(*operands) if len(used) == len(operands) else row(*[operands[i] for i in used])

    return run


def _plain(f: Callable[..., Tensor], operands: Sequence[Any]) -> list[Any]:
    """Return lists as arrays, all else as it is."""
    op = Trace(f).name
    return [
        array_beside(op, name, one, *operands) if isinstance(one, (list, tuple)) else one
        for name, one in zip(_names(f, len(operands)), operands, strict=True)
    ]


def row_of(
    f: Callable[..., Tensor], kinds: list[Any], constants: dict[str, Any]
) -> tuple[Row, list[int]]:
    """Run f on symbols; return the row that it is, and which arguments are its operands."""
    trace = Trace(f)
    names = _names(f, len(kinds))
    for name, kind in zip(names, kinds, strict=True):
        if kind is None:
            raise DtypeError(f"{trace.name}: {name} is not a tensor, array or number; "
                             "expected one, or a constant given by keyword")  # fmt: skip
        if np.dtype(kind).kind == "c":
            raise DtypeError(f"{trace.name}: {name} is complex, expected real numbers")
    for name, value in constants.items():
        if isinstance(value, Tensor) or not _is_hashable(value):
            raise ArgumentError(
                f"{trace.name}: {name} is a {type(value).__name__} given by keyword, expected "
                "tensors by position and hashable constants by keyword"
            )
    parameters = [f"x{i}" for i in range(len(kinds))]
    symbols = [trace.symbol(p, kind) for p, kind in zip(parameters, kinds, strict=True)]
    result = trace.run(f, symbols, constants)
    y = result.data if isinstance(result, Tensor) else None
    if type(y) is not Symbol or y.dtype in SCALARS:
        got = "number" if type(y) is Symbol else "tensor that does not depend on its arguments"
        got = type(result).__name__ if y is None else got
        raise DtypeError(f"fuse: {trace.name} returned a {got}, expected one tensor")
    compute = trace.compute_dtype()
    # Ignored arguments must not widen the result.
    mentioned = trace.expressions.names([y.expression])
    used = [i for i, parameter in enumerate(parameters) if parameter in mentioned]
    formula = Formula(trace.name, [parameters[i] for i in used], trace.expressions, [y.expression])
    floats = [parameters[i] for i in used if symbols[i].is_float and is_float(y.dtype)]
    gradients, tangents = (
        dict(zip(floats, trace.expressions.gradients(y.expression, floats, first), strict=True))
        for first in (True, False)
    )
    others = [kinds[i] for i in used if kinds[i] not in SCALARS and kinds[i] != np.bool_]
    mixed = is_float(compute) and any([compute_dtype(kind) != compute for kind in others])
    row = Row.composed(
        [names[i] for i in used],
        formula,
        [gradients.get(name) for name in formula.parameters],
        [tangents.get(name) for name in formula.parameters],
        y.dtype,
        compute_dtype(compute),
        mixed,
    )
    return row, used


def _is_hashable(constant: Any) -> bool:
    """Whether a constant, and all that it contains, can be part of a key."""
    try:
        hash(constant)
    except TypeError:
        return False
    return True


def _constant_key(constant: Any) -> Any:
    """Return the key of a constant, which tells apart 2, 2.0 and True, and 0.0 and -0.0."""
    if isinstance(constant, tuple | frozenset):
        kind = tuple if isinstance(constant, tuple) else frozenset
        return type(constant), kind(map(_constant_key, constant))
    return type(constant), str(constant) if isinstance(constant, float | np.floating) else constant


def _names(f: Callable[..., Any], count: int) -> list[str]:
    """Return the names of the first arguments."""
    try:
        names = list(inspect.signature(f).parameters)[:count]
    except (TypeError, ValueError):  # a built-in function may have no signature
        names = []
    return [*names, *[f"argument {i}" for i in range(len(names), count)]]
