"""Activation functions and losses that few models use: compositions of ops, under PyTorch's names.

`nn.functional` exports them. Those that models use often have kernels of their own: see
ops/elementwise/activation.py and nn/loss.py. Tests: tests/nn/test_pointwise.py, and PyTorch's own
samples in tests/parity/test_op_db.py.
"""

from __future__ import annotations

from typing import Any, Never

from tensorgrad.core.checks import axis_index, check_flag, check_number, unexpected
from tensorgrad.core.dtypes import DtypeLike
from tensorgrad.core.errors import ArgumentError, ShapeError
from tensorgrad.core.operands import (
    constant_of,
    float_operand,
    float_operands,
    float_tensor,
    operands,
)
from tensorgrad.core.tensor import ArrayLike, Tensor
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


def celu(x: ArrayLike, alpha: float = 1.0) -> Tensor:
    """Return x, or alpha * (exp(x / alpha) - 1) where x < 0 (Barron 2017, arXiv:1704.07483).

    Args:
        x: any shape, any float dtype.
        alpha: a number above 0.

    Returns:
        The shape and dtype of x.

    Example:
        >>> tg.nn.functional.celu([-1.0, 2.0]).tolist()
        [-0.632..., 2.0]
    """
    x = float_tensor("celu", "x", x)
    _check_positive("celu", "alpha", alpha)
    return where(x.data >= 0, x, alpha * expm1(minimum(x, 0) / alpha))


def selu(x: ArrayLike) -> Tensor:
    """Return 1.0507 * elu(x, 1.6733), which keeps mean 0 and variance 1 (arXiv:1706.02515).

    Args:
        x: any shape, any float dtype.

    Returns:
        The shape and dtype of x.

    Example:
        >>> tg.nn.functional.selu([0.0, 2.0]).tolist()
        [0.0, 2.101...]
    """
    y: Tensor = 1.0507009873554805 * elu(float_tensor("selu", "x", x), 1.6732632423543772)
    return y


