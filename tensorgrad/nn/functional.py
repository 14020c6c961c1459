"""Functions of neural networks, under PyTorch's name for the module."""

from typing import TYPE_CHECKING, Any

from tensorgrad.compat.omitted import missing as _missing
from tensorgrad.nn import pointwise as _pointwise
from tensorgrad.nn.loss import (
    binary_cross_entropy_with_logits,
    huber_loss,
    kl_div,
    l1_loss,
    mse_loss,
)
from tensorgrad.nn.pointwise import *  # noqa: F403  the names that it lists
from tensorgrad.ops.attention import attention, attention_packed, attention_varlen
from tensorgrad.ops.creation import one_hot
from tensorgrad.ops.cross_entropy import cross_entropy, nll_loss
from tensorgrad.ops.dropout import dropout
from tensorgrad.ops.elementwise import tanh
from tensorgrad.ops.elementwise.activation import (
    elu,
    gelu,
    leaky_relu,
    relu,
    sigmoid,
    silu,
    softplus,
)
from tensorgrad.ops.embedding import embedding
from tensorgrad.ops.linear import linear
from tensorgrad.ops.linear_cross_entropy import linear_cross_entropy
from tensorgrad.ops.norm import group_norm, layer_norm, rms_norm
from tensorgrad.ops.reduce import logsumexp
from tensorgrad.ops.rotary import rotary
from tensorgrad.ops.softmax import log_softmax, softmax

__all__ = [
    "attention",
    "attention_packed",
    "attention_varlen",
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "dropout",
    "elu",
    "embedding",
    "gelu",
    "group_norm",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "leaky_relu",
    "linear",
    "linear_cross_entropy",
    "log_softmax",
    "logsumexp",
    "mse_loss",
    "nll_loss",
    "one_hot",
    "relu",
    "rms_norm",
    "rotary",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "tanh",
]
__all__ += _pointwise.__all__

if not TYPE_CHECKING:  # to a type checker every name would exist

    def __getattr__(name: str) -> Any:
        raise _missing(__name__, name)
