"""The methods and operators of Tensor: a table of names and ops, which become methods here.

Most are the op itself, with `self` for its first parameter; the functions above the table say where
a method takes its arguments in another form. So core/ knows no op. Type checkers read the stub that
`python -m tests.method_stub` writes, core/tensor_methods.pyi. Tests: tests/ops/test_methods.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, Never

from tensorgrad.compat import aliases, dlpack, numpy_functions
from tensorgrad.compat.omitted import missing_method
from tensorgrad.core.checks import unexpected
from tensorgrad.core.dtypes import bfloat16, float16, float32, float64
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.tensor import Tensor
from tensorgrad.io.display import to_html
from tensorgrad.ops import (
    diagonals,
    einsum,
    elementwise,
    indexing,
    matmul,
    reduce,
    scatter,
    shape,
    sorting,
    stacking,
)


def _reshape(x: Tensor, *lengths: Any) -> Tensor:
    """Return the elements in another shape: reshape(2, 3) or reshape((2, 3)).

    Args:
        *lengths: the lengths, or one tuple of them; one may be -1.

    Returns:
        The elements in C order; errors are those of `tensorgrad.reshape`.

    Example:
        >>> tg.arange(6).reshape(2, 3)
        tensor([[0, 1, 2],
                [3, 4, 5]], dtype=int64)
    """
    return shape.reshape(x, lengths[0] if len(lengths) == 1 else lengths)


def _transpose(x: Tensor, *axes: Any) -> Tensor:
    """Return the axes in another order: transpose(1, 0), transpose((1, 0)) or reversed.

    Args:
        *axes: all axes, or one tuple of them; reversed by default.

    Returns:
        A view; errors are those of `tensorgrad.transpose`.

    Example:
        >>> tg.zeros((2, 3, 4)).transpose(1, 0, 2).shape
        (3, 2, 4)
    """
    return shape.transpose(x, axes[0] if len(axes) == 1 else axes or None)


def _sort(x: Tensor, axis: int = -1, **unknown: Never) -> None:
    """Sort the memory of the tensor along an axis, as in NumPy; see `tensorgrad.sort`.

    Args:
        axis: the axis to sort along.

    Example:
        >>> x = tg.tensor([3, 1, 2])
        >>> x.sort()
        >>> x
        tensor([1, 2, 3], dtype=int64)
    """
    indexing.assign(x, ..., sorting.sort(x.detach(), axis, **unknown))


def _flatten(x: Tensor) -> Tensor:
    """Return the elements in one axis, in memory of their own.

    Returns:
        (size,) in the dtype of the tensor.

    Example:
        >>> tg.tensor([[1, 2], [3, 4]]).flatten()
        tensor([1, 2, 3, 4], dtype=int64)
    """
    return shape.copy(shape.ravel(x))


def _fill(x: Tensor, value: Any) -> None:
    """Assign one number to all elements.

    Args:
        value: the number; errors are those of an assignment.

    Example:
        >>> x = tg.zeros(2)
        >>> x.fill(3.0)
        >>> x
        tensor([3., 3.], dtype=float32)
    """
    indexing.assign(x, ..., value)


def _dot(x: Tensor, other: Any) -> Tensor:
    """Return the sum of products; see `tensorgrad.dot`.

    Args:
        other: a tensor, array or list.

    Returns:
        The shape and dtype of `tensorgrad.dot`.

    Example:
        >>> tg.tensor([1, 2]).dot([10, 1])
        tensor(12, dtype=int64)
    """
    return einsum.dot(x, other)


def _cpu(x: Tensor) -> Tensor:
    """Return the tensor on the CPU; itself where it is there.

    Returns:
        In the shape and dtype of the tensor.

    Example:
        >>> tg.zeros(2).cpu().device
        'cpu'
    """
    return shape.to(x, "cpu")


def _to_device(x: Tensor, device: str, /, *, stream: Any = None) -> Tensor:
    """Return `to(device)`, the array API standard's name of it.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        stream: not used.

    Returns:
        In the shape and dtype of the tensor.

    Example:
        >>> tg.zeros(2).to_device("cpu").device
        'cpu'
    """
    return shape.to(x, device)


def _numel(x: Tensor) -> int:
    """Return the number of elements, `size`.

    Returns:
        An int of Python.

    Example:
        >>> tg.zeros((2, 3)).numel()
        6
    """
    return x.size


def _unsqueeze(x: Tensor, axis: int, **unknown: Never) -> Tensor:
    """Return the tensor with a new axis of length 1, `tensorgrad.expand_dims`.

    Args:
        axis: the new axis, counted in the result.

    Returns:
        A view with one axis more.

    Example:
        >>> tg.zeros(3).unsqueeze(0).shape
        (1, 3)
    """
    if unknown:
        raise unexpected("unsqueeze", unknown)
    return shape.expand_dims(x, axis)


def _half(x: Tensor) -> Tensor:
    """Return the values as float16.

    Returns:
        In the shape of the tensor; itself where it has the dtype.

    Example:
        >>> tg.tensor([1, 2]).half()
        tensor([1., 2.], dtype=float16)
    """
    return shape.astype(x, float16, copy=False)


def _bfloat16(x: Tensor) -> Tensor:
    """Return the values as bfloat16.

    Returns:
        In the shape of the tensor; itself where it has the dtype.

    Example:
        >>> tg.tensor([1, 2]).bfloat16().dtype.name
        'bfloat16'
    """
    return shape.astype(x, bfloat16, copy=False)


def _double(x: Tensor) -> Tensor:
    """Return the values as float64.

    Returns:
        In the shape of the tensor; itself where it has the dtype.

    Example:
        >>> tg.tensor([1, 2]).double()
        tensor([1., 2.], dtype=float64)
    """
    return shape.astype(x, float64, copy=False)


def _float(x: Tensor) -> Tensor:
    """Return the values as float32.

    Returns:
        In the shape of the tensor; itself where it has the dtype.

    Example:
        >>> tg.tensor([1, 2]).float()
        tensor([1., 2.], dtype=float32)
    """
    return shape.astype(x, float32, copy=False)


def _rdivmod(x: Tensor, other: Any) -> tuple[Tensor, Tensor]:
    """Return divmod(other, x)."""
    return elementwise.divmod(other, x)


def _pos(x: Tensor) -> Tensor:
    """Return the tensor itself."""
    return x


def _missing(x: Tensor, name: str) -> Any:
    """Raise the error that says what is there instead of a method of PyTorch or NumPy."""
    raise missing_method(name)


def _array_ufunc(x: Tensor, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
    """Call the op of one of NumPy's universal functions."""
    return numpy_functions.call_ufunc(ufunc, method, operands, options)


