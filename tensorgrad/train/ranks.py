"""The seam between the training loop and parallelism: what the loop asks of the ranks.

A step of the loop is

    optimizer.zero_grad()
    ranks.compute_gradients(...)                            # forward, backward, what ranks add up
    optimizer.step(..., reduce_norm=ranks.reduce_norm)      # clip by the norm over all ranks
    ranks.after_step()                                      # what ranks give each other back

and all else a strategy (parallel/data.py, zero.py, pipeline.py) does differs inside these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from tensorgrad import random
from tensorgrad.backend import Array
from tensorgrad.nn import Module
from tensorgrad.optim import FlatParameters, LossScaler, Optimizer
from tensorgrad.optim.flat import NamedParameters
from tensorgrad.tensor import Tensor

Batch = tuple[Any, ...]  # NumPy arrays whose first axis counts the rows
Loss = Callable[..., Tensor]
MakeOptimizer = Callable[[FlatParameters | NamedParameters], Optimizer]


class Ranks:
    """The processes that train together; as it stands, one process alone.

    A strategy overrides what it does otherwise. Every rank calls the same methods in the same
    order.

    Attributes:
        rank, ranks: into how many parts each batch is cut, and which of them is this process's,
            from 0. Where several processes share a part (stages of a pipeline, say) they have
            the same number.
        is_main: whether this process shows progress and saves: one does.
    """

    rank = 0
    ranks = 1
    is_main = True

    def prepare(self, model: Module, make_optimizer: MakeOptimizer) -> Optimizer:
        """Lay the parameters out as the strategy needs them, and return their optimizer.

        Args:
            model: on its device and in its dtype.
            make_optimizer: takes the flat parameters, or the pairs (name, tensor) to make them of.
        """
        return make_optimizer(model.named_parameters())

    def begin(self, step: int, arrays: Sequence[Array]) -> None:
        """Check that all ranks are at this step, and give all the arrays of the main rank."""

    def compute_gradients(
        self, loss: Loss, parts: Sequence[Batch], scaler: LossScaler | None = None
    ) -> Array:
        """Add the gradient of the mean loss over all ranks and parts to the optimizer's gradients.

        Part k of rank r draws its random numbers (dropout) from stream r * len(parts) + k, each
        part from the same draw number on. So a batch that is cut into equally many parts in all,
        on any number of ranks, drops the same.

        Args:
            loss: takes the arrays of a part and returns their mean loss.
            parts: equal parts of this rank's rows, on the model's device.
            scaler: for float16.
        Returns:
            The sum of the losses of the parts, on the device.
        """
        total: Array = 0.0
        before = random.get_state()
        draw = before["draw"]
        for number, part in enumerate(parts):
            random.set_state({**before, "stream": self.rank * len(parts) + number})
            value = loss(*part)
            total = total + value.data
            draw = max(draw, random.get_state()["draw"])
            if len(parts) > 1:
                value = value * (1 / len(parts))
            if scaler is not None:
                value = scaler.scale(value)
            with self.no_sync() if number < len(parts) - 1 else nullcontext():
                value.backward()
        random.set_state({**before, "draw": draw})
        self.reduce_gradients()
        return total

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for backward after which more gradients will be added."""
        return nullcontext()

    def reduce_gradients(self) -> None:
        """After the last backward of a step: replace gradients by their mean over the ranks."""

    def reduce_norm(self, squares: Array) -> None:
        """Add, in place, the squares of gradients that other ranks alone have."""

    def after_step(self) -> None:
        """Give all ranks the parameters that the optimizer has updated elsewhere."""

    def add_losses(self, loss: Loss, batches: Iterable[Batch]) -> tuple[float, int]:
        """Return the sum over this rank's batches of mean loss * rows, and the number of rows."""
        total, rows = np.zeros(()), 0
        for batch in batches:
            part = loss(*batch).data.astype(np.float64) * len(batch[0])
            total = part if rows == 0 else total + part
            rows += len(batch[0])
        return float(total), rows

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over the ranks of some numbers, the same on every rank."""
        return list(values)

    def gather_state(
        self, model: Module, optimizer: Optimizer
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the arrays of the model and the state of the optimizer, whole on the main rank."""
        arrays = {name: tensor.data for name, tensor in model.state_dict().items()}
        return arrays, optimizer.state_dict()

    def load_state(
        self,
        model: Module,
        optimizer: Optimizer,
        arrays: dict[str, Array],
        state: dict[str, Any],
    ) -> None:
        """Take over what `gather_state` gave on the main rank, on any number of ranks.

        Raises:
            CheckpointError: it does not fit; then nothing changes.
        """
        optimizer.load_state_dict(state)
        model.load_state_dict(arrays)


class OneProcess(Ranks):
    """Training without other ranks."""
