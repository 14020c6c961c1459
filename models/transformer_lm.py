"""A Llama-style language model: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

Tests: tests/models/test_language_model.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tensorgrad import nn
from tensorgrad.core.checks import check_integer, check_range
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.tensor import Tensor
from tensorgrad.models.flops import training_flops
from tensorgrad.models.language_model import Cache, LanguageModel, initialize

__all__ = ["OF_PUBLISHED", "TransformerLM", "TransformerLMConfig"]

# Settings that published models need; the models that `tensorgrad train` makes have the defaults.
OF_PUBLISHED = (
    *("head_width", "rope_scaling", "window", "window_from", "norm_eps"),
    *("qkv_bias", "proj_bias", "feed_forward_bias", "qk_norm"),
)


@dataclass(frozen=True)
class TransformerLMConfig:
    """The sizes of a TransformerLM.

    Args:
        vocab_size: V, the number of tokens.
        context: T, the context length in tokens.
        layers: L, the number of blocks.
        heads: H, the number of query heads; they divide the width, unless head_width is given.
        kv_heads: the number of key and value heads; they divide the query heads.
        width: C, the width of the residual stream.
        hidden: the width inside the feed-forward layer; default 8/3 C, rounded up to a multiple of
            64.
        dropout: the probability in training, in [0, 1).
        attention_dropout: the probability for attention weights; None: as `dropout`.
        activation_dropout: the probability inside the feed-forward layers.
        tied: whether the head is tied to the token embedding.
        rope_base: the base of the rotary angles; larger for longer contexts.
        head_width: D, the even width of a head; default C / H.
        rope_scaling: the scaling of the rotary angles for contexts longer than those first trained
            on; default: none.
        window: the number of tokens that a token attends to, itself included; default: all.
        window_from: the first block with that window; those before attend to all tokens.
        norm_eps: the number added to the mean squares of the norms.
        qkv_bias, proj_bias, feed_forward_bias: whether the linear layers of queries, keys and
            values, of the attention's result, and of the feed-forward layers have a bias.
        qk_norm: whether the queries and keys of a head have an RMSNorm each.

    Raises:
        ArgumentError: a size is out of its range.

    Example:
        >>> from tensorgrad.models import TransformerLMConfig
        >>> config = TransformerLMConfig(128256, layers=16, heads=32, kv_heads=8, width=2048)
        >>> config.hidden_width, config.width_of_head
        (5504, 64)
    """

    vocab_size: int
    context: int = 1024
    layers: int = 12
    heads: int = 12
    kv_heads: int = 4
    width: int = 768
    hidden: int | None = None
    dropout: float = 0.0
    attention_dropout: float | None = None
    activation_dropout: float = 0.0
    tied: bool = True
    rope_base: float = 10000.0
    head_width: int | None = None
    rope_scaling: nn.RopeScaling | None = None
    window: int | None = None
    window_from: int = 0
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    proj_bias: bool = False
    feed_forward_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        optional = ("hidden", "head_width", "window", "attention_dropout")
        sizes = ("vocab_size", "context", "layers", "heads", "kv_heads", "width")
        for name in (*sizes, "hidden", "head_width", "window"):
            if name not in optional or getattr(self, name) is not None:
                check_integer("TransformerLMConfig", name, getattr(self, name), 1)
        check_integer("TransformerLMConfig", "window_from", self.window_from, 0)
        check_range("TransformerLMConfig", "norm_eps", self.norm_eps)
        for name, whole, parts in (
            ("width", self.width, 2 * self.heads if self.head_width is None else 1),
            ("head_width", self.head_width or 2, 2),
            ("heads", self.heads, self.kv_heads),
        ):
            if whole % parts:
                raise ArgumentError(
                    f"TransformerLMConfig: {name} is {whole}, expected a multiple of {parts}"
                )
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if name not in optional or getattr(self, name) is not None:
                check_range("TransformerLMConfig", name, getattr(self, name), 1)

    @property
    def parameters(self) -> int:
        """The number of parameters, each counted once."""
        block = self._block_matrices + self._block_vectors
        rows = (1 if self.tied else 2) * self.vocab_size  # rows of the token embedding and the head
        return (rows + 1) * self.width + self.layers * block

    def training_flops(self, keys: float | None = None, targets: float = 1.0) -> float:
        """Return the FLOPs of training on a token, see models/flops.py.

        Args:
            keys: the mean number of keys that a token attends to (default: half of the context).
            targets: the fraction of tokens that predict a target, which the head multiplies.
        """
        elements = self.layers * self._block_matrices + targets * self.vocab_size * self.width
        keys = self.context / 2 if keys is None else keys
        return training_flops(elements, self.layers, self.heads * self.width_of_head, keys)

    @property
    def width_of_head(self) -> int:
        """D, the width of a head."""
        return self.width // self.heads if self.head_width is None else self.head_width

    @property
    def _block_matrices(self) -> int:
        """Elements of the matrices of a block."""
        attention = 2 * (self.heads + self.kv_heads) * self.width_of_head
        return self.width * (attention + 3 * self.hidden_width)

    @property
    def _block_vectors(self) -> int:
        """Elements of the norms and biases of a block."""
        qkv = self.qkv_bias * (self.heads + 2 * self.kv_heads) * self.width_of_head
        feed_forward = self.feed_forward_bias * (2 * self.hidden_width + self.width)
        norms = 2 * self.width + self.qk_norm * 2 * self.width_of_head
        return norms + qkv + self.proj_bias * self.width + feed_forward

    @property
    def hidden_width(self) -> int:
        """The width inside the feed-forward layer."""
        return nn.SwiGLU.default_hidden(self.width) if self.hidden is None else self.hidden


class TransformerLM(LanguageModel):
    """A decoder of pre-norm blocks with RMSNorm, rotary positions, SwiGLU and grouped queries.

    Args:
        config: the sizes.

    Attributes:
        tokens: Embedding(V, C).
        norm: RMSNorm after the last block.
        output: Linear(C, V) without bias; None when the head is tied.

    Source: Touvron et al. 2023, arXiv:2302.13971, section 2.2; grouped queries: Ainslie et al.
        2023, arXiv:2305.13245; windows: Jiang et al. 2023, arXiv:2310.06825; biases and norms of
        queries and keys: Yang et al. 2025, arXiv:2505.09388.

    Example:
        >>> from tensorgrad.models import TransformerLM, TransformerLMConfig
        >>> config = TransformerLMConfig(10, context=8, layers=1, heads=2, kv_heads=1, width=8)
        >>> model = TransformerLM(config)
        >>> model([[1, 2, 3]]).shape
        (1, 3, 10)
    """

    Config = TransformerLMConfig
    norm: nn.RMSNorm

    def __init__(self, config: TransformerLMConfig) -> None:
        self.config = config
        self.vocab_size, self.context = config.vocab_size, config.context
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        head = config.width_of_head
        rotary = nn.RotaryEmbedding(head, base=config.rope_base, scaling=config.rope_scaling)
        norm = partial(nn.RMSNorm, eps=config.norm_eps)
        self.blocks = nn.ModuleList(
            nn.TransformerBlock(
                config.width,
                config.heads,
                kv_heads=config.kv_heads,
                dropout=config.dropout,
                bias=config.qkv_bias,
                rotary=rotary,
                norm=norm,
                feed_forward=partial(
                    nn.SwiGLU,
                    hidden=config.hidden,
                    bias=config.feed_forward_bias,
                    dropout=config.activation_dropout,
                ),
                attention_dropout=config.attention_dropout,
                attention=partial(
                    nn.MultiHeadAttention,
                    window=config.window if number >= config.window_from else None,
                    head_width=head,
                    proj_bias=config.proj_bias,
                    qk_norm=norm if config.qk_norm else None,
                ),
            )
            for number in range(config.layers)
        )
        self.norm = norm(config.width)
        if not config.tied:
            self.output = nn.Linear(config.width, config.vocab_size, bias=False)
        initialize(self)

    def embed(self, tokens: Any, cache: Cache | None = None) -> Tensor:
        """Return (B, T, C): dropout(token embedding); attention rotates by position."""
        tokens, _ = self._checked(tokens, cache)
        x: Tensor = self.dropout(self.tokens(tokens))
        return x
