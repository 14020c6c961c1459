"""Random tensors from one seeded generator, with equal bits on all devices.

    tensorgrad.random.seed(0)
    x = tensorgrad.random.normal(size=(2, 3), device="cuda")

Where numpy.random.Generator has the function, names and order of the arguments are NumPy's
(`loc, scale, size`; `low, high, size`); parameters of a distribution are numbers.

A generator is a seed, a stream and a count of draws. Each call takes one draw number, however
large its result, so what a call returns depends on the calls before it, but not on their shapes.
The functions of this module are the methods of `default`, the generator of layers and dropout.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorgrad.compat.omitted import missing as _missing
from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.checks import axis_index, check_flag, check_no_length, check_whole, shape_of
from tensorgrad.core.dtypes import (
    INTEGERS,
    Dtype,
    DtypeLike,
    as_dtype,
    bool_,
    float32,
    float64,
    int64,
    is_float,
    uint64,
)
from tensorgrad.core.errors import ArgumentError, DtypeError, GraphError, ShapeError
from tensorgrad.core.modes import mode
from tensorgrad.core.operands import float_tensor, tensor_of, values_of
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels.random import Key
from tensorgrad.ops import philox

__all__ = [
    "Generator",
    "bernoulli",
    "categorical",
    "choice",
    "default",
    "default_rng",
    "get_state",
    "integers",
    "next_key",
    "normal",
    "permutation",
    "permuted",
    "random",
    "seed",
    "set_state",
    "standard_normal",
    "uniform",
]

Shapes = int | Sequence[int]

_lock = threading.Lock()  # guards the states of all generators


class Generator:
    """A source of random tensors.

    Args:
        seed: 0 to 2^64 - 1.
        stream: 0 to 2^64 - 1; generators of one seed and different streams are independent. For
            numbers that differ from rank to rank, use the rank.

    Attributes:
        offset: None, or an array of one uint64 on the GPU that kernels add to the draw number;
            see `kernels.random.Key`.

    Raises:
        ArgumentError: seed or stream is outside its range.

    Example:
        >>> rng = tg.random.Generator(seed=0, stream=1)
        >>> rng.normal(size=(2, 3)).shape
        (2, 3)
    """

    def __init__(self, seed: int = 0, *, stream: int = 0) -> None:
        self.offset: Array | None = None
        self.set_state({"seed": seed, "draw": 0, "stream": stream})

    def get_state(self) -> dict[str, int]:
        """Return the state that determines all further numbers.

        Returns:
            The integers "seed", "draw" (how many draws were made) and "stream".

        Example:
            >>> tg.manual_seed(7)
            >>> tg.random.get_state()
            {'seed': 7, 'draw': 0, 'stream': 0}
        """
        with _lock:
            return {"seed": self._seed, "draw": self._draw, "stream": self._stream}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Continue from a state that `get_state` returned.

        Args:
            state: integers from 0 to 2^64 - 1 under "seed", "draw" and "stream" (default 0).

        Raises:
            ArgumentError: the state is incomplete or has other numbers.

        Example:
            >>> tg.random.set_state({"seed": 0, "draw": 1})
            >>> tg.random.integers(100, size=3)
            tensor([21, 21, 75], dtype=int64)
        """
        if not isinstance(state, Mapping):
            raise ArgumentError(f"set_state: state is {state!r:.80}, expected that of get_state()")
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
        with _lock:
            self._seed, self._draw, self._stream = found

    def next_key(self) -> Key:
        """Take a draw number for an op that generates its own random numbers (see `philox`).

        Each call gets another one, in whichever thread.

        Returns:
            The seed, draw number, stream and offset from which kernels compute their numbers.

        Raises:
            GraphError: a step is being captured whose replays would draw the same numbers again.

        Example:
            >>> tg.manual_seed(7)
            >>> key = tg.random.next_key()
            >>> key.seed, key.draw, tg.random.get_state()["draw"]
            (7, 0, 1)
        """
        if mode.capture is not None and self.offset is None:
            raise GraphError(
                "random: a captured step draws from a generator of its own, expected the default "
                "one: replays count only its draws on"
            )
        with _lock:
            key = Key(self._seed, self._draw, self._stream, self.offset)
            self._draw = (self._draw + 1) % 2**64
        return key

    def normal(
        self,
        loc: float = 0.0,
        scale: float = 1.0,
        size: Shapes | None = None,
        *,
        dtype: DtypeLike = float32,
        device: str = "cpu",
    ) -> Tensor:
        """Return numbers from the normal distribution.

        Args:
            loc: the mean.
            scale: the standard deviation.
            size: the shape; default (), one number.
            dtype: a float dtype.
            device: "cpu", "cuda" or "cuda:N".

        Returns:
            A tensor of the shape `size`.

        Raises:
            ArgumentError: scale is negative, or loc or scale is not a finite number.
            DtypeError: dtype is not a float.

        Example:
            >>> x = tg.random.normal(10.0, 0.1, size=1000)
            >>> round(float(x.mean()), 1), round(float(x.std()), 1)
            (10.0, 0.1)
        """
        _check_parameters("normal", loc=loc, scale=scale)
        if not (math.isfinite(loc) and 0 <= scale < math.inf):
            raise ArgumentError(
                f"normal: loc is {loc} and scale {scale}, expected finite numbers and scale >= 0"
            )
        y = _empty("normal", size, _float_dtype("normal", dtype), device)
        return self._filled(philox.fill_normal, y, loc, scale)

    def uniform(
        self,
        low: float = 0.0,
        high: float = 1.0,
        size: Shapes | None = None,
        *,
        dtype: DtypeLike = float32,
        device: str = "cpu",
    ) -> Tensor:
        """Return numbers from the uniform distribution over [low, high).

        Args:
            low: the least number.
            high: the limit above.
            size: the shape; default (), one number.
            dtype: a float dtype.
            device: "cpu", "cuda" or "cuda:N".

        Returns:
            A tensor of the shape `size`.

        Raises:
            ArgumentError: low is not less than high, or high - low is not a finite number.
            DtypeError: dtype is not a float.

        Example:
            >>> x = tg.random.uniform(-1.0, 1.0, size=(2, 500))
            >>> x.shape, bool((x >= -1).all()), bool((x < 1).all())
            ((2, 500), True, True)
        """
        _check_parameters("uniform", low=low, high=high)
        if not 0 < high - low < math.inf:
            raise ArgumentError(
                f"uniform: low is {low} and high {high}, expected finite low < high"
            )
        y = _empty("uniform", size, _float_dtype("uniform", dtype), device)
        return self._filled(philox.fill_uniform, y, low, high)

    def random(
        self, size: Shapes | None = None, dtype: DtypeLike = float32, *, device: str = "cpu"
    ) -> Tensor:
        """Return numbers from the uniform distribution over [0, 1).

        Args:
            size: the shape; default (), one number.
            dtype: a float dtype.
            device: "cpu", "cuda" or "cuda:N".

        Returns:
            A tensor of the shape `size`.

        Raises:
            DtypeError: dtype is not a float.

        Example:
            >>> x = tg.random.random((2, 3))
            >>> x.shape, 0 <= float(x.min()) <= float(x.max()) < 1
            ((2, 3), True)
        """
        check_no_length("random", "size", dtype)
        return self.uniform(0.0, 1.0, size, dtype=dtype, device=device)

    def standard_normal(
        self, size: Shapes | None = None, dtype: DtypeLike = float32, *, device: str = "cpu"
    ) -> Tensor:
        """Return numbers from the normal distribution of mean 0 and variance 1.

        Args:
            size: the shape; default (), one number.
            dtype: a float dtype.
            device: "cpu", "cuda" or "cuda:N".

        Returns:
            A tensor of the shape `size`.

        Raises:
            DtypeError: dtype is not a float.

        Example:
            >>> x = tg.random.standard_normal((2, 3), "float64")
            >>> x.shape, x.dtype
            ((2, 3), dtype('float64'))
        """
        check_no_length("standard_normal", "size", dtype)
        return self.normal(0.0, 1.0, size, dtype=dtype, device=device)

    def integers(
        self,
        low: int,
        high: int | None = None,
        size: Shapes | None = None,
        dtype: DtypeLike = int64,
        *,
        device: str = "cpu",
    ) -> Tensor:
        """Return equally likely integers.

        Args:
            low: the least integer; without `high` the limit above, and the least is 0.
            high: the limit above, which is not returned.
            size: the shape; default (), one integer.
            dtype: an integer dtype.
            device: "cpu", "cuda" or "cuda:N".

        Returns:
            A tensor of the shape `size`.

        Raises:
            ArgumentError: low is not less than high, one of them is not an integer, or dtype does
                not hold them.
            DtypeError: dtype is not an integer dtype.

        Example:
            >>> dice = tg.random.integers(1, 7, size=1000)
            >>> int(dice.min()), int(dice.max()), dice.dtype
            (1, 6, dtype('int64'))
        """
        check_no_length("integers", "size", dtype)
        target = as_dtype(dtype)
        if target not in INTEGERS:
            raise DtypeError(f"integers: dtype is {target}, expected an integer dtype")
        check_whole("integers", "low", low)
        if high is not None:
            check_whole("integers", "high", high)
        low, high = (0, low) if high is None else (low, high)
        low, high = operator.index(low), operator.index(high)
        limits = np.iinfo(target)
        if not limits.min <= low < high <= int(limits.max) + 1:
            raise ArgumentError(
                f"integers: low is {low} and high {high}, expected {limits.min} <= low < high "
                f"<= {int(limits.max) + 1} for {target}"
            )
        y = _empty("integers", size, target, device)
        return self._filled(philox.fill_integers, y, low, high)

    def bernoulli(
        self, probability: float, size: Shapes | None = None, *, device: str = "cpu"
    ) -> Tensor:
        """Return bools that are True with this probability (rounded to 1 / 2^32).

        Args:
            probability: from 0 to 1.
            size: the shape; default (), one bool.
            device: "cpu", "cuda" or "cuda:N".

        Returns:
            Bools of the shape `size`.

        Raises:
            ArgumentError: probability is not a number in [0, 1].

        Example:
            >>> heads = tg.random.bernoulli(0.5, size=1000)
            >>> heads.dtype, 400 < int(heads.sum()) < 600
            (dtype('bool'), True)
        """
        _check_parameters("bernoulli", probability=probability)
        if not 0 <= probability <= 1:
            raise ArgumentError(f"bernoulli: probability is {probability}, expected 0 to 1")
        y = _empty("bernoulli", size, bool_, device)
        return self._filled(philox.fill_bernoulli, y, probability)

    def permutation(self, x: Any, axis: int = 0, *, device: str = "cpu") -> Tensor:
        """Return 0, ..., x - 1 in random order, or the slices of an array in random order.

        Args:
            x: how many numbers, or a tensor or array, which stays on its device.
            axis: the axis of x that is shuffled as a whole.
            device: where the numbers are placed: "cpu", "cuda" or "cuda:N".

        Returns:
            int64 of the shape (x,), or the shape and dtype of the array.

        Raises:
            ArgumentError: x is negative, or has no such axis.
            DtypeError: x is neither an integer, a tensor nor an array.

        Example:
            >>> order = tg.random.permutation(5)
            >>> sorted(order.tolist())
            [0, 1, 2, 3, 4]
        """
        if isinstance(x, Tensor) or backend.is_array(x):
            tensor = _with_axes("permutation", "x", x)
            axis = axis_index("permutation", axis, tensor.ndim)
            order = self.permutation(tensor.shape[axis], device=tensor.device)
            return tensor.take(order, axis)
        if not isinstance(x, (int, np.integer)):
            raise DtypeError(
                f"permutation: x is a {type(x).__name__}, expected an integer, tensor or array"
            )
        if x < 0:
            raise ArgumentError(f"permutation: x is {x}, expected 0 or more")
        return self._order(_empty("permutation", int(x), uint64, device))

    def permuted(self, x: Any, *, axis: int | None = None) -> Tensor:
        """Return the elements along an axis in random order, each row in one of its own.

        Args:
            x: a tensor or array with at least one axis, any dtype; it stays on its device.
            axis: the axis along which elements move; None: all elements move anywhere.

        Returns:
            The shape and dtype of x.

        Raises:
            ArgumentError: x has no axes, or not this one.

        Example:
            >>> rows = tg.random.permuted(np.array([[1, 2, 3], [4, 5, 6]]), axis=1)
            >>> [sorted(row) for row in rows.tolist()]
            [[1, 2, 3], [4, 5, 6]]
        """
        tensor = _with_axes("permuted", "x", x)
        if axis is None:
            return self.permutation(tensor.ravel()).reshape(tensor.shape)
        axis = axis_index("permuted", axis, tensor.ndim)
        words = backend.empty(tensor.shape, uint64, tensor.data)
        return tensor.gather(axis, self._order(words, axis))

    def choice(
        self,
        a: Any,
        size: Shapes | None = None,
        replace: bool = True,
        p: Any = None,
        axis: int = 0,
        *,
        device: str = "cpu",
    ) -> Tensor:
        """Return random slices of an array, or integers from [0, a).

        Args:
            a: how many integers, or a tensor or array, which stays on its device.
            size: the shape of the choices; default (), one.
            replace: whether a slice may be chosen again.
            p: (N,), the probability of each of the N slices, which are divided by their sum;
                default: all are equally likely.
            axis: the axis of a whose slices are chosen.
            device: where integers are placed: "cpu", "cuda" or "cuda:N".

        Returns:
            int64 of the shape `size`, or a with `size` in the place of the axis.

        Raises:
            ArgumentError: there is nothing to choose from, or without `replace` too little; on the
                CPU also where p holds a negative number or NaN.
            ShapeError: p does not have N elements.
            DtypeError: a is neither an integer, a tensor nor an array.

        Example:
            >>> tg.random.choice(np.array([10, 20, 30]), size=4, p=[0, 1, 0])
            tensor([20, 20, 20, 20], dtype=int64)
        """
        check_flag("choice", "replace", replace)
        shape = () if size is None else shape_of("choice", size, "size")
        wanted = math.prod(shape)
        if isinstance(a, Tensor) or backend.is_array(a):
            tensor = _with_axes("choice", "a", a)
            axis = axis_index("choice", axis, tensor.ndim)
            index = self.choice(tensor.shape[axis], shape, replace, p, device=tensor.device)
            return tensor.take(index, axis)
        if not isinstance(a, (int, np.integer)):
            raise DtypeError(f"choice: a is a {type(a).__name__}, expected an integer, tensor or "
                             "array")  # fmt: skip
        if a < 1 and wanted:
            raise ArgumentError(f"choice: a has {a} slices, expected at least one to choose from")
        if not replace and wanted > a:
            raise ArgumentError(f"choice: size is {size} without replace, expected at most {a}")
        if p is not None:
            return self._weighted_choice(int(a), shape, replace, p, device)
        if replace:
            return self.integers(0, max(1, int(a)), shape, device=device)
        return self.permutation(int(a), device=device)[:wanted].reshape(shape)

    def _filled(self, fill: Callable[..., None], y: Array, *parameters: float) -> Tensor:
        """Return an array that one of philox's functions has filled."""
        fill(y, self.next_key(), *parameters)
        return Tensor(y)

    def _order(self, words: Array, axis: int = -1) -> Tensor:
        """Return the order along an axis of the random bits that are written to an array."""
        self._filled(philox.fill_words, words)
        order = backend.namespace(words).argsort(words, axis=axis, kind="stable")
        return Tensor(order.astype(int64, copy=False))

    def _weighted_choice(
        self, count: int, shape: tuple[int, ...], replace: bool, p: Any, device: str
    ) -> Tensor:
        """Return integers from [0, count) with probabilities: by inversion, or the Gumbel trick."""
        weights = p.data if isinstance(p, Tensor) else values_of("choice", "p", p, float64)
        weights = backend.to_device(weights, device).astype(float64)
        if weights.shape != (count,):
            raise ShapeError(f"choice: p has shape {weights.shape}, expected ({count},)")
        wanted, xp = math.prod(shape), backend.namespace(weights)
        if backend.is_numpy(weights):
            if not (weights >= 0).all() or not 0 < weights.sum() < math.inf:
                raise ArgumentError(
                    f"choice: p sums to {weights.sum()}, expected numbers >= 0 of a finite sum"
                )
            if not replace and wanted > (weights > 0).sum():
                raise ArgumentError(f"choice: p has {(weights > 0).sum()} numbers above 0, "
                                    f"expected {wanted} without replace")  # fmt: skip
        if not replace:
            with np.errstate(divide="ignore"):
                noisy = philox.add_gumbel(xp.log(weights), self.next_key())
            return Tensor(xp.argsort(-noisy, kind="stable")[:wanted].reshape(shape))
        sums = xp.cumsum(weights)
        places = self.random(shape, "float64", device=device).data * sums[-1]
        index = xp.searchsorted(sums, places.reshape(-1), side="right").reshape(shape)
        return Tensor(xp.minimum(index, count - 1).astype(int64, copy=False))

    def categorical(self, logits: Any, *, axis: int = -1) -> Tensor:
        """Return indices along an axis, each with probability softmax(logits).

        The index of the largest logit after Gumbel noise was added to all of them, in float64.
        An index with logit -inf is never returned, unless all are.

        Args:
            logits: any float dtype.
            axis: the axis of the choices; it disappears.

        Returns:
            int64 of the shape of logits without the axis.

        Raises:
            ArgumentError: logits has no such axis.
            DtypeError: logits are not floats.
            ShapeError: there are no choices.

        Example:
            >>> tg.random.categorical(np.array([[0.0, 99.0, 0.0], [99.0, 0.0, 0.0]]))
            tensor([1, 0], dtype=int64)
        """
        tensor = float_tensor("categorical", "logits", logits)
        axis = axis_index("categorical", axis, tensor.ndim)
        array = backend.contiguous(tensor.data)
        return Tensor(philox.add_gumbel(array, self.next_key())).argmax(axis)


