"""Feed-forward layers and the transformer block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels.matmul.sm90 import fills
from tensorgrad.nn.attention import KeyValueCache, MultiHeadAttention, RotaryEmbedding
from tensorgrad.nn.dropout import Dropout
from tensorgrad.nn.linear import Linear
from tensorgrad.nn.module import Module, add_branch, can_fuse, check_input
from tensorgrad.nn.norm import LayerNorm, add_norm
from tensorgrad.nn.rows import Rows
from tensorgrad.nn.shard import Shard
from tensorgrad.ops.elementwise.activation import gelu, swiglu
from tensorgrad.ops.linear import feed_forward, gated_linear


class FeedForward(Module):
    """Compute down(gelu(up(x))), as in GPT-2.

    Args:
        width: of x and of the result.
        hidden: width of up(x); default 4 * width.
        bias: whether the linear layers have one.
        approximate: the form of GELU: "tanh" (as in GPT-2) or "none" (exact).
        dropout: probability of dropping an input of `down`.

    Example:
        >>> layer = tg.nn.FeedForward(8)
        >>> layer.up, layer(tg.ones((2, 5, 8))).shape
        (Linear(8, 32), (2, 5, 8))
    """

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        *,
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
        """Return the result + residual, (..., width), for x and residual of that shape."""
        up, down = self.up, self.down
        if can_fuse(up, "affine") and can_fuse(down, "affine") and not self.dropout.drops:
            check_input(self, up.weight, x=x)
            check_input(self, down.weight, residual=residual)
            x, (weight, bias) = up.enter(x), down.affine()
            if down.after is not None:
                y = feed_forward(x, *up.affine(), weight, None, approximate=self.approximate)
                return down.after.leave(y, bias, residual)
            return feed_forward(
                x, *up.affine(), weight, bias, residual, approximate=self.approximate
            )
        return add_branch(down, self.dropout(gelu(up(x), approximate=self.approximate)), residual)

    def shards(self) -> list[Shard]:
        """Return which layers ranks can share."""
        return [Shard("up", "column"), Shard("dropout", "inside"), Shard("down", "row")]

    def saved_bytes(self, rows: Rows) -> float:
        """Return the bytes that backward needs: the inputs of both linear layers and of GELU.

        On Hopper large products with 16-bit parameters keep the derivative of GELU, a byte each, in
        place of its input; see kernels/matmul/sm90.py.
        """
        hidden, width = self.up.weight.shape
        narrow = rows.item == rows.wide == 2 and not rows.shared
        item = 1 if narrow and fills(rows.inside, width, hidden, 2) else rows.item
        linear = self.up.saved_bytes(rows) + self.down.saved_bytes(rows)
        return linear + rows.inside * hidden * item


class SwiGLU(Module):
    """Compute down(silu(gate(x)) * up(x)), as in LLaMA.

    Args:
        width: of x and of the result.
        hidden: width of up(x); default 8/3 * width, rounded up to a multiple of 64: about as many
            parameters as `FeedForward` has.
        bias: whether the linear layers have one.
        dropout: probability of dropping an input of `down`.

    Source: Shazeer 2020, arXiv:2002.05202, eq. 6.

    Example:
        >>> layer = tg.nn.SwiGLU(48)
        >>> layer.down, layer(tg.ones((2, 5, 48))).shape
        (Linear(128, 48, bias=False), (2, 5, 48))
    """

    def __init__(
        self, width: int, hidden: int | None = None, *, bias: bool = False, dropout: float = 0.0
    ) -> None:
        hidden = self.default_hidden(width) if hidden is None else hidden
        self.gate = Linear(width, hidden, bias)
        self.up = Linear(width, hidden, bias)
        self.down = Linear(hidden, width, bias)
        self.dropout = Dropout(dropout)

    def forward(self, x: Any, residual: Any = None) -> Tensor:
        """Return the result + residual, (..., width), for x and residual of that shape."""
        gate, up = self.gate, self.up
        if can_fuse(gate, "affine") and can_fuse(up, "affine"):
            check_input(self, gate.weight, x=x)
            (gate_weight, gate_bias), (weight, bias) = gate.affine(), up.affine()
            fused = can_fuse(self.dropout, "drops")
            p = self.dropout.p if fused and self.dropout.drops else 0.0
            x = gate.enter(x)
            with self.dropout.stream():
                hidden = gated_linear(x, gate_weight, weight, gate_bias, bias, dropout=p)
            if not fused:
                hidden = self.dropout(hidden)
        else:
            hidden = self.dropout(swiglu(gate(x), up(x)))
        return add_branch(self.down, hidden, residual)

    def shards(self) -> list[Shard]:
        """Return which layers ranks can share."""
        return [
            *(Shard("gate", "column"), Shard("up", "column")),
            *(Shard("dropout", "inside"), Shard("down", "row")),
        ]

    def saved_bytes(self, rows: Rows) -> float:
        """Return the bytes that backward needs: inputs of linear layers, results of gate and up."""
        inputs = self.gate.saved_bytes(rows) + self.down.saved_bytes(rows)
        return inputs + 2 * rows.inside * rows.item * len(self.up.weight)

    @staticmethod
    def default_hidden(width: int) -> int:
        """Return 8/3 * width, rounded up to a multiple of 64."""
        return -(-8 * width // (3 * 64)) * 64


class TransformerBlock(Module):
    """Compute a pre-norm transformer block.

    z = x + attention(norm1(x)), y = z + feed_forward(norm2(z))

    With the defaults it is the block of GPT-2; with `norm=RMSNorm, feed_forward=SwiGLU,
    bias=False` and a `rotary` that of LLaMA.

    Args:
        width: C, of x and of the result.
        heads: the number of query heads.
        kv_heads: the number of key and value heads; default: heads.
        dropout: probability of dropping an output of the attention or the feed-forward layer.
        causal: whether a step attends only to itself and previous steps.
        bias: whether the linear layers have one.
        rotary: rotates queries and keys by their positions; all blocks may share it.
        norm: makes a normalization layer from the width.
        feed_forward: makes a feed-forward layer from the width; default: `FeedForward`.
        attention_dropout: probability of dropping an attention weight; default: `dropout`.
        attention: makes the attention from `width` and `heads`, and `kv_heads`, `bias`, `dropout`,
            `causal` and `rotary` by name; see `MultiHeadAttention`.

    Source: Xiong et al. 2020, arXiv:2002.04745, figure 1 (b).

    Example:
        >>> from tensorgrad import nn
        >>> block = nn.TransformerBlock(
        ...     32, 4, kv_heads=2, bias=False, rotary=nn.RotaryEmbedding(8), norm=nn.RMSNorm,
        ...     feed_forward=nn.SwiGLU,
        ... )
        >>> block(tg.ones((2, 5, 32))).shape
        (2, 5, 32)
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        dropout: float = 0.0,
        causal: bool = True,
        bias: bool = True,
        rotary: RotaryEmbedding | None = None,
        norm: Callable[[int], Module] = LayerNorm,
        feed_forward: Callable[[int], Module] | None = None,
        attention_dropout: float | None = None,
        attention: Callable[..., MultiHeadAttention] = MultiHeadAttention,
    ) -> None:
        if attention_dropout is None:
            attention_dropout = dropout
        self.norm1 = norm(width)
        self.attention = attention(
            width,
            heads,
            kv_heads=kv_heads,
            bias=bias,
            dropout=attention_dropout,
            causal=causal,
            rotary=rotary,
        )
        self.norm2 = norm(width)
        self.feed_forward = (
            FeedForward(width, bias=bias) if feed_forward is None else feed_forward(width)
        )
        self.dropout = Dropout(dropout)

    def forward(self, x: Any, mask: Any = None, cache: KeyValueCache | None = None) -> Tensor:
        """Return y, (B, T, C), for x of that shape; `mask` and `cache` as for attention."""
        x, normed = add_norm(x, None, self.norm1)
        x, normed = add_norm(x, self.attention(normed, mask, cache), self.norm2, self.dropout)
        return add_branch(self.feed_forward, normed, x, self.dropout)
