"""Linear layers: a matrix product with bias, residual and GELU. Tests: tests/ops/test_linear.py.

On the GPU bias, residual and GELU are the epilogue of the product: they are applied to its sums in
registers, of 16 bits and TF32. The product for a weight's gradient adds to the float32 gradient so
far itself. Where no gradient is recorded, products of few rows take a skinny GEMM; see
`_skinny`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorgrad.amp import cast_operands, product_kernel
from tensorgrad.autograd.tangents import Op, tangent, tangent_of
from tensorgrad.core import backend
from tensorgrad.core.arrays import converted, sum_array
from tensorgrad.core.backend import Array, contiguous, is_numpy, upcast
from tensorgrad.core.checks import check_choice, promoted
from tensorgrad.core.dtypes import Dtype, DtypeLike, as_dtype, compute_dtype, float32, is_float
from tensorgrad.core.errors import DtypeError
from tensorgrad.core.gradient import (
    Gradient,
    Gradients,
    Needs,
    Recompute,
    Saved,
    accumulated,
    out_of,
    parts_of,
)
from tensorgrad.core.modes import mode
from tensorgrad.core.operands import data_of
from tensorgrad.core.record import record
from tensorgrad.core.signature import Float, Probability, Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.kernels import matmul as matmul_cuda
from tensorgrad.kernels.matmul.problem import problem
from tensorgrad.kernels.reduce import sum_rows_into
from tensorgrad.kernels.special import gelu_tanh_with_derivative
from tensorgrad.ops import fp8
from tensorgrad.ops.column_sums import column_sums
from tensorgrad.ops.dropout import dropout as drop
from tensorgrad.ops.dropout import swiglu_dropout, swiglu_gradients, swiglu_operands
from tensorgrad.ops.elementwise.activation import GELU_TANH, gelu
from tensorgrad.ops.elementwise.row import Row
from tensorgrad.ops.matmul import cast_like, flat, in_tiles, product
from tensorgrad.ops.norm import operand_to_save, saved_operand

__all__ = ["feed_forward", "gated_linear", "linear", "linear_gelu"]

takes = Signatures(globals())


def linear(
    x: Float[ArrayLike, "*B C"],
    weight: Float[ArrayLike, "out C"],
    bias: Float[ArrayLike, "out"] | None = None,
    *,
    residual: Float[ArrayLike, "*B out"] | None = None,
    dtype: DtypeLike | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Return y = x W^T + b + residual as one matrix product over all rows of x.

    Args:
        x: (..., C), any float dtype.
        weight: (out, C).
        bias: (out,) or None; added before the result is rounded.
        residual: (..., out) or None; added before the result is rounded.
        dtype: of the result, a float; float32 keeps the sums of 16-bit operands as they are.
            Default: what x, weight and residual promote to.
        kernel: as for `matmul`; or "fp8": operands are rounded to 8 bits, x and W to e4m3 and the
            gradient of y to e5m2, each times the power of two that brings its largest element
            within the format. That is for lengths of multiples of 16, on Hopper and on the CPU.

    Returns:
        (..., out).

    Raises:
        DtypeError: x, weight, bias or residual does not hold floats.
        ShapeError: x is not (*B, C), weight not (out, C), bias not (out,), residual not (*B, out).
        DeviceError: the operands are on different devices.
        DtypeError: `dtype` is not a float.
        ArgumentError: there is no such kernel here, or it does not support this product.

    Example:
        >>> tg.linear([1.0, 2.0], weight=[[1.0, 0.0], [0.0, 2.0]], bias=[0.0, 5.0]).tolist()
        [1.0, 9.0]
    """
    x, weight, bias, residual = takes.linear(x, weight, bias, residual)
    scales = fp8.scales_of("linear", x, weight, kernel)
    if scales is not None:
        common = fp8.result_dtype(x, weight, residual)
        return fp8.linear(x, weight, bias, residual, _result_dtype(dtype, common), scales)
    if mode.autocast is not None:
        x, weight = cast_operands(x, weight)
    a, w, added, residual_data = x.data, weight.data, data_of(bias), data_of(residual)
    common = promoted("linear", ("x", "weight"), (a, w))
    if residual_data is not None and residual_data.dtype is not common:
        common = promoted("linear", ("x", "weight", "residual"), (a, w, residual_data))
    kernel = product_kernel(a, w, residual_data) if kernel is None else kernel
    y = _affine(flat(a), w, added, residual_data, _result_dtype(dtype, common), kernel)
    y = y.reshape(*a.shape[:-1], w.shape[0])
    kept, of_norm = operand_to_save(x)
    saved = (kept, w, kernel, *of_norm)
    inputs = (x, weight, bias, residual)
    return record("linear", y, inputs, _linear_backward, saved, takes_gradient=True)


