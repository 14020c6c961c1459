"""Data parallelism: every rank has the whole model and its own part of each batch.

Ranks start from the parameters of rank 0. Each computes the gradient of the mean loss over its
own examples; the mean of these gradients over the ranks is the gradient of the joint batch, when
all ranks have equally many examples. All then take the same optimizer step, so parameters stay
equal bit for bit and are never sent again.

Gradients lie in one flat buffer (optim/flat.py), so that a step is one all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tensorgrad.backend import Array
from tensorgrad.parallel.collectives import Comm


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


def mean_over_ranks(value: float, comm: Comm, weight: float = 1.0) -> float:
    """Return the mean of a host number over the ranks, such as a loss to be logged.

    mean = sum_r weight_r * value_r / sum_r weight_r

    Args:
        value: this rank's number; any, NaN too, where its weight is 0.
        comm: the ranks.
        weight: how much it counts, such as the number of examples behind it.
    Returns:
        the same on every rank; NaN where all weights are 0.
    """
    sums = np.array([weight * value if weight else 0.0, weight], "float64")
    comm.all_reduce(sums, "sum")
    return float(sums[0] / sums[1]) if sums[1] else float("nan")


def any_rank(flag: bool, comm: Comm) -> bool:
    """Return on all ranks alike whether the flag is set on any, such as a wish to stop.

    Ranks that leave a loop after different steps would wait for each other for ever.
    """
    flags = np.array([flag])
    comm.all_reduce(flags, "max")
    return bool(flags[0])