def hardtanh(x: ArrayLike, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """Return x within [min_val, max_val], else the nearer bound, where the gradient is 0.

    Args:
        x: any shape, any float dtype.
        min_val, max_val: the bounds, numbers.

    Returns:
        The shape and dtype of x.

    Raises:
        ArgumentError: min_val is not below max_val.

    Example:
        >>> tg.nn.functional.hardtanh([-3.0, 0.5, 2.0]).tolist()
        [-1.0, 0.5, 1.0]
    """
    x = float_tensor("hardtanh", "x", x)
    check_number("hardtanh", "min_val", min_val)
    check_number("hardtanh", "max_val", max_val)
    if not min_val < max_val:
        raise ArgumentError(f"hardtanh: min_val is {min_val}, expected less than max_val {max_val}")
    low, high = float(min_val), float(max_val)
    return where(x.data <= low, low, where(x.data >= high, high, x))


def relu6(x: ArrayLike) -> Tensor:
    """Return `hardtanh(x, 0, 6)`.

    Args:
        x: any shape, any float dtype.

    Returns:
        The shape and dtype of x.

    Example:
        >>> tg.nn.functional.relu6([-1.0, 3.0, 8.0]).tolist()
        [0.0, 3.0, 6.0]
    """
    return hardtanh(x, 0.0, 6.0)


def hardsigmoid(x: ArrayLike) -> Tensor:
    """Return (x + 3) / 6 within [0, 1].

    Args:
        x: any shape, any float dtype.

    Returns:
        The shape and dtype of x.

    Example:
        >>> tg.nn.functional.hardsigmoid([-4.0, 0.0, 4.0]).tolist()
        [0.0, 0.5, 1.0]
    """
    return hardtanh(float_tensor("hardsigmoid", "x", x) + 3.0, 0.0, 6.0) / 6.0


def hardswish(x: ArrayLike) -> Tensor:
    """Return x * hardsigmoid(x) (Howard et al. 2019, arXiv:1905.02244).

    Args:
        x: any shape, any float dtype.

    Returns:
        The shape and dtype of x.

    Example:
        >>> tg.nn.functional.hardswish([-4.0, 0.0, 4.0]).tolist()
        [-0.0, 0.0, 4.0]
    """
    given = float_tensor("hardswish", "x", x)
    return given * hardsigmoid(given)


def hardshrink(x: ArrayLike, lambd: float = 0.5) -> Tensor:
    """Return x where |x| > lambd, else 0.

    Args:
        x: any shape, any float dtype.
        lambd: a number.

    Returns:
        The shape and dtype of x.

    Example:
        >>> tg.nn.functional.hardshrink([-1.0, 0.25, 2.0]).tolist()
        [-1.0, 0.0, 2.0]
    """
    x = float_tensor("hardshrink", "x", x)
    check_number("hardshrink", "lambd", lambd)
    return where(abs(x.detach()).data > lambd, x, 0.0)


def softshrink(x: ArrayLike, lambd: float = 0.5) -> Tensor:
    """Return x brought nearer to 0 by lambd, and 0 where |x| <= lambd.

    Args:
        x: any shape, any float dtype.
        lambd: a number.

    Returns:
        The shape and dtype of x.

    Example:
        >>> tg.nn.functional.softshrink([-1.0, 0.25, 2.0]).tolist()
        [-0.5, 0.0, 1.5]
    """
    x = float_tensor("softshrink", "x", x)
    check_number("softshrink", "lambd", lambd)
    return relu(x - lambd) - relu(-x - lambd)


def tanhshrink(x: ArrayLike) -> Tensor:
    """Return x - tanh(x).

    Args:
        x: any shape, any float dtype.

    Returns:
        The shape and dtype of x.

    Example:
        >>> tg.nn.functional.tanhshrink([0.0, 1.0]).tolist()
        [0.0, 0.238...]
    """
    given = float_tensor("tanhshrink", "x", x)
    return given - tanh(given)


def softsign(x: ArrayLike) -> Tensor:
    """Return x / (1 + |x|).

    Args:
        x: any shape, any float dtype.

    Returns:
        The shape and dtype of x.

    Example:
        >>> tg.nn.functional.softsign([-1.0, 3.0]).tolist()
        [-0.5, 0.75]
    """
    given = float_tensor("softsign", "x", x)
    return given / (1.0 + abs(given))


def logsigmoid(x: ArrayLike) -> Tensor:
    """Return log(sigmoid(x)), without overflow.

    Args:
        x: any shape, any float dtype.

    Returns:
        The shape and dtype of x.

    Example:
        >>> tg.nn.functional.logsigmoid([0.0, -1000.0]).tolist()
        [-0.693..., -1000.0]
    """
    return -SOFTPLUS(-float_tensor("logsigmoid", "x", x))


def mish(x: ArrayLike) -> Tensor:
    """Return x * tanh(softplus(x)) (Misra 2019, arXiv:1908.08681).

    Args:
        x: any shape, any float dtype.

    Returns:
        The shape and dtype of x.

    Example:
        >>> tg.nn.functional.mish([0.0, 1.0]).tolist()
        [0.0, 0.865...]
    """
    given = float_tensor("mish", "x", x)
    return given * tanh(SOFTPLUS(given))


def threshold(x: ArrayLike, threshold: float, value: float) -> Tensor:
    """Return x where it is above a threshold, else a value.

    Args:
        x: any shape, any float dtype.
        threshold: a number.
        value: a number, in place of the elements up to the threshold.

    Returns:
        The shape and dtype of x.

    Example:
        >>> tg.nn.functional.threshold([0.0, 1.0, 2.0], 1.0, -5.0).tolist()
        [-5.0, -5.0, 2.0]
    """
    x = float_tensor("threshold", "x", x)
    check_number("threshold", "threshold", threshold)
    check_number("threshold", "value", value)
    return where(x.data > threshold, x, float(value))


def prelu(x: ArrayLike, weight: ArrayLike) -> Tensor:
    """Return x, or weight * x where x < 0.

    Args:
        x: any shape, any float dtype; axis 1 has the channels.
        weight: (1,) or one element for each channel.

    Returns:
        The shape of x, in the dtype that both promote to.

    Raises:
        ShapeError: weight has another number of elements.

    Example:
        >>> tg.nn.functional.prelu([[-2.0, -2.0]], [0.5, 0.25]).tolist()
        [[-1.0, -0.5]]
    """
    x, weight = float_operands("prelu", ("x", "weight"), (x, weight))
    channels = x.shape[1] if x.ndim > 1 else 1
    if weight.size not in (1, channels) or weight.ndim > 1:
        raise ShapeError(f"prelu: weight has shape {weight.shape}, expected (1,) or ({channels},)")
    if weight.size == 1:
        return leaky_relu(x, reshape(weight, ()))
    return leaky_relu(x, reshape(weight, (channels,) + (1,) * (x.ndim - 2)))


def glu(x: ArrayLike, axis: int = -1, **unknown: Never) -> Tensor:
    """Return the first half of x along an axis, times the sigmoid of the second.

    Args:
        x: any float dtype, an even length along the axis.
        axis: the axis that is halved.

    Returns:
        The shape of x, half as long along the axis, in its dtype.

    Raises:
        ShapeError: the axis has an odd length.
    Source: Dauphin et al. 2016, arXiv:1612.08083.

    Example:
        >>> tg.nn.functional.glu([4.0, 2.0, 0.0, 0.0]).tolist()
        [2.0, 1.0]
    """
    if unknown:
        raise unexpected("glu", unknown)
    x = float_tensor("glu", "x", x)
    axis = axis_index("glu", axis, x.ndim)
    half = x.shape[axis] // 2
    if x.shape[axis] % 2:
        raise ShapeError(f"glu: axis {axis} of x has length {x.shape[axis]}, expected an even one")
    before = (slice(None),) * axis
    y: Tensor = x[(*before, slice(half))] * sigmoid(x[(*before, slice(half, None))])
    return y


def softmin(
    x: ArrayLike, axis: int = -1, *, dtype: DtypeLike | None = None, **unknown: Never
) -> Tensor:
    """Return `softmax(-x, axis)`, of x in a dtype if one is given.

    Args:
        x: one axis or more, any float dtype.
        axis: the axis along which the results sum to 1.
        dtype: to convert x to first; None: it stays.

    Returns:
        The shape of x, in its dtype or the given one.

    Example:
        >>> tg.nn.functional.softmin([3.0, 3.0]).tolist()
        [0.5, 0.5]
    """
    if unknown:
        raise unexpected("softmin", unknown)
    x = x if dtype is None else astype(x, dtype, copy=False)
    return softmax(-float_tensor("softmin", "x", x), axis)


def normalize(
    x: ArrayLike, p: float = 2.0, axis: int = 1, eps: float = 1e-12, **unknown: Never
) -> Tensor:
    """Return x / max(norm, eps), with norms of order 1, 2 or inf along an axis.

    Args:
        x: any shape with that axis, any float dtype.
        p: the order of the norm: 1, 2 or inf.
        axis: one axis or several.
        eps: the least number to divide by.

    Returns:
        The shape and dtype of x.

    Example:
        >>> tg.nn.functional.normalize([[0.0, 4.0], [2.0, 0.0]]).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """
    if unknown:
        raise unexpected("normalize", unknown)
    given = float_tensor("normalize", "x", x)
    check_number("normalize", "eps", eps)
    return given / maximum(norm(given, axis, ord=p, keepdims=True), eps)


def cosine_similarity(
    x: ArrayLike, y: ArrayLike, axis: int = 1, eps: float = 1e-8, **unknown: Never
) -> Tensor:
    """Return the cosine of the angle of x and y, which broadcast, along an axis.

    Args:
        x, y: any float dtype; shapes that broadcast.
        axis: the axis of the vectors' elements.
        eps: the least length of a vector to divide by.

    Returns:
        The shape that x and y broadcast to, without the axis, in the dtype that both promote to.

    Example:
        >>> tg.nn.functional.cosine_similarity([[2.0, 0.0]], [[3.0, 0.0], [0.0, 5.0]]).tolist()
        [1.0, 0.0]
    """
    if unknown:
        raise unexpected("cosine_similarity", unknown)
    x, y = float_operands("cosine_similarity", ("x", "y"), (x, y))
    check_number("cosine_similarity", "eps", eps)
    x, y = broadcast_arrays(x, y)
    lengths = [maximum(norm(vector, axis, keepdims=True), eps) for vector in (x, y)]
    return sum((x / lengths[0]) * (y / lengths[1]), axis)


def pairwise_distance(
    x: ArrayLike,
    y: ArrayLike,
    p: float = 2.0,
    eps: float = 1e-6,
    keepdims: bool = False,
    **unknown: Never,
) -> Tensor:
    """Return the norms of order 1, 2 or inf of x - y + eps along the last axis.

    Args:
        x, y: (..., C), any float dtype; shapes that broadcast.
        p: the order of the norm: 1, 2 or inf.
        eps: added to each element, so that the gradient of equal vectors is finite.
        keepdims: whether the last axis stays with length 1.

    Returns:
        The shape that x and y broadcast to without its last axis, in the dtype that both promote
        to.

    Example:
        >>> tg.nn.functional.pairwise_distance([[3.0, 4.0]], [[0.0, 0.0]], eps=0.0).tolist()
        [5.0]
    """
    if unknown:
        raise unexpected("pairwise_distance", unknown)
    x, y = float_operands("pairwise_distance", ("x", "y"), (x, y))
    check_number("pairwise_distance", "eps", eps)
    return norm(x - y + eps, -1, ord=p, keepdims=keepdims)


def cdist(x: ArrayLike, y: ArrayLike, *, p: float = 2.0) -> Tensor:
    """Return the distances of all rows of x from all rows of y; the gradient at 0 is 0.

    Args:
        x: (..., M, C), any float dtype.
        y: (..., N, C).
        p: the order of the norm of a difference: see `linalg.vector_norm`.

    Returns:
        (..., M, N), in the dtype that both promote to.

    Raises:
        ShapeError: they have no rows, or rows of different lengths.

    Example:
        >>> tg.nn.functional.cdist([[0.0, 0.0]], [[3.0, 4.0], [0.0, 1.0]]).tolist()
        [[5.0, 1.0]]
    """
    x, y = float_operands("cdist", ("x", "y"), (x, y))
    if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-1]:
        raise ShapeError(f"cdist: y has shape {y.shape}, expected rows as long as those of x, "
                         f"{x.shape}")  # fmt: skip
    return vector_norm(expand_dims(x, -2) - expand_dims(y, -3), axis=-1, ord=p)