def _array_function(
    x: Tensor, function: Any, types: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Call the op of one of NumPy's functions."""
    return numpy_functions.call_function(function, arguments, options)


def _array_namespace(x: Tensor, *, api_version: str | None = None) -> Any:
    """Return the package, whose functions are those of the array API standard."""
    if api_version not in (None, "2021.12", "2022.12", "2023.12", "2024.12"):
        raise ArgumentError(
            f"__array_namespace__: api_version is {api_version!r}, expected up to '2024.12'"
        )
    return sys.modules["tensorgrad"]


def _dlpack(
    x: Tensor,
    *,
    stream: Any = None,
    max_version: tuple[int, int] | None = None,
    dl_device: Any = None,
    copy: bool | None = None,
) -> Any:
    """Return the array as a DLPack capsule."""
    options = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
    return dlpack.to_dlpack(x.data, **{k: v for k, v in options.items() if v is not None})


METHODS: dict[str, Callable[..., Any]] = {
    "astype": shape.astype,
    "exp": elementwise.exp,
    "log": elementwise.log,
    "sqrt": elementwise.sqrt,
    "tanh": elementwise.tanh,
    "clip": elementwise.clip,
    "round": elementwise.round,
    "sum": reduce.sum,
    "mean": reduce.mean,
    "var": reduce.var,
    "std": reduce.std,
    "max": reduce.max,
    "min": reduce.min,
    "prod": reduce.prod,
    "argmax": reduce.argmax,
    "argmin": reduce.argmin,
    "any": reduce.any,
    "all": reduce.all,
    "cumsum": reduce.cumsum,
    "cumprod": reduce.cumprod,
    "reshape": _reshape,
    "ravel": shape.ravel,
    "transpose": _transpose,
    "swapaxes": shape.swapaxes,
    "squeeze": shape.squeeze,
    "repeat": shape.repeat,
    "copy": shape.copy,
    "flatten": _flatten,
    "fill": _fill,
    "take": indexing.take,
    "nonzero": indexing.nonzero,
    "sort": _sort,
    "argsort": sorting.argsort,
    "searchsorted": sorting.searchsorted,
    "dot": _dot,
    "diagonal": diagonals.diagonal,
    "trace": diagonals.trace,
    # PyTorch's names; see aliases.py
    "to": aliases.to,
    "cpu": _cpu,
    "cuda": aliases.cuda,
    "clone": aliases.clone,
    "numel": _numel,
    "requires_grad_": aliases.requires_grad_,
    "masked_fill": aliases.masked_fill,
    "gather": aliases.gather,
    "scatter": scatter.scatter,
    "scatter_add": scatter.scatter_add,
    "index_add": scatter.index_add,
    "unfold": aliases.unfold,
    "permute": _transpose,
    "view": aliases.view,
    "unsqueeze": _unsqueeze,
    "half": _half,
    "bfloat16": _bfloat16,
    "double": _double,
    "float": _float,
    # protocols of Python, NumPy, the array API standard and DLPack
    "__getitem__": indexing.getitem,
    "__setitem__": indexing.assign,
    "__neg__": elementwise.negative,
    "__pos__": _pos,
    "__abs__": elementwise.abs,
    "__invert__": elementwise.invert,
    "__divmod__": elementwise.divmod,
    "__rdivmod__": _rdivmod,
    "__getattr__": _missing,
    "__array_ufunc__": _array_ufunc,
    "__array_function__": _array_function,
    "__array_namespace__": _array_namespace,
    "to_device": _to_device,
    "__dlpack__": _dlpack,
    "_repr_html_": to_html,
}
PROPERTIES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "T": (shape.transpose, "The tensor with its axes reversed."),
    "mT": (stacking.matrix_transpose, "The tensor with its last two axes exchanged."),
    "is_leaf": (aliases.is_leaf, "Whether no op that gradients flow through made this."),
}
# The name in the methods of an operator, the op, and the symbol where there is one for assignment.
OPERATORS: tuple[tuple[str, Callable[..., Tensor], str], ...] = (
    ("add", elementwise.add, "+"),
    ("sub", elementwise.subtract, "-"),
    ("mul", elementwise.multiply, "*"),
    ("truediv", elementwise.divide, "/"),
    ("floordiv", elementwise.floor_divide, "//"),
    ("mod", elementwise.remainder, "%"),
    ("pow", elementwise.power, "**"),
    ("matmul", matmul.matmul, "@"),
    ("and", elementwise.bitwise_and, "&"),
    ("or", elementwise.bitwise_or, "|"),
    ("xor", elementwise.bitwise_xor, "^"),
    ("lshift", elementwise.left_shift, "<<"),
    ("rshift", elementwise.right_shift, ">>"),
    ("eq", elementwise.equal, ""),
    ("ne", elementwise.not_equal, ""),
    ("lt", elementwise.less, ""),
    ("le", elementwise.less_equal, ""),
    ("gt", elementwise.greater, ""),
    ("ge", elementwise.greater_equal, ""),
)


