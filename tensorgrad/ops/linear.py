"""Linear layers: a matrix product and what follows it. Tests: tests/ops/test_linear.py.

On the GPU the kernel that has the sums of a product in registers adds bias and residual there, and
takes GELU of them. A weight's gradient is added to a float32 gradient by the product itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensorgrad import backend
from tensorgrad.amp import cast_operands
from tensorgrad.arrays import converted, sum_array
from tensorgrad.autograd import no_grad, record
from tensorgrad.backend import Array, contiguous, is_numpy, same_device
from tensorgrad.checks import promoted
from tensorgrad.dtypes import Dtype, compute_dtype, float32
from tensorgrad.engine import mode
from tensorgrad.errors import ShapeError
from tensorgrad.kernels import matmul as matmul_cuda
from tensorgrad.kernels.matmul.problem import problem
from tensorgrad.kernels.reduce import add_sum_of_rows
from tensorgrad.operands import float_operand, tensor_of
from tensorgrad.ops.elementwise.activation import gelu, swiglu
from tensorgrad.ops.elementwise.row import Row
from tensorgrad.ops.matmul import flat, product
from tensorgrad.partial import Late
from tensorgrad.tensor import Tensor

__all__ = [
    "feed_forward",
    "gated_linear",
    "linear",
    "linear_gelu",
]


def linear(
    x: Any, weight: Any, bias: Any = None, kernel: str | None = None, residual: Any = None
) -> Tensor:
    """Return y = x W^T + b + residual as one matrix product over all rows of x.

    Args:
        x: (..., in), any float dtype.
        weight: (out, in).
        bias: (out,) or None; added before the result is rounded.
        kernel: as for `matmul`.
        residual: (..., out) or None; added before the result is rounded.

    Returns:
        (..., out), in the dtype that x, weight and residual promote to.

    Raises:
        ShapeError: weight is not (out, in), bias not (out,) or residual not (..., out).
        DtypeError: an operand holds no floats.
        ArgumentError: there is no such kernel here, or it does not do this product.
    """
    inputs = _operands("linear", x, weight, bias, residual)
    a, w = inputs["x"].data, inputs["weight"].data
    dtype = promoted("linear", ("x", "weight"), (a, w))
    beside = inputs["residual"].data if residual is not None else None
    if beside is not None and beside.dtype is not dtype:
        dtype = promoted("linear", ("x", "weight", "residual"), (a, w, beside))
    added = inputs["bias"].data if bias is not None else None
    y = _affine(flat(a), w, added, beside, dtype, kernel)
    y = y.reshape(*a.shape[:-1], w.shape[0])
    saved = (a, w, kernel, bias is not None)
    return record("linear", y, tuple(inputs.values()), _linear_backward, saved)


def _linear_backward(
    dy: Array, saved: tuple[Any, ...], needs: Sequence[bool]
) -> list[Array | None]:
    x, weight, kernel, biased = saved
    rows = flat(dy)
    dtype = promoted("linear", ("dy", "weight"), (rows, weight))
    found = [
        product(rows, weight, dtype, kernel).reshape(x.shape) if needs[0] else None,
        _weight_gradient(rows, flat(x), kernel) if needs[1] else None,
    ]
    if biased:
        found.append(_bias_gradient(rows) if needs[2] else None)
    return found if len(found) == len(needs) else [*found, dy]


def linear_gelu(x: Any, weight: Any, bias: Any = None, approximate: str = "tanh") -> Tensor:
    """Return y = gelu(x W^T + b).

    Args:
        x: (..., in), any float dtype.
        weight: (out, in).
        bias: (out,) or None.
        approximate: as for `gelu`.

    Returns:
        (..., out), in the dtype that x and weight promote to.

    Raises:
        ShapeError: weight is not (out, in) or bias not (out,).
        DtypeError: an operand holds no floats.
        ArgumentError: another name for `approximate`.
    """
    inputs = _operands("linear_gelu", x, weight, bias)
    tensors = tuple(inputs.values())
    a, w = tensors[0].data, tensors[1].data
    if approximate != "tanh" or not _is_fused((a, w), [t.data for t in tensors[2:]]):
        return gelu(linear(x, weight, bias), approximate)
    y, pre = _activated(flat(a), w, tensors[2].data if bias is not None else None, tensors)
    y = y.reshape(*a.shape[:-1], len(w))
    return record("linear_gelu", y, tensors, _linear_gelu_backward, (a, w, pre))


def _linear_gelu_backward(
    dy: Array, saved: tuple[Any, ...], needs: Sequence[bool]
) -> list[Array | None]:
    x, weight, pre = saved
    dpre = _SLOPED(flat(dy), pre).data
    return _linear_backward(dpre, (x, weight, None, len(needs) == 3), needs)


def feed_forward(
    x: Any,
    up: Any,
    up_bias: Any,
    down: Any,
    down_bias: Any,
    residual: Any = None,
    approximate: str = "tanh",
) -> Tensor:
    """Return y = gelu(x U^T + b) D^T + c + residual: two linear layers and what is around them.

    Args:
        x: (..., in), any float dtype.
        up: U, (hidden, in).
        up_bias: b, (hidden,) or None.
        down: D, (out, hidden).
        down_bias: c, (out,) or None.
        residual: (..., out) or None.
        approximate: as for `gelu`.

    Returns:
        (..., out), in the dtype that x, the weights and the residual promote to.

    Raises:
        ShapeError, DtypeError, ArgumentError: as `linear_gelu` and `linear`, which it names.
    """
    named = {"x": x, "up": up, "down": down, "up_bias": up_bias, "down_bias": down_bias,
             "residual": residual}  # fmt: skip
    inputs, (x, up, down) = _tensors("feed_forward", named, ("x", "up", "down"))
    biases = [inputs[name].data for name in ("up_bias", "down_bias") if name in inputs]
    shapes = [inputs[name].shape if name in inputs else None for name in named]
    arrays = [x.data, up.data, down.data]
    if residual is not None:
        arrays.append(inputs["residual"].data)
    if approximate != "tanh" or not _is_fused(arrays, biases) or not _fit(*shapes):
        hidden = linear_gelu(x, up, inputs.get("up_bias"), approximate)
        return linear(hidden, down, inputs.get("down_bias"), residual=inputs.get("residual"))
    tensors = tuple(inputs.values())
    h, pre = _activated(flat(x.data), up.data, biases[0] if "up_bias" in inputs else None, tensors)
    y = _affine(h, down.data, biases[-1] if "down_bias" in inputs else None,
                arrays[3] if residual is not None else None, x.dtype)  # fmt: skip
    y = y.reshape(*x.shape[:-1], len(down.data))
    saved = (x.data, up.data, down.data, pre, h, tuple(inputs))
    return record("feed_forward", y, tensors, _feed_forward_backward, saved)


def _feed_forward_backward(
    dy: Array, saved: tuple[Any, ...], needs: Sequence[bool]
) -> list[Array | None]:
    x, up, down, pre, h, names = saved
    wanted = {name for name, need in zip(names, needs, strict=True) if need}
    rows = flat(dy)
    found: dict[str, Any] = {"residual": dy}
    if "down" in wanted:
        found["down"] = _weight_gradient(rows, h)
    if "down_bias" in wanted:
        found["down_bias"] = _bias_gradient(rows)
    if wanted & {"x", "up", "up_bias"}:
        dpre = backend.empty(pre.shape, pre.dtype, like=pre)
        matmul_cuda.run(problem(rows, down, dpre, gelu_of=pre))
        if "x" in wanted:
            found["x"] = product(dpre, up, dpre.dtype).reshape(x.shape)
        if "up" in wanted:
            found["up"] = _weight_gradient(dpre, flat(x))
        if "up_bias" in wanted:
            found["up_bias"] = _bias_gradient(dpre)
    return [found[name] if name in wanted else None for name in names]


def gated_linear(x: Any, gate: Any, up: Any, gate_bias: Any = None, up_bias: Any = None) -> Tensor:
    """Return y = swiglu(x G^T + b, x U^T + c): two linear layers, the first the second one's gate.

    Backward makes one gradient of x: the second product adds to the result of the first.

    Args:
        x: (..., in), any float dtype.
        gate: G, (hidden, in).
        up: U, (hidden, in).
        gate_bias: b, (hidden,) or None.
        up_bias: c, (hidden,) or None.

    Returns:
        (..., hidden), in the dtype that x and the weights promote to.

    Raises:
        ShapeError: gate and up differ in shape, or do not fit x or their biases.
        DtypeError, DeviceError: as `linear`, which it names.
    """
    named = {"x": x, "gate": gate, "up": up, "gate_bias": gate_bias, "up_bias": up_bias}
    inputs, (x, gate, up) = _tensors("gated_linear", named, ("x", "gate", "up"))
    if gate.shape != up.shape:
        raise ShapeError(
            f"gated_linear: up has shape {up.shape}, expected {gate.shape} as gate has"
        )
    with no_grad():
        both = linear(x, gate, gate_bias), linear(x, up, up_bias)
    for each in both:
        each.requires_grad = True  # so that swiglu keeps what its backward needs
    y = swiglu(*both)
    saved = (x.data, gate.data, up.data, y.node, tuple(inputs))
    return record("gated_linear", y.data, tuple(inputs.values()), _gated_linear_backward, saved)


def _gated_linear_backward(
    dy: Array, saved: tuple[Any, ...], needs: Sequence[bool]
) -> list[Array | None]:
    x, gate, up, inner, names = saved
    wanted = {name for name, need in zip(names, needs, strict=True) if need}
    dgate, dup = map(flat, inner.backward(dy, inner.saved, (True, True)))
    found: dict[str, Any] = {}
    if "x" in wanted:
        found["x"] = _sum_of_products((dgate, gate), (dup, up)).reshape(x.shape)
    for name, rows in (("gate", dgate), ("up", dup)):
        if name in wanted:
            found[name] = _weight_gradient(rows, flat(x))
        if f"{name}_bias" in wanted:
            found[f"{name}_bias"] = _bias_gradient(rows)
    return [found.get(name) for name in names]


def _sum_of_products(first: tuple[Array, Array], second: tuple[Array, Array]) -> Array:
    """Return a b + c d; in 16 bits on the GPU the second product adds the result of the first."""
    dtype = first[0].dtype
    y = product(*first, dtype)
    if not _is_fused((*first, *second), ()):
        y += product(*second, dtype)
        return y
    total = backend.empty_like(y)
    matmul_cuda.run(problem(*second, total, residual=y))
    return total


def _tensors(
    op: str, named: Mapping[str, Any], matrices: Sequence[str]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return tensors of all that is given and, cast under autocast, those that must be."""
    found = {
        name: tensor_of(op, name, value)
        for name, value in named.items()
        if value is not None or name in matrices
    }
    if mode.autocast is not None:
        found |= zip(matrices, cast_operands(*[found[name] for name in matrices]), strict=True)
    return found, [found[name] for name in matrices]


