"""Data parallelism: every rank has the whole model and its own part of each batch.

Ranks start from the parameters of rank 0. Each computes the gradient of the mean loss over its
own examples; the mean of these gradients over the ranks is the gradient of the joint batch, when
all ranks have equally many examples. All then take the same optimizer step, so parameters stay
equal bit for bit and are never sent again.

Gradients lie in one flat buffer (optim/flat.py), so that a step is one all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from tensorgrad.backend import Array
from tensorgrad.errors import ArgumentError
from tensorgrad.nn import Module
from tensorgrad.optim import FlatParameters, Optimizer
from tensorgrad.parallel.checkpoint import load_latest, load_pieces
from tensorgrad.parallel.collectives import Comm
from tensorgrad.train.checkpoint import Checkpoint
from tensorgrad.train.ranks import MakeOptimizer, Ranks


def broadcast_parameters(arrays: Iterable[Array], comm: Comm, root: int = 0) -> None:
    """Replace arrays on all ranks by those of `root`: parameters, buffers, optimizer state.

    Args:
        arrays: the same number, shapes and dtypes on all ranks; written in place. Flat buffers
            are the fewest calls.
        comm: the ranks.
        root: the rank that sends.
    Raises:
        CommError: the ranks have different arrays.
    """
    arrays = list(arrays)
    comm.agree(
        "broadcast_parameters", {"arrays": [f"{each.dtype} {each.shape}" for each in arrays]}
    )
    for array in arrays:
        comm.broadcast(array, root)


def all_reduce_gradients(grad: Array, comm: Comm) -> None:
    """Replace the gradient on all ranks by the mean over the ranks, with one all-reduce.

    grad = 1/ranks * sum_r grad_r

    Args:
        grad: flat gradient buffer, (parameters,), float32; written in place.
        comm: the ranks.
    Raises:
        CommError: the ranks have different buffers.
    """
    comm.all_reduce(grad, "mean")


class DataParallel(Ranks):
    """Every rank computes the gradient of its part of the batch; all take the mean of these.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: Comm) -> None:
        """Train on the ranks of `comm`."""
        self._comm = comm
        self._flat: FlatParameters | None = None
        self.rank, self.ranks, self.is_main = comm.rank, comm.size, comm.rank == 0

    def prepare(self, model: Module, make_optimizer: MakeOptimizer) -> Optimizer:
        """Return the optimizer of the parameters, which are the same on all ranks."""
        self._flat = FlatParameters(model.named_parameters())
        return make_optimizer(self._flat)

    def begin(self, step: int, arrays: Sequence[Array]) -> None:
        """Check that all ranks are at this step, and give all the arrays of rank 0.

        Raises:
            CommError: they are not, as where a host does not see the checkpoints of the others;
                or the ranks have different arrays.
        """
        self._comm.agree("train", {"step": step})
        broadcast_parameters(arrays, self._comm)

    def reduce_gradients(self) -> None:
        """Replace the gradients on every rank by their mean over the ranks."""
        if self._flat is None:
            raise ArgumentError("DataParallel: the optimizer is not from prepare(), expected that")
        all_reduce_gradients(self._flat.grad, self._comm)

    def load_latest(self, folder: Path) -> Checkpoint | None:
        """Open the newest checkpoint that is whole, the same on all ranks; None without any."""
        return load_latest(folder, self._comm)

    def load(self, checkpoint: Checkpoint, model: Module, optimizer: Optimizer) -> None:
        """Take over a checkpoint of one process, or of which any number of ranks have pieces."""
        load_pieces(self._comm, checkpoint, model, optimizer)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over the ranks of some numbers, the same on every rank.

        For what the loop decides and shows: losses, rows, whether any rank was asked to stop.
        Ranks that leave a loop after different steps would wait for each other for ever.
        """
        sums = np.array(values, "float64")
        self._comm.all_reduce(sums)
        return [float(each) for each in sums]
