"""Exponential moving average of the weights. Tests: tests/optim/test_average.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tensorgrad.core import backend, nodes
from tensorgrad.core.backend import Array
from tensorgrad.core.checks import check_between
from tensorgrad.core.dtypes import compute_dtype
from tensorgrad.core.errors import ArgumentError, CheckpointError
from tensorgrad.core.tensor import Tensor
from tensorgrad.io.display import call_text
from tensorgrad.optim.flat import zeros
from tensorgrad.optim.optimizer import Optimizer


class WeightAverage:
    """Average an optimizer's parameters exponentially: the average is often better than the last.

    The average begins with the parameters as they are. It is float32, also of 16-bit parameters,
    whose master weights are averaged. A captured step may contain `update`.

    Args:
        optimizer: its parameters must not be sharded.
        decay: 0 to 1; about 1 - 1/n for a memory of n steps.

    Raises:
        ArgumentError: decay is outside its range, or the parameters are sharded.

    Source: Polyak and Juditsky 1992, doi:10.1137/0330046; exponential: Tarvainen and Valpola 2017,
        arXiv:1703.01780, eq. 2.

    Example:
        >>> w = tg.tensor([4.0], requires_grad=True)
        >>> optimizer = tg.optim.SGD([w], lr=1.0)
        >>> average = tg.optim.WeightAverage(optimizer, decay=0.75)
        >>> w.sum().backward()
        >>> optimizer.step()
        >>> average.update()
        >>> with average.applied():
        ...     w.tolist()  # 0.75 * 4 + 0.25 * 3
        [3.75]
    """

    def __init__(self, optimizer: Optimizer, decay: float = 0.999) -> None:
        check_between("WeightAverage", "decay", decay, 0, 1)
        if not optimizer.flat.whole:
            raise ArgumentError("WeightAverage: the parameters are sharded, expected whole ones")
        self.decay = decay
        self._optimizer, self._flat = optimizer, optimizer.flat
        wide = compute_dtype(self._flat.dtype)
        self._average: Array = zeros(self._flat.size, wide, self._flat.data)
        for shard in self._flat.shards:
            self._average[shard.state] = optimizer.values(shard)

    def __repr__(self) -> str:
        return call_text(self, decay=self.decay, optimizer=self._optimizer)

    def update(self) -> None:
        """Set average = decay * average + (1 - decay) * parameters; call it after each step."""
        self._average *= self.decay
        for shard in self._flat.shards:
            self._average[shard.state] += (1 - self.decay) * self._optimizer.values(shard)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the average in the `with` block, and its own weights after it."""
        own = self._flat.data.copy()
        self._assign(self._average)
        try:
            yield
        finally:
            self._assign(own)

    def state_dict(self) -> dict[str, Array]:
        """Return the average by parameter name; the arrays are views of it."""
        return self._flat.views(self._average)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load an average from `state_dict`; nothing changes on an error.

        Raises:
            CheckpointError: an entry is missing, unknown, or of another shape or dtype.
        """
        views = self.state_dict()
        given = {
            name: (getattr(array, "shape", None), getattr(array, "dtype", None))
            for name, array in dict(state).items()
        }
        expected = {name: (view.shape, view.dtype) for name, view in views.items()}
        if given != expected:
            wrong = next(n for n in {**expected, **given} if given.get(n) != expected.get(n))
            raise CheckpointError(
                f"WeightAverage.load_state_dict: {wrong} is {given.get(wrong, 'missing')}, "
                f"expected {expected.get(wrong, 'no such entry')}"
            )
        for name, view in views.items():
            values = state[name].data if isinstance(state[name], Tensor) else state[name]
            view[...] = backend.asarray_like(values, view)

    def _assign(self, values: Array) -> None:
        self._flat.data[...] = values.astype(self._flat.dtype, copy=False)
        nodes.mark_assigned(self._flat.data)
