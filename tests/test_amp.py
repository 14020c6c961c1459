"""The casts of a block of `autocast`, and when it casts again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import amp, autocast, no_grad
from tensorgrad.amp import cast_operands
from tensorgrad.core import backend, backward
from tensorgrad.core.tensor import Tensor
from tensorgrad.dtypes import bfloat16
from tensorgrad.kernels import matmul as matmul_cuda
from tensorgrad.kernels.attention import sm80 as attention_sm80
from tensorgrad.kernels.attention.options import AttentionOptions, ForwardPass
from tensorgrad.ops import attention as attention_ops
from tests.gpu_array import GpuArray, on_gpu

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


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Return the kernels that products of GPU arrays to come ask for; none is computed."""
    found: list[str | None] = []

    def run(p: Any, kernel: str | None = None) -> None:
        found.append(kernel)
        p.y[...] = 0

    cupy = SimpleNamespace(
        ndarray=GpuArray,
        empty=lambda shape, dtype: on_gpu(np.empty(shape, dtype)),
        ascontiguousarray=lambda array: on_gpu(np.ascontiguousarray(array)),
        asarray=lambda array: on_gpu(np.asarray(array)),
        broadcast_to=lambda array, shape: np.broadcast_to(array, shape, subok=True),
    )
    monkeypatch.setattr(backend, "cupy", cupy)
    for module in (backward, amp):
        monkeypatch.setattr(module, "converted", lambda array, dtype: array.astype(dtype))
    monkeypatch.setattr(matmul_cuda, "run", run)
    monkeypatch.setattr(matmul_cuda, "derivative_for", lambda p: None)
    monkeypatch.setattr(amp, "has_tf32", lambda device: True)
    return found


def operand(*shape: int, dtype: Any = np.float32) -> Tensor:
    """Return a leaf that passes for one on the GPU."""
    return Tensor(on_gpu(np.ones(shape, dtype)), requires_grad=True)


OPS: dict[str, tuple[int, Callable[[Tensor, Tensor], Tensor]]] = {  # products, forward and backward
    "matmul": (3, lambda x, w: tg.matmul(x, w)),
    "linear": (3, lambda x, w: tg.linear(x, w)),
    "linear with a residual": (3, lambda x, w: tg.linear(x, w, residual=x.detach())),
    "linear_gelu": (1, lambda x, w: tg.linear_gelu(x, w).detach()),
    "feed_forward": (5, lambda x, w: tg.feed_forward(x, w, None, w.detach(), None)),
    "einsum": (3, lambda x, w: tg.einsum("ij,kj->ik", x, w)),
    "checkpoint": (4, lambda x, w: tg.checkpoint(tg.linear)(x, w)),
}


@pytest.mark.parametrize("name", OPS)
def test_tf32_is_what_forward_asks_for_also_in_a_backward_outside(
    name: str, products: list[str | None]
) -> None:
    count, op = OPS[name]
    x, weight = operand(4, 4), operand(4, 4)
    with autocast("tf32"):
        y = op(x, weight)
    if y.requires_grad:
        y.backward(on_gpu(np.ones((4, 4), np.float32)))
    assert products == ["tf32"] * count
    assert y.dtype == np.float32


def test_tf32_weight_gradients_are_added_by_the_product(products: list[str | None]) -> None:
    x, weight = operand(4, 4), operand(4, 4)
    weight.grad = total = on_gpu(np.ones((4, 4), np.float32))
    with autocast("tf32"):
        y = tg.linear(x, weight)
    y.backward(on_gpu(np.ones((4, 4), np.float32)))
    assert weight.grad is total
    assert products == ["tf32"] * 3


def test_tf32_is_for_float32_in_its_own_block(
    products: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = operand(4, 4), operand(4, 4)
    tg.linear(x, weight).backward(on_gpu(np.ones((4, 4), np.float32)))
    with autocast("tf32"):
        with autocast("bfloat16"):
            assert tg.linear(x, weight).dtype == bfloat16
        with autocast("tf32", enabled=False):
            tg.linear(x, weight)
        for dtype in (np.float64, np.float16):
            wide = operand(4, 4, dtype=dtype)
            tg.linear(wide, wide)
        tg.matmul(x, operand(4, 4, dtype=np.float64))
    assert products
    assert set(products) == {None}
    products.clear()
    x, weight = operand(4, 4), operand(4, 4)
    with autocast("bfloat16"), autocast("tf32"):
        y = tg.matmul(x, weight, kernel="tiled")  # an explicit kernel wins
        tg.linear(x, weight)
    y.backward(on_gpu(np.ones((4, 4), np.float32)))
    assert products == ["tiled", "tf32", "tiled", "tiled"]
    products.clear()
    monkeypatch.setattr(amp, "has_tf32", lambda device: False)
    with autocast("tf32"):
        tg.linear(x, weight)
    assert products == [None]


def test_tf32_casts_nothing_and_is_float32_on_the_cpu() -> None:
    x, weight = Tensor(floats(5, 8)), Tensor(floats(3, 8), requires_grad=True)
    with autocast("tf32"):
        assert cast(weight) is weight
        y = tg.linear(x, weight)
    assert y.numpy().tobytes() == tg.linear(x, weight).numpy().tobytes()


def test_attention_keeps_tf32_for_its_backward(
    products: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def forward(arrays: Any, options: AttentionOptions) -> tuple[Any, Any]:
        asked.append(options.tf32)
        return np.zeros_like(arrays[0]), arrays[0][..., 0]

    def backward(dy: Any, done: ForwardPass, gradients: Any) -> None:
        asked.append(done.options.tf32)

    kernels = SimpleNamespace(forward=forward, backward=backward)
    monkeypatch.setattr(attention_ops, "_implementation", lambda arrays, options: kernels)
    for inside in (True, False):
        q, k, v = (operand(1, 2, 3, 4) for _ in range(3))
        with autocast("tf32", enabled=inside):
            y = tg.attention(q, k, v)
        y.backward(on_gpu(np.ones(q.shape, np.float32)))
    assert asked == [True, True, False, False]


def test_attention_on_tensor_cores_takes_float32_for_tf32_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_sm80, "capability", lambda device: 80)

    def supports(
        width: int, dtype: Any = np.float32, scale: float = 1.0, tf32: bool = True
    ) -> bool:
        q = on_gpu(np.empty((1, 1, 2, width), dtype))
        return attention_sm80.supports((q, q, q), AttentionOptions(scale, tf32=tf32))

    assert all(supports(width) for width in (1, 63, 64, 128))
    assert supports(200, np.float16, tf32=False)
    assert not supports(129)
    assert not supports(64, tf32=False)
    assert not supports(64, scale=-1.0)
    monkeypatch.setattr(attention_sm80, "capability", lambda device: 75)
    assert not supports(64)
