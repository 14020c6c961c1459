"""Optimizers, which replace the values of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorgrad as tg
from minitorch.module import Parameter

__all__ = ["SGD", "Adam", "Optimizer"]


class Optimizer:
    """Base of the optimizers.

    Args:
        parameters: of a module.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = parameters

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for p in self._learned():
            p.value.zero_grad_()

    def _learned(self) -> list[Parameter]:
        """Return the parameters that have a gradient."""
        return [p for p in self.parameters if getattr(p.value, "grad", None) is not None]


class SGD(Optimizer):
    """Gradient descent of tensors and scalars.

    Args:
        parameters: of a module.
        lr: learning rate.
    """

    def __init__(self, parameters: Sequence[Parameter], lr: float = 1.0) -> None:
        super().__init__(parameters)
        self.lr = lr

    def step(self) -> None:
        """Replace each value that has a gradient."""
        for p in self._learned():
            p.update(p.value.detach() - self.lr * p.value.grad)


class Adam(Optimizer):
    """Adam, by `tensorgrad.optim.Adam`; tensors only.

    Args:
        parameters: of a module.
        lr: learning rate.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of their squares.
        eps: added to the root of the latter.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(parameters)
        self.lr, self.betas, self.eps = lr, (beta1, beta2), eps
        self._adams: dict[int, tuple[Any, Any]] = {}  # id of a parameter: weights, optimizer

    def step(self) -> None:
        """Replace each value that has a gradient."""
        for p in self._learned():
            if id(p) not in self._adams:
                leaf = p.value.value.copy().requires_grad_()
                self._adams[id(p)] = leaf, tg.optim.Adam([leaf], self.lr, self.betas, self.eps)
            leaf, adam = self._adams[id(p)]
            leaf.data[...] = p.value.value.data
            leaf.grad[...] = p.value.grad.value.data
            adam.lr = self.lr
            adam.step()
            p.update(p.value._wrap(leaf.copy()))
