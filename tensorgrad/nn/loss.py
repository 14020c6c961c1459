"""Losses: functions, which `nn.functional` exports, and modules of the same meaning.

Each is an elementwise formula, fused into one kernel forward and one backward, and a reduction.
16-bit operands are converted to float32, and so is the loss. Gradients flow into the targets too.
Cross entropy and the negative log-likelihood are in ops/cross_entropy.py.
Tests: tests/nn/test_loss.py, tests/parity/test_losses.py.
"""

from __future__ import annotations

from typing import Any, Literal

from tensorgrad.core.checks import check_between
from tensorgrad.core.dtypes import compute_dtype, float64, is_float
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.operands import constant_of, float_operand, tensor_of
from tensorgrad.core.signature import Real, Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.nn.module import Module
from tensorgrad.ops.creation import asarray
from tensorgrad.ops.cross_entropy import REDUCTIONS, Reduction, cross_entropy, nll_loss, reduced
from tensorgrad.ops.elementwise import abs as absolute
from tensorgrad.ops.elementwise import exp, log, square, where
from tensorgrad.ops.elementwise.activation import SOFTPLUS
from tensorgrad.ops.elementwise.fuse import fuse
from tensorgrad.ops.shape import astype

takes = Signatures(globals())


def mse_loss(
    x: Real[ArrayLike, "*B"], target: Real[ArrayLike, "*B"], reduction: Reduction = "mean"
) -> Tensor:
    """Return the squared error, (x - target)^2.

    Args:
        x: any shape, any float dtype.
        target: the shape of x.
        reduction: "mean" over all elements, "sum", or "none": one loss an element.

    Returns:
        A scalar, or the shape of x for "none"; at least float32.

    Raises:
        DtypeError: x or target holds complex numbers.
        ShapeError: x is not (*B,), target not (*B,).
        DeviceError: the operands are on different devices.
        DtypeError: x is not a float.
        ArgumentError: another reduction.

    Example:
        >>> tg.nn.functional.mse_loss([1.0, 2.0], [1.0, 4.0]).item()
        2.0
    """
    x, target = _wide("mse_loss", *takes.mse_loss(x, target, reduction))
    return reduced(_squared_error(x, target), reduction)


def l1_loss(
    x: Real[ArrayLike, "*B"], target: Real[ArrayLike, "*B"], reduction: Reduction = "mean"
) -> Tensor:
    """Return the absolute error, |x - target|.

    Args:
        x, target, reduction: as for `mse_loss`.

    Returns:
        A scalar, or the shape of x for "none"; at least float32.

    Raises:
        DtypeError: x or target holds complex numbers.
        ShapeError: x is not (*B,), target not (*B,).
        DeviceError: the operands are on different devices.
        DeviceError: the operands are on different devices. As `mse_loss`.

    Example:
        >>> tg.nn.functional.l1_loss([1.0, 2.0], [1.0, 4.0]).item()
        1.0
    """
    x, target = _wide("l1_loss", *takes.l1_loss(x, target, reduction))
    return reduced(_absolute_error(x, target), reduction)


def huber_loss(
    x: Real[ArrayLike, "*B"],
    target: Real[ArrayLike, "*B"],
    reduction: Reduction = "mean",
    delta: float = 1.0,
) -> Tensor:
    """Return the squared error where it is small, and the absolute error elsewhere.

    With e = |x - target|: e^2 / 2 where e < delta, else delta * (e - delta / 2).

    Args:
        x, target, reduction: as for `mse_loss`.
        delta: above 0.

    Returns:
        A scalar, or the shape of x for "none"; at least float32.

    Raises:
        DtypeError: x or target holds complex numbers.
        ShapeError: x is not (*B,), target not (*B,).
        DeviceError: the operands are on different devices.
        ArgumentError: delta is not above 0; other errors are those of `mse_loss`.
    Source: Huber 1964, "Robust estimation of a location parameter", eq. 1.1 and section 4.

    Example:
        >>> tg.nn.functional.huber_loss([0.5, 3.0], [0.0, 0.0], "none").tolist()
        [0.125, 2.5]
    """
    x, target = _wide("huber_loss", *takes.huber_loss(x, target, reduction, delta))
    if not delta > 0:
        raise ArgumentError(f"huber_loss: delta is {delta}, expected a number above 0")
    return reduced(_huber(x, target, delta=float(delta)), reduction)


