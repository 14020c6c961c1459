"""Adam and AdamW. Kernels: kernels/optim.cu. Tests: tests/optim/test_optimizer.py."""

from __future__ import annotations

import math

import numpy as np

from tensorgrad.core.backend import Array
from tensorgrad.core.checks import check_range
from tensorgrad.optim.flat import Decays, FlatParameters
from tensorgrad.optim.groups import Parameters
from tensorgrad.optim.optimizer import DECAY, EPS, LR, SIZE, STEPS, Kernels, Optimizer, two_numbers


class Adam(Optimizer):
    """Adam, with weight decay added to the gradient (L2).

    g = grad + weight_decay * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2
    p = p - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    Args:
        parameters: tensors, pairs (name, tensor), groups or flat parameters; see `Optimizer`.
        lr: learning rate.
        betas: beta1 and beta2, each in [0, 1).
        eps: added to the square root of v.
        weight_decay: at least 0; of all parameters, unless `decay` says which.
        decay: (name, tensor) -> whether weight decay applies, such as `decays_matrices`; see
            `Optimizer`.

    Raises:
        ArgumentError: an option is outside its range.

    Source: Kingma and Ba 2014, arXiv:1412.6980, algorithm 1.

    Example:
        >>> w = tg.tensor([1.0, -2.0], requires_grad=True)
        >>> optimizer = tg.optim.Adam([w], lr=0.1)
        >>> (w * w).sum().backward()
        >>> optimizer.step()  # the first step moves by lr, whatever the gradient
        >>> w.data.round(4)
        array([ 0.9, -1.9], dtype=float32)
    """

    _moments: tuple[str, ...] = ("m", "v")

    def __init__(
        self,
        parameters: FlatParameters | Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decay: Decays | None = None,
    ) -> None:
        name = type(self).__name__
        beta1, beta2 = two_numbers(name, "betas", betas, "beta")
        check_range(name, "beta1", beta1, 1.0)
        check_range(name, "beta2", beta2, 1.0)
        check_range(name, "eps", eps)
        super().__init__(parameters, lr, weight_decay, self._moments, decay)
        self.betas, self.eps = (beta1, beta2), eps

    def _prepare_numpy(self, hyper: Array, weight_decay: float) -> None:
        beta1, beta2 = self.betas
        root = math.sqrt(1 - beta2 ** hyper[STEPS])
        hyper[SIZE] = hyper[LR] * root / (1 - beta1 ** hyper[STEPS])
        hyper[EPS] = self.eps * root
        hyper[DECAY] = 1 - hyper[LR] * weight_decay

    def _update_numpy(
        self, hyper: Array, p: Array, g: Array, *states: Array, t: Array, u: Array
    ) -> None:
        (m, v), (beta1, beta2) = states, self.betas
        m *= beta1
        m += np.multiply(g, 1 - beta1, out=t)
        v *= beta2
        np.multiply(g, g, out=t)
        t *= 1 - beta2
        v += t
        np.sqrt(v, out=t)
        t += float(hyper[EPS])
        np.divide(m, t, out=t)
        t *= float(hyper[SIZE])
        p -= t

    def _kernels(self, weight_decay: float) -> Kernels:
        step = f"adam_step<{self._types()}, {str(self._decoupled).lower()}>"
        scalars = (*self.betas, weight_decay)
        return "prepare_adam", (*self.betas, self.eps, weight_decay), step, scalars


class AdamW(Adam):
    """Adam with decoupled weight decay.

    p = p * (1 - lr * weight_decay), then Adam's update without weight decay

    Args:
        parameters: tensors, pairs (name, tensor), groups or flat parameters; see `Optimizer`.
        lr: learning rate.
        betas: beta1 and beta2, each in [0, 1).
        eps: added to the square root of v.
        weight_decay: at least 0; of all parameters, unless `decay` says which.
        decay: (name, tensor) -> whether weight decay applies, such as `decays_matrices`; see
            `Optimizer`.

    Raises:
        ArgumentError: an option is outside its range.

    Source: Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2.

    Example:
        >>> model = tg.nn.Linear(2, 1)
        >>> optimizer = tg.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        >>> model(tg.ones((4, 2))).mean().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> optimizer
        AdamW(parameters=2, elements=3, lr=0.001, weight_decay=0.01, betas=(0.9, 0.95), eps=1e-08)
    """

    _decoupled = True

    def __init__(
        self,
        parameters: FlatParameters | Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        decay: Decays | None = None,
    ) -> None:
        super().__init__(parameters, lr, betas, eps, weight_decay, decay=decay)
