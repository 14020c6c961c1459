"""Linear + cross entropy in chunks against its definition, and against the two ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, no_grad
from tensorgrad.amp import autocast
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, DtypeError, OutOfRangeError, ShapeError
from tensorgrad.ops.linear_cross_entropy import loss_operands, rows_at_a_time
from tensorgrad.testing import SIZES, Case, Ulps, check
from tests.ops.test_cross_entropy import reference

RNG = np.random.default_rng(6)
TARGETS = RNG.integers(0, 11, (3, 5))
SOME_IGNORED = np.where(RNG.random((3, 5)) < 0.3, -100, TARGETS)


def case(shapes: list[Any], targets: Any, **options: Any) -> Case:
    x, weight, *bias = shapes
    definition = {k: v for k, v in options.items() if k not in ("chunk", "vocab_size")}

    def function(x: Any, weight: Any, targets: Any, bias: Any = None) -> Any:
        return tg.linear_cross_entropy(x, weight, targets, bias, **options)

    def expected(x: Any, weight: Any, targets: Any, bias: Any = 0) -> Any:
        logits = x @ weight.T + bias
        return reference(logits[..., : options.get("vocab_size")], targets, **definition)

    def magnitudes(x: Any, weight: Any, targets: Any, *rest: Any) -> list[Any]:
        """Return the sums of absolute values; the logits are kept in the dtype of the inputs."""
        *bias, dy = rest
        logits = (x @ weight.T + sum(bias))[..., : options.get("vocab_size")]
        vocabulary, smoothing = logits.shape[-1], options.get("label_smoothing", 0)
        counted, reduction = targets != -100, options.get("reduction", "mean")
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        p, q = powers / powers.sum(-1, keepdims=True), np.eye(vocabulary)[targets * counted]
        q = q * (1 - smoothing) + smoothing / vocabulary
        spread = (p * abs(logits)).sum(-1, keepdims=True)
        z = 1 + 2 * options.get("z_loss", 0) * (spread + 9)
        y = ((z * p + q) * abs(logits)).sum(-1) * counted
        part = counted / max(counted.sum(), 1) if reduction == "mean" else counted
        dlogits = (z * p * (1 + abs(logits) + spread) + q) * (part * abs(dy))[..., None]
        whole = np.zeros((*targets.shape, len(weight)))
        whole[..., :vocabulary] = dlogits
        rows = whole.reshape(-1, len(weight))
        dweight = rows.T @ abs(x).reshape(len(rows), x.shape[-1])
        value = y if reduction == "none" else (y * part).sum()
        return [value, whole @ abs(weight), dweight, None, *[rows.sum(0)][: len(bias)]]

    named = "-".join(f"{k}={v}" for k, v in options.items())
    return Case(function, [x, weight, targets, *bias], expected, terms=4 * max(64, *x, *weight),
                values=Ulps(2, "terms", stored=True), magnitudes=magnitudes,
                name=f"linear_cross_entropy-{named}")  # fmt: skip


CASES = [
    case([(4,), (11, 4)], np.array(7)),
    case([(0, 4), (11, 4)], np.zeros(0, int), reduction="sum"),
    *(case([(n, 4), (11, 4)], np.arange(n) % 11, chunk=100) for n in SIZES[1:]),
    *(case([(3, n), (11, n)], np.arange(3)) for n in SIZES),
    *(case([(3, 4), (n, 4)], np.zeros(3, int)) for n in SIZES[1:]),
    case([(3, 5, 4), (11, 4)], TARGETS, chunk=4),
    case([(3, 5, 4), (11, 4), (11,)], TARGETS, chunk=15),
    case([(0, 4), (11, 4), (11,)], np.zeros(0, "int64"), reduction="sum"),
    *(
        case([(3, 5, 4), (11, 4), (11,)], SOME_IGNORED, chunk=c, reduction=r, z_loss=0.01,
             label_smoothing=0.1)
        for c in (2, 100)
        for r in ("mean", "sum", "none")
    ),
    *(case([(3, 5, 4), (16, 4)], TARGETS, chunk=6, vocab_size=v, z_loss=0.1) for v in (11, 13)),
    case([(3, 5, 8), (1300, 8)], RNG.integers(0, 1250, (3, 5)), vocab_size=1250, chunk=8),
    case([(2, 3), (5, 3)], np.array([-100, -100])),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_definition(case: Case) -> None:
    check(case)


def both(function: Callable[..., Tensor], dy: float, dtype: str, device: str) -> list[Any]:
    rng = np.random.default_rng(3)
    x, weight = (rng.standard_normal(shape).astype(dtype) for shape in ((300, 24), (640, 24)))
    leaves = [Tensor(backend.to_device(a, device), requires_grad=True) for a in (x, weight)]
    targets = backend.to_device(rng.integers(0, 600, 300), device)
    loss = function(*leaves, targets)
    loss.backward(np.float32(dy))
    return [backend.to_numpy(a).astype("float64") for a in (loss.data, *(t.grad for t in leaves))]


def unfused(x: Tensor, weight: Tensor, targets: Any) -> Tensor:
    return tg.cross_entropy(tg.linear(x, weight)[:, :600], targets)


@pytest.mark.parametrize("chunk", [64, 128, None])
@pytest.mark.parametrize("dy", [1, 0.25])
def test_loss_and_gradients_of_the_two_ops(chunk: int | None, dy: float, device: str) -> None:
    def fused(x: Tensor, weight: Tensor, targets: Any) -> Tensor:
        return tg.linear_cross_entropy(x, weight, targets, vocab_size=600, chunk=chunk)

    expected = both(unfused, dy, "float32", device)
    for got, wanted in zip(both(fused, dy, "float32", device), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_a_scaled_loss_saves_float16_gradients(device: str) -> None:
    """Without a scale they are below what float16 can hold, with it they are right."""

    def fused(x: Tensor, weight: Tensor, targets: Any) -> Tensor:
        return tg.linear_cross_entropy(x, weight, targets, vocab_size=600)

    _, dx, dweight = both(fused, 2.0**-14, "float16", device)
    _, scaled_dx, scaled_dweight = both(fused, 2.0**8, "float16", device)
    _, exact_dx, exact_dweight = both(unfused, 1, "float64", device)
    assert np.abs(dx * 2.0**14 - exact_dx).max() > 0.01 * np.abs(exact_dx).max()
    for got, exact in ((scaled_dx, exact_dx), (scaled_dweight, exact_dweight)):
        np.testing.assert_allclose(got / 2.0**8, exact, atol=4e-3 * np.abs(exact).max())
    assert np.isfinite(dweight).all()


def test_a_retained_graph_takes_another_dy(device: str) -> None:
    x = Tensor(backend.to_device(np.ones((4, 3), "float32"), device), requires_grad=True)
    weight = Tensor(backend.to_device(np.eye(5, 3, dtype="float32"), device))
    loss = tg.linear_cross_entropy(x, weight, backend.to_device(np.array([0, 1, 2, 3]), device))
    grads: list[Any] = []
    for dy in (1, 3, 0, 1):
        x.grad = None
        loss.backward(np.float32(dy), retain_graph=True)
        assert x.grad is not None
        grads.append(backend.to_numpy(x.grad))
    np.testing.assert_allclose(grads[1], 3 * grads[0], rtol=1e-6)
    assert not grads[2].any()
    np.testing.assert_array_equal(grads[3], grads[0])


def test_of_no_rows() -> None:
    x, none = Tensor(np.zeros((0, 3)), requires_grad=True), np.zeros(0, int)
    weight, bias = (Tensor(np.ones(s), requires_grad=True) for s in ((5, 3), (5,)))
    loss = tg.linear_cross_entropy(x, weight, none, bias)
    loss.backward()
    assert np.isnan(loss.item())
    assert not weight.grad.any()  # type: ignore[union-attr]
    assert not bias.grad.any()  # type: ignore[union-attr]
    assert tg.linear_cross_entropy(x, weight, none, reduction="sum").item() == 0


@pytest.mark.parametrize("order", ["C", "F"])
def test_the_gradient_is_added_to_what_is_there(order: Any) -> None:
    arrays = [RNG.standard_normal(shape) for shape in ((6, 4), (11, 4))]
    for counts_as_zeros in (False, True):
        grads = []
        for before in (0.0, 3.0):
            x, weight = (Tensor(a, requires_grad=True) for a in arrays)
            weight.grad = np.full((11, 4), before, order=order)
            assert weight.gradient is not None
            if counts_as_zeros:
                weight.gradient.beta = 0
            tg.linear_cross_entropy(x, weight, TARGETS.reshape(-1)[:6], chunk=4).backward(2.0)
            grads.append(weight.grad)
        np.testing.assert_allclose(grads[1], grads[0] + (0 if counts_as_zeros else 3), 1e-12)
        assert grads[0].any()


def test_one_operand_that_wants_a_gradient_is_enough() -> None:
    arrays = [RNG.standard_normal(shape) for shape in ((6, 4), (11, 4), (11,))]
    targets = TARGETS.reshape(-1)[:6]
    for wanted in range(3):
        leaves = [Tensor(a, requires_grad=i == wanted) for i, a in enumerate(arrays)]
        x, weight, bias = leaves
        tg.linear_cross_entropy(x, weight, targets, bias, chunk=4).backward()
        assert [leaf.grad is not None for leaf in leaves] == [i == wanted for i in range(3)]


def test_nothing_is_computed_for_gradients_that_nobody_wants() -> None:
    x, weight = Tensor(np.ones((3, 4)), requires_grad=True), Tensor(np.ones((5, 4)))
    with no_grad():
        assert not tg.linear_cross_entropy(x, weight, [0, 1, 2]).requires_grad


def test_autocast_multiplies_in_16_bits() -> None:
    rng = np.random.default_rng(1)
    x, weight = (Tensor(rng.standard_normal(s).astype("float32")) for s in ((8, 4), (9, 4)))
    x.requires_grad = True
    with autocast("bfloat16"):
        loss = tg.linear_cross_entropy(x, weight, np.arange(8))
    loss.backward()
    assert loss.dtype == np.float32
    assert x.grad is not None
    assert x.grad.dtype == np.float32
    exact = tg.linear_cross_entropy(x, weight, np.arange(8)).item()
    assert 0 < abs(loss.item() - exact) < 0.02


def test_arguments_that_do_not_fit() -> None:
    x, weight, targets = Tensor(np.zeros((2, 3))), Tensor(np.zeros((7, 3))), np.array([0, 6])
    with pytest.raises(ShapeError, match=r"weight has shape \(3, 7\), expected \(V, 3\)"):
        tg.linear_cross_entropy(x, weight.T, targets)
    with pytest.raises(ShapeError, match=r"targets has shape \(3,\), expected \(2,\)"):
        tg.linear_cross_entropy(x, weight, np.zeros(3, "int64"))
    with pytest.raises(ShapeError, match=r"bias has shape \(3,\), expected \(7,\)"):
        tg.linear_cross_entropy(x, weight, targets, np.zeros(3))
    with pytest.raises(DtypeError, match="targets has dtype float64, expected integers"):
        tg.linear_cross_entropy(x, weight, np.zeros(2))
    with pytest.raises(ArgumentError, match="vocab_size is 8, expected 1 to 7"):
        tg.linear_cross_entropy(x, weight, targets, vocab_size=8)
    with pytest.raises(ArgumentError, match=r"vocab_size is 0, expected 1 to 7 .rows of weight"):
        tg.linear_cross_entropy(x, weight, targets, vocab_size=0)
    with pytest.raises(
        ArgumentError, match=r"vocab_size is 15, expected 1 to 14 .7 rows on each of"
    ):
        loss_operands("op", x, weight, targets, 15, ranks=2)
    assert loss_operands("op", x, weight, targets, None, ranks=2)[3] == 14
    for wrong in (np.zeros((0, 3)), np.zeros(3), np.zeros((3, 4))):
        with pytest.raises(ShapeError, match=r"weight has shape .*, expected \(n, 3\) as x has"):
            loss_operands("op", x, wrong, targets, None, ranks=2)
    with pytest.raises(ShapeError, match=r"weight has shape \(0, 3\), expected .*, V at least 1"):
        tg.linear_cross_entropy(x, np.zeros((0, 3)), targets)
    for wrong in (np.zeros(3), np.zeros((3, 4))):
        with pytest.raises(ShapeError, match=r"weight has shape .*, expected \(V, 3\) \(last axis"):
            tg.linear_cross_entropy(x, wrong, targets)
    with pytest.raises(ShapeError, match=r"x has shape \(\), expected \(\*B, C\)"):
        tg.linear_cross_entropy(np.ones(()), weight, targets)
    with pytest.raises(ArgumentError, match="chunk is 0, expected 1 or more"):
        tg.linear_cross_entropy(x, weight, targets, chunk=0)
    with pytest.raises(ArgumentError, match=r"z_loss is -1\.0, expected a finite number from 0"):
        tg.linear_cross_entropy(x, weight, targets, z_loss=-1.0)
    with pytest.raises(OutOfRangeError, match=r"targets\[1\] is 6, expected 0 to 4"):
        tg.linear_cross_entropy(x, weight, targets, vocab_size=5)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(0, 1), (100, 100), (2048, 2048), (2049, 768), (3072, 1024), (3073, 896), (10**6, 1024)],
)
def test_chunks_are_equal_and_two_are_one(rows: int, expected: int) -> None:
    """64 MiB are 1,024 rows of 64 KiB."""
    assert rows_at_a_time("op", None, rows, 65536, on_host=True) == expected
    assert rows_at_a_time("op", 7, rows, 65536, on_host=True) == 7


@pytest.mark.parametrize(
    ("batch", "expected", "chunks"), [(2, 2048, 1), (8, 8192, 1), (16, 3328, 5), (32, 3328, 10)]
)
def test_chunks_on_a_gpu(batch: int, expected: int, chunks: int) -> None:
    """GPT-2 124M in 16 bits: up to 340 MiB are 3,456 rows."""
    rows = batch * 1024
    assert rows_at_a_time("op", None, rows, 50304 * 2, on_host=False) == expected
    assert -(-rows // expected) == chunks


@pytest.mark.parametrize("on_host", [True, False])
def test_equal_chunks_are_as_few_as_the_largest_would_be(on_host: bool) -> None:
    for rows in range(1, 200_000, 997):
        for row_bytes in (2, 514, 50304 * 2, 128256 * 4):
            limit = (64 if on_host else 340) * 2**20
            chunk = rows_at_a_time("op", None, rows, row_bytes, on_host)
            count = -(-rows // chunk)
            if count > 1:
                most = limit // (row_bytes * 128) * 128
                assert chunk % 128 == 0
                assert chunk <= most
                assert count == -(-rows // most)
                assert chunk - 128 < rows / count  # no smaller multiple of 128 would do
            else:
                assert chunk == rows


def test_rows_larger_than_a_chunk() -> None:
    assert rows_at_a_time("op", None, 1000, 2**30, on_host=True) == 128
