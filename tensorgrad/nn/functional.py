"""Functions of neural networks, under PyTorch's name for the module."""

from typing import TYPE_CHECKING, Any

from tensorgrad.nn.loss import (
    binary_cross_entropy_with_logits,
    huber_loss,
    kl_div,
    l1_loss,
    mse_loss,
)
from tensorgrad.nn.pointwise import (
    binary_cross_entropy,
    cdist,
    celu,
    cosine_embedding_loss,
    cosine_similarity,
    gaussian_nll_loss,
    glu,
    hardshrink,
    hardsigmoid,
    hardswish,
    hardtanh,
    hinge_embedding_loss,
    logsigmoid,
    margin_ranking_loss,
    mish,
    normalize,
    pairwise_distance,
    poisson_nll_loss,
    prelu,
    relu6,
    selu,
    smooth_l1_loss,
    soft_margin_loss,
    softmin,
    softshrink,
    softsign,
    tanhshrink,
    threshold,
    triplet_margin_loss,
)
from tensorgrad.omitted import missing as _missing
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
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cdist",
    "celu",
    "cosine_embedding_loss",
    "cosine_similarity",
    "cross_entropy",
    "dropout",
    "elu",
    "embedding",
    "gaussian_nll_loss",
    "gelu",
    "glu",
    "group_norm",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "leaky_relu",
    "linear",
    "linear_cross_entropy",
    "log_softmax",
    "logsigmoid",
    "logsumexp",
    "margin_ranking_loss",
    "mish",
    "mse_loss",
    "nll_loss",
    "normalize",
    "one_hot",
    "pairwise_distance",
    "poisson_nll_loss",
    "prelu",
    "relu",
    "relu6",
    "rms_norm",
    "rotary",
    "selu",
    "sigmoid",
    "silu",
    "smooth_l1_loss",
    "soft_margin_loss",
    "softmax",
    "softmin",
    "softplus",
    "softshrink",
    "softsign",
    "tanh",
    "tanhshrink",
    "threshold",
    "triplet_margin_loss",
]

if not TYPE_CHECKING:  # to a type checker every name would exist

    def __getattr__(name: str) -> Any:
        raise _missing(__name__, name)