def smooth_l1_loss(
    x: ArrayLike, target: ArrayLike, reduction: str = "mean", beta: float = 1.0
) -> Tensor:
    """Return `huber_loss(x, target, reduction, beta) / beta`.

    Args:
        x: any shape, any float dtype.
        target: the shape of x.
        reduction: "mean", "sum" or "none", as for `mse_loss`.
        beta: above 0; errors below it are squared.

    Returns:
        A scalar, or the shape of x for "none"; at least float32.

    Raises:
        ArgumentError: beta is not above 0, or another reduction.
        ShapeError: target has another shape than x.

    Example:
        >>> tg.nn.functional.smooth_l1_loss([0.0, 3.0], [1.0, 0.0], "none").tolist()
        [0.5, 2.5]
    """
    _check_positive("smooth_l1_loss", "beta", beta)
    return huber_loss(x, target, reduction, beta) / beta


def soft_margin_loss(x: ArrayLike, target: ArrayLike, reduction: str = "mean") -> Tensor:
    """Return log(1 + exp(-target * x)).

    Args:
        x: any shape, any float dtype.
        target: the shape of x, of 1 and -1.
        reduction: "mean", "sum" or "none", as for `mse_loss`.

    Returns:
        A scalar, or the shape of x for "none".

    Example:
        >>> tg.nn.functional.soft_margin_loss([0.0, 1.0], [1.0, -1.0], "none").tolist()
        [0.693..., 1.313...]
    """
    x, target = _both("soft_margin_loss", x, target)
    return reduced("soft_margin_loss", SOFTPLUS(-target * x), reduction)