def binary_cross_entropy_with_logits(
    logits: Real[ArrayLike, "*B"],
    target: Real[ArrayLike, "*B"],
    weight: Any = None,
    reduction: Reduction = "mean",
    pos_weight: Any = None,
) -> Tensor:
    """Return the cross entropy of targets and probabilities sigmoid(logits).

    loss = -pos_weight * target * log(sigmoid(logits)) - (1 - target) * log(1 - sigmoid(logits)),
    times weight, without overflow for large logits

    Args:
        logits: any shape, any float dtype.
        target: the shape of logits, 0 to 1; also bool or integers.
        weight: of each loss; a number, or a tensor that broadcasts to logits. None: 1.
        reduction: as for `mse_loss`; "mean" divides by the number of elements.
        pos_weight: of the positive class; a number, or a tensor that broadcasts to logits.

    Returns:
        A scalar, or the shape of logits for "none"; at least float32.

    Raises:
        DtypeError: logits or target holds complex numbers.
        ShapeError: logits is not (*B,), target not (*B,).
        DeviceError: the operands are on different devices.
        DeviceError: the operands are on different devices. As `mse_loss`.

    Example:
        >>> F = tg.nn.functional
        >>> F.binary_cross_entropy_with_logits([0.0, 100.0], [1.0, 0.0], reduction="none").tolist()
        [0.693..., 100.0]
    """
    op = "binary_cross_entropy_with_logits"
    logits = tensor_of(op, "logits", logits, target, weight, pos_weight)
    logits, target = takes.binary_cross_entropy_with_logits(logits, target, reduction)
    logits, target = _wide(op, logits, target, name="logits")
    weight, pos_weight = [
        None if one is None else astype(tensor_of(op, name, one, logits), logits.dtype, copy=False)
        for name, one in (("weight", weight), ("pos_weight", pos_weight))
    ]
    if pos_weight is None:
        losses = _binary(logits, target)
    else:
        losses = _weighted_binary(logits, target, pos_weight)
    return reduced(losses if weight is None else losses * weight, reduction)


def kl_div(
    x: Real[ArrayLike, "*B"],
    target: Real[ArrayLike, "*B"],
    reduction: Literal[Reduction, "batchmean"] = "mean",
    log_target: bool = False,
) -> Tensor:
    """Return the terms of the Kullback-Leibler divergence of x from target.

    loss = target * (log(target) - x), and 0 where target is 0

    Args:
        x: log-probabilities, any shape, any float dtype.
        target: probabilities, the shape of x.
        reduction: as for `mse_loss`, or "batchmean": the sum divided by the length of axis 0, which
            is the divergence, where "mean" divides by the number of classes as well.
        log_target: whether target is the logarithm of probabilities.

    Returns:
        A scalar, or the shape of x for "none"; at least float32.

    Raises:
        DtypeError: x or target holds complex numbers.
        ShapeError: x is not (*B,), target not (*B,).
        DeviceError: the operands are on different devices.
        ArgumentError: "batchmean" for x without an axis; other errors are those of `mse_loss`.

    Example:
        >>> x = tg.log([[0.5, 0.5]])
        >>> tg.nn.functional.kl_div(x, [[1.0, 0.0]], "batchmean").item()
        0.693...
    """
    x, target = _wide("kl_div", *takes.kl_div(x, target, reduction, log_target))
    losses = _divergence_of_logs(x, target) if log_target else _divergence(x, target)
    if reduction != "batchmean":
        return reduced(losses, reduction)
    if not x.ndim:
        raise ArgumentError("kl_div: reduction is 'batchmean' for x of shape (), expected an axis")
    total: Tensor = losses.sum() / x.shape[0]
    return total


@fuse
def _squared_error(x: Tensor, target: Tensor) -> Tensor:
    return square(x - target)


@fuse
def _absolute_error(x: Tensor, target: Tensor) -> Tensor:
    error: Tensor = absolute(x - target)
    return error


@fuse
def _huber(x: Tensor, target: Tensor, *, delta: float) -> Tensor:
    error = absolute(x - target)
    return where(error < delta, 0.5 * error * error, delta * (error - 0.5 * delta))


@fuse
def _binary(logits: Tensor, target: Tensor) -> Tensor:
    return SOFTPLUS(logits) - target * logits


