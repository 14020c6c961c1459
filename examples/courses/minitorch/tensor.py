"""Tensors of minitorch: each holds a tensor of tensorgrad, and the history of minitorch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import tensorgrad as tg
from minitorch import tensor_functions as functions
from minitorch.autodiff import Context, backpropagate
from minitorch.tensor_data import TensorData
from minitorch.tensor_ops import SimpleBackend, TensorBackend

__all__ = ["History", "Tensor"]

_ids = itertools.count()


@dataclass
class History:
    """The function call that made a tensor; of a leaf, none."""

    last_fn: type[functions.Function] | None = None
    ctx: Context | None = None
    inputs: Sequence[Tensor] = ()


class Tensor:
    """A tensor that remembers how it was computed.

    Args:
        v: its values: `TensorData`, or a tensor of tensorgrad.
        back: its history; default: none, a constant.
        name: for messages; default: its id.
        backend: where it lives.

    Attributes:
        value: the tensor of tensorgrad, without a graph.
        grad: of a leaf after `backward`, otherwise None.
    """

    def __init__(
        self,
        v: TensorData | tg.Tensor,
        back: History | None = None,
        name: str | None = None,
        backend: TensorBackend | None = None,
    ) -> None:
        self.unique_id = next(_ids)
        self.backend = SimpleBackend if backend is None else backend
        value = tg.tensor(v.array) if isinstance(v, TensorData) else v.detach()
        self.value: tg.Tensor = value.to(self.backend.device)
        self.history = back
        self.grad: Tensor | None = None
        self.name = str(self.unique_id) if name is None else name

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

    def requires_grad_(self, x: bool) -> None:
        """Make the tensor a leaf. As in minitorch, False does so too."""
        self.history = History()

    def requires_grad(self) -> bool:
        """Return whether backward reaches the tensor."""
        return self.history is not None

    def to_numpy(self) -> Any:
        """Return the values as an array of NumPy."""
        return np.array(self.value.numpy())

    def item(self) -> Any:
        """Return the only element."""
        return self.value.item()

    def detach(self) -> Tensor:
        """Return a constant with the same values."""
        return self._wrap(self.value)

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
        return self._wrap(tg.zeros(shape, self.value.dtype, self.backend.device))

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

    def _ensure_tensor(self, b: Any) -> Tensor:
        if not isinstance(b, Tensor):
            return self._wrap(tg.tensor([b], self.value.dtype))
        b._type_(self.backend)
        return b

    def _apply(self, function: type[functions.Function], *others: Any) -> Tensor:
        result: Tensor = function.apply(self, *others)
        return result

    def __add__(self, b: Any) -> Tensor:
        return self._apply(functions.Add, self._ensure_tensor(b))

    __radd__ = __add__

    def __sub__(self, b: Any) -> Tensor:
        return self + -self._ensure_tensor(b)

    def __rsub__(self, b: Any) -> Tensor:
        return self._ensure_tensor(b) + -self

    def __mul__(self, b: Any) -> Tensor:
        return self._apply(functions.Mul, self._ensure_tensor(b))

    __rmul__ = __mul__

    def __truediv__(self, b: Any) -> Tensor:
        return self._apply(functions.Div, self._ensure_tensor(b))

    def __rtruediv__(self, b: Any) -> Tensor:
        return self._ensure_tensor(b) / self

    def __matmul__(self, b: Tensor) -> Tensor:
        return self._apply(functions.MatMul, b)

    def __pow__(self, b: Any) -> Tensor:
        return self._apply(functions.PowerScalar, self._ensure_tensor(b))

    def __neg__(self) -> Tensor:
        return self._apply(functions.Neg)

    def __lt__(self, b: Any) -> Tensor:
        return self._apply(functions.LT, self._ensure_tensor(b))

    def __gt__(self, b: Any) -> Tensor:
        return self._ensure_tensor(b) < self

    def __eq__(self, b: Any) -> Tensor:  # type: ignore[override]  # elementwise, 1.0 or 0.0
        return self._apply(functions.EQ, self._ensure_tensor(b))

    __hash__ = object.__hash__

    def is_close(self, y: Tensor) -> Tensor:
        """Return 1.0 where the difference is below 0.01, otherwise 0.0."""
        return self._apply(functions.IsClose, self._ensure_tensor(y))

    def sigmoid(self) -> Tensor:
        """Return 1 / (1 + exp(-x))."""
        return self._apply(functions.Sigmoid)

    def relu(self) -> Tensor:
        """Return max(x, 0)."""
        return self._apply(functions.ReLU)

    def log(self) -> Tensor:
        """Return log(x + 1e-6)."""
        return self._apply(functions.Log)

    def exp(self) -> Tensor:
        """Return exp(x)."""
        return self._apply(functions.Exp)

    def tanh(self) -> Tensor:
        """Return tanh(x)."""
        return self._apply(functions.Tanh)

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

    def _reduced(self, function: type[functions.Function], dim: int | None) -> Tensor:
        return (
            self.view(self.size)._reduced(function, 0)
            if dim is None
            else self._apply(function, dim)
        )

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
        return self._apply(functions.Attn_Softmax, self._ensure_tensor(mask))

    def layernorm(self, gamma: Tensor, beta: Tensor) -> Tensor:
        """Return x normalised over its last axis, times gamma, plus beta, by the fused kernel."""
        gamma, beta = self._ensure_tensor(gamma), self._ensure_tensor(beta)
        return self._apply(functions.LayerNorm, gamma, beta)

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

    def accumulate_derivative(self, x: Tensor) -> None:
        """Add to the gradient of a leaf."""
        assert self.is_leaf(), "only leaves have gradients"
        self.grad = x if self.grad is None else self.grad + x

    def is_leaf(self) -> bool:
        """Return whether the tensor wants a gradient and no function made it."""
        return self.history is not None and self.history.last_fn is None

    def is_constant(self) -> bool:
        """Return whether the tensor has no history."""
        return self.history is None

    @property
    def parents(self) -> Iterable[Tensor]:
        """The inputs of the function that made the tensor."""
        assert self.history is not None
        return self.history.inputs

    def chain_rule(self, d_output: Any) -> Iterable[Any]:
        """Return each parent with its gradient, given that of this tensor."""
        assert self.history is not None
        function, ctx = self.history.last_fn, self.history.ctx
        assert function is not None
        assert ctx is not None
        gradients = function._backward(ctx, self._ensure_tensor(d_output))
        return [
            (parent, parent.expand(parent._ensure_tensor(gradient)))
            for parent, gradient in zip(self.parents, gradients, strict=True)
        ]

    def backward(self, grad_output: Tensor | None = None) -> None:
        """Add the gradients of this tensor, times grad_output, to the leaves.

        Args:
            grad_output: the shape of the tensor; default: 1, for a tensor of shape (1,).
        """
        if grad_output is None:
            assert self.shape == (1,), "backward: give grad_output for a tensor of several elements"
            grad_output = self._ensure_tensor(1.0)
        backpropagate(self, grad_output)

    def zero_grad_(self) -> None:
        """Forget the gradient."""
        self.grad = None
