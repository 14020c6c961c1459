"""Elementwise ops as rows of a table: value and gradients, each one expression.

    MULTIPLY = Row("multiply", "a b", "a * b", "dy * b", "dy * a")

The expressions are Python: NumPy evaluates them block by block on all cores, and
kernels/elementwise.py compiles one CUDA kernel for the value and one for all gradients (device
functions: kernels/elementwise.cuh). Backward saves only what the gradient expressions name. `fuse`
turns whole functions into rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.core import backend, instrument
from tensorgrad.core.arrays import not_an_operand
from tensorgrad.core.backend import BLOCK, Array
from tensorgrad.core.checks import note_widening
from tensorgrad.core.dtypes import (
    SCALARS,
    Dtype,
    bool_,
    compute_dtype,
    float64,
    int64,
    is_complex,
    is_float,
)
from tensorgrad.core.errors import ArgumentError, DtypeError, GradError, ShapeError, TensorgradError
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.operands import array_beside
from tensorgrad.core.record import record
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.kernels.elementwise import launch
from tensorgrad.kernels.expression import ROWS, Expressions, Formula
from tensorgrad.ops.elementwise.blocks import evaluate
from tensorgrad.ops.elementwise.trace import Symbol

_NDARRAY = np.ndarray
# Rows whose value may jump where a number beside 16 bits is rounded or not.
_JUMPS = {
    *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
    *("floor_divide", "remainder", "fmod"),
}
_FUSED_BLOCK = BLOCK // 2  # elements; fused expressions have more temporaries


class _Gradients(NamedTuple):
    """How to compute the gradients of some of the operands."""

    whole: Callable[..., tuple[Any, ...]]  # returns one for each operand, None where not wanted
    formula: Formula  # the distinct gradients that are not dy itself
    function: Callable[..., tuple[Any, ...]]  # the same on NumPy
    indices: tuple[int | None, ...]  # for each operand: into these; -1 is dy, None unwanted
    sources: tuple[int | None, ...]  # for each of these: the saved operand, if only one takes it


class Row:
    """An elementwise op; call it with tensors, arrays or Python numbers.

    Args:
        name: as in the public function, for errors.
        operands: names of the operands, separated by blanks. An operand called `c` is a
            condition: it is tested, not computed with.
        value: expression of the operands.
        gradients: one per operand, expressions of dy, the operands and y (the value); "" where
            there is no gradient.
        tangents: the gradients in a form whose derivatives are right too, from what those save;
            default: the gradients. A gradient that takes a harmless operand in place of 0 lacks
            derivatives there.
    """

    tangents: tuple[str, ...]

    def __init__(
        self, name: str, operands: str, value: str, *gradients: str, tangents: tuple[str, ...] = ()
    ) -> None:
        self.name, self.operands = name, operands.split()
        self.text, self.gradients = value, gradients
        self.tangents = tangents or gradients
        ROWS.setdefault(value, self)
        self.__class__ = _UnparsedRow

    def _parse(self) -> None:
        expressions = Expressions()
        table = {n: expressions.name(n) for n in (*self.operands, "y", "dy")}
        value = [expressions.parse(self.text, table)]
        self._set(
            self.operands,
            Formula(self.name, self.operands, expressions, value),
            [expressions.parse(g, table) if g else None for g in self.gradients],
            [expressions.parse(g, table) if g else None for g in self.tangents],
        )
        self._small = self._block = BLOCK

    @classmethod
    def composed(
        cls,
        operands: list[str],
        value: Formula,
        gradients: Sequence[int | None],
        tangents: Sequence[int | None],
        dtype: Dtype,
        compute: Dtype,
        mixed: bool,
    ) -> Row:
        """Return the row of a formula with results of `dtype`, computed in `compute`.

        Args:
            operands: names for errors; those of the formula may differ.
            value: the formula.
            gradients, tangents: one per operand, expressions of dy and the formula's parameters, or
                None; see `Row`.
            dtype, compute: of the value, and of the kernels.
            mixed: whether some operands are arrays of another dtype, to be converted on the CPU.
        """
        row = cls.__new__(cls)
        row._set(operands, value, gradients, tangents)
        row._dtype, row._compute = dtype, compute
        row._small = -1  # NumPy's own promotion may give another dtype
        row._upcast = compute if mixed else None
        row._block = _FUSED_BLOCK
        return row

    def _set(
        self,
        operands: list[str],
        value: Formula,
        gradients: Sequence[int | None],
        tangents: Sequence[int | None],
    ) -> None:
        name, expressions = value.name, value.expressions
        self.name = name
        self.operands = operands
        self._formula = value
        self._value = value.value()
        self._dtype: Dtype | None = None
        self._compute: Dtype | None = None
        self._upcast: Dtype | None = None  # dtype that operands are converted to
        self._wanted, self._tangents = gradients, tangents
        self._dy = expressions.name("dy")
        named = expressions.names([g for g in gradients if g is not None])
        self._saved = [n for n in (*value.parameters, "y") if n in named]
        self._keep = Formula(
            name, [*value.parameters, "y"], expressions, [expressions.name(n) for n in self._saved]
        ).function()
        self._differentiable = any(g is not None for g in gradients)
        self._types: dict[tuple[Any, ...], tuple[Dtype, Dtype, bool]] = {}
        self._gradients: dict[tuple[bool, ...], _Gradients] = {}
        self._tangent_rows: dict[Any, Row] = {}
        self._warns = True  # where the result is wider than the floats
        self._all_gradients: _Gradients | None = None  # where every gradient is wanted
        self._bound_backward = self._backward
        self._leading = 1 if value.parameters[0] == "c" else 0

    def __call__(self, *operands: Any) -> Tensor:
        """Return the result, broadcast as NumPy does, in the dtype that NumPy promotes to."""
        if instrument.observer is not None:
            instrument.observer.enter(self.name)
        inputs: Any = operands
        arrays: list[Any] = []
        for operand in operands:
            if not isinstance(operand, Tensor):
                operand = _constant(self, len(arrays), operands)
                inputs = list(inputs)
                inputs[len(arrays)] = operand
            arrays.append(operand.data)
        first = arrays[self._leading]
        try:
            if type(first) is _NDARRAY and first.size <= self._small and first.itemsize != 2:
                y = self._value(*arrays)
                if y.dtype is not first.dtype and self._differentiable:
                    self._note_widening(y, arrays)
            else:
                y = self._forward(arrays)
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            self._explain(arrays, error)
            raise
        if type(y) is not _NDARRAY:
            if type(y) is Symbol:
                y.trace.refuse_parameters(self.name, self.operands, inputs)
                return Tensor(y)
            if not backend.is_array(y):
                y = np.asarray(y)  # 0-d results come as scalars
            elif type(first) is _NDARRAY:  # CuPy took over the operation on NumPy's operand
                self._explain(arrays, TypeError("operands are on two devices"))
        if not self._differentiable:
            return Tensor(y)
        saved = self._keep(*arrays, y) if self._saved else ()
        return record(self.name, y, inputs, self._bound_backward, saved)

    def _forward(self, arrays: list[Any]) -> Array | Symbol:
        for array in arrays:
            if type(array) is not _NDARRAY:
                if backend.is_array(array):
                    return self._forward_cuda(arrays)
                if type(array) is Symbol:
                    kinds = [_kind(a) for a in arrays]
                    dtype = _result_dtype(self._value, self._leading, *kinds)
                    return array.trace.apply(self, arrays, dtype)
        kinds = [_kind(array) for array in arrays]
        dtype = self._dtype or _result_dtype(self._value, self._leading, *kinds)
        operands = arrays
        if self._upcast is not None:
            operands = _computable(arrays, self._upcast)
        y = evaluate(lambda *a: (self._value(*a),), operands, [dtype], self._block)[0]
        self._note_widening(y, arrays)
        return y

    def _note_widening(self, y: Array, arrays: list[Any]) -> None:
        """Warn where integers beside narrower floats made the result float64."""
        if self._warns and backend.is_array(y) and y.dtype is float64 and y.ndim:
            operands = arrays[self._leading :]
            note_widening(self.name, [a.dtype for a in operands if type(a) not in SCALARS])

    def _backward(self, dy: Array, saved: Saved, needs: Needs) -> Gradients:
        arrays: Sequence[Any]
        gradients = self._all_gradients if False not in needs else None
        if gradients is None:
            gradients = self._gradients_of(tuple(map(bool, needs)))
        if type(dy) is _NDARRAY and dy.size <= self._small and dy.itemsize != 2:
            return gradients.whole(dy, *saved)
        arrays = (dy, *saved)
        dtypes = [dy.dtype] * len(gradients.sources)
        for i, source in enumerate(gradients.sources):
            operand: Any = None if source is None else saved[source]
            if backend.is_array(operand) and operand.shape == dy.shape:
                dtypes[i] = operand.dtype
        if type(dy) is _NDARRAY:
            if self._upcast is not None:
                arrays = _computable(arrays, self._upcast)
            computed = evaluate(gradients.function, arrays, dtypes, self._block)
        else:
            computed = [backend.empty(dy.shape, dtype, like=dy) for dtype in dtypes]
            if computed:
                compute = self._compute or compute_dtype(dy.dtype)
                try:
                    launch(gradients.formula, arrays, computed, compute)
                except (DtypeError, AttributeError):
                    # Complex arrays or numbers: the engine names the input that would get them.
                    computed = list(gradients.function(*arrays))
        return [None if p is None else dy if p < 0 else computed[p] for p in gradients.indices]

    def tangent(
        self,
        tangents: Sequence[Tensor | None],
        operands: Sequence[Any],
        dtype: Dtype,
        y: Tensor | None = None,
    ) -> Tensor | None:
        """Return the tangent of a result; None where it is constant.

        Args:
            tangents: of the operands, None for one that is constant.
            operands: tensors and numbers; only those that the row saves matter.
            dtype: of the result.
            y: the result, if the row saves it.
        """
        pairs = zip(tangents, self._tangents, strict=True)
        given = tuple([t is not None and gradient is not None for t, gradient in pairs])
        known = [t for t, is_given in zip(tangents, given, strict=True) if is_given]
        if not known:
            return None
        if [g for g, is_given in zip(self._tangents, given, strict=True) if is_given] == [self._dy]:
            return known[0]
        values = {**dict(zip(self._formula.parameters, operands, strict=True)), "y": y}
        taken = [*known, *[values[name] for name in self._saved]]
        others = frozenset([x.data.dtype for x in taken if isinstance(x, Tensor)]) - {bool_, dtype}
        key = given, dtype, others
        row = self._tangent_rows.get(key)
        if row is None:
            row = self._tangent_rows[key] = self._new_tangent_row(*key)
        return row(*taken)

    def result(self, y: Array, *operands: Tensor) -> Tensor:
        """Record a result that another kernel has computed."""
        saved = self._keep(*[x.data for x in operands], y)
        return record(self.name, y, operands, self._bound_backward, saved)

    def _new_tangent_row(
        self, given: tuple[bool, ...], dtype: Dtype, others: frozenset[Dtype]
    ) -> Row:
        """Return the row of the tangent.

        Args:
            given: for each operand, whether its tangent is one of the row's; what is saved follows.
            dtype: of the result.
            others: further dtypes of operands.
        """
        parameters = self._formula.parameters
        taken = {*parameters, "y", "dy"}
        value = _new_name("value", taken)
        expressions = Expressions()  # not this row's: other threads may read those
        known, total = [], None
        for parameter, gradient, is_given in zip(parameters, self._tangents, given, strict=True):
            if gradient is None or not is_given:
                continue
            known.append(_new_name(f"t_{parameter}", taken))
            names = {"dy": expressions.name(known[-1]), "y": expressions.name(value)}
            term = expressions.copied(self._formula.expressions, gradient, names)
            total = term if total is None else expressions.node("+", total, term)
        assert total is not None
        operands = [*known, *[value if name == "y" else name for name in self._saved]]
        formula = Formula(f"{self.name}_tangent", operands, expressions, [total])
        gradients = expressions.gradients(total, operands)
        compute = compute_dtype(dtype)
        mixed = any([compute_dtype(other) != compute for other in others])
        row = Row.composed(operands, formula, gradients, gradients, dtype, compute, mixed)
        row._small = -1 if others else BLOCK
        row._warns = False  # the op itself has warned
        return row

    def _gradients_of(self, needs: tuple[bool, ...]) -> _Gradients:
        """Work out, once, how to compute the gradients that are needed."""
        if needs in self._gradients:
            return self._gradients[needs]
        formula = self._formula
        expressions = formula.expressions
        dy = expressions.name("dy")
        wanted = [g if need else None for g, need in zip(self._wanted, needs, strict=True)]
        computed = list(dict.fromkeys(g for g in wanted if g is not None and g != dy))
        # Gradients of several operands are in the dtype of dy: theirs may differ.
        owners = [
            formula.parameters[wanted.index(g)] if wanted.count(g) == 1 else "" for g in computed
        ]
        name, parameters = f"{self.name}_backward", ["dy", *self._saved]
        distinct = Formula(name, parameters, expressions, computed)
        gradients = self._gradients[needs] = _Gradients(
            Formula(name, parameters, expressions, wanted).function(),
            distinct,
            distinct.function(),
            tuple([None if g is None else -1 if g == dy else computed.index(g) for g in wanted]),
            tuple([self._saved.index(n) if n in self._saved else None for n in owners]),
        )
        if all(needs):
            self._all_gradients = gradients
        return gradients

    def _forward_cuda(self, arrays: list[Any]) -> Array:
        kinds: list[Any] = []
        given = []
        alike = True
        for array in arrays:
            if type(array) in SCALARS:
                kinds.append(type(array))
                continue
            kinds.append(array.dtype)
            given.append(array)
            if array.shape != given[0].shape:
                alike = False
            if type(array) is _NDARRAY:
                self._explain(arrays, TypeError("operands are on two devices"))
        try:
            dtype, compute, widens = self._types[tuple(kinds)]
        except KeyError:
            if any([np.dtype(kind).kind == "c" for kind in kinds]):
                return self._value(*arrays)  # NumPy's functions hand complex arrays to CuPy
            dtype = self._dtype or _result_dtype(self._value, self._leading, *kinds)
            compute = self._compute or _compute_type(dtype, arrays)
            widens = dtype == float64 and float64 not in kinds
            self._types[tuple(kinds)] = dtype, compute, widens
        shape = given[0].shape if alike else np.broadcast_shapes(*[a.shape for a in given])
        y = backend.empty(shape, dtype, like=given[0])
        if widens:
            self._note_widening(y, arrays)
        try:
            launch(self._formula, arrays, [y], compute)
        except OverflowError:
            if dtype != bool_:
                raise
            # Integers compared with a number beyond their range: infinity compares alike.
            far = [math.copysign(math.inf, a) if type(a) is int else a for a in arrays]
            launch(self._formula, far, [y], float64)
        return y

    def _explain(self, arrays: list[Any], error: Exception) -> None:
        """Raise an error that names the operands where their devices, shapes or dtypes differ."""
        if isinstance(error, TensorgradError):
            return
        named = [
            (n, a) for n, a in zip(self.operands, arrays, strict=True) if type(a) not in SCALARS
        ]
        for array in arrays:
            if type(array) is Symbol:
                array.trace.refuse_arrays(self.name, self.operands, arrays)
                self._explain_dtypes(named, error)
                return
        if len({backend.is_numpy(a) for _, a in named if backend.is_array(a)}) > 1:
            backend.same_device(self.name, *zip(*named, strict=True))
        try:
            np.broadcast_shapes(*[a.shape for _, a in named])
        except ValueError:
            got = ", ".join(f"{name} has shape {a.shape}" for name, a in named)
            raise ShapeError(f"{self.name}: {got}, expected shapes that broadcast") from error
        self._explain_dtypes(named, error)
        got = ", ".join(
            f"{n} is {a}" if type(a) in SCALARS else f"{n} has dtype {a.dtype}"
            for n, a in zip(self.operands, arrays, strict=True)
        )
        raise ArgumentError(
            f"{self.name}: {got}, expected numbers that it is defined for: {error}"
        ) from error

    def _explain_dtypes(self, named: Sequence[tuple[str, Any]], error: Exception) -> None:
        if isinstance(error, TypeError) and named:
            got = ", ".join(f"{name} has dtype {a.dtype}" for name, a in named)
            raise DtypeError(f"{self.name}: {got}, expected dtypes it is defined for") from error


@tangent_of(Row._backward)
def _tangent(op: Op, *tangents: Tensor | None) -> Tensor | None:
    row: Row = op.node.backward.__self__  # type: ignore[attr-defined]
    if is_complex(op.node.dtype):
        raise GradError(
            f"{row.name}: the tangent of a result of {op.node.dtype}, expected real numbers: "
            "complex ones carry no gradient; use detach()"
        )
    saved = dict(zip(row._saved, op.saved, strict=True))
    operands = [saved.get(name) for name in row._formula.parameters]
    for i, value in enumerate(operands):
        if backend.is_array(value):
            operands[i] = op.input(i, value)
    y = op.output(saved["y"]) if "y" in saved else None
    return row.tangent(tangents, operands, op.node.dtype, y)


class _UnparsedRow(Row):
    """A row until its first use: of all rows, a program calls a few.

    A class of its own, as attributes of a class with `__getattr__` are slow to read.
    """

    def __getattr__(self, attribute: str) -> Any:
        self._parse()
        self.__class__ = Row  # type: ignore[assignment]
        return object.__getattribute__(self, attribute)


class UnaryOp(Protocol):
    """An op of one operand."""

    def __call__(self, x: ArrayLike) -> Tensor:
        """Return the result in the shape of x."""


class BinaryOp(Protocol):
    """An op of two operands."""

    def __call__(self, a: ArrayLike, b: ArrayLike) -> Tensor:
        """Return the result in the shape that a and b broadcast to."""


def unary(
    name: str,
    returns: str,
    example: str,
    value: str,
    dx: str = "",
    raises: str = "",
    tangent: str = "",
) -> UnaryOp:
    """Return a row with one operand as a function.

    Args:
        name: of the function.
        returns: what it returns, for its docstring, which also shows the expressions.
        example: literal arguments and the list that they give, "[0, 1] -> [1.0, 2.718...]".
        value, dx: expressions, see `Row`.
        raises: the errors of its own.
        tangent: dx in a form to be differentiated in turn, see `Row`.
    """
    row = Row(name, "x", value, dx, tangents=(tangent,) if tangent else ())

    def op(x: Any) -> Tensor:
        return row(x)

    _describe(op, row, returns, example, raises)
    return op


def binary(
    name: str,
    returns: str,
    example: str,
    value: str,
    da: str = "",
    db: str = "",
    raises: str = "",
    tangents: tuple[str, ...] = (),
) -> BinaryOp:
    """Return a row with two operands as a function; its arguments are those of `unary`."""
    row = Row(name, "a b", value, da, db, tangents=tangents)

    def op(a: Any, b: Any) -> Tensor:
        return row(a, b)

    _describe(op, row, returns, example, raises)
    return op


_ONE = "x: any shape; a tensor, array or number.", "The shape of x"
_TWO = "a, b: tensors, arrays or numbers that broadcast.", "The shape that a and b broadcast to"


def _describe(op: Any, row: Row, returns: str, example: str, raises: str) -> None:
    """Give a function the name and docstring of its row."""
    op.__name__ = op.__qualname__ = row.name
    op.__module__ = "tensorgrad.ops.elementwise"
    arguments, shape = _ONE if len(row.operands) == 1 else _TWO
    dtype = "bool" if returns.startswith("whether ") else "the dtype that NumPy promotes to"
    each = zip(row.operands, row.gradients, strict=True)
    gradients = ", ".join([f"d{name} = {gradient}" for name, gradient in each if gradient])
    errors = f"Raises:\n    {raises}\n\n" if raises else ""
    call, result = example.split(" -> ")
    op.__doc__ = (
        f"Return {returns}.\n\nFormula: y = {row.text}\nGradient: {gradients or 'none'}\n\n"
        f"Args:\n    {arguments}\n\nReturns:\n    {shape}, in {dtype}.\n\n{errors}"
        f"Example:\n    >>> tg.{row.name}({call}).tolist()\n    {result}\n"
    )


class _Constant:
    """An operand that is not a tensor: a Python number, a NumPy scalar or an array."""

    __slots__ = ("data",)
    requires_grad = False
    node = None

    def __init__(self, data: Any) -> None:
        self.data = data


def _rounded(number: float, other: Any) -> float:
    """Return a number as the 16-bit dtype of the other operand has it; others as they are.

    0.1 equals float16's 0.1, as in NumPy. Numbers beyond the range of the dtype stay finite.
    """
    data = other.data if isinstance(other, Tensor) else other
    dtype = data.dtype if type(data) is not Symbol or data.stored else None
    if dtype is None or dtype.itemsize != 2 or not is_float(dtype):
        return number
    with np.errstate(over="ignore"):
        rounded = float(np.asarray(number, dtype))
    return rounded if math.isfinite(rounded) else number


def _new_name(name: str, taken: set[str]) -> str:
    """Return a name that is not taken yet, and take it."""
    while name in taken:
        name = f"{name}_"
    taken.add(name)
    return name


def _constant(row: Row, place: int, operands: Sequence[Any]) -> Any:
    """Return one of the operands of a row that is not a tensor."""
    operand = operands[place]
    if type(operand) in SCALARS:
        other = operands[1 - place] if row.name in _JUMPS else None
        if type(operand) in (int, float) and hasattr(other, "dtype"):
            return _Constant(_rounded(operand, other))
        return _Constant(operand)
    if isinstance(operand, np.generic) or backend.is_array(operand):
        if operand.dtype.kind == "O":  # NumPy would compute with objects
            raise DtypeError(f"{row.name}: got an array of {operand.dtype}, expected numbers")
        if isinstance(operand, np.ndarray):
            operand = np.asarray(operand)  # without its subclass, which would pass for CuPy's
        return _Constant(operand)
    name = "condition" if row.operands[place] == "c" else row.operands[place]
    if isinstance(operand, (list, tuple)):  # conditions do not take part in promotion
        return _Constant(array_beside(row.name, name, operand, *operands[row._leading :]))
    raise not_an_operand(row.name, name, operand)


def _computable(arrays: Sequence[Any], compute: Dtype) -> list[Any]:
    """Return the operands in the compute dtype: no integer wraps around where others are floats."""
    return [
        a if type(a) in SCALARS or a.dtype in (compute, np.bool_) else a.astype(compute)
        for a in arrays
    ]


def _kind(array: Any) -> Any:
    """Return what promotion depends on: the type of a Python number, the dtype of an array."""
    return type(array) if type(array) in SCALARS else array.dtype


@lru_cache(maxsize=4096)
def _result_dtype(function: Callable[..., Array], conditions: int, *kinds: Any) -> Dtype:
    """Return the dtype that NumPy promotes to; a 16-bit float where all float operands are.

    The first operands may be conditions, which do not take part in promotion.
    """
    examples = [kind(1) if kind in SCALARS else np.ones(1, compute_dtype(kind)) for kind in kinds]
    with np.errstate(all="ignore"):
        dtype = np.asarray(function(*examples)).dtype
    kinds = kinds[conditions:]
    halves = [kind for kind in kinds if kind not in SCALARS and compute_dtype(kind) != kind]
    if dtype != np.float32 or not halves:
        return dtype
    arrays = [kind for kind in kinds if kind not in SCALARS and kind != np.bool_]
    try:
        return np.result_type(*arrays) if arrays else dtype
    except TypeError:  # NumPy's ufuncs make float32 of bfloat16 with float16 or int16
        return dtype


def _compute_type(dtype: Dtype, arrays: list[Any]) -> Dtype:
    """Return the type a kernel computes in: the result's, or the operands' for a comparison."""
    if dtype != np.bool_:
        return compute_dtype(dtype)
    kinds = [a.dtype for a in arrays if type(a) not in SCALARS]
    numbers = [type(a)(1) for a in arrays if type(a) in SCALARS]
    if int in map(type, numbers) and all(k.kind in "iu" and k.itemsize < 8 for k in kinds):
        return int64  # it holds numbers that their dtype lacks, such as -1 with uint8
    return compute_dtype(np.result_type(*kinds, *numbers))
