"""Data sets as people know them from PyTorch, and their batches, with exact resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np

from tensorgrad.core.backend import is_array
from tensorgrad.core.checks import check_function, check_integer
from tensorgrad.core.errors import ArgumentError, CheckpointError, DataError, DtypeError, ShapeError
from tensorgrad.core.tensor import Tensor
from tensorgrad.data.batches import EpochLoader, read_ahead
from tensorgrad.io.display import call_text
from tensorgrad.ops.creation import tensor
from tensorgrad.ops.shape import stack, to


class Dataset:
    """Base of data sets for `DataLoader`: define `__len__` and `__getitem__`.

    Any object with the two methods, such as a list, is a data set too.

    Example:
        >>> from tensorgrad.data import DataLoader, Dataset
        >>> class Squares(Dataset):
        ...     def __len__(self):
        ...         return 100
        ...     def __getitem__(self, number):
        ...         return number, number**2
        >>> DataLoader(Squares(), batch_size=3).batch(1)
        (tensor([3, 4, 5], dtype=int64), tensor([ 9, 16, 25], dtype=int64))
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

    Example:
        >>> from tensorgrad.data import TensorDataset
        >>> data = TensorDataset(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([7, 8]))
        >>> len(data)
        2
        >>> data[1]
        (tensor([3., 4.], dtype=float64), tensor(8, dtype=int64))
    """

    def __init__(self, *tensors: Any) -> None:
        if not tensors:
            raise ArgumentError("TensorDataset: got no tensor, expected at least one")
        for place, array in enumerate(tensors):
            name = f"TensorDataset: tensors[{place}]"
            if not (isinstance(array, Tensor) or is_array(array)):
                kind = type(array).__name__
                raise DtypeError(f"{name} is a {kind}, expected a tensor or an array")
            if not array.ndim or len(array) != len(tensors[0]):
                raise ShapeError(
                    f"{name} has shape {array.shape}, expected the length of tensors[0], of shape "
                    f"{tensors[0].shape}, in axis 0"
                )
        self.tensors = tuple(
            array.detach() if isinstance(array, Tensor) else Tensor(array) for array in tensors
        )

    def __repr__(self) -> str:
        return call_text(self, *(f"{array.dtype} {array.shape}" for array in self.tensors))

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, number: int | slice | np.ndarray[Any, Any]) -> tuple[Tensor, ...]:
        return tuple(array[number] for array in self.tensors)


class DataLoader(EpochLoader[Any]):
    """Batches of a data set; each `for` loop is an epoch.

    The order of an epoch is a pure function of the seed and the number of the epoch. So a run
    resumes exactly, also inside of an epoch: save `loader.state_dict()` with the model, and the
    loop after `load_state_dict` begins with the next batch. A loop that was left early counts as
    an epoch, as in PyTorch. `batch(step)` and `iterate(start_step)` give the same by number.

    Args:
        dataset: an object with `__len__` and `__getitem__`.
        batch_size: the number of items of a batch.
        shuffle: whether each epoch has another random order.
        drop_last: skip the last batch of an epoch where it has fewer items.
        collate_fn: the function from a list of items to a batch; default: `collate`.
        seed: the seed of the order, 0 to 2^64 - 1.
        device: the device of the tensors of the default `collate`: "cpu", "cuda" or "cuda:N".
        ahead: whether a thread reads batches ahead.

    Attributes:
        epoch: the number of the epoch of the current or the next loop, from 0.
        batches: the number of batches in an epoch.

    Raises:
        ArgumentError: an option is outside its range, or the data set has no length.
        DataError: there is not one batch.

    Example:
        >>> from tensorgrad.data import DataLoader
        >>> loader = DataLoader([1, 2, 3, 4, 5], batch_size=2)
        >>> for x in loader:
        ...     print(x.tolist())
        [1, 2]
        [3, 4]
        [5]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
        device: str = "cpu",
        ahead: bool = False,
    ) -> None:
        check_integer("DataLoader", "batch_size", batch_size, 1)
        if collate_fn is not None:
            check_function("DataLoader", collate_fn)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise ArgumentError(
                f"DataLoader: dataset is a {type(dataset).__name__}, expected an object with "
                "__len__ and __getitem__"
            )
        length = len(dataset)
        batches = length // batch_size if drop_last else -(-length // batch_size)
        if not batches:
            raise DataError(
                f"DataLoader: dataset has {length} items, expected "
                f"{batch_size if drop_last else 1} or more"
            )
        super().__init__(seed, batches)
        self.dataset, self.batch_size, self.shuffle = dataset, batch_size, shuffle
        self._collate, self._device, self._ahead = collate_fn, device, ahead
        self._length = length
        self.epoch = 0
        self._place = 0  # place of the next batch in the epoch
        self._resumes = True  # the next loop begins there

    def __repr__(self) -> str:
        names = ("batches", "batch_size", "shuffle", "epoch")
        settings = {name: getattr(self, name) for name in names}
        return call_text(self, items=self._length, **settings, seed=self._seed)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        if not self._resumes and self._place:  # the loop before was left early
            self.epoch, self._place = self.epoch + 1, 0
        self._resumes = False
        first, count = self.epoch * self.batches + self._place, self.batches - self._place
        if not self._ahead:
            batches: Iterator[Any] = map(self.batch, range(first, first + count))
            yield from map(self._delivered, batches)
            return
        with closing(read_ahead(self.batch, first)) as source:  # type: ignore[type-var]
            yield from map(self._delivered, islice(source, count))

    def state_dict(self) -> dict[str, int]:
        """Return the place of the next batch, as plain integers."""
        return {"seed": self._seed, "epoch": self.epoch, "batch": self._place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop begin where the state was saved; the seed becomes that of the state.

        The data set, the size of the batches and the other options must be those of the saved one.

        Raises:
            CheckpointError: the state is not one of `state_dict`; nothing changes.
        """
        names = {"seed": 1 << 64, "epoch": 1 << 32, "batch": self.batches}
        good = isinstance(state, Mapping) and set(state) == set(names)
        if not good or not all(
            isinstance(state[name], int) and 0 <= state[name] < end for name, end in names.items()
        ):
            raise CheckpointError(
                f"DataLoader.load_state_dict: got {state!r:.80}, expected seed, epoch, and a batch "
                f"below {self.batches}"
            )
        self._seed, self.epoch, self._place = state["seed"], state["epoch"], state["batch"]
        self._order, self._resumes = None, True

    def _delivered(self, batch: Any) -> Any:
        """Count a batch, before the loop gets it: a state saved in the loop is behind it."""
        self._place += 1
        if self._place == self.batches:
            self.epoch, self._place = self.epoch + 1, 0
        return batch

    def _shuffled(self, bits: np.random.Philox) -> Sequence[np.ndarray[Any, Any]]:
        order = np.arange(self._length)
        if self.shuffle:
            order = np.argsort(bits.random_raw(self._length), kind="stable")
        starts = range(0, self.batches * self.batch_size, self.batch_size)
        return [order[start : start + self.batch_size] for start in starts]

    def _read(self, numbers: np.ndarray[Any, Any]) -> Any:
        if self._collate is None and isinstance(self.dataset, TensorDataset):
            return tuple(to(rows, self._device) for rows in self.dataset[numbers])
        items = [self.dataset[number] for number in numbers.tolist()]
        return self._collate(items) if self._collate else collate(items, self._device)


def collate(items: list[Any], device: str = "cpu") -> Any:
    """Return a batch: the items, stacked along a new first axis.

    Args:
        items: numbers, arrays or tensors of one shape, or tuples, lists or dictionaries of these.
            Text and other values stay in a list.
        device: the device of the tensors: "cpu", "cuda" or "cuda:N".

    Returns:
        A tensor (B, ...) of B items, or a tuple or dictionary of these, as the items are.

    Raises:
        ShapeError: shapes differ; pass a `collate_fn` that pads.
        ArgumentError: dictionaries differ in their names, or tuples in their lengths.

    Example:
        >>> from tensorgrad.data import collate
        >>> collate([{"x": 1.5, "name": "a"}, {"x": 2.5, "name": "b"}])
        {'x': tensor([1.5, 2.5], dtype=float32), 'name': ['a', 'b']}
    """
    first = items[0]
    if isinstance(first, Mapping):
        if any(set(item) != set(first) for item in items):
            raise ArgumentError("collate: the items have different names, expected equal ones")
        return {name: collate([item[name] for item in items], device) for name in first}
    if isinstance(first, tuple | list):
        if any(len(item) != len(first) for item in items):
            raise ArgumentError("collate: the items have different lengths, expected equal ones")
        return tuple(collate(list(parts), device) for parts in zip(*items, strict=True))
    if isinstance(first, Tensor) or is_array(first):
        return to(stack(items).detach(), device)
    if isinstance(first, bool | int | float | np.generic):
        return tensor(items, device=device)
    return items
