"""Neural-network layers, and the base class to write them with."""

from tensorgrad.nn import functional, init
from tensorgrad.nn.attention import (
    ATTENTION_KERNELS,
    KeyValueCache,
    MultiHeadAttention,
    RotaryEmbedding,
    use_attention,
)
from tensorgrad.nn.container import ModuleList, Sequential
from tensorgrad.nn.dropout import Dropout
from tensorgrad.nn.embedding import Embedding
from tensorgrad.nn.linear import Linear
from tensorgrad.nn.module import Module, Parameter, evaluating
from tensorgrad.nn.norm import LayerNorm, RMSNorm
from tensorgrad.nn.transformer import FeedForward, SwiGLU, TransformerBlock

__all__ = [
    "ATTENTION_KERNELS",
    "Dropout",
    "Embedding",
    "FeedForward",
    "KeyValueCache",
    "LayerNorm",
    "Linear",
    "Module",
    "ModuleList",
    "MultiHeadAttention",
    "Parameter",
    "RMSNorm",
    "RotaryEmbedding",
    "Sequential",
    "SwiGLU",
    "TransformerBlock",
    "evaluating",
    "functional",
    "init",
    "use_attention",
]
