"""Muon. Tests: tests/optim/test_muon.py."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.checks import check_function, check_integer, check_range
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.tensor import Tensor
from tensorgrad.ops.matmul import product
from tensorgrad.optim.adamw import AdamW
from tensorgrad.optim.clip import sum_of_squares
from tensorgrad.optim.flat import Decays, FlatParameters, ParameterShard, zeros
from tensorgrad.optim.groups import Parameters
from tensorgrad.optim.optimizer import FACTOR, LR

ITERATIONS = 5  # Newton-Schulz iterations; they serve 16-bit training
_COEFFICIENTS = 3.4445, -4.7750, 2.0315


class Muon(AdamW):
    """Momentum whose singular values are made about 1, for matrices; AdamW for the rest.

    m = momentum * m + (1 - momentum) * g
    u = momentum * m + (1 - momentum) * g with Nesterov's momentum, else m
    p = p * (1 - lr * weight_decay) - lr * scale * orthogonalized(u)

    Embeddings, heads, biases and norm weights are not for Muon. `matrices` says what is; the other
    parameters are updated as AdamW updates them, with the same lr and weight_decay, which fit both
    with `match_adamw`. The matrices are updated one after another, in float32.

    An update needs a whole matrix u. Where ranks shard parameters, the momentum is sharded too. A
    step gathers u of one bucket after another that has matrices (in stages 2 and 3 of `Zero` a
    bucket is a block), 4 bytes a parameter in all, into memory of the size of a bucket.
    A rank orthogonalizes the matrices that have elements in its shard: those that are cut between
    ranks are orthogonalized by each of these. So the layout is that of every other optimizer, and
    checkpoints are too. Where ranks share layers, they put u of a matrix together, and each
    orthogonalizes it.

    Args:
        parameters: tensors, pairs (name, tensor), groups or flat parameters; see `Optimizer`.
        lr: learning rate.
        weight_decay: at least 0; of all parameters, unless `decay` says which.
        momentum: in [0, 1).
        nesterov: use Nesterov's momentum.
        iterations: number of Newton-Schulz iterations, at least 1.
        match_adamw: False: scale = sqrt(max(1, rows / columns)). True: 0.2 sqrt(max(rows,
            columns)), so that updates are as large as AdamW's and its lr and weight_decay fit.
        matrices: (name, tensor) -> whether Muon updates a parameter, such as `in_blocks`; None: all
            of them.
        betas, eps: those of AdamW.
        decay: (name, tensor) -> whether weight decay applies, such as `decays_matrices`; see
            `Optimizer`.

    Attributes:
        state: "m" of all parameters, "v" of those that AdamW updates.

    Raises:
        ArgumentError: an option is outside its range, or a parameter for Muon is not a matrix.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; match_adamw: Liu et al.
        2025, arXiv:2502.16982, eq. 4.

    Example:
        >>> model = tg.nn.Sequential(tg.nn.Linear(3, 3), tg.nn.Linear(3, 1))
        >>> optimizer = tg.optim.Muon(
        ...     model.named_parameters(), lr=0.02, matrices=lambda name, x: x.ndim == 2
        ... )
        >>> model(tg.ones((4, 3))).mean().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.entries("v"))  # AdamW updates these
        ['0.bias', '1.bias']
    """

    _moments = ("m",)

    def __init__(
        self,
        parameters: FlatParameters | Parameters,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        iterations: int = ITERATIONS,
        match_adamw: bool = False,
        matrices: Callable[[str, Tensor], bool] | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        decay: Decays | None = None,
    ) -> None:
        check_range("Muon", "momentum", momentum, 1.0)
        check_integer("Muon", "iterations", iterations, 1)
        if matrices is not None:
            check_function("Muon: matrices", matrices)
        super().__init__(parameters, lr, betas, eps, weight_decay, decay=decay)
        tensors = self.flat.parameters.items()
        chosen = [name for name, tensor in tensors if matrices is None or matrices(name, tensor)]
        for name in chosen:
            shape = self.flat.slots[name].shape
            if len(shape) != 2:
                raise ArgumentError(
                    f"Muon: {name} has shape {shape}, expected a matrix; `matrices` says which "
                    "parameters are for Muon, such as in_blocks"
                )
        self._apart = frozenset(chosen)
        self._add_partial_state("v", self._apart)
        self.momentum, self.nesterov, self.iterations = momentum, nesterov, iterations
        self.match_adamw = match_adamw

    @np.errstate(all="ignore")  # inf and NaN reach the parameters, as in the other optimizers
    def _update_all(self) -> None:
        """Update the rest, which counts the step, then each matrix.

        Those are array operations, which run alike on the CPU and in CUDA graphs.
        """
        super()._update_all()
        others = frozenset(self.flat.slots) - self._apart | self._idle
        for hyper, _, number, bucket, shard in self._buckets():
            names = [name for name in bucket.names if name not in others]
            if self.flat.whole:  # matrix after matrix, which takes less memory
                for part in (self.flat.parameter_shard(name, shard) for name in names):
                    u = self._direction(hyper, shard.grad_of(part), self._of("m", part.state))
                    self._update(hyper, part, u)
            elif names:
                momentum = zeros(shard.grad.size, self.state["m"].dtype, shard.grad)
                for run in self.flat.runs(shard, others):
                    place = slice(run.begin - shard.begin, run.begin - shard.begin + run.grad.size)
                    momentum[place] = self._direction(hyper, run.grad, self._of("m", run.state))
                whole = self.flat.gather(number, momentum)
                for name in names:
                    place = self.flat.slots[name].span
                    u = whole[place.start - bucket.begin : place.stop - bucket.begin]
                    self._update(hyper, self.flat.parameter_shard(name, shard), u)

    def _direction(self, hyper: Array, grad: Array, m: Array) -> Array:
        """Update the momentum, unless the step is skipped; return what is orthogonalized."""
        xp, wide, g = backend.namespace(m), m.dtype, self._scaled(hyper, grad)
        mean = m + (g - m) * wide.type(1 - self.momentum)
        m[...] = xp.where(hyper[FACTOR] != 0, mean, m)
        return g + (mean - g) * wide.type(self.momentum) if self.nesterov else mean

    def _update(self, hyper: Array, part: ParameterShard, u: Array) -> None:
        """Update this rank's part of a matrix, which may be empty; u is of the whole matrix."""
        name, boxes = part.name, self.flat.boxes
        u = boxes.join(name, u.reshape(self.flat.slots[name].shape))
        if not part.data.size:
            return
        rows, columns = u.shape
        scale = 0.2 * math.sqrt(max(rows, columns)) if self.match_adamw else math.sqrt(
            max(1, rows / columns)
        )  # fmt: skip
        update = boxes.cut(name, orthogonalized(u, self.iterations)).reshape(-1)[part.values]
        change = update * (hyper[LR] * scale).astype(u.dtype)
        self._subtract(hyper, part, self.values(part), change)


def orthogonalized(matrix: Array, iterations: int = ITERATIONS) -> Array:
    """Return a matrix with the same singular vectors and singular values of about 0.7 to 1.2.

    x = matrix / |matrix|, then in each iteration x = a x + (b A + c A^2) x, A = x x^T

    Args:
        matrix: (R, C), float32 or float64.
        iterations: of Newton and Schulz.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon, with its coefficients.
    """
    if matrix.shape[0] > matrix.shape[1]:  # A is then the smaller product
        return orthogonalized(matrix.T, iterations).T
    dtype = matrix.dtype
    xp = backend.namespace(matrix)
    in_order = matrix if matrix.flags.c_contiguous else matrix.T  # its reshape is a view
    norm = xp.sqrt(sum_of_squares(in_order.reshape(-1))).astype(dtype)
    x = matrix / (norm + dtype.type(1e-7))
    a, b, c = (dtype.type(coefficient) for coefficient in _COEFFICIENTS)
    for _ in range(iterations):
        square = product(x, x.T, dtype)
        x = a * x + product(b * square + c * product(square, square, dtype), x, dtype)
    return x