def _linear_backward(dy: Any, saved: Saved, needs: Needs) -> Gradients:
    x, weight, kernel, *_ = saved
    dy, sums = parts_of(dy)
    return *_gradients(dy, sums, x, weight, kernel, needs), dy


@tangent_of(_linear_backward)
def _linear_tangent(op: Op, *tangents: Tensor | None) -> Tensor | None:
    x, weight, kernel, *_ = op.saved
    inputs = _saved_inputs(op, (0, 1), (x, weight))
    return _affine_tangent(inputs, tangents, kernel, op.node.dtype)


def _saved_inputs(
    op: Op, places: Sequence[int], saved: Sequence[Array | Recompute | None]
) -> list[Any]:
    """Return inputs that an op has saved, with history; None for one that was not given."""
    if op.inputs is not None:  # the output of a norm is there
        saved = [data_of(op.inputs[place]) for place in places]
    return [
        None if operand is None else op.input(place, saved_operand(operand))
        for place, operand in zip(places, saved, strict=True)
    ]


def _linear_result(
    y: Array,
    inputs: Sequence[Any],
    x: Array | Recompute,
    kernel: str | None,
    of_norm: Sequence[Array | None],
) -> Tensor:
    """Record x W^T + b that is computed already.

    Args:
        y: the result, in any shape.
        inputs: x, W and b, or None for b.
        x: as saved; kernel, of_norm: what is saved beside it.
    """
    rows, weight, bias = inputs
    y = y.reshape(*rows.shape[:-1], len(weight))
    saved = (x, weight.data, kernel, *of_norm)
    operands = (rows, weight, bias, None)
    return record("linear", y, operands, _linear_backward, saved, takes_gradient=True)


def _affine_tangent(
    inputs: Sequence[Any], tangents: Sequence[Tensor | None], kernel: str | None, dtype: Dtype
) -> Tensor | None:
    """Return the tangent of x W^T + b + residual; the second product adds to the first.

    Args:
        inputs: x and W first.
        tangents: of x, W, b and the residual, or fewer.
        kernel: of the products.
        dtype: of the result.
    """
    x, weight = inputs[:2]
    tx, tweight, tbias, t = (*tangents, None)[:4]
    if tx is not None:
        tx = cast_like(tx, x.data)
        t, tbias = linear(tx, weight, tbias, residual=t, dtype=dtype, kernel=kernel), None
    if tweight is not None:
        tweight = cast_like(tweight, weight.data)
        t, tbias = linear(x, tweight, tbias, residual=t, dtype=dtype, kernel=kernel), None
    if tbias is None:
        return t
    return tbias if t is None else t + tbias


def _gradients(
    dy: Array,
    sums: Array | None,
    x: Array | Recompute,
    weight: Array,
    kernel: str | None,
    needs: Needs,
) -> tuple[Array | None, Array | None, Array | None]:
    """Return the gradients of x, weight and bias, given that of x W^T + b and its column sums."""
    rows = flat(dy)
    dtype = promoted("linear", ("dy", "weight"), (rows, weight))
    dx = product(rows, weight, dtype, kernel).reshape(x.shape) if needs[0] else None
    dweight = _weight_gradient(rows, x, needs[1], kernel)
    return dx, dweight, _bias_gradient(dy, needs[2], sums)


