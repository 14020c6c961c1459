"""Layer norm and RMS norm: launches norm_forward.cu and norm_backward.cu.

Rows that consist of aligned vectors and are short enough are held in registers; any others are
read in a loop, more than once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import Dtype, c_name, compute_dtype
from tensorgrad.kernels import overlap
from tensorgrad.kernels.capturing import is_capturing
from tensorgrad.kernels.device import resident_blocks, shared_memory_per_block
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.rows import aligned, in_registers, strided_loop
from tensorgrad.kernels.structs import number, pointer

_FORWARD, _BACKWARD = "norm_forward.cu", "norm_backward.cu"
_FEW_ROWS = 32  # or fewer, as in a graph: launched to overlap with the kernels around them
_SHAPES = ((3, 32), (4, 64), (4, 128))  # vectors a thread, threads a row: known to the compiler
_PROCESSORS = 132  # an H200's; backward has a block for each, which writes partial rows
_STAGES, _LONG_STAGES = 3, 2  # the kernels' constants
_WITH_DX = 3  # sums of a partial row with those of dx; else 2
_COLUMN_CHUNKS = 128  # chunks of the rows, where dweight and dbias have a kernel of their own


def forward(
    x: Array,
    residual: Array | None,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    centre: bool,
) -> tuple[Array, Array, Array | None, Array]:
    """Return y, x + residual (x without one), and the mean and 1 / deviation of each row.

    Without `centre`, rms_norm, there is no mean.
    """
    x = backend.contiguous(x)
    total = x
    if residual is not None:
        residual, total = backend.contiguous(residual), backend.empty_like(x)
    width = x.shape[-1]
    rows = x.size // width if width else 0
    compute = compute_dtype(x.dtype)
    y = backend.empty_like(x)
    mean = backend.empty((rows,), compute, like=x) if centre else None
    rstd = backend.empty((rows,), compute, like=x)
    if not rows:
        return y, total, mean, rstd
    weight, bias = computable(weight, x), computable(bias, x)
    arrays = (y, total, pointer(mean), rstd, x, pointer(residual))
    launch = None
    if aligned(width, x, y, residual, weight, bias):
        wide = any(p is not None and p.dtype != x.dtype for p in (weight, bias))
        launch = _held_rows(
            x.dtype, rows, width, eps, residual is not None, wide, x.device.id, is_capturing()
        )
    if launch is None:
        layout, sizes = strided_loop(width), (np.int64(rows), np.int32(width), np.float64(eps))
        arguments = (*arrays, *given(weight, x), *given(bias, x), *sizes)
        kernel = load(_FORWARD, f"norm_forward_loop<{c_name(x.dtype)}>")
        kernel(layout.grid(rows), layout.block, arguments)
        return y, total, mean, rstd
    if wide:
        weight, bias = (
            None if p is None else p.astype(compute, copy=False) for p in (weight, bias)
        )
    kernel, grid, block, numbers, shared = launch
    arguments = (*arrays, pointer(weight), pointer(bias), *numbers)
    if rows > _FEW_ROWS and not is_capturing():
        kernel(grid, block, arguments, shared)
    else:
        overlap.launch(
            kernel, grid, block, arguments, shared,
            prefetch=(weight, bias), writes=(y, None if total is x else total, mean, rstd),
            trigger_early=True,
        )  # fmt: skip
    return y, total, mean, rstd


@lru_cache(maxsize=4096)
def _held_rows(
    dtype: Dtype,
    rows: int,
    width: int,
    eps: float,
    adds: bool,
    wide: bool,
    device: int,
    captured: bool,
) -> tuple[Any, ...] | None:
    """Return kernel, grid, block, numbers and bytes of shared memory for rows held in registers.

    None for rows that are too long. Cached: the launch is the same from step to step.
    """
    layout = in_registers(width * dtype.itemsize, (1, 3, 4), lanes=32, threads=128, most=512)
    if layout is None:
        return None
    threads = layout.threads * layout.groups
    flags = ", ".join("true" if flag else "false" for flag in (adds, wide))
    lanes = layout.threads if (layout.vectors, layout.threads) in _SHAPES else 0
    name = f"norm_forward_rows<{c_name(dtype)}, {layout.vectors}, {lanes}, {flags}>"
    kernel = load(_FORWARD, name)
    shared = threads * layout.vectors * 16 * (2 if adds else 1)
    blocks = min(*layout.grid(rows), resident_blocks(kernel, threads, shared, device))
    overlaps = number("?", captured or rows <= _FEW_ROWS)
    numbers = number("i8", rows), number("i4", width), number("f8", eps), overlaps
    return kernel, (blocks,), layout.block, numbers, shared


def backward(
    dy: Array,
    dsum: Array | None,
    x: Array,
    weight: Array | None,
    mean: Array | None,
    rstd: Array,
    wants_dx: bool,
    wants_parameters: bool,
) -> tuple[Array | None, Array | None, Array | None]:
    """Return dx + dsum, its column sums, and the gradients of weight and bias, both in parts.

    Parts are rows that add up, in the compute type: (N, C), and (N, 2 or more, C) with the weight's
    and then the bias's. None where not wanted; column sums are computed for some widths alone.
    """
    dy, x = backend.contiguous(dy.astype(x.dtype, copy=False)), backend.contiguous(x)
    if dsum is not None:
        dsum = backend.contiguous(dsum.astype(x.dtype, copy=False))
    rows, width = rstd.size, x.shape[-1]
    dx = backend.empty_like(x) if wants_dx else None
    if not rows:
        return dx, None, backend.cupy.zeros((1, 2, width), rstd.dtype)
    weight = computable(weight, x)
    arrays = (dy, pointer(dsum), x, *given(weight, x), pointer(mean), rstd)
    sizes = (number("i8", rows), number("i4", width))
    launch = partials = column_sums = None
    if dx is not None and aligned(width, x, dy, dsum, dx, weight):
        launch = _backward_rows(x.dtype, rows, width, x.device.id)
    if launch is not None:  # all gradients in one pass
        kernel, grid, block, shared, sums = launch
        partials = backend.empty((*grid, sums, width), rstd.dtype, like=x)
        arguments = (dx, partials, *arrays, *sizes)
        if sums == _WITH_DX:
            overlap.launch_in_graph(
                kernel, grid, block, (*arguments, number("?", is_capturing())), shared,
                writes=(dx, partials),
            )  # fmt: skip
            column_sums = partials[:, 2]
        else:
            kernel(grid, block, arguments, shared)
    else:
        if dx is not None:
            loop = strided_loop(width)
            kernel = load(_BACKWARD, f"norm_backward_loop<{c_name(x.dtype)}>")
            kernel(loop.grid(rows), loop.block, (dx, *arrays, *sizes))
        if wants_parameters:
            partials = column_parts(_BACKWARD, "norm_backward_columns", 2, (dy, x), mean, rstd)
    return dx, column_sums, partials


@lru_cache(maxsize=4096)
def _backward_rows(dtype: Dtype, rows: int, width: int, device: int) -> tuple[Any, ...] | None:
    """Return kernel, grid, block, bytes of shared memory, and how many sums partial rows have.

    None for rows that are too long. Cached: the launch is the same from step to step.
    """
    row_bytes = width * dtype.itemsize
    layout = in_registers(row_bytes, (1, 2, 3, 4, 5), lanes=32, threads=128, most=32)
    if layout is None:
        layout = in_registers(row_bytes, (2,), lanes=128, threads=256, most=128)
    if layout is not None:
        lanes = layout.threads if layout.vectors > 1 else 0  # known to the compiler
        name = f"norm_backward_rows<{c_name(dtype)}, {layout.vectors}, {lanes}>"
        blocks = _PROCESSORS * (2 if lanes > 32 else {3: 3, 4: 2, 5: 2}.get(layout.vectors, 4))
        staged, sums = _STAGES * 3, _WITH_DX
    else:
        layout = in_registers(row_bytes, (1, 2), lanes=512, threads=512, most=512)
        if layout is None:
            return None
        name = f"norm_backward_long<{c_name(dtype)}, {layout.vectors}>"
        blocks, staged, sums = _PROCESSORS * 2, _LONG_STAGES * 2, 2
    shared = staged * layout.vectors * 16 * layout.threads * layout.groups
    if shared > shared_memory_per_block(device):
        return None
    grid = (min(blocks, *layout.grid(rows)),)
    return load(_BACKWARD, name), grid, layout.block, shared, sums


def column_parts(
    file: str, kernel: str, sums: int, arrays: Sequence[Array], mean: Array | None, rstd: Array
) -> Array:
    """Return (N, sums, C): the gradients of parameters in partial rows, each of a chunk of rows."""
    rows, width, dtype = rstd.size, arrays[0].shape[-1], arrays[0].dtype
    chunk = max(1, -(-rows // _COLUMN_CHUNKS))
    chunks = -(-rows // chunk)
    partials = backend.empty((chunks, sums, width), rstd.dtype, like=rstd)
    if partials.size:
        sizes = np.int64(rows), np.int32(width), np.int64(chunk)
        load(file, f"{kernel}<{c_name(dtype)}>")(
            (-(-width // 32), chunks), (32, 8), (partials, *arrays, pointer(mean), rstd, *sizes)
        )
    return partials


def computable(array: Array | None, x: Array) -> Array | None:
    """Return weight or bias, contiguous, in the dtype of x or its compute type."""
    if array is None:
        return None
    if array.dtype != x.dtype:
        array = array.astype(compute_dtype(x.dtype), copy=False)
    return backend.contiguous(array)


def given(parameter: Array | None, x: Array) -> tuple[Any, Any]:
    """Return the pointer, and whether it points to the compute type of x."""
    wide = parameter is not None and parameter.dtype != x.dtype
    return pointer(parameter), number("?", wide)
