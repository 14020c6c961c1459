"""Activation functions and losses that few models use: compositions of ops, under PyTorch's names.

`nn.functional` exports them. Those that models use often have kernels of their own: see
ops/elementwise/activation.py and nn/loss.py. Tests: tests/nn/test_pointwise.py, and PyTorch's own
samples in tests/parity/test_op_db.py.
"""

from __future__ import annotations

from typing import Any

from tensorgrad.core.checks import axis_index, check_number
from tensorgrad.core.dtypes import DtypeLike
from tensorgrad.core.errors import ArgumentError, ShapeError
from tensorgrad.core.operands import (
    constant_of,
    float_operand,
    float_operands,
    float_tensor,
    operands,
)
from tensorgrad.core.tensor import Tensor
from tensorgrad.linalg import vector_norm
from tensorgrad.nn.loss import huber_loss
from tensorgrad.ops.cross_entropy import reduced
from tensorgrad.ops.elementwise import abs, exp, expm1, log, maximum, minimum, sqrt, tanh, where
from tensorgrad.ops.elementwise.activation import SOFTPLUS, elu, leaky_relu, relu, sigmoid
from tensorgrad.ops.elementwise.row import Row
from tensorgrad.ops.reduce import norm, sum
from tensorgrad.ops.shape import astype, expand_dims, reshape
from tensorgrad.ops.softmax import softmax
from tensorgrad.ops.stacking import broadcast_arrays

__all__ = [
    "binary_cross_entropy", "cdist", "celu", "cosine_embedding_loss", "cosine_similarity",
    "gaussian_nll_loss", "glu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh",
    "hinge_embedding_loss", "logsigmoid", "margin_ranking_loss", "mish", "normalize",
    "pairwise_distance", "poisson_nll_loss", "prelu", "relu6", "selu", "smooth_l1_loss",
    "soft_margin_loss", "softmin", "softshrink", "softsign", "tanhshrink", "threshold",
    "triplet_margin_loss",
]  # fmt: skip


def celu(x: Any, alpha: float = 1.0) -> Tensor:
    """Return x, or alpha * (exp(x / alpha) - 1) where x < 0 (Barron 2017, arXiv:1704.07483)."""
    x = float_tensor("celu", "x", x)
    _check_positive("celu", "alpha", alpha)
    return where(x.data >= 0, x, alpha * expm1(minimum(x, 0) / alpha))


def selu(x: Any) -> Tensor:
    """Return 1.0507 * elu(x, 1.6733), which keeps mean 0 and variance 1 (arXiv:1706.02515)."""
    y: Tensor = 1.0507009873554805 * elu(float_tensor("selu", "x", x), 1.6732632423543772)
    return y


def hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """Return x within [min_val, max_val], else the nearer bound, where the gradient is 0.

    Raises:
        ArgumentError: min_val is not below max_val.
    """
    x = float_tensor("hardtanh", "x", x)
    check_number("hardtanh", "min_val", min_val)
    check_number("hardtanh", "max_val", max_val)
    if not min_val < max_val:
        raise ArgumentError(f"hardtanh: min_val is {min_val}, expected less than max_val {max_val}")
    low, high = float(min_val), float(max_val)
    return where(x.data <= low, low, where(x.data >= high, high, x))


def relu6(x: Any) -> Tensor:
    """Return `hardtanh(x, 0, 6)`."""
    return hardtanh(x, 0.0, 6.0)


def hardsigmoid(x: Any) -> Tensor:
    """Return (x + 3) / 6 within [0, 1]."""
    return hardtanh(float_tensor("hardsigmoid", "x", x) + 3.0, 0.0, 6.0) / 6.0


def hardswish(x: Any) -> Tensor:
    """Return x * hardsigmoid(x) (Howard et al. 2019, arXiv:1905.02244)."""
    given = float_tensor("hardswish", "x", x)
    return given * hardsigmoid(given)


def hardshrink(x: Any, lambd: float = 0.5) -> Tensor:
    """Return x where |x| > lambd, else 0."""
    x = float_tensor("hardshrink", "x", x)
    check_number("hardshrink", "lambd", lambd)
    return where(abs(x.detach()).data > lambd, x, 0.0)


