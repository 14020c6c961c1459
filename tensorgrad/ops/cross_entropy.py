"""Cross entropy of logits and integer targets. Kernels: kernels/cross_entropy.cu.

Forward reads the logits once and keeps them with one number a row, the logarithm of the sum of
exponentials; backward reads them once more and writes the gradient once. On the GPU the gradient
is written in forward already, see cross_entropy_cuda.py. Statistics and losses are float32 for
16-bit logits. Tests: tests/ops/test_cross_entropy.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.autograd import mode, record
from tensorgrad.backend import Array
from tensorgrad.errors import ArgumentError, OutOfRangeError, ShapeError
from tensorgrad.ops import cross_entropy_cuda
from tensorgrad.ops.operand import float_tensor, integer_array, widened
from tensorgrad.tensor import Tensor

__all__ = ["cross_entropy"]
_REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: Any,
    targets: Any,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Return the negative log-probability of each target under the softmax of its logits.

    loss = -sum_v q_v * log_softmax(logits)_v, where q is 1 at the target and 0 elsewhere, mixed
    with the uniform distribution: q = (1 - label_smoothing) * one_hot + label_smoothing / V

    Args:
        logits: (..., V), any float dtype. (The classes are the last axis, not the second.)
        targets: (...), integers in [0, V). On the GPU the values are not inspected before the
            launch, which would wait for the device: a target outside makes its loss NaN.
        ignore_index: examples with this target count for nothing; None: every example counts.
        label_smoothing: in [0, 1].
        reduction: "mean" over the examples that count, "sum", or "none": one loss an example.
            The mean of no examples is 0 with gradient 0 (PyTorch: NaN), so that a batch of
            padding does no harm.

    Returns:
        A scalar, or (...) for "none"; float32, float64 for float64 logits.

    Raises:
        OutOfRangeError: a target outside the vocabulary (on the CPU).
        ArgumentError: another reduction, or label_smoothing outside [0, 1].
        ShapeError: the shape of targets is not that of logits without its last axis.
        DtypeError: logits are not floats, or targets not integers.
        DeviceError: targets are on another device than logits.
    Source: label smoothing: Szegedy et al. 2015, arXiv:1512.00567, section 7.
    """
    op = "cross_entropy"
    logits, targets = float_tensor(op, "logits", logits), integer_array(op, "targets", targets)
    if not logits.ndim or not logits.shape[-1]:
        raise ShapeError(f"{op}: logits have shape {logits.shape}, expected (..., V), V at least 1")
    if targets.shape != logits.shape[:-1]:
        raise ShapeError(
            f"{op}: targets have shape {targets.shape}, expected {logits.shape[:-1]} "
            "(logits without the last axis)"
        )
    if not 0 <= label_smoothing <= 1:
        raise ArgumentError(f"{op}: label_smoothing is {label_smoothing}, expected 0 to 1")
    if reduction not in _REDUCTIONS:
        raise ArgumentError(f"{op}: reduction is {reduction!r}, expected one of {_REDUCTIONS}")
    backend.same_device(op, ("logits", "targets"), (logits.data, targets))
    if type(targets) is not np.ndarray:
        wanted = mode.grad_enabled and logits.requires_grad
        loss, saved = cross_entropy_cuda.forward(
            logits.data, targets, ignore_index, label_smoothing, reduction, wanted
        )
        return record(op, loss, (logits,), cross_entropy_cuda.backward, saved)
    counted = targets == targets if ignore_index is None else targets != ignore_index
    _check_targets(targets, counted, logits.shape[-1])
    rows = logits.data.reshape(-1, logits.shape[-1])
    flat, counted = targets.reshape(-1).astype(np.int64, copy=False), counted.reshape(-1)
    losses, logsumexp = _forward_numpy(rows, flat, counted, label_smoothing)
    count = None
    if reduction == "none":
        loss = losses.reshape(targets.shape)
    else:
        loss = losses.sum()
        if reduction == "mean":
            count = np.maximum(counted.sum(), 1).astype(losses.dtype)
            loss = loss / count
    saved = (rows, flat, counted, logsumexp, count, label_smoothing, logits.shape)
    return record(op, loss, (logits,), _backward, saved)


def _backward(dy: Array, saved: tuple[Any, ...], needs: Sequence[bool]) -> tuple[Array | None]:
    rows, targets, counted, logsumexp, count, label_smoothing, shape = saved
    if count is not None:
        dy = dy / count
    scale = dy.reshape(-1) * counted  # of each example's gradient; broadcasts a scalar dy
    dlogits = _backward_numpy(scale, rows, targets, counted, logsumexp, label_smoothing)
    return (dlogits.reshape(shape),)


def _check_targets(targets: Array, counted: Array, vocabulary: int) -> None:
    outside = ((targets < 0) | (targets >= vocabulary)) & counted
    if outside.any():
        place = tuple(int(i) for i in np.argwhere(outside)[0])
        raise OutOfRangeError(
            f"cross_entropy: targets{list(place) or ''} is {targets[place]}, expected 0 to "
            f"{vocabulary - 1} (a vocabulary of {vocabulary})"
        )


def _forward_numpy(
    logits: Array, targets: Array, counted: Array, label_smoothing: float
) -> tuple[Array, Array]:
    count, vocabulary = logits.shape
    losses = np.empty(count, widened(logits[:0]).dtype)
    logsumexp = np.empty_like(losses)
    picked = np.where(counted, targets, 0)

    def run(piece: slice) -> None:
        rows = widened(logits[piece])
        largest = rows.max(-1)
        powers = rows - largest[:, None]
        total = np.exp(powers, out=powers).sum(-1)
        logsumexp[piece] = np.log(total) + largest
        at_target = rows[np.arange(len(rows)), picked[piece]]
        if label_smoothing:
            at_target *= 1 - label_smoothing
            at_target += label_smoothing * rows.mean(-1)
        losses[piece] = logsumexp[piece] - at_target

    backend.parallel_blocks(run, count, max(1, backend.BLOCK // vocabulary))
    losses[~counted] = 0
    return losses, logsumexp


def _backward_numpy(
    scale: Array,
    logits: Array,
    targets: Array,
    counted: Array,
    logsumexp: Array,
    label_smoothing: float,
) -> Array:
    count, vocabulary = logits.shape
    dlogits = np.empty((count, vocabulary), logits.dtype)
    direct = logits.dtype == logsumexp.dtype  # no rounding at the end: work in the result
    picked = np.where(counted, targets, 0)
    all_count = bool(counted.all())

    def run(piece: slice) -> None:
        out = dlogits[piece] if direct else np.empty(dlogits[piece].shape, logsumexp.dtype)
        np.subtract(widened(logits[piece]), logsumexp[piece, None], out=out)
        np.exp(out, out=out)
        if label_smoothing:
            out -= label_smoothing / vocabulary
        out *= scale[piece, None]
        out[np.arange(len(out)), picked[piece]] -= (1 - label_smoothing) * scale[piece]
        if not all_count:
            out[~counted[piece]] = 0  # also where logits of padding are not finite
        if not direct:
            dlogits[piece] = out

    backend.parallel_blocks(run, count, max(1, backend.BLOCK // vocabulary))
    return dlogits
