"""Muon. Tests: tests/optim/test_muon.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.checks import check_integer, check_range
from tensorgrad.errors import ArgumentError
from tensorgrad.ops.matmul import product
from tensorgrad.optim.clip import sum_of_squares
from tensorgrad.optim.flat import FlatParameters, Owned, Piece, Segment, zeros
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

    Where ranks shard parameters, the momentum is sharded too. A step gathers u of one segment after
    another (of a bucket in stage 1 of `Zero`, of a block in stages 2 and 3), 4 bytes a parameter in
    all, into memory of the size of a segment. A rank orthogonalizes the matrices that have elements
    in its shard: those that are cut between ranks are orthogonalized by each of these.

    Args:
        parameters: tensors with two axes, pairs (name, tensor), groups or flat parameters; see
            `Optimizer`.
        lr: learning rate.
        weight_decay: at least 0.
        momentum: in [0, 1).
        nesterov: use Nesterov's momentum.
        iterations: of Newton and Schulz, at least 1.
        match_adamw: False: scale = sqrt(max(1, rows / columns)). True: 0.2 sqrt(max(rows,
            columns)), so that updates are as large as AdamW's and its lr and weight_decay fit.

    Raises:
        ArgumentError: an option is outside its range, or a parameter is not a matrix.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; match_adamw: Liu et al.
        2025, arXiv:2502.16982, eq. 4.
    """

    matrices = True
    _decoupled = True

    def __init__(
        self,
        parameters: FlatParameters | Parameters,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
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
        self.momentum, self.nesterov, self.iterations = momentum, nesterov, iterations
        self.match_adamw = match_adamw

    @np.errstate(all="ignore")  # inf and NaN reach the parameters, as in the other optimizers
    def _update_all(self) -> None:
        """Update each matrix by array operations, which run alike on the CPU and in CUDA graphs."""
        for hyper, decay, _ in self._parts():
            hyper[STEPS : STEPS + 1] += hyper[FACTOR] != 0
            hyper[DECAY : DECAY + 1] = 1 - hyper[LR] * decay
        for hyper, _, number, segment, piece in self._segments():
            if self.flat.whole:  # one matrix after another, which takes less memory
                for part in self._owned(segment, piece):
                    u = self._direction(hyper, piece.grad_of(part), self.state["m"][part.state])
                    self._update(hyper, part, u)
                continue
            shard = zeros(piece.grad.size, self.state["m"].dtype, piece.grad)
            for run in self._active([piece]):
                place = slice(run.begin - piece.begin, run.begin - piece.begin + run.grad.size)
                shard[place] = self._direction(hyper, run.grad, self.state["m"][run.state])
            whole = self.flat.gather(number, shard)
            for part in self._owned(segment, piece):
                place = self.flat.slots[part.name].piece
                u = whole[place.start - segment.begin : place.stop - segment.begin]
                self._update(hyper, part, u)

    def _owned(self, segment: Segment, piece: Piece) -> Iterator[Owned]:
        """Yield this rank's parts of the matrices of a segment."""
        names = (name for name in segment.names if name not in self._idle)
        parts = (self.flat.owned_part(name, piece) for name in names)
        return (part for part in parts if part.data.size)

    def _direction(self, hyper: Array, grad: Array, m: Array) -> Array:
        """Update the momentum, unless the step is skipped; return what is orthogonalized."""
        xp, wide = backend.namespace(m), m.dtype
        taken = hyper[FACTOR] != 0  # read on the device: 0 skips the step
        g = xp.where(taken, grad * hyper[FACTOR].astype(wide), 0)
        mean = m + (g - m) * wide.type(1 - self.momentum)
        m[...] = xp.where(taken, mean, m)
        return g + (mean - g) * wide.type(self.momentum) if self.nesterov else mean

    def _update(self, hyper: Array, part: Owned, u: Array) -> None:
        """Update this rank's part of a matrix; u is of the whole matrix."""
        slot, wide = self.flat.slots[part.name], u.dtype
        rows, columns = slot.shape
        scale = 0.2 * math.sqrt(max(rows, columns)) if self.match_adamw else math.sqrt(
            max(1, rows / columns)
        )  # fmt: skip
        update = orthogonalized(u.reshape(slot.shape), self.iterations)
        step = update.reshape(-1)[part.values] * (hyper[LR] * scale).astype(wide)
        p = self.values(part)
        new = (p * hyper[DECAY].astype(wide) if self._decays[part.name] else p) - step
        self._assign(part, new, hyper[FACTOR] != 0)


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
    in_order = matrix if matrix.flags.c_contiguous else matrix.T  # of which reshape is a view
    norm = xp.sqrt(sum_of_squares(in_order.reshape(-1))).astype(dtype)
    x = matrix / (norm + dtype.type(1e-7))
    a, b, c = (dtype.type(each) for each in _COEFFICIENTS)
    for _ in range(iterations):
        square = product(x, x.T, dtype)
        x = a * x + product(b * square + c * product(square, square, dtype), x, dtype)
    return x