def linear_gelu(
    x: Float[ArrayLike, "... C"],
    weight: Float[ArrayLike, "out C"],
    bias: Float[ArrayLike, "out"] | None = None,
    *,
    approximate: str = "tanh",
) -> Tensor:
    """Return y = gelu(x W^T + b).

    Args:
        x: (..., C), any float dtype.
        weight: (out, C).
        bias: (out,) or None.
        approximate: "tanh" (as in GPT-2) or "none" (exact), as for `gelu`, whose default is "none".

    Returns:
        (..., out), in the dtype that x and weight promote to.

    Raises:
        DtypeError: x, weight or bias does not hold floats.
        ShapeError: x is not (..., C), weight not (out, C), bias not (out,).
        DeviceError: the operands are on different devices.
        ArgumentError: another name for `approximate`.

    Example:
        >>> tg.linear_gelu([1.0, 0.0], [[1.0, 5.0], [0.0, 1.0]], approximate="none").tolist()
        [0.841..., 0.0]
    """
    check_choice("linear_gelu", "approximate", approximate, ("tanh", "none"))
    x, weight, bias = takes.linear_gelu(x, weight, bias)
    if fp8.scales_of("linear_gelu", x, weight) is not None:
        return gelu(linear(x, weight, bias), approximate=approximate)
    if mode.autocast is not None:
        x, weight = cast_operands(x, weight)
    a, w, added = x.data, weight.data, data_of(bias)
    inputs = (x, weight, bias)
    kernel = product_kernel(a, w)
    few = approximate == "tanh" and kernel is None
    y = _skinny(flat(a), w, added, gelu=True) if few else None
    kept = None
    if y is None:
        if approximate != "tanh" or not _is_fused((a, w), (added,), kernel):
            return gelu(linear(x, weight, bias), approximate=approximate)
        y, kept, _ = _activated(flat(a), w, added, inputs, kernel, False)
    y = y.reshape(*a.shape[:-1], len(w))
    x_kept, of_norm = operand_to_save(x)
    if mode.forward is not None and kept is not None:  # the tangent of each part by itself
        before = _linear_result(kept, inputs, x_kept, kernel, of_norm)
        return GELU_TANH.result(y, before)
    saved = (x_kept, w, added, kept, kernel, *of_norm)
    return record("linear_gelu", y, inputs, _linear_gelu_backward, saved)


def _linear_gelu_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    x, weight, _, operand, kernel, *_ = saved
    dpre = _GELU_BACKWARD(flat(dy), operand).data
    return _gradients(dpre, None, x, weight, kernel, needs)


@tangent_of(_linear_gelu_backward)
def _linear_gelu_tangent(op: Op, *tangents: Tensor | None) -> Tensor | None:
    x, weight, bias, kept, kernel, *of_norm = op.saved
    inputs = _saved_inputs(op, (0, 1, 2), (x, weight, bias))
    before = _linear_result(kept, inputs, x, kernel, of_norm)
    t = _affine_tangent(inputs, tangents, kernel, before.dtype)
    return GELU_TANH.tangent([t], [before], op.node.dtype)


