"""The linear layer and the network of the course's sentiment classification."""

from __future__ import annotations

from typing import Any

import minitorch
from minitorch.cuda_kernel_ops import CudaKernelOps

BACKEND = minitorch.TensorBackend(CudaKernelOps)


def RParam(*shape: int) -> minitorch.Parameter:
    """Return a parameter of uniform numbers in [-0.05, 0.05), drawn by Python's `random`."""
    return minitorch.Parameter(0.1 * (minitorch.rand(shape, backend=BACKEND) - 0.5))


class Linear(minitorch.Module):
    """x weights + bias.

    Args:
        in_size: I.
        out_size: O.
    """

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.weights = RParam(in_size, out_size)
        self.bias = RParam(out_size)

    def forward(self, x: Any) -> Any:
        """Return (B, O) of (B, I)."""
        return x @ self.weights.value + self.bias.value


class Network(minitorch.Module):
    """The probability that a text is positive, from the mean of its word embeddings.

    Args:
        embedding_dim: C.
        hidden_dim: the width between the two layers.
        dropout_prob: probability of dropping an element of the second layer's input in training.
    """

    def __init__(
        self, embedding_dim: int = 50, hidden_dim: int = 32, dropout_prob: float = 0.5
    ) -> None:
        super().__init__()
        self.embedding_dim, self.hidden_dim, self.dropout_prob = (
            embedding_dim, hidden_dim, dropout_prob,
        )  # fmt: skip
        self.linear1 = Linear(embedding_dim, hidden_dim)
        self.linear2 = Linear(hidden_dim, 1)

    def forward(self, embeddings: Any) -> Any:
        """Return (B,) of embeddings (B, T, C)."""
        x = embeddings.mean(1).view(embeddings.shape[0], self.embedding_dim)
        x = minitorch.dropout(self.linear1(x).relu(), self.dropout_prob, not self.training)
        return self.linear2(x).sigmoid().view(embeddings.shape[0])