def softshrink(x: Any, lambd: float = 0.5) -> Tensor:
    """Return x brought nearer to 0 by lambd, and 0 where |x| <= lambd."""
    x = float_tensor("softshrink", "x", x)
    return relu(x - lambd) - relu(-x - lambd)


def tanhshrink(x: Any) -> Tensor:
    """Return x - tanh(x)."""
    given = float_tensor("tanhshrink", "x", x)
    return given - tanh(given)


def softsign(x: Any) -> Tensor:
    """Return x / (1 + |x|)."""
    given = float_tensor("softsign", "x", x)
    return given / (1.0 + abs(given))


def logsigmoid(x: Any) -> Tensor:
    """Return log(sigmoid(x)), without overflow."""
    return -SOFTPLUS(-float_tensor("logsigmoid", "x", x))


def mish(x: Any) -> Tensor:
    """Return x * tanh(softplus(x)) (Misra 2019, arXiv:1908.08681)."""
    given = float_tensor("mish", "x", x)
    return given * tanh(SOFTPLUS(given))


def threshold(x: Any, threshold: float, value: float) -> Tensor:
    """Return x where it is above a threshold, else a value."""
    x = float_tensor("threshold", "x", x)
    check_number("threshold", "threshold", threshold)
    check_number("threshold", "value", value)
    return where(x.data > threshold, x, float(value))


def prelu(x: Any, weight: Any) -> Tensor:
    """Return x, or weight * x where x < 0.

    Args:
        x: any shape; axis 1 has the channels.
        weight: (1,) or one element for each channel.

    Raises:
        ShapeError: weight has another number of elements.
    """
    x, weight = float_operands("prelu", ("x", "weight"), (x, weight))
    channels = x.shape[1] if x.ndim > 1 else 1
    if weight.size not in (1, channels) or weight.ndim > 1:
        raise ShapeError(f"prelu: weight has shape {weight.shape}, expected (1,) or ({channels},)")
    if weight.size == 1:
        return leaky_relu(x, reshape(weight, ()))
    return leaky_relu(x, reshape(weight, (channels,) + (1,) * (x.ndim - 2)))


def glu(x: Any, axis: int = -1) -> Tensor:
    """Return the first half of x along an axis, times the sigmoid of the second.

    Raises:
        ShapeError: the axis has an odd length.
    Source: Dauphin et al. 2016, arXiv:1612.08083.
    """
    x = float_tensor("glu", "x", x)
    axis = axis_index("glu", axis, x.ndim)
    half = x.shape[axis] // 2
    if x.shape[axis] % 2:
        raise ShapeError(f"glu: axis {axis} of x has length {x.shape[axis]}, expected an even one")
    before = (slice(None),) * axis
    y: Tensor = x[(*before, slice(half))] * sigmoid(x[(*before, slice(half, None))])
    return y


def softmin(x: Any, axis: int = -1, dtype: DtypeLike | None = None) -> Tensor:
    """Return `softmax(-x, axis)`, of x in a dtype if one is given."""
    x = x if dtype is None else astype(x, dtype, copy=False)
    return softmax(-float_tensor("softmin", "x", x), axis)


def normalize(x: Any, p: float = 2.0, axis: int = 1, eps: float = 1e-12) -> Tensor:
    """Return x / max(norm, eps), with norms of order 1, 2 or inf along an axis."""
    given = float_tensor("normalize", "x", x)
    return given / maximum(norm(given, axis, ord=p, keepdims=True), eps)


def cosine_similarity(x: Any, y: Any, axis: int = 1, eps: float = 1e-8) -> Tensor:
    """Return the cosine of the angle of x and y, which broadcast, along an axis."""
    x, y = float_operands("cosine_similarity", ("x", "y"), (x, y))
    x, y = broadcast_arrays(x, y)
    lengths = [maximum(norm(vector, axis, keepdims=True), eps) for vector in (x, y)]
    return sum((x / lengths[0]) * (y / lengths[1]), axis)


