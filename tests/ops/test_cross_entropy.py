"""Cross entropy against its definition in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad
import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, DtypeError, OutOfRangeError, ShapeError
from tensorgrad.kernels.cross_entropy import LossOptions
from tensorgrad.ops.cross_entropy import Reduction, rows_numpy
from tensorgrad.testing import SIZES, Case, Ulps, check

RNG = np.random.default_rng(5)


def one_hot(targets: Any, vocabulary: int) -> Any:
    return np.arange(vocabulary) == np.asarray(targets)[..., None]


def reference(
    logits: Any,
    targets: Any,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    z_loss: float = 0.0,
) -> Any:
    vocabulary = logits.shape[-1]
    largest = logits.max(-1, keepdims=True)
    logsumexp = np.log(np.exp(logits - largest).sum(-1, keepdims=True)) + largest
    log_probabilities = logits - logsumexp
    counted = np.full(targets.shape, True) if ignore_index is None else targets != ignore_index
    wanted = one_hot(np.where(counted, targets, 0), vocabulary) * (1 - label_smoothing)
    losses = -((wanted + label_smoothing / vocabulary) * log_probabilities).sum(-1)
    losses = (losses + z_loss * logsumexp[..., 0] ** 2) * counted
    if reduction == "none":
        return losses
    if reduction == "mean" and not targets.size:
        return np.float64(np.nan)
    return losses.sum() / (max(counted.sum(), 1) if reduction == "mean" else 1)


def case(shape: tuple[int, ...], targets: Any = None, **options: Any) -> Case:
    vocabulary = shape[-1]
    if targets is None:
        targets = RNG.integers(0, vocabulary, shape[:-1])
    function: Callable[..., Any] = lambda x, t: tg.cross_entropy(x, t, **options)  # noqa: E731
    return Case(
        function,
        [shape, targets],
        lambda x, t: reference(x, t, **options),
        terms=int(np.prod(shape)),
        name="cross_entropy-" + "-".join(f"{k}={v}" for k, v in options.items()),
    )


def weighted(
    logits: Any, targets: Any, weight: Any, label_smoothing: float = 0, reduction: str = "mean"
) -> Any:
    """The definition with class weights; targets of floats are probabilities."""
    vocabulary = logits.shape[-1]
    logp = logits - logits.max(-1, keepdims=True)
    logp = logp - np.log(np.exp(logp).sum(-1, keepdims=True))
    counted = np.ones(logits.shape[:-1])
    wanted = targets
    if targets.dtype.kind == "i":
        counted = targets != -100
        wanted = one_hot(np.where(counted, targets, 0), vocabulary)
    divisor = (wanted * weight).sum(-1) if targets.dtype.kind == "i" else np.ones_like(counted)
    wanted = wanted * (1 - label_smoothing) + label_smoothing / vocabulary
    losses = -(wanted * weight * logp).sum(-1) * counted
    if reduction == "none":
        return losses
    return losses.sum() / ((divisor * counted).sum() if reduction == "mean" else 1)


def weighted_case(targets: Any, **options: Any) -> Case:
    width = 11
    return Case(
        lambda x, t, w: tg.cross_entropy(x, t, weight=w, **options),
        [(2, 3, width), targets, RNG.uniform(0.5, 2, width).astype("float32")],
        lambda x, t, w: weighted(x, t, w, **options),
        terms=2 * 3 * width,
        values=Ulps(4, "row"),
        gradients=Ulps(4, "row"),
        name="cross_entropy-weight-" + "-".join(f"{k}={v}" for k, v in options.items()),
    )


SOME_IGNORED = np.array([[3, -100, 0], [-100, -100, 10]])
PROBABILITIES = RNG.dirichlet(np.ones(11), (2, 3)).astype("float32")
CASES = [
    *(case(s) for s in ((4,), (2, 3, 5), (33, 31), (65, 1025), (0, 4))),
    *(case((3, n)) for n in SIZES[1:]),
    *(case((2, 3, 11), SOME_IGNORED, reduction=r) for r in ("mean", "sum", "none")),
    *(
        case((2, 3, 11), SOME_IGNORED, reduction=r, label_smoothing=s)
        for r in ("mean", "none")
        for s in (0.1, 1.0)
    ),
    *(case((2, 3, 11), SOME_IGNORED, reduction=r, z_loss=0.1) for r in ("mean", "sum", "none")),
    case((7, 300), label_smoothing=0.1, z_loss=0.01),
    case((2, 3, 11), np.array([[3, 7, 0], [7, 7, 10]], "uint16"), ignore_index=7),
    case((2, 3, 11), np.array([[3, 7, 0], [7, 7, 10]], "int32"), ignore_index=None),
    case((2, 3), np.array([-100, -100])),
    *(
        weighted_case(SOME_IGNORED, reduction=r, label_smoothing=s)
        for r, s in (("mean", 0), ("sum", 0.1), ("none", 0.1))
    ),
    *(
        weighted_case(PROBABILITIES, reduction=r, label_smoothing=s)
        for r, s in (("mean", 0.1), ("none", 0.1), ("sum", 0))
    ),
    Case(
        lambda x, t: tg.cross_entropy(x, t, axis=1),
        [(2, 5, 3), RNG.integers(0, 5, (2, 3))],
        lambda x, t: reference(np.moveaxis(x, 1, -1), t),
        terms=30,
        name="cross_entropy-axis",
    ),
    *(
        Case(
            lambda x, t: tg.nll_loss(x, t, axis=1),
            [(2, n, 3), np.array([[0, -100, n - 1], [n // 2, 0, n - 1]])],
            lambda x, t: (
                -sum(x[b, t[b, i], i] for b in (0, 1) for i in range(3) if t[b, i] >= 0) / 5
            ),
            terms=6,
            name="nll_loss",
        )
        for n in SIZES[1:]
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_definition(case: Case) -> None:
    check(case)


def test_sixteen_bit_logits_have_a_float32_loss() -> None:
    logits = Tensor(np.zeros((2, 8), "float16"), requires_grad=True)
    loss = tg.cross_entropy(logits, np.array([1, 2]))
    assert loss.dtype == np.float32
    assert loss.item() == pytest.approx(np.log(8), rel=1e-6)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == np.float16


def test_large_logits_do_not_overflow() -> None:
    logits = Tensor(np.array([[1e38, -1e38, 0]], "float32"), requires_grad=True)
    loss = tg.cross_entropy(logits, np.array([0]))
    loss.backward()
    assert loss.item() == 0
    np.testing.assert_array_equal(logits.grad, [[0, 0, 0]])


def gradient_reference(logits: Any, targets: Any, smoothing: float, z_loss: float) -> Any:
    """Return that of the sum of the losses."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    total = powers.sum(-1, keepdims=True)
    z = np.log(total) + logits.max(-1, keepdims=True)
    wanted = one_hot(targets, logits.shape[-1]) * (1 - smoothing) + smoothing / logits.shape[-1]
    return powers / total * (1 + 2 * z_loss * z) - wanted


