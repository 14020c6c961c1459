"""Tracing for `fuse`: symbols take the place of arrays while a function runs once.

A row of the elementwise table that gets a symbol records its expression. Any other op asks the
symbol for an attribute that it lacks, which raises an error that names the op.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from tensorgrad.core.dtypes import SCALARS, Dtype, bool_, compute_dtype, float64, is_float
from tensorgrad.core.errors import ArgumentError, DtypeError
from tensorgrad.core.modes import mode, replaced
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels.expression import Expressions

if TYPE_CHECKING:
    from tensorgrad.ops.elementwise.row import Row

_ALLOWED = "elementwise ops: arithmetic, comparisons, where, clip, activations, casts to floats"

_BITWISE = {  # their meaning for bool
    "bitwise_and": "logical_and", "bitwise_or": "logical_or", "bitwise_xor": "logical_xor",
    "invert": "logical_not", "left_shift": "", "right_shift": "",
}  # fmt: skip
_NUMBERS = {"b": bool, "i": int, "f": float}  # a result of Python numbers is one itself


class Trace:
    """The expressions of one function of symbols; f is the function, for errors.

    Attributes:
        expressions: all expressions.
        kinds: the dtypes, and types of Python numbers, that the function used.
    """

    def __init__(self, f: Callable[..., Any]) -> None:
        self.name: str = getattr(f, "__name__", type(f).__name__).lstrip("_") or "function"
        self.expressions = Expressions()
        self.kinds: list[Any] = []

    def symbol(self, name: str, kind: Any) -> Symbol:
        """Return a symbol for an argument of a dtype, or of a Python number's type."""
        self.kinds.append(kind)
        return Symbol(self, self.expressions.name(name), kind, stored=kind not in SCALARS)

    def run(
        self, f: Callable[..., Tensor], symbols: Sequence[Symbol], constants: dict[str, Any]
    ) -> Tensor:
        """Call the function; record its derivative under `no_grad` too, for later calls."""
        with replaced(mode, grad_enabled=True):
            return f(*[Tensor(s) for s in symbols], **constants)

    def apply(self, row: Row, operands: Sequence[Any], dtype: Dtype) -> Symbol:
        """Return the value of a row of the table."""
        op, names = row.name, row.operands
        self.refuse_arrays(op, names, operands)
        table = {n: self._operand(n, o) for n, o in zip(names, operands, strict=True)}
        kind = dtype if any(_is_array(o) for o in operands) else _NUMBERS[dtype.kind]
        expression = self.expressions.parse(row.text, table)
        if op == "add" and kind in (bool, bool_):  # True + True is True, where 1 + 1 would be 2
            expression = self.expressions.node("!=", expression, self.expressions.number(0))
        if op in _BITWISE:
            expression = self._bits(op, list(table.values()), kind)
        self.kinds.append(kind)
        if mode.grad_enabled:
            expression = self.expressions.row(row, expression, *table.values())
        else:
            expression = self.expressions.row(None, expression)
        return Symbol(self, expression, kind)

    def cast(self, x: Symbol, dtype: Dtype) -> Symbol:
        """Return x in a wider or narrower float type; only the result of all is rounded."""
        if not is_float(dtype):
            raise DtypeError(
                f"fuse: {self.name} casts to {dtype}, expected a float type; allowed are {_ALLOWED}"
            )
        self.kinds.append(dtype)
        wide = dtype == float64
        node = self.expressions.node("float64" if wide else "float32", x.expression)
        expression = node if wide or not x.is_float else x.expression
        if not mode.grad_enabled:
            expression = self.expressions.row(None, expression)
        return Symbol(self, expression, dtype)

    def compute_dtype(self) -> Dtype:
        """Return what a kernel computes in: what all dtypes and numbers promote to."""
        kinds = [k(1) if k in SCALARS else compute_dtype(k) for k in self.kinds]
        return np.result_type(*kinds)

    def refuse_arrays(self, op: str, names: Sequence[str], operands: Sequence[Any]) -> None:
        """Raise when an operand comes from outside the function."""
        for name, operand in zip(names, operands, strict=True):
            if type(operand) is not Symbol and hasattr(operand, "shape") and operand.shape:
                raise ArgumentError(
                    f"fuse: {self.name} uses {op} with {name} of shape {operand.shape} that is "
                    "not one of its arguments, expected arguments and numbers"
                )

    def refuse_parameters(self, op: str, names: Sequence[str], inputs: Sequence[Tensor]) -> None:
        """Raise when an operand from outside the function wants a gradient: it would get none."""
        for name, tensor in zip(names, inputs, strict=True):
            if tensor.requires_grad:
                raise ArgumentError(
                    f"fuse: {self.name} uses {op} with {name}, a tensor that requires a gradient "
                    "and is not one of its arguments, expected arguments and numbers"
                )

    def refuse(self, what: str) -> NoReturn:
        """Raise ArgumentError for an attribute that symbols lack, naming the op that uses it."""
        frames, frame = [], sys._getframe(2)
        while frame is not None and frame.f_code is not Trace.run.__code__:
            frames.append(frame)
            frame = frame.f_back  # type: ignore[assignment]  # None at the end
        inside = frames[:-1] or frames  # the last is the function itself
        ops = [f for f in inside if f.f_globals.get("__name__", "").startswith("tensorgrad.")]
        name = ops[-1].f_code.co_name if ops else what
        raise ArgumentError(f"fuse: {self.name} uses {name}, expected {_ALLOWED}")

    def _bits(self, op: str, operands: list[int], kind: Any) -> int:
        """Return the expression of an op on bits, whose operands may be held as floats."""
        node = self.expressions.node
        if kind in (bool, bool_):
            return node(_BITWISE[op], *operands)
        return node("number", node(op, *[node("int64", operand) for operand in operands]))

    def _operand(self, name: str, operand: Any) -> int:
        """Return the expression of an operand."""
        if type(operand) is not Symbol:
            number = operand if type(operand) in SCALARS else operand.item()
            self.kinds.append(type(number) if type(operand) in SCALARS else operand.dtype)
            return self.expressions.number(number)
        if operand.dtype in (bool_, bool) and name != "c":  # a number to compute with
            return self.expressions.node("number", operand.expression)
        return operand.expression


