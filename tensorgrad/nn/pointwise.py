"""Activation functions and losses that few models use: compositions of ops, under PyTorch's names.

`nn.functional` exports them. Those that models use often have kernels of their own: see
ops/elementwise/activation.py and nn/loss.py. Tests: tests/nn/test_pointwise.py, and PyTorch's own
samples in tests/parity/test_op_db.py.
"""

from __future__ import annotations

from typing import Never, SupportsIndex

from tensorgrad.core.backend import Axis
from tensorgrad.core.checks import axis_index
from tensorgrad.core.dtypes import DtypeLike
from tensorgrad.core.errors import ArgumentError, ShapeError
from tensorgrad.core.operands import constant_of, float_operand
from tensorgrad.core.signature import Float, Real, Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.linalg import vector_norm
from tensorgrad.nn.loss import huber_loss
from tensorgrad.ops.cross_entropy import Reduction, reduced
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

takes = Signatures(globals())


def celu(x: Float[ArrayLike, "..."], alpha: float = 1.0) -> Tensor:
    """Return x, or alpha * (exp(x / alpha) - 1) where x < 0 (Barron 2017, arXiv:1704.07483).

    Args:
        x: any shape, any float dtype.
        alpha: a number above 0.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x does not hold floats.

    Example:
        >>> tg.nn.functional.celu([-1.0, 2.0]).tolist()
        [-0.632..., 2.0]
    """
    (x,) = takes.celu(x, alpha)
    _check_positive("celu", "alpha", alpha)
    return where(x.data >= 0, x, alpha * expm1(minimum(x, 0) / alpha))


def selu(x: Float[ArrayLike, "..."]) -> Tensor:
    """Return 1.0507 * elu(x, 1.6733), which keeps mean 0 and variance 1 (arXiv:1706.02515).

    Args:
        x: any shape, any float dtype.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x does not hold floats.

    Example:
        >>> tg.nn.functional.selu([0.0, 2.0]).tolist()
        [0.0, 2.101...]
    """
    (x,) = takes.selu(x)
    y: Tensor = 1.0507009873554805 * elu(x, 1.6732632423543772)
    return y


