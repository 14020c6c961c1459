"""Kernels that work on rows, at the widths where their paths change, against the NumPy path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, no_grad
from tensorgrad.core import backend
from tensorgrad.dtypes import FLOATS, bfloat16, compute_dtype, float64
from tensorgrad.kernels import cross_entropy as cross_entropy_cuda
from tensorgrad.kernels import rows
from tensorgrad.kernels.cross_entropy import GradientFactor, LossOptions
from tensorgrad.kernels.rows import RowLayout
from tensorgrad.ops.cross_entropy import Reduction, rows_numpy, rows_tangent_numpy
from tensorgrad.testing import Ulps, assert_within
from tests import gpu_array

ROWS = 37
WIDTHS = [5, 8, 31, 64, 256, 264, 768, 1023, 1600, 4096, 8192, 8200, 65536, 65537]
OPS: dict[str, Callable[..., Tensor]] = {
    "layer_norm": tg.layer_norm,
    "rms_norm": lambda x, weight, bias: tg.rms_norm(x, weight),
    "softmax": lambda x, weight, bias: tg.softmax(x),
    "softmax-causal": lambda x, weight, bias: tg.softmax(x, scale=0.5, causal=True),
    "softmax-mask": lambda x, weight, bias: tg.softmax(x, scale=0.5, mask=bias.detach()),
    "softmax-padding": lambda x, weight, bias: tg.softmax(x, mask=bias.data > 0),
    "log_softmax": lambda x, weight, bias: tg.log_softmax(x),
}
BOUND = Ulps(4, "row")
_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # between 1 and the next number
TARGETS = np.random.default_rng(1).integers(0, 1 << 40, ROWS)


def added(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    total, normed = tg.add_layer_norm(x, residual, weight, bias)
    return total * 0.5 + normed


def run(function: Callable[..., Tensor], arrays: list[Any], dy: Any) -> list[Any]:
    """Return the value and the gradients, on the CPU."""
    tensors = [Tensor(a, requires_grad=True) for a in arrays]
    y = function(*tensors)
    y.backward(dy)
    found = [y.data, *(t.grad for t in tensors if t.grad is not None)]
    return [backend.to_numpy(a) for a in found]


def on_gpu(array: Any, shift: int = 0) -> Any:
    """Return a copy on the GPU, `shift` elements past an aligned address."""
    room = backend.cupy.empty(array.size + shift, array.dtype)
    room[shift:] = backend.to_device(array, "cuda").reshape(-1)
    return room[shift:].reshape(array.shape)


def compare(
    function: Callable[..., Tensor], arrays: list[Any], dy: Any, size: Any = None, dtype: Any = None
) -> None:
    """Compare the GPU with the CPU in float64, aligned or not, and with itself.

    size: the sums of the absolute values of the terms of dx, where those cancel.
    dtype: what is computed in, where parameters are wider.
    """
    wide = run(function, [a.astype(float64) for a in arrays], dy.astype(float64))
    for shift in (0, 1):
        gpu = run(function, [on_gpu(a, shift) for a in arrays], on_gpu(dy, shift))
        again = run(function, [on_gpu(a, shift) for a in arrays], on_gpu(dy, shift))
        for i, (one, two, exact) in enumerate(zip(gpu, again, wide, strict=True)):
            assert one.tobytes() == two.tobytes()
            what, terms = f"result {i}, shifted by {shift}", sum(arrays[0].shape)
            cancels = i == 1 and size is not None
            bound = Ulps(2, "terms") if cancels else BOUND
            sizes = size if cancels else None
            assert_within(one, exact, bound, what, terms=terms, size=sizes, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("op", OPS)
def test_rows_of_any_width(op: str, width: int, dtype: Any) -> None:
    rng = np.random.default_rng(width)
    shapes = [(ROWS, width), (width,), (width,), (ROWS, width)]
    *arrays, dy = [rng.standard_normal(s).astype(dtype) for s in shapes]
    size = None
    if "softmax" in op:
        y = OPS[op](*(Tensor(a.astype(float64)) for a in arrays)).numpy()
        wide = np.abs(dy.astype(float64))
        if op == "log_softmax":
            size = wide + np.exp(y) * (1 + abs(y)) * wide.sum(1, keepdims=True)
        else:
            size = y * (wide + (y * wide).sum(1, keepdims=True))
    compare(OPS[op], arrays, dy, size)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_residual_and_both_results(width: int, dtype: Any) -> None:
    rng = np.random.default_rng(width)
    shapes = [(ROWS, width), (ROWS, width), (width,), (width,), (ROWS, width)]
    *arrays, dy = [rng.standard_normal(s).astype(dtype) for s in shapes]
    arrays[1] = np.zeros_like(arrays[1])  # so that the sum is exact on both sides
    compare(added, arrays, dy)


@pytest.mark.gpu
@pytest.mark.parametrize("parameters", ["float32", "float64"])
def test_parameters_of_another_dtype(parameters: str) -> None:
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((ROWS, 768)).astype(bfloat16) for _ in range(2))
    weight, bias = (rng.standard_normal(768).astype(parameters) for _ in range(2))
    compare(tg.layer_norm, [x, weight, bias], dy, dtype=np.dtype("float32"))


@pytest.mark.gpu
def test_many_rows_share_blocks() -> None:
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((20011, 264)).astype("float32") for _ in range(2))
    weight, bias = (rng.standard_normal(264).astype("float32") for _ in range(2))
    compare(tg.layer_norm, [x, weight, bias], dy)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "width", [2, 7, 16, 64, 1000, 1023, 1024, 1040, 16385, 50257, 50304, 120001]
)
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.01)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cross_entropy(
    width: int, dtype: Any, smoothing: float, z_loss: float, reduction: Reduction
) -> None:
    rng = np.random.default_rng(width)
    logits = (3 * rng.standard_normal((ROWS, width))).astype(dtype)
    logits[3, width // 2] = -np.inf if width > 1 and not smoothing else 0
    targets = TARGETS % width
    targets[3] = 0
    targets[5:9] = -100
    dy = rng.uniform(1, 2, () if reduction == "mean" else ROWS)

    def function(x: Tensor) -> Tensor:
        ids = targets if backend.is_numpy(x.data) else backend.to_device(targets, "cuda")
        return tg.cross_entropy(
            x, ids, label_smoothing=smoothing, reduction=reduction, z_loss=z_loss
        )

    for weight in (np.ones_like(dy), dy):  # 1 is what forward prepares the gradient for
        powers = np.exp(logits.astype(float64) - logits.max(1, keepdims=True).astype(float64))
        size = (powers / powers.sum(1, keepdims=True) + 1 / width) * 1.5
        size[np.arange(ROWS), targets * (targets >= 0)] += 1
        size *= (weight if reduction == "none" else np.full(ROWS, weight / 33))[:, None]
        compare(function, [logits], np.asarray(weight).astype("float32"), size)


@pytest.mark.gpu
def test_cross_entropy_of_many_short_rows() -> None:
    rng = np.random.default_rng(2)
    logits, targets = (
        rng.standard_normal((200_001, 5)).astype("float32"),
        rng.integers(-1, 5, 200_001),
    )

    def function(x: Tensor) -> Tensor:
        ids = targets if backend.is_numpy(x.data) else backend.to_device(targets, "cuda")
        return tg.cross_entropy(x, ids, ignore_index=-1)

    compare(function, [logits], np.ones((), "float32"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("width", "classes"),
    [(24, 17), (64, 61), (1024, 1000), (1024, 1013), (1040, 1033), (20480, 20001), (50304, 50257)],
)
def test_cross_entropy_in_place_with_columns_that_do_not_count(
    width: int, classes: int, dtype: Any
) -> None:
    rng = np.random.default_rng(width)
    logits = (3 * rng.standard_normal((301, width))).astype(dtype)
    ids, options = rng.integers(-1, classes, 301), LossOptions(-1, 0.1, 0.01)
    dy = rng.uniform(1, 2, 301).astype(compute_dtype(dtype))
    exact, wide = np.empty(301), logits.astype(float64)
    rows_numpy(exact, wide, wide, ids, ids >= 0, options, dy.astype(float64), classes)
    gpu = on_gpu(logits)
    losses, *peaks = backend.cupy.empty((3, 301), dy.dtype)
    cross_entropy_cuda.rows_forward(
        losses,
        backend.cupy.stack(peaks),
        gpu,
        gpu,
        on_gpu(ids),
        options,
        GradientFactor(on_gpu(dy)),
        classes,
    )
    assert_within(losses.get(), exact, BOUND, "losses", terms=width)
    assert_within(gpu.get(), wide, BOUND, "gradient", terms=width)


@pytest.mark.gpu
def test_a_retained_graph_takes_another_dy() -> None:
    logits = Tensor(backend.cupy.ones((2, 8), "float32"), requires_grad=True)
    loss = tg.cross_entropy(logits, backend.cupy.array([1, 2]))
    grads: list[Any] = []
    for dy in (1, 3, 1):
        logits.grad = None
        loss.backward(np.float32(dy), retain_graph=True)
        assert logits.grad is not None
        grads.append(logits.grad.get())
    np.testing.assert_allclose(grads[1], 3 * grads[0], rtol=1e-6)
    np.testing.assert_allclose(grads[2], grads[0], rtol=1e-6)


@pytest.mark.gpu
def test_the_loss_is_the_same_without_a_gradient() -> None:
    logits = Tensor(backend.cupy.random.default_rng(0).standard_normal((5, 50304)), True)
    targets = backend.cupy.arange(5)
    with no_grad():
        alone = tg.cross_entropy(logits, targets)
    assert float(alone.data) == float(tg.cross_entropy(logits, targets).data)


def test_rows_are_held_by_as_many_threads_as_they_need() -> None:
    def layout(row_bytes: int, most: int = 512) -> RowLayout | None:
        return rows.in_registers(row_bytes, (1, 2, 4), 32, 256, most)

    assert layout(16) == RowLayout(1, 256, 1)
    assert layout(16 * 5) == RowLayout(8, 32, 1)
    assert layout(16 * 32) == RowLayout(32, 8, 1)
    assert layout(16 * 33) == RowLayout(32, 8, 2)
    assert layout(16 * 100) == RowLayout(32, 8, 4)
    assert layout(16 * 129) == RowLayout(64, 4, 4)
    assert layout(16 * 4 * 512) == RowLayout(512, 1, 4)
    assert layout(16 * (4 * 512 + 1)) is None
    assert layout(16 * 129, 63) is None
    assert layout(16 * 129, 64) == RowLayout(64, 4, 4)


def test_rows_of_any_width_are_read_in_passes() -> None:
    widths = (1, 8, 9, 4096, 100_000)
    assert [rows.strided_loop(width) for width in widths] == [
        RowLayout(1, 256, 1), RowLayout(1, 256, 1), RowLayout(2, 128, 1), RowLayout(512, 1, 1),
        RowLayout(512, 1, 1),
    ]  # fmt: skip
    layout = RowLayout(2, 128, 1)
    assert layout.block == (2, 128)
    assert [layout.grid(count) for count in (1, 128, 129)] == [(1,), (1,), (2,)]
    assert [rows.power_of_two(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 8]


def test_rows_are_aligned_in_all_arrays() -> None:
    memory = np.zeros(64, "float32")
    memory = memory[-memory.ctypes.data % 16 // 4 :]
    whole, odd = gpu_array.on_gpu(memory[:32]), gpu_array.on_gpu(memory[1:32])
    assert rows.aligned(4, whole, None)
    assert not rows.aligned(4, whole, odd)
    assert not rows.aligned(6, whole)
    assert rows.aligned(2, gpu_array.on_gpu(memory.view("float64")[:4]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("width", "classes"),
    [(1, 1), (24, 17), (1000, 1000), (1023, 1023), (1040, 1033), (50304, 50257)],
)
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.01)])
def test_tangents_of_cross_entropy(
    width: int, classes: int, smoothing: float, z_loss: float, dtype: Any
) -> None:
    rng = np.random.default_rng(width)
    values = rng.standard_normal((2, 61, width)) * [[[3.0]], [[1.0]]]
    logits, t = (array.astype(dtype) for array in values)
    logits[3, 0] = -np.inf if classes > 1 and not smoothing else 0
    ids, options = rng.integers(0, classes, 61), LossOptions(-1, smoothing, z_loss)
    ids[3], ids[5:9] = classes - 1, -1
    dy = rng.uniform(1, 2, 61).astype(compute_dtype(dtype))
    exact, x, moved = np.empty(61), logits.astype(float64), t.astype(float64)
    rows_tangent_numpy(exact, x, moved, ids, options, dy.astype(float64), classes)
    for differentiate in (False, True):
        by_logits, by_tangents = on_gpu(logits), on_gpu(t)
        ids_gpu, scale = on_gpu(ids), GradientFactor(on_gpu(dy))
        losses = backend.cupy.empty(61, dy.dtype)
        cross_entropy_cuda.rows_tangent(
            losses, by_logits, by_tangents, ids_gpu, options, scale, classes, differentiate
        )
        size = np.abs(t.astype(float64)).max(1) + 1
        error = np.abs(backend.to_numpy(losses) - exact) / size
        assert error.max() < {8: 1e-12, 4: 2e-5, 2: 2e-5}[dtype.itemsize]
    for array, right in ((by_logits, x), (by_tangents, moved)):
        mine = backend.to_numpy(array).astype(float64)
        rounding = _EPS[str(dtype)] * np.abs(right) if dtype.itemsize == 2 else 0.0
        cancelled = {8: 1e-13, 4: 1e-5, 2: 1e-5}[dtype.itemsize] * size[:, None]
        assert (np.abs(mine - right) <= rounding + cancelled).all()