def pairwise_distance(
    x: Any, y: Any, p: float = 2.0, eps: float = 1e-6, keepdims: bool = False
) -> Tensor:
    """Return the norms of order 1, 2 or inf of x - y + eps along the last axis."""
    x, y = float_operands("pairwise_distance", ("x", "y"), (x, y))
    return norm(x - y + eps, -1, ord=p, keepdims=keepdims)


def cdist(x: Any, y: Any, p: float = 2.0) -> Tensor:
    """Return the distances of all rows of x from all rows of y, (..., M, N); 0 has gradient 0.

    Args:
        x: (..., M, C).
        y: (..., N, C).
        p: the order of the norm of a difference: see `linalg.vector_norm`.

    Raises:
        ShapeError: they have no rows, or rows of different lengths.
    """
    x, y = float_operands("cdist", ("x", "y"), (x, y))
    if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-1]:
        raise ShapeError(f"cdist: y has shape {y.shape}, expected rows as long as those of x, "
                         f"{x.shape}")  # fmt: skip
    return vector_norm(expand_dims(x, -2) - expand_dims(y, -3), -1, ord=p)


def smooth_l1_loss(x: Any, target: Any, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """Return `huber_loss(x, target, reduction, beta) / beta`."""
    _check_positive("smooth_l1_loss", "beta", beta)
    return huber_loss(x, target, reduction, beta) / beta


def soft_margin_loss(x: Any, target: Any, reduction: str = "mean") -> Tensor:
    """Return log(1 + exp(-target * x)); the targets are 1 and -1."""
    x, target = _both("soft_margin_loss", x, target)
    return reduced("soft_margin_loss", SOFTPLUS(-target * x), reduction)


def margin_ranking_loss(
    x: Any, y: Any, target: Any, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """Return max(0, margin - target * (x - y)): for target 1, 0 where x is above y + margin."""
    x, y, target = operands("margin_ranking_loss", ("x", "y", "target"), (x, y, target))
    x, y = _both("margin_ranking_loss", x, y, "y")
    return reduced("margin_ranking_loss", relu(margin - target * (x - y)), reduction)


_LABELS = "labels have none"


def hinge_embedding_loss(
    x: Any, target: Any, margin: float = 1.0, reduction: str = "mean"
) -> Tensor:
    """Return x where the target is 1, and max(0, margin - x) where it is -1."""
    x, target = _both("hinge_embedding_loss", x, target)
    constant_of("hinge_embedding_loss", "target", target, _LABELS)
    near, far = where(target.data != -1, x, 0.0), where(target.data != 1, relu(margin - x), 0.0)
    losses = near + far  # other targets get both
    return reduced("hinge_embedding_loss", losses, reduction)


def poisson_nll_loss(
    x: Any,
    target: Any,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Tensor:
    """Return the negative log-likelihood of counts under Poisson distributions of rate exp(x).

    Args:
        x: the logarithm of the rate; the rate itself without `log_input`.
        target: the shape of x.
        log_input: see x.
        full: whether to add Stirling's approximation of log(target!) for targets above 1.
        eps: what is added to a rate before its logarithm.
        reduction: as for `mse_loss`.
    """
    x, target = _both("poisson_nll_loss", x, target)
    check_number("poisson_nll_loss", "eps", eps)
    losses = exp(x) - target * x if log_input else x - target * log(x + eps)
    if full:
        large = where(target.data > 1, target, 2.0)
        stirling = large * log(large) - large + 0.5 * log(6.283185307179586 * large)
        losses = losses + where(target.data > 1, stirling, 0.0)
    return reduced("poisson_nll_loss", losses, reduction)


def binary_cross_entropy(
    x: Any, target: Any, weight: Any = None, reduction: str = "mean"
) -> Tensor:
    """Return the cross entropy of probabilities x; logarithms are -100 at least.

    Prefer `binary_cross_entropy_with_logits`, which loses no digits near 0 and 1.
    """
    names = ("x", "target", "weight")
    x, target, weight = operands("binary_cross_entropy", names, (x, target, weight), 1)
    x, target = _both("binary_cross_entropy", x, target)
    logs = [_FINITE_LOG(p) for p in (x, 1.0 - x)]
    losses = -(target * logs[0] + (1.0 - target) * logs[1])
    return reduced("binary_cross_entropy", losses if weight is None else losses * weight, reduction)


def gaussian_nll_loss(
    x: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Return the negative log-likelihood of targets under normal distributions of mean x.

    Args:
        x: any shape.
        target: the shape of x.
        var: the variances, not below 0: the shape of x, without its last axis or with length 1
            there, or one number.
        full: whether to add log(2 pi) / 2.
        eps: the least variance; below it the gradient passes as if it were not.
        reduction: as for `mse_loss`.

    Raises:
        ShapeError: var has another shape.
    """
    op = "gaussian_nll_loss"
    x, target, var = operands(op, ("x", "target", "var"), (x, target, var))
    x, target = _both(op, x, target)
    float_operand(op, "var", var)
    if var.shape == x.shape[:-1] and var.shape != x.shape:
        var = expand_dims(var, -1)
    if var.ndim and var.shape not in (x.shape, (*x.shape[:-1], 1)):
        raise ShapeError(f"{op}: var has shape {var.shape}, expected {x.shape} as x")
    var = var + maximum(eps - var.detach(), 0.0)
    difference = x - target
    losses = 0.5 * (log(var) + difference * difference / var)
    return reduced(op, losses + 0.9189385332046727 if full else losses, reduction)


def cosine_embedding_loss(
    x: Any, y: Any, target: Any, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """Return 1 - cos(x, y) where the target is 1, and max(0, cos(x, y) - margin) where it is -1.

    Args:
        x, y: (N, C) or (C,).
        target: (N,) or (), of 1 and -1.
        margin: from -1 to 1.
        reduction: as for `mse_loss`.
    """
    op = "cosine_embedding_loss"
    x, y, target = operands(op, ("x", "y", "target"), (x, y, target))
    x, y = _both(op, x, y, "y")
    constant_of(op, "target", target, _LABELS)
    if target.shape != x.shape[:-1]:
        raise ShapeError(f"{op}: target has shape {target.shape}, expected {x.shape[:-1]}")
    cosine = sum(x * y, -1) / sqrt((sum(x * x, -1) + 1e-12) * (sum(y * y, -1) + 1e-12))
    losses = where(target.data == 1, 1.0 - cosine, 0.0)
    losses = losses + where(target.data == -1, maximum(cosine - margin, 0.0), 0.0)
    return reduced(op, losses, reduction)


def triplet_margin_loss(
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """Return max(0, margin + |anchor - positive| - |anchor - negative|), by `pairwise_distance`.

    With `swap` the negative's distance to the positive counts where that is smaller.
    """
    names = ("anchor", "positive", "negative")
    anchor, positive, negative = float_operands(
        "triplet_margin_loss", names, (anchor, positive, negative)
    )
    far = pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = minimum(far, pairwise_distance(positive, negative, p, eps))
    losses = relu(margin + pairwise_distance(anchor, positive, p, eps) - far)
    return reduced("triplet_margin_loss", losses, reduction)


def _both(op: str, x: Any, other: Any, name: str = "target") -> tuple[Tensor, Tensor]:
    """Return both operands of a loss, checked to be of one shape."""
    x, other = operands(op, ("x", name), (x, other))
    float_operand(op, "x", x)
    if x.shape != other.shape:
        raise ShapeError(f"{op}: {name} has shape {other.shape}, expected {x.shape} as x")
    return x, other


# Its gradient is as large as PyTorch's where log is -100: 1e12, and no NaN.
_FINITE_LOG = Row(
    "binary_cross_entropy",
    "x",
    "maximum(log(where(x == 0, 1.0, x)) - where(x == 0, 100.0, 0.0), -100.0)",
    "dy / maximum(x, 1e-12)",
)


def _check_positive(op: str, name: str, value: float) -> None:
    check_number(op, name, value)
    if not value > 0:
        raise ArgumentError(f"{op}: {name} is {value}, expected more than 0")
