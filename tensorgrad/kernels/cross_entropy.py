"""Cross-entropy of logits: launches cross_entropy.cu.

If a gradient will be needed, forward computes it as well, as if the loss were what `backward`
starts from (dy == 1): the logits are then read once instead of twice. Backward computes the
gradient again if dy, which only the device knows, is another number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import c_name, compute_dtype, float64
from tensorgrad.kernels.device import shared_memory_per_block, shared_memory_per_sm, sm_count
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.rows import power_of_two
from tensorgrad.kernels.structs import NULL, GradientScale, Targets, address, by_value, pointer

_FILE = "cross_entropy.cu"
_ALONE = 65536  # the most numbers that one block adds


class LossOptions(NamedTuple):
    """The definition of the loss of a row: see `cross_entropy`."""

    ignore_index: int | None
    label_smoothing: float
    z_loss: float


def forward(
    logits: Array, targets: Array, options: LossOptions, reduction: str, differentiate: bool
) -> tuple[Array, Array | None, tuple[Any, ...]]:
    """Return the loss, its gradient for dy == 1 (None: not computed), and what `backward` needs."""
    rows = backend.contiguous(logits).reshape(-1, logits.shape[-1])
    if rows.data.ptr % 16:
        rows = rows.copy()  # a view that begins inside a vector
    ids = flat_ids(targets)
    dtype = compute_dtype(rows.dtype)
    count = count_targets(ids, options) if reduction == "mean" else None
    losses = backend.empty((len(ids),), dtype, like=rows)
    peaks = backend.empty((2, len(ids)), dtype, like=rows)
    ahead = differentiate and reduction != "none"
    dlogits = backend.empty_like(rows) if ahead else None
    rows_forward(losses, peaks, dlogits, rows, ids, options, GradientFactor(None, count))
    loss = losses.reshape(targets.shape) if reduction == "none" else total(losses, count)
    return loss, dlogits, (rows, ids, peaks, count, options)


def backward(dy: Array, dlogits: Array | None, saved: tuple[Any, ...]) -> Array:
    """Return the gradient of the logits, (N, V).

    Args:
        dy: gradient of the loss.
        dlogits: the gradient for dy == 1, which is overwritten with any other dy; None: not known.
        saved: from `forward`.
    """
    rows, ids, peaks, count, options = saved
    scale = GradientFactor(backend.contiguous(dy).reshape(-1), count)
    prepared = dlogits is not None
    if dlogits is None:
        dlogits = backend.empty_like(rows)
    height, width = rows.shape
    if _held(rows):
        _group(None, dlogits, rows, ids, options, scale, width, prepared)
    elif height:
        load(_FILE, f"cross_entropy_backward<{c_name(rows.dtype)}>")(
            (min(height, 16 * sm_count(rows.device.id)),),
            _block(rows, 512, 4),
            (dlogits, rows, _targets(ids, options, width), peaks, scale.pack(),
             np.int32(prepared), np.int64(height), np.int32(width)),
        )  # fmt: skip
    return dlogits


class GradientFactor(NamedTuple):
    """The factor of gradients: dy (one, or one a row) / divisor; None stands for 1."""

    dy: Array | None = None
    divisor: Array | None = None  # a count of rows; 0 counts as 1

    def pack(self) -> Any:
        """Return the struct GradientScale."""
        each = self.dy is not None and self.dy.size != 1
        return by_value(GradientScale(address(self.dy), address(self.divisor), each))


def flat_ids(targets: Array) -> Array:
    """Return the targets as the kernels read them."""
    return backend.contiguous(targets.astype(np.int64, copy=False)).reshape(-1)


def count_targets(ids: Array, options: LossOptions) -> Array:
    """Return how many targets count, an array of one on the device."""
    blocks = max(1, min(128, len(ids) // _ALONE * 4))
    count = backend.empty((1,), np.dtype(np.int64), like=ids)
    if blocks > 1:
        count.fill(0)
    load(_FILE, "cross_entropy_count")(
        (blocks,), (1024,), (count, _targets(ids, options), np.int64(len(ids)))
    )
    return count


def total(losses: Array, count: Array | None) -> Array:
    """Return the sum of the losses, divided by a count that is not None: NaN of no losses."""
    kernel = load(_FILE, f"cross_entropy_total<{c_name(losses.dtype)}>")
    if len(losses) > _ALONE:
        chunk = -(-len(losses) // 128)
        sums = backend.empty((128,), losses.dtype, like=losses)
        kernel((128,), (1024,), (sums, losses, NULL, np.int64(len(losses)), np.int64(chunk)))
        losses = sums
    loss = backend.empty((), losses.dtype, like=losses)
    if count is not None and not len(losses):
        loss.fill(np.nan)
        return loss
    size = np.int64(len(losses))
    kernel((1,), (1024,), (loss, losses, pointer(count), size, size))
    return loss


def rows_forward(
    losses: Array, peaks: Array, dlogits: Array | None, logits: Array, ids: Array,
    options: LossOptions, scale: GradientFactor, classes: int | None = None,
) -> None:  # fmt: skip
    """Write the loss of each row and, unless `dlogits` is None, the gradient.

    Short rows are held in registers, longer ones in shared memory where they fit; the others are
    read twice. No result depends on the grid.

    Args:
        losses: (N,).
        peaks: (2, N), for `backward`: the maximum of each row, and the sum of exp(logit - maximum);
            not written for short rows.
        dlogits: (N, width), may be `logits`.
        logits: (N, width), C order, at a 16-byte boundary.
        ids: from `flat_ids`.
        options: of the loss.
        scale: of the gradient.
        classes: the number of columns that count, the first ones; None: all.
    """
    height, width = logits.shape
    classes = width if classes is None else classes
    if not height:
        return
    if _held(logits):
        _group(losses, dlogits, logits, ids, options, scale, classes)
        return
    dtype, device = c_name(logits.dtype), logits.device.id
    inputs = (logits, _targets(ids, options, classes), scale.pack())
    row_bytes = classes * logits.itemsize // 16 * 16
    staged = dlogits is not None and logits.dtype != float64
    if staged and row_bytes <= shared_memory_per_block(device) - 2048:  # the kernel's static one
        blocks = min(24, shared_memory_per_sm(device) // (row_bytes + 1536))
        load(_FILE, f"cross_entropy_staged<{dtype}>")(
            (min(height, blocks * sm_count(device)),),
            (1024 if blocks == 1 else 768 // blocks // 32 * 32,),
            (losses, peaks, dlogits, *inputs, np.int64(height), np.int32(width), np.int32(classes)),
            row_bytes,
        )
        return
    load(_FILE, f"cross_entropy_forward<{dtype}>")(
        (height,),
        _block(logits, 512, 4),
        (losses, peaks, pointer(dlogits), *inputs, np.int32(width), np.int32(classes)),
    )


def rows_tangent(
    losses: Array, logits: Array, tangents: Array, ids: Array, options: LossOptions,
    scale: GradientFactor, classes: int, differentiate: bool,
) -> None:  # fmt: skip
    """Write the tangent of the loss of each row and, if wanted, its gradients over the operands.

    Args:
        losses: (N,).
        logits, tangents: (N, width), C order; logits and their tangents. With `differentiate` they
            become the gradients by them, times `scale`.
        ids: from `flat_ids`.
        options: of the loss.
        scale: of the gradients.
        classes: the number of columns that count, the first ones.
        differentiate: whether gradients are wanted.
    """
    height, width = logits.shape
    if not height:
        return
    load(_FILE, f"cross_entropy_tangent<{c_name(logits.dtype)}>")(
        (height,),
        _block(logits, 512, 4),
        (losses, logits, tangents, _targets(ids, options, classes), scale.pack(),
         np.int32(differentiate), np.int32(width), np.int32(classes)),
    )  # fmt: skip


def rescale(values: Array, scale: GradientFactor) -> None:
    """Multiply in place with one number; memory is not touched where that is 1."""
    if values.size:
        load(_FILE, f"cross_entropy_rescale<{c_name(values.dtype)}>")(
            (min(2048, -(-values.nbytes // 4096)),),
            (256,),
            (values, scale.pack(), np.int64(values.size)),
        )


def _held(logits: Array) -> int:
    """Return the logits that a thread holds of a short row, 0 for rows that are not short."""
    width = logits.shape[1]
    if width * logits.itemsize % 16 == 0 and logits.dtype != float64 and 32 < width <= 1024:
        return 32
    return 8 if width <= 256 else 0


def _group(
    losses: Array | None, dlogits: Array | None, logits: Array, ids: Array, options: LossOptions,
    scale: GradientFactor, classes: int, prepared: bool = False,
) -> None:  # fmt: skip
    """Write losses and gradients of short rows, each held by at most 32 threads."""
    height, width = logits.shape
    if not height:
        return
    own = _held(logits)
    lanes = power_of_two(-(-width // own))
    groups = 256 // lanes
    load(_FILE, f"cross_entropy_group<{c_name(logits.dtype)}, {own}>")(
        (min(-(-height // groups), 4 * sm_count(logits.device.id)),),
        (lanes, groups),
        (pointer(losses), pointer(dlogits), logits, _targets(ids, options, classes),
         scale.pack(), np.int32(prepared), np.int64(height), np.int32(width), np.int32(classes)),
    )  # fmt: skip


def _targets(ids: Array, options: LossOptions, classes: int = 1) -> Any:
    """Return the struct Targets."""
    index, smoothing, z_loss = options
    ignored = (0 if index is None else index, index is not None)
    return by_value(Targets(ids.data.ptr, *ignored, 1 - smoothing, smoothing / classes, z_loss))


def _block(rows: Array, most: int, batch: int) -> tuple[int]:
    """Return the least threads for one row with the least number of batches of vectors a thread."""
    vectors = -(-rows.shape[1] * rows.itemsize // 16)
    batches = -(-vectors // (most * batch))
    return (max(32, -(-vectors // (32 * batch * batches)) * 32),)
