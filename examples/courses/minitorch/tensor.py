"""Tensors of minitorch: each holds a tensor of tensorgrad, and the history of minitorch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import tensorgrad as tg
from minitorch import tensor_functions as functions
from minitorch.arithmetic import Arithmetic
from minitorch.autodiff import Function, History, backpropagate
from minitorch.tensor_data import TensorData, UserIndex
from minitorch.tensor_ops import SimpleBackend, TensorBackend

__all__ = [
    "Tensor", "grad_central_difference", "grad_check", "ones", "ones_tensor_from_numpy", "rand",
    "tensor", "tensor_from_numpy", "zeros", "zeros_tensor_from_numpy",
]  # fmt: skip


class Tensor(Arithmetic):
    """A tensor that remembers how it was computed.

    Args:
        v: its values: `TensorData`, or a tensor of tensorgrad.
        back: its history; default: none, a constant.
        name: for messages; default: its id.
        backend: where it lives.

    Attributes:
        value: the tensor of tensorgrad, without a graph.
    """

    def __init__(
        self,
        v: TensorData | tg.Tensor,
        back: History | None = None,
        name: str | None = None,
        backend: TensorBackend | None = None,
    ) -> None:
        super().__init__(back, name)
        self.backend = SimpleBackend if backend is None else backend
        value = tg.tensor(v.array) if isinstance(v, TensorData) else v.detach()
        self.value = value.to(self.backend.device)

    @property
    def f(self) -> TensorBackend:
        """The backend."""
        return self.backend

    @property
    def _tensor(self) -> TensorData:
        return TensorData.from_array(self.value.numpy())

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the axes."""
        return self.value.shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.value.size

    @property
    def dims(self) -> int:
        """The number of axes."""
        return self.value.ndim

    def to_numpy(self) -> Any:
        """Return the values as an array of NumPy."""
        return np.array(self.value.numpy())

    def item(self) -> Any:
        """Return the only element."""
        return self.value.item()

    @staticmethod
    def make(
        storage: Any,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        backend: TensorBackend | None = None,
    ) -> Tensor:
        """Return a constant with this storage."""
        return Tensor(TensorData(storage, shape, strides), backend=backend)

    def zeros(self, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return zeros of a shape; default: the tensor's own."""
        shape = self.shape if shape is None else shape
        return self._wrap(tg.zeros(shape, self.value.dtype, device=self.backend.device))

    def tuple(self) -> Any:
        """Return storage, shape and strides."""
        return self._tensor.tuple()

    def _new(self, tensor_data: TensorData) -> Tensor:
        return Tensor(tensor_data, backend=self.backend)

    def _wrap(self, value: tg.Tensor) -> Tensor:
        return Tensor(value, backend=self.backend)

    def _type_(self, backend: TensorBackend) -> None:
        self.backend = backend
        self.value = self.value.to(backend.device)

    def _ensure(self, b: Any) -> Tensor:
        if not isinstance(b, Tensor):
            return self._wrap(b if isinstance(b, tg.Tensor) else tg.tensor([b], self.value.dtype))
        b._type_(self.backend)
        return b

    def _fit(self, gradient: Any) -> Tensor:
        return self.expand(self._ensure(gradient))

    def __matmul__(self, b: Tensor) -> Tensor:
        return self._apply(functions.MatMul, b)

    def is_close(self, y: Tensor) -> Tensor:
        """Return 1.0 where the difference is below 0.01, otherwise 0.0."""
        return self._zip(functions.IsClose, y)

    def all(self, dim: int | None = None) -> Tensor:
        """Return the product over an axis, which stays with length 1; or over all, (1,)."""
        return self._reduced(functions.All, dim)

    def sum(self, dim: int | None = None) -> Tensor:
        """Return the sum over an axis, which stays with length 1; or over all, (1,)."""
        return self._reduced(functions.Sum, dim)

    def mean(self, dim: int | None = None) -> Tensor:
        """Return the mean over an axis, which stays with length 1; or over all, (1,)."""
        return self.sum(dim) / float(self.size if dim is None else self.shape[dim])

    def var(self, dim: int | None = None) -> Tensor:
        """Return the variance over an axis, which stays with length 1; or over all, (1,)."""
        difference = self - self.mean(dim)
        return (difference * difference).mean(dim)

    def _reduced(self, function: type[Function], dim: int | None) -> Tensor:
        x = self.view(self.size) if dim is None else self
        return x._apply(function, dim or 0)

    def permute(self, *order: int) -> Tensor:
        """Return the tensor with its axes in another order."""
        return self._apply(functions.Permute, order)

    def view(self, *shape: int) -> Tensor:
        """Return the tensor in another shape; unlike minitorch's, permuted tensors are copied."""
        return self._apply(functions.View, shape)

    def contiguous(self) -> Tensor:
        """Return a copy in C order."""
        return self._apply(functions.Copy)

    def attn_softmax(self, mask: Tensor) -> Tensor:
        """Return the softmax of x + mask over the last axis, by the fused kernel."""
        return self._zip(functions.Attn_Softmax, mask)

    def layernorm(self, gamma: Tensor, beta: Tensor) -> Tensor:
        """Return x normalised over its last axis, times gamma, plus beta, by the fused kernel."""
        return self._apply(functions.LayerNorm, self._ensure(gamma), self._ensure(beta))

    def __getitem__(self, key: int | Sequence[int]) -> Any:
        return self._tensor.get(key)

    def __setitem__(self, key: int | Sequence[int], val: float) -> None:
        self._tensor.index(key)  # checks it
        self.value[key if isinstance(key, int) else tuple(key)] = val

    def __repr__(self) -> str:
        return self._tensor.to_string()

    def expand(self, other: Tensor) -> Tensor:
        """Return a gradient summed to the shape of this tensor, over the axes it broadcast."""
        extra = other.value.sum(axis=tuple(range(other.dims - self.dims)))
        axes = tuple(i for i, n in enumerate(self.shape) if n == 1 and extra.shape[i] != 1)
        return self._wrap(tg.broadcast_to(extra.sum(axis=axes, keepdims=True), self.shape))

    def backward(self, grad_output: Tensor | None = None) -> None:
        """Add the gradients of this tensor, times grad_output, to the leaves.

        Args:
            grad_output: the shape of the tensor; default: 1, for a tensor of shape (1,).
        """
        if grad_output is None:
            assert self.shape == (1,), "backward: give grad_output for a tensor of several elements"
            grad_output = self._ensure(1.0)
        backpropagate(self, grad_output)


def zeros(shape: tuple[int, ...], backend: TensorBackend = SimpleBackend) -> Tensor:
    """Return zeros, a constant."""
    return Tensor(tg.zeros(shape), backend=backend)


def ones(shape: tuple[int, ...], backend: TensorBackend = SimpleBackend) -> Tensor:
    """Return ones, a constant."""
    return Tensor(tg.ones(shape), backend=backend)


def tensor(ls: Any, backend: TensorBackend = SimpleBackend, requires_grad: bool = False) -> Tensor:
    """Return a leaf with the values of nested lists or of an array, float32."""
    return Tensor(tg.tensor(np.asarray(ls, np.float32)), History(), backend=backend)


def rand(
    shape: tuple[int, ...], backend: TensorBackend = SimpleBackend, requires_grad: bool = False
) -> Tensor:
    """Return a leaf of uniform numbers in [0, 1), drawn one by one by Python's `random`."""
    return tensor(np.reshape([random.random() for _ in range(math.prod(shape))], shape), backend)


tensor_from_numpy = tensor
zeros_tensor_from_numpy, ones_tensor_from_numpy = zeros, ones


def grad_central_difference(
    f: Callable[..., Any], *vals: Any, arg: int = 0, epsilon: float = 1e-6, ind: UserIndex
) -> float:
    """Return the derivative of the sum of f by one element, from differences in float64."""

    def total(step: float) -> float:
        shifted = [v._wrap(v.value.astype(np.float64)) for v in vals]
        shifted[arg][ind] = shifted[arg].value[tuple(ind)].item() + step
        return float(f(*shifted).value.sum())

    return (total(epsilon) - total(-epsilon)) / (2 * epsilon)


def grad_check(f: Callable[..., Any], *vals: Any, tol: float = 1e-6) -> None:
    """Raise AssertionError unless the gradients of f are those of differences."""
    for v in vals:
        v.requires_grad_(True)
        v.zero_grad_()
    f(*vals).sum().backward()
    for i, v in enumerate(vals):
        ind = v._tensor.sample()
        expected = grad_central_difference(f, *vals, arg=i, ind=ind)
        np.testing.assert_allclose(
            v.grad[ind], expected, 1e-2, 1e-2, err_msg=f"grad_check: argument {i}, index {ind}"
        )
