"""Stochastic gradient descent. Kernels: kernels/optim.cu.

Tests: tests/optim/test_optimizer.py.
"""

from __future__ import annotations

import numpy as np

from tensorgrad.core.backend import Array
from tensorgrad.core.checks import check_range
from tensorgrad.core.errors import ArgumentError
from tensorgrad.optim.flat import Decays, FlatParameters
from tensorgrad.optim.groups import Parameters
from tensorgrad.optim.optimizer import GAIN, LR, SIZE, STEPS, Kernels, Optimizer


class SGD(Optimizer):
    """Gradient descent with momentum, as PyTorch defines it.

    g = grad + weight_decay * p
    m = momentum * m + (1 - dampening) * g, but m = g in the first step
    p = p - lr * m, or with Nesterov's momentum p = p - lr * (g + momentum * m)

    Args:
        parameters: tensors, pairs (name, tensor), groups or flat parameters; see `Optimizer`.
        lr: learning rate.
        momentum: in [0, inf); without it the optimizer has no state.
        dampening: fraction of the gradient that is not added to the momentum.
        weight_decay: at least 0; of all parameters, unless `decay` says which.
        nesterov: use Nesterov's momentum; needs momentum and no dampening.
        decay: (name, tensor) -> whether weight decay applies, such as `decays_matrices`; see
            `Optimizer`.

    Raises:
        ArgumentError: an option is outside its range.

    Source: Sutskever et al. 2013, "On the importance of initialization and momentum in deep
        learning", eq. 3 and 4, with the learning rate outside the momentum.

    Example:
        >>> w = tg.tensor([1.0, -2.0], requires_grad=True)
        >>> optimizer = tg.optim.SGD([w], lr=0.25)
        >>> (w * w).sum().backward()
        >>> optimizer.step()
        >>> w.data
        array([ 0.5, -1. ], dtype=float32)
    """

    def __init__(
        self,
        parameters: FlatParameters | Parameters,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        decay: Decays | None = None,
    ) -> None:
        check_range("SGD", "momentum", momentum)
        check_range("SGD", "dampening", dampening)
        if nesterov and (momentum == 0 or dampening != 0):
            raise ArgumentError(
                f"SGD: nesterov with momentum {momentum} and dampening {dampening}, expected "
                "momentum above 0 and dampening 0"
            )
        states = ("momentum",) if momentum else ()
        super().__init__(parameters, lr, weight_decay, states, decay)
        self.momentum, self.dampening, self.nesterov = momentum, dampening, nesterov

    def _prepare_numpy(self, hyper: Array, weight_decay: float) -> None:
        hyper[SIZE] = hyper[LR]
        hyper[GAIN] = 1 if hyper[STEPS] == 1 else 1 - self.dampening

    def _update_numpy(
        self, hyper: Array, p: Array, g: Array, *states: Array, t: Array, u: Array
    ) -> None:
        size = float(hyper[SIZE])
        if not self.momentum:
            p -= np.multiply(g, size, out=t)
            return
        (m,) = states
        np.multiply(g, float(hyper[GAIN]), out=t)
        m *= self.momentum
        m += t
        if self.nesterov:
            np.multiply(m, self.momentum, out=t)
            t += g
            t *= size
        else:
            np.multiply(m, size, out=t)
        p -= t

    def _kernels(self, weight_decay: float) -> Kernels:
        kind = 0 if not self.momentum else 2 if self.nesterov else 1
        step = f"sgd_step<{self._types()}, {kind}>"
        return "prepare_sgd", (self.dampening,), step, (self.momentum, weight_decay)