def default_rng(seed: int = 0) -> Generator:
    """Return a generator of its own state, which draws nothing from the default one.

    Args:
        seed: 0 to 2^64 - 1. Unlike NumPy, no seed is seed 0: programs give equal numbers unless
            they ask for others.

    Returns:
        A generator of stream 0.

    Raises:
        ArgumentError: seed is outside its range.

    Example:
        >>> rng = tg.random.default_rng(0)
        >>> rng.standard_normal((2, 3)).shape
        (2, 3)
    """
    return Generator(seed)


def seed(seed: int) -> None:
    """Start the default generator again: equal seeds give equal numbers.

    Args:
        seed: 0 to 2^64 - 1.

    Raises:
        ArgumentError: seed is outside its range.
        GraphError: in a captured step, whose replays would not seed.

    Example:
        >>> tg.manual_seed(0)  # the same function as tg.random.seed
        >>> tg.random.integers(100, size=3)
        tensor([ 1, 24, 11], dtype=int64)
        >>> tg.random.seed(0)
        >>> tg.random.integers(100, size=3)
        tensor([ 1, 24, 11], dtype=int64)
    """
    if mode.capture is not None:
        raise GraphError("random.seed: called in a captured step, expected it before the step")
    default.set_state({"seed": seed, "draw": 0})


