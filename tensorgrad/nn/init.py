"""Initialization of parameters, in place, with PyTorch's names and formulas.

All draw from `tensorgrad.random`, so its seed decides every value, on every device.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tensorgrad import random
from tensorgrad.core import backend
from tensorgrad.core.errors import ArgumentError, ShapeError
from tensorgrad.core.modes import replaced
from tensorgrad.core.nodes import assign
from tensorgrad.core.record import no_grad
from tensorgrad.core.tensor import Tensor

__all__ = [
    "constant_",
    "empty",
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "on",
    "ones_",
    "skipped",
    "uniform_",
    "without_values",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
]


class _Chosen(threading.local):
    """How this thread initializes tensors.

    Attributes:
        device: where; None: on that of the tensor.
        skips: whether to draw no random values.
        has_values: whether new parameters have values, and the memory for them.
    """

    device: str | None = None
    skips: bool = False
    has_values: bool = True


_chosen = _Chosen()


@contextmanager
def on(device: str) -> Iterator[None]:
    """Initialize tensors on a device in the `with` block; they stay there.

        with nn.init.on("cuda"):
            model = GPT2(config)  # faster than drawing on the host and copying
        model.to("cuda")  # moves the parameters that `init` does not fill, as those of norms

    Args:
        device: "cpu", "cuda" or "cuda:N".

    Raises:
        DeviceError: the device does not exist.

    Example:
        >>> with tg.nn.init.on("cpu"):
        ...     layer = tg.nn.Linear(2, 3)
        >>> layer.weight.device
        'cpu'
    """
    index = backend.gpu_index(device)
    with replaced(_chosen, device="cpu" if index is None else f"cuda:{index}"):
        yield


@contextmanager
def skipped() -> Iterator[None]:
    """Draw no random values in the `with` block: for a model whose weights are loaded next.

    Tensors keep what they had, which in new parameters is undefined.

    Example:
        >>> with tg.nn.init.skipped():
        ...     y = tg.nn.init.normal_(tg.ones(2))
        >>> y
        tensor([1., 1.], dtype=float32)
    """
    with replaced(_chosen, skips=True):
        yield


@contextmanager
def without_values() -> Iterator[None]:
    """Make parameters in the `with` block that have a shape alone, and take no memory.

    A model of any size can then be counted. Layers get this by `init.empty`.

    Example:
        >>> with tg.nn.init.without_values():
        ...     layer = tg.nn.Linear(10**6, 10**6)
        >>> layer.weight.shape
        (1000000, 1000000)
    """
    with replaced(_chosen, skips=True, has_values=False):
        yield


def empty(*shape: int) -> np.ndarray[Any, Any]:
    """Return an array for a new parameter, whose values are not defined yet.

    Args:
        *shape: the lengths, integers.

    Returns:
        An array of NumPy, float32; inside `without_values` it takes no memory and is read-only.

    Example:
        >>> tg.nn.init.empty(2, 3).shape
        (2, 3)
    """
    if _chosen.has_values:
        return np.empty(shape, np.float32)
    return np.broadcast_to(np.float32(0), shape)


def constant_(tensor: Tensor, value: float) -> Tensor:
    """Fill with one value.

    Args:
        tensor: any shape and dtype; changed.
        value: a number.

    Returns:
        The tensor itself.

    Example:
        >>> tg.nn.init.constant_(tg.zeros(2), 0.5)
        tensor([0.5, 0.5], dtype=float32)
    """
    return _fill(tensor, value)


def zeros_(tensor: Tensor) -> Tensor:
    """Fill with 0.

    Args:
        tensor: any shape and dtype; changed.

    Returns:
        The tensor itself.

    Example:
        >>> tg.nn.init.zeros_(tg.ones(2))
        tensor([0., 0.], dtype=float32)
    """
    return _fill(tensor, 0)


def ones_(tensor: Tensor) -> Tensor:
    """Fill with 1.

    Args:
        tensor: any shape and dtype; changed.

    Returns:
        The tensor itself.

    Example:
        >>> tg.nn.init.ones_(tg.zeros(2))
        tensor([1., 1.], dtype=float32)
    """
    return _fill(tensor, 1)


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Fill from the normal distribution with this mean and standard deviation.

    Args:
        tensor: any shape, any float dtype; changed.
        mean: a number.
        std: from 0.

    Returns:
        The tensor itself.

    Example:
        >>> tg.manual_seed(0)
        >>> w = tg.nn.init.normal_(tg.empty((100, 100)), 3.0, 0.5)
        >>> round(w.mean().item(), 1), round(w.std().item(), 1)
        (3.0, 0.5)
    """
    return _draw(random.normal, tensor, mean, std)


