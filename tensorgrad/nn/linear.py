"""The linear layer."""

from __future__ import annotations

import math
from typing import Any

from tensorgrad.core.checks import check_integer
from tensorgrad.core.tensor import Tensor
from tensorgrad.nn import init
from tensorgrad.nn.module import Module, Parameter, check_input
from tensorgrad.nn.rows import Rows
from tensorgrad.nn.shard import Region
from tensorgrad.ops.linear import linear


class Linear(Module):
    """Compute y = x W^T + b.

    Args:
        inputs: length of the last axis of x.
        outputs: length of the last axis of y.
        bias: whether to add b.

    Attributes:
        weight: W, (outputs, inputs), initialized uniformly in +-1 / sqrt(inputs), as in PyTorch.
        bias: b, (outputs,), initialized likewise; or None.
        may_be_overwritten: nothing holds what `forward` returns but the caller, and backward does
            not need it; see `can_fuse`.
        before, after: the region that x enters before the product, where ranks share the columns
            of y, and the one that y leaves after it, where they share those of x; or None.

    Example:
        >>> layer = tg.nn.Linear(3, 2)
        >>> layer
        Linear(3, 2)
        >>> layer(tg.ones((5, 3))).shape
        (5, 2)
    """

    may_be_overwritten = True
    before: Region | None = None
    after: Region | None = None

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        check_integer("Linear", "inputs", inputs, 0)
        check_integer("Linear", "outputs", outputs, 0)
        self.weight = Parameter(init.empty(outputs, inputs))
        self.bias = Parameter(init.empty(outputs)) if bias else None
        bound = 1 / math.sqrt(max(1, inputs))
        init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Any, residual: Any = None) -> Tensor:
        """Return y + residual, (..., outputs).

        Args:
            x: (..., inputs), of the layer's dtype or a narrower one.
            residual: (..., outputs), added in the same op; or None.
        """
        check_input(self, self.weight, x=x, residual=residual)
        x = self.enter(x)
        if self.after is not None:
            return self.after.leave(linear(x, self.weight), self.bias, residual)
        return linear(x, self.weight, self.bias, residual=residual)

    def enter(self, x: Any) -> Any:
        """Return x in the region of the layer, for ops that fuse the product."""
        return x if self.before is None else self.before.enter(x)

    def affine(self) -> tuple[Parameter, Parameter | None]:
        """Return weight and bias, for ops that fuse the product; see nn/module.py."""
        return self.weight, self.bias

    def saved_bytes(self, rows: Rows) -> float:
        """Return the bytes that backward needs: x."""
        return rows.inside * rows.item * self.weight.shape[1]

    def extra_repr(self) -> str:
        """Return the sizes."""
        outputs, inputs = self.weight.shape
        shared = ", column of ranks" * (self.before is not None)
        shared += ", row of ranks" * (self.after is not None)
        return f"{inputs}, {outputs}" + ("" if self.bias is not None else ", bias=False") + shared
