"""Adafactor. Tests: tests/optim/test_adafactor.py."""

from __future__ import annotations

import math

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.arrays import sum_array
from tensorgrad.core.backend import Array
from tensorgrad.core.checks import check_number, check_range
from tensorgrad.core.dtypes import compute_dtype
from tensorgrad.core.errors import ArgumentError
from tensorgrad.optim.clip import sum_of_squares
from tensorgrad.optim.flat import Decays, FlatParameters, ParameterShard, cut
from tensorgrad.optim.groups import Parameters
from tensorgrad.optim.optimizer import DECAY, FACTOR, LR, STEPS, Optimizer, two_numbers


class Adafactor(Optimizer):
    """The gradient over its root mean square, which a row and a column of a matrix estimate.

    beta2 = 1 - t^beta2_decay
    row = beta2 * row + (1 - beta2) * mean of g^2 over the last axis
    column = beta2 * column + (1 - beta2) * mean of g^2 over the axis before it
    v = row * column / mean(row); of vectors and scalars v = beta2 * v + (1 - beta2) * g^2
    u = g / sqrt(v)
    u = u / max(1, rms(u) / d)
    p = p * (1 - lr * weight_decay) - max(eps2, rms(p)) * min(lr, 1 / sqrt(t)) * u

    rms is the root mean square over the parameter. For a matrix (R, C) the state is R + C numbers
    instead of the 2 R C of AdamW. Of parameters with more axes the last two are those of a matrix.

    Parameters are updated one after another, by array operations. Where ranks shard parameters, all
    keep the same state and each updates its shard: three all-reduces for a matrix, of R, C and 2
    numbers. Where ranks share layers, they put the squares of a divided parameter together, R C
    numbers, and keep the state of the whole one.

    Args:
        parameters: tensors, pairs (name, tensor), groups or flat parameters; see `Optimizer`.
        lr: learning rate, relative to the size of the parameters.
        beta2_decay: the exponent of beta2, at most 0.
        eps: eps1 and eps2, each at least 0. eps1 is the least root of v, and the least mean of a
            row; None: the machine epsilon of float32, or of float64 for such parameters. eps2 is
            the least root mean square of a parameter.
        d: the clipping threshold of the root mean square of an update, above 0.
        weight_decay: at least 0; of all parameters, unless `decay` says which.
        relative_step: whether the learning rate is at most 1 / sqrt(t).
        scale_parameter: whether the step is relative to the root mean square of the parameter.
        decay: (name, tensor) -> whether weight decay applies, such as `decays_matrices`; see
            `Optimizer`.

    Attributes:
        state: "row" and "column" of the parameters with two axes or more, "v" of the others.

    Raises:
        ArgumentError: an option is outside its range.

    Source: Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5; with PyTorch's meaning of
        eps1, and its place of weight decay.

    Example:
        >>> model = tg.nn.Linear(30, 20)
        >>> optimizer = tg.optim.Adafactor(model.named_parameters())
        >>> {kind: x.shape for kind, x in optimizer.state_dict().items() if "weight" in kind}
        {'row/weight': (20,), 'column/weight': (30,)}
    """

    _decoupled = True

    def __init__(
        self,
        parameters: FlatParameters | Parameters,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        relative_step: bool = True,
        scale_parameter: bool = True,
        decay: Decays | None = None,
    ) -> None:
        eps1, eps2 = two_numbers("Adafactor", "eps", eps, "eps")
        if eps1 is not None:
            check_range("Adafactor", "eps1", eps1)
        check_range("Adafactor", "eps2", eps2)
        check_number("Adafactor", "beta2_decay", beta2_decay)
        if not -math.inf < beta2_decay <= 0:
            raise ArgumentError(
                f"Adafactor: beta2_decay is {beta2_decay}, expected a finite number up to 0"
            )
        check_range("Adafactor", "d", d)
        if not d > 0:
            raise ArgumentError(f"Adafactor: d is {d}, expected a number above 0")
        super().__init__(parameters, lr, weight_decay, (), decay)
        self.beta2_decay, self.d, self.eps = beta2_decay, d, (eps1, eps2)
        self.relative_step, self.scale_parameter = relative_step, scale_parameter
        boxes = self.flat.boxes
        shapes = {name: boxes.shape(name, slot.shape) for name, slot in self.flat.slots.items()}
        factored = {n: shape for n, shape in shapes.items() if len(shape) > 1 and 0 not in shape}
        self._add_state("row", {n: shape[:-1] for n, shape in factored.items()})
        self._add_state("column", {n: shape[:-2] + shape[-1:] for n, shape in factored.items()})
        self._add_state("v", {n: shape for n, shape in shapes.items() if n not in factored})

    @np.errstate(all="ignore")  # inf and NaN reach the parameters, as in the other optimizers
    def _update_all(self) -> None:
        """Update each parameter; nothing here waits for the device."""
        for hyper, decay, _ in self._parts():
            hyper[STEPS : STEPS + 1] += hyper[FACTOR] != 0
            hyper[DECAY : DECAY + 1] = 1 - hyper[LR] * decay
        views = {kind: cut(self.state[kind], slots) for kind, slots in self.slots.items()}
        shards = {
            name: (hyper, shard)
            for hyper, _, _, bucket, shard in self._buckets()
            for name in bucket.names
        }
        for name in self.flat.parameters:  # in the model's order, the same on all ranks
            if math.prod(self.flat.slots[name].shape) and name not in self._idle:
                hyper, shard = shards[name]
                part = self.flat.parameter_shard(name, shard)
                state = {kind: found[name] for kind, found in views.items() if name in found}
                self._update(hyper, part, shard.grad_of(part), state)

    def _update(
        self, hyper: Array, part: ParameterShard, grad: Array, state: dict[str, Array]
    ) -> None:
        """Update this rank's part of a parameter, which may be empty, and its whole state."""
        xp, g = backend.namespace(grad), self._scaled(hyper, grad)
        p = self.values(part)
        v = self._second_moment(hyper, part, g, state)
        u = g / xp.sqrt(_at_least(v, self._eps1() ** 2))
        squares = backend.empty((2,), hyper.dtype, hyper)
        squares[0], squares[1] = sum_of_squares(p), sum_of_squares(u)
        self.flat.add_shards(squares)
        self.flat.boxes.add(part.name, squares)
        shape = self.flat.boxes.shape(part.name, self.flat.slots[part.name].shape)
        rms = xp.sqrt(squares / math.prod(shape))
        step = hyper[LR]
        if self.relative_step:
            step = xp.minimum(step, 1 / xp.sqrt(hyper[STEPS]))
        if self.scale_parameter:
            step = step * xp.maximum(rms[0], self.eps[1])
        step = step / xp.maximum(rms[1] / self.d, 1.0)
        self._subtract(hyper, part, p, u * step.astype(g.dtype))

    def _second_moment(
        self, hyper: Array, part: ParameterShard, g: Array, state: dict[str, Array]
    ) -> Array:
        """Update the state of a parameter; return v of this rank's part of it, 1-D."""
        shape, boxes = self.flat.slots[part.name].shape, self.flat.boxes
        whole = g
        if g.size < math.prod(shape):  # sharded: 0 where other ranks have elements
            whole = backend.empty((math.prod(shape),), g.dtype, g)
            whole.fill(0)
            whole[part.values] = g
        squares = boxes.join(part.name, (whole * whole).reshape(shape))
        if "v" in state:
            self.flat.add_shards(squares)
            self._average(hyper, state["v"], squares)
            return boxes.cut(part.name, state["v"]).reshape(-1)[part.values]
        row, column, shape = state["row"], state["column"], squares.shape
        rows, columns = sum_array(squares, (len(shape) - 1,)), sum_array(squares, (len(shape) - 2,))
        self.flat.add_shards(rows)
        self.flat.add_shards(columns)
        self._average(hyper, row, rows / shape[-1])
        self._average(hyper, column, columns / shape[-2])
        mean = sum_array(row, (row.ndim - 1,), keepdims=True) / shape[-2]
        scaled = column / _at_least(mean, self._eps1())
        v = boxes.cut(part.name, row[..., None] * scaled[..., None, :])
        return v.reshape(-1)[part.values]

    def _average(self, hyper: Array, state: Array, squares: Array) -> None:
        """Move a state towards the squares of this step, unless it is skipped."""
        xp = backend.namespace(state)
        weight = (hyper[STEPS] ** self.beta2_decay).astype(state.dtype)
        state[...] = xp.where(hyper[FACTOR] != 0, state + (squares - state) * weight, state)

    def _eps1(self) -> float:
        eps1 = self.eps[0]
        return float(np.finfo(compute_dtype(self.flat.dtype)).eps) if eps1 is None else eps1


def _at_least(array: Array, least: float) -> Array:
    """Return the maximum of an array and a number, which is at least the smallest normal one."""
    tiny = float(np.finfo(array.dtype).tiny)
    return backend.namespace(array).maximum(array, array.dtype.type(max(least, tiny)))
