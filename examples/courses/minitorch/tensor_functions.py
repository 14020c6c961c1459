"""The functions of scalars and tensors, each of them one op of tensorgrad."""

from __future__ import annotations

from typing import Any

import tensorgrad as tg
from minitorch.autodiff import function
from minitorch.operators import EPS

__all__ = [
    "EQ", "LT", "Add", "All", "Attn_Softmax", "Copy", "Div", "Exp", "Inv", "IsClose", "LayerNorm",
    "Log", "MatMul", "Mul", "Neg", "Permute", "PowerScalar", "ReLU", "Sigmoid", "Sum", "Tanh",
    "View", "integer",
]  # fmt: skip


def integer(value: Any) -> int:
    """Return an axis or a length, which minitorch also passes as a tensor of one element."""
    return int(value.item() if hasattr(value, "item") else value)


def _integers(values: Any) -> tuple[int, ...]:
    return tuple(map(int, values.numpy() if isinstance(values, tg.Tensor) else values))


def _zeros_ones(condition: tg.Tensor, like: tg.Tensor) -> tg.Tensor:
    return condition.astype(like.dtype)


# Elementwise. Comparisons give 1.0 or 0.0, and their gradients are 0.
Neg = function(lambda a: -a)
Inv = function(lambda a: 1 / a)
Log = function(lambda a: tg.log(a + EPS))
Exp = function(tg.exp)
Tanh = function(tg.tanh)
Sigmoid = function(tg.sigmoid)
ReLU = function(tg.relu)
Copy = function(lambda a: a.copy())
Add = function(lambda a, b: a + b)
Mul = function(lambda a, b: a * b)
Div = function(lambda a, b: a / b)
PowerScalar = function(lambda a, b: a**b)
LT = function(lambda a, b: _zeros_ones(a < b, a))
EQ = function(lambda a, b: _zeros_ones(a == b, a))
IsClose = function(lambda a, b: _zeros_ones(abs(a - b) < 1e-2, a))

# Over an axis, which stays with length 1.
Sum = function(lambda a, dim: a.sum(axis=integer(dim), keepdims=True))
All = function(lambda a, dim: a.prod(axis=integer(dim), keepdims=True))

Permute = function(lambda a, order: tg.transpose(a, _integers(order)))
View = function(lambda a, shape: a.reshape(_integers(shape)))
MatMul = function(lambda a, b: a @ b)

# Over the last axis. The gradient of the mask is 0.
Attn_Softmax = function(lambda a, mask: tg.softmax(a, mask=mask.detach()))
LayerNorm = function(lambda a, gamma, beta: tg.layer_norm(a, gamma, beta, eps=1e-8))