@fuse
def _weighted_binary(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return weight * target * SOFTPLUS(-logits) + (1 - target) * SOFTPLUS(logits)


@fuse
def _divergence(x: Tensor, target: Tensor) -> Tensor:
    positive = where(target > 0, target, 1)
    return where(target > 0, target * (log(positive) - x), 0)


@fuse
def _divergence_of_logs(x: Tensor, target: Tensor) -> Tensor:
    return exp(target) * (target - x)


def _wide(op: str, x: Tensor, target: Tensor, *, name: str = "x") -> tuple[Tensor, Tensor]:
    """Return both operands in at least float32; x must hold floats."""
    float_operand(op, name, x)
    target_dtype = target.dtype if is_float(target.dtype) else x.dtype
    return (
        astype(x, compute_dtype(x.dtype), copy=False),
        astype(target, compute_dtype(target_dtype), copy=False),
    )


class _Loss(Module):
    """Base of the losses as modules: holds the reduction."""

    _reductions: tuple[str, ...] = REDUCTIONS

    def __init__(self, *, reduction: str = "mean") -> None:
        if reduction not in self._reductions:
            name = type(self).__name__
            raise ArgumentError(
                f"{name}: reduction is {reduction!r}, expected one of {self._reductions}"
            )
        self.reduction: Any = reduction

    def extra_repr(self) -> str:
        """Return the reduction."""
        return f"reduction={self.reduction!r}"


class MSELoss(_Loss):
    """The squared error; see `nn.functional.mse_loss`.

    Args:
        reduction: "mean" over all elements, "sum", or "none": one loss an element.

    Example:
        >>> loss = tg.nn.MSELoss()
        >>> loss(tg.tensor([1.0, 2.0]), tg.tensor([1.0, 4.0]))  # (0 + 4) / 2
        tensor(2., dtype=float32)
    """

    def forward(self, x: Any, target: Any) -> Tensor:
        """Return the loss of x, any shape, and target, the same shape."""
        return mse_loss(x, target, reduction=self.reduction)


class L1Loss(_Loss):
    """The absolute error; see `nn.functional.l1_loss`.

    Args:
        reduction: "mean" over all elements, "sum", or "none": one loss an element.

    Example:
        >>> loss = tg.nn.L1Loss(reduction="none")
        >>> loss(tg.tensor([1.0, 2.0]), tg.tensor([1.0, 4.0]))
        tensor([0., 2.], dtype=float32)
    """

    def forward(self, x: Any, target: Any) -> Tensor:
        """Return the loss of x, any shape, and target, the same shape."""
        return l1_loss(x, target, reduction=self.reduction)


class HuberLoss(_Loss):
    """Squared error below delta and absolute error above; see `nn.functional.huber_loss`.

    Args:
        reduction: "mean" over all elements, "sum", or "none": one loss an element.
        delta: the error, above 0, from which the loss is linear.

    Example:
        >>> loss = tg.nn.HuberLoss("none")
        >>> loss(tg.tensor([0.5, 3.0]), tg.zeros(2))  # 0.5^2 / 2 and 3 - 1 / 2
        tensor([0.125, 2.5  ], dtype=float32)
    """

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction=reduction)
        self.delta = delta

    def forward(self, x: Any, target: Any) -> Tensor:
        """Return the loss of x, any shape, and target, the same shape."""
        return huber_loss(x, target, reduction=self.reduction, delta=self.delta)


class BCEWithLogitsLoss(_Loss):
    """Binary cross entropy; see `nn.functional.binary_cross_entropy_with_logits`.

    Args:
        weight: of each loss, broadcasts to the logits; moves with the module. None: 1.
        reduction: "mean" over all elements, "sum", or "none": one loss an element.
        pos_weight: of the positive class, likewise.

    Example:
        >>> loss = tg.nn.BCEWithLogitsLoss()
        >>> loss(tg.tensor([0.0, 0.0]), tg.tensor([0.0, 1.0])).round(4)  # log(2)
        tensor(0.6931, dtype=float32)
    """

    def __init__(
        self, weight: Any = None, *, reduction: str = "mean", pos_weight: Any = None
    ) -> None:
        super().__init__(reduction=reduction)
        self.weight: Tensor | None = None
        self.pos_weight: Tensor | None = None
        _set_weight(self, "weight", weight)
        _set_weight(self, "pos_weight", pos_weight)

    def forward(self, logits: Any, target: Any) -> Tensor:
        """Return the loss of logits, any shape, and target, the same shape."""
        return binary_cross_entropy_with_logits(
            logits, target, self.weight, reduction=self.reduction, pos_weight=self.pos_weight
        )


