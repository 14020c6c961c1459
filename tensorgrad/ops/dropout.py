"""Dropout. Tests: tests/ops/test_dropout.py. Backward keeps the mask: one byte an element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorgrad import backend, philox, random
from tensorgrad.autograd import record
from tensorgrad.backend import Array
from tensorgrad.dtypes import bool_, compute_dtype
from tensorgrad.ops.operand import float_tensor, probability
from tensorgrad.tensor import Tensor

__all__ = ["dropout"]


def dropout(x: Any, p: float = 0.5, training: bool = True) -> Tensor:
    """Set elements to 0 with probability p and scale the others by 1 / (1 - p).

    Which ones depends on the state of `tensorgrad.random` alone, not on the device.

    Args:
        x: any shape, any float dtype.
        p: in [0, 1).
        training: False returns x itself.

    Returns:
        The shape and dtype of x.

    Raises:
        ArgumentError: p outside [0, 1).
        DtypeError: x is not a float.
    Source: Srivastava et al. 2014, "Dropout: a simple way to prevent neural networks from
        overfitting", section 10 (inverted).
    """
    tensor = float_tensor("dropout", "x", x)
    if probability("dropout", "p", p) == 0 or not training:
        return tensor
    keep = keep_mask(tensor.shape, p, like=tensor.data)
    scale = 1 / (1 - p)
    y = _scaled(tensor.data, keep, scale)
    return record("dropout", y, (tensor,), _backward, (keep, scale))


def keep_mask(shape: tuple[int, ...], p: float, like: Array) -> Array:
    """Return which elements dropout spares, bool, on the device of `like`."""
    keep = backend.empty(shape, bool_, like)
    philox.fill_keep(keep, random.next_key(), 1 - p)
    return keep


def _backward(dy: Array, saved: tuple[Any, ...], needs: Sequence[bool]) -> tuple[Array | None]:
    keep, scale = saved
    return (_scaled(dy, keep, scale),)


def _scaled(x: Array, keep: Array, scale: float) -> Array:
    """Return x * keep * scale; forward and backward are the same."""
    return (_scaled_numpy if type(x) is np.ndarray else _scaled_cuda)(x, keep, scale)


def _scaled_numpy(x: Array, keep: Array, scale: float) -> Array:
    y = np.empty(x.shape, x.dtype)
    rows, keep_rows, out_rows = x.reshape(-1), keep.reshape(-1), y.reshape(-1)
    factor = compute_dtype(x.dtype).type(scale)

    def run(piece: slice) -> None:
        scaled = rows[piece] * factor
        scaled *= keep_rows[piece]
        out_rows[piece] = scaled

    backend.parallel_blocks(run, y.size, backend.BLOCK)
    return y


def _scaled_cuda(x: Array, keep: Array, scale: float) -> Array:
    factor = compute_dtype(x.dtype).type(scale)
    return (x * factor * keep).astype(x.dtype, copy=False)