def feed_forward(
    x: Float[ArrayLike, "*B C"],
    up: Float[ArrayLike, "hidden C"],
    up_bias: Float[ArrayLike, "hidden"] | None,
    down: Float[ArrayLike, "out hidden"],
    down_bias: Float[ArrayLike, "out"] | None,
    residual: Float[ArrayLike, "*B out"] | None = None,
    *,
    approximate: str = "tanh",
) -> Tensor:
    """Return y = gelu(x U^T + b) D^T + c + residual: the feed-forward block of a transformer.

    Args:
        x: (..., C), any float dtype.
        up: U, (hidden, C).
        up_bias: b, (hidden,) or None.
        down: D, (out, hidden).
        down_bias: c, (out,) or None.
        residual: (..., out) or None.
        approximate: as for `linear_gelu`.

    Returns:
        (..., out), in the dtype that x, the weights and the residual promote to.

    Raises:
        DtypeError: x, up, up_bias, down, down_bias or residual does not hold floats.
        ShapeError: x is not (*B, C), up not (hidden, C), up_bias not (hidden,), down not (out,
            hidden), down_bias not (out,), residual not (*B, out).
        DeviceError: the operands are on different devices.
        ArgumentError: another name for `approximate`.

    Example:
        >>> x, up, down = tg.ones((3, 2)), tg.zeros((8, 2)), tg.zeros((2, 8))
        >>> tg.feed_forward(x, up, None, down, [1.0, 2.0], residual=x)[0].tolist()
        [2.0, 3.0]
    """
    check_choice("feed_forward", "approximate", approximate, ("tanh", "none"))
    x, up, up_bias, down, down_bias, residual = takes.feed_forward(
        x, up, up_bias, down, down_bias, residual
    )
    scales, more = (fp8.scales_of("feed_forward", x, weight) for weight in (up, down))
    if scales is not None or more is not None:
        dtype = fp8.result_dtype(x, up, residual)
        fused = approximate == "tanh" and dtype.itemsize == 2
        if fused and scales is not None and more is not None:
            given = x, up, up_bias, down, down_bias, residual
            return fp8.feed_forward(given, dtype, scales, more)
        hidden = gelu(linear(x, up, up_bias), approximate=approximate)
        return linear(hidden, down, down_bias, residual=residual)
    if mode.autocast is not None:
        x, up, down = cast_operands(x, up, down)
    inputs = x, up, up_bias, down, down_bias, residual
    a, u, b, d, c, r = [data_of(tensor) for tensor in inputs]
    matrices_given = (a, u, d) if r is None else (a, u, d, r)
    kernel = product_kernel(*matrices_given)
    fused = _is_fused(matrices_given, (b, c), kernel) or _is_in_tiles(inputs)
    if approximate != "tanh" or not fused or not mode.grad_enabled or mode.forward is not None:
        hidden = linear_gelu(x, up, up_bias, approximate=approximate)
        return linear(hidden, down, down_bias, residual=residual)
    if is_numpy(a):
        h, kept = _activated_in_tiles(flat(a), u, b)
        is_derivative = True
    else:
        h, kept, is_derivative = _activated(flat(a), u, b, inputs, kernel, True)
    y = _affine(h, d, c, r, a.dtype, kernel).reshape(*a.shape[:-1], len(d))
    x_kept, of_norm = operand_to_save(x)
    saved = (x_kept, u, b, d, kept, h, is_derivative, kernel, *of_norm)
    return record("feed_forward", y, inputs, _feed_forward_backward, saved, takes_gradient=True)


def _feed_forward_backward(dy: Any, saved: Saved, needs: Needs) -> Gradients:
    x, up, _, down, kept, h, is_derivative, kernel, *_ = saved
    dy, dy_sums = parts_of(dy)
    rows = flat(dy)
    ddown = _weight_gradient(rows, h, needs[3], kernel)
    ddown_bias = _bias_gradient(dy, needs[4], dy_sums)
    dx = dup = dup_bias = None
    if any(needs[:3]):
        sums = None
        if is_numpy(kept):
            dpre = np.empty_like(kept)

            def times_derivative(*tile: slice) -> None:
                dpre[tile] *= kept[tile]

            in_tiles(dpre, rows, down, finish=times_derivative)
        elif is_derivative:
            dpre, sums = matmul_cuda.times_derivative(rows, down, kept)
        else:
            dpre = backend.empty_like(kept)
            matmul_cuda.run(problem(rows, down, dpre, gelu_of=kept), kernel)
        dx = product(dpre, up, dpre.dtype, kernel).reshape(x.shape) if needs[0] else None
        dup = _weight_gradient(dpre, x, needs[1], kernel)
        dup_bias = _bias_gradient(dpre, needs[2], sums)
    return dx, dup, dup_bias, ddown, ddown_bias, dy


