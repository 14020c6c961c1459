"""Embedding, dropout, linear layer and layer norm."""

from __future__ import annotations

from typing import Any

import numpy as np

import tensorgrad as tg
from minitorch.autodiff import function
from minitorch.module import Module, Parameter
from minitorch.tensor import tensor
from minitorch.tensor_ops import SimpleBackend, TensorBackend

__all__ = ["Dropout", "Embedding", "LayerNorm1d", "Linear"]

_embedding = function(lambda weight, ids: tg.embedding(weight, ids.astype(np.int64))).apply
_linear = function(tg.linear).apply
_layer_norm = function(lambda x, w, b, eps: tg.layer_norm(x, w, b, eps=eps)).apply


class Embedding(Module):
    """The row of `weights` for each id.

    Args:
        num_embeddings: V.
        embedding_dim: C.
        backend: where the weights live.

    Attributes:
        weights: (V, C), normal numbers.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, backend: TensorBackend = SimpleBackend
    ) -> None:
        super().__init__()
        weights = np.random.normal(size=(num_embeddings, embedding_dim))
        self.weights = Parameter(tensor(weights, backend))

    def forward(self, x: Any) -> Any:
        """Return (B, T, C) of ids (B, T)."""
        return _embedding(self.weights.value, x)


class Dropout(Module):
    """Set elements to 0 with probability p in training; the others are divided by 1 - p.

    Args:
        p_dropout: p.
    """

    def __init__(self, p_dropout: float = 0.1) -> None:
        super().__init__()
        self.p_dropout = p_dropout

    def forward(self, x: Any) -> Any:
        """Return x with dropout; the mask is drawn by np.random.binomial, as the course asks."""
        if not self.training or self.p_dropout == 0:
            return x
        mask = np.random.binomial(1, 1 - self.p_dropout, x.shape) / (1 - self.p_dropout)
        return x * tensor(mask, x.backend).detach()


class Linear(Module):
    """x weights + bias.

    Args:
        in_size: I.
        out_size: O.
        bias: whether there is one.
        backend: where the weights live.

    Attributes:
        weights: (I, O), uniform in plus and minus 1 / sqrt(I).
        bias: (O,), likewise; or None.
    """

    def __init__(
        self, in_size: int, out_size: int, bias: bool = True, backend: TensorBackend = SimpleBackend
    ) -> None:
        super().__init__()

        def uniform(*shape: int) -> Parameter:
            bound = in_size**-0.5
            return Parameter(tensor(np.random.uniform(-bound, bound, shape), backend))

        self.weights = uniform(in_size, out_size)
        self.bias = uniform(out_size) if bias else None

    def forward(self, x: Any) -> Any:
        """Return (..., O) of (..., I)."""
        bias = [self.bias.value] if self.bias else []
        return _linear(x, self.weights.value.permute(1, 0), *bias)


class LayerNorm1d(Module):
    """The layer norm of the last axis.

    Args:
        dim: its length.
        eps: added to the variance.
        backend: where the weights live.

    Attributes:
        weights: (dim,), ones.
        bias: (dim,), zeros.
    """

    def __init__(self, dim: int, eps: float = 1e-5, backend: TensorBackend = SimpleBackend) -> None:
        super().__init__()
        self.eps = eps
        self.weights = Parameter(tensor(np.ones(dim), backend))
        self.bias = Parameter(tensor(np.zeros(dim), backend))

    def forward(self, x: Any) -> Any:
        """Return x normalised, times weights, plus bias."""
        return _layer_norm(x, self.weights.value, self.bias.value, self.eps)
