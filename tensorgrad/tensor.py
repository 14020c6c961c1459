"""The Tensor: an array, its gradient, and a place in the graph.

Every operator and method is one line that calls the op of the same name in `tensorgrad.ops`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np

from tensorgrad import backend, dlpack, engine
from tensorgrad.backend import Array, Shape
from tensorgrad.dtypes import Dtype, DtypeLike, is_float
from tensorgrad.errors import DtypeError

Axis = int | tuple[int, ...] | None


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
        node: the op that produced it, or the leaf that it is a cast of; None for a leaf.
        hooks: functions that backward calls when the gradient of this leaf is complete.

    Raises:
        DtypeError: `requires_grad` for integers or bool.
    """

    __slots__ = ("__weakref__", "data", "grad", "hooks", "node", "requires_grad")

    def __init__(self, data: Array, requires_grad: bool = False, node: Any = None) -> None:
        if requires_grad and node is None and not is_float(data.dtype):
            raise DtypeError(f"tensor: got dtype {data.dtype} with requires_grad, expected a float")
        self.data = data
        self.requires_grad = requires_grad
        self.node: Any = node  # a Node or an Output, or the leaf
        self.grad: Array | None = None
        self.hooks: list[Callable[[Tensor], None]] | None = None

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
        return ops.transpose(self)

    def backward(self, dy: Any = None, retain_graph: bool = False) -> None:
        """Add the gradient of this tensor to every leaf's `grad`; see `engine.backward`."""
        engine.backward(self, dy, retain_graph)

    def detach(self) -> Tensor:
        """Return a tensor with the same array that no gradient flows through."""
        data = self.data
        return Tensor(
            data.detached() if hasattr(data, "detached") else data
        )  # see ops/elementwise/fuse.py

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the values as a NumPy array; on the CPU it is the tensor's own memory."""
        return backend.to_numpy(self.data)

    def item(self) -> Any:
        """Return the one element as a Python number."""
        return self.data.item()

    def tolist(self) -> Any:
        """Return the values as nested lists of Python numbers."""
        return self.data.tolist()

    def to(self, device: str) -> Tensor:
        """Return the tensor on "cpu", "cuda" or "cuda:N"; gradients flow back across."""
        return ops.to(self, device)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
        return numpy_functions.call_ufunc(ufunc, method, operands, options)

    def __array_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        return numpy_functions.call_function(function, arguments, options)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return dlpack.to_dlpack(self.data, **kwargs)

    def __dlpack_device__(self) -> Any:
        return self.data.__dlpack_device__()

    def __repr__(self) -> str:
        text = np.array2string(self.numpy(), separator=", ", prefix="tensor(")
        where = "" if backend.is_numpy(self.data) else f", device={self.device!r}"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"tensor({text}, dtype={self.dtype}{where}{grad})"

    def __len__(self) -> int:
        return len(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        return self.data.__index__()  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self.data)))

    def __getitem__(self, key: Any) -> Tensor:
        return ops.getitem(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        ops.indexing.assign(self, key, value)

    __hash__ = object.__hash__

    def __neg__(self) -> Tensor:
        return ops.negative(self)

    def __pos__(self) -> Tensor:
        return self

    def __abs__(self) -> Tensor:
        return ops.abs(self)

    def __add__(self, other: Any) -> Tensor:
        return ops.add(self, other)

    def __radd__(self, other: Any) -> Tensor:
        return ops.add(other, self)

    def __sub__(self, other: Any) -> Tensor:
        return ops.subtract(self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return ops.subtract(other, self)

    def __mul__(self, other: Any) -> Tensor:
        return ops.multiply(self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return ops.multiply(other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return ops.divide(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return ops.divide(other, self)

    def __pow__(self, other: Any) -> Tensor:
        return ops.power(self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return ops.power(other, self)

    def __matmul__(self, other: Any) -> Tensor:
        return ops.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return ops.matmul(other, self)

    def __eq__(self, other: Any) -> Tensor:  # type: ignore[override]  # elementwise, as in NumPy
        return ops.equal(self, other)

    def __ne__(self, other: Any) -> Tensor:  # type: ignore[override]
        return ops.not_equal(self, other)

    def __lt__(self, other: Any) -> Tensor:
        return ops.less(self, other)

    def __le__(self, other: Any) -> Tensor:
        return ops.less_equal(self, other)

    def __gt__(self, other: Any) -> Tensor:
        return ops.greater(self, other)

    def __ge__(self, other: Any) -> Tensor:
        return ops.greater_equal(self, other)

    def __and__(self, other: Any) -> Tensor:
        return ops.bitwise_and(self, other)

    def __rand__(self, other: Any) -> Tensor:
        return ops.bitwise_and(other, self)

    def __or__(self, other: Any) -> Tensor:
        return ops.bitwise_or(self, other)

    def __ror__(self, other: Any) -> Tensor:
        return ops.bitwise_or(other, self)

    def __xor__(self, other: Any) -> Tensor:
        return ops.bitwise_xor(self, other)

    def __rxor__(self, other: Any) -> Tensor:
        return ops.bitwise_xor(other, self)

    def __lshift__(self, other: Any) -> Tensor:
        return ops.left_shift(self, other)

    def __rlshift__(self, other: Any) -> Tensor:
        return ops.left_shift(other, self)

    def __rshift__(self, other: Any) -> Tensor:
        return ops.right_shift(self, other)

    def __rrshift__(self, other: Any) -> Tensor:
        return ops.right_shift(other, self)

    def __invert__(self) -> Tensor:
        return ops.invert(self)

    # Augmented assignment changes the memory of the tensor, as in NumPy; see ops.indexing.

    def __iadd__(self, other: Any) -> Self:
        return ops.indexing.assign_result(self, "+=", operator.add, other)

    def __isub__(self, other: Any) -> Self:
        return ops.indexing.assign_result(self, "-=", operator.sub, other)

    def __imul__(self, other: Any) -> Self:
        return ops.indexing.assign_result(self, "*=", operator.mul, other)

    def __itruediv__(self, other: Any) -> Self:
        return ops.indexing.assign_result(self, "/=", operator.truediv, other)

    def __ipow__(self, other: Any) -> Self:
        return ops.indexing.assign_result(self, "**=", operator.pow, other)

    def __imatmul__(self, other: Any) -> Self:
        return ops.indexing.assign_result(self, "@=", operator.matmul, other)

    def __iand__(self, other: Any) -> Self:
        return ops.indexing.assign_result(self, "&=", operator.and_, other)

    def __ior__(self, other: Any) -> Self:
        return ops.indexing.assign_result(self, "|=", operator.or_, other)

    def __ixor__(self, other: Any) -> Self:
        return ops.indexing.assign_result(self, "^=", operator.xor, other)

    def __ilshift__(self, other: Any) -> Self:
        return ops.indexing.assign_result(self, "<<=", operator.lshift, other)

    def __irshift__(self, other: Any) -> Self:
        return ops.indexing.assign_result(self, ">>=", operator.rshift, other)

    def astype(self, dtype: DtypeLike, copy: bool = True) -> Tensor:
        """Return the values as `dtype`; see `ops.astype`."""
        return ops.astype(self, dtype, copy)

    def exp(self) -> Tensor:
        """Return e**x."""
        return ops.exp(self)

    def log(self) -> Tensor:
        """Return the natural logarithm."""
        return ops.log(self)

    def sqrt(self) -> Tensor:
        """Return the square root."""
        return ops.sqrt(self)

    def tanh(self) -> Tensor:
        """Return the hyperbolic tangent."""
        return ops.tanh(self)

    def clip(self, low: Any = None, high: Any = None) -> Tensor:
        """Return the values limited to [low, high]; see `ops.clip`."""
        return ops.clip(self, low, high)

    def sum(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Return the sum; see `ops.sum`."""
        return ops.sum(self, axis, keepdims)

    def mean(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Return the mean; see `ops.mean`."""
        return ops.mean(self, axis, keepdims)

    def var(self, axis: Axis = None, ddof: int = 0, keepdims: bool = False) -> Tensor:
        """Return the variance; see `ops.var`."""
        return ops.var(self, axis, ddof, keepdims)

    def std(self, axis: Axis = None, ddof: int = 0, keepdims: bool = False) -> Tensor:
        """Return the standard deviation; see `ops.std`."""
        return ops.std(self, axis, ddof, keepdims)

    def max(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Return the maximum; see `ops.max`."""
        return ops.max(self, axis, keepdims)

    def min(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Return the minimum; see `ops.min`."""
        return ops.min(self, axis, keepdims)

    def prod(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Return the product; see `ops.prod`."""
        return ops.prod(self, axis, keepdims)

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """Return the index of the maximum; see `ops.argmax`."""
        return ops.argmax(self, axis, keepdims)

    def argmin(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """Return the index of the minimum; see `ops.argmin`."""
        return ops.argmin(self, axis, keepdims)

    def any(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Return whether any element is true; see `ops.any`."""
        return ops.any(self, axis, keepdims)

    def all(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Return whether all elements are true; see `ops.all`."""
        return ops.all(self, axis, keepdims)

    def reshape(self, *shape: Any) -> Tensor:
        """Return the elements in another shape: reshape(2, 3) or reshape((2, 3))."""
        return ops.reshape(self, shape[0] if len(shape) == 1 else shape)

    def ravel(self) -> Tensor:
        """Return the elements in one axis."""
        return ops.ravel(self)

    def transpose(self, *axes: Any) -> Tensor:
        """Return the axes in another order: transpose(1, 0), transpose((1, 0)) or reversed."""
        return ops.transpose(self, axes[0] if len(axes) == 1 else axes or None)

    def swapaxes(self, axis1: int, axis2: int) -> Tensor:
        """Return the tensor with two axes exchanged."""
        return ops.swapaxes(self, axis1, axis2)

    def repeat(self, repeats: Any, axis: int | None = None) -> Tensor:
        """Return each element, or slice along an axis, several times; see `ops.repeat`."""
        return ops.repeat(self, repeats, axis)

    def take(self, indices: Any, axis: int | None = None) -> Tensor:
        """Return the slices at `indices` along an axis; see `ops.take`."""
        return ops.take(self, indices, axis)

    def argsort(self, axis: int | None = -1) -> Tensor:
        """Return the indices that sort along an axis; see `ops.argsort`."""
        return ops.argsort(self, axis)

    def squeeze(self, axis: Axis = None) -> Tensor:
        """Return the tensor without axes of length 1."""
        return ops.squeeze(self, axis)


from tensorgrad import ops  # noqa: E402  last: they import Tensor from here
from tensorgrad.ops import numpy_functions  # noqa: E402