@tangent_of(_feed_forward_backward)
def _feed_forward_tangent(op: Op, *tangents: Tensor | None) -> Tensor | None:
    x, up, up_bias, down, kept, h, is_derivative, kernel, *of_norm = op.saved
    inputs = _saved_inputs(op, (0, 1, 2), (x, up, up_bias))
    if is_derivative:  # 8 bits are too few to differentiate again
        before = linear(*inputs, kernel=kernel)
    else:
        before = _linear_result(kept, inputs, x, kernel, of_norm)
    t = _affine_tangent(inputs, tangents[:3], kernel, before.dtype)
    hidden = GELU_TANH.result(h.reshape(before.shape), before)
    thidden = GELU_TANH.tangent([t], [before], before.dtype)
    factors = hidden, op.input(3, down)
    return _affine_tangent(factors, (thidden, *tangents[3:]), kernel, op.node.dtype)


def gated_linear(
    x: Float[ArrayLike, "... C"],
    gate: Float[ArrayLike, "hidden C"],
    up: Float[ArrayLike, "hidden C"],
    gate_bias: Float[ArrayLike, "hidden"] | None = None,
    up_bias: Float[ArrayLike, "hidden"] | None = None,
    *,
    dropout: Probability = 0.0,
) -> Tensor:
    """Return y = dropout(swiglu(x G^T + b, x U^T + c)): a linear layer with a gate.

    Backward computes one gradient of x. Where gate and up lie side by side in memory, as in an
    optimizer's buffer, it is one matrix product on the GPU; otherwise the second product adds to
    the result of the first. Values and gradients have the bits of `dropout` after `gated_linear`
    without it. On the GPU dropout is part of the kernels of SwiGLU.

    Args:
        x: (..., C), any float dtype.
        gate: G, (hidden, C).
        up: U, (hidden, C).
        gate_bias: b, (hidden,) or None.
        up_bias: c, (hidden,) or None.
        dropout: probability with which an element is set to 0; the others grow by
            1 / (1 - dropout). Applied whenever it is above 0, with the random numbers of `dropout`.

    Returns:
        (..., hidden), in the dtype that x and the weights promote to.

    Raises:
        DtypeError: x, gate, up, gate_bias or up_bias does not hold floats.
        ShapeError: x is not (..., C), gate not (hidden, C), up not (hidden, C), gate_bias not
            (hidden,), up_bias not (hidden,).
        ArgumentError: dropout is not 0 <= dropout < 1.
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.gated_linear([1.0], gate=[[0.0], [100.0]], up=[[3.0], [0.5]]).tolist()
        [0.0, 50.0]
    """
    x, gate, up, gate_bias, up_bias = takes.gated_linear(x, gate, up, gate_bias, up_bias, dropout)
    if mode.autocast is not None:
        x, gate, up = cast_operands(x, gate, up)
    if mode.forward is not None and mode.grad_enabled:  # the tangent of each part by itself
        both = linear(x, gate, gate_bias), linear(x, up, up_bias)
        return swiglu_dropout(*both, dropout)
    inputs = x, gate, gate_bias, up, up_bias
    alone: list[Any] = [  # tensors of which nothing is recorded
        None if tensor is None else tensor.detach() for tensor in inputs
    ]
    x_alone, *gate_alone, up_alone, up_bias_alone = alone
    opened = linear(x_alone, *gate_alone)
    if not mode.grad_enabled:  # up times silu(gate) as the epilogue of one product
        added = data_of(up_bias)
        few = _skinny(flat(x.data), up.data, added, gate=flat(opened.data))
        if few is not None:
            y = few.reshape(opened.shape)
            return drop(record("gated_linear", y, inputs, _gated_linear_backward, ()), dropout)
    both = opened, linear(x_alone, up_alone, up_bias_alone)
    for half in both:
        half.requires_grad = True  # so that swiglu keeps what its backward needs
    y = swiglu_dropout(*both, dropout)
    arrays = x.data, gate.data, up.data
    kept, of_norm = operand_to_save(x)
    biases = data_of(gate_bias), data_of(up_bias)
    saved = (kept, *arrays[1:], *biases, y.node, product_kernel(*arrays), *of_norm)
    return record("gated_linear", y.data, inputs, _gated_linear_backward, saved)


