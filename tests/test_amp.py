"""What a block of `autocast` casts, and when it does so again."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import autocast, no_grad
from tensorgrad.amp import cast_operands
from tensorgrad.dtypes import bfloat16
from tensorgrad.tensor import Tensor

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def cast(tensor: Tensor) -> Tensor:
    return cast_operands(tensor)[0]


def test_a_tensor_is_cast_once_in_a_block() -> None:
    weight = Tensor(floats(4, 3), requires_grad=True)
    with autocast():
        first = cast(weight)
        assert cast(weight) is first
        with autocast():
            assert cast(weight) is not first
        assert cast(weight) is first
    with autocast():
        assert cast(weight) is not first


def test_it_is_cast_again_once_it_was_assigned_to_or_wants_a_gradient() -> None:
    weight = Tensor(floats(4, 3), requires_grad=True)
    with autocast():
        with no_grad():
            assert not cast(weight).requires_grad
        before = cast(weight)
        assert before.requires_grad
        with no_grad():
            weight[0] = 2.0
        assert cast(weight) is not before
        assert (cast(weight).data[0] == 2).all()


def test_a_cast_lives_no_longer_than_its_tensor() -> None:
    with autocast():
        x = Tensor(floats(4, 3))
        kept = cast(x)
        del x
        others = [Tensor(floats(4, 3)) for _ in range(8)]
        assert all(cast(other) is not kept for other in others)
        assert all((cast(t).data == t.data.astype(bfloat16)).all() for t in others)


def test_casts_go_with_their_block() -> None:
    weight = Tensor(floats(4, 3), requires_grad=True)
    gc.disable()
    try:
        with autocast():
            kept = weakref.ref(cast(weight))
            assert kept() is not None
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("buffered", [False, True])
def test_gradients_of_weights_are_not_rounded(buffered: bool) -> None:
    weight = Tensor(floats(5, 3), requires_grad=True)
    if buffered:
        weight.grad = np.zeros_like(weight.data)
    x, dy = (floats(7, n).astype(bfloat16) for n in (3, 5))
    with autocast():
        tg.linear(x, weight).backward(dy)
    expected = dy.astype(np.float32).T @ x.astype(np.float32)
    assert weight.grad is not None
    np.testing.assert_allclose(weight.grad, expected, rtol=1e-6)


def test_contributions_of_16_bits_are_added_in_float32() -> None:
    x = Tensor(np.ones(1, np.float32), requires_grad=True)
    y = x * 1.0
    half = y.astype("bfloat16")
    tg.add(half * 256.0, half * 1.0).sum().backward()  # bfloat16 has no 257
    assert x.grad is not None
    assert x.grad[0] == 257


def test_backward_may_begin_at_a_cast() -> None:
    leaf = Tensor(np.ones(2, np.float32), requires_grad=True)
    leaf.astype("bfloat16").backward(np.full(2, 3, bfloat16))
    (leaf * 2.0).astype("bfloat16").backward(np.full(2, 3, bfloat16))
    assert leaf.grad is not None
    assert leaf.grad.dtype == np.float32
    assert (leaf.grad == 9).all()