class KLDivLoss(_Loss):
    """The Kullback-Leibler divergence; see `nn.functional.kl_div`.

    Args:
        reduction: "mean" over all elements, "batchmean": the sum over axis 0's length, "sum" or
            "none".
        log_target: whether targets are logarithms.

    Example:
        >>> loss = tg.nn.KLDivLoss(reduction="batchmean")
        >>> p, q = tg.tensor([[0.5, 0.5]]), tg.tensor([[0.25, 0.75]])
        >>> loss(tg.log(q), p).round(4)  # 0.5 log(0.5 / 0.25) + 0.5 log(0.5 / 0.75)
        tensor(0.1438, dtype=float32)
    """

    _reductions = (*REDUCTIONS, "batchmean")

    def __init__(self, *, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__(reduction=reduction)
        self.log_target = log_target

    def forward(self, x: Any, target: Any) -> Tensor:
        """Return the loss of log-probabilities x and target, the same shape."""
        return kl_div(x, target, reduction=self.reduction, log_target=self.log_target)


class NLLLoss(_Loss):
    """The negative log-likelihood; see `nn.functional.nll_loss`.

    Args:
        weight: (V,), of each class; moves with the module. None: 1.
        ignore_index: examples with this target are ignored; None: no example is.
        reduction: "mean" over the examples that count, by their weights; "sum" or "none".
        axis: of the classes; default: the last.

    Example:
        >>> loss = tg.nn.NLLLoss()
        >>> loss(tg.tensor([[-1.0, -0.5], [-2.0, -0.25]]), np.array([0, 1]))  # (1 + 0.25) / 2
        tensor(0.625, dtype=float32)
    """

    def __init__(
        self,
        weight: Any = None,
        *,
        ignore_index: int | None = -100,
        reduction: str = "mean",
        axis: int = -1,
    ) -> None:
        super().__init__(reduction=reduction)
        self.ignore_index, self.axis = ignore_index, axis
        self.weight: Tensor | None = None
        _set_weight(self, "weight", weight)

    def forward(self, x: Any, targets: Any) -> Tensor:
        """Return the loss of log-probabilities x (..., V) and targets (...)."""
        return nll_loss(
            x, targets, self.weight, ignore_index=self.ignore_index, reduction=self.reduction,
            axis=self.axis,
        )  # fmt: skip


class CrossEntropyLoss(_Loss):
    """Cross entropy of logits; see `nn.functional.cross_entropy`.

    Args:
        weight: (V,), of each class; moves with the module. None: 1.
        ignore_index: examples with this target are ignored; None: no example is.
        reduction: "mean" over the examples that count, by their weights; "sum" or "none".
        label_smoothing: in [0, 1]: the fraction of each target that all classes get, in equal
            parts.
        axis: of the classes; default: the last.

    Example:
        >>> loss = tg.nn.CrossEntropyLoss()
        >>> loss(tg.zeros((3, 10)), np.array([1, 2, 3])).round(4)  # log(10)
        tensor(2.3026, dtype=float32)
    """

    def __init__(
        self,
        weight: Any = None,
        *,
        ignore_index: int | None = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        axis: int = -1,
    ) -> None:
        super().__init__(reduction=reduction)
        check_between("CrossEntropyLoss", "label_smoothing", label_smoothing, 0, 1)
        self.ignore_index, self.label_smoothing, self.axis = ignore_index, label_smoothing, axis
        self.weight: Tensor | None = None
        _set_weight(self, "weight", weight)

    def forward(self, logits: Any, targets: Any) -> Tensor:
        """Return the loss of logits (..., V) and targets (...), or probabilities (..., V)."""
        return cross_entropy(
            logits, targets, weight=self.weight, ignore_index=self.ignore_index,
            reduction=self.reduction, label_smoothing=self.label_smoothing, axis=self.axis,
        )  # fmt: skip


def _set_weight(loss: Module, name: str, weight: Any) -> None:
    """Register the weight of a loss as a buffer, where there is one; lists as float64.

    The loss takes it in the dtype of the logits.

    Raises:
        GradError: the weight requires a gradient, which would be lost.
    """
    if weight is not None:
        delattr(loss, name)
        dtype = float64 if isinstance(weight, (int, float, list, tuple)) else None
        why = "a buffer has none; the function has it"
        weight = Tensor(constant_of(type(loss).__name__, name, asarray(weight, dtype), why))
        loss.register_buffer(name, weight, persistent=False)
