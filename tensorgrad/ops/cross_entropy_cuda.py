"""Launches of kernels/cross_entropy.cu.

Where a gradient will be wanted, forward computes it as well, for the case that the loss is what
`backward` starts from (dy == 1): the logits are then read once instead of twice. Backward is
launched all the same, and computes the gradient again if dy is another number, which only the
device knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.dtypes import c_name, compute_dtype, float64
from tensorgrad.kernels.loader import load

_NULL = np.uintp(0)
_STAGED_BYTES = 32768  # shorter rows are left to several blocks a multiprocessor


def forward(
    logits: Array,
    targets: Array,
    ignore_index: int | None,
    label_smoothing: float,
    reduction: str,
    differentiate: bool,
) -> tuple[Array, tuple[Any, ...]]:
    """Return the loss, and what `backward` needs."""
    vocabulary = logits.shape[-1]
    rows = backend.contiguous(logits).reshape(-1, vocabulary)
    if rows.data.ptr % 16:
        rows = rows.copy()  # a view that begins inside a vector
    ids = backend.contiguous(targets.astype(np.int64, copy=False)).reshape(-1)
    count = len(ids)
    dtype = compute_dtype(rows.dtype)
    compute = c_name(dtype)
    wanted = _targets(ids, ignore_index, label_smoothing)
    share = None
    if reduction == "mean":
        share = backend.empty((1,), dtype, like=rows)
        load("cross_entropy.cu", f"cross_entropy_count<{compute}>")(
            (1,), (1024,), (share, wanted, np.int64(count))
        )
    losses = backend.empty((count,), dtype, like=rows)
    logsumexp = backend.empty((count,), dtype, like=rows)
    ahead = differentiate and reduction != "none"
    dlogits = backend.empty_like(rows) if ahead else None
    if count:
        arrays = (losses, logsumexp, _pointer(dlogits), rows, wanted, _pointer(share))
        _launch_forward(rows, arrays, ahead)
    written = backend.empty((1,), dtype, like=rows) if ahead else None
    if reduction == "none":
        loss = losses.reshape(targets.shape)
    else:
        loss = backend.empty((), dtype, like=rows)
        load("cross_entropy.cu", f"cross_entropy_total<{compute}>")(
            (1,), (1024,), (loss, _pointer(written), losses, _pointer(share), np.int64(count))
        )
    options = (ignore_index, label_smoothing, logits.shape)
    return loss, (rows, ids, logsumexp, share, dlogits, written, options)


def backward(dy: Array, saved: tuple[Any, ...], needs: Sequence[bool]) -> tuple[Array | None]:
    """Return the gradient of the logits."""
    rows, ids, logsumexp, share, dlogits, written, options = saved
    ignore_index, label_smoothing, shape = options
    dy = backend.contiguous(dy)
    if dlogits is None:
        dlogits = backend.empty_like(rows)
    if len(ids):
        load("cross_entropy.cu", f"cross_entropy_backward<{c_name(rows.dtype)}>")(
            (len(ids),),
            _block(rows, 512, 4),
            (dlogits, rows, _targets(ids, ignore_index, label_smoothing), logsumexp, dy,
             np.int32(1 if dy.ndim else 0), _pointer(share), _pointer(written),
             np.int32(rows.shape[1])),
        )  # fmt: skip
    if written is not None:
        written[...] = dy  # a graph that is retained may come with another dy
    return (dlogits.reshape(shape),)


_TARGETS = np.dtype(
    [("ids", np.uintp), ("ignored", np.int64), ("ignores", np.int64), ("smoothing", np.float64)]
)


def _targets(ids: Array, ignore_index: int | None, label_smoothing: float) -> Any:
    """Return the kernels' struct Targets."""
    ignored = 0 if ignore_index is None else ignore_index
    fields = (ids.data.ptr, ignored, ignore_index is not None, label_smoothing)
    return np.array([fields], _TARGETS)


def _launch_forward(rows: Array, arrays: tuple[Any, ...], ahead: bool) -> None:
    """Choose the kernel by where a row finds room; no result depends on the grid."""
    count, vocabulary = rows.shape
    row_bytes = vocabulary * rows.itemsize // 16 * 16
    room, multiprocessors = _limits(rows.device.id)
    staged = ahead and row_bytes >= _STAGED_BYTES and rows.dtype != float64
    slots = min(2, room // row_bytes) if staged else 0
    if slots:
        load("cross_entropy.cu", f"cross_entropy_forward_staged<{c_name(rows.dtype)}>")(
            (min(count, multiprocessors),),
            _block(rows, 1024, 1),
            (*arrays, np.int64(count), np.int32(vocabulary), np.int32(slots)),
            slots * row_bytes,
        )
    else:
        load("cross_entropy.cu", f"cross_entropy_forward<{c_name(rows.dtype)}>")(
            (count,), _block(rows, 512, 4), (*arrays, np.int32(vocabulary))
        )


def _block(rows: Array, most: int, batch: int) -> tuple[int]:
    """Return threads for one row: as few as leave the number of their batches of vectors least."""
    vectors = -(-rows.shape[1] * rows.itemsize // 16)
    batches = -(-vectors // (most * batch))
    return (max(32, -(-vectors // (32 * batch * batches)) * 32),)


@lru_cache
def _limits(device: int) -> tuple[int, int]:
    """Return how much shared memory a block may have beside its own, and the multiprocessors."""
    runtime = backend.cupy.cuda.runtime
    shared = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device)
    count = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device)
    return int(shared) - 2048, int(count)


def _pointer(array: Array | None) -> Any:
    return _NULL if array is None else array