def hardtanh(x: Float[ArrayLike, "..."], min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """Return x within [min_val, max_val], else the nearer bound, where the gradient is 0.

    Args:
        x: any shape, any float dtype.
        min_val, max_val: the bounds, numbers.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x does not hold floats.
        ArgumentError: min_val is not below max_val.

    Example:
        >>> tg.nn.functional.hardtanh([-3.0, 0.5, 2.0]).tolist()
        [-1.0, 0.5, 1.0]
    """
    (x,) = takes.hardtanh(x, min_val, max_val)
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


def hardsigmoid(x: Float[ArrayLike, "..."]) -> Tensor:
    """Return (x + 3) / 6 within [0, 1].

    Args:
        x: any shape, any float dtype.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x does not hold floats.

    Example:
        >>> tg.nn.functional.hardsigmoid([-4.0, 0.0, 4.0]).tolist()
        [0.0, 0.5, 1.0]
    """
    (x,) = takes.hardsigmoid(x)
    return hardtanh(x + 3.0, 0.0, 6.0) / 6.0


def hardswish(x: Float[ArrayLike, "..."]) -> Tensor:
    """Return x * hardsigmoid(x) (Howard et al. 2019, arXiv:1905.02244).

    Args:
        x: any shape, any float dtype.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x does not hold floats.

    Example:
        >>> tg.nn.functional.hardswish([-4.0, 0.0, 4.0]).tolist()
        [-0.0, 0.0, 4.0]
    """
    (x,) = takes.hardswish(x)
    return x * hardsigmoid(x)


def hardshrink(x: Float[ArrayLike, "..."], lambd: float = 0.5) -> Tensor:
    """Return x where |x| > lambd, else 0.

    Args:
        x: any shape, any float dtype.
        lambd: a number.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x does not hold floats.

    Example:
        >>> tg.nn.functional.hardshrink([-1.0, 0.25, 2.0]).tolist()
        [-1.0, 0.0, 2.0]
    """
    (x,) = takes.hardshrink(x, lambd)
    return where(abs(x.detach()).data > lambd, x, 0.0)


def softshrink(x: Float[ArrayLike, "..."], lambd: float = 0.5) -> Tensor:
    """Return x brought nearer to 0 by lambd, and 0 where |x| <= lambd.

    Args:
        x: any shape, any float dtype.
        lambd: a number.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x does not hold floats.

    Example:
        >>> tg.nn.functional.softshrink([-1.0, 0.25, 2.0]).tolist()
        [-0.5, 0.0, 1.5]
    """
    (x,) = takes.softshrink(x, lambd)
    return relu(x - lambd) - relu(-x - lambd)


def tanhshrink(x: Float[ArrayLike, "..."]) -> Tensor:
    """Return x - tanh(x).

    Args:
        x: any shape, any float dtype.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x does not hold floats.

    Example:
        >>> tg.nn.functional.tanhshrink([0.0, 1.0]).tolist()
        [0.0, 0.238...]
    """
    (x,) = takes.tanhshrink(x)
    return x - tanh(x)


def softsign(x: Float[ArrayLike, "..."]) -> Tensor:
    """Return x / (1 + |x|).

    Args:
        x: any shape, any float dtype.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x does not hold floats.

    Example:
        >>> tg.nn.functional.softsign([-1.0, 3.0]).tolist()
        [-0.5, 0.75]
    """
    (x,) = takes.softsign(x)
    return x / (1.0 + abs(x))


def logsigmoid(x: Float[ArrayLike, "..."]) -> Tensor:
    """Return log(sigmoid(x)), without overflow.

    Args:
        x: any shape, any float dtype.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x does not hold floats.

    Example:
        >>> tg.nn.functional.logsigmoid([0.0, -1000.0]).tolist()
        [-0.693..., -1000.0]
    """
    (x,) = takes.logsigmoid(x)
    return -SOFTPLUS(-x)


def mish(x: Float[ArrayLike, "..."]) -> Tensor:
    """Return x * tanh(softplus(x)) (Misra 2019, arXiv:1908.08681).

    Args:
        x: any shape, any float dtype.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x does not hold floats.

    Example:
        >>> tg.nn.functional.mish([0.0, 1.0]).tolist()
        [0.0, 0.865...]
    """
    (x,) = takes.mish(x)
    return x * tanh(SOFTPLUS(x))


def threshold(x: Float[ArrayLike, "..."], threshold: float, value: float) -> Tensor:
    """Return x where it is above a threshold, else a value.

    Args:
        x: any shape, any float dtype.
        threshold: a number.
        value: a number, in place of the elements up to the threshold.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x does not hold floats.

    Example:
        >>> tg.nn.functional.threshold([0.0, 1.0, 2.0], 1.0, -5.0).tolist()
        [-5.0, -5.0, 2.0]
    """
    (x,) = takes.threshold(x, threshold, value)
    return where(x.data > threshold, x, float(value))


def prelu(x: Float[ArrayLike, "..."], weight: Float[ArrayLike, "..."]) -> Tensor:
    """Return x, or weight * x where x < 0.

    Args:
        x: any shape, any float dtype; axis 1 has the channels.
        weight: (1,) or one element for each channel.

    Returns:
        The shape of x, in the dtype that both promote to.

    Raises:
        DtypeError: x or weight does not hold floats.
        DeviceError: the operands are on different devices.
        ShapeError: weight has another number of elements.

    Example:
        >>> tg.nn.functional.prelu([[-2.0, -2.0]], [0.5, 0.25]).tolist()
        [[-1.0, -0.5]]
    """
    x, weight = takes.prelu(x, weight)
    channels = x.shape[1] if x.ndim > 1 else 1
    if weight.size not in (1, channels) or weight.ndim > 1:
        raise ShapeError(f"prelu: weight has shape {weight.shape}, expected (1,) or ({channels},)")
    if weight.size == 1:
        return leaky_relu(x, reshape(weight, ()))
    return leaky_relu(x, reshape(weight, (channels,) + (1,) * (x.ndim - 2)))


def glu(x: Float[ArrayLike, "..."], axis: SupportsIndex = -1, **unknown: Never) -> Tensor:
    """Return the first half of x along an axis, times the sigmoid of the second.

    Args:
        x: any float dtype, an even length along the axis.
        axis: the axis that is halved.

    Returns:
        The shape of x, half as long along the axis, in its dtype.

    Raises:
        DtypeError: x does not hold floats.
        ShapeError: the axis has an odd length.
    Source: Dauphin et al. 2016, arXiv:1612.08083.

    Example:
        >>> tg.nn.functional.glu([4.0, 2.0, 0.0, 0.0]).tolist()
        [2.0, 1.0]
    """
    (x,) = takes.glu(x, unknown)
    place = axis_index("glu", axis, x.ndim)
    length = x.shape[place]
    half = length // 2
    if length % 2:
        raise ShapeError(f"glu: axis {place} of x has length {length}, expected an even one")
    before = (slice(None),) * place
    y: Tensor = x[(*before, slice(half))] * sigmoid(x[(*before, slice(half, None))])
    return y


def softmin(
    x: Float[ArrayLike, "..."],
    axis: SupportsIndex = -1,
    *,
    dtype: DtypeLike | None = None,
    **unknown: Never,
) -> Tensor:
    """Return `softmax(-x, axis)`, of x in a dtype if one is given.

    Args:
        x: one axis or more, any float dtype.
        axis: the axis along which the results sum to 1.
        dtype: to convert x to first; None: it stays.

    Returns:
        The shape of x, in its dtype or the given one.

    Raises:
        DtypeError: x does not hold floats.

    Example:
        >>> tg.nn.functional.softmin([3.0, 3.0]).tolist()
        [0.5, 0.5]
    """
    x = x if dtype is None else astype(x, dtype, copy=False)
    (x,) = takes.softmin(x, unknown)
    return softmax(-x, axis_index("softmin", axis, x.ndim))


def normalize(
    x: Float[ArrayLike, "..."], p: float = 2.0, axis: Axis = 1, eps: float = 1e-12, **unknown: Never
) -> Tensor:
    """Return x / max(norm, eps), with norms of order 1, 2 or inf along an axis.

    Args:
        x: any shape with that axis, any float dtype.
        p: the order of the norm: 1, 2 or inf.
        axis: one axis or several.
        eps: the least number to divide by.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x does not hold floats.

    Example:
        >>> tg.nn.functional.normalize([[0.0, 4.0], [2.0, 0.0]]).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """
    (x,) = takes.normalize(x, p, eps, unknown)
    return x / maximum(norm(x, axis, ord=p, keepdims=True), eps)


def cosine_similarity(
    x: Float[ArrayLike, "..."],
    y: Float[ArrayLike, "..."],
    axis: Axis = 1,
    eps: float = 1e-8,
    **unknown: Never,
) -> Tensor:
    """Return the cosine of the angle of x and y, which broadcast, along an axis.

    Args:
        x, y: any float dtype; shapes that broadcast.
        axis: the axis of the vectors' elements.
        eps: the least length of a vector to divide by.

    Returns:
        The shape that x and y broadcast to, without the axis, in the dtype that both promote to.

    Raises:
        DtypeError: x or y does not hold floats.
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.nn.functional.cosine_similarity([[2.0, 0.0]], [[3.0, 0.0], [0.0, 5.0]]).tolist()
        [1.0, 0.0]
    """
    x, y = takes.cosine_similarity(x, y, eps, unknown)
    x, y = broadcast_arrays(x, y)
    lengths = [maximum(norm(vector, axis, keepdims=True), eps) for vector in (x, y)]
    return sum((x / lengths[0]) * (y / lengths[1]), axis)


def pairwise_distance(
    x: Float[ArrayLike, "..."],
    y: Float[ArrayLike, "..."],
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

    Raises:
        DtypeError: x or y does not hold floats.
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.nn.functional.pairwise_distance([[3.0, 4.0]], [[0.0, 0.0]], eps=0.0).tolist()
        [5.0]
    """
    x, y = takes.pairwise_distance(x, y, p, eps, keepdims, unknown)
    return norm(x - y + eps, -1, ord=p, keepdims=keepdims)


def cdist(
    x: Float[ArrayLike, "... M C"], y: Float[ArrayLike, "... N C"], *, p: float = 2.0
) -> Tensor:
    """Return the distances of all rows of x from all rows of y; the gradient at 0 is 0.

    Args:
        x: (..., M, C), any float dtype.
        y: (..., N, C).
        p: the order of the norm of a difference: see `linalg.vector_norm`.

    Returns:
        (..., M, N), in the dtype that both promote to.

    Raises:
        DtypeError: x or y does not hold floats.
        ShapeError: x is not (..., M, C), y not (..., N, C).
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.nn.functional.cdist([[0.0, 0.0]], [[3.0, 4.0], [0.0, 1.0]]).tolist()
        [[5.0, 1.0]]
    """
    x, y = takes.cdist(x, y, p)
    return vector_norm(expand_dims(x, -2) - expand_dims(y, -3), axis=-1, ord=p)


def smooth_l1_loss(
    x: Real[ArrayLike, "*B"],
    target: Real[ArrayLike, "*B"],
    reduction: Reduction = "mean",
    beta: float = 1.0,
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
        DtypeError: x or target holds complex numbers.
        ShapeError: x is not (*B,), target not (*B,).
        DeviceError: the operands are on different devices.
        DtypeError: x is not a float.
        ArgumentError: beta is not above 0, or another reduction.

    Example:
        >>> tg.nn.functional.smooth_l1_loss([0.0, 3.0], [1.0, 0.0], "none").tolist()
        [0.5, 2.5]
    """
    x, target = takes.smooth_l1_loss(x, target, reduction, beta)
    _check_positive("smooth_l1_loss", "beta", beta)
    return huber_loss(x, target, reduction, beta) / beta


def soft_margin_loss(
    x: Real[ArrayLike, "*B"], target: Real[ArrayLike, "*B"], reduction: Reduction = "mean"
) -> Tensor:
    """Return log(1 + exp(-target * x)).

    Args:
        x: any shape, any float dtype.
        target: the shape of x, of 1 and -1.
        reduction: "mean", "sum" or "none", as for `mse_loss`.

    Returns:
        A scalar, or the shape of x for "none".

    Raises:
        DtypeError: x or target holds complex numbers.
        ShapeError: x is not (*B,), target not (*B,).
        DeviceError: the operands are on different devices.
        DtypeError: x is not a float.

    Example:
        >>> tg.nn.functional.soft_margin_loss([0.0, 1.0], [1.0, -1.0], "none").tolist()
        [0.693..., 1.313...]
    """
    x, target = takes.soft_margin_loss(x, target, reduction)
    float_operand("soft_margin_loss", "x", x)
    return reduced(SOFTPLUS(-target * x), reduction)


def margin_ranking_loss(
    x: Real[ArrayLike, "*B"],
    y: Real[ArrayLike, "*B"],
    target: Real[ArrayLike, "..."],
    margin: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return max(0, margin - target * (x - y)): for target 1, 0 where x is above y + margin.

    Args:
        x, y: scores, equal shapes, any float dtype.
        target: of 1 (x is to be ranked higher) and -1; broadcasts.
        margin: a number.
        reduction: "mean", "sum" or "none", as for `mse_loss`.

    Returns:
        A scalar, or the shape of x for "none".

    Raises:
        DtypeError: x, y or target holds complex numbers.
        ShapeError: x is not (*B,), y not (*B,).
        DeviceError: the operands are on different devices.
        DtypeError: x is not a float.

    Example:
        >>> F = tg.nn.functional
        >>> F.margin_ranking_loss([2.0, 1.0], [1.0, 3.0], 1.0, reduction="none").tolist()
        [0.0, 2.0]
    """
    x, y, target = takes.margin_ranking_loss(x, y, target, margin, reduction)
    float_operand("margin_ranking_loss", "x", x)
    return reduced(relu(margin - target * (x - y)), reduction)


_LABELS = "labels have none"


def hinge_embedding_loss(
    x: Real[ArrayLike, "*B"],
    target: Real[ArrayLike, "*B"],
    margin: float = 1.0,
    reduction: Reduction = "mean",
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
        DtypeError: x or target holds complex numbers.
        ShapeError: x is not (*B,), target not (*B,).
        DeviceError: the operands are on different devices.
        DtypeError: x is not a float.
        GradError: target requires a gradient.

    Example:
        >>> F = tg.nn.functional
        >>> F.hinge_embedding_loss([0.25, 0.25], [1.0, -1.0], reduction="none").tolist()
        [0.25, 0.75]
    """
    x, target = takes.hinge_embedding_loss(x, target, margin, reduction)
    float_operand("hinge_embedding_loss", "x", x)
    constant_of("hinge_embedding_loss", "target", target, _LABELS)
    near, far = where(target.data != -1, x, 0.0), where(target.data != 1, relu(margin - x), 0.0)
    losses = near + far  # other targets get both
    return reduced(losses, reduction)


def poisson_nll_loss(
    x: Real[ArrayLike, "*B"],
    target: Real[ArrayLike, "*B"],
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: Reduction = "mean",
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

    Raises:
        DtypeError: x or target holds complex numbers.
        ShapeError: x is not (*B,), target not (*B,).
        DeviceError: the operands are on different devices.
        DtypeError: x is not a float.

    Example:
        >>> tg.nn.functional.poisson_nll_loss([0.0, 0.0], [1.0, 3.0], reduction="none").tolist()
        [1.0, 1.0]
    """
    x, target = takes.poisson_nll_loss(x, target, log_input, full, eps, reduction)
    float_operand("poisson_nll_loss", "x", x)
    losses = exp(x) - target * x if log_input else x - target * log(x + eps)
    if full:
        large = where(target.data > 1, target, 2.0)
        stirling = large * log(large) - large + 0.5 * log(6.283185307179586 * large)
        losses = losses + where(target.data > 1, stirling, 0.0)
    return reduced(losses, reduction)


def binary_cross_entropy(
    x: Real[ArrayLike, "*B"],
    target: Real[ArrayLike, "*B"],
    weight: Real[ArrayLike, "..."] | None = None,
    reduction: Reduction = "mean",
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
        DtypeError: x, target or weight holds complex numbers.
        ShapeError: x is not (*B,), target not (*B,).
        DeviceError: the operands are on different devices.
        DtypeError: x is not a float.

    Example:
        >>> tg.nn.functional.binary_cross_entropy([0.5, 1.0], [1.0, 0.0], reduction="none").tolist()
        [0.693..., 100.0]
    """
    x, target, weight = takes.binary_cross_entropy(x, target, weight, reduction)
    float_operand("binary_cross_entropy", "x", x)
    logs = [_FINITE_LOG(p) for p in (x, 1.0 - x)]
    losses = -(target * logs[0] + (1.0 - target) * logs[1])
    return reduced(losses if weight is None else losses * weight, reduction)


def gaussian_nll_loss(
    x: Real[ArrayLike, "*B"],
    target: Real[ArrayLike, "*B"],
    var: Real[ArrayLike, "..."],
    full: bool = False,
    eps: float = 1e-6,
    reduction: Reduction = "mean",
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
        DtypeError: x, target or var holds complex numbers.
        ShapeError: x is not (*B,), target not (*B,).
        DeviceError: the operands are on different devices.
        DtypeError: x or var is not a float.
        ShapeError: var has another shape.

    Example:
        >>> F = tg.nn.functional
        >>> F.gaussian_nll_loss([0.0, 0.0], [1.0, 2.0], 1.0, reduction="none").tolist()
        [0.5, 2.0]
    """
    op = "gaussian_nll_loss"
    x, target, var = takes.gaussian_nll_loss(x, target, var, full, eps, reduction)
    float_operand(op, "x", x)
    float_operand(op, "var", var)
    if var.shape == x.shape[:-1] and var.shape != x.shape:
        var = expand_dims(var, -1)
    if var.ndim and var.shape not in (x.shape, (*x.shape[:-1], 1)):
        raise ShapeError(f"{op}: var has shape {var.shape}, expected {x.shape} as x")
    var = var + maximum(eps - var.detach(), 0.0)
    difference = x - target
    losses = 0.5 * (log(var) + difference * difference / var)
    return reduced(losses + 0.9189385332046727 if full else losses, reduction)


def cosine_embedding_loss(
    x: Real[ArrayLike, "*B C"],
    y: Real[ArrayLike, "*B C"],
    target: Real[ArrayLike, "*B"],
    margin: float = 0.0,
    reduction: Reduction = "mean",
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
        DtypeError: x, y or target holds complex numbers.
        ShapeError: x is not (*B, C), y not (*B, C), target not (*B,).
        DeviceError: the operands are on different devices.
        DtypeError: x is not a float.
        GradError: target requires a gradient.

    Example:
        >>> tg.nn.functional.cosine_embedding_loss([[2.0, 0.0]], [[0.0, 3.0]], [1]).tolist()
        1.0
    """
    op = "cosine_embedding_loss"
    x, y, target = takes.cosine_embedding_loss(x, y, target, margin, reduction)
    float_operand(op, "x", x)
    constant_of(op, "target", target, _LABELS)
    cosine = sum(x * y, -1) / sqrt((sum(x * x, -1) + 1e-12) * (sum(y * y, -1) + 1e-12))
    losses = where(target.data == 1, 1.0 - cosine, 0.0)
    losses = losses + where(target.data == -1, maximum(cosine - margin, 0.0), 0.0)
    return reduced(losses, reduction)


def triplet_margin_loss(
    anchor: Float[ArrayLike, "..."],
    positive: Float[ArrayLike, "..."],
    negative: Float[ArrayLike, "..."],
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: Reduction = "mean",
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

    Raises:
        DtypeError: anchor, positive or negative does not hold floats.
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.nn.functional.triplet_margin_loss([0.0], [1.0], [1.5], eps=0.0).tolist()
        0.5
    """
    anchor, positive, negative = takes.triplet_margin_loss(
        anchor, positive, negative, margin, p, eps, swap, reduction
    )
    far = pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = minimum(far, pairwise_distance(positive, negative, p, eps))
    losses = relu(margin + pairwise_distance(anchor, positive, p, eps) - far)
    return reduced(losses, reduction)


# Its gradient is as large as PyTorch's where log is -100: 1e12, and no NaN.
_FINITE_LOG = Row(
    "binary_cross_entropy",
    "x",
    "maximum(log(where(x == 0, 1.0, x)) - where(x == 0, 100.0, 0.0), -100.0)",
    "dy / maximum(x, 1e-12)",
)


def _check_positive(op: str, name: str, value: float) -> None:
    if not value > 0:
        raise ArgumentError(f"{op}: {name} is {value}, expected more than 0")
