"""Sums over the rows of gradients, which their kernels add up beside for the biases before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.autograd import record
from tensorgrad.core import backend
from tensorgrad.core.gradient import Gradient, parts_of
from tensorgrad.dtypes import FLOATS, bfloat16, float16
from tensorgrad.kernels.attention import short as attention_short
from tensorgrad.kernels.attention import sm90 as attention_sm90
from tensorgrad.ops import linear as linear_ops
from tests.kernels.hopper import hopper
from tests.poisoned import poison_memory

Found = list[Any]  # the arguments of the linear layers


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Found:
    """Return a list that collects the parts that backward of linear layers finds."""
    found: Found = []

    def look(dy: Any) -> Any:
        array, sums = parts_of(dy)
        found.append(None if sums is None else sums.shape)
        return array, sums

    monkeypatch.setattr(linear_ops, "parts_of", look)
    return found


def summed(x: Tensor) -> Tensor:
    """Return x by an op whose backward returns column sums."""

    def backward(dy: Any, saved: Any, needs: Any) -> Any:
        dx = dy.copy()
        return (Gradient(dx, dx.reshape(-1, dx.shape[-1]).copy()),)

    return record("summed", x.data, (x,), backward, ())


def noted(x: Tensor, found: Found, takes: bool = True) -> Tensor:
    """Return x by an op whose backward notes the type of its gradient."""

    def backward(dy: Any, saved: Any, needs: Any) -> Any:
        found.append(type(dy))
        return (dy,)

    return record("noted", x.data, (x,), backward, (), takes_gradient=takes)


def test_the_op_before_finds_column_sums_if_it_takes_them() -> None:
    for takes in (True, False):
        found: Found = []
        x = Tensor(np.ones((2, 3)), requires_grad=True)
        summed(noted(x, found, takes)).sum().backward()
        assert found == [Gradient if takes else np.ndarray]
        np.testing.assert_array_equal(x.grad, 1)


def test_an_op_that_hands_its_gradient_on_hands_on_its_sums() -> None:
    found: Found = []
    x = Tensor(np.ones((2, 3)), requires_grad=True)
    y = tg.checkpoint(lambda x: noted(x, found))(x * 1.0)
    summed(noted(y, [], takes=False) + 0.0).sum().backward()
    assert found == [Gradient] * 1


def test_a_gradient_that_a_leaf_holds_is_its_own() -> None:
    x = Tensor(np.ones((2, 3)), requires_grad=True)
    summed(x).sum().backward()
    assert type(x.grad) is np.ndarray
    dy = np.ones((2, 3))
    y = Tensor(np.ones((2, 3)), requires_grad=True)
    noted(noted(y, []), []).backward(dy)
    assert y.grad is not dy


def test_a_gradient_that_a_function_returns_is_an_array() -> None:
    x = tg.grad(lambda x: summed(x).sum())(np.ones((2, 3)))
    assert type(x.data) is np.ndarray


def test_gradients_that_are_added_up_have_none() -> None:
    found: Found = []
    x = Tensor(np.ones((2, 3)), requires_grad=True)
    y = noted(x * 1.0, found)
    (summed(y) + summed(y)).sum().backward()
    np.testing.assert_array_equal(x.grad, 2)
    assert found == [np.ndarray]


def on_gpu(rng: Any, *shape: int, dtype: Any) -> Tensor:
    array = rng.standard_normal(shape).astype("float32").astype(dtype)
    return Tensor(backend.to_device(array, "cuda"), requires_grad=True)


def check_bias(
    run: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor], found: Found,
    monkeypatch: pytest.MonkeyPatch, bound: float, is_kept: bool = True,
) -> None:  # fmt: skip
    """Check that a bias before an op gets the gradient that it gets without the sums.

    Args:
        run: of x, weight and bias.
        inputs: these.
        found: the fixture.
        monkeypatch: the fixture.
        bound: of the error, relative to the largest sum of absolute values.
        is_kept: whether sums are expected.
    """
    gradients = []
    for kept in (True, False):
        if not kept:
            monkeypatch.setattr(linear_ops, "parts_of", lambda dy: (parts_of(dy)[0], None))
        for each in inputs:
            each.grad = None
        y = run(*inputs)
        weights = np.cos(np.arange(y.size)).reshape(y.shape)
        y.backward(backend.to_device(weights.astype("float32").astype(y.dtype), "cuda"))
        gradients.append(backend.to_numpy(inputs[2].grad).astype(np.float64))
    assert [each is not None for each in found] == [is_kept]
    one, other = gradients
    assert np.abs(other).max() > 0
    assert np.abs(one - other).max() <= bound * max(1.0, float(np.abs(other).max()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("rows", "width"),
    [(1, 8), (37, 64), (3000, 264), (8192, 768), (700, 1600), (130, 4096), (33, 8192), (9, 1023)],
)
def test_norms_add_up_the_rows_of_their_gradient(
    rows: int, width: int, dtype: Any, found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(rows + width)
    x, weight = on_gpu(rng, 1, rows, 16, dtype=dtype), on_gpu(rng, width, 16, dtype=dtype)
    bias, scale = on_gpu(rng, width, dtype=dtype), on_gpu(rng, width, dtype=dtype)
    residual = on_gpu(rng, 1, rows, width, dtype=dtype).detach()
    itemsize = np.dtype(dtype).itemsize
    is_kept = width * itemsize % 16 == 0 and width * itemsize <= 4096

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        added, normed = tg.add_layer_norm(tg.linear(x, weight, bias), residual, scale)
        return added * normed

    check_bias(run, [x, weight, bias], found, monkeypatch, 0.02 if itemsize == 2 else 1e-5, is_kept)


@pytest.mark.gpu
def test_rms_norm_adds_up_the_rows_of_its_gradient(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    inputs = [on_gpu(rng, *shape, dtype="float32") for shape in ((70, 8), (256, 8), (256,))]
    check_bias(lambda x, w, b: tg.rms_norm(tg.linear(x, w, b)), inputs, found, monkeypatch, 1e-5)


@pytest.mark.gpu
def test_a_feed_forward_block_takes_the_sums_for_its_last_bias(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(4)
    x, up = on_gpu(rng, 256, 64, dtype=bfloat16), on_gpu(rng, 256, 64, dtype=bfloat16)
    down, bias = on_gpu(rng, 64, 256, dtype=bfloat16), on_gpu(rng, 64, dtype=bfloat16)

    def run(x: Tensor, down: Tensor, bias: Tensor) -> Tensor:
        return tg.layer_norm(tg.feed_forward(x, up, None, down, bias, residual=x))

    check_bias(run, [x, down, bias], found, monkeypatch, 0.02)


@pytest.mark.gpu
def test_sums_of_a_recomputed_part_are_right(found: Found) -> None:
    rng = np.random.default_rng(5)
    x, weight, bias = (on_gpu(rng, *s, dtype="float32") for s in ((9, 8), (64, 8), (64,)))
    gradients = []
    for function in (tg.layer_norm, tg.checkpoint(tg.layer_norm)):
        bias.grad = None
        y = function(tg.linear(x, weight, bias))
        y.backward(backend.cupy.cos(backend.cupy.arange(y.size, dtype="float32").reshape(y.shape)))
        gradients.append(backend.to_numpy(bias.grad))
    np.testing.assert_allclose(gradients[0], gradients[1], atol=1e-4)


SHAPES = [  # batch, length, heads, kv heads, D, whether sums are kept
    (2, 128, 2, 2, 64, True), (3, 100, 4, 2, 64, True), (1, 17, 2, 1, 64, True),
    (2, 1, 2, 2, 64, True), (1, 1100, 3, 3, 64, True), (2, 130, 2, 2, 32, False),
    (1, 130, 2, 2, 128, False),
]  # fmt: skip


@pytest.fixture
def other_geometry() -> Iterator[None]:
    """Forget the launches of a test that changes how they are chosen."""
    attention_sm90._geometry_of.cache_clear()
    yield
    attention_sm90._geometry_of.cache_clear()


@pytest.mark.gpu
@hopper
@pytest.mark.usefixtures("other_geometry")
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"window": 40}], ids=str)
@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_adds_up_the_rows_of_its_gradients(
    shape: Any, dtype: Any, options: Any, found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, length, heads, kv_heads, width, is_kept = shape
    poison_memory(monkeypatch)
    monkeypatch.setattr(attention_short, "supports", lambda *_: False)
    monkeypatch.setattr(attention_sm90._Geometry, "ordered", None)  # which adds up no rows
    rng = np.random.default_rng(length)
    channels = (heads + 2 * kv_heads) * width
    inputs = [
        on_gpu(rng, *s, dtype=dtype) for s in ((batch, length, 32), (channels, 32), (channels,))
    ]

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return tg.attention_packed(
            tg.linear(x, weight * 0.2, bias), heads, kv_heads=kv_heads, **options
        )

    check_bias(run, inputs, found, monkeypatch, 0.02, is_kept)


@pytest.mark.gpu
def test_dropout_in_attention_keeps_no_sums(found: Found) -> None:
    rng = np.random.default_rng(6)
    x, weight, bias = (on_gpu(rng, *s, dtype=bfloat16) for s in ((2, 64, 8), (192, 8), (192,)))
    tg.attention_packed(tg.linear(x, weight, bias), 1, dropout=0.5).sum().backward()
    assert found == [None]
