"""GPT-2: learned positions, pre-norm blocks, GELU, and a head tied to the token embedding.

Weights of the published models: see gpt2_weights.py. Tests: tests/models/test_language_model.py
and, against PyTorch and transformers, tests/parity/test_gpt2.py.
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

__all__ = ["GPT2", "PRESETS", "GPT2Config"]


@dataclass(frozen=True)
class GPT2Config:
    """The sizes of a GPT-2; the defaults are those of the 124M model.

    Args:
        vocab_size: V, the number of tokens.
        context: T, the context length in tokens.
        layers: L, the number of blocks.
        heads: H, the number of attention heads; they divide the width.
        width: C, the width of the residual stream.
        dropout: the probability in training, in [0, 1).
        vocab_multiple: the rows of the token embedding are padded to a multiple of this. Padding
            rows are not tokens and have no logits: 128 pads 50,257 rows to 50,304, which GPUs
            multiply faster.
        hidden: the width inside the feed-forward layers; default 4 C.

    Raises:
        ArgumentError: a size is out of its range.

    Example:
        >>> from tensorgrad.models import GPT2Config
        >>> GPT2Config().parameters
        124439808
    """

    vocab_size: int = 50257
    context: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    dropout: float = 0.0
    vocab_multiple: int = 1
    hidden: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "layers", "heads", "width", "vocab_multiple"):
            check_integer("GPT2Config", name, getattr(self, name), 1)
        if self.hidden is not None:
            check_integer("GPT2Config", "hidden", self.hidden, 1)
        if self.width % self.heads:
            raise ArgumentError(
                f"GPT2Config: width is {self.width}, expected a multiple of heads, {self.heads}"
            )
        check_range("GPT2Config", "dropout", self.dropout, 1)

    @property
    def rows(self) -> int:
        """The rows of the token embedding, with padding."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def parameters(self) -> int:
        """The number of parameters, each counted once."""
        block = self._block_matrices + 9 * self.width + self.hidden_width
        return (self.rows + self.context + 2) * self.width + self.layers * block

    @property
    def hidden_width(self) -> int:
        """The width inside the feed-forward layers."""
        return 4 * self.width if self.hidden is None else self.hidden

    @property
    def _block_matrices(self) -> int:
        """Elements of the matrices of a block."""
        return self.width * (4 * self.width + 2 * self.hidden_width)

    def training_flops(self, keys: float | None = None, targets: float = 1.0) -> float:
        """Return the FLOPs of training on a token, see models/flops.py.

        3 (L (24 C^2 + 2 T C) + 2 V C), where the hidden width is 4 C

        Args:
            keys: the mean number of keys that a token attends to (default: half of the context).
            targets: the fraction of tokens that predict a target, which the head multiplies.
        """
        elements = self.layers * self._block_matrices + targets * self.rows * self.width
        keys = self.context / 2 if keys is None else keys
        return training_flops(elements, self.layers, self.width, keys)


# Radford et al. 2019, "Language models are unsupervised multitask learners", table 2, with the
# widths and heads of the published weights.
PRESETS = {
    "gpt2-124M": GPT2Config(),
    "gpt2-355M": GPT2Config(layers=24, heads=16, width=1024),
    "gpt2-774M": GPT2Config(layers=36, heads=20, width=1280),
    "gpt2-1558M": GPT2Config(layers=48, heads=25, width=1600),
}


class GPT2(LanguageModel):
    """A GPT-2: tokens (B, T) to logits (B, T, V) or, with targets (B, T), to the mean loss.

    Matrices are drawn from N(0, 0.02), those that end a residual branch from
    N(0, 0.02 / sqrt(2 L)); biases are 0. The seed is that of `tensorgrad.random.seed`.

    Args:
        config: the sizes.

    Attributes:
        tokens: Embedding(V, C), the token embedding, also the head.
        positions: Embedding(T, C), the position embedding.
        norm: LayerNorm after the last block.

    Source: Radford et al. 2019, "Language models are unsupervised multitask learners".

    Example:
        >>> from tensorgrad.models import GPT2, GPT2Config
        >>> model = GPT2(GPT2Config(vocab_size=10, context=8, layers=1, heads=2, width=8))
        >>> model([[1, 2, 3]]).shape
        (1, 3, 10)
        >>> model([[1, 2, 3]], targets=[[2, 3, 4]]).backward()
        >>> model.tokens.weight.grad.shape
        (10, 8)
    """

    Config = GPT2Config
    norm: nn.LayerNorm

    def __init__(self, config: GPT2Config) -> None:
        self.config = config
        self.vocab_size, self.context = config.vocab_size, config.context
        self.tokens = nn.Embedding(config.rows, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            nn.TransformerBlock(
                config.width,
                config.heads,
                dropout=config.dropout,
                feed_forward=partial(nn.FeedForward, hidden=config.hidden),
            )
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        initialize(self)

    def embed(self, tokens: Any, cache: Cache | None = None) -> Tensor:
        """Return (B, T, C): dropout(token embedding + position embedding)."""
        tokens, start = self._checked(tokens, cache)
        x: Tensor = self.dropout(self.tokens(tokens, self.positions.weight, start))
        return x
