"""The seam between the training loop and parallelism: what the loop asks of the ranks.

A step of the loop is

    optimizer.zero_grad()
    ranks.compute_gradients(...)                            # forward, backward, what ranks add up
    optimizer.step(..., reduce_norm=ranks.reduce_norm)      # clip by the norm over all ranks
    ranks.after_step()                                      # what ranks give each other back

and all else a strategy (parallel/data.py, zero.py, pipeline.py) does differs inside these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad import random
from tensorgrad.backend import Array
from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.nn import Module
from tensorgrad.optim import FlatParameters, LossScaler, Optimizer
from tensorgrad.optim.flat import NamedParameters
from tensorgrad.tensor import Tensor
from tensorgrad.train.checkpoint import Checkpoint, check_arrays, load_latest, save_checkpoint

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

    def begin(
        self, step: int, arrays: Sequence[Array], facts: Mapping[str, Any] | None = None
    ) -> None:
        """Check that all ranks are at this step, and give all the arrays of the main rank.

        Args:
            step: how many steps were done.
            arrays: parameters, buffers, optimizer state; written in place.
            facts: what else must be the same on all ranks, by name; JSON can hold it.
        Raises:
            CommError: the ranks differ; it says which of them in what.
        """

    def compute_gradients(
        self, loss: Loss, parts: Sequence[Batch], scaler: LossScaler | None = None
    ) -> Array:
        """Make the optimizer's gradients that of the mean loss over all ranks and parts.

        They must be 0 before: what ranks have added up once, they would add up again.

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
            value = mean_of(loss, part)
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

    def add_shards(self, array: Array) -> None:
        """Add, in place, what ranks that keep other parts of the gradients have in its place."""

    def after_step(self) -> None:
        """Give all ranks the parameters that the optimizer has updated elsewhere."""

    def add_losses(self, loss: Loss, batches: Iterable[Batch]) -> tuple[float, int]:
        """Return the sum over this rank's batches of mean loss * rows, and the number of rows."""
        total, rows = np.zeros(()), 0
        for batch in batches:
            part = mean_of(loss, batch).data.astype(np.float64) * len(batch[0])
            total = part if rows == 0 else total + part
            rows += len(batch[0])
        return float(total), rows

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over the ranks of some numbers, the same on every rank."""
        return list(values)

    def save(
        self,
        folder: Path,
        step: int,
        model: Module,
        optimizer: Optimizer,
        state: Mapping[str, Any],
        keep: int,
    ) -> Path | None:
        """Write a checkpoint of the model and the optimizer, as `save_checkpoint` does.

        Args:
            folder, step, keep: as for `save_checkpoint`.
            model, optimizer: whose arrays are saved.
            state: what else is saved; that of the main rank counts.
        Returns:
            The checkpoint's folder; None on ranks that do not know it.
        Raises:
            CheckpointError: it cannot be written; earlier ones are unchanged.
        """
        if not self.is_main:
            return None
        arrays = {name: tensor.data for name, tensor in model.state_dict().items()}
        numbers = optimizer.numbers()
        found = optimizer.state_dict()
        buffers = {name: value for name, value in found.items() if name not in numbers}
        groups = {"model": arrays, "optimizer": buffers}
        return save_checkpoint(folder, step, groups, {**state, "optimizer": numbers}, keep)

    def load_latest(self, folder: Path) -> Checkpoint | None:
        """Open the newest checkpoint that is whole, the same on all ranks; None without any.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged.
        """
        return load_latest(folder)

    def load(self, checkpoint: Checkpoint, model: Module, optimizer: Optimizer) -> None:
        """Take over what `save` has written, on any number of ranks.

        Raises:
            CheckpointError: it does not fit; then nothing changes.
        """
        arrays = checkpoint.arrays("model")
        check_arrays(checkpoint, arrays, model.state_dict())
        numbers = checkpoint.entry("optimizer")
        if not isinstance(numbers, Mapping):
            raise CheckpointError(
                f"load: {checkpoint.path}: optimizer is {numbers!r:.80}, expected a mapping"
            )
        optimizer.load_state_dict({**checkpoint.arrays("optimizer"), **numbers})
        model.load_state_dict(arrays)


def mean_of(loss: Loss, batch: Batch) -> Tensor:
    """Return the mean loss of a batch.

    Raises:
        ArgumentError: it is no scalar tensor.
    """
    value = loss(*batch)
    if not isinstance(value, Tensor) or value.shape:
        got = f"shape {value.shape}" if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(f"train: loss returned {got}, expected a scalar tensor")
    return value


class OneProcess(Ranks):
    """Training without other ranks."""
