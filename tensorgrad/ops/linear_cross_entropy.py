"""Fused linear layer and cross entropy, without ever holding all logits in memory.

Rows are processed in chunks. The logits of a chunk become its losses, then, in the same memory,
their own gradient, and from that the chunk's part of dx and dweight. So forward computes all that
backward needs, for dy == 1, with as many operations as the two separate ops. Backward multiplies by
dy. Where dy is one number a row (reduction "none"), or a retained graph runs backward again, it
computes the logits again.

With N rows of width C, a vocabulary V and chunks of n rows, 16 bits: n V * 2 bytes in place of
2 N V * 2, and V C * 4 for dweight, which each chunk reads and writes once: chunks cost
2 V C * 4 bytes of traffic each.

The tangent is an op of its own, in chunks too. Where its gradients are wanted they are made along
with it: forward then leaves those of the loss to backward.
Tests: tests/ops/test_linear_cross_entropy.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorgrad.amp import cast_operands, product_kernel
from tensorgrad.autograd.tangents import FORWARD_ONLY, Op, along, tangent_of
from tensorgrad.core import backend
from tensorgrad.core.arrays import sum_array
from tensorgrad.core.backend import Array, Shape, is_numpy
from tensorgrad.core.checks import check_between, check_integer, check_shape, promoted
from tensorgrad.core.dtypes import Dtype, compute_dtype
from tensorgrad.core.errors import ArgumentError, ShapeError
from tensorgrad.core.gradient import Early, Gradients, Loan, Needs, Saved
from tensorgrad.core.modes import mode
from tensorgrad.core.operands import data_of, float_tensor, integer_array
from tensorgrad.core.record import record
from tensorgrad.core.signature import Float, Int, NotNegative, Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.kernels import cross_entropy as cross_entropy_cuda
from tensorgrad.kernels.cross_entropy import GradientFactor, LossOptions
from tensorgrad.kernels.fp8 import MULTIPLE
from tensorgrad.ops import fp8
from tensorgrad.ops.cross_entropy import (
    Reduction,
    counted_targets,
    defers,
    losses_of_rows,
    reduced_rows,
    rows_numpy,
    rows_tangent_numpy,
)
from tensorgrad.ops.matmul import flat, matmul, product, product_into
from tensorgrad.ops.shape import reshape

__all__ = ["linear_cross_entropy"]

takes = Signatures(globals())

# The most bytes of logits of a chunk, and of all rows that are one chunk.
_CPU_BYTES, _GPU_BYTES = (64 * 2**20, 128 * 2**20), (340 * 2**20, 800 * 2**20)
_ROWS = 128  # a chunk is a multiple of this


def linear_cross_entropy(
    x: Float[ArrayLike, "*B C"],
    weight: Float[ArrayLike, "V C"],
    targets: Int[ArrayLike, "*B"],
    bias: Float[ArrayLike, "V"] | None = None,
    *,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    z_loss: NotNegative = 0.0,
    vocab_size: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return `cross_entropy(linear(x, weight, bias), targets, ...)` in a fraction of the memory.

    Gradients are those of the two ops; sums over rows are in float32, in the order of the chunks.
    They are made along with the loss where an operand wants them: to evaluate, use `no_grad`.

    Args:
        x: (..., C), any float dtype.
        weight: (V, C).
        targets: (...), as for `cross_entropy`.
        bias: (V,) or None.
        ignore_index, label_smoothing, reduction, z_loss: as for `cross_entropy`.
        vocab_size: rows of `weight` that stand for a class; the rows after them are padding for
            alignment and are ignored. None: all.
        chunk: rows that are processed at a time; None: chunks of equal sizes, of up to 64 MiB of
            logits on the CPU and 340 MiB on a GPU, or all rows if they make at most 128 or 800 MiB.

    Returns:
        A scalar, or (...) for "none"; float32, float64 for float64 operands.

    Raises:
        DtypeError: x, weight or bias does not hold floats, or targets does not hold integers.
        ShapeError: x is not (*B, C), weight not (V, C), targets not (*B,), bias not (V,).
        ArgumentError: z_loss is not a finite number from 0.
        DeviceError: the operands are on different devices.
        ArgumentError: another reduction, label_smoothing outside [0, 1], vocab_size outside [1, V]
            or chunk below 1.
        OutOfRangeError: a target outside the vocabulary (on the CPU).
    Source: Wijmans et al. 2024, arXiv:2411.09009, computes the same without logits in memory.

    Example:
        >>> x, weight = tg.ones((3, 2)), tg.zeros((4, 2), requires_grad=True)
        >>> tg.linear_cross_entropy(x, weight, [0, 1, 2]).item(), np.log(4).item()
        (1.386..., 1.386...)
    """
    op = "linear_cross_entropy"
    if not isinstance(targets, Tensor):  # also ranges and lists of arrays
        targets = Tensor(integer_array(op, "targets", targets))
    x, weight, targets, bias = takes.linear_cross_entropy(
        x, weight, targets, bias,
        ignore_index, label_smoothing, reduction, z_loss, vocab_size, chunk,
    )  # fmt: skip
    check_between(op, "label_smoothing", label_smoothing, 0, 1)
    scales = fp8.scales_of(op, x, weight)
    if mode.autocast is not None:
        x, weight = cast_operands(x, weight)
    rows = len(weight.data)
    if not rows:
        raise ShapeError(f"{op}: weight has shape {weight.shape}, expected (V, C), V at least 1")
    classes = _classes(op, vocab_size, rows, "rows of weight")
    labels = targets.data
    inputs, arrays = (x, weight, bias), (x.data, weight.data, data_of(bias))
    options = LossOptions(ignore_index, label_smoothing, z_loss)
    dtype = promoted(op, ("x", "weight"), arrays[:2])
    row_bytes = len(arrays[1]) * dtype.itemsize
    chunk = rows_at_a_time(op, chunk, labels.size, row_bytes, is_numpy(labels))
    if is_numpy(labels):
        counted = counted_targets(op, labels, ignore_index, classes)
        count = np.asarray(max(int(counted.sum()), 1), compute_dtype(arrays[1].dtype))
        ids = labels.reshape(-1)
    else:
        ids, counted, count = cross_entropy_cuda.flat_ids(labels), None, None
        if reduction == "mean":
            count = cross_entropy_cuda.count_targets(ids, options)
    count = count if reduction == "mean" else None
    kernel = product_kernel(*arrays[:2])
    scales = scales if chunk % MULTIPLE == 0 else None
    operands = (*arrays, ids, counted, options)
    loss_of = _ChunkedLoss(*operands, reduction, classes, chunk, kernel, scales)
    wants = [mode.grad_enabled and t is not None and t.requires_grad for t in inputs]
    # In forward mode mostly the tangent alone is differentiated.
    early = reduction != "none" and any(wants) and mode.forward is None
    losses = backend.empty(ids.shape, compute_dtype(dtype), like=ids)
    scale = GradientFactor(None, None if defers(dtype) else count)
    loan = _borrowed(weight, compute_dtype(dtype)) if wants[1] and early else None
    memory = None if loan is None else loan.array
    gradients = loss_of.run(losses, wants if early else (False,) * 3, scale, memory)
    loss = _reduced(losses, count, reduction, labels.shape)
    saved = (*arrays, loss_of, count, loan, Early(gradients) if early else None)
    return record(op, loss, inputs, _backward, saved)


