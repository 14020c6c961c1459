"""Feed-forward layers and the transformer block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorgrad import ops
from tensorgrad.nn.attention import KeyValueCache, MultiHeadAttention, RotaryEmbedding
from tensorgrad.nn.dropout import Dropout
from tensorgrad.nn.linear import Linear, add_linear
from tensorgrad.nn.module import Module, check_input
from tensorgrad.nn.norm import LayerNorm, RMSNorm
from tensorgrad.tensor import Tensor


class FeedForward(Module):
    """down(gelu(up(x))), as in GPT-2.

    Args:
        width: of x and of the result.
        hidden: width in between; default 4 * width.
        bias: of both linear layers.
        approximate: which GELU, "tanh" (as in GPT-2) or "none" (exact).
        dropout: probability, of what goes into `down`.
    """

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        bias: bool = True,
        approximate: str = "tanh",
        dropout: float = 0.0,
    ) -> None:
        hidden = 4 * width if hidden is None else hidden
        self.up = Linear(width, hidden, bias)
        self.down = Linear(hidden, width, bias)
        self.approximate = approximate
        self.dropout = Dropout(dropout)

    def forward(self, x: Any, residual: Any = None) -> Tensor:
        """Return (..., width) for x of that shape; a residual is added."""
        up, down = self.up, self.down
        fused = type(up) is Linear and type(down) is Linear  # not what a user has put there
        if fused and not self.dropout.drops:
            check_input(self, x, up.weight)
            check_input(self, residual, down.weight, "residual")
            return ops.feed_forward(
                x, up.weight, up.bias, down.weight, down.bias, residual, self.approximate
            )
        return add_linear(down, self.dropout(ops.gelu(up(x), self.approximate)), residual)


class SwiGLU(Module):
    """down(silu(gate(x)) * up(x)), as in LLaMA.

    Args:
        width: of x and of the result.
        hidden: width in between; default 8/3 * width, rounded up to a multiple of 64, which makes
            about as many parameters as `FeedForward`.
        bias: of the three linear layers.
        dropout: probability, of what goes into `down`.
    Source: Shazeer 2020, arXiv:2002.05202, eq. 6.
    """

    def __init__(
        self, width: int, hidden: int | None = None, bias: bool = False, dropout: float = 0.0
    ) -> None:
        hidden = self.default_hidden(width) if hidden is None else hidden
        self.gate = Linear(width, hidden, bias)
        self.up = Linear(width, hidden, bias)
        self.down = Linear(hidden, width, bias)
        self.dropout = Dropout(dropout)

    def forward(self, x: Any, residual: Any = None) -> Tensor:
        """Return (..., width) for x of that shape; a residual is added."""
        gate, up = self.gate, self.up
        if type(gate) is Linear and type(up) is Linear:  # not what a user has put there
            check_input(self, x, gate.weight)
            hidden = ops.gated_linear(x, gate.weight, up.weight, gate.bias, up.bias)
        else:
            hidden = ops.swiglu(gate(x), up(x))
        return add_linear(self.down, self.dropout(hidden), residual)

    @staticmethod
    def default_hidden(width: int) -> int:
        """Return 8/3 * width, rounded up to a multiple of 64."""
        return -(-8 * width // (3 * 64)) * 64


class TransformerBlock(Module):
    """x + attention(norm1(x)), then that + feed_forward(norm2(that)): pre-norm.

    With the defaults it is the block of GPT-2; with `norm=RMSNorm, feed_forward=SwiGLU,
    bias=False` and a `rotary` that of LLaMA.

    Args:
        width: C, of x and of the result.
        heads: the number of query heads.
        kv_heads: the number of key and value heads; default: heads.
        dropout: probability, of what either branch adds.
        causal: whether a step sees only itself and those before.
        bias: of the linear layers.
        rotary: turns queries and keys by their positions; may be shared by all blocks.
        norm: makes a normalisation layer from the width.
        feed_forward: makes a feed-forward layer from the width; default: `FeedForward`.
        attention_dropout: probability, of the attention weights; default: as `dropout`.
    Source: Xiong et al. 2020, arXiv:2002.04745, figure 1 (b).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        dropout: float = 0.0,
        causal: bool = True,
        bias: bool = True,
        rotary: RotaryEmbedding | None = None,
        norm: Callable[[int], Module] = LayerNorm,
        feed_forward: Callable[[int], Module] | None = None,
        attention_dropout: float | None = None,
    ) -> None:
        of_weights = dropout if attention_dropout is None else attention_dropout
        self.norm1 = norm(width)
        self.attention = MultiHeadAttention(
            width, heads, kv_heads, bias, of_weights, causal, rotary
        )
        self.norm2 = norm(width)
        self.feed_forward = (
            FeedForward(width, bias=bias) if feed_forward is None else feed_forward(width)
        )
        self.dropout = Dropout(dropout)

    def forward(self, x: Any, mask: Any = None, cache: KeyValueCache | None = None) -> Tensor:
        """Return (B, T, C) for x of that shape; `mask` and `cache` go to the attention."""
        x, normed = _beside(x, self.norm1)
        x, normed = self._add_and_norm(x, self.attention(normed, mask, cache))
        if isinstance(self.feed_forward, (FeedForward, SwiGLU)) and not self.dropout.drops:
            y: Tensor = self.feed_forward(normed, residual=x)
            return y
        return self._add(x, self.feed_forward(normed))

    def _add_and_norm(self, x: Any, branch: Any) -> tuple[Tensor, Tensor]:
        """Return x + dropout(branch) and norm2 of it, in one kernel where nothing is dropped."""
        norm = self.norm2
        if (type(norm) is LayerNorm or type(norm) is RMSNorm) and not self.dropout.drops:
            return norm.add(x, branch)
        return _beside(self._add(x, branch), norm)

    def _add(self, x: Any, branch: Any) -> Tensor:
        """Return x + dropout(branch), in one kernel."""
        return ops.dropout_add(branch, x, self.dropout.p, training=self.dropout.training)


def _beside(x: Any, norm: Module) -> tuple[Any, Tensor]:
    """Return x to go on with, and norm(x), in whose backward kernel both gradients are added."""
    if type(norm) is LayerNorm or type(norm) is RMSNorm:  # not what a user has put there
        return norm.add(x)
    return x, norm(x)
