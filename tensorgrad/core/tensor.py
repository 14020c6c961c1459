"""The Tensor: an array, its gradient, and a place in the graph.

Ops become methods and operators in ops/methods.py; here is what needs none.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.arrays import not_an_operand
from tensorgrad.core.backend import Array, Shape
from tensorgrad.core.backward import backward, recorded
from tensorgrad.core.checks import check_flag
from tensorgrad.core.dtypes import Dtype, is_float
from tensorgrad.core.errors import DtypeError, GradError
from tensorgrad.core.gradient import LeafGradient, Recompute

if TYPE_CHECKING:
    from tensorgrad.core.tensor_methods import Methods  # methods and operators; a stub alone
else:
    Methods = object

_NDARRAY = np.ndarray


@cache
def _is_array(kind: Any) -> bool:
    """Whether a type is one of arrays, or of what `fuse` passes for them."""
    has_memory = hasattr(kind, "strides") and not issubclass(kind, np.generic)
    return has_memory or hasattr(kind, "detached")  # see ops/elementwise/trace.py


class Tensor(Methods):
    """An array on the CPU (NumPy) or a GPU (CuPy) that gradients can flow through.

    Args:
        data: a numpy.ndarray or cupy.ndarray of any shape; kept, not copied. To convert anything
            else, use `tensorgrad.tensor(value)`.
        requires_grad: whether backward computes its gradient; needs a float dtype.
        node: what `record` and `cast_of` set; see the attribute.

    Attributes:
        data: the array.
        grad: the gradient as an array of the same shape, or None; a tensor after
            `backward(create_graph=True)`.
        requires_grad: whether a gradient flows here.
        gradient: what holds `grad`; see gradient.py.
        node: the op that produced it, or the leaf that it is a cast of; None for a leaf.
        recompute: how to compute the array again; set by a norm under `recompute_norms` alone.
        hooks: functions that backward calls when the gradient of this leaf is complete.

    Raises:
        DtypeError: `requires_grad` for integers or bool, or data is not an array.

    Example:
        >>> x = tg.Tensor(np.array([1.0, 2.0]), requires_grad=True)
        >>> (x * x).sum().backward()
        >>> x.grad
        array([2., 4.])
    """

    __slots__ = (
        "__weakref__",
        "data",
        "gradient",
        "hooks",
        "node",
        "recompute",
        "requires_grad",
        "tangents",
    )
    tangents: dict[object, Tensor]  # set in forward mode alone; see autograd/tangents.py
    notes_changes: ClassVar[bool] = False  # in `modes.changes`, where an attribute is assigned to

    def __init__(self, data: Array, requires_grad: bool = False, node: Any = None) -> None:
        if node is None:
            if type(data) is not _NDARRAY and not _is_array(type(data)):  # type: ignore[arg-type]
                data = _array_of_scalar(data)
            if requires_grad is not False:
                check_flag("tensor", "requires_grad", requires_grad)
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

    @property
    def grad(self) -> np.ndarray[Any, Any] | None:
        """The gradient of a leaf, an array in its shape; None before the first backward.

        On a GPU it is a cupy.ndarray, which type checkers take for the numpy.ndarray of a CPU. It
        is a tensor with a history after `backward(create_graph=True)`, until more is added to it.
        """
        gradient = self.gradient
        if gradient is None:
            return None
        if type(gradient) is not LeafGradient:
            return gradient.tensor  # type: ignore[no-any-return]
        if gradient.waiting is not None or not gradient.beta:
            gradient.settle()
        return gradient.array  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, array: Array | None) -> None:
        """Hold an array from now on, or a tensor with its history; None: no gradient."""
        if array is None:
            self.gradient = None
        elif isinstance(array, Tensor):
            self.gradient = recorded.gradient(array)
        elif type(self.gradient) is not LeafGradient or self.gradient.array is not array:
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
    def itemsize(self) -> int:
        """The bytes of one element."""
        return self.data.itemsize  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.data.nbytes  # type: ignore[no-any-return]

    backward = backward

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

    def __copy__(self) -> Self:
        """Return a tensor with the same array and the same place in the graph."""
        twin = object.__new__(type(self))
        state: Any = object.__getstate__(self)
        for attributes in state:  # attributes of a subclass, and the slots
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

    __hash__ = object.__hash__


def _array_of_scalar(data: Any) -> Array:
    """Return a NumPy scalar, which sums of NumPy are, as an array; anything else is an error."""
    if isinstance(data, np.generic):
        return np.asarray(data)
    raise not_an_operand(
        "Tensor", "data", data, "a NumPy or CuPy array; tensorgrad.tensor takes other values"
    )


class _OnGPU(Protocol):
    """An array of CuPy, or of another library that describes memory of a GPU in its way."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


# An operand of an op: a tensor, an array, a number or nested lists of them.
ArrayLike = Tensor | np.ndarray[Any, Any] | np.generic | _OnGPU | complex | Sequence["ArrayLike"]