def _with_axes(op: str, name: str, value: Any) -> Tensor:
    """Return an operand as a tensor, which must have an axis."""
    tensor = tensor_of(op, name, value)
    if tensor.ndim == 0:
        raise ArgumentError(f"{op}: {name} has no axes, expected at least one")
    return tensor


def _empty(op: str, size: Shapes | None, dtype: Dtype, device: str) -> Array:
    """Return an uninitialised array on a device named "cpu", "cuda" or "cuda:N"."""
    shape = () if size is None else shape_of(op, size, "size")
    return backend.namespace_on(device).empty(shape, dtype)


def _check_parameters(op: str, **parameters: Any) -> None:
    """Raise ArgumentError unless the parameters of a distribution are numbers."""
    for name, value in parameters.items():
        if not isinstance(value, (int, float, np.integer, np.floating)):
            raise ArgumentError(
                f"{op}: {name} is {value!r}, expected a number; give the shape as size=..."
            )


def _float_dtype(op: str, dtype: DtypeLike) -> Dtype:
    check_no_length(op, "size", dtype)
    found = as_dtype(dtype)
    if not is_float(found):
        raise DtypeError(f"{op}: dtype is {found}, expected a float dtype")
    return found


default = Generator()
get_state, set_state, next_key = default.get_state, default.set_state, default.next_key
normal, uniform, integers = default.normal, default.uniform, default.integers
random, standard_normal, permuted = default.random, default.standard_normal, default.permuted
bernoulli, permutation, categorical = default.bernoulli, default.permutation, default.categorical
choice = default.choice

if not TYPE_CHECKING:  # to a type checker every name would exist

    def __getattr__(name: str) -> Any:
        raise _missing(__name__, name)
