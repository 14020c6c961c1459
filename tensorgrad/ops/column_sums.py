"""Sums over the rows of matrices: gradients of biases and of norm weights, added up together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.gradient import accumulated, out_of
from tensorgrad.kernels.reduce import PartialSum, sum_parts


def column_sums(parts: Sequence[Array], needs: Sequence[Any]) -> list[Array | None]:
    """Return the sums of the columns of matrices, which are gradients of biases and norm weights.

    One launch adds them with those of other layers where leaves wait for them, otherwise one each.

    Args:
        parts: (N, C) each, on the GPU, float32 or float64, rows contiguous.
        needs: of each gradient.

    Returns:
        None where the gradient is not wanted, or is added to the one so far.
    """
    now: list[PartialSum] = []
    found: list[Array | None] = []
    for rows, need in zip(parts, needs, strict=True):
        own = None
        if need:
            target = out_of(need, rows.dtype, rounds=True)
            if target is None:
                own = backend.empty(rows.shape[1:], rows.dtype, like=rows)
                now.append(PartialSum(own, 0, rows))
            else:
                one = PartialSum(*target, rows)
                if not need.waits(one, rows.size * rows.itemsize, sum_parts):
                    now.append(one)
        found.append(own)
    if now:
        sum_parts(now)
    return [
        None if dx is None else accumulated(dx, need) for dx, need in zip(found, needs, strict=True)
    ]