@pytest.mark.parametrize("width", [5, 40, 256, 300, 1025, 65000])  # a width for each kernel
@pytest.mark.parametrize("offset", [0, 2**14, -(2**16)])
def test_what_logits_share_costs_no_digits(offset: int, width: int, device: str) -> None:
    rng = np.random.default_rng(width)
    exact = np.round(rng.standard_normal((3, width)) * 32) / 8 + offset  # in float32 too
    exact[:, 0] = exact.max(-1)
    targets = rng.integers(0, width, 3)
    dy = np.array([1, 2, 0.5], "float32")
    ids = Tensor(backend.to_device(targets, device))
    for smoothing, z_loss in ((0.0, 0.0), (0.1, 0.0), (1.0, 1e-4)):
        x = Tensor(backend.to_device(exact.astype("float32"), device), requires_grad=True)
        expected = reference(exact, targets, None, smoothing, "none", z_loss)
        slopes = gradient_reference(exact, targets, smoothing, z_loss)
        # z is rounded where the logits are large, which z_loss wants to see.
        bound = 2e-6 * (1 + z_loss * (abs(offset) + 20) ** 2)
        for reduction in ("none", "sum"):
            loss = tg.cross_entropy(
                x,
                ids,
                ignore_index=None,
                label_smoothing=smoothing,
                reduction=reduction,
                z_loss=z_loss,
            )
            with tensorgrad.no_grad():
                alone = tg.cross_entropy(
                    x,
                    ids,
                    ignore_index=None,
                    label_smoothing=smoothing,
                    reduction=reduction,
                    z_loss=z_loss,
                )
            for got in (loss, alone):
                wanted = expected if reduction == "none" else expected.sum()
                np.testing.assert_allclose(got.numpy(), wanted, 0, bound * 3 + 4e-7 * width**0.5)
            x.grad = None
            each = backend.to_device(dy if reduction == "none" else dy[1:2].reshape(()), device)
            loss.backward(each)
            scale = dy[:, None] if reduction == "none" else dy[1]
            np.testing.assert_allclose(backend.to_numpy(x.grad), slopes * scale, 0, bound)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_mean_of_nothing_is_nan(dtype: str, device: str) -> None:
    x = Tensor(backend.to_device(np.zeros((0, 4), dtype), device), requires_grad=True)
    weight = Tensor(backend.to_device(np.ones((7, 4), dtype), device), requires_grad=True)
    ids = Tensor(backend.to_device(np.zeros(0, "int64"), device))
    for function in (
        tg.cross_entropy,
        lambda x, t, **o: tg.linear_cross_entropy(x, weight, t, **o),
    ):
        cases: dict[Reduction, float] = {"mean": np.nan, "sum": 0}
        for reduction, expected in cases.items():
            x.grad = weight.grad = None
            loss = function(x, ids, reduction=reduction)
            np.testing.assert_equal(loss.item(), expected)
            loss.backward()
            assert x.grad is not None
            assert x.grad.shape == (0, 4)
            assert weight.grad is None or not weight.grad.any()
        none = function(x, ids, reduction="none")
        assert none.shape == (0,)


