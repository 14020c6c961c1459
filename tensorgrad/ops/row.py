"""Elementwise ops as rows of a table. Device functions: kernels/elementwise.cuh.

A row holds an op's value and its gradients as expressions, each written once:

    MULTIPLY = Row("multiply", "a b", "a * b", "dy * b", "dy * a")

The expressions are Python, so NumPy evaluates them as they stand; for the GPU they are
translated, operator by operator, to a line of CUDA inside a `cupy.ElementwiseKernel`. What
backward needs is what the gradient expressions name, and only that is saved.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad import backend, kernels
from tensorgrad.autograd import record
from tensorgrad.backend import BLOCK, Array
from tensorgrad.dtypes import Dtype, c_name, compute_dtype, is_float
from tensorgrad.errors import DtypeError, ShapeError
from tensorgrad.ops import special
from tensorgrad.tensor import Tensor

# Names that expressions may call; kernels/elementwise.cuh defines the same ones.
_FUNCTIONS: dict[str, Any] = {
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "erf": special.erf,
    "sigmoid": special.sigmoid,
    "softplus": special.softplus,
    "gelu_tanh": special.gelu_tanh,
    "gelu_tanh_slope": special.gelu_tanh_slope,
    "power": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "absolute": np.absolute,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "rint": np.rint,
    "is_nan": np.isnan,
    "is_inf": np.isinf,
    "is_finite": np.isfinite,
    "where": np.where,
    "both": np.logical_and,
    "either": np.logical_or,
    "differ": np.logical_xor,
    "inverted": np.logical_not,
}
_DEVICE_FUNCTIONS = (Path(kernels.__file__).parent / "elementwise.cuh").read_text()
_NDARRAY = np.ndarray
_SCALARS = frozenset((bool, int, float))


class Row:
    """One elementwise op; call it with tensors, arrays or Python numbers.

    Args:
        name: as in the public function, for errors.
        operands: names of the operands, separated by blanks. An operand called `c` is a
            condition: it is tested, not computed with.
        value: expression of the operands.
        gradients: one per operand, expressions of dy, the operands and y (the value); "" where
            there is no gradient.
    """

    def __init__(self, name: str, operands: str, value: str, *gradients: str) -> None:
        self.name = name
        self.operands = operands.split()
        self.value = value
        self.gradients = gradients
        named = {name for g in gradients for name in _names(g)}
        self.saved = [n for n in (*self.operands, "y") if n in named]
        self._value = _python(value, self.operands)
        self._keep = _python(f"({''.join(n + ', ' for n in self.saved)})", [*self.operands, "y"])
        self._gradients = [_python(g, ["dy", *self.saved]) if g else None for g in gradients]
        self._differentiable = any(gradients)
        self._bound_backward = self._backward
        self._leading = 1 if self.operands[0] == "c" else 0

    def __call__(self, *operands: Any) -> Tensor:
        """Return the result, broadcast as NumPy does, in the dtype that NumPy promotes to."""
        inputs = []
        arrays = []
        for operand in operands:
            tensor = operand if isinstance(operand, Tensor) else _constant(self.name, operand)
            inputs.append(tensor)
            arrays.append(tensor.data)
        first = arrays[self._leading]
        try:
            if type(first) is _NDARRAY and first.size <= BLOCK and first.itemsize != 2:
                y = self._value(*arrays)
            else:
                y = self._forward(arrays)
        except (ValueError, TypeError) as error:
            self._explain(arrays, error)
            raise
        if type(y) is not _NDARRAY and not backend.is_array(y):
            y = np.asarray(y)  # 0-d results come as scalars
        if not self._differentiable:
            return Tensor(y)
        saved = self._keep(*arrays, y) if self.saved else ()
        return record(self.name, y, inputs, self._bound_backward, saved)

    def _forward(self, arrays: list[Any]) -> Array:
        for array in arrays:
            if type(array) is not _NDARRAY and backend.is_array(array):
                return self._forward_cuda(arrays)
        return _forward_numpy(self._value, arrays)

    def _backward(
        self, dy: Array, saved: tuple[Any, ...], needs: Sequence[bool]
    ) -> list[Array | None]:
        if type(dy) is not _NDARRAY:
            return self._backward_cuda(dy, saved, needs)
        if dy.size <= BLOCK:
            return [
                gradient(dy, *saved) if need and gradient else None
                for gradient, need in zip(self._gradients, needs)  # noqa: B905  # as many
            ]
        return [
            _blocked(gradient, (dy, *saved)) if need and gradient else None
            for gradient, need in zip(self._gradients, needs, strict=True)
        ]

    def _forward_cuda(self, arrays: list[Any]) -> Array:
        gpu = [a for a in arrays if type(a) not in _SCALARS]
        names = [n for n, a in zip(self.operands, arrays, strict=True) if type(a) not in _SCALARS]
        backend.same_device(self.name, names, gpu)
        dtype = _result_dtype(self._value, *[_kind(a) for a in arrays])
        y = backend.empty(np.broadcast_shapes(*[a.shape for a in gpu]), dtype, like=gpu[0])
        compute = _compute_type(dtype, arrays)
        kernel = _kernel(
            self.name, _declare(self.operands, arrays, compute), (self.value,), compute
        )
        kernel(*_typed(arrays, compute), y)
        return y

    def _backward_cuda(
        self, dy: Array, values: tuple[Any, ...], needs: Sequence[bool]
    ) -> list[Array | None]:
        wanted = [bool(need and g) for need, g in zip(needs, self.gradients, strict=True)]
        expressions = tuple(
            [g for g, want in zip(self.gradients, wanted, strict=True) if want and g != "dy"]
        )
        computed: list[Array] = [backend.empty_like(dy) for _ in expressions]
        if expressions:
            names = ["dy", *self.saved]
            compute = compute_dtype(dy.dtype)
            declared = _declare(names, (dy, *values), compute)
            kernel = _kernel(f"{self.name}_backward", declared, expressions, compute)
            kernel(*_typed((dy, *values), compute), *computed)
        results = iter(computed)
        return [
            None if not want else dy if g == "dy" else next(results)
            for g, want in zip(self.gradients, wanted, strict=True)
        ]

    def _explain(self, arrays: list[Any], error: Exception) -> None:
        """Raise what names the operands when their shapes or dtypes do not fit."""
        named = [
            (n, a) for n, a in zip(self.operands, arrays, strict=True) if type(a) not in _SCALARS
        ]
        if len({backend.is_numpy(a) for _, a in named if backend.is_array(a)}) > 1:
            backend.same_device(self.name, *zip(*named, strict=True))
        try:
            np.broadcast_shapes(*[a.shape for _, a in named])
        except ValueError:
            got = ", ".join(f"{name} has shape {a.shape}" for name, a in named)
            raise ShapeError(f"{self.name}: {got}, expected shapes that broadcast") from error
        if isinstance(error, TypeError):
            got = ", ".join(f"{name} has dtype {a.dtype}" for name, a in named)
            raise DtypeError(f"{self.name}: {got}, expected dtypes it is defined for") from error


def _forward_numpy(function: Callable[..., Array], arrays: Sequence[Any]) -> Array:
    """Evaluate; 16-bit floats compute in float32 and are rounded once."""
    for array in arrays:
        if type(array) is np.ndarray and array.dtype.itemsize == 2 and is_float(array.dtype):
            dtype = _result_dtype(function, *[_kind(a) for a in arrays])
            y = _blocked(function, [_widen(a) for a in arrays])
            return y if y.dtype == dtype else y.astype(dtype)
    return _blocked(function, arrays)


def _widen(array: Any) -> Any:
    return array if type(array) in _SCALARS else array.astype(compute_dtype(array.dtype))


def _blocked(function: Callable[..., Array], arrays: Sequence[Any]) -> Array:
    """Evaluate in blocks on all cores where the arrays are large and laid out alike."""
    shape = None
    for array in arrays:
        if type(array) is np.ndarray:
            if array.size <= BLOCK or not array.flags.c_contiguous:
                return function(*arrays)
            if shape is None:
                shape = array.shape
            elif array.shape != shape:
                return function(*arrays)
    if shape is None:
        return function(*arrays)
    flat = [a.reshape(-1) if type(a) is np.ndarray else a for a in arrays]
    head = function(*[a[:1] if type(a) is np.ndarray else a for a in flat])
    y = np.empty(shape, head.dtype)
    out = y.reshape(-1)

    def run(piece: slice) -> None:
        out[piece] = function(*[a[piece] if type(a) is np.ndarray else a for a in flat])

    backend.parallel_blocks(run, y.size, BLOCK)
    return y


class _Constant:
    """An operand that is no tensor: a Python number, a NumPy scalar or an array."""

    __slots__ = ("data",)
    requires_grad = False
    node = None

    def __init__(self, data: Any) -> None:
        self.data = data


def _constant(op: str, operand: Any) -> Any:
    if type(operand) in _SCALARS or isinstance(operand, np.generic) or backend.is_array(operand):
        return _Constant(operand)
    raise DtypeError(f"{op}: got a {type(operand).__name__}, expected a tensor, array or number")


def _kind(array: Any) -> Any:
    """Return what promotion depends on: the type of a Python number, the dtype of an array."""
    return type(array) if type(array) in _SCALARS else array.dtype


@lru_cache(maxsize=4096)
def _result_dtype(function: Callable[..., Array], *kinds: Any) -> Dtype:
    """Return the dtype that NumPy promotes to; a 16-bit float where all float operands are."""
    examples = [kind(1) if kind in _SCALARS else np.ones(1, compute_dtype(kind)) for kind in kinds]
    with np.errstate(all="ignore"):
        dtype = np.asarray(function(*examples)).dtype
    halves = [kind for kind in kinds if kind not in _SCALARS and compute_dtype(kind) != kind]
    if dtype != np.float32 or not halves:
        return dtype
    arrays = [kind for kind in kinds if kind not in _SCALARS and kind != np.bool_]
    return np.result_type(*arrays) if arrays else dtype


def _compute_type(dtype: Dtype, arrays: list[Any]) -> Dtype:
    """Return the type a kernel computes in: the result's, or the operands' for a comparison."""
    if dtype != np.bool_:
        return compute_dtype(dtype)
    return compute_dtype(np.result_type(*[a if type(a) in _SCALARS else a.dtype for a in arrays]))


def _declare(names: list[str], arrays: Sequence[Any], compute: Dtype) -> tuple[str, ...]:
    """Return the kernel's parameters: arrays of any dtype, numbers in the type it computes in."""
    return tuple(
        [
            f"{letter if backend.is_array(array) else _typed([array], compute)[0].dtype} {name}_"
            for letter, name, array in zip("PQRST", names, arrays, strict=False)
        ]
    )


