"""Products in 8 bits: the scales of tensors, and the linear layer. Tests: tests/ops/test_fp8.py.

Activations and weights are rounded to e4m3, gradients of outputs to e5m2, each tensor times a scale
of its own: the power of two that brings its largest element within the format. Sums are float32.

    y = q(x) q(W)^T + b,  dx = q(dy) q(W),  dW = q(dy)^T q(x)

A product on Hopper takes the terms of a sum side by side, so a tensor is written as it is and
transposed, in one pass; backward keeps the transposed x, of one byte an element. The gradient is
that of a product of the rounded operands: rounding itself counts as the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from tensorgrad.amp import FP8
from tensorgrad.core import backend
from tensorgrad.core.backend import Array, contiguous, is_numpy, upcast
from tensorgrad.core.dtypes import Dtype, bfloat16, float16, float32
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.gradient import (
    Gradient,
    Gradients,
    Needs,
    Saved,
    accumulated,
    out_of,
    parts_of,
)
from tensorgrad.core.modes import mode
from tensorgrad.core.operands import data_of
from tensorgrad.core.record import record
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels import fp8 as fp8_cuda
from tensorgrad.kernels.fp8 import MULTIPLE, Fp8Operand, float8_e4m3, float8_e5m2
from tensorgrad.kernels.matmul import fp8 as matmul_fp8
from tensorgrad.kernels.matmul.sm90 import derivative_values
from tensorgrad.ops.column_sums import column_sums
from tensorgrad.ops.elementwise.activation import GELU_TANH
from tensorgrad.ops.elementwise.row import Row
from tensorgrad.ops.matmul import flat

INVERSE, SCALE, PEAK, CLIPPED = 0, 1, 2, 3  # a tensor's state, as in kernels/fp8.cuh
LIMITS = {float8_e4m3: 448.0, float8_e5m2: 57344.0}  # the largest numbers
_LEAST, _MOST = -126, 126  # exponents of scales
_SOURCES = (bfloat16, float16, float32)


_GELU_BACKWARD = Row("linear_gelu", "dy x", "dy * gelu_tanh_derivative(x)")


class LinearScales(NamedTuple):
    """The scales of one linear layer, each (4,) float32: inverse, scale, peak, clipped.

    The peak is the largest magnitude since the scale was chosen, and clipped the number of elements
    that were beyond the format; these two are uint32 bits, the peak's those of a float32.

    Attributes:
        x, weight, dy: of e4m3, e4m3 and e5m2.
        measures: whether a scale is chosen from the tensor itself, which costs a pass over it, not
            from what earlier steps reported.
        reports: whether peaks and clipped elements are counted.
        operands: the weight in 8 bits and its transpose, if they are written already.
    """

    x: Array
    weight: Array
    dy: Array
    measures: bool = True
    reports: bool = True
    operands: tuple[Fp8Operand, Fp8Operand] | None = None


def new_scales(like: Array) -> LinearScales:
    """Return scales for one call, chosen from the tensors themselves."""
    states = backend.namespace(like).zeros((3, 4), float32)
    states[:, :PEAK] = 1
    return LinearScales(states[0], states[1], states[2])


def scales_of(op: str, x: Tensor, weight: Tensor, kernel: str | None = None) -> LinearScales | None:
    """Return the scales of x W^T where it is computed in 8 bits, or None.

    It is where `kernel` asks for it, or the enclosing `autocast` and the lengths allow it.

    Raises:
        ArgumentError: the GPU has no products in 8 bits, or `kernel` asks for what they cannot do.
    """
    casts = mode.autocast
    asked = isinstance(kernel, str) and kernel == FP8
    if not asked and (kernel is not None or casts is None or casts.precision != FP8):
        return None
    array, w = x.data, weight.data
    needs = None if fits(array, w) else "16-bit or float32 operands, lengths of multiples of 16"
    if needs is not None and not asked:
        return None
    if needs is None and not is_numpy(array):
        needs = fp8_cuda.refusal(array.device.id)
    if needs is not None:
        raise ArgumentError(f"{op}: kernel is {FP8!r}, which needs {needs}")
    if asked or casts.scales is None:
        return new_scales(array)
    found: LinearScales | None = casts.scales.of(weight, casts)
    return found


def result_dtype(x: Tensor, weight: Tensor, residual: Tensor | None) -> Dtype:
    """Return the dtype of x W^T + residual, of the operands as `autocast` would cast them."""
    casts, arrays = mode.autocast, [x.data, weight.data]
    dtypes = [array.dtype if casts is None else casts.dtype for array in arrays]
    if residual is not None:
        dtypes.append(residual.dtype)
    return dtypes[0] if len(set(dtypes)) == 1 else np.result_type(*dtypes)


def fits(x: Array, weight: Array) -> bool:
    """Whether a product x W^T can be computed in 8 bits: lengths of multiples of 16."""
    rows = x.size // max(1, x.shape[-1])
    lengths = rows, *weight.shape
    return all([n > 0 and n % MULTIPLE == 0 for n in lengths]) and x.dtype in _SOURCES


def quantize(
    x: Array,
    dtype: Dtype,
    scale: Array,
    *,
    measures: bool = False,
    rows: bool = True,
    columns: bool = True,
    sums: bool = False,
    reports: bool = True,
    gelu: bool = False,
    gelu_of: Array | None = None,
) -> tuple[Any, Any, Any]:
    """Return x and its transpose as operands, and sums over its rows in parts, (parts, C) float32.

    With `gelu` gelu(x) takes the place of x, with `gelu_of` x times the derivative of GELU there.

    Args:
        x: (N, C), multiples of 16, bfloat16, float16 or float32.
        dtype: float8_e4m3 or float8_e5m2.
        scale: (4,), of the tensor; see LinearScales.
        measures: choose the scale first.
        rows, columns, sums: which results are wanted; the others are None.
        reports: whether the peak and the clipped elements are counted.
        gelu: of 16 bits; its tanh form.
        gelu_of: like x, of 16 bits.
    """
    x = contiguous(x)
    wanted = {"rows": rows, "columns": columns, "sums": sums, "reports": reports}
    if is_numpy(x):
        x = _after_gelu(x, gelu, gelu_of)
        if measures:
            measure(x, dtype, scale)
        return _quantize_numpy(x, dtype, scale, **wanted)
    if x.data.ptr % 16:
        x = x.copy()
    if measures:
        measure(_after_gelu(x, gelu, gelu_of), dtype, scale)
    return fp8_cuda.quantize(x, dtype, scale, **wanted, gelu=gelu, gelu_of=gelu_of)


def _after_gelu(x: Array, gelu: bool, gelu_of: Array | None) -> Array:
    """Return gelu(x), or x times the derivative of GELU; or x."""
    if gelu:
        y: Array = GELU_TANH(x).data
        return y
    return x if gelu_of is None else _GELU_BACKWARD(x, gelu_of).data


def measure(x: Array, dtype: Dtype, scale: Array) -> None:
    """Choose the scale of a tensor from its largest element."""
    if is_numpy(x):
        _report_numpy(upcast(x), scale)
    else:
        fp8_cuda.largest(x, scale)
    xp = backend.namespace(x)
    history, turn = xp.zeros((1, 1), float32), xp.zeros(1, np.int32)
    limits = xp.full(1, LIMITS[dtype], float32)
    update_scales(scale.reshape(1, 4), history, turn, limits)


def update_scales(scales: Array, history: Array, turn: Array, limits: Array) -> None:
    """Choose the scales of the next step from the peaks of the last ones; count anew.

    scale = 2^floor(log2(limit / peak)), of the largest peak in the history. A peak that is not
    finite does not count; a tensor that was always 0 keeps its scale.

    Args:
        scales: (n, 4), float32; see LinearScales.
        history: (steps, n), float32, the peaks of the last steps; at first zeros.
        turn: (1,), int32, how many updates there were.
        limits: (n,), float32, the largest number of each format.
    """
    if not is_numpy(scales):
        fp8_cuda.update_scales(scales, history, turn, limits)
        return
    peaks = scales[:, PEAK].copy()
    row = history[turn[0] % len(history)]
    row[:] = np.where(np.isfinite(peaks), peaks, row)
    top = history.max(0)
    seen = top > 0
    with np.errstate(over="ignore"):
        ratio = np.minimum(limits[seen] / top[seen], np.finfo(np.float32).max)
    _, exponent = np.frexp(ratio)
    exponent = np.clip(exponent - 1, _LEAST, _MOST)
    scales[seen, SCALE] = np.ldexp(np.float32(1), exponent)
    scales[seen, INVERSE] = np.ldexp(np.float32(1), -exponent)
    scales[:, PEAK] = 0
    turn += 1


def product(
    a: Fp8Operand,
    b: Fp8Operand,
    dtype: Dtype,
    bias: Array | None = None,
    residual: Array | None = None,
    *,
    fast: bool = True,
) -> Array:
    """Return a b^T + bias + residual, (M, N), rounded to `dtype` once.

    Args:
        a, b: (M, K) and (N, K).
        dtype: of 16 bits, or float32.
        bias: (N,), any float dtype; it is rounded to bfloat16 or float16 where the result is.
        residual: (M, N).
        fast: on the GPU, sum up with 14 bits, which is enough for results of 16; see
            `kernels.matmul.fp8`.
    """
    if is_numpy(a.bits):
        y = _values(a) @ _values(b).T
        if bias is not None:
            y += bias.astype(dtype, copy=False)
        if residual is not None:
            y = y + residual
        return y.astype(dtype, copy=False)
    y = backend.empty((len(a.bits), len(b.bits)), dtype, like=a.bits)
    fused: dict[str, Array] = {}
    if residual is not None and residual.dtype == dtype:
        fused["residual"], residual = contiguous(residual), None
    if bias is not None and dtype != float32:
        fused["bias"], bias = contiguous(bias.astype(dtype, copy=False)), None
    matmul_fp8.multiply(y, a, b, fast=fast, **fused)
    for added in (bias, residual):
        if added is not None:
            y += added
    return y


def product_into(y: Array, a: Any, b: Any, add: bool = False, *, fast: bool = True) -> None:
    """Write a b^T to y, or add it; a (M, K) and b (N, K) are operands."""
    if not is_numpy(y):
        matmul_fp8.multiply(y, a, b, add=add, fast=fast)
    elif add:
        y += _values(a) @ _values(b).T
    else:
        y[...] = _values(a) @ _values(b).T


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: Dtype,
    scales: LinearScales,
) -> Tensor:
    """Return x W^T + b + residual in 8 bits; `linear` has checked the operands."""
    wanted = [mode.grad_enabled and t is not None and t.requires_grad for t in (x, weight)]
    a, a_transposed, _ = quantize(
        flat(x.data), float8_e4m3, scales.x, measures=scales.measures, columns=wanted[1],
        reports=scales.reports,
    )  # fmt: skip
    w, w_transposed = _rounded_weight(weight.data, scales)
    added = None if residual is None else flat(residual.data)
    y = product(a, w, dtype, data_of(bias), added).reshape(*x.shape[:-1], len(weight.data))
    saved = (*_kept(a_transposed), *_kept(w_transposed), scales, x.shape)
    inputs = (x, weight, bias, residual)
    return record("linear", y, inputs, _linear_backward, saved, takes_gradient=True)


class Head:
    """The products of a head in 8 bits, a chunk of the rows at a time.

    Args:
        x: all rows, (N, C).
        weight: W, (V, C).
        scales: of x, W and the gradient of the logits.
    """

    def __init__(self, x: Array, weight: Array, scales: LinearScales) -> None:
        if scales.measures:
            measure(x, float8_e4m3, scales.x)
        self._scales = scales
        self._weight, self._transposed = _rounded_weight(weight, scales)
        self._x: Any = None  # the rows of the chunk, transposed

    def logits(self, x: Array, dtype: Dtype) -> Array:
        """Return x W^T for the rows of a chunk."""
        rows, self._x, _ = quantize(x, float8_e4m3, self._scales.x, reports=self._scales.reports)
        return product(rows, self._weight, dtype)

    def gradients(self, dlogits: Array, dx: Array | None, dweight: Array | None, add: bool) -> None:
        """Write dlogits W, and dlogits^T x or its sum with that of the chunks before.

        Args:
            dlogits: of the chunk, (rows, V).
            dx: (rows, C), or None.
            dweight: (V, C), or None.
            add: whether there were chunks before.
        """
        if dx is None and dweight is None:
            return
        q, transposed, _ = quantize(
            dlogits, float8_e5m2, self._scales.dy, measures=self._scales.measures,
            columns=dweight is not None, reports=self._scales.reports,
        )  # fmt: skip
        if dx is not None:
            product_into(dx, q, self._transposed)
        if dweight is not None:
            product_into(dweight, transposed, self._x, add, fast=False)


def _rounded_weight(weight: Array, scales: LinearScales) -> tuple[Fp8Operand, Fp8Operand]:
    """Return a weight in 8 bits, and transposed."""
    if scales.operands is not None:
        return scales.operands
    w, transposed, _ = quantize(weight, float8_e4m3, scales.weight, measures=scales.measures)
    return w, transposed


def _kept(operand: Fp8Operand | None) -> tuple[Array | None, Array | None]:
    """Return the arrays of an operand of e4m3, as they are saved."""
    return (None, None) if operand is None else (operand.bits, operand.scale)


def _operands(saved: Sequence[Any]) -> list[Fp8Operand]:
    """Return operands that are saved so."""
    return [Fp8Operand(saved[i], float8_e4m3, saved[i + 1]) for i in range(0, len(saved), 2)]


def _linear_backward(dy: Any, saved: Saved, needs: Needs) -> Gradients:
    (x, w), (scales, shape) = _operands(saved[:4]), saved[4:]
    dy, sums = parts_of(dy)
    adds_up = bool(needs[2]) and sums is None
    dx = dweight = dbias = None
    if needs[0] or needs[1] or adds_up:
        q, transposed, parts = quantize(
            flat(dy), float8_e5m2, scales.dy, measures=scales.measures,
            rows=bool(needs[0]) or adds_up, columns=bool(needs[1]), sums=adds_up,
            reports=scales.reports,
        )  # fmt: skip
        dx, dweight = _products(q, transposed, x, w, dy.dtype, needs)
        sums = parts if sums is None else sums
    if needs[2]:
        dbias = _bias_gradient(sums, needs[2])
    return None if dx is None else dx.reshape(shape), dweight, dbias, dy


def _products(
    dy: Fp8Operand | None,
    transposed: Fp8Operand | None,
    x: Fp8Operand,
    weight: Fp8Operand,
    dtype: Dtype,
    needs: Needs,
) -> tuple[Array | None, Array | None]:
    """Return dy W in a dtype and dy^T x, of operands that are transposed where they must be."""
    dx = product(dy, weight, dtype) if needs[0] and dy is not None else None
    if transposed is None:
        return dx, None
    return dx, _weight_gradient(transposed, x, needs[1])


def feed_forward(
    inputs: Sequence[Any], dtype: Dtype, up: LinearScales, down: LinearScales
) -> Tensor:
    """Return gelu(x U^T + b) D^T + c + residual in 8 bits; GELU is its tanh form.

    The hidden layer is rounded from sums of 16 bits, and never written in more than 8.

    Args:
        inputs: x, U, b, D, c and the residual, as of `ops.linear.feed_forward`.
        dtype: of the result and of the sums before GELU, of 16 bits.
        up, down: the scales of both layers.
    """
    x, u, up_bias, d, down_bias, residual = inputs
    options = {"measures": up.measures, "reports": up.reports, "columns": mode.grad_enabled}
    a, a_transposed, _ = quantize(flat(x.data), float8_e4m3, up.x, **options)
    u, u_transposed = _rounded_weight(u.data, up)
    h, h_transposed, before = _hidden(a, u, data_of(up_bias), dtype, down)
    d, d_transposed = _rounded_weight(d.data, down)
    added = None if residual is None else flat(residual.data)
    y = product(h, d, dtype, data_of(down_bias), added).reshape(*x.shape[:-1], len(d.bits))
    kept = map(_kept, (a_transposed, u_transposed, h_transposed, d_transposed))
    saved = (*chain.from_iterable(kept), before, up, down, x.shape)
    return record("feed_forward", y, inputs, _feed_forward_backward, saved, takes_gradient=True)


def _feed_forward_backward(dy: Any, saved: Saved, needs: Needs) -> Gradients:
    (x, u, hidden, d), (before, up, down, shape) = _operands(saved[:8]), saved[8:]
    dy, sums = parts_of(dy)
    adds_up = bool(needs[4]) and sums is None
    options = {"measures": down.measures, "reports": down.reports}
    q, transposed, parts = quantize(
        flat(dy), float8_e5m2, down.dy, columns=bool(needs[3]), sums=adds_up, **options
    )
    _, ddown = _products(None, transposed, hidden, d, dy.dtype, (False, needs[3]))
    ddown_bias = _bias_gradient(parts if sums is None else sums, needs[4]) if needs[4] else None
    dx = dup = dup_bias = None
    if any(needs[:3]):
        q, transposed, parts = _hidden_backward(q, d, before, dy.dtype, up)
        dx, dup = _products(q, transposed, x, u, dy.dtype, needs[:2])
        dx = None if dx is None else dx.reshape(shape)
        dup_bias = _bias_gradient(parts, needs[2]) if needs[2] else None
    return dx, dup, dup_bias, ddown, ddown_bias, dy


def _hidden(
    x: Fp8Operand, up: Fp8Operand, bias: Array | None, dtype: Dtype, scales: LinearScales
) -> tuple[Fp8Operand, Fp8Operand, Array]:
    """Return gelu(x U^T + b) in 8 bits, its transpose, and what the derivative of GELU is got from.

    That is x U^T + b in a dtype of 16 bits or, where a kernel rounds its product to 8 bits itself,
    the derivative.

    Args:
        x, up, bias: x (N, C), U (hidden, C) and b (hidden,).
        dtype: of the sums.
        scales: of the layer that takes the result.
    """
    if is_numpy(x.bits) or dtype != bfloat16:
        sums = product(x, up, dtype, bias)
        rows, transposed, _ = quantize(
            sums, float8_e4m3, scales.x, gelu=True, measures=scales.measures,
            reports=scales.reports,
        )  # fmt: skip
        return rows, transposed, sums
    if scales.measures:
        measure(_after_gelu(product(x, up, dtype, bias), True, None), float8_e4m3, scales.x)
    return matmul_fp8.rounded_gelu(x, up, bias, scales.x, scales.reports)


def _hidden_backward(
    dy: Fp8Operand, down: Fp8Operand, kept: Array, dtype: Dtype, scales: LinearScales
) -> tuple[Fp8Operand, Fp8Operand, Array]:
    """Return dy D times the derivative of GELU in 8 bits, its transpose and its column sums.

    Args:
        dy, down: dy (N, out) and the transpose of D, (hidden, out).
        kept: what `_hidden` has returned.
        dtype: of dy D.
        scales: of the layer before GELU.
    """
    if kept.dtype == dtype:
        dhidden = product(dy, down, dtype)
        return quantize(
            dhidden, float8_e5m2, scales.dy, gelu_of=kept, sums=True, measures=scales.measures,
            reports=scales.reports,
        )  # fmt: skip
    if scales.measures:
        dhidden = product(dy, down, float32)
        measure(dhidden * derivative_values(kept, *dhidden.shape), float8_e5m2, scales.dy)
    return matmul_fp8.rounded_scaled(dy, down, kept, scales.dy, scales.reports)


def _bias_gradient(sums: Any, need: Any) -> Array | None:
    """Return the sum of rows of sums; None once it is added to the gradient."""
    if is_numpy(sums):
        return accumulated(sums.sum(0), need)
    return column_sums([sums], [need])[0]


def _weight_gradient(dy: Fp8Operand, x: Fp8Operand, need: Any) -> Array | None:
    """Return dy^T x in float32; None once the product has added it to the gradient.

    Args:
        dy: transposed, (out, N).
        x: transposed, (C, N).
        need: of the weight.
    """
    dtype = float32
    if isinstance(need, Gradient) and need.array.dtype == bfloat16:
        dtype = bfloat16
    target = out_of(need, dtype)
    if target is None or (target[1] and dtype is not float32):
        return accumulated(product(dy, x, dtype, fast=False), need)
    product_into(target[0], dy, x, target[1] == 1, fast=False)
    return None


def _values(operand: Fp8Operand) -> Array:
    """Return the values of an operand on the CPU, float32."""
    return operand.bits.view(operand.dtype).astype(float32) * operand.scale[INVERSE]


def _quantize_numpy(
    x: Array, dtype: Dtype, scale: Array, *, rows: bool, columns: bool, sums: bool, reports: bool
) -> tuple[Fp8Operand | None, Fp8Operand | None, Array | None]:
    wide, limit = upcast(x), LIMITS[dtype]
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = wide * scale[SCALE]
        q = np.clip(scaled, -limit, limit).astype(dtype).view(np.uint8)
    if reports:
        _report_numpy(wide, scale)
        scale[CLIPPED:].view(np.uint32)[...] += np.uint32((abs(scaled) > limit).sum())
    return (
        Fp8Operand(q, dtype, scale) if rows else None,
        Fp8Operand(contiguous(q.T), dtype, scale) if columns else None,
        wide.sum(0, keepdims=True) if sums else None,
    )


def _report_numpy(x: Array, scale: Array) -> None:
    """Add the largest |x| to the peak; NaN is above infinity, as bits are."""
    bits = abs(x).view(np.uint32).max() if x.size else 0
    peak = scale[PEAK:CLIPPED].view(np.uint32)
    peak[...] = max(int(peak[0]), int(bits))