def test_ignored_examples_may_hold_anything() -> None:
    logits = Tensor(np.array([[0.0, 0.0], [np.nan, 1.0]]), requires_grad=True)
    loss = tg.cross_entropy(logits, np.array([1, -100]))
    loss.backward()
    assert loss.item() == pytest.approx(np.log(2))
    np.testing.assert_array_equal(logits.grad, [[0.5, -0.5], [0, 0]])


def test_padding_alone_is_a_loss_of_zero() -> None:
    logits = Tensor(np.ones((2, 3)), requires_grad=True)
    loss = tg.cross_entropy(logits, np.array([-100, -100]))
    loss.backward()
    assert loss.item() == 0
    np.testing.assert_array_equal(logits.grad, np.zeros((2, 3)))


@pytest.mark.parametrize("bad", [11, -1])
def test_targets_outside_are_named(bad: int) -> None:
    targets = np.zeros((2, 3), "int64")
    targets[1, 2] = bad
    message = rf"targets\[1, 2\] is {bad}, expected 0 to 10 \(a vocabulary of 11\)"
    with pytest.raises(OutOfRangeError, match=message):
        tg.cross_entropy(Tensor(np.zeros((2, 3, 11))), targets)


def test_the_padding_value_of_another_data_set_is_named() -> None:
    with pytest.raises(OutOfRangeError, match=r"targets\[0\] is -100, expected 0 to 2"):
        tg.cross_entropy(Tensor(np.zeros((1, 3))), np.array([-100]), ignore_index=None)


def test_arguments_that_do_not_fit() -> None:
    logits, targets = Tensor(np.zeros((2, 3))), np.array([0, 1])
    with pytest.raises(ShapeError, match=r"targets has shape \(3,\), expected \(2,\)"):
        tg.cross_entropy(logits, np.zeros(3, "int64"))
    with pytest.raises(ShapeError, match=r"logits have shape \(2, 0\), expected \(..., V\)"):
        tg.cross_entropy(Tensor(np.zeros((2, 0))), targets)
    with pytest.raises(DtypeError, match="targets has dtype float64, expected integers"):
        tg.cross_entropy(logits, np.zeros(2))
    with pytest.raises(ArgumentError, match=r"label_smoothing is 1\.5, expected 0 to 1"):
        tg.cross_entropy(logits, targets, label_smoothing=1.5)
    for name in ("label_smoothing", "z_loss"):
        wrong: dict[str, Any] = {name: "a"}
        with pytest.raises(ArgumentError, match=f"cross_entropy: {name} is 'a', expected a number"):
            tg.cross_entropy(logits, targets, **wrong)
    with pytest.raises(ArgumentError, match=r"ignore_index is 1\.5, expected an integer"):
        tg.cross_entropy(logits, targets, ignore_index=1.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"z_loss is -0\.1, expected a finite number from 0"):
        tg.cross_entropy(logits, targets, z_loss=-0.1)
    with pytest.raises(ArgumentError, match="reduction is 'max', expected one of"):
        tg.cross_entropy(logits, targets, reduction="max")  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nll_loss_is_the_cross_entropy_of_log_probabilities(reduction: Reduction) -> None:
    logits = RNG.standard_normal((2, 3, 11))
    for targets in (SOME_IGNORED, np.maximum(SOME_IGNORED, 0)):
        for weight in (None, RNG.uniform(0.5, 2, 11)):
            for ignored in (-100, 3) if targets is SOME_IGNORED else (None, 10):
                kept = np.where(targets == -100, -100 if ignored is None else ignored, targets)
                x, y = (Tensor(logits, requires_grad=True) for _ in range(2))
                loss = tg.nll_loss(tg.log_softmax(x), kept, weight, ignored, reduction)
                same = tg.cross_entropy(
                    y, kept, ignore_index=ignored, reduction=reduction, weight=weight
                )
                np.testing.assert_allclose(loss.numpy(), same.numpy(), 1e-12)
                for one in (loss, same):
                    one.backward(np.ones(one.shape))
                np.testing.assert_allclose(x.grad, y.grad, 1e-9, 1e-12)  # type: ignore[arg-type]