def _reduced(losses: Array, count: Array | None, reduction: Reduction, shape: Shape) -> Array:
    """Return the sum of the losses by a count that is not None, or the losses in their shape."""
    if reduction == "none":
        return losses.reshape(shape)
    if not is_numpy(losses):
        return cross_entropy_cuda.total(losses, count)
    if count is not None and not losses.size:
        return np.asarray(np.nan, losses.dtype)  # the mean of no losses
    return losses.sum() if count is None else losses.sum() / count


class _ChunkedLoss(NamedTuple):
    """The operands and options of one loss."""

    x: Array
    weight: Array
    bias: Array | None
    ids: Array  # (N,)
    counted: Array | None  # (N,) on the CPU
    options: LossOptions
    reduction: Reduction
    classes: int
    chunk: int
    kernel: str | None  # kernel of the products
    scales: fp8.LinearScales | None  # where logits are computed in 8 bits

    @property
    def dtype(self) -> Dtype:
        """The dtype of the logits."""
        return np.result_type(self.x.dtype, self.weight.dtype)

    def run(
        self, losses: Array, needs: Needs, scale: GradientFactor, dweight: Array | None = None
    ) -> list[Array | None]:
        """Write the losses and return the gradients that are wanted, times `scale`.

        Args:
            dweight: memory for it; None: new memory.
        """
        dtype, shape = self.dtype, self.x.shape
        wide = compute_dtype(dtype)
        working = wide if is_numpy(losses) else dtype  # 16 bits are converted once, not each chunk
        x = flat(backend.contiguous(self.x.astype(working, copy=False)))
        weight, bias = self.weight.astype(working, copy=False), self.bias
        kernel = self.kernel
        dx = backend.empty(x.shape, working, like=x) if needs[0] else None
        if needs[1] and dweight is None:
            dweight = backend.empty(weight.shape, wide, like=x)
        dbias = backend.empty(bias.shape, wide, like=x) if bias is not None and needs[2] else None
        narrow = None if self.scales is None else fp8.Head(x, self.weight, self.scales)
        for start in range(0, len(x), self.chunk):
            piece = slice(start, start + self.chunk)
            target = working if bias is None else wide
            if narrow is None:
                logits = product(x[piece], weight.T, target, kernel)
            else:
                logits = narrow.logits(x[piece], target)
            if bias is not None:
                logits += bias
                logits = logits.astype(working, copy=False)
            self._losses(losses, logits if any(needs) else None, logits, piece, scale)
            if narrow is not None:
                narrow.gradients(logits, None if dx is None else dx[piece], dweight, start > 0)
            elif dx is not None:
                product_into(dx[piece], logits, weight, kernel=kernel)
            if narrow is None and dweight is not None:
                product_into(dweight, logits.T, x[piece], start > 0, kernel)
            if dbias is not None:
                part = sum_array(logits, (0,), dtype=wide)
                dbias[...] = dbias + part if start else part
            del logits  # so that the next chunk reuses its memory
        if not len(x):
            for gradient in (dweight, dbias):
                if gradient is not None:
                    gradient.fill(0)
        return [None if dx is None else dx.reshape(shape), dweight, dbias]

    def _losses(
        self,
        losses: Array,
        dlogits: Array | None,
        logits: Array,
        piece: slice,
        scale: GradientFactor,
    ) -> None:
        """Write the losses of a chunk and, unless `dlogits` is None, the gradient of its logits."""
        ids, options, classes = self.ids[piece], self.options, self.classes
        if scale.dy is not None and scale.dy.size > 1:
            scale = GradientFactor(scale.dy[piece], scale.divisor)
        if self.counted is None:
            peaks = backend.empty((2, len(ids)), losses.dtype, like=losses)
            cross_entropy_cuda.rows_forward(
                losses[piece], peaks, dlogits, logits, ids, options, scale, classes
            )
            return
        factor = _factor(scale, losses.dtype)
        rows_numpy(
            losses[piece], dlogits, logits, ids, self.counted[piece], options, factor, classes
        )

    def run_tangent(
        self, losses: Array, arrays: Sequence[Array | None], needs: Needs, scale: GradientFactor
    ) -> list[Array | None]:
        """Write the tangents of the losses; return the gradients that are wanted, times `scale`.

        The logits l of a chunk, and their tangents t = tx W^T + x tW^T + tb, become the tangents of
        the losses; then, in the same memory, the gradients by both; see `rows_tangent_numpy`.

        Args:
            arrays: x, weight and bias, and their tangents or None.
        """
        dtype = self.dtype
        wide = compute_dtype(dtype)
        working = wide if is_numpy(losses) else dtype
        x, weight, bias, tx, tw, tb = (
            None if array is None else array.astype(working, copy=False) for array in arrays
        )
        x, tx = (None if a is None else flat(backend.contiguous(a)) for a in (x, tx))
        operands = (x, weight, bias, tx, tw, tb)
        gradients: list[Array | None] = [
            backend.empty(a.shape, working if place % 3 == 0 else wide, like=losses)
            if a is not None and need
            else None
            for place, (a, need) in enumerate(zip(operands, needs, strict=True))
        ]
        if not losses.size:
            for gradient in gradients:
                if gradient is not None:
                    gradient.fill(0)
        moving = (x, tw) if tx is None else (tx, weight)
        if tx is not None and tw is not None:
            joined = backend.namespace(x).concatenate
            moving = joined([tx, x], 1), joined([weight, tw], 1)
        count = -(-self.chunk // 2)  # both matrices have as many bytes as one of forward
        for start in range(0, losses.size, count):
            piece = slice(start, start + count)
            rows = len(losses[piece])
            matrices = backend.empty((2, rows, len(self.weight)), working, like=losses)
            _affine(matrices[0], (x, weight), bias, piece, self.kernel)
            _affine(matrices[1], moving, tb, piece, self.kernel)
            self._tangents(losses, matrices, piece, any(needs), scale)
            self._add_gradients(matrices, operands, piece, gradients)
            del matrices  # so that the next chunk reuses their memory
        return [
            gradient if gradient is None or place % 3 else gradient.reshape(self.x.shape)
            for place, gradient in enumerate(gradients)
        ]

    def _tangents(
        self,
        losses: Array,
        matrices: Array,
        piece: slice,
        differentiate: bool,
        scale: GradientFactor,
    ) -> None:
        """Write the tangents of the losses of a chunk and, if wanted, the gradients."""
        logits, t = matrices
        ids, options, classes = self.ids[piece], self.options, self.classes
        if scale.dy is not None and scale.dy.size > 1:
            scale = GradientFactor(scale.dy[piece], scale.divisor)
        if self.counted is None:
            cross_entropy_cuda.rows_tangent(
                losses[piece], logits, t, ids, options, scale, classes, differentiate
            )
            return
        factor = _factor(scale, losses.dtype) if differentiate else None
        rows_tangent_numpy(losses[piece], logits, t, ids, options, factor, classes)

    def _add_gradients(
        self,
        matrices: Array,
        operands: Sequence[Any],
        piece: slice,
        gradients: Sequence[Array | None],
    ) -> None:
        """Write or add what a chunk contributes to the gradients."""
        by_logits, by_tangents = matrices
        x, weight, _, tx, tw, _ = operands
        dx, dweight, dbias, dtx, dtw, dtb = gradients
        adds, kernel = piece.start > 0, self.kernel
        if dx is not None:
            product_into(dx[piece], by_logits, weight, kernel=kernel)
            if tw is not None:
                product_into(dx[piece], by_tangents, tw, True, kernel)
        if dtx is not None:
            product_into(dtx[piece], by_tangents, weight, kernel=kernel)
        if dweight is not None:
            left, right = by_logits, x[piece]
            if tx is not None:  # a single product reads and writes dweight once
                left = matrices.reshape(-1, matrices.shape[2])
                right = backend.namespace(right).concatenate([right, tx[piece]])
            product_into(dweight, left.T, right, adds, kernel)
        if dtw is not None:
            product_into(dtw, by_tangents.T, x[piece], adds, kernel)
        for total, matrix in ((dbias, by_logits), (dtb, by_tangents)):
            if total is not None:
                part = sum_array(matrix, (0,), dtype=total.dtype)
                total[...] = total + part if adds else part


def rows_at_a_time(op: str, chunk: int | None, rows: int, row_bytes: int, on_host: bool) -> int:
    """Return the rows of a chunk: as given, or of as few chunks as the memory for logits allows.

    These have equal sizes, up to multiples of 128 rows, which take the least memory. A few rows are
    one chunk in more memory, as each chunk reads and writes dweight once more.
    """
    if chunk is not None:
        check_integer(op, "chunk", chunk, 1)
        return chunk
    limit, whole = _CPU_BYTES if on_host else _GPU_BYTES
    if rows * row_bytes <= whole:
        return max(1, rows)
    most = max(1, limit // (row_bytes * _ROWS)) * _ROWS
    chunks = -(-rows // most)
    return -(-rows // (chunks * _ROWS)) * _ROWS


def loss_operands(
    op: str, x: Any, weight: Any, targets: Any, vocab_size: int | None, ranks: int
) -> tuple[Tensor, Tensor, Array, int]:
    """Return the checked operands of a loss whose weight is shared, and the number of classes.

    Args:
        op, x, weight, targets, vocab_size: see `linear_cross_entropy`.
        ranks: how many ranks share the weight, each with equally many rows.
    """
    x = float_tensor(op, "x", x, weight)
    weight = float_tensor(op, "weight", weight, x)
    if mode.autocast is not None:
        x, weight = cast_operands(x, weight)
    targets = integer_array(op, "targets", targets)
    backend.same_device(op, ("x", "weight", "targets"), (x.data, weight.data, targets))
    if weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[1] or not len(weight.data):
        shape = f"(n, {x.shape[-1] if x.ndim else 'C'})"
        raise ShapeError(
            f"{op}: weight has shape {weight.shape}, expected {shape} as x has shape {x.shape}"
        )
    check_shape(op, "targets", targets, x.shape[:-1], " (x without the last axis)")
    own = len(weight.data)
    what = f"{own} rows on each of {ranks} ranks"
    return x, weight, targets, _classes(op, vocab_size, own * ranks, what)


def _classes(op: str, vocab_size: int | None, rows: int, what: str) -> int:
    """Return the number of classes among the rows of a weight, `what` for errors."""
    classes = rows if vocab_size is None else vocab_size
    check_integer(op, "vocab_size", classes)
    if not 1 <= classes <= rows:
        raise ArgumentError(f"{op}: vocab_size is {classes}, expected 1 to {rows} ({what})")
    return classes


def _backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    *_, loss_of, count, loan, early = saved
    scale = GradientFactor(backend.contiguous(dy).reshape(-1), count)
    gradients: list[Array | None] | None = None if early is None else early.take()
    if gradients is None:
        losses = backend.empty(loss_of.ids.shape, dy.dtype, like=loss_of.ids)
        again: list[Array | None] = loss_of.run(losses, needs, scale)
        return again
    if loan is not None:
        gradients[1] = loan.array
    _rescale(gradients, scale, loss_of.dtype)
    if loan is not None:
        gradients[1] = loan.give_back(needs[1])
    return gradients


def _rescale(gradients: Sequence[Array | None], scale: GradientFactor, dtype: Dtype) -> None:
    """Multiply gradients that were computed for dy == 1, of logits of a dtype, by dy."""
    if not defers(dtype):
        scale = GradientFactor(scale.dy)
    for gradient in gradients:
        if gradient is None:
            continue
        if not is_numpy(gradient):
            cross_entropy_cuda.rescale(gradient, scale)
        elif (factor := _factor(scale, gradient.dtype)) != 1:
            gradient *= factor


@tangent_of(_backward)
def _tangent(op: Op, tx: Tensor | None, tw: Tensor | None, tb: Tensor | None) -> Tensor:
    loss_of, count, *_ = op.saved[3:]
    x, weight, bias = (
        None if array is None else op.input(i, array) for i, array in enumerate(op.saved[:3])
    )
    inputs = (x, weight, bias, tx, tw, tb)
    arrays = [data_of(tensor) for tensor in inputs]
    losses = backend.empty(loss_of.ids.shape, compute_dtype(loss_of.dtype), like=loss_of.ids)
    wants = [_wants(tensor) for tensor in inputs]
    early = loss_of.reduction != "none" and any(wants)
    scale = GradientFactor(None, None if defers(loss_of.dtype) else count)
    gradients = loss_of.run_tangent(losses, arrays, wants if early else (False,) * 6, scale)
    loss = _reduced(losses, count, loss_of.reduction, op.node.shape)
    saved = (*arrays, loss_of, count, Early(gradients) if early else None)
    return record("tangent of linear_cross_entropy", loss, inputs, _tangent_backward, saved)


def _wants(x: Tensor | None) -> bool:
    """Whether the gradient by a tensor of an op is wanted."""
    flows = x is not None and x.requires_grad and x.node is not FORWARD_ONLY
    return mode.grad_enabled and flows


def _tangent_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    *arrays, loss_of, count, early = saved
    scale = GradientFactor(backend.contiguous(dy).reshape(-1), count)
    gradients: list[Array | None] | None = None if early is None else early.take()
    if gradients is None:
        losses = backend.empty(loss_of.ids.shape, dy.dtype, like=dy)
        again: list[Array | None] = loss_of.run_tangent(losses, arrays, needs, scale)
        return again
    _rescale(gradients, scale, loss_of.dtype)
    return gradients


@tangent_of(_tangent_backward)
def _second_tangent(op: Op, *changes: Tensor | None) -> Tensor | None:
    """Return the tangent of the tangent from the definition of the loss, which holds all logits."""
    *arrays, loss_of, _, _ = op.saved
    ids, options, reduction = loss_of.ids, loss_of.options, loss_of.reduction

    def loss(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = matmul(reshape(x, (ids.size, x.shape[-1])), weight.swapaxes(0, 1))
        logits = logits if bias is None else logits + bias
        losses = losses_of_rows(logits, ids, options, loss_of.classes)
        return reduced_rows(losses, ids, options, reduction).reshape(op.node.shape)

    def tangent(*inputs: Tensor | None) -> Tensor | None:
        return along(loss, inputs[:3], inputs[3:])[0]

    inputs = [None if array is None else op.input(i, array) for i, array in enumerate(arrays)]
    return along(tangent, inputs, changes)[0]


def _affine(
    out: Array,
    operands: tuple[Array | None, Array | None],
    bias: Array | None,
    piece: slice,
    kernel: str | None,
) -> None:
    """Write some rows times a transposed weight, plus a bias."""
    x, weight = operands
    if x is None or weight is None:
        out[...] = 0 if bias is None else bias
    elif bias is None:
        product_into(out, x[piece], weight.T, kernel=kernel)
    else:
        y = product(x[piece], weight.T, compute_dtype(out.dtype), kernel)
        y += bias
        out[...] = y.astype(out.dtype, copy=False)


def _borrowed(weight: Tensor, dtype: Dtype) -> Loan | None:
    """Borrow the weight's gradient if dweight, of a dtype, may be written there before backward."""
    gradient = weight.gradient
    if weight.node is not None or gradient is None:
        return None
    fits = gradient.array.dtype == dtype and gradient.array.flags.c_contiguous
    return gradient.lend() if fits else None


def _factor(scale: GradientFactor, dtype: Dtype) -> Array:
    """Return dy / count on the CPU: () or (n,)."""
    factor = np.ones((), dtype) if scale.dy is None else scale.dy.astype(dtype, copy=False)
    if factor.size == 1:
        factor = factor.reshape(())
    return factor if scale.divisor is None else np.asarray(factor / scale.divisor, dtype)
