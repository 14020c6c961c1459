"""Lion. Kernel: kernels/optim.cu. Tests: tests/optim/test_optimizer.py."""

from __future__ import annotations

import numpy as np

from tensorgrad.core.backend import Array
from tensorgrad.core.checks import check_range
from tensorgrad.optim.flat import Decays, FlatParameters
from tensorgrad.optim.groups import Parameters
from tensorgrad.optim.optimizer import DECAY, LR, SIZE, Kernels, Optimizer, two_numbers


class Lion(Optimizer):
    """The sign of an interpolated momentum as the update, with decoupled weight decay.

    p = p * (1 - lr * weight_decay)
    p = p - lr * sign(beta1 * m + (1 - beta1) * g)
    m = beta2 * m + (1 - beta2) * g

    Half of Adam's state. All elements move by lr, so lr is usually 3 to 10 times smaller than
    AdamW's, and weight_decay larger by the same factor.

    Args:
        parameters: tensors, pairs (name, tensor), groups or flat parameters; see `Optimizer`.
        lr: learning rate.
        betas: beta1 and beta2, each in [0, 1).
        weight_decay: at least 0; of all parameters, unless `decay` says which.
        decay: (name, tensor) -> whether weight decay applies, such as `decays_matrices`; see
            `Optimizer`.

    Raises:
        ArgumentError: an option is outside its range.

    Source: Chen et al. 2023, arXiv:2302.06675, algorithm 2.

    Example:
        >>> w = tg.tensor([1.0, -2.0], requires_grad=True)
        >>> optimizer = tg.optim.Lion([w], lr=0.25)
        >>> (w * w).sum().backward()
        >>> optimizer.step()  # by lr, against the sign of the gradient
        >>> w.data
        array([ 0.75, -1.75], dtype=float32)
    """

    _decoupled = True

    def __init__(
        self,
        parameters: FlatParameters | Parameters,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        decay: Decays | None = None,
    ) -> None:
        beta1, beta2 = two_numbers("Lion", "betas", betas, "beta")
        check_range("Lion", "beta1", beta1, 1.0)
        check_range("Lion", "beta2", beta2, 1.0)
        super().__init__(parameters, lr, weight_decay, ("m",), decay)
        self.betas = beta1, beta2

    def _prepare_numpy(self, hyper: Array, weight_decay: float) -> None:
        hyper[SIZE] = hyper[LR]
        hyper[DECAY] = 1 - hyper[LR] * weight_decay

    def _update_numpy(
        self, hyper: Array, p: Array, g: Array, *states: Array, t: Array, u: Array
    ) -> None:
        (m,), (beta1, beta2) = states, self.betas
        np.subtract(m, g, out=t)  # beta * m + (1 - beta) * g = g + beta * (m - g)
        np.multiply(t, beta2, out=m)
        m += g
        t *= beta1
        t += g
        np.sign(t, out=t)
        t *= float(hyper[SIZE])
        p -= t

    def _kernels(self, weight_decay: float) -> Kernels:
        return "prepare_lion", (weight_decay,), f"lion_step<{self._types()}>", self.betas
