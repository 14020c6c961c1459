"""Shapes, strides and storage of a tensor, on the CPU."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

__all__ = [
    "IndexingError", "Storage", "TensorData", "UserIndex", "UserShape", "UserStrides",
    "broadcast_index", "index_to_position", "shape_broadcast", "strides_from_shape", "to_index",
]  # fmt: skip

Storage: TypeAlias = Any  # a NumPy array of float32, 1-D
UserIndex: TypeAlias = Sequence[int]
UserShape: TypeAlias = Sequence[int]
UserStrides: TypeAlias = Sequence[int]


class IndexingError(RuntimeError):
    """A shape or an index does not fit."""


def index_to_position(index: UserIndex, strides: UserStrides) -> int:
    """Return the place in the storage of an index."""
    return int(sum(int(i) * int(stride) for i, stride in zip(index, strides, strict=True)))


def to_index(ordinal: int, shape: UserShape, out_index: Any) -> None:
    """Write the index of the element number `ordinal`, in C order, to out_index."""
    out_index[:] = np.unravel_index(ordinal, tuple(shape))


def broadcast_index(
    big_index: UserIndex, big_shape: UserShape, shape: UserShape, out_index: Any
) -> None:
    """Write the index in `shape` of an index in the shape it broadcasts to, to out_index."""
    skipped = len(big_shape) - len(shape)
    for axis, size in enumerate(shape):
        out_index[axis] = big_index[skipped + axis] if size > 1 else 0


def shape_broadcast(shape1: UserShape, shape2: UserShape) -> tuple[int, ...]:
    """Return the shape that two shapes broadcast to.

    Raises:
        IndexingError: they do not.
    """
    try:
        return tuple(np.broadcast_shapes(tuple(shape1), tuple(shape2)))
    except ValueError as error:
        raise IndexingError(f"shape_broadcast: {shape1} and {shape2} do not fit") from error


def strides_from_shape(shape: UserShape) -> tuple[int, ...]:
    """Return the strides, in elements, of an array in C order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class TensorData:
    """A one-dimensional storage, read by shape and strides.

    Args:
        storage: numbers, one for each element.
        shape: of the tensor, a tuple.
        strides: in elements, a tuple; default: those of C order.

    Raises:
        IndexingError: the strides do not fit the shape.
    """

    def __init__(
        self, storage: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None = None
    ) -> None:
        self._storage = np.asarray(storage, np.float32)
        self.shape = shape
        self.strides = strides_from_shape(shape) if strides is None else strides
        if len(self.strides) != len(shape):
            raise IndexingError(f"TensorData: strides {self.strides} do not fit shape {shape}")
        self.dims, self.size = len(shape), math.prod(shape)
        self._shape, self._strides = np.array(shape), np.array(self.strides)
        assert len(self._storage) == self.size

    @classmethod
    def from_array(cls, array: Any) -> TensorData:
        """Return the data of an array, sharing memory where it is in C order."""
        return cls(np.ascontiguousarray(array).reshape(-1), array.shape)

    @property
    def array(self) -> Any:
        """A NumPy view of the storage, with shape and strides."""
        itemsize = self._storage.itemsize
        return np.lib.stride_tricks.as_strided(
            self._storage, self.shape, [stride * itemsize for stride in self.strides]
        )

    def is_contiguous(self) -> bool:
        """Return whether no axis has a larger stride than an axis before it."""
        return list(self.strides) == sorted(self.strides, reverse=True)

    shape_broadcast = staticmethod(shape_broadcast)

    def index(self, index: int | UserIndex) -> int:
        """Return the place in the storage of an index.

        Raises:
            IndexingError: the index has another length, or is out of range.
        """
        where: tuple[int, ...] = (index,) if isinstance(index, int) else tuple(index)
        if len(where) != self.dims:
            raise IndexingError(f"index: {where} does not fit shape {self.shape}")
        if not all(0 <= i < size for i, size in zip(where, self.shape, strict=True)):
            raise IndexingError(f"index: {where} is out of range for shape {self.shape}")
        return index_to_position(where, self.strides)

    def indices(self) -> Iterator[tuple[int, ...]]:
        """Yield every index, in C order."""
        return np.ndindex(*self.shape)

    def sample(self) -> tuple[int, ...]:
        """Return a random index."""
        return tuple(random.randint(0, size - 1) for size in self.shape)

    def get(self, key: int | UserIndex) -> Any:
        """Return an element."""
        return self._storage[self.index(key)]

    def set(self, key: int | UserIndex, val: float) -> None:
        """Replace an element."""
        self._storage[self.index(key)] = val

    def tuple(self) -> Any:
        """Return storage, shape and strides."""
        return self._storage, self._shape, self._strides

    def permute(self, *order: int) -> TensorData:
        """Return the same storage with the axes in another order."""
        assert sorted(order) == list(range(self.dims)), f"permute: {order} of shape {self.shape}"
        shape, strides = [self.shape[i] for i in order], [self.strides[i] for i in order]
        return TensorData(self._storage, tuple(shape), tuple(strides))

    def to_string(self) -> str:
        """Return the elements as text."""
        return str(self.array)
