"""Cross entropy of logits and integer targets. Kernels: kernels/cross_entropy.cu.

Where a gradient is wanted, forward writes it as well, for dy == 1: so exponentials are computed
once, and backward only scales. Statistics and losses are float32 for 16-bit logits. Class weights
and probabilities as targets are compositions of ops, which hold the log-probabilities.
linear_cross_entropy.py goes from features to the loss without ever holding all logits.
Tests: tests/ops/test_cross_entropy.py.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, Never, SupportsIndex, cast, get_args

import numpy as np

from tensorgrad.autograd.tangents import Op, along, tangent_of
from tensorgrad.core import backend
from tensorgrad.core.backend import Array, upcast
from tensorgrad.core.backward import gradients
from tensorgrad.core.checks import (
    axis_index,
    check_between,
    check_choice,
    check_integer,
    check_range,
    check_shape,
)
from tensorgrad.core.dtypes import Dtype, compute_dtype, float16, is_float
from tensorgrad.core.errors import ArgumentError, GradError, ShapeError
from tensorgrad.core.gradient import Early, Gradients, Needs, Saved
from tensorgrad.core.modes import mode, replaced
from tensorgrad.core.nodes import assigned_since
from tensorgrad.core.operands import integer_array, tensor_of
from tensorgrad.core.record import record
from tensorgrad.core.signature import Float, Int, NotNegative, Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.kernels import cross_entropy as cross_entropy_cuda
from tensorgrad.kernels.cross_entropy import GradientFactor, LossOptions
from tensorgrad.ops.arguments import check_indices
from tensorgrad.ops.elementwise import where
from tensorgrad.ops.indexing import take, take_along_axis
from tensorgrad.ops.reduce import logsumexp, mean
from tensorgrad.ops.reduce import sum as reduce_sum
from tensorgrad.ops.shape import astype, moveaxis, reshape
from tensorgrad.ops.softmax import log_softmax

__all__ = ["cross_entropy", "nll_loss"]
Reduction = Literal["mean", "sum", "none"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)

takes = Signatures(globals())


def cross_entropy(
    logits: Float[ArrayLike, "..."],
    targets: Any,
    weight: Float[ArrayLike, "..."] | None = None,
    ignore_index: int | None = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: NotNegative = 0.0,
    axis: SupportsIndex = -1,
    **unknown: Never,
) -> Tensor:
    """Return the negative log-probability of each target under the softmax of its logits.

    loss = -sum_v q_v * log_softmax(logits)_v + z_loss * logsumexp(logits)^2, where q is 1 at the
    target and 0 elsewhere, mixed with the uniform distribution:
    q = (1 - label_smoothing) * one_hot + label_smoothing / V; with class weights q_v * weight_v

    Args:
        logits: (..., V), any float dtype. (The classes are the last axis, not the second; see
            `axis`.)
        targets: (...), integers in [0, V). On the GPU the values are not inspected before the
            launch, which would wait for the device: a target outside makes its loss NaN. Or the
            shape of logits, floats: the probability of each class, in place of one_hot.
        weight: (V,), of each class; None: 1 each. "mean" then divides by the sum of the targets'
            weights; of probabilities, by the number of examples.
        ignore_index: examples with this target are ignored; None: no example is.
        reduction: "mean" over the examples that count, "sum", or "none": one loss an example.
            The mean of examples that are all ignored is 0 with gradient 0 (PyTorch: NaN), so that
            a batch of padding does no harm; that of no examples is NaN.
        label_smoothing: in [0, 1].
        z_loss: from 0; keeps the logarithm of the sum of exponentials near 0, and with it logits
            from drifting to where 16 bits are coarse. 1e-4 is usual. Not with a weight or with
            probabilities.
        axis: of the classes.

    Returns:
        A scalar, or (...) for "none"; float32, float64 for float64 logits.

    Raises:
        DtypeError: logits or weight does not hold floats.
        ArgumentError: z_loss is not a finite number from 0.
        DeviceError: the operands are on different devices.
        OutOfRangeError: a target outside the vocabulary (on the CPU).
        ArgumentError: another reduction, label_smoothing outside [0, 1], z_loss with a weight or
            probabilities, or no such axis.
        ShapeError: the shape of targets is not that of logits without the classes, or that of
            weight is not (V,).
        DtypeError: targets are neither integers nor probabilities.
        DeviceError: targets are on another device than logits.
    Source: label smoothing: Szegedy et al. 2015, arXiv:1512.00567, section 7; z_loss: Chowdhery
        et al. 2022, arXiv:2204.02311, section 5.

    Example:
        >>> logits = tg.zeros((2, 4))
        >>> tg.cross_entropy(logits, [1, -100]).item(), np.log(4).item()
        (1.386..., 1.386...)
    """
    op = "cross_entropy"
    target_dtype = getattr(targets, "dtype", None)
    soft = target_dtype is not None and is_float(target_dtype)
    if soft:
        logits = tensor_of(op, "logits", logits, weight, targets)  # a literal in their dtype
    logits, weight = takes.cross_entropy(
        logits, weight, ignore_index, reduction, label_smoothing, z_loss, unknown
    )
    check_between(op, "label_smoothing", label_smoothing, 0, 1)
    options = LossOptions(ignore_index, label_smoothing, z_loss)
    soft = soft and getattr(targets, "ndim", 0) == logits.ndim
    if not isinstance(axis, int) or axis != -1:
        place = axis_index(op, axis, logits.ndim)
        logits = moveaxis(logits, place, -1)
        targets = moveaxis(targets, place, -1) if soft else targets
    if soft or weight is not None:
        if z_loss:
            raise ArgumentError(
                f"{op}: z_loss is {z_loss} with a weight or probabilities, expected 0"
            )
        logits = astype(logits, compute_dtype(logits.dtype), copy=False)
        if soft:
            return _of_probabilities(op, logits, targets, weight, label_smoothing, reduction)
        return _weighted(op, logits, targets, weight, options, reduction)
    targets = integer_array(op, "targets", targets)
    if not logits.ndim or not logits.shape[-1]:
        raise ShapeError(f"{op}: logits have shape {logits.shape}, expected (..., V), V at least 1")
    check_shape(op, "targets", targets, logits.shape[:-1], " (logits without the last axis)")
    backend.same_device(op, ("logits", "targets"), (logits.data, targets))
    wanted = mode.grad_enabled and logits.requires_grad
    if type(targets) is not np.ndarray:
        ahead = wanted and mode.forward is None  # otherwise the tangent alone may be differentiated
        loss, early, saved = cross_entropy_cuda.forward(
            logits.data, targets, options, reduction, ahead
        )
        again = LossRows(saved[0].reshape(logits.shape), targets, options, reduction)
        saved = (Early([early]), logits.shape, *saved, again)
        return record(op, loss, (logits,), _backward, saved)
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
    again = LossRows(logits.data, targets, options, reduction)
    saved = (dlogits, factor if later else 1.0, logits.shape, again)
    return record(op, loss, (logits,), _backward, saved)


def nll_loss(
    x: Float[ArrayLike, "..."],
    targets: Int[ArrayLike, "..."],
    weight: Float[ArrayLike, "..."] | None = None,
    ignore_index: int | None = -100,
    reduction: Reduction = "mean",
    *,
    axis: SupportsIndex = -1,
    **unknown: Never,
) -> Tensor:
    """Return the negative log-likelihood, -x[target] * weight[target], of each target.

    Args:
        x: (..., V), log-probabilities, any float dtype.
        targets: (...), integers in [0, V).
        weight, ignore_index, reduction, axis: as of `cross_entropy`.

    Returns:
        A scalar, or (...) for "none"; float32, float64 for float64 x.

    Raises:
        DtypeError: x or weight does not hold floats, or targets does not hold integers.
        DeviceError: the operands are on different devices.
        DeviceError: the operands are on different devices. As `cross_entropy` with integer targets.

    Example:
        >>> tg.nn.functional.nll_loss(tg.log([[0.25, 0.75]]), [0]).item()
        1.386...
    """
    op = "nll_loss"
    if not isinstance(targets, Tensor):  # also ranges and lists of arrays
        targets = Tensor(integer_array(op, "targets", targets))
    x, targets, weight = takes.nll_loss(x, targets, weight, ignore_index, reduction, unknown)
    x = moveaxis(x, axis_index(op, axis, x.ndim), -1)
    x = astype(x, compute_dtype(x.dtype), copy=False)
    check_shape(op, "targets", targets, x.shape[:-1], " (x without the classes)")
    counted, ids = _counted_ids(op, targets.data, ignore_index, x.shape[-1])
    losses = -take_along_axis(x, ids[..., None], -1)[..., 0]
    inside = (ids >= 0) & (ids < x.shape[-1])  # on the GPU a target outside makes its loss NaN
    losses = where(Tensor(counted), where(Tensor(inside), losses, math.nan), 0)
    weights = _of_targets(op, weight, counted, ids, x)
    return _weighted_reduction(losses, weights, reduction)


def _weighted(
    op: str,
    logits: Tensor,
    targets: Any,
    weight: Tensor,
    options: LossOptions,
    reduction: Reduction,
) -> Tensor:
    """Return the loss of integer targets with class weights."""
    smoothing = options.label_smoothing
    losses = cross_entropy(logits, targets, ignore_index=options.ignore_index, reduction="none")
    targets = integer_array(op, "targets", targets)
    counted, ids = _counted_ids(op, targets, options.ignore_index, logits.shape[-1])
    weights = _of_targets(op, weight, counted, ids, logits)
    uniform = None
    if smoothing:
        each = _class_weight(op, weight, logits) * (-smoothing / logits.shape[-1])
        uniform = where(Tensor(counted), reduce_sum(log_softmax(logits) * each, -1), 0)
    return _weighted_reduction(losses * (1 - smoothing), weights, reduction, uniform)


def _of_probabilities(
    op: str, logits: Tensor, targets: Any, weight: Any, smoothing: float, reduction: Reduction
) -> Tensor:
    """Return the loss of targets that are probabilities of the classes."""
    targets = tensor_of(op, "targets", targets, logits)
    check_shape(op, "targets", targets, logits.shape, " (as logits)")
    targets = astype(targets, logits.dtype, copy=False)
    if smoothing:
        targets = targets * (1 - smoothing) + smoothing / logits.shape[-1]
    if weight is not None:
        targets = targets * _class_weight(op, weight, logits)
    return reduced(-reduce_sum(targets * log_softmax(logits), -1), reduction)


def reduced(losses: Tensor, reduction: Reduction) -> Tensor:
    """Return the mean or the sum of losses, or the losses themselves ("none")."""
    if reduction == "mean":
        return mean(losses)
    return reduce_sum(losses) if reduction == "sum" else losses


def _weighted_reduction(
    losses: Tensor, weights: Tensor, reduction: Reduction, further: Tensor | None = None
) -> Tensor:
    """Reduce losses * weights + further; the mean divides by the sum of the weights."""
    losses = losses * weights
    if further is not None:
        losses = losses + further
    if reduction != "mean":
        return reduced(losses, reduction)
    divisor = reduce_sum(weights)
    return reduce_sum(losses) / (where(divisor == 0, 1, divisor) if losses.size else divisor)


def _counted_ids(
    op: str, targets: Array, ignore_index: int | None, vocabulary: int
) -> tuple[Array, Array]:
    """Return which targets count, and the targets with 0 for the others."""
    if type(targets) is np.ndarray:
        counted = counted_targets(op, targets, ignore_index, vocabulary).reshape(targets.shape)
    else:
        counted = targets == targets if ignore_index is None else targets != ignore_index
    return counted, backend.namespace(targets).where(counted, targets, 0)


def _class_weight(op: str, weight: Tensor, like: Tensor) -> Tensor:
    """Return the class weights, checked to be (V,) for logits (..., V), in their dtype."""
    check_shape(op, "weight", weight, like.shape[-1:], " (one for each class)")
    return astype(weight, like.dtype, copy=False)


def _of_targets(op: str, weight: Tensor | None, counted: Array, ids: Array, like: Tensor) -> Tensor:
    """Return the weight of each target, 1 without class weights; 0 where it is ignored."""
    chosen = 1 if weight is None else take(_class_weight(op, weight, like), ids, 0)
    return astype(where(Tensor(counted), chosen, 0), like.dtype, copy=False)


def _backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    if type(dy) is not np.ndarray:
        early, shape, *others, _ = saved
        (dlogits,) = early.take() or (None,)
        return (cross_entropy_cuda.backward(dy, dlogits, tuple(others)).reshape(shape),)
    dlogits, factor, shape, _ = saved
    scale = dy.reshape(-1, 1) * dy.dtype.type(factor)  # the scale of each row, or of all
    if scale.size == 1 and scale[0, 0] == 1:
        return (dlogits.reshape(shape),)
    return (rescaled(dlogits, scale).reshape(shape),)


class LossRows(NamedTuple):
    """Arrays that only the tangent needs: they may be overwritten before backward.

    On the CPU it is a reference to the logits, which backward alone would let go of.
    """

    logits: Array
    targets: Array
    options: LossOptions
    reduction: str


@tangent_of(_backward)
def _tangent(op: Op, t: Tensor) -> Tensor:
    again: LossRows = op.saved[-1]
    if assigned_since(op.node.version, again[:2]):
        raise GradError(
            f"{op.node.name}: the logits or the targets were assigned to after the loss was "
            "computed, expected a copy, for this derivative"
        )
    ids, options, reduction = again.targets.reshape(-1), again.options, again.reduction
    classes = again.logits.shape[-1]
    logits, t = (reshape(x, (-1, classes)) for x in (op.input(0, again.logits), t))
    losses = tangents_of_losses(logits, t, ids, options, classes)
    return reduced_rows(losses, ids, options, reduction).reshape(op.node.shape)


def tangents_of_losses(
    logits: Tensor, t: Tensor, ids: Array, options: LossOptions, classes: int
) -> Tensor:
    """Return the tangents of the losses of rows; see `losses_of_rows`.

    Args:
        logits, t: (N, width), logits and their tangents.
        ids: (N,), the targets.
        options: of the loss.
        classes: the first columns, which count.

    Returns:
        (N,), of the dtype that logits are computed in; 0 where the target is ignored.
    """
    if type(ids) is np.ndarray:
        return _defined_tangents(logits, t, ids, options, classes)
    saved = (logits.data, t.data, ids, options, classes)
    losses = backend.empty(ids.shape, compute_dtype(logits.dtype), like=ids)
    _rows_tangent(losses, saved, None)
    return record("tangent of cross_entropy", losses, (logits, t), _rows_backward, saved)


def _rows_tangent(losses: Array, saved: Saved, dy: Array | None) -> Gradients:
    """Write the tangents of the losses; return the gradients by logits and t, for dy not None."""
    logits, t, ids, options, classes = saved
    t = t.astype(logits.dtype, copy=False)
    x, moved = (backend.contiguous(a) if dy is None else a.copy(order="C") for a in (logits, t))
    ids, scale = cross_entropy_cuda.flat_ids(ids), GradientFactor(dy)
    cross_entropy_cuda.rows_tangent(losses, x, moved, ids, options, scale, classes, dy is not None)
    return x, moved


def _rows_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    dy = backend.contiguous(dy)
    return _rows_tangent(backend.empty(dy.shape, dy.dtype, like=dy), saved, dy)


@tangent_of(_rows_backward)
def _second_tangent(op: Op, *changes: Tensor | None) -> Tensor | None:
    logits, t, *options = op.saved
    inputs = op.input(0, logits), op.input(1, t)
    return along(lambda x, t: _defined_tangents(x, t, *options), inputs, changes)[0]


def _defined_tangents(logits: Tensor, t: Tensor, *options: Any) -> Tensor:
    """Return `tangents_of_losses` in recorded ops."""
    return cast(Tensor, along(lambda x: losses_of_rows(x, *options), [logits], [t])[0])


def losses_of_rows(logits: Tensor, ids: Array, options: LossOptions, classes: int) -> Tensor:
    """Return the losses of rows in recorded ops: the definition that tangents follow from.

    Args:
        logits: (N, width).
        ids: (N,), the targets.
        options: of the loss.
        classes: the first columns, which count.

    Returns:
        (N,), of the dtype that logits are computed in; 0 where the target is ignored.
    """
    counted = Tensor(_counted(ids, options))
    x = astype(logits[:, :classes], compute_dtype(logits.dtype), copy=False)
    x = where(counted[:, None], x, 0)  # rows that are ignored may hold anything
    total, smoothing = logsumexp(x, -1), options.label_smoothing
    target = take_along_axis(x, where(counted, Tensor(ids), 0)[:, None], -1)[:, 0]
    losses = total + options.z_loss * total * total - (1 - smoothing) * target
    if smoothing:
        losses = losses - smoothing * mean(x, -1)
    return where(counted, losses, 0)


def reduced_rows(losses: Tensor, ids: Array, options: LossOptions, reduction: Any) -> Tensor:
    """Return the reduced loss, or its tangent, from those of all rows, (N,)."""
    weights = _counted(ids, options).astype(losses.dtype)
    return _weighted_reduction(losses, Tensor(weights), reduction)


def _counted(ids: Array, options: LossOptions) -> Array:
    """Return which targets count."""
    return ids == ids if options.ignore_index is None else ids != options.ignore_index


def check_options(op: str, options: LossOptions, reduction: str) -> None:
    """Raise ArgumentError unless the options are in range."""
    if options.ignore_index is not None:
        check_integer(op, "ignore_index", options.ignore_index)
    check_between(op, "label_smoothing", options.label_smoothing, 0, 1)
    check_range(op, "z_loss", options.z_loss)
    check_choice(op, "reduction", reduction, REDUCTIONS)


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
        rows = upcast(logits[piece, :classes])
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


def rows_tangent_numpy(
    losses: Array,
    logits: Array,
    tangents: Array,
    ids: Array,
    options: LossOptions,
    scale: Array | None,
    classes: int,
) -> None:
    """Write the tangent of the loss of each row and, unless `scale` is None, its gradients.

    Args:
        losses: (N,), of the dtype of the logits.
        logits, tangents: (N, width), logits and their tangents; they become the gradients by
            them, times `scale`.
        ids: (N,), the targets.
        options: of the loss.
        scale: () or (N,).
        classes: the first columns, which count.
    """
    x, t = Tensor(logits, scale is not None), Tensor(tangents, scale is not None)
    with replaced(mode, grad_enabled=True, forward=None):
        moved = _defined_tangents(x, t, ids, options, classes)
    losses[...] = moved.data
    if scale is not None:
        dy = np.broadcast_to(scale, losses.shape)
        logits[...], tangents[...] = gradients(moved, dy, [x, t])


def rescaled(array: Array, scale: Array) -> Array:
    """Return a matrix times one number, (1, 1), or one for each row, (N, 1), rounded once."""
    y = np.empty_like(array)
    scale = np.broadcast_to(scale, (len(array), 1))

    def run(piece: slice) -> None:
        y[piece] = upcast(array[piece]) * scale[piece]

    backend.parallel_blocks(run, len(array), max(1, backend.BLOCK // array.shape[1]))
    return y
