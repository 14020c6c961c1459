"""Data sets as people know them from PyTorch: a length, and an item for each number."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorgrad.backend import is_array
from tensorgrad.display import call_text
from tensorgrad.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.tensor import Tensor


class Dataset:
    """Base of data sets for `DataLoader`: define `__len__` and `__getitem__`.

        class Squares(Dataset):
            def __len__(self):
                return 100

            def __getitem__(self, number):
                return np.float32(number), np.float32(number**2)

    Any object with the two methods, such as a list, is a data set too.
    """

    def __len__(self) -> int:
        """Return the number of items."""
        raise NotImplementedError(f"{type(self).__name__} defines no __len__")

    def __getitem__(self, number: Any) -> Any:
        """Return an item: a number, an array, a tensor, or a tuple or dictionary of these."""
        raise NotImplementedError(f"{type(self).__name__} defines no __getitem__")


class TensorDataset(Dataset):
    """Items are rows of tensors; a batch is one index into each.

    Args:
        tensors: tensors or arrays with equal lengths of axis 0.

    Raises:
        ArgumentError: there is none.
        DtypeError: one is neither a tensor nor an array.
        ShapeError: the lengths differ, or one has no axis.
    """

    def __init__(self, *tensors: Any) -> None:
        if not tensors:
            raise ArgumentError("TensorDataset: got no tensor, expected at least one")
        for place, each in enumerate(tensors):
            if not (isinstance(each, Tensor) or is_array(each)):
                kind = type(each).__name__
                raise DtypeError(
                    f"TensorDataset: tensors[{place}] is a {kind}, expected a tensor or an array"
                )
            if not each.ndim or len(each) != len(tensors[0]):
                raise ShapeError(
                    f"TensorDataset: tensors[{place}] has shape {each.shape}, expected the length "
                    f"of tensors[0], of shape {tensors[0].shape}, in axis 0"
                )
        self.tensors = tuple(
            each.detach() if isinstance(each, Tensor) else Tensor(each) for each in tensors
        )

    def __repr__(self) -> str:
        return call_text(self, *(f"{each.dtype} {each.shape}" for each in self.tensors))

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, number: int | slice | np.ndarray[Any, Any]) -> tuple[Tensor, ...]:
        return tuple(each[number] for each in self.tensors)
