"""Products in 8 bits: bits of the rounded operands, values and gradients of the linear layer."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, autocast, no_grad
from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16
from tensorgrad.errors import ArgumentError, GradError
from tensorgrad.kernels.fp8 import float8_e4m3, float8_e5m2
from tensorgrad.ops import fp8

FORMATS = {
    float8_e4m3: (ml_dtypes.float8_e4m3fn, 448.0),
    float8_e5m2: (ml_dtypes.float8_e5m2, 57344.0),
}
SHAPES = [(16, 16), (48, 80), (128, 64), (144, 208), (400, 272)]


def state(device: str, scale: float = 1.0) -> Any:
    return backend.to_device(np.array([1 / scale, scale, 0, 0], np.float32), device)


def counts(array: Any) -> tuple[float, int]:
    """Return the peak and the number of clipped elements of a state."""
    host = backend.to_numpy(array).copy()
    return float(host[2]), int(host[3:].view(np.uint32)[0])


def scale_for(x: Any, limit: float) -> float:
    """Return the largest power of two that keeps x within the limit."""
    peak, scale = abs(x).max(), 1.0
    while peak * scale * 2 <= limit:
        scale *= 2
    while peak * scale > limit:
        scale /= 2
    return scale


def rounded(x: Any, dtype: Any) -> Any:
    """Return x rounded to a format with the scale of its largest element, float64."""
    kind, limit = FORMATS[dtype]
    scale = scale_for(x, limit)
    return (x.astype(np.float32) * np.float32(scale)).astype(kind).astype(np.float64) / scale


@pytest.mark.parametrize("source", ["float32", "float16", bfloat16], ids=str)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_ml_dtypes(
    shape: tuple[int, int], dtype: Any, source: Any, device: str
) -> None:
    kind, limit = FORMATS[dtype]
    rng = np.random.default_rng(shape[0])
    x = (rng.standard_normal(shape) * np.exp(rng.uniform(-12, 9, shape))).astype(source)
    wide = x.astype(np.float32)
    scale = state(device, 0.25)
    adds_up = dtype == float8_e5m2
    rows, columns, sums = fp8.quantize(backend.to_device(x, device), dtype, scale, sums=adds_up)
    expected = np.clip(wide * np.float32(0.25), -limit, limit).astype(kind).view(np.uint8)
    np.testing.assert_array_equal(backend.to_numpy(rows.bits), expected)
    np.testing.assert_array_equal(backend.to_numpy(columns.bits), expected.T)
    if adds_up:
        total, size = backend.to_numpy(sums).sum(0), abs(wide).sum(0)
        assert (abs(total - wide.astype(np.float64).sum(0)) <= 1e-5 * size).all()
    assert counts(scale) == (abs(wide).max(), (abs(wide) * 0.25 > limit).sum())
    rows, columns, sums = fp8.quantize(
        backend.to_device(x, device), dtype, scale, columns=False, reports=False
    )
    assert columns is sums is None
    assert counts(scale)[1] == (abs(wide) * 0.25 > limit).sum()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_ties_go_to_even_and_what_is_not_finite_shows(dtype: Any, device: str) -> None:
    kind, limit = FORMATS[dtype]
    every = np.arange(256, dtype=np.uint8).view(kind).astype(np.float32)
    finite = np.sort(every[np.isfinite(every)])
    between = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2])
    x = np.zeros(512, np.float32)
    x[: len(between)] = between
    matrix = x.reshape(16, 32)
    array, scale = backend.to_device(matrix, device), state(device)
    rows, *_ = fp8.quantize(array, dtype, scale)
    found = backend.to_numpy(rows.bits).view(kind).astype(np.float32)
    np.testing.assert_array_equal(found, matrix.astype(kind).astype(np.float32))
    assert counts(scale) == (limit, 0)
    for value, is_clipped in ((np.inf, 1), (np.nan, 0)):
        array[3, 5] = value
        rows, *_ = fp8.quantize(array, dtype, scale)
        found = backend.to_numpy(rows.bits).view(kind)[3, 5].astype(np.float32)
        np.testing.assert_array_equal(found, limit if is_clipped else np.nan)
        np.testing.assert_array_equal(counts(scale)[0], value)
    assert counts(scale)[1] == 1


def test_scales_follow_the_peaks_of_the_last_steps(device: str) -> None:
    states = np.zeros((4, 4), np.float32)
    states[:, :2] = 1
    arrays = [states, np.zeros((2, 4), np.float32), np.zeros(1, np.int32)]
    arrays.append(np.array([448, 448, 57344, 448], np.float32))
    scales, history, turn, limits = (backend.to_device(array, device) for array in arrays)
    seen = []
    for peaks in ((448, 449, 1e-3, 0), (1, 1, np.nan, 0), (1, 1, 1e-44, 0), (1, 3e38, np.inf, 0)):
        scales[:, 2] = backend.to_device(np.array(peaks, np.float32), device)
        fp8.update_scales(scales, history, turn, limits)
        host = backend.to_numpy(scales)
        np.testing.assert_array_equal(host[:, 0], 1 / host[:, 1])
        assert (host[:, 2] == 0).all()
        seen.append(np.log2(host[:, 1]).tolist())
    assert seen == [[0, -1, 25, 0], [0, -1, 25, 0], [8, 8, 126, 0], [8, -120, 126, 0]]
    assert backend.to_numpy(turn)[0] == 4


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", ["float32", bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(32, 16), (2, 24, 80), (3, 80, 272)], ids=str)
def test_linear_is_the_product_of_rounded_operands(
    shape: tuple[int, ...], dtype: Any, with_residual: bool, device: str
) -> None:
    rng, n = np.random.default_rng(shape[-1]), 48
    shapes = (shape, (n, shape[-1]), (n,), (*shape[:-1], n))[: 4 if with_residual else 3]
    arrays = [rng.standard_normal(s).astype(dtype) for s in shapes]
    dy = (1e-5 * rng.standard_normal((*shape[:-1], n))).astype(dtype)
    tensors = [Tensor(backend.to_device(array, device), True) for array in arrays]
    x, weight, bias, *residual = tensors
    y = tg.linear(x, weight, bias, residual=residual[0] if residual else None, kernel="fp8")
    assert y.dtype == dtype
    y.backward(backend.to_device(dy, device))

    wide = [array.astype(np.float64) for array in (*arrays, dy)]
    a, w = rounded(wide[0], float8_e4m3).reshape(-1, shape[-1]), rounded(wide[1], float8_e4m3)
    g = rounded(wide[-1], float8_e5m2).reshape(-1, n)
    expected = [a @ w.T + wide[2], g @ w, g.T @ a, wide[-1].reshape(-1, n).sum(0)]
    sizes = [abs(a) @ abs(w).T + 1, abs(g) @ abs(w), abs(g).T @ abs(a), abs(g).sum(0)]
    if residual:
        expected[0] += wide[3].reshape(-1, n)
        expected.append(wide[-1].reshape(-1, n))
        sizes[0] += 1
        sizes.append(abs(expected[-1]))
    found = [y.data, *[tensor.grad for tensor in tensors]]
    ulp = 2.0**-8 if dtype == bfloat16 else 2.0**-12  # tensor cores add 14 bits
    for got, exact, size in zip(found, expected, sizes, strict=True):
        error = abs(backend.to_numpy(got).astype(np.float64).reshape(exact.shape) - exact)
        assert (error <= 2 * ulp * size).all()
        assert abs(exact).max() > 0


def test_a_gradient_is_added_to_and_a_constant_gets_none(device: str) -> None:
    rng = np.random.default_rng(0)
    x, w = (Tensor(backend.to_device(rng.standard_normal(s).astype(np.float32), device))
            for s in ((32, 48), (16, 48)))  # fmt: skip
    w.requires_grad = True
    for _ in range(2):
        tg.linear(x, w, kernel="fp8").sum().backward()
    assert x.grad is None
    twice = backend.to_numpy(w.grad).copy()
    w.grad = None
    tg.linear(x, w, kernel="fp8").sum().backward()
    np.testing.assert_allclose(twice, 2 * backend.to_numpy(w.grad), rtol=1e-6)


def test_autocast_multiplies_in_8_bits_where_lengths_allow(device: str) -> None:
    rng = np.random.default_rng(0)
    x, w, up, down = (Tensor(backend.to_device(rng.standard_normal(s).astype(np.float32), device))
                      for s in ((32, 32), (48, 32), (64, 32), (32, 64)))  # fmt: skip
    with autocast("bfloat16"):
        plain = tg.linear(x, w).numpy().astype(np.float64)
    with autocast("fp8"):
        y = tg.linear(x, w)
        assert y.dtype == bfloat16
        error = np.linalg.norm(y.numpy() - plain) / np.linalg.norm(plain)
        assert 0.01 < error < 0.06
        fewer = tg.linear(x[:8], w).numpy()
        np.testing.assert_array_equal(fewer, plain[:8].astype(fewer.dtype))
        hidden = tg.linear_gelu(x, up)
        assert hidden.dtype == bfloat16
        block, parts = tg.feed_forward(x, up, None, down, None), tg.linear(hidden, down)
        error = np.linalg.norm(block.numpy().astype(np.float32) - parts.numpy().astype(np.float32))
        assert error < 0.02 * np.linalg.norm(parts.numpy().astype(np.float32))
        assert (x @ w.swapaxes(0, 1)).dtype == bfloat16
    with no_grad():
        y = tg.linear(x, w, kernel="fp8")
    assert not y.requires_grad


@pytest.mark.parametrize("shape", [(2, 48, 64, 80), (1, 400, 272, 208)], ids=str)
@pytest.mark.parametrize("known", [False, True])
def test_the_hidden_layer_is_rounded_once(
    known: bool, shape: tuple[int, int, int, int], device: str
) -> None:
    *rows, width, hidden = shape
    rng = np.random.default_rng(width)
    sizes = (hidden, width), (hidden,), (width, hidden), (width,), (*rows, width)
    arrays = [rng.standard_normal((*rows, width)), *(0.1 * rng.standard_normal(s) for s in sizes)]
    narrow = [array.astype(bfloat16) for array in arrays]
    dy = (1e-4 * rng.standard_normal((*rows, width))).astype(bfloat16)
    tensors = [Tensor(backend.to_device(array, device), True) for array in narrow]

    exact = [array.astype(np.float64) for array in narrow]
    x, up, b, down, c, residual = exact
    x, g = x.reshape(-1, width), dy.astype(np.float64).reshape(-1, width)
    a, u, d = (rounded(each, float8_e4m3) for each in (x, up, down))
    before = (a @ u.T + b).astype(bfloat16).astype(np.float64)
    t = np.tanh(np.sqrt(2 / np.pi) * (before + 0.044715 * before**3))
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * before**2)
    h = rounded(before * (1 + t) / 2, float8_e4m3)
    q = rounded(g, float8_e5m2)
    plain = (q @ d) * ((1 + t) / 2 + before * (1 - t**2) / 2 * slope)
    dpre = rounded(plain, float8_e5m2)
    expected = [
        (h @ d.T + c).reshape(*rows, width) + residual, (dpre @ u).reshape(*rows, width),
        dpre.T @ a, plain.sum(0), q.T @ h, g.sum(0), dy.astype(np.float64),
    ]  # fmt: skip

    limits = (448, 448, 57344) * 2
    peaks = (x, up, plain, before * (1 + t) / 2, down, g)
    scales = [state(device, scale_for(peak, limit) if known else 1.0)
              for peak, limit in zip(peaks, limits, strict=True)]  # fmt: skip
    y = fp8.feed_forward(
        tensors, np.dtype(bfloat16), fp8.LinearScales(*scales[:3])._replace(measures=not known),
        fp8.LinearScales(*scales[3:])._replace(measures=not known),
    )  # fmt: skip
    y.backward(backend.to_device(dy, device))
    for got, one in zip([y.data, *[tensor.grad for tensor in tensors]], expected, strict=True):
        error = backend.to_numpy(got).astype(np.float64) - one
        assert np.linalg.norm(error) < 0.04 * np.linalg.norm(one)  # the others round otherwise
    for scale, peak, limit in zip(scales, peaks, limits, strict=True):
        host = backend.to_numpy(scale)
        assert host[1] == scale_for(peak, limit)
        assert host[2] == pytest.approx(abs(peak).max(), rel=0.02)


def test_logits_of_8_bits(device: str) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((96, 64), (48, 64))]
    targets = backend.to_device(rng.integers(0, 48, 96), device)
    found = []
    for precision in ("bfloat16", "fp8"):
        x, w = (Tensor(backend.to_device(array, device), True) for array in arrays)
        with autocast(precision):
            loss = tg.linear_cross_entropy(x, w, targets, chunk=32)
        loss.backward()
        found.append([loss.item(), *(backend.to_numpy(t.grad) for t in (x, w))])
    (plain, *gradients), (narrow, *narrow_gradients) = found
    assert narrow == pytest.approx(plain, rel=0.01)
    assert narrow != plain
    for one, other in zip(gradients, narrow_gradients, strict=True):
        assert 0.01 < np.linalg.norm(one - other) / np.linalg.norm(one) < 0.15


def test_what_8_bits_cannot_do_is_said(device: str) -> None:
    x, w, v = (
        Tensor(backend.to_device(np.ones(shape, np.float32), device))
        for shape in ((32, 16), (17, 16), (16, 16))
    )
    with pytest.raises(ArgumentError, match=r"kernel is 'fp8', which needs .* multiples of 16"):
        tg.linear(x, w, kernel="fp8")
    with pytest.raises(ArgumentError, match="scales are given for bfloat16"):
        autocast("bfloat16", scales=object()).__enter__()
    with pytest.raises(ArgumentError, match="scales is int, expected an"):
        autocast("fp8", scales=3).__enter__()
    slope = tg.grad(lambda x: tg.linear(x, v, kernel="fp8").sum())
    with pytest.raises(GradError, match="linear"):
        tg.grad(lambda x: (slope(x) ** 2).sum())(x)
