"""Muon. Tests: tests/optim/test_muon.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.checks import check_integer, check_range
from tensorgrad.errors import ArgumentError
from tensorgrad.ops.matmul import product
from tensorgrad.optim.flat import FlatParameters
from tensorgrad.optim.groups import Parameters
from tensorgrad.optim.optimizer import DECAY, FACTOR, LR, STEPS, Optimizer

_COEFFICIENTS = 3.4445, -4.7750, 2.0315


class Muon(Optimizer):
    """Momentum whose singular values are made about 1, with decoupled weight decay; for matrices.

    m = momentum * m + (1 - momentum) * g
    u = momentum * m + (1 - momentum) * g with Nesterov's momentum, else m
    p = p * (1 - lr * weight_decay) - lr * scale * orthogonalized(u)

    Embeddings, heads, biases and norm weights need another optimizer, such as AdamW, for the rest
    of the parameters. The matrices are updated one after another, in float32.

    Args:
        parameters: tensors with two axes, pairs (name, tensor), groups or flat parameters; see
            `Optimizer`.
        lr: learning rate.
        momentum: in [0, 1).
        nesterov: use Nesterov's momentum.
        weight_decay: at least 0.
        iterations: of Newton and Schulz, at least 1.
        match_adamw: False: scale = sqrt(max(1, rows / columns)). True: 0.2 sqrt(max(rows,
            columns)), so that updates are as large as AdamW's and its lr and weight_decay fit.

    Raises:
        ArgumentError: an option is outside its range, a parameter is not a matrix, or they are
            sharded.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; match_adamw: Liu et al.
        2025, arXiv:2502.16982, eq. 4.
    """

    _decoupled = True

    def __init__(
        self,
        parameters: FlatParameters | Parameters,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        iterations: int = 5,
        match_adamw: bool = False,
    ) -> None:
        check_range("Muon", "momentum", momentum, 1.0)
        check_integer("Muon", "iterations", iterations, 1)
        super().__init__(parameters, lr, weight_decay, ("m",))
        for name, slot in self.flat.slots.items():
            if len(slot.shape) != 2:
                raise ArgumentError(
                    f"Muon: {name} has shape {slot.shape}, expected a matrix; give the others to "
                    "another optimizer"
                )
        if not self.flat.whole:
            raise ArgumentError("Muon: the parameters are sharded, expected whole ones")
        self.momentum, self.nesterov, self.iterations = momentum, nesterov, iterations
        self.match_adamw = match_adamw

    @np.errstate(all="ignore")  # inf and NaN reach the parameters, as in the other optimizers
    def _update_all(self) -> None:
        """Update each matrix by array operations, which run alike on the CPU and in CUDA graphs."""
        data, grads = self.flat.views(self.flat.data), self.flat.views(self.flat.grad)
        states = {name: self.flat.views(buffer) for name, buffer in self.state.items()}
        for group, (hyper, decay, pieces) in zip(self.groups, self._parts(), strict=True):
            taken = hyper[FACTOR] != 0  # read on the device: 0 skips the step
            hyper[STEPS : STEPS + 1] += taken
            hyper[DECAY : DECAY + 1] = 1 - hyper[LR] * decay
            decayed = pieces[0].begin + pieces[0].decayed
            for name in group.names:
                decays = self.flat.slots[name].offset < decayed
                masters = states.get("master")
                self._update_matrix(
                    hyper, taken, decays, data[name], grads[name], states["m"][name],
                    None if masters is None else masters[name],
                )  # fmt: skip

    def _update_matrix(
        self, hyper: Array, taken: Any, decays: bool, data: Array, grad: Array, m: Array,
        master: Array | None,
    ) -> None:  # fmt: skip
        xp, wide = backend.namespace(m), m.dtype
        g = xp.where(taken, grad * hyper[FACTOR].astype(wide), 0)
        mean = m + (g - m) * wide.type(1 - self.momentum)
        u = g + (mean - g) * wide.type(self.momentum) if self.nesterov else mean
        rows, columns = data.shape
        scale = 0.2 * math.sqrt(max(rows, columns)) if self.match_adamw else math.sqrt(
            max(1, rows / max(columns, 1))
        )  # fmt: skip
        p = data
        if master is not None:  # 16-bit parameters that were assigned to take the master over
            p = xp.where(master.astype(data.dtype) == data, master, data.astype(wide))
        step = orthogonalized(u, self.iterations) * (hyper[LR] * scale).astype(wide)
        new = (p * hyper[DECAY].astype(wide) if decays else p) - step
        m[...] = xp.where(taken, mean, m)
        if master is not None:
            master[...] = xp.where(taken, new, master)
        data[...] = xp.where(taken, new.astype(data.dtype, copy=False), data)


def orthogonalized(matrix: Array, iterations: int = 5) -> Array:
    """Return a matrix with the same singular vectors and singular values of about 0.7 to 1.2.

    x = matrix / |matrix|, then in each iteration x = a x + (b A + c A^2) x, A = x x^T

    Args:
        matrix: (R, C), float32 or float64.
        iterations: 5 serve 16-bit training.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon, with its coefficients.
    """
    if matrix.shape[0] > matrix.shape[1]:  # A is then the smaller product
        return orthogonalized(matrix.T, iterations).T
    dtype = matrix.dtype
    xp = backend.namespace(matrix)
    x = matrix / (xp.sqrt((matrix * matrix).sum()) + dtype.type(1e-7))
    a, b, c = (dtype.type(each) for each in _COEFFICIENTS)
    for _ in range(iterations):
        square = product(x, x.T, dtype)
        x = a * x + product(b * square + c * product(square, square, dtype), x, dtype)
    return x