def margin_ranking_loss(
    x: ArrayLike, y: ArrayLike, target: ArrayLike, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """Return max(0, margin - target * (x - y)): for target 1, 0 where x is above y + margin.

    Args:
        x, y: scores, equal shapes, any float dtype.
        target: of 1 (x is to be ranked higher) and -1; broadcasts.
        margin: a number.
        reduction: "mean", "sum" or "none", as for `mse_loss`.

    Returns:
        A scalar, or the shape of x for "none".

    Example:
        >>> F = tg.nn.functional
        >>> F.margin_ranking_loss([2.0, 1.0], [1.0, 3.0], 1.0, reduction="none").tolist()
        [0.0, 2.0]
    """
    x, y, target = operands("margin_ranking_loss", ("x", "y", "target"), (x, y, target))
    x, y = _both("margin_ranking_loss", x, y, "y")
    check_number("margin_ranking_loss", "margin", margin)
    return reduced("margin_ranking_loss", relu(margin - target * (x - y)), reduction)


_LABELS = "labels have none"


def hinge_embedding_loss(
    x: ArrayLike, target: ArrayLike, margin: float = 1.0, reduction: str = "mean"
) -> Tensor:
    """Return x where the target is 1, and max(0, margin - x) where it is -1.

    Args:
        x: distances, any shape, any float dtype.
        target: the shape of x, of 1 and -1; without a gradient.
        margin: a number.
        reduction: "mean", "sum" or "none", as for `mse_loss`.

    Returns:
        A scalar, or the shape of x for "none".

    Raises:
        GradError: target requires a gradient.

    Example:
        >>> F = tg.nn.functional
        >>> F.hinge_embedding_loss([0.25, 0.25], [1.0, -1.0], reduction="none").tolist()
        [0.25, 0.75]
    """
    x, target = _both("hinge_embedding_loss", x, target)
    check_number("hinge_embedding_loss", "margin", margin)
    constant_of("hinge_embedding_loss", "target", target, _LABELS)
    near, far = where(target.data != -1, x, 0.0), where(target.data != 1, relu(margin - x), 0.0)
    losses = near + far  # other targets get both
    return reduced("hinge_embedding_loss", losses, reduction)


def poisson_nll_loss(
    x: ArrayLike,
    target: ArrayLike,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Tensor:
    """Return the negative log-likelihood of counts under Poisson distributions of rate exp(x).

    Args:
        x: the logarithm of the rate; the rate itself without `log_input`; any float dtype.
        target: the shape of x.
        log_input: see x.
        full: whether to add Stirling's approximation of log(target!) for targets above 1.
        eps: what is added to a rate before its logarithm.
        reduction: "mean", "sum" or "none", as for `mse_loss`.

    Returns:
        A scalar, or the shape of x for "none".

    Example:
        >>> tg.nn.functional.poisson_nll_loss([0.0, 0.0], [1.0, 3.0], reduction="none").tolist()
        [1.0, 1.0]
    """
    x, target = _both("poisson_nll_loss", x, target)
    check_number("poisson_nll_loss", "eps", eps)
    check_flag("poisson_nll_loss", "log_input", log_input)
    check_flag("poisson_nll_loss", "full", full)
    losses = exp(x) - target * x if log_input else x - target * log(x + eps)
    if full:
        large = where(target.data > 1, target, 2.0)
        stirling = large * log(large) - large + 0.5 * log(6.283185307179586 * large)
        losses = losses + where(target.data > 1, stirling, 0.0)
    return reduced("poisson_nll_loss", losses, reduction)


def binary_cross_entropy(
    x: ArrayLike, target: ArrayLike, weight: ArrayLike | None = None, reduction: str = "mean"
) -> Tensor:
    """Return the cross entropy of probabilities x; logarithms are -100 at least.

    Prefer `binary_cross_entropy_with_logits`, which loses no digits near 0 and 1.

    Args:
        x: probabilities, any shape, any float dtype.
        target: the shape of x, 0 to 1.
        weight: of each loss; a number, or a tensor that broadcasts to x. None: 1.
        reduction: "mean", "sum" or "none", as for `mse_loss`.

    Returns:
        A scalar, or the shape of x for "none".

    Raises:
        ShapeError: target has another shape than x.

    Example:
        >>> tg.nn.functional.binary_cross_entropy([0.5, 1.0], [1.0, 0.0], reduction="none").tolist()
        [0.693..., 100.0]
    """
    names = ("x", "target", "weight")
    x, target, weight = operands("binary_cross_entropy", names, (x, target, weight), 1)
    x, target = _both("binary_cross_entropy", x, target)
    logs = [_FINITE_LOG(p) for p in (x, 1.0 - x)]
    losses = -(target * logs[0] + (1.0 - target) * logs[1])
    return reduced("binary_cross_entropy", losses if weight is None else losses * weight, reduction)


def gaussian_nll_loss(
    x: ArrayLike,
    target: ArrayLike,
    var: ArrayLike,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Return the negative log-likelihood of targets under normal distributions of mean x.

    Args:
        x: any shape, any float dtype.
        target: the shape of x.
        var: the variances, not below 0: the shape of x, without its last axis or with length 1
            there, or one number.
        full: whether to add log(2 pi) / 2.
        eps: the least variance; below it the gradient passes as if it were not.
        reduction: "mean", "sum" or "none", as for `mse_loss`.

    Returns:
        A scalar, or the shape of x for "none".

    Raises:
        ShapeError: var has another shape.

    Example:
        >>> F = tg.nn.functional
        >>> F.gaussian_nll_loss([0.0, 0.0], [1.0, 2.0], 1.0, reduction="none").tolist()
        [0.5, 2.0]
    """
    op = "gaussian_nll_loss"
    x, target, var = operands(op, ("x", "target", "var"), (x, target, var))
    x, target = _both(op, x, target)
    float_operand(op, "var", var)
    check_number(op, "eps", eps)
    check_flag(op, "full", full)
    if var.shape == x.shape[:-1] and var.shape != x.shape:
        var = expand_dims(var, -1)
    if var.ndim and var.shape not in (x.shape, (*x.shape[:-1], 1)):
        raise ShapeError(f"{op}: var has shape {var.shape}, expected {x.shape} as x")
    var = var + maximum(eps - var.detach(), 0.0)
    difference = x - target
    losses = 0.5 * (log(var) + difference * difference / var)
    return reduced(op, losses + 0.9189385332046727 if full else losses, reduction)


def cosine_embedding_loss(
    x: ArrayLike, y: ArrayLike, target: ArrayLike, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """Return 1 - cos(x, y) where the target is 1, and max(0, cos(x, y) - margin) where it is -1.

    Args:
        x, y: (N, C) or (C,), any float dtype.
        target: (N,) or (), of 1 and -1; without a gradient.
        margin: from -1 to 1.
        reduction: "mean", "sum" or "none", as for `mse_loss`.

    Returns:
        A scalar, or the shape of target for "none".

    Raises:
        ShapeError: x and y differ in shape, or target does not fit them.
        GradError: target requires a gradient.

    Example:
        >>> tg.nn.functional.cosine_embedding_loss([[2.0, 0.0]], [[0.0, 3.0]], [1]).tolist()
        1.0
    """
    op = "cosine_embedding_loss"
    x, y, target = operands(op, ("x", "y", "target"), (x, y, target))
    x, y = _both(op, x, y, "y")
    check_number(op, "margin", margin)
    constant_of(op, "target", target, _LABELS)
    if target.shape != x.shape[:-1]:
        raise ShapeError(f"{op}: target has shape {target.shape}, expected {x.shape[:-1]}")
    cosine = sum(x * y, -1) / sqrt((sum(x * x, -1) + 1e-12) * (sum(y * y, -1) + 1e-12))
    losses = where(target.data == 1, 1.0 - cosine, 0.0)
    losses = losses + where(target.data == -1, maximum(cosine - margin, 0.0), 0.0)
    return reduced(op, losses, reduction)


def triplet_margin_loss(
    anchor: ArrayLike,
    positive: ArrayLike,
    negative: ArrayLike,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """Return max(0, margin + |anchor - positive| - |anchor - negative|), by `pairwise_distance`.

    Args:
        anchor, positive, negative: (..., C), any float dtype; shapes that broadcast.
        margin: how much farther the negative is to be, a number.
        p: the order of the norm: 1, 2 or inf.
        eps: as for `pairwise_distance`.
        swap: whether the negative's distance to the positive counts where that is smaller.
        reduction: "mean", "sum" or "none", as for `mse_loss`.

    Returns:
        A scalar, or the shape that all broadcast to without its last axis for "none".

    Example:
        >>> tg.nn.functional.triplet_margin_loss([0.0], [1.0], [1.5], eps=0.0).tolist()
        0.5
    """
    names = ("anchor", "positive", "negative")
    anchor, positive, negative = float_operands(
        "triplet_margin_loss", names, (anchor, positive, negative)
    )
    check_number("triplet_margin_loss", "margin", margin)
    check_number("triplet_margin_loss", "eps", eps)
    check_flag("triplet_margin_loss", "swap", swap)
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