def test_arguments_of_nll_loss_that_do_not_fit() -> None:
    x, targets = np.zeros((2, 3), "float32"), np.array([0, 2])
    assert tg.nll_loss(x.astype("float16"), targets).dtype == np.float32
    with pytest.raises(
        ShapeError, match=r"nll_loss: targets has shape \(3,\), expected \(2,\) \(x"
    ):
        tg.nll_loss(x, np.zeros(3, int))
    with pytest.raises(OutOfRangeError, match=r"nll_loss: targets\[1\] is 3, expected 0 to 2"):
        tg.nll_loss(x, np.array([0, 3]))
    with pytest.raises(ArgumentError, match="nll_loss: reduction is 'max', expected one of"):
        tg.nll_loss(x, targets, reduction="max")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="nll_loss: axis is 2, expected -2 to 1"):
        tg.nll_loss(x, targets, axis=2)
    with pytest.raises(
        ArgumentError, match=r"soft_margin_loss: reduction is 'sum_all', expected one of .*'mean'"
    ):
        tg.nn.functional.soft_margin_loss(x, x, "sum_all")  # type: ignore[arg-type]


def test_columns_behind_the_classes_do_not_count() -> None:
    logits, targets = RNG.standard_normal((4, 7)), np.array([0, 4, 2, 1])
    counted, losses, dlogits = np.array([True, True, False, True]), np.ones(4), np.ones((4, 7))
    for smoothing in (0.0, 0.1):
        options = LossOptions(-100, smoothing, 0.01)
        rows_numpy(losses, dlogits, logits, targets, counted, options, np.asarray(0.5), 5)
        x = Tensor(logits[:, :5].copy(), requires_grad=True)
        kept = np.where(counted, targets, -100)
        expected = tg.cross_entropy(
            x, kept, ignore_index=-100, label_smoothing=smoothing, reduction="none", z_loss=0.01
        )
        expected.backward(np.full(4, 0.5))
        np.testing.assert_allclose(losses, expected.numpy(), 1e-12)
        np.testing.assert_allclose(dlogits[:, :5], x.grad, 1e-12, 1e-14)  # type: ignore[arg-type]
        assert not dlogits[:, 5:].any()


def test_classes_may_be_any_axis() -> None:
    logits = RNG.standard_normal((4, 2, 3))
    targets = RNG.integers(0, 4, (2, 3))
    last = np.moveaxis(logits, 0, -1)
    probabilities = RNG.random((4, 2, 3))
    for reduction in ("mean", "none"):
        for function, given, moved in (
            (tg.cross_entropy, targets, targets),
            (tg.cross_entropy, probabilities, np.moveaxis(probabilities, 0, -1)),
            (tg.nll_loss, targets, targets),
        ):
            found = function(logits, given, axis=0, reduction=reduction)
            expected = function(last, moved, reduction=reduction)
            np.testing.assert_allclose(found.numpy(), expected.numpy(), 1e-12)


def test_probabilities_and_weights_that_do_not_fit() -> None:
    logits, targets = np.zeros((2, 3), "float32"), np.array([0, 1])
    with pytest.raises(ShapeError, match=r"targets has shape \(2, 4\), expected \(2, 3\)"):
        tg.cross_entropy(logits, np.zeros((2, 4)))
    with pytest.raises(
        ShapeError, match=r"weight has shape \(2,\), expected \(3,\) \(one for each"
    ):
        tg.cross_entropy(logits, targets, weight=np.ones(2, "float32"))
    with pytest.raises(ArgumentError, match=r"z_loss is 0\.1 with a weight or probabilities"):
        tg.cross_entropy(logits, targets, weight=np.ones(3, "float32"), z_loss=0.1)
    with pytest.raises(ArgumentError, match=r"z_loss is 0\.1 with a weight or probabilities"):
        tg.cross_entropy(logits, np.full((2, 3), 0.5, "float32"), z_loss=0.1)
    with pytest.raises(ArgumentError, match="axis is 2, expected -2 to 1"):
        tg.cross_entropy(logits, targets, axis=2)


def test_a_weighted_mean_of_ignored_examples_is_0() -> None:
    weight, ignored = np.ones(3, "float32"), np.array([-100, -100])
    for f, fill in ((tg.cross_entropy, 0), (tg.nll_loss, -np.inf)):
        logits = Tensor(np.full((2, 3), fill, "float32"), requires_grad=True)
        loss = f(logits, ignored, weight=weight)
        loss.backward()
        assert loss.item() == 0
        assert logits.grad is not None
        assert not logits.grad.any()