_SLOPED = Row("linear_gelu", "dy x", "dy * gelu_tanh_slope(x)")


def _operands(op: str, x: Any, weight: Any, bias: Any, residual: Any = None) -> dict[str, Tensor]:
    """Return the operands that there are as tensors, checked."""
    x, weight = tensor_of(op, "x", x), tensor_of(op, "weight", weight)
    if mode.autocast is not None:
        x, weight = cast_operands(x, weight)
    a, w = x.data, weight.data
    if w.ndim != 2 or not a.ndim or a.shape[-1] != w.shape[1]:
        width = a.shape[-1] if a.ndim else "in"
        raise ShapeError(
            f"{op}: weight has shape {w.shape}, expected (out, {width}) as x has shape {a.shape}"
        )
    inputs = {"x": x, "weight": weight}
    if bias is not None:
        inputs["bias"] = bias = tensor_of(op, "bias", bias)
        if bias.data.shape != w.shape[:1]:
            raise ShapeError(
                f"{op}: bias has shape {bias.shape}, expected {w.shape[:1]} (out of weight)"
            )
    if residual is not None:
        inputs["residual"] = residual = tensor_of(op, "residual", residual)
        shape = (*a.shape[:-1], w.shape[0])
        if residual.data.shape != shape:
            raise ShapeError(f"{op}: residual has shape {residual.shape}, expected {shape}")
    for name, operand in inputs.items():
        if operand.data.dtype.kind != "f":  # bfloat16 has another kind
            float_operand(op, name, operand)
    same_device(op, list(inputs), [t.data for t in inputs.values()])
    return inputs


