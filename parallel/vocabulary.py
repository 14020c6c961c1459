"""Vocabulary parallel cross entropy: the rows of the head are divided among the ranks.

Rank r has rows r n to (r + 1) n of the V = ranks * n rows of the head, and computes n of the V
logits of each row of x. For a chunk of N rows the ranks exchange 4 N numbers. These are, of each
rank's logits, the largest and, relative to it, the sum of exponentials, the target's logit and the
sum of all logits. Because they are relative, a common offset of the logits costs no precision. From
them all ranks compute the same loss, adding in the order of the ranks. Each computes the gradient
of its own logits at once, in the memory of the logits, as `tensorgrad.linear_cross_entropy` does.
Tests: tests/parallel/test_tensor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorgrad.amp import product_kernel
from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.core import backend
from tensorgrad.core.backend import Array, is_numpy
from tensorgrad.core.checks import promoted
from tensorgrad.core.dtypes import Dtype, compute_dtype
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.modes import mode
from tensorgrad.core.record import record
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels.cross_entropy import GradientFactor, LossOptions, rescale
from tensorgrad.ops.cross_entropy import check_options, counted_targets, defers
from tensorgrad.ops.elementwise import exp, log, where
from tensorgrad.ops.indexing import take_along_axis
from tensorgrad.ops.linear_cross_entropy import loss_operands, rows_at_a_time
from tensorgrad.ops.matmul import flat, matmul, product, product_into
from tensorgrad.ops.shape import astype, reshape
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.tensor_ops import all_reduce, all_reduce_gradient


def vocabulary_parallel_cross_entropy(
    x: Any,
    weight: Any,
    targets: Any,
    comm: Comm,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return `tensorgrad.linear_cross_entropy` for the concatenated heads of all ranks.

    The gradient of x is this rank's term of a sum over the ranks, so x must come from
    `all_reduce_gradient` or `all_gather_rows`.

    Args:
        x: (..., C), any float dtype, the same on all ranks.
        weight: (n, C): the rows of this rank.
        targets: (...), integers in [0, vocab_size), the same on all ranks.
        comm: the ranks.
        ignore_index, label_smoothing, z_loss: as for `tensorgrad.cross_entropy`.
        reduction: "mean" or "sum".
        vocab_size: rows of the whole head that are classes; the rows after them are ignored, and
            a rank may have only such rows. None: all.
        chunk: rows of x to process at a time; None: as in `linear_cross_entropy`, for the logits
            of this rank.
    Returns:
        A scalar, the same bits on all ranks; float32, float64 for float64 operands.

    Raises:
        ShapeError, ArgumentError, OutOfRangeError, DtypeError, DeviceError: as from
            `tensorgrad.linear_cross_entropy`.
        CommError: the ranks disagree, or the network fails.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    op = "vocabulary_parallel_cross_entropy"
    x, weight, targets, classes = loss_operands(op, x, weight, targets, vocab_size, comm.size)
    arrays = (x.data, weight.data)
    options = LossOptions(ignore_index, label_smoothing, z_loss)
    check_options(op, options, reduction)
    if reduction == "none":
        raise ArgumentError(f"{op}: reduction is 'none', expected 'mean' or 'sum'")
    dtype = promoted(op, ("x", "weight"), arrays)
    wide = compute_dtype(dtype)
    row_bytes = len(weight.data) * wide.itemsize
    chunk = rows_at_a_time(op, chunk, targets.size, row_bytes, is_numpy(targets))
    if is_numpy(targets):
        counted = counted_targets(op, targets, ignore_index, classes)
    else:
        counted = (targets == targets if ignore_index is None else targets != ignore_index).ravel()
    divisor = None
    if reduction == "mean":
        divisor = backend.namespace(counted).maximum(counted.sum(), 1).astype(wide)
    ids = targets.reshape(-1)
    inputs = _LossInputs(
        comm, *arrays, ids, classes, options, counted, divisor, dtype, chunk,
        product_kernel(*arrays),
    )  # fmt: skip
    wants = [mode.grad_enabled and tensor.requires_grad for tensor in (x, weight)]
    losses, gradients = _losses_and_gradients(inputs, wants)
    loss = losses.sum() if divisor is None else losses.sum() / divisor
    if divisor is not None and not losses.size:
        loss = backend.namespace(losses).full_like(loss, np.nan)  # the mean of no rows
    saved = (*arrays, inputs, [gradients])
    return record(op, loss, (x, weight), _backward, saved)


class _LossInputs(NamedTuple):
    """The inputs of the loss."""

    comm: Comm
    x: Array
    weight: Array  # this rank's rows of the head
    ids: Array  # (N,)
    classes: int
    options: LossOptions
    counted: Array  # (N,)
    divisor: Array | None  # divisor of the sum of losses
    dtype: Dtype
    chunk: int
    kernel: str | None  # kernel of the products

    @property
    def first(self) -> int:
        """The class of the first row."""
        return self.comm.rank * len(self.weight)

    @property
    def own(self) -> int:
        """The number of rows that are classes."""
        return min(max(self.classes - self.first, 0), len(self.weight))


def _backward(dy: Array, saved: tuple[Any, ...], needs: Sequence[bool]) -> Sequence[Array | None]:
    *_, inputs, early = saved
    # They are computed again for a retained graph.
    gradients = early.pop() if early else _losses_and_gradients(inputs, needs)[1]
    factor = dy if inputs.divisor is None or not defers(inputs.dtype) else dy / inputs.divisor
    for gradient in gradients:
        if gradient is None:
            continue
        if not is_numpy(gradient):
            rescale(gradient, GradientFactor(backend.contiguous(factor).reshape(-1)))
        elif factor != 1:
            gradient *= factor.astype(gradient.dtype)
    return gradients


@tangent_of(_backward)
def _tangent(op: Op, tx: Tensor | None, tw: Tensor | None) -> Tensor:
    """Return the tangent in recorded ops, which hold this rank's logits of all rows.

    Each rank adds its terms of sum(p t) (1 + 2 z_loss logsumexp) - sum(target t), see
    `tangents_of_losses`. The logsumexp is of all ranks, and so is the sum of its gradients.
    """
    x, weight, inputs, _ = op.saved
    comm, options, xp = inputs.comm, inputs.options, backend.namespace(inputs.ids)
    dtype, shape = compute_dtype(inputs.dtype), (len(inputs.ids), x.shape[-1])
    rows, head = reshape(op.input(0, x), shape), op.input(1, weight)[: inputs.own].T
    terms = [] if tx is None else [matmul(reshape(tx, shape), head)]
    terms += [] if tw is None else [matmul(rows, tw[: inputs.own].T)]
    t = astype(sum(terms[1:], terms[0]), dtype, copy=False)
    logits = astype(matmul(rows, head), dtype, copy=False)
    own = xp.full(shape[:1], np.finfo(dtype).min, dtype)
    if inputs.own:
        own = logits.data.max(-1)
    peak = Tensor(comm.all_gather(own).max(0)[:, None])
    total = all_reduce(exp(logits - peak).sum(-1, keepdims=True), comm)
    logsumexp = all_reduce_gradient(log(total) + peak, comm)
    term = (exp(logits - logsumexp) * t).sum(-1, keepdims=True)
    term = term * (1 + 2 * options.z_loss * logsumexp)
    if inputs.own:
        places = inputs.ids.astype(np.int64, copy=False) - inputs.first
        here = inputs.counted & (places >= 0) & (places < inputs.own)
        found = take_along_axis(t, Tensor(xp.where(here, places, 0)[:, None]), 1)
        term = term - (1 - options.label_smoothing) * where(Tensor(here[:, None]), found, 0.0)
        term = term - options.label_smoothing / inputs.classes * t.sum(-1, keepdims=True)
    losses = where(Tensor(inputs.counted), all_reduce(term, comm)[:, 0], 0.0)
    if not losses.size:
        return losses.sum() * (1.0 if inputs.divisor is None else np.nan)
    return losses.sum() if inputs.divisor is None else losses.sum() / Tensor(inputs.divisor)


def _losses_and_gradients(
    inputs: _LossInputs, wants: Sequence[bool]
) -> tuple[Array, list[Array | None]]:
    """Return the losses of the rows, and the wanted gradients, for dy == 1."""
    shape, dtype, kernel = inputs.x.shape, inputs.dtype, inputs.kernel
    wide = compute_dtype(dtype)
    working = wide if is_numpy(inputs.x) else dtype  # convert 16 bits once, not in each chunk
    x = backend.contiguous(flat(inputs.x.astype(working, copy=False)))
    weight = inputs.weight.astype(working, copy=False)
    losses = backend.empty((len(x),), wide, like=x)
    dx = backend.empty(x.shape, working, like=x) if wants[0] else None
    dweight = backend.empty(weight.shape, wide, like=x) if wants[1] else None
    for start in range(0, len(x), inputs.chunk):
        piece = slice(start, start + inputs.chunk)
        logits = product(x[piece], weight.T, wide, kernel)
        _process_chunk(inputs, losses[piece], logits, piece, any(wants))
        dlogits = logits.astype(working, copy=False)
        if dx is not None:
            product_into(dx[piece], dlogits, weight, kernel=kernel)
        if dweight is not None:
            product_into(dweight, dlogits.T, x[piece], start > 0, kernel)
        del logits, dlogits  # the next chunk reuses their memory
    if dweight is not None and not len(x):
        dweight.fill(0)
    return losses, [None if dx is None else dx.reshape(shape), dweight]


def _process_chunk(
    inputs: _LossInputs, losses: Array, logits: Array, piece: slice, wanted: bool
) -> None:
    """Write the losses of a chunk and, if wanted, overwrite its logits by their gradient."""
    xp, wide = backend.namespace(logits), logits.dtype
    smoothing, z_loss = inputs.options.label_smoothing, inputs.options.z_loss
    target_part, each = wide.type(1 - smoothing), wide.type(smoothing / inputs.classes)
    ids, counted = inputs.ids[piece], inputs.counted[piece]
    own = logits[:, : inputs.own]
    places = ids.astype(np.int64, copy=False) - inputs.first
    here = counted & (places >= 0) & (places < inputs.own)
    places = xp.where(here, places, 0)
    # For each row: the largest logit and, relative to it, sum of exponentials, target, sum.
    mine = backend.empty((4, len(logits)), wide, like=logits)
    mine.fill(0)
    mine[0] = np.finfo(wide).min
    mine[2] = -np.inf

    def measure(rows: slice) -> None:
        part = own[rows]
        xp.maximum(mine[0, rows], part.max(-1), out=mine[0, rows])
        part -= mine[0, rows, None]
        target = part[xp.arange(len(part)), places[rows]]
        mine[2, rows] = xp.where(here[rows], target, -np.inf)
        if smoothing:
            mine[3, rows] = part.sum(-1)
        xp.exp(part, out=part)
        mine[1, rows] = part.sum(-1)

    if inputs.own:
        _by_rows(measure, logits)
    all_ranks = inputs.comm.all_gather(mine)
    largest = all_ranks[:, 0].max(0)
    below = all_ranks[:, 0] - largest
    total = (all_ranks[:, 1] * xp.exp(below)).sum(0)
    target = xp.where(counted, (all_ranks[:, 2] + below).max(0), 0)
    loss = xp.log(total) - target_part * target
    if smoothing:
        height = len(inputs.weight)
        firsts = xp.arange(len(all_ranks), dtype=wide)[:, None] * height
        heights = xp.clip(inputs.classes - firsts, 0, height)  # `own` of each rank
        loss -= each * (all_ranks[:, 3] + heights * below).sum(0)
    logsumexp = xp.log(total) + largest
    if z_loss:
        loss += wide.type(z_loss) * logsumexp * logsumexp
    # On the CPU ids were checked before. `copyto` does not make the host wait for a GPU.
    xp.copyto(loss, np.nan, where=(ids < 0) | (ids >= inputs.classes))
    losses[...] = xp.where(counted, loss, 0)
    if not wanted:
        return
    scale = xp.ones_like(total)
    if inputs.divisor is not None and not defers(inputs.dtype):
        scale /= inputs.divisor
    factor = scale * xp.exp(mine[0] - largest) / total
    if z_loss:
        factor *= 1 + wide.type(2 * z_loss) * logsumexp

    def differentiate(rows: slice) -> None:
        part = own[rows]
        part *= factor[rows, None]
        if smoothing:
            part -= (scale[rows] * each)[:, None]
        target = scale[rows] * target_part
        part[xp.arange(len(part)), places[rows]] -= xp.where(here[rows], target, 0)
        ignored = ~counted[rows]  # their logits may be anything, even NaN
        if not is_numpy(part):
            xp.copyto(part, 0, where=ignored[:, None])
        elif ignored.any():
            part[ignored] = 0

    if inputs.own:
        _by_rows(differentiate, logits)
    logits[:, inputs.own :] = 0


def _by_rows(function: Callable[[slice], None], matrix: Array) -> None:
    """Call the function on blocks of rows that fit in a core's cache; on a GPU once."""
    if is_numpy(matrix):
        block = max(1, backend.BLOCK // matrix.shape[1])
        backend.parallel_blocks(function, len(matrix), block)
    else:
        function(slice(0, len(matrix)))
