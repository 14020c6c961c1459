"""A Llama-style language model: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

Tests: tests/models/test_language_model.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tensorgrad import nn
from tensorgrad.checks import check_integer, probability
from tensorgrad.errors import ArgumentError
from tensorgrad.models.flops import training_flops
from tensorgrad.models.language_model import Cache, LanguageModel, initialize
from tensorgrad.tensor import Tensor

__all__ = ["TransformerLM", "TransformerLMConfig"]


@dataclass(frozen=True)
class TransformerLMConfig:
    """The sizes of a TransformerLM.

    Args:
        vocab_size: V, the number of tokens.
        context: T, the context length in tokens.
        layers: L, the number of blocks.
        heads: H, query heads; they divide the width.
        kv_heads: key and value heads; they divide the query heads.
        width: C.
        hidden: width inside the feed-forward layer; default 8/3 C, rounded up to a multiple of 64.
        dropout: probability in training, in [0, 1).
        attention_dropout: probability for attention weights; None: as `dropout`.
        activation_dropout: probability inside the feed-forward layers.
        tied: whether the head is tied to the token embedding.
        rope_base: base of the rotary angles; larger for longer contexts.
    Raises:
        ArgumentError: a size is out of its range.
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

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "layers", "heads", "kv_heads", "width", "hidden"):
            if name != "hidden" or self.hidden is not None:
                check_integer("TransformerLMConfig", name, getattr(self, name), 1)
        for name, whole, parts in (
            ("width", self.width, 2 * self.heads),
            ("heads", self.heads, self.kv_heads),
        ):
            if whole % parts:
                raise ArgumentError(
                    f"TransformerLMConfig: {name} is {whole}, expected a multiple of {parts}"
                )
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if name != "attention_dropout" or self.attention_dropout is not None:
                probability("TransformerLMConfig", name, getattr(self, name))

    @property
    def parameters(self) -> int:
        """The number of parameters, each counted once."""
        block = self._block_matrices + 2 * self.width
        rows = (1 if self.tied else 2) * self.vocab_size  # of the token embedding and the head
        return (rows + 1) * self.width + self.layers * block

    def training_flops(self, keys: float | None = None, targets: float = 1.0) -> float:
        """Return the FLOPs of training on a token, see models/flops.py.

        Args:
            keys: that a token attends to on average (default: half of the context).
            targets: fraction of the tokens that predict a target, which the head multiplies.
        """
        elements = self.layers * self._block_matrices + targets * self.vocab_size * self.width
        keys = self.context / 2 if keys is None else keys
        return training_flops(elements, self.layers, self.width, keys)

    @property
    def _block_matrices(self) -> int:
        """Elements of the matrices of a block."""
        width, hidden = self.width, self.hidden
        hidden = nn.SwiGLU.default_hidden(width) if hidden is None else hidden
        of_keys = 2 * self.kv_heads * (width // self.heads)
        return width * (2 * width + of_keys + 3 * hidden)


class TransformerLM(LanguageModel):
    """A decoder of pre-norm blocks with RMSNorm, rotary positions, SwiGLU and grouped queries.

    Args:
        config: the sizes.

    Attributes:
        tokens: Embedding(V, C).
        norm: RMSNorm after the last block.
        output: Linear(C, V) without bias; None when the head is tied.
    Source: Touvron et al. 2023, arXiv:2302.13971, section 2.2; grouped queries: Ainslie et al.
        2023, arXiv:2305.13245.
    """

    norm: nn.RMSNorm

    def __init__(self, config: TransformerLMConfig) -> None:
        self.config = config
        self.vocab_size, self.context = config.vocab_size, config.context
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        rotary = nn.RotaryEmbedding(config.width // config.heads, config.rope_base)
        self.blocks = nn.ModuleList(
            nn.TransformerBlock(
                config.width,
                config.heads,
                config.kv_heads,
                config.dropout,
                bias=False,
                rotary=rotary,
                norm=nn.RMSNorm,
                feed_forward=partial(
                    nn.SwiGLU, hidden=config.hidden, dropout=config.activation_dropout
                ),
                attention_dropout=config.attention_dropout,
            )
            for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.width)
        if not config.tied:
            self.output = nn.Linear(config.width, config.vocab_size, bias=False)
        initialize(self)

    def embed(self, tokens: Any, cache: Cache | None = None) -> Tensor:
        """Return (B, T, C): dropout(token embedding); attention rotates by position."""
        tokens, _ = self._checked(tokens, cache)
        x: Tensor = self.dropout(self.tokens(tokens))
        return x
