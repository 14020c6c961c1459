"""GPT-2 in PyTorch, as its users write it: the peer of training steps."""

from __future__ import annotations

import importlib
from typing import Any

from tensorgrad.models.gpt2 import GPT2Config


def gpt2(config: GPT2Config, recompute: bool = False) -> Any:
    """Return a module that takes tokens and targets, (B, T), and returns the mean loss.

    Args:
        config: the sizes.
        recompute: whether blocks are computed again in backward.
    """
    torch = importlib.import_module("torch")
    nn: Any = torch.nn

    functional = nn.functional
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
    width, heads = config.width, config.heads
    inner = config.hidden_width

    def loss(x: Any, head: Any, targets: Any) -> Any:
        logits = x @ head.t()
        return functional.cross_entropy(logits.view(-1, config.rows), targets.view(-1))

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(batch, length, 3, heads, width // heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(x.shape))
            return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(config.rows, width)
            self.positions = nn.Embedding(config.context, width)
            self.blocks = nn.ModuleList(Block() for _ in range(config.layers))
            self.norm, self.loss = nn.LayerNorm(width), loss
            for weight in self.parameters():  # wider logits would meet denormal numbers
                if weight.ndim == 2:
                    nn.init.normal_(weight, std=0.02)

        def forward(self, tokens: Any, targets: Any) -> Any:
            x = self.tokens(tokens) + self.positions.weight
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            return self.loss(self.norm(x), self.tokens.weight, targets)

    return Model()