def _is_array(operand: Any) -> bool:
    """Whether an operand decides the dtype, as Python numbers do not."""
    return type(operand) not in SCALARS and operand.dtype not in SCALARS


class Symbol:
    """A value that is computed later.

    Attributes:
        trace: the trace that it belongs to.
        expression: its index among those of the trace.
        dtype: the dtype that it will have, or the type of a Python number.
        stored: whether it is an array in memory, rounded to its dtype; values computed on the way
            are not rounded.
    """

    __slots__ = ("dtype", "expression", "stored", "trace")
    __array_ufunc__ = None  # makes NumPy's operators raise an error

    def __init__(self, trace: Trace, expression: int, dtype: Any, stored: bool = False) -> None:
        self.trace = trace
        self.expression = expression
        self.dtype = dtype
        self.stored = stored

    @property
    def is_float(self) -> bool:
        """Whether a gradient flows here."""
        return self.dtype not in SCALARS and is_float(self.dtype)

    def astype(self, dtype: Dtype) -> Symbol:
        """Return the value in another dtype."""
        return self.trace.cast(self, dtype)

    def detached(self) -> Symbol:
        """Return the same value, through which no gradient flows."""
        constant = self.trace.expressions.row(None, self.expression)
        return Symbol(self.trace, constant, self.dtype, self.stored)

    def __bool__(self) -> bool:
        raise ArgumentError(
            f"fuse: {self.trace.name} asks whether an element is true, expected "
            "where(condition, a, b) in place of `if`, `and` and `or`"
        )

    def __getattr__(self, name: str) -> NoReturn:
        self.trace.refuse(name)

    def _refuse(self, *_: Any) -> NoReturn:
        self.trace.refuse("it")

    __array__ = __float__ = __getitem__ = __index__ = __int__ = __iter__ = __len__ = _refuse