def uniform_(tensor: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Fill from the uniform distribution over [low, high).

    Args:
        tensor: any shape, any float dtype; changed.
        low, high: the bounds, numbers.

    Returns:
        The tensor itself.

    Example:
        >>> tg.manual_seed(0)
        >>> w = tg.nn.init.uniform_(tg.empty((100, 100)), -1.0, 1.0)
        >>> round(w.min().item(), 1), round(w.max().item(), 1)
        (-1.0, 1.0)
    """
    return _draw(random.uniform, tensor, low, high)


def xavier_uniform_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Fill uniformly with standard deviation gain * sqrt(2 / (fan_in + fan_out)).

    Args:
        tensor: (out, in), or (out, in, ...) for a kernel; any float dtype; changed.
        gain: a factor.

    Returns:
        The tensor itself.

    Raises:
        ShapeError: tensor has fewer than two axes.
    Source: Glorot & Bengio 2010, "Understanding the difficulty of training deep feedforward
        neural networks", eq. 16.

    Example:
        >>> tg.manual_seed(0)
        >>> w = tg.nn.init.xavier_uniform_(tg.empty((100, 100)))
        >>> round(w.std().item(), 2)
        0.1
    """
    bound = math.sqrt(3) * _xavier_std("xavier_uniform_", tensor, gain)
    return uniform_(tensor, -bound, bound)


def xavier_normal_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Fill normally with standard deviation gain * sqrt(2 / (fan_in + fan_out)).

    Args:
        tensor, gain: as for `xavier_uniform_`.

    Returns:
        The tensor itself.

    Raises:
        ShapeError: tensor has fewer than two axes.

    Example:
        >>> tg.manual_seed(0)
        >>> w = tg.nn.init.xavier_normal_(tg.empty((100, 100)), gain=2.0)
        >>> round(w.std().item(), 2)
        0.2
    """
    return normal_(tensor, 0, _xavier_std("xavier_normal_", tensor, gain))


def kaiming_uniform_(tensor: Tensor, a: float = 0.0, *, mode: str = "fan_in") -> Tensor:
    """Fill uniformly with standard deviation sqrt(2 / ((1 + a^2) * fan)), for (leaky) ReLU.

    Args:
        tensor: (out, in), or (out, in, ...) for a kernel; any float dtype; changed.
        a: derivative of the following leaky ReLU below 0; sqrt(5) is the default of `Linear`.
        mode: "fan_in" keeps the variance of the activations, "fan_out" that of the gradients.

    Returns:
        The tensor itself.

    Raises:
        ShapeError: tensor has fewer than two axes.
        ArgumentError: another mode.
    Source: He et al. 2015, arXiv:1502.01852, eq. 10 and 14.

    Example:
        >>> tg.manual_seed(0)
        >>> w = tg.nn.init.kaiming_uniform_(tg.empty((100, 200)))
        >>> round(w.std().item(), 1)
        0.1
    """
    bound = math.sqrt(3) * _kaiming_std("kaiming_uniform_", tensor, a, mode)
    return uniform_(tensor, -bound, bound)


def kaiming_normal_(tensor: Tensor, a: float = 0.0, *, mode: str = "fan_in") -> Tensor:
    """Fill normally with standard deviation sqrt(2 / ((1 + a^2) * fan)), for (leaky) ReLU.

    Args:
        tensor, a, mode: as for `kaiming_uniform_`.

    Returns:
        The tensor itself.

    Raises:
        ShapeError: tensor has fewer than two axes.
        ArgumentError: another mode.

    Example:
        >>> tg.manual_seed(0)
        >>> w = tg.nn.init.kaiming_normal_(tg.empty((200, 100)), mode="fan_out")
        >>> round(w.std().item(), 1)
        0.1
    """
    return normal_(tensor, 0, _kaiming_std("kaiming_normal_", tensor, a, mode))


def _draw(distribution: Callable[..., Tensor], tensor: Tensor, *parameters: float) -> Tensor:
    """Fill with random values of a distribution, unless these are skipped."""
    if _chosen.skips:
        return tensor
    device = _chosen.device or tensor.device
    drawn = distribution(*parameters, tensor.shape, dtype=tensor.dtype, device=device)
    return _fill(tensor, drawn.data)


def _fill(tensor: Tensor, value: Any) -> Tensor:
    if not _chosen.has_values:
        return tensor
    if _chosen.device in (None, tensor.device):
        with no_grad():
            assign(tensor, ..., value)
    else:
        whole = value if backend.is_array(value) else np.full(tensor.shape, value, tensor.dtype)
        tensor.data = backend.to_device(whole, _chosen.device)
    return tensor


def _fans(name: str, tensor: Tensor) -> tuple[int, int]:
    """Return fan_in, the inputs of one output, and fan_out, the outputs of one input."""
    if tensor.ndim < 2:
        raise ShapeError(f"{name}: tensor has shape {tensor.shape}, expected (out, in, ...)")
    field = math.prod(tensor.shape[2:])
    return tensor.shape[1] * field, tensor.shape[0] * field


def _xavier_std(name: str, tensor: Tensor, gain: float) -> float:
    return gain * math.sqrt(2 / max(1, sum(_fans(name, tensor))))


def _kaiming_std(name: str, tensor: Tensor, a: float, mode: str) -> float:
    fan_in, fan_out = _fans(name, tensor)
    if mode not in ("fan_in", "fan_out"):
        raise ArgumentError(f"{name}: mode is {mode!r}, expected 'fan_in' or 'fan_out'")
    return math.sqrt(2 / ((1 + a * a) * max(1, fan_in if mode == "fan_in" else fan_out)))