def _affine(
    rows: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    dtype: Dtype,
    kernel: str | None = None,
) -> Array:
    """Return x W^T + b + residual for the rows of x, rounded to `dtype` once."""
    beside = None if residual is None else flat(residual)
    if _is_fused((rows, weight), (bias,)) and dtype in (rows.dtype, float32):
        bias = None if bias is None else contiguous(bias)
        if dtype == rows.dtype:
            y = backend.empty((len(rows), len(weight)), dtype, like=rows)
            beside = None if beside is None else contiguous(beside)
            p = problem(rows, weight.T, y, bias=bias, residual=beside)
        else:  # because of the residual
            y = converted(beside, dtype)
            p = problem(rows, weight.T, y, bias=bias, add=True)
        matmul_cuda.run(p, kernel)
        return y
    plain = bias is None and beside is None
    y = product(rows, weight.T, dtype if plain else compute_dtype(dtype), kernel)
    if bias is not None:
        y += bias
    if beside is not None:
        y += beside
    return y.astype(dtype, copy=False)


def _activated(
    rows: Array, weight: Array, bias: Array | None, tensors: Sequence[Tensor]
) -> tuple[Array, Array | None]:
    """Return gelu(x W^T + b) and, if any of the tensors needs a gradient, what it is taken of."""
    y = backend.empty((len(rows), len(weight)), rows.dtype, like=rows)
    pre = None
    if mode.grad_enabled and any(tensor.requires_grad for tensor in tensors):
        pre = backend.empty(y.shape, y.dtype, like=y)
    bias = None if bias is None else contiguous(bias)
    matmul_cuda.run(problem(rows, weight.T, y, bias=bias, gelu=True, before_gelu=pre))
    return y, pre


