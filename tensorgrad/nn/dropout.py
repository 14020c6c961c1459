"""The dropout layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tensorgrad.core.checks import check_range
from tensorgrad.core.tensor import Tensor
from tensorgrad.nn.module import Module
from tensorgrad.ops.dropout import dropout, dropout_add


class Dropout(Module):
    """In training, set elements to 0 with probability p and scale the others by 1 / (1 - p).

    Args:
        p: in [0, 1).

    Attributes:
        stream: makes the context in which ranks that share a layer draw; see nn/shard.py.

    Example:
        >>> tg.manual_seed(0)
        >>> dropout = tg.nn.Dropout(0.5)
        >>> sorted(set(dropout(tg.ones(100)).tolist()))  # dropped, or divided by 0.5
        [0.0, 2.0]
        >>> dropout.eval()(tg.ones(3))
        tensor([1., 1., 1.], dtype=float32)
    """

    stream: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, p: float = 0.5) -> None:
        check_range("Dropout", "p", p, 1)
        self.p = float(p)

    @property
    def drops(self) -> bool:
        """Whether a call drops elements: in training, where p is above 0."""
        return self.training and self.p > 0

    def forward(self, x: Any) -> Tensor:
        """Return dropout(x), the shape of x; x itself after `eval()` or where p is 0."""
        with self.stream():
            return dropout(x, self.p, self.training)

    def add(self, x: Any, residual: Any) -> Tensor:
        """Return residual + dropout(x), in one kernel; both have the shape of the result."""
        with self.stream():
            return dropout_add(x, residual, p=self.p, training=self.training)

    def extra_repr(self) -> str:
        """Return the probability."""
        return str(self.p)
