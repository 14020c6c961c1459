"""The Tensor: an array, its gradient, and a place in the graph.

Every operator and method is one line that calls the op of the same name in `tensorgrad.ops`.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from tensorgrad import backend, dlpack, engine
from tensorgrad.backend import Array, Shape
from tensorgrad.checks import not_an_operand, renamed_dim
from tensorgrad.dtypes import Dtype, DtypeLike, bfloat16, float16, float32, float64, is_float
from tensorgrad.errors import ArgumentError, DtypeError, GradError
from tensorgrad.gradient import LeafGradient, Recompute
from tensorgrad.omitted import missing_method

Axis = int | tuple[int, ...] | None


_NDARRAY = np.ndarray


@cache
def _is_array(kind: Any) -> bool:
    """Whether a type is one of arrays, or of what `fuse` passes for them."""
    has_memory = hasattr(kind, "strides") and not issubclass(kind, np.generic)
    return has_memory or hasattr(kind, "detached")  # see ops/elementwise/trace.py


class Tensor:
    """An array on the CPU (NumPy) or a GPU (CuPy) that gradients can flow through.

    Args:
        data: a numpy.ndarray or cupy.ndarray; kept, not copied. To convert anything else, use
            `tensorgrad.tensor(value)`.
        requires_grad: whether backward computes its gradient.

    Attributes:
        data: the array.
        grad: the gradient as an array of the same shape, or None.
        requires_grad: whether a gradient flows here.
        gradient: what holds `grad`; see gradient.py.
        node: the op that produced it, or the leaf that it is a cast of; None for a leaf.
        recompute: how to compute the array again; set by a norm under `recompute_norms` alone.
        hooks: functions that backward calls when the gradient of this leaf is complete.

    Raises:
        DtypeError: `requires_grad` for integers or bool, or data is not an array.
    """

    __slots__ = ("__weakref__", "data", "gradient", "hooks", "node", "recompute", "requires_grad")
    notes_changes: ClassVar[bool] = False  # in `engine.changes`, where an attribute is assigned to

    def __init__(self, data: Array, requires_grad: bool = False, node: Any = None) -> None:
        if node is None:
            if type(data) is not _NDARRAY and not _is_array(type(data)):  # type: ignore[arg-type]
                data = _array_of_scalar(data)
            if requires_grad and not is_float(data.dtype):
                raise DtypeError(
                    f"tensor: got dtype {data.dtype} with requires_grad, expected a float"
                )
        self.data: Array = data
        self.requires_grad: bool = requires_grad
        self.node: Any = node  # a Node or an Output, or the leaf
        self.gradient: LeafGradient | None = None
        self.recompute: Recompute | None = None
        self.hooks: list[Callable[[Tensor], None]] | None = None

    if not TYPE_CHECKING:  # to a type checker every name would exist

        def __getattr__(self, name: str) -> Any:
            raise missing_method(name)

    @property
    def grad(self) -> Array | None:
        """The gradient of a leaf, an array in its shape; None before the first backward."""
        gradient = self.gradient
        if gradient is None:
            return None
        if gradient.capture is not None:
            gradient.settle()
        return gradient.array

    @grad.setter
    def grad(self, array: Array | None) -> None:
        """Hold an array from now on; None: no gradient."""
        if array is None:
            self.gradient = None
        elif self.gradient is None or self.gradient.array is not array:
            self.gradient = LeafGradient(array)

    @property
    def shape(self) -> Shape:
        """The length of each axis."""
        return self.data.shape  # type: ignore[no-any-return]

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.data.ndim  # type: ignore[no-any-return]

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.data.size  # type: ignore[no-any-return]

    @property
    def dtype(self) -> Dtype:
        """The element type."""
        return self.data.dtype  # type: ignore[no-any-return]

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:N"."""
        return backend.device_of(self.data)

    @property
    def T(self) -> Tensor:
        """The tensor with its axes reversed."""
        return shape.transpose(self)

    @property
    def mT(self) -> Tensor:
        """The tensor with its last two axes exchanged."""
        return stacking.matrix_transpose(self)

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return self.data.itemsize  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.data.nbytes  # type: ignore[no-any-return]

    def backward(self, dy: Any = None, retain_graph: bool = False) -> None:
        """Add the gradient of this tensor to every leaf's `grad`; see `engine.backward`."""
        engine.backward(self, dy, retain_graph)

    def detach(self) -> Tensor:
        """Return a tensor with the same array that no gradient flows through."""
        data = self.data  # a symbol where ops/elementwise/fuse.py traces
        return Tensor(data.detached() if hasattr(data, "detached") else data)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the values as a NumPy array; on the CPU it is the tensor's own memory."""
        return backend.to_numpy(self.data)

    def item(self) -> Any:
        """Return the one element as a Python number."""
        return self.data.item()

    def tolist(self) -> Any:
        """Return the values as nested lists of Python numbers."""
        return self.data.tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
        return numpy_functions.call_ufunc(ufunc, method, operands, options)

    def __array_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        return numpy_functions.call_function(function, arguments, options)

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        if api_version not in (None, "2021.12", "2022.12", "2023.12", "2024.12"):
            raise ArgumentError(
                f"__array_namespace__: api_version is {api_version!r}, expected up to '2024.12'"
            )
        return sys.modules["tensorgrad"]

    def to_device(self, device: str, /, *, stream: Any = None) -> Tensor:
        """Return `to(device)`, the array API standard's name of it."""
        return shape.to(self, device)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: Any = None,
        copy: bool | None = None,
    ) -> Any:
        given = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
        return dlpack.to_dlpack(self.data, **{k: v for k, v in given.items() if v is not None})

    def __dlpack_device__(self) -> Any:
        return self.data.__dlpack_device__()

    def __repr__(self) -> str:
        text = np.array2string(self.numpy(), separator=", ", prefix="tensor(")
        where = "" if backend.is_numpy(self.data) else f", device={self.device!r}"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"tensor({text}, dtype={self.dtype}{where}{grad})"

    def __format__(self, spec: str) -> str:
        """Return the one element in a format, f"{loss:.3f}"; without a format, the whole text."""
        return format(self.item(), spec) if spec else str(self)

    def _repr_html_(self) -> str:
        from tensorgrad.display import to_html  # for notebooks alone

        return to_html(self)

    def __copy__(self) -> Self:
        """Return a tensor with the same array and the same place in the graph."""
        twin = object.__new__(type(self))
        state: Any = object.__getstate__(self)
        for attributes in state:  # of a subclass, and the slots
            for name, value in (attributes or {}).items():
                setattr(twin, name, value)
        return twin

    def __getstate__(self) -> object:
        """Return what `pickle` and `copy.deepcopy` keep.

        Raises:
            GradError: the tensor is the result of an op, and holds the graph behind it.
        """
        if self.node is not None:
            raise GradError(
                "pickle, deepcopy: the tensor is the result of an op, expected a leaf; detach() "
                "it, or clone() it for a copy that gradients flow through"
            )
        return object.__getstate__(self)

    def __len__(self) -> int:
        return len(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> builtins.float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        return backend.to_numpy(self.data).__index__()

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self.data)))

    def __getitem__(self, key: Any) -> Tensor:
        return indexing.getitem(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        indexing.assign(self, key, value)

    __hash__ = object.__hash__

    def __neg__(self) -> Tensor:
        return elementwise.negative(self)

    def __pos__(self) -> Tensor:
        return self

    def __abs__(self) -> Tensor:
        return elementwise.abs(self)

    def __divmod__(self, other: Any) -> tuple[Tensor, Tensor]:
        return elementwise.divmod(self, other)

    def __rdivmod__(self, other: Any) -> tuple[Tensor, Tensor]:
        return elementwise.divmod(other, self)

    def __matmul__(self, other: Any) -> Tensor:
        return matmul.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return matmul.matmul(other, self)

    def __imatmul__(self, other: Any) -> Self:
        return indexing.assign_result(self, "@=", matmul.matmul, other)

    if TYPE_CHECKING:  # the rows of _OPERATORS, below

        def _binary(self, other: Any) -> Tensor: ...
        def _augmented(self, other: Any) -> Self: ...

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _binary
        __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = _binary
        __rpow__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _binary
        __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _binary
        __lt__ = __le__ = __gt__ = __ge__ = _binary
        __eq__ = __ne__ = _binary  # type: ignore[assignment]  # elementwise, as in NumPy
        __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = _augmented
        __ipow__ = __iand__ = __ior__ = __ixor__ = _augmented
        __ilshift__ = __irshift__ = _augmented

    def __invert__(self) -> Tensor:
        return elementwise.invert(self)

    def astype(self, dtype: DtypeLike, copy: bool = True) -> Tensor:
        """Return the values as `dtype`; see `tensorgrad.astype`."""
        return shape.astype(self, dtype, copy)

    def exp(self) -> Tensor:
        """Return e**x."""
        return elementwise.exp(self)

    def log(self) -> Tensor:
        """Return the natural logarithm."""
        return elementwise.log(self)

    def sqrt(self) -> Tensor:
        """Return the square root."""
        return elementwise.sqrt(self)

    def tanh(self) -> Tensor:
        """Return the hyperbolic tangent."""
        return elementwise.tanh(self)

    def clip(self, min: Any = None, max: Any = None) -> Tensor:
        """Return the values limited to [min, max]; see `tensorgrad.clip`."""
        return elementwise.clip(self, min, max)

    def sum(
        self,
        axis: Axis = None,
        keepdims: bool = False,
        dtype: DtypeLike | None = None,
        *,
        dim: None = None,
    ) -> Tensor:
        """Return the sum; see `tensorgrad.sum`."""
        return reduce.sum(self, axis, keepdims, dtype, dim=dim)

    def mean(
        self,
        axis: Axis = None,
        keepdims: bool = False,
        dtype: DtypeLike | None = None,
        *,
        dim: None = None,
    ) -> Tensor:
        """Return the mean; see `tensorgrad.mean`."""
        return reduce.mean(self, axis, keepdims, dtype, dim=dim)

    def var(
        self, axis: Axis = None, ddof: int = 0, keepdims: bool = False, *, dim: None = None
    ) -> Tensor:
        """Return the variance; see `tensorgrad.var`."""
        return reduce.var(self, axis, ddof, keepdims, dim=dim)

    def std(
        self, axis: Axis = None, ddof: int = 0, keepdims: bool = False, *, dim: None = None
    ) -> Tensor:
        """Return the standard deviation; see `tensorgrad.std`."""
        return reduce.std(self, axis, ddof, keepdims, dim=dim)

    def max(self, axis: Axis = None, keepdims: bool = False, *, dim: None = None) -> Tensor:
        """Return the maximum; see `tensorgrad.max`."""
        return reduce.max(self, axis, keepdims, dim=dim)

    def min(self, axis: Axis = None, keepdims: bool = False, *, dim: None = None) -> Tensor:
        """Return the minimum; see `tensorgrad.min`."""
        return reduce.min(self, axis, keepdims, dim=dim)

    def prod(
        self,
        axis: Axis = None,
        keepdims: bool = False,
        dtype: DtypeLike | None = None,
        *,
        dim: None = None,
    ) -> Tensor:
        """Return the product; see `tensorgrad.prod`."""
        return reduce.prod(self, axis, keepdims, dtype, dim=dim)

    def argmax(
        self, axis: int | None = None, keepdims: bool = False, *, dim: None = None
    ) -> Tensor:
        """Return the index of the maximum; see `tensorgrad.argmax`."""
        return reduce.argmax(self, axis, keepdims, dim=dim)

    def argmin(
        self, axis: int | None = None, keepdims: bool = False, *, dim: None = None
    ) -> Tensor:
        """Return the index of the minimum; see `tensorgrad.argmin`."""
        return reduce.argmin(self, axis, keepdims, dim=dim)

    def any(self, axis: Axis = None, keepdims: bool = False, *, dim: None = None) -> Tensor:
        """Return whether any element is true; see `tensorgrad.any`."""
        return reduce.any(self, axis, keepdims, dim=dim)

    def all(self, axis: Axis = None, keepdims: bool = False, *, dim: None = None) -> Tensor:
        """Return whether all elements are true; see `tensorgrad.all`."""
        return reduce.all(self, axis, keepdims, dim=dim)

    def reshape(self, *lengths: Any) -> Tensor:
        """Return the elements in another shape: reshape(2, 3) or reshape((2, 3))."""
        return shape.reshape(self, lengths[0] if len(lengths) == 1 else lengths)

    def ravel(self) -> Tensor:
        """Return the elements in one axis."""
        return shape.ravel(self)

    def transpose(self, *axes: Any) -> Tensor:
        """Return the axes in another order: transpose(1, 0), transpose((1, 0)) or reversed."""
        return shape.transpose(self, axes[0] if len(axes) == 1 else axes or None)

    def swapaxes(self, axis1: int, axis2: int) -> Tensor:
        """Return the tensor with two axes exchanged."""
        return shape.swapaxes(self, axis1, axis2)

    def repeat(self, repeats: Any, axis: int | None = None, *, dim: None = None) -> Tensor:
        """Return each element, or slice along an axis, several times; see `tensorgrad.repeat`."""
        return shape.repeat(self, repeats, axis, dim=dim)

    def take(self, indices: Any, axis: int | None = None, *, dim: None = None) -> Tensor:
        """Return the slices at `indices` along an axis; see `tensorgrad.take`."""
        return indexing.take(self, indices, axis, dim=dim)

    def sort(self, axis: int = -1, *, dim: None = None) -> None:
        """Sort the memory of the tensor along an axis, as in NumPy; see `tensorgrad.sort`."""
        indexing.assign(self, ..., sorting.sort(self.detach(), axis, dim=dim))

    def argsort(self, axis: int | None = -1, *, dim: None = None) -> Tensor:
        """Return the indices that sort along an axis; see `tensorgrad.argsort`."""
        return sorting.argsort(self, axis, dim=dim)

    def copy(self) -> Tensor:
        """Return the values in memory of their own; the gradient flows back."""
        return shape.copy(self)

    def flatten(self) -> Tensor:
        """Return the elements in one axis, in memory of their own."""
        return shape.copy(shape.ravel(self))

    def fill(self, value: Any) -> None:
        """Assign one number to all elements."""
        indexing.assign(self, ..., value)

    def round(self) -> Tensor:
        """Return the nearest integers; see `tensorgrad.round`."""
        return elementwise.round(self)

    def dot(self, other: Any) -> Tensor:
        """Return the sum of products; see `tensorgrad.dot`."""
        return einsum.dot(self, other)

    def cumsum(self, axis: int | None = None, *, dim: None = None) -> Tensor:
        """Return the running sums; see `tensorgrad.cumsum`."""
        return reduce.cumsum(self, axis, dim=dim)

    def cumprod(self, axis: int | None = None, *, dim: None = None) -> Tensor:
        """Return the running products; see `tensorgrad.cumprod`."""
        return reduce.cumprod(self, axis, dim=dim)

    def nonzero(self) -> tuple[Tensor, ...]:
        """Return the indices of what is not 0; see `tensorgrad.nonzero`."""
        return indexing.nonzero(self)

    def searchsorted(self, values: Any, side: Literal["left", "right"] = "left") -> Tensor:
        """Return where to insert values; see `tensorgrad.searchsorted`."""
        return sorting.searchsorted(self, values, side)

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
        """Return a diagonal; see `tensorgrad.diagonal`."""
        return diagonals.diagonal(self, offset, axis1, axis2)

    def trace(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
        """Return the sum of a diagonal; see `tensorgrad.trace`."""
        return diagonals.trace(self, offset, axis1, axis2)

    def squeeze(self, axis: Axis = None, *, dim: None = None) -> Tensor:
        """Return the tensor without axes of length 1."""
        return shape.squeeze(self, axis, dim=dim)

    # PyTorch's names, last: `float` would hide the type. See ops/aliases.py.

    def to(self, device: Any = None, dtype: DtypeLike | None = None) -> Tensor:
        """Return the tensor on a device ("cpu", "cuda", "cuda:N") or as a dtype, or both."""
        return aliases.to(self, device, dtype)

    def cpu(self) -> Tensor:
        """Return the tensor on the CPU."""
        return shape.to(self, "cpu")

    def cuda(self, device: int | None = None) -> Tensor:
        """Return the tensor on the current GPU, or on that of a number."""
        return aliases.cuda(self, device)

    def clone(self) -> Tensor:
        """Return a copy, through which the gradient flows back."""
        return aliases.clone(self)

    def numel(self) -> int:
        """Return the number of elements, `size`."""
        return self.size

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Set whether backward computes the gradient of this leaf; return self."""
        return aliases.requires_grad_(self, requires_grad)

    @property
    def is_leaf(self) -> bool:
        """Whether this is not the result of an op that gradients flow through."""
        return aliases.is_leaf(self)

    def masked_fill(self, mask: Any, value: Any) -> Tensor:
        """Return the tensor with `value` where the mask is True."""
        return aliases.masked_fill(self, mask, value)

    def gather(self, axis: int, index: Any, *, dim: None = None) -> Tensor:
        """Return the elements at `index` along an axis; see `tensorgrad.take_along_axis`."""
        if dim is not None:
            raise renamed_dim("gather", dim)
        return aliases.gather(self, axis, index)

    def scatter(self, axis: int, index: Any, src: Any) -> Tensor:
        """Return a copy with `src` at `index` along an axis; see `tensorgrad.scatter`."""
        return scatter.scatter(self, axis, index, src)

    def scatter_add(self, axis: int, index: Any, src: Any) -> Tensor:
        """Return a copy with `src` added at `index`; see `tensorgrad.scatter_add`."""
        return scatter.scatter_add(self, axis, index, src)

    def index_add(self, axis: int, index: Any, source: Any, alpha: float = 1) -> Tensor:
        """Return a copy with `source` added to slices; see `tensorgrad.index_add`."""
        return scatter.index_add(self, axis, index, source, alpha)

    def unfold(self, axis: int, size: int, step: int = 1) -> Tensor:
        """Return the windows of an axis on a new last axis."""
        return aliases.unfold(self, axis, size, step)

    def permute(self, *axes: Any) -> Tensor:
        """Return the axes in another order, `transpose`."""
        return self.transpose(*axes)

    def view(self, *lengths: Any) -> Tensor:
        """Return the elements in another shape, `reshape`."""
        return aliases.view(self, *lengths)

    def unsqueeze(self, axis: int, *, dim: None = None) -> Tensor:
        """Return the tensor with a new axis of length 1, `tensorgrad.expand_dims`."""
        if dim is not None:
            raise renamed_dim("unsqueeze", dim)
        return shape.expand_dims(self, axis)

    def half(self) -> Tensor:
        """Return the values as float16."""
        return shape.astype(self, float16, copy=False)

    def bfloat16(self) -> Tensor:
        """Return the values as bfloat16."""
        return shape.astype(self, bfloat16, copy=False)

    def double(self) -> Tensor:
        """Return the values as float64."""
        return shape.astype(self, float64, copy=False)

    def float(self) -> Tensor:
        """Return the values as float32."""
        return shape.astype(self, float32, copy=False)


# Last, because they import Tensor from here.
from tensorgrad.ops import (  # noqa: E402
    aliases,
    diagonals,
    einsum,
    elementwise,
    indexing,
    matmul,
    numpy_functions,
    reduce,
    scatter,
    shape,
    sorting,
    stacking,
)

# The name in the methods of an operator, the op, and the symbol where there is one for assignment.
_OPERATORS = (
    ("add", "add", "+"), ("sub", "subtract", "-"), ("mul", "multiply", "*"),
    ("truediv", "divide", "/"), ("floordiv", "floor_divide", "//"), ("mod", "remainder", "%"),
    ("pow", "power", "**"), ("and", "bitwise_and", "&"), ("or", "bitwise_or", "|"),
    ("xor", "bitwise_xor", "^"), ("lshift", "left_shift", "<<"), ("rshift", "right_shift", ">>"),
    ("eq", "equal", ""), ("ne", "not_equal", ""), ("lt", "less", ""), ("le", "less_equal", ""),
    ("gt", "greater", ""), ("ge", "greater_equal", ""),
)  # fmt: skip


def _add_operator(name: str, op_name: str, symbol: str) -> None:
    """Make an op the method of an operator: with operands exchanged, and in place, it has others.

    Augmented assignment changes the memory of the tensor, as in NumPy; see indexing.
    """
    op, assigned = getattr(elementwise, op_name), f"{symbol}="
    setattr(Tensor, f"__{name}__", op)

    def reflected(self: Tensor, other: Any) -> Tensor:
        return op(other, self)  # type: ignore[no-any-return]

    def augmented(self: Tensor, other: Any) -> Tensor:
        return indexing.assign_result(self, assigned, op, other)

    for method, letter in ((reflected, "r"), (augmented, "i")) if symbol else ():
        method.__name__ = f"__{letter}{name}__"
        method.__code__ = method.__code__.replace(co_name=method.__name__)
        setattr(Tensor, method.__name__, method)


for _row in _OPERATORS:
    _add_operator(*_row)


def _array_of_scalar(data: Any) -> Array:
    """Return a NumPy scalar, which sums of NumPy are, as an array; anything else is an error."""
    if isinstance(data, np.generic):
        return np.asarray(data)
    raise not_an_operand(
        "Tensor", "data", data, "a NumPy or CuPy array; tensorgrad.tensor takes other values"
    )