def _gated_linear_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    x, gate, up, _, _, inner, kernel, *_ = saved
    if needs[1] or needs[3]:
        x = saved_operand(x)
    weights = _in_one(gate, up) if needs[0] and _is_fused((gate, up), (), kernel) else None
    dgate, dup, both = swiglu_gradients(inner, dy, weights is not None)
    dgate, dup, dx = flat(dgate), flat(dup), None
    if both is not None:
        dx = product(flat(both), weights, dy.dtype, kernel).reshape(x.shape)
    elif needs[0]:
        dx = _sum_of_products((dgate, gate), (dup, up), kernel).reshape(x.shape)
    return (
        dx,
        _weight_gradient(dgate, x, needs[1], kernel),
        _bias_gradient(dgate, needs[2]),
        _weight_gradient(dup, x, needs[3], kernel),
        _bias_gradient(dup, needs[4]),
    )


@tangent_of(_gated_linear_backward)
def _gated_linear_tangent(op: Op, tx: Tensor | None, *tangents: Tensor | None) -> Tensor | None:
    x, gate, up, gate_bias, up_bias, inner, kernel, *of_norm = op.saved
    halves, thalves = [], []
    for place, value, weight, bias in zip(
        (1, 3), swiglu_operands(inner), (gate, up), (gate_bias, up_bias), strict=True
    ):
        inputs = _saved_inputs(op, (0, place, place + 1), (x, weight, bias))
        halves.append(_linear_result(value, inputs, x, kernel, of_norm))
        given = tx, *tangents[place - 1 : place + 1]
        thalves.append(_affine_tangent(inputs, given, kernel, value.dtype))
    swiglu = Op(inner, inner.saved, halves)
    return tangent(swiglu, thalves, [(inner.shape, inner.dtype)])[0]


def _in_one(first: Array, second: Array) -> Array | None:
    """Return two matrices of one shape as one where the second follows the first in memory."""
    start, end = first.data, second.data
    follows = end.mem is start.mem and end.ptr == start.ptr + first.nbytes
    if not follows or not first.flags.c_contiguous or not second.flags.c_contiguous:
        return None
    return backend.cupy.ndarray((2 * len(first), first.shape[1]), first.dtype, start)


def _sum_of_products(
    first: tuple[Array, Array], second: tuple[Array, Array], kernel: str | None
) -> Array:
    """Return a b + c d; where kernels fuse, the second product adds the result of the first."""
    dtype = first[0].dtype
    y = product(*first, dtype, kernel)
    if not _is_fused((*first, *second), (), kernel):
        y += product(*second, dtype, kernel)
        return y
    total = backend.empty_like(y)
    matmul_cuda.run(problem(*second, total, residual=y), kernel)
    return total


_GELU_BACKWARD = Row("linear_gelu", "dy x", "dy * gelu_tanh_derivative(x)")


