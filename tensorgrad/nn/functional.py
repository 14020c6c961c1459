"""Functions of neural networks, under PyTorch's name for the module."""

from tensorgrad.ops.attention import attention, attention_packed, attention_varlen
from tensorgrad.ops.creation import one_hot
from tensorgrad.ops.cross_entropy import cross_entropy
from tensorgrad.ops.dropout import dropout
from tensorgrad.ops.elementwise.activation import gelu, relu, sigmoid, silu, softplus
from tensorgrad.ops.embedding import embedding
from tensorgrad.ops.linear import linear
from tensorgrad.ops.linear_cross_entropy import linear_cross_entropy
from tensorgrad.ops.norm import layer_norm, rms_norm
from tensorgrad.ops.reduce import logsumexp
from tensorgrad.ops.rotary import rotary
from tensorgrad.ops.softmax import log_softmax, softmax

__all__ = [
    "attention",
    "attention_packed",
    "attention_varlen",
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "log_softmax",
    "logsumexp",
    "one_hot",
    "relu",
    "rms_norm",
    "rotary",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
]
