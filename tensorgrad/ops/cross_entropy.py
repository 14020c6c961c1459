"""Cross entropy of logits and integer targets. Kernels: kernels/cross_entropy.cu.

Where a gradient is wanted, forward writes it as well, for dy == 1: so exponentials are computed
once, and backward only scales. Statistics and losses are float32 for 16-bit logits.
linear_cross_entropy.py goes from features to the loss without ever holding all logits.
Tests: tests/ops/test_cross_entropy.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.accumulation import Gradients, Needs, Saved
from tensorgrad.autograd import record
from tensorgrad.backend import Array, widened
from tensorgrad.checks import check_between, check_indices, check_integer, check_range, check_shape
from tensorgrad.dtypes import Dtype, compute_dtype, float16
from tensorgrad.engine import mode
from tensorgrad.errors import ArgumentError, ShapeError
from tensorgrad.kernels import cross_entropy as cross_entropy_cuda
from tensorgrad.kernels.cross_entropy import LossOptions
from tensorgrad.operands import float_tensor, integer_array
from tensorgrad.tensor import Tensor

__all__ = ["cross_entropy"]
_REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: Any,
    targets: Any,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    z_loss: float = 0.0,
) -> Tensor:
    """Return the negative log-probability of each target under the softmax of its logits.

    loss = -sum_v q_v * log_softmax(logits)_v + z_loss * logsumexp(logits)^2, where q is 1 at the
    target and 0 elsewhere, mixed with the uniform distribution:
    q = (1 - label_smoothing) * one_hot + label_smoothing / V

    Args:
        logits: (..., V), any float dtype. (The classes are the last axis, not the second.)
        targets: (...), integers in [0, V). On the GPU the values are not inspected before the
            launch, which would wait for the device: a target outside makes its loss NaN.
        ignore_index: examples with this target are ignored; None: no example is.
        label_smoothing: in [0, 1].
        reduction: "mean" over the examples that count, "sum", or "none": one loss an example.
            The mean of examples that are all ignored is 0 with gradient 0 (PyTorch: NaN), so that
            a batch of padding does no harm; that of no examples is NaN.
        z_loss: from 0; keeps the logarithm of the sum of exponentials near 0, and with it logits
            from drifting to where 16 bits are coarse. 1e-4 is usual.

    Returns:
        A scalar, or (...) for "none"; float32, float64 for float64 logits.

    Raises:
        OutOfRangeError: a target outside the vocabulary (on the CPU).
        ArgumentError: another reduction, label_smoothing outside [0, 1] or z_loss below 0.
        ShapeError: the shape of targets is not that of logits without its last axis.
        DtypeError: logits are not floats, or targets not integers.
        DeviceError: targets are on another device than logits.
    Source: label smoothing: Szegedy et al. 2015, arXiv:1512.00567, section 7; z_loss: Chowdhery
        et al. 2022, arXiv:2204.02311, section 5.
    """
    op = "cross_entropy"
    logits, targets = float_tensor(op, "logits", logits), integer_array(op, "targets", targets)
    if not logits.ndim or not logits.shape[-1]:
        raise ShapeError(f"{op}: logits have shape {logits.shape}, expected (..., V), V at least 1")
    check_shape(op, "targets", targets, logits.shape[:-1], " (logits without the last axis)")
    options = LossOptions(ignore_index, label_smoothing, z_loss)
    check_options(op, options, reduction)
    backend.same_device(op, ("logits", "targets"), (logits.data, targets))
    wanted = mode.grad_enabled and logits.requires_grad
    if type(targets) is not np.ndarray:
        loss, saved = cross_entropy_cuda.forward(logits.data, targets, options, reduction, wanted)
        return record(op, loss, (logits,), cross_entropy_cuda.backward, saved)
    vocabulary = logits.shape[-1]
    counted = counted_targets(op, targets, ignore_index, vocabulary)
    rows = logits.data.reshape(-1, vocabulary)
    factor = 1.0
    if reduction == "mean":
        factor = 1 / max(int(counted.sum()), 1) if counted.size else math.nan
    later = defers(rows.dtype)
    losses = np.empty(len(rows), compute_dtype(rows.dtype))
    dlogits = np.empty(rows.shape, rows.dtype) if wanted else None
    scale = np.asarray(1.0 if later else factor, losses.dtype)
    rows_numpy(losses, dlogits, rows, targets.reshape(-1), counted, options, scale)
    if reduction == "none":
        loss = losses.reshape(targets.shape)
    else:
        loss = losses.sum() * losses.dtype.type(factor)
    saved = (dlogits, factor if later else 1.0, logits.shape)
    return record(op, loss, (logits,), _backward, saved)


def _backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    dlogits, factor, shape = saved
    scale = dy.reshape(-1, 1) * dy.dtype.type(factor)  # of each row, or of all
    if scale.size == 1 and scale[0, 0] == 1:
        return (dlogits.reshape(shape),)
    return (rescaled(dlogits, scale).reshape(shape),)


def check_options(op: str, options: LossOptions, reduction: str) -> None:
    """Raise ArgumentError unless the options are in range."""
    if options.ignore_index is not None:
        check_integer(op, "ignore_index", options.ignore_index)
    check_between(op, "label_smoothing", options.label_smoothing, 0, 1)
    check_range(op, "z_loss", options.z_loss)
    if reduction not in _REDUCTIONS:
        raise ArgumentError(f"{op}: reduction is {reduction!r}, expected one of {_REDUCTIONS}")


def defers(dtype: Dtype) -> bool:
    """Whether backward alone divides by the count of the mean.

    float16 gradients would underflow in forward, before dy brings the loss scale.
    """
    return dtype == float16


def counted_targets(op: str, targets: Array, ignore_index: int | None, vocabulary: int) -> Array:
    """Return which targets count, flattened, once they are known to be in the vocabulary."""
    counted = targets == targets if ignore_index is None else targets != ignore_index
    outside = ((targets < 0) | (targets >= vocabulary)) & counted
    expected = f"0 to {vocabulary - 1} (a vocabulary of {vocabulary})"
    check_indices(op, "targets", targets, outside, expected)
    return counted.reshape(-1)


def rows_numpy(
    losses: Array,
    dlogits: Array | None,
    logits: Array,
    targets: Array,
    counted: Array,
    options: LossOptions,
    scale: Array,
    classes: int | None = None,
) -> None:
    """Write the loss of each row and, unless `dlogits` is None, the gradient times `scale`.

    Args:
        losses: (N,), of the dtype that logits are computed in.
        dlogits: (N, width), may be `logits`.
        logits: (N, width).
        targets, counted: (N,).
        options: of the loss.
        scale: () or (N,).
        classes: the first columns, which count; None: all.
    """
    classes = logits.shape[1] if classes is None else classes
    wide = losses.dtype
    target_part, each = 1 - options.label_smoothing, options.label_smoothing / classes
    ids = np.where(counted, targets, 0).astype(np.intp, copy=False)
    scale = np.broadcast_to(scale, losses.shape)
    all_count = bool(counted.all())

    def run(piece: slice) -> None:
        rows = widened(logits[piece, :classes])
        place = np.arange(len(rows)), ids[piece]
        if dlogits is not None and dlogits.dtype == wide:
            powers = dlogits[piece, :classes]
        else:
            powers = np.empty(rows.shape, wide)
        largest = rows.max(-1)
        np.subtract(rows, largest[:, None], out=powers)
        wanted = powers[place] * wide.type(target_part)  # below the largest: no digits are lost
        if each:
            wanted += powers.sum(-1) * wide.type(each)
        total = np.exp(powers, out=powers).sum(-1)
        losses[piece] = np.log(total) - wanted
        logsumexp = np.log(total) + largest
        if options.z_loss:
            losses[piece] += wide.type(options.z_loss) * logsumexp * logsumexp
        if dlogits is None:
            return
        own = scale[piece]
        scales = own / total
        if options.z_loss:
            scales *= 1 + wide.type(2 * options.z_loss) * logsumexp
        powers *= scales[:, None]
        if each:
            powers -= (own * wide.type(each))[:, None]
        powers[place] -= own * wide.type(target_part)
        if not all_count:
            powers[~counted[piece]] = 0  # also where logits of padding are not finite
        if dlogits.dtype != wide:
            dlogits[piece, :classes] = powers
        dlogits[piece, classes:] = 0

    backend.parallel_blocks(run, len(logits), max(1, backend.BLOCK // logits.shape[1]))
    losses[~counted] = 0


def rescaled(array: Array, scale: Array) -> Array:
    """Return a matrix times one number, (1, 1), or one for each row, (N, 1), rounded once."""
    y = np.empty_like(array)
    scale = np.broadcast_to(scale, (len(array), 1))

    def run(piece: slice) -> None:
        y[piece] = widened(array[piece]) * scale[piece]

    backend.parallel_blocks(run, len(array), max(1, backend.BLOCK // array.shape[1]))
    return y