def _affine(
    rows: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    dtype: Dtype,
    kernel: str | None = None,
) -> Array:
    """Return x W^T + b + residual for the rows of x, rounded to `dtype` once."""
    rows_added = None if residual is None else flat(residual)
    few = _skinny(rows, weight, bias, dtype, rows_added) if kernel is None else None
    if few is not None:
        return few
    if _is_fused((rows, weight), (bias,), kernel) and dtype in (rows.dtype, float32):
        bias = None if bias is None else contiguous(bias)
        if dtype == rows.dtype or rows_added is None:
            y = backend.empty((len(rows), len(weight)), dtype, like=rows)
            rows_added = None if rows_added is None else contiguous(rows_added)
            p = problem(rows, weight.T, y, bias=bias, residual=rows_added)
        else:  # because of the residual
            y = converted(rows_added, dtype)
            p = problem(rows, weight.T, y, bias=bias, add=True)
        matmul_cuda.run(p, kernel)
        return y
    plain = bias is None and rows_added is None
    wide = compute_dtype(dtype)
    if plain or kernel is not None or not is_numpy(rows):
        y = product(rows, weight.T, dtype if plain else wide, kernel)
        if bias is not None:
            y += bias
        if rows_added is not None:
            y += rows_added
        return y.astype(dtype, copy=False)
    y = np.empty((len(rows), len(weight)), wide)

    def add(rows: slice, columns: slice) -> None:
        tile = y[rows, columns]
        if bias is not None:
            tile += bias[columns]
        if rows_added is not None:
            tile += rows_added[rows, columns]

    in_tiles(y, upcast(rows), upcast(weight).T, finish=add)
    return y.astype(dtype, copy=False)


def _skinny(
    rows: Array,
    weight: Array,
    bias: Array | None,
    dtype: Dtype | None = None,
    residual: Array | None = None,
    **epilogue: Any,
) -> Array | None:
    """Return f(x W^T + b) + residual, (rows, out), by a skinny GEMM.

    None on the CPU, where the kernel does not do this, and where gradients are recorded: training
    keeps the kernels of any number of rows.

    Args:
        rows, weight, bias, residual: as of `linear`, x as a matrix.
        dtype: of the result; default: of x.
        epilogue: of the problem, see `MatmulProblem`.
    """
    dtype = rows.dtype if dtype is None else dtype
    if mode.grad_enabled or is_numpy(rows) or len(rows) > matmul_cuda.SKINNY_ROWS:
        return None
    if rows.dtype != weight.dtype or dtype not in (rows.dtype, float32):
        return None
    y = backend.empty((len(rows), len(weight)), dtype, like=rows)
    bias, residual = (None if array is None else contiguous(array) for array in (bias, residual))
    p = problem(contiguous(rows), weight.T, y, bias=bias, residual=residual, **epilogue)
    return y if matmul_cuda.run_skinny(p) else None


def _result_dtype(dtype: DtypeLike | None, common: Dtype) -> Dtype:
    """Return the dtype of the result of `linear`, `common` where none was given."""
    if dtype is None:
        return common
    found = as_dtype(dtype)
    if not is_float(found):
        raise DtypeError(f"linear: dtype is {found}, expected a float")
    return found


def _activated(
    rows: Array,
    weight: Array,
    bias: Array | None,
    tensors: Sequence[Tensor | None],
    kernel: str | None,
    derivative: bool,
) -> tuple[Array, Array | None, bool]:
    """Return gelu(x W^T + b) and, if any of the tensors needs a gradient, what backward needs.

    That is x W^T + b or, with `derivative` and where the kernel can, the derivative of GELU there
    in 8 bits; and whether it is.
    """
    y = backend.empty((len(rows), len(weight)), rows.dtype, like=rows)
    p = problem(rows, weight.T, y, bias=None if bias is None else contiguous(bias), gelu=True)
    kept, is_derivative = None, False
    if mode.grad_enabled and any(t is not None and t.requires_grad for t in tensors):
        kept = matmul_cuda.derivative_for(p) if derivative else None
        is_derivative = kept is not None
        if is_derivative:
            p = p._replace(derivative=kept)
        else:
            kept = backend.empty_like(y)
            p = p._replace(before_gelu=kept)
    matmul_cuda.run(p, kernel)
    return y, kept, is_derivative


