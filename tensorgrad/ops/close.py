"""Whether values are close or equal, as in NumPy. Tests: tests/ops/test_close.py."""

from __future__ import annotations

from typing import Any

from tensorgrad.backend import namespace, same_device, widened
from tensorgrad.errors import ShapeError
from tensorgrad.operands import tensor_of
from tensorgrad.ops.stacking import broadcast_shapes
from tensorgrad.tensor import Tensor

__all__ = ["allclose", "array_equal", "array_equiv", "isclose"]


def isclose(
    a: Any, b: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> Tensor:
    """Return whether |a - b| <= atol + rtol |b|, elementwise; infinities are close to themselves.

    Args:
        a, b: tensors, arrays, numbers or lists that broadcast.
        rtol, atol: the relative and the absolute tolerance.
        equal_nan: whether NaN is close to NaN.
    """
    first, second = tensor_of("isclose", "a", a).data, tensor_of("isclose", "b", b).data
    same_device("isclose", ("a", "b"), (first, second))
    broadcast_shapes(first.shape, second.shape)
    xp = namespace(first)
    return Tensor(xp.asarray(xp.isclose(widened(first), widened(second), rtol, atol, equal_nan)))


def allclose(
    a: Any, b: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """Return whether all elements are close; see `isclose`. The host waits for the answer."""
    return bool(isclose(a, b, rtol, atol, equal_nan).data.all())


def array_equal(a: Any, b: Any, equal_nan: bool = False) -> bool:
    """Return whether a and b have one shape and equal elements. The host waits for the answer."""
    first, second = tensor_of("array_equal", "a", a).data, tensor_of("array_equal", "b", b).data
    same_device("array_equal", ("a", "b"), (first, second))
    if first.shape != second.shape:
        return False
    alike = first == second
    if equal_nan:
        alike = alike | ((first != first) & (second != second))
    return bool(alike.all())


def array_equiv(a: Any, b: Any) -> bool:
    """Return whether a and b broadcast to one shape and have equal elements there."""
    first, second = tensor_of("array_equiv", "a", a).data, tensor_of("array_equiv", "b", b).data
    same_device("array_equiv", ("a", "b"), (first, second))
    try:
        broadcast_shapes(first.shape, second.shape)
    except ShapeError:
        return False
    return bool((first == second).all())
