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
        """Forget the gradients of tensors and scalars."""
        for p in self.parameters:
            for name in ("grad", "derivative"):
                if hasattr(p.value, name):
                    setattr(p.value, name, None)


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
        for p in self.parameters:
            if getattr(p.value, "derivative", None) is not None:
                p.update(type(p.value)(p.value.data - self.lr * p.value.derivative))
            elif getattr(p.value, "grad", None) is not None:
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
        self._adams: dict[int, tuple[tg.Tensor, Any]] = {}  # id of a parameter: weights, optimizer

    def step(self) -> None:
        """Replace each value that has a gradient."""
        for p in self.parameters:
            if getattr(p.value, "grad", None) is None:
                continue
            if id(p) not in self._adams:
                leaf = p.value.value.copy().requires_grad_()
                self._adams[id(p)] = leaf, tg.optim.Adam([leaf], self.lr, self.betas, self.eps)
            leaf, adam = self._adams[id(p)]
            leaf.data[...] = p.value.value.data
            adam.zero_grad()
            (leaf * p.value.grad.value).sum().backward()
            adam.lr = self.lr
            adam.step()
            p.update(p.value._wrap(leaf.detach().copy()))