def _is_fused(arrays: Sequence[Array], biases: Sequence[Array | None]) -> bool:
    """Whether a kernel can do what follows a product too: not empty, on the GPU, of 16 bits."""
    dtype = arrays[0].dtype
    if dtype.itemsize != 2 or is_numpy(arrays[0]):
        return False
    for array in arrays:
        if array.dtype != dtype or not array.size:
            return False
    return all([bias is None or bias.dtype in (dtype, float32) for bias in biases])


def _fit(x: Any, up: Any, down: Any, up_bias: Any, down_bias: Any, residual: Any) -> bool:
    """Whether the shapes are those that `feed_forward` takes."""
    return (
        len(up) == len(down) == 2
        and (x[-1:], up[:1]) == (up[1:], down[1:])
        and (up_bias is None or up_bias == up[:1])
        and (down_bias is None or down_bias == down[:1])
        and (residual is None or residual == (*x[:-1], down[0]))
    )


def _weight_gradient(dy: Array, x: Array, kernel: str | None = None) -> Late:
    """Return dy^T x, to be added to the gradient by the product where that is possible."""

    wide = compute_dtype(dy.dtype)

    def compute(total: Array | None) -> Array | None:
        if total is None:
            return product(dy.T, x, wide, kernel)
        matmul_cuda.run(problem(dy.T, x, total, add=True), kernel)
        return None

    return Late(compute, float32 if wide is float32 and dy.dtype is x.dtype else None)


def _bias_gradient(dy: Array) -> Late:
    """Return the sum of the rows of dy."""
    wide = compute_dtype(dy.dtype)

    def compute(total: Array | None) -> Array | None:
        if total is None:
            return sum_array(dy, (0,), dtype=wide)
        add_sum_of_rows(total, dy)
        return None

    return Late(compute, wide if dy.size else None)
