"""FLOPs of the matrix products of an op, and the bytes that it must move, from its arrays.

A multiplication and an addition count as two. What is not a matrix product counts as 0 FLOPs: the
memory bounds it. Tests: tests/profile/test_work.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from tensorgrad.core.backend import Shape
from tensorgrad.core.dtypes import is_float
from tensorgrad.kernels.attention.options import AttentionOptions
from tensorgrad.kernels.matmul import TF32

_Shapes = list[Shape]
_LOOKUPS = ("embedding", "getitem", "take", "take_along_axis")


def forward_flops(name: str, inputs: Sequence[Any], output: Any, saved: tuple[Any, ...]) -> float:
    """Return the FLOPs of an op; arguments as of `instrument.Observer.op`."""
    count = _FORWARD.get(name)
    if count is None:
        return 0.0
    shapes = [() if operand is None else operand.shape for operand in inputs]
    return float(count(shapes, output.shape, saved))


def backward_flops(name: str, flops: float, needs: Sequence[Any]) -> float:
    """Return the FLOPs of the backward of an op whose forward has `flops`.

    Each operand of a product costs one more product. Attention computes its scores again: 5
    products for the 2 of forward. The loss with its linear layer has computed its gradients in
    forward.
    """
    if name == "linear_cross_entropy":
        return 0.0
    if name.startswith("attention"):
        return 2.5 * flops
    if name in ("matmul", "linear", "linear_gelu"):
        return flops * sum(need is not False for need in needs[:2])
    return 2 * flops


def product_dtype(output: Any, inputs: Sequence[Any], saved: Sequence[Any]) -> str:
    """Return the dtype in which an op multiplies matrices: "tf32", or the narrowest of its arrays.

    The loss with its linear layer has a float32 result, and under autocast operands are float32.
    """
    if any([is_rounded(value) for value in saved]):
        return TF32
    dtypes = [getattr(value, "dtype", output.dtype) for value in (*inputs, *saved)]
    floats = [dtype for dtype in dtypes if is_float(dtype)]
    return str(min((output.dtype, *floats), key=lambda dtype: dtype.itemsize))


def is_rounded(saved: Any) -> bool:
    """Whether what an op saved says that its products round to TF32."""
    if isinstance(saved, str):
        return saved == TF32
    return getattr(saved, "kernel", None) == TF32 or getattr(saved, "tf32", False) is True


def forward_bytes(name: str, output: Any, inputs: Sequence[Any]) -> int:
    """Return the bytes that an op must move: its operands and its result, each once.

    Of what it looks up in a table, an op reads as much as it writes.
    """
    arrays = [getattr(operand, "data", None) for operand in inputs]
    if name in _LOOKUPS:
        return nbytes((output, *arrays[1:])) + nbytes((output,))
    return nbytes((output, *arrays))


def backward_bytes(
    name: str, dy: Iterable[Any], saved: Sequence[Any], gradients: Sequence[Any]
) -> int:
    """Return the bytes that a backward must move, of dy, saved arrays and gradients; 0: unknown."""
    if name == "linear_cross_entropy":
        return 0  # its gradients exist already
    if name == "multiply":  # the gradient of one operand needs the other
        saved = [value for value, other in zip(saved, reversed(gradients), strict=False)
                 if other is not None]  # fmt: skip
    return nbytes((*dy, *saved, *gradients))


def nbytes(values: Iterable[Any]) -> int:
    """Return the bytes of the arrays among values, each counted once; a view without strides."""
    return sum({id(value): getattr(value, "nbytes", 0) for value in values}.values())


def _matmul(shapes: _Shapes, y: Shape, saved: Any) -> int:
    return 2 * math.prod(y) * int(shapes[0][-1])


def _feed_forward(shapes: _Shapes, y: Shape, saved: Any) -> int:
    x, up, down = shapes[0], shapes[1], shapes[3]
    return 2 * math.prod(x[:-1]) * (math.prod(up) + math.prod(down))


def _gated_linear(shapes: _Shapes, y: Shape, saved: Any) -> int:
    return 4 * math.prod(y) * int(shapes[0][-1])


def _einsum(shapes: _Shapes, y: Shape, saved: Any) -> int:
    sizes: dict[Any, int] = saved[-1]
    return 2 * math.prod(sizes.values()) if len(shapes) > 1 else 0


def _attention(shapes: _Shapes, y: Shape, saved: Any) -> int:
    q: Shape = saved[0].shape  # (B, H, Tq, D)
    queries, keys = q[2], int(saved[1].shape[2])
    options = next(value for value in saved if isinstance(value, AttentionOptions))
    pairs = queries * keys
    if options.sequences is None:  # whose lengths are on the device
        pairs = _pairs(queries, keys, options.before, options.after)
    return 4 * q[0] * q[1] * q[3] * pairs


@lru_cache(maxsize=256)
def _pairs(queries: int, keys: int, before: int, after: int) -> int:
    """Return how many pairs of a query and a key a causal mask or a window keeps."""
    positions = range(keys - queries, keys)
    return sum(
        max(0, min(keys - 1, position + after) - max(0, position - before) + 1)
        for position in positions
    )


def _linear_cross_entropy(shapes: _Shapes, y: Shape, saved: Any) -> int:
    x, weight = shapes[0], shapes[1]
    product = 2 * math.prod(x[:-1]) * math.prod(weight)
    return product * (3 if saved and saved[-1] else 1)  # gradients that forward computed


_FORWARD: dict[str, Callable[[_Shapes, Shape, Any], int]] = {
    "matmul": _matmul,
    "linear": _matmul,
    "linear_gelu": _matmul,
    "feed_forward": _feed_forward,
    "gated_linear": _gated_linear,
    "einsum": _einsum,
    "tensordot": _einsum,
    "attention": _attention,
    "attention_packed": _attention,
    "attention_varlen": _attention,
    "linear_cross_entropy": _linear_cross_entropy,
}