def _method(name: str, function: Any) -> Callable[..., Any]:
    """Return a function as a method: under its name, with the first parameter called `self`."""
    code, first = function.__code__, function.__code__.co_varnames[0]
    method = FunctionType(
        code.replace(co_name=name, co_varnames=("self", *code.co_varnames[1:])),
        function.__globals__, name, function.__defaults__, function.__closure__,
    )  # fmt: skip
    method.__kwdefaults__, method.__doc__ = function.__kwdefaults__, function.__doc__
    method.__annotations__ = {
        "self" if key == first else key: value for key, value in function.__annotations__.items()
    }
    method.__module__, method.__qualname__ = Tensor.__module__, f"Tensor.{name}"
    return method


def _attach_operator(name: str, op: Callable[..., Tensor], symbol: str) -> None:
    """Make an op the method of an operator: with operands exchanged, and in place, it has others.

    Augmented assignment changes the memory of the tensor, as in NumPy; see indexing.
    """
    assigned = f"{symbol}="

    def reflected(self: Tensor, other: Any) -> Tensor:
        return op(other, self)

    def augmented(self: Tensor, other: Any) -> Tensor:
        return indexing.assign_result(self, assigned, op, other)

    methods = {"": op, "r": reflected, "i": augmented} if symbol else {"": op}
    for letter, function in methods.items():
        dunder = f"__{letter}{name}__"
        setattr(Tensor, dunder, _method(dunder, function))


for _name, _function in METHODS.items():
    setattr(Tensor, _name, _method(_name, _function))
for _name, (_function, _doc) in PROPERTIES.items():
    setattr(Tensor, _name, property(_method(_name, _function), doc=_doc))
for _row in OPERATORS:
    _attach_operator(*_row)
