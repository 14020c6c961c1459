"""The decoder-only transformer of the course, GPT-2's with pre-norm."""

from __future__ import annotations

from typing import Any

import numpy as np

import tensorgrad as tg
from minitorch.autodiff import function
from minitorch.module import Module
from minitorch.modules_basic import Dropout, Embedding, LayerNorm1d, Linear
from minitorch.nn import GELU
from minitorch.tensor import tensor
from minitorch.tensor_ops import SimpleBackend, TensorBackend

__all__ = ["DecoderLM", "FeedForward", "MultiHeadAttention", "TransformerLayer"]


_attention = function(tg.attention).apply


class MultiHeadAttention(Module):
    """Attention of several heads.

    Args:
        n_embd: C.
        n_head: H, a divisor of C.
        causal: whether a step attends only to itself and previous steps.
        p_dropout: probability of dropping an attention weight in training.
        bias: whether the linear layers have one.
        backend: where the weights live.
        use_fused_kernel: accepted; tensorgrad's kernel, which stores no weights, always runs.
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        causal: bool = False,
        p_dropout: float = 0.1,
        bias: bool = True,
        backend: TensorBackend = SimpleBackend,
        use_fused_kernel: bool = False,
    ) -> None:
        super().__init__()
        self.backend, self.n_embd, self.n_head, self.causal = backend, n_embd, n_head, causal
        self.attn_hidden_dim = n_embd // n_head
        self.use_fused_kernel = use_fused_kernel
        self.q_projection = Linear(n_embd, n_embd, bias, backend)
        self.k_projection = Linear(n_embd, n_embd, bias, backend)
        self.v_projection = Linear(n_embd, n_embd, bias, backend)
        self.out_projection = Linear(n_embd, n_embd, bias, backend)
        self.dropout = Dropout(p_dropout)

    def create_causal_mask(self, bs: int, nh: int, seq_len: int) -> Any:
        """Return (1, 1, T, T), the lowest float32 above the diagonal, otherwise 0."""
        lowest = np.full((1, 1, seq_len, seq_len), np.finfo(np.float32).min)
        return tensor(np.triu(lowest, 1), self.backend)

    def project_to_query_key_value(self, x: Any) -> tuple[Any, Any, Any]:
        """Return q (B, H, T, D), k transposed (B, H, D, T) and v (B, H, T, D) of (B, T, C)."""
        batch, length, _ = x.shape
        projections = self.q_projection, self.k_projection, self.v_projection
        q, k, v = (
            project(x).view(batch, length, self.n_head, self.attn_hidden_dim)
            for project in projections
        )
        return q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)

    def self_attention(self, q: Any, kT: Any, v: Any) -> Any:
        """Return softmax(q kT / sqrt(D)) v, the heads side by side: (B, T, C)."""
        dropout = self.dropout.p_dropout if self.training else 0.0
        y = _attention(q, kT.permute(0, 1, 3, 2), v, causal=self.causal, dropout=dropout)
        return y.permute(0, 2, 1, 3).view(q.shape[0], q.shape[2], self.n_embd)

    def forward(self, x: Any) -> Any:
        """Return the attention of x, (B, T, C)."""
        return self.out_projection(self.self_attention(*self.project_to_query_key_value(x)))


class FeedForward(Module):
    """linear_out(GELU(linear_in(x))), with dropout.

    Args:
        n_embd: C.
        middle_dim: the width between the two layers.
        p_dropout: probability of dropping an element of the result in training.
        bias: whether the linear layers have one.
        backend: where the weights live.
    """

    def __init__(
        self,
        n_embd: int,
        middle_dim: int = 256,
        p_dropout: float = 0.1,
        bias: bool = True,
        backend: TensorBackend = SimpleBackend,
    ) -> None:
        super().__init__()
        self.linear_in = Linear(n_embd, middle_dim, bias, backend)
        self.linear_out = Linear(middle_dim, n_embd, bias, backend)
        self.dropout = Dropout(p_dropout)

    def forward(self, x: Any) -> Any:
        """Return the result, (B, T, C), of x, (B, T, C)."""
        return self.dropout(self.linear_out(GELU(self.linear_in(x))))


class TransformerLayer(Module):
    """A block: x + attention(ln_1(x)), then x + ff(ln_2(x)).

    Args:
        n_embd: C.
        n_head: H, a divisor of C.
        p_dropout: probability of dropout in training.
        ln_eps: of the layer norms.
        bias: whether the linear layers have one.
        backend: where the weights live.
        use_fused_kernel: accepted; tensorgrad's fused kernels always run.
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        p_dropout: float = 0.1,
        ln_eps: float = 1e-8,
        bias: bool = True,
        backend: TensorBackend = SimpleBackend,
        use_fused_kernel: bool = False,
    ) -> None:
        super().__init__()
        self.ln_1 = LayerNorm1d(n_embd, ln_eps, backend)
        self.ln_2 = LayerNorm1d(n_embd, ln_eps, backend)
        self.attention = MultiHeadAttention(
            n_embd, n_head, True, p_dropout, bias, backend, use_fused_kernel
        )
        self.ff = FeedForward(n_embd, p_dropout=p_dropout, bias=bias, backend=backend)

    def forward(self, x: Any) -> Any:
        """Return the result, (B, T, C), of x, (B, T, C)."""
        x = x + self.attention(self.ln_1(x))
        return x + self.ff(self.ln_2(x))


class DecoderLM(Module):
    """Logits of the next token: embeddings, layers `t_layer_1`, ..., `ln` and `lm_head`.

    Args:
        n_vocab: V.
        n_embd: C.
        n_head: H, a divisor of C.
        n_positions: the longest sequence.
        p_dropout: probability of dropout in training.
        ln_eps: of the layer norms.
        bias: whether the linear layers have one.
        backend: where the weights live.
        use_fused_kernel: accepted; tensorgrad's fused kernels always run.
        n_layer: the number of layers.
    """

    def __init__(
        self,
        n_vocab: int,
        n_embd: int,
        n_head: int,
        n_positions: int,
        p_dropout: float = 0.1,
        ln_eps: float = 1e-5,
        bias: bool = True,
        backend: TensorBackend = SimpleBackend,
        use_fused_kernel: bool = False,
        n_layer: int = 4,
    ) -> None:
        super().__init__()
        self.backend, self.n_embd, self.n_vocab, self.n_layer = backend, n_embd, n_vocab, n_layer
        self.token_embeddings = Embedding(n_vocab, n_embd, backend)
        self.position_embeddings = Embedding(n_positions, n_embd, backend)
        for number in range(1, n_layer + 1):
            layer = TransformerLayer(
                n_embd, n_head, p_dropout, ln_eps, bias, backend, use_fused_kernel
            )
            setattr(self, f"t_layer_{number}", layer)
        self.dropout = Dropout(p_dropout)
        self.ln = LayerNorm1d(n_embd, ln_eps, backend)
        self.lm_head = Linear(n_embd, n_vocab, bias, backend)

    def forward(self, idx: Any) -> Any:
        """Return logits (B, T, V) of ids (B, T)."""
        positions = tensor(np.arange(idx.shape[1])[None], self.backend)
        x = self.dropout(self.token_embeddings(idx) + self.position_embeddings(positions))
        for number in range(1, self.n_layer + 1):
            x = getattr(self, f"t_layer_{number}")(x)
        return self.lm_head(self.ln(x))