def _is_in_tiles(inputs: Sequence[Tensor | None]) -> bool:
    """Whether GELU and its derivative are computed with each tile of a product on the CPU.

    That is where a gradient is wanted, and nothing has to be rounded.
    """
    given = [tensor for tensor in inputs if tensor is not None]
    dtype = given[0].data.dtype
    return (
        is_numpy(given[0].data)
        and compute_dtype(dtype) is dtype
        and all([tensor.data.dtype is dtype for tensor in given])
        and any([tensor.requires_grad for tensor in given])
    )


def _activated_in_tiles(rows: Array, weight: Array, bias: Array | None) -> tuple[Array, Array]:
    """Return gelu(x W^T + b) on the CPU and the derivative of GELU there."""
    y = np.empty((len(rows), len(weight)), rows.dtype)
    derivative = np.empty_like(y)

    def activate(rows: slice, columns: slice) -> None:
        tile, kept = y[rows, columns], derivative[rows, columns]
        if bias is not None:
            tile += bias[columns]
        block = max(1, backend.BLOCK // (2 * max(1, tile.shape[1])))
        for start in range(0, len(tile), block):
            part = slice(start, start + block)
            tile[part], kept[part] = gelu_tanh_with_derivative(tile[part])

    in_tiles(y, rows, weight.T, finish=activate)
    return y, derivative


def _is_fused(arrays: Sequence[Array], biases: Sequence[Array | None], kernel: str | None) -> bool:
    """Whether kernels fuse the epilogue: on the GPU, not empty, of 16 bits or in TF32."""
    dtype = arrays[0].dtype
    if is_numpy(arrays[0]) or (dtype.itemsize != 2 and kernel != matmul_cuda.TF32):
        return False
    for array in arrays:
        if array.dtype != dtype or not array.size:
            return False
    return all([bias is None or bias.dtype in (dtype, float32) for bias in biases])


def _weight_gradient(
    dy: Array, x: Array | Recompute, need: Any, kernel: str | None = None
) -> Array | None:
    """Return dy^T x where it is needed; None once the product has added it to the gradient.

    Args:
        dy: (N, out).
        x: (..., in), N rows in all; as saved.
        need: of the weight.
        kernel: as for `matmul`.
    """
    if not need:
        return None
    x = flat(saved_operand(x))
    dtype = compute_dtype(dy.dtype)
    if is_numpy(x):
        if isinstance(need, Gradient) and need.array.dtype is dy.dtype is x.dtype is dtype:
            need.add_by(lambda total, beta: in_tiles(total, dy.T, x, beta == 1))
            return None
        return accumulated(product(dy.T, x, dtype, kernel), need)
    fits = dtype is float32 and dy.dtype is x.dtype
    if fits and isinstance(need, Gradient) and need.array.dtype is dy.dtype:
        dtype = dy.dtype  # the gradient so far has 16 bits
    target = out_of(need, dtype) if fits else None
    if target is None or (target[1] and dtype is not float32):
        return accumulated(product(dy.T, x, dtype, kernel), need)
    matmul_cuda.run(problem(dy.T, x, target[0], add=target[1] == 1), kernel)
    return None


def _bias_gradient(dy: Array, need: Any, parts: Array | None = None) -> Array | None:
    """Return the sum of the rows of dy where it is needed; None once it is added.

    Args:
        dy: (..., C).
        need: of the bias.
        parts: (N, C), sums of some rows each, if there are any.
    """
    if not need:
        return None
    if parts is not None:
        return column_sums([parts], [need])[0]
    wide = compute_dtype(dy.dtype)
    target = out_of(need, wide) if dy.size else None
    if target is None:
        return accumulated(sum_array(flat(dy), (0,), dtype=wide), need)
    total, beta = target
    sum_rows_into(total, flat(dy), beta)
    return None
