"""Neural-network layers, and the base class to write them with."""

from typing import TYPE_CHECKING, Any

from tensorgrad.compat.omitted import missing as _missing
from tensorgrad.nn import functional, init
from tensorgrad.nn.activation import ELU, GELU, LeakyReLU, ReLU, Sigmoid, SiLU, Softmax, Tanh
from tensorgrad.nn.attention import (
    ATTENTION_KERNELS,
    KeyValueCache,
    MultiHeadAttention,
    RopeScaling,
    RotaryEmbedding,
    use_attention,
)
from tensorgrad.nn.container import ModuleDict, ModuleList, Sequential
from tensorgrad.nn.dropout import Dropout
from tensorgrad.nn.embedding import Embedding
from tensorgrad.nn.linear import Linear
from tensorgrad.nn.loss import (
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    MSELoss,
    NLLLoss,
)
from tensorgrad.nn.model_graph import ModelGraph
from tensorgrad.nn.module import Module, Parameter, evaluating
from tensorgrad.nn.norm import GroupNorm, LayerNorm, RMSNorm
from tensorgrad.nn.shape import Flatten, Identity
from tensorgrad.nn.shard import Shard
from tensorgrad.nn.summary import Summary
from tensorgrad.nn.transformer import FeedForward, SwiGLU, TransformerBlock

__all__ = [
    "ATTENTION_KERNELS",
    "ELU",
    "GELU",
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "FeedForward",
    "Flatten",
    "GroupNorm",
    "HuberLoss",
    "Identity",
    "KLDivLoss",
    "KeyValueCache",
    "L1Loss",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MSELoss",
    "ModelGraph",
    "Module",
    "ModuleDict",
    "ModuleList",
    "MultiHeadAttention",
    "NLLLoss",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "RopeScaling",
    "RotaryEmbedding",
    "Sequential",
    "Shard",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Summary",
    "SwiGLU",
    "Tanh",
    "TransformerBlock",
    "evaluating",
    "functional",
    "init",
    "use_attention",
]

if not TYPE_CHECKING:  # to a type checker every name would exist

    def __getattr__(name: str) -> Any:
        raise _missing(__name__, name)
