"""TransformerLM in PyTorch, as its users write it: the peer of matrix.py and translation.py."""

from __future__ import annotations

import importlib
import math
from typing import Any

from tensorgrad.models.transformer_lm import TransformerLMConfig


def transformer_lm(
    config: TransformerLMConfig, label_smoothing: float = 0.0, prefix: bool = False,
    recompute: bool = False,
) -> Any:  # fmt: skip
    """Return a module that takes tokens (B, T) and the last n targets (B, n): the mean loss.

    Args:
        config: the sizes.
        label_smoothing: fraction of a target's probability spread over all tokens.
        prefix: whether the tokens up to the first target attend to each other.
        recompute: whether blocks are computed again in backward.
    """
    torch = importlib.import_module("torch")
    nn: Any = torch.nn
    functional = nn.functional
    width, heads, dropout = config.width, config.heads, config.dropout
    of_weights = dropout if config.attention_dropout is None else config.attention_dropout
    hidden = -(-8 * width // (3 * 64)) * 64 if config.hidden is None else config.hidden
    half, kv_heads = width // heads // 2, config.kv_heads
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint

    def rotated(x: Any, cos: Any, sin: Any) -> Any:
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).type_as(x)

    def loss(x: Any, head: Any, targets: Any) -> Any:
        return functional.cross_entropy(
            (x @ head.t()).flatten(0, 1), targets.flatten(), label_smoothing=label_smoothing
        )

    class LlamaBlock(nn.Module):  # type: ignore[misc]  # PyTorch's types are not read here
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
            self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * 2 * half, bias=False)
            self.proj = nn.Linear(width, width, bias=False)
            self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in "gu")
            self.down = nn.Linear(hidden, width, bias=False)
            self.dropout, self.inside = nn.Dropout(dropout), nn.Dropout(config.activation_dropout)

        def forward(self, x: Any, cos: Any, sin: Any, mask: Any) -> Any:
            batch, length, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(batch, length, -1, 2 * half).transpose(1, 2)
            q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
            y = functional.scaled_dot_product_attention(
                rotated(q, cos, sin), rotated(k, cos, sin), v,
                mask, of_weights if self.training else 0.0, mask is None,
                enable_gqa=heads != kv_heads,
            )  # fmt: skip
            x = x + self.dropout(self.proj(y.transpose(1, 2).reshape(x.shape)))
            normed = self.norm2(x)
            hidden = self.inside(functional.silu(self.gate(normed)) * self.up(normed))
            return x + self.dropout(self.down(hidden))

    class LlamaModel(nn.Module):  # type: ignore[misc]  # PyTorch's types are not read here
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(config.vocab_size, width)
            self.blocks = nn.ModuleList(LlamaBlock() for _ in range(config.layers))
            self.norm, self.dropout = nn.RMSNorm(width, 1e-6), nn.Dropout(dropout)
            self.loss = loss
            if not config.tied:
                self.output = nn.Linear(width, config.vocab_size, bias=False)
            rates = config.rope_base ** (-torch.arange(half) / half)
            angles = torch.arange(config.context)[:, None] * rates
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())
            for weight in self.parameters():
                if weight.ndim == 2:
                    nn.init.normal_(weight, std=0.02)

        def mask(self, targets: Any, length: int) -> Any:
            last = (targets != -100).int().argmax(1) + length - targets.shape[1]
            columns = torch.arange(length, device=targets.device)
            seen = columns <= torch.maximum(columns[:, None], last[:, None, None])
            kind = targets.device.type
            autocast = torch.is_autocast_enabled(kind)
            dtype = torch.get_autocast_dtype(kind) if autocast else self.tokens.weight.dtype
            mask = torch.zeros(seen.shape, dtype=dtype, device=targets.device)
            return mask.masked_fill(~seen, -math.inf)[:, None]

        def forward(self, tokens: Any, targets: Any) -> Any:
            length = tokens.shape[1]
            x = self.dropout(self.tokens(tokens))
            mask = self.mask(targets, length) if prefix else None
            for block in self.blocks:
                operands = x, self.cos[:length], self.sin[:length], mask
                again = recompute and self.training
                x = checkpoint(block, *operands, use_reentrant=False) if again else block(*operands)
            head = self.tokens if config.tied else self.output
            last = self.norm(x[:, length - targets.shape[1] :])
            return self.loss(last, head.weight, targets)

    return LlamaModel()