def _typed(arrays: Sequence[Any], compute: Dtype) -> list[Any]:
    return [compute.type(a) if type(a) in _SCALARS else a for a in arrays]


@lru_cache(maxsize=4096)
def _kernel(name: str, declared: tuple[str, ...], expressions: tuple[str, ...], c: Dtype) -> Any:
    """Return the ElementwiseKernel that computes the expressions of the operands in type `c`."""
    operands = [parameter.split()[1][:-1] for parameter in declared]
    loads = [
        f"const bool {n} = bool({n}_);" if n == "c" else f"const C {n} = C({n}_);" for n in operands
    ]
    stores = [f"out{i} = {cuda_expression(e)};" for i, e in enumerate(expressions)]
    return backend.cupy.ElementwiseKernel(
        ", ".join(declared),
        ", ".join(f"{t} out{i}" for t, i in zip("XYZ", range(len(expressions)), strict=False)),
        f"typedef {c_name(c)} C; {' '.join(loads)} {' '.join(stores)}",
        f"{name}_{c.name}",
        preamble=_DEVICE_FUNCTIONS,
    )


def _names(expression: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Name)}


def _python(expression: str, names: list[str]) -> Callable[..., Array]:
    """Return the expression as a function of the named arrays."""
    return eval(f"lambda {', '.join(names)}: {expression}", dict(_FUNCTIONS))  # type: ignore[no-any-return]


_OPERATORS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.USub: "-",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip


def cuda_expression(expression: str) -> str:
    """Translate an expression to CUDA; numbers become constants of the compute type C."""

    def text(node: ast.expr) -> str:
        match node:
            case ast.Name():
                return node.id
            case ast.Constant():
                return f"C({node.value!r})"
            case ast.UnaryOp():
                return f"({_OPERATORS[type(node.op)]}{text(node.operand)})"
            case ast.BinOp():
                return f"({text(node.left)} {_OPERATORS[type(node.op)]} {text(node.right)})"
            case ast.Compare():
                right = text(node.comparators[0])
                return f"({text(node.left)} {_OPERATORS[type(node.ops[0])]} {right})"
            case ast.Call(func=ast.Name(id=name)):
                return f"{name}({', '.join(text(a) for a in node.args)})"
        raise AssertionError(f"no CUDA for {ast.dump(node)}")

    return text(ast.parse(expression, mode="eval").body)
