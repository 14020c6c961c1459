"""The modules of a transformer, under the name that the file has in the course."""

from minitorch.modules_transformer import (
    DecoderLM,
    FeedForward,
    MultiHeadAttention,
    TransformerLayer,
)  # fmt: skip

__all__ = ["DecoderLM", "FeedForward", "MultiHeadAttention", "TransformerLayer"]
