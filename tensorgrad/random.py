"""Random tensors from one seeded generator, with equal bits on all devices.

    tensorgrad.random.seed(0)
    x = tensorgrad.random.normal((2, 3), device="cuda")

A generator is a seed, a stream and a count of draws. Each call takes one draw number, however
large its result, so what a call returns depends on the calls before it, but not on their shapes.
The functions of this module are the methods of `default`, the generator of layers and dropout.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tensorgrad import backend, philox
from tensorgrad.backend import Array
from tensorgrad.dtypes import (
    INTEGERS,
    Dtype,
    DtypeLike,
    as_dtype,
    bool_,
    float32,
    int64,
    is_float,
    uint64,
)
from tensorgrad.errors import ArgumentError, DtypeError
from tensorgrad.ops.operand import axis_index, float_tensor, shape_of
from tensorgrad.ops.reduce import argmax
from tensorgrad.philox import Key
from tensorgrad.tensor import Tensor

__all__ = [
    "Generator",
    "bernoulli",
    "categorical",
    "default",
    "get_state",
    "integers",
    "next_key",
    "normal",
    "permutation",
    "seed",
    "set_state",
    "uniform",
]

Shapes = int | Sequence[int]


class Generator:
    """A source of random tensors.

    Args:
        seed: 0 to 2^64 - 1.
        stream: 0 to 2^64 - 1; generators of one seed and different streams are independent. For
            numbers that shall differ from rank to rank, use the rank.

    Attributes:
        offset: None, or an array of one uint64 on the GPU that kernels add to the draw number;
            see `philox.Key`.

    Raises:
        ArgumentError: seed or stream is outside its range.
    """

    def __init__(self, seed: int = 0, stream: int = 0) -> None:
        self.offset: Array | None = None
        self.set_state({"seed": seed, "draw": 0, "stream": stream})

    def get_state(self) -> dict[str, int]:
        """Return all that decides the numbers to come, as plain integers."""
        return {"seed": self._seed, "draw": self._draw, "stream": self._stream}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Go on as the generator did from which `get_state` came.

        Raises:
            ArgumentError: the state is incomplete or has numbers outside 0 to 2^64 - 1.
        """
        found = []
        for name in ("seed", "draw", "stream"):
            try:
                number = operator.index(state.get(name, 0 if name == "stream" else -1))
            except TypeError:
                number = -1
            if not 0 <= number < 2**64:
                raise ArgumentError(
                    f"random: {name} is {state.get(name)!r:.80}, expected an integer from 0 to "
                    "2^64 - 1"
                )
            found.append(number)
        self._seed, self._draw, self._stream = found

    def next_key(self) -> Key:
        """Take a draw number for an op that makes its random numbers itself (see `philox`)."""
        key = Key(self._seed, self._draw, self._stream, self.offset)
        self._draw += 1
        return key

    def normal(
        self,
        shape: Shapes = (),
        mean: float = 0.0,
        std: float = 1.0,
        dtype: DtypeLike = float32,
        device: str = "cpu",
    ) -> Tensor:
        """Return numbers from the normal distribution with this mean and standard deviation.

        Raises:
            ArgumentError: std is negative, or mean or std is not finite.
            DtypeError: dtype is not a float.
        """
        if not (math.isfinite(mean) and 0 <= std < math.inf):
            raise ArgumentError(
                f"normal: mean is {mean} and std {std}, expected finite numbers and std >= 0"
            )
        y = _empty("normal", shape, _float_dtype("normal", dtype), device)
        philox.fill_normal(y, self.next_key(), mean, std)
        return Tensor(y)

    def uniform(
        self,
        shape: Shapes = (),
        low: float = 0.0,
        high: float = 1.0,
        dtype: DtypeLike = float32,
        device: str = "cpu",
    ) -> Tensor:
        """Return numbers from the uniform distribution over [low, high).

        Raises:
            ArgumentError: low is not less than high, or high - low is not finite.
            DtypeError: dtype is not a float.
        """
        if not 0 < high - low < math.inf:
            raise ArgumentError(
                f"uniform: low is {low} and high {high}, expected finite low < high"
            )
        y = _empty("uniform", shape, _float_dtype("uniform", dtype), device)
        philox.fill_uniform(y, self.next_key(), low, high)
        return Tensor(y)

    def integers(
        self,
        low: int,
        high: int | None = None,
        shape: Shapes = (),
        dtype: DtypeLike = int64,
        device: str = "cpu",
    ) -> Tensor:
        """Return integers from [low, high), or [0, low) without high, equally likely.

        Raises:
            ArgumentError: low is not less than high, or dtype does not hold them.
            DtypeError: dtype is not an integer dtype.
        """
        target = as_dtype(dtype)
        if target not in INTEGERS:
            raise DtypeError(f"integers: dtype is {target}, expected an integer dtype")
        low, high = (0, low) if high is None else (low, high)
        low, high = operator.index(low), operator.index(high)
        limits = np.iinfo(target)
        if not limits.min <= low < high <= int(limits.max) + 1:
            raise ArgumentError(
                f"integers: low is {low} and high {high}, expected {limits.min} <= low < high "
                f"<= {int(limits.max) + 1} for {target}"
            )
        y = _empty("integers", shape, target, device)
        philox.fill_integers(y, self.next_key(), low, high)
        return Tensor(y)

    def bernoulli(self, probability: float, shape: Shapes = (), device: str = "cpu") -> Tensor:
        """Return bools that are True with this probability (rounded to 1 / 2^32).

        Raises:
            ArgumentError: probability is outside [0, 1].
        """
        if not 0 <= probability <= 1:
            raise ArgumentError(f"bernoulli: probability is {probability}, expected 0 to 1")
        y = _empty("bernoulli", shape, bool_, device)
        philox.fill_bernoulli(y, self.next_key(), probability)
        return Tensor(y)

    def permutation(self, x: int | Tensor, device: str = "cpu") -> Tensor:
        """Return 0, ..., x - 1 in random order (int64), or a tensor with its rows in random order.

        Args:
            x: how many numbers, or a tensor whose first axis is shuffled as a whole.
            device: where the numbers shall be; a tensor stays where it is.

        Raises:
            ArgumentError: x is negative or a tensor without axes.
        """
        if isinstance(x, Tensor):
            if x.ndim == 0:
                raise ArgumentError("permutation: x has no axes, expected at least one")
            return x[self.permutation(x.shape[0], x.device)]
        if operator.index(x) < 0:
            raise ArgumentError(f"permutation: x is {x}, expected 0 or more")
        words = _empty("permutation", x, uint64, device)
        philox.fill_words(words, self.next_key())
        order = backend.namespace(words).argsort(words, kind="stable")
        return Tensor(order.astype(int64, copy=False))

    def categorical(self, logits: Any, axis: int = -1) -> Tensor:
        """Return indices along an axis, each with probability softmax(logits) (int64).

        The index of the largest logit after Gumbel noise was added to all of them, in float64.
        An index with logit -inf is never returned, unless all are.

        Args:
            logits: any float dtype.
            axis: the axis of the choices; it disappears.

        Raises:
            ArgumentError: logits has no such axis.
            DtypeError: logits are not floats.
            ShapeError: there are no choices.
        """
        tensor = float_tensor("categorical", "logits", logits)
        axis = axis_index("categorical", axis, tensor.ndim)
        array = backend.contiguous(tensor.data)
        return argmax(Tensor(philox.add_gumbel(array, self.next_key())), axis)


def seed(seed: int) -> None:
    """Start the default generator again: equal seeds give equal numbers.

    Raises:
        ArgumentError: seed is outside 0 to 2^64 - 1.
    """
    default.set_state({"seed": seed, "draw": 0})


def _empty(op: str, shape: Shapes, dtype: Dtype, device: str) -> Array:
    """Return an uninitialised array on a device named "cpu", "cuda" or "cuda:N"."""
    xp = np if backend.gpu_index(device) is None else backend.cupy
    y: Array = xp.empty(shape_of(op, shape), dtype)
    return y


def _float_dtype(op: str, dtype: DtypeLike) -> Dtype:
    found = as_dtype(dtype)
    if not is_float(found):
        raise DtypeError(f"{op}: dtype is {found}, expected a float dtype")
    return found


default = Generator()
get_state, set_state, next_key = default.get_state, default.set_state, default.next_key
normal, uniform, integers = default.normal, default.uniform, default.integers
bernoulli, permutation, categorical = default.bernoulli, default.permutation, default.categorical
