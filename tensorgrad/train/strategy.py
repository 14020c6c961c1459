"""The interface between the training loop and the parallel strategies.

A step of the loop is

    optimizer.zero_grad()
    strategy.compute_gradients(...)                            # forward, backward, all-reduce
    optimizer.step(..., reduce_norm=strategy.reduce_norm)      # clip by the norm over all ranks
    strategy.after_step()                                      # all-gather of updated parameters

and strategies (parallel/data.py, zero.py, pipeline.py) differ only inside these calls.

The loss of a batch is the sum over the targets that count, divided by their number in the whole
batch, however parts and ranks divide it. A part has a mean loss of its own, which weighs as many
targets as count there (`count_targets`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tensorgrad import random
from tensorgrad.core import backend, instrument
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import float64
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.tensor import Tensor
from tensorgrad.nn import Module
from tensorgrad.optim import FlatParameters, LossScaler, Optimizer
from tensorgrad.optim.flat import NamedParameters
from tensorgrad.train.checkpoint import Checkpoint, Contents, OneWriter
from tensorgrad.train.placement import Placement
from tensorgrad.train.shards import Shards, load_pieces, pieces_of
from tensorgrad.train.user_file import NUMBERS, called, wrong_return

Batch = tuple[Any, ...]  # NumPy arrays whose first axis counts the rows
Loss = Callable[..., Tensor]
Count = Callable[..., Any]
MakeOptimizer = Callable[[FlatParameters | NamedParameters], Optimizer]

_IGNORED = -100  # the target that cross_entropy ignores


def count_targets(*arrays: Any) -> Any:
    """Return how many targets of a batch count in its mean loss.

    The targets are the last array of integers, where -100 does not count, as in `cross_entropy`. A
    batch without integers counts rows.

    Args:
        arrays: of the batch, NumPy or CuPy.
    Returns:
        An integer or, of CuPy arrays, a 0-d array: the host does not wait for the GPU.
    """
    for array in reversed(arrays):
        if array.dtype.kind == "i":
            return (array != _IGNORED).sum()
        if array.dtype.kind == "u":
            return array.size
    return len(arrays[0])


class Strategy:
    """How ranks train together; the base class is one process alone.

    A strategy overrides methods. Every rank calls the same methods in the same order.

    Attributes of every strategy:
        rank, ranks: the index of this process's part of each batch, from 0, and the number of
            parts. Processes that share a part (stages of a pipeline, say) have the same index.
        is_main: whether this process shows progress and saves: one does.
        processes: the number of processes that train together.
        captures: whether a step may be a CUDA graph: the host decides nothing in it.
        alone: whether there is no other process, which would wait for this one: signals and errors
            concern this process only.
        by_block: whether gradients or parameters are those of one block at a time, each of which
            runs once before another does.
        writers: the ranks that write a checkpoint together.

    Example:
        >>> model, strategy = tg.nn.Linear(2, 1), tg.train.Strategy()
        >>> optimizer = strategy.prepare(model, tg.optim.SGD)
        >>> parts = [(np.ones((4, 2), "float32"),)]
        >>> total = strategy.compute_gradients(lambda x: model(x).mean(), parts)
        >>> model.weight.grad
        array([[1., 1.]], dtype=float32)
    """

    captures = False
    alone = False
    by_block = False
    rank = 0
    ranks = 1
    processes = 1
    is_main = True
    writers = OneWriter()
    # The box of each array of the whole model that this rank has, by its name in its own model.
    _placements: Mapping[str, Placement] | None = None

    def prepare(self, model: Module, make_optimizer: MakeOptimizer) -> Optimizer:
        """Lay out the parameters as the strategy needs them, and return their optimizer.

        Args:
            model: on its device and in its dtype.
            make_optimizer: takes flat parameters, or the pairs (name, tensor) to flatten.
        """
        return make_optimizer(model.named_parameters())

    def begin(
        self, step: int, arrays: Sequence[Array], facts: Mapping[str, Any] | None = None
    ) -> None:
        """Check that all ranks are at the same step, and broadcast the main rank's arrays.

        Args:
            step: the number of steps done.
            arrays: parameters, buffers, optimizer state; written in place.
            facts: values that must be equal on all ranks, by name, as JSON.
        Raises:
            CommError: the ranks differ; the message says which ones and in what.
        """

    def compute_gradients(
        self,
        loss: Loss,
        parts: Sequence[Batch],
        scaler: LossScaler | None = None,
        count: Count = count_targets,
    ) -> Array:
        """Compute the gradients of the mean loss over all ranks and parts.

        The mean is that of one process: over all targets that count, wherever they are. A batch in
        which none counts has gradients of 0, as `cross_entropy` has.

        The gradients must be 0 before: ranks would reduce earlier ones twice.

        Part k of rank r draws its random numbers (dropout) from stream r * len(parts) + k, each
        part from the same draw number on. So dropout depends on the total number of parts of a
        batch, not on how the ranks divide them.

        Args:
            loss: takes the arrays of a part and returns their mean loss.
            parts: equal parts of this rank's rows, on the model's device.
            scaler: for float16.
            count: takes the arrays of a part and returns how much its mean loss divides by, such
                as the sum of class weights.
        Returns:
            The sum of the losses of the parts, on the device. Its mean over ranks and parts is the
            loss of the batch.
        """
        total: Array = 0.0
        shares = self.shares(parts, count)
        before = random.get_state()
        draw = before["draw"]
        for number, part in enumerate(parts):
            random.set_state({**before, "stream": self.rank * len(parts) + number})
            value = weighted(mean_of(loss, part), shares, number)
            total = total + value.data
            draw = max(draw, random.get_state()["draw"])
            if len(parts) > 1:
                value = value * (1 / len(parts))
            if scaler is not None:
                value = scaler.scale(value)
            with self.no_sync() if number < len(parts) - 1 else nullcontext():
                value.backward()
        random.set_state({**before, "draw": draw})
        with instrument.phase("all-reduce"):
            self.reduce_gradients()
            if scaler is not None:
                scaler.reduce(self.reduce_largest)
        return total

    def shares(self, parts: Sequence[Batch], count: Count = count_targets) -> Array | None:
        """Return the factor of each part's loss, for a mean over ranks and parts to be the batch's.

        share = its targets / mean number of targets of all parts of all ranks

        Returns:
            (parts,) float64 on the device of the parts, 1 where all have as many targets and 0
            where no part has one; None where a batch has one part alone.
        """
        if len(parts) * self.ranks == 1:
            return None
        counts = backend.empty((len(parts),), float64, parts[0][0])
        for number, part in enumerate(parts):
            counts[number] = counted(count, part)
        total = counts.sum(keepdims=True)
        self.add_counts(total)
        xp = backend.namespace(counts)
        shares: Array = counts * (len(parts) * self.ranks) / xp.where(total > 0, total, 1)
        return shares

    def add_counts(self, count: Array) -> None:
        """Add, in place, how many targets other ranks have of a batch: here as many as this one."""
        count *= self.ranks

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for backward that does not reduce: more gradients will be added."""
        return nullcontext()

    def reduce_gradients(self) -> None:
        """Replace the gradients by their mean over the ranks, after the last backward of a step."""

    def reduce_largest(self, values: Array) -> None:
        """Replace integers by the largest over the ranks that share a batch, in place."""

    def reduce_norm(self, squares: Array) -> None:
        """Add, in place, the squares of gradients that only other ranks have."""

    def add_shards(self, array: Array) -> None:
        """Add, in place, the arrays of ranks that keep other shards of the gradients."""

    def after_step(self) -> None:
        """Give all ranks the parameters that other ranks have updated."""

    def reset(self) -> None:
        """Forget a step that did not reach its end, whose collectives did not run."""

    def add_losses(
        self, loss: Loss, batches: Iterable[Batch], count: Count = count_targets
    ) -> tuple[float, float]:
        """Return the sum over this rank's batches of mean loss * targets, and of the targets."""
        total: Array = 0.0
        targets: Array = 0.0
        for batch in batches:
            value, number = mean_of(loss, batch).data.astype(float64), counted(count, batch)
            total, targets = total + value * number, targets + number
        return float(total), float(targets)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums of numbers over the ranks, the same on every rank."""
        return list(values)

    def contents(self, model: Module, optimizer: Optimizer) -> Contents | None:
        """Return what this rank writes of a checkpoint; None on ranks that do not write.

        The ranks begin and finish a checkpoint together; each writes by itself, in any thread.
        """
        if self.writers.alone and not self.is_main:
            return None
        shards = Shards(self.writers, pieces_of(model, optimizer, self._placements))
        return shards.contents(optimizer.numbers())

    def load_latest(self, folder: Path) -> Checkpoint | None:
        """Open the newest intact checkpoint, the same on all ranks; None if there is none.

        Raises:
            CheckpointError: all checkpoints are damaged.
        """
        return self.writers.load_latest(folder)

    def load(self, checkpoint: Checkpoint, model: Module, optimizer: Optimizer) -> None:
        """Load a checkpoint that any number of ranks has written.

        Raises:
            CheckpointError: it does not fit; then nothing is changed.
        """
        load_pieces(self.writers, checkpoint, model, optimizer, self._placements)
        self.after_step()  # gathers parameters that other ranks have loaded


def mean_of(loss: Loss, batch: Batch) -> Tensor:
    """Return the mean loss of a batch.

    Raises:
        ArgumentError: the loss is not a scalar tensor.
    """
    with instrument.phase("forward"):
        value = called("train", "loss", loss, batch)
    if not isinstance(value, Tensor) or value.shape:
        got = f"shape {value.shape}" if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(f"train: loss returned {got}, expected a scalar tensor")
    return value


def counted(count: Count, batch: Batch) -> Any:
    """Return how much the mean loss of a batch divides by.

    Raises:
        ArgumentError: it is not a number.
    """
    found = called("train", "count", count, batch)
    if not isinstance(found, NUMBERS) and not (backend.is_array(found) and found.size == 1):
        raise wrong_return("train", "count", found, "a number, or an array of one")
    return found


def weighted(value: Tensor, shares: Array | None, number: int) -> Tensor:
    """Return the mean loss of a part times its share, see `Strategy.shares`."""
    if shares is None:
        return value
    return value * Tensor(shares[number : number + 1].reshape(()).astype(value.dtype))


class OneProcess(Strategy):
    """Train without other ranks.

    Example:
        >>> strategy = tg.train.OneProcess()
        >>> strategy.rank, strategy.ranks, strategy.alone
        (0, 1, True)
    """

    captures = True
    alone = True
