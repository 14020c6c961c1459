"""Linear layers against NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

import tensorgrad
import tensorgrad as tg
from tensorgrad import Tensor, amp, no_grad, random
from tensorgrad.autograd import on_grad_ready
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.kernels import special
from tensorgrad.ops import philox
from tensorgrad.ops.linear import _in_one
from tensorgrad.testing import SIZES, Case, Ulps, check

bfloat16 = tensorgrad.dtypes.bfloat16
ROWS = [(7,), (31, 33), (2, 3, 7), (40, 64), (2, 24, 72)]  # the last ones of whole vectors


def linear(x: Any, weight: Any, bias: Any = 0, residual: Any = 0) -> Any:
    return x @ weight.T + bias + residual


def gelu(x: Any) -> Any:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def linear_gelu(x: Any, weight: Any, bias: Any = 0) -> Any:
    return gelu(linear(x, weight, bias))


def feed_forward(x: Any, up: Any, b: Any, down: Any, c: Any, residual: Any = 0) -> Any:
    return linear(gelu(linear(x, up, b)), down, c, residual)


def gated_linear(x: Any, gate: Any, up: Any, b: Any = 0, c: Any = 0) -> Any:
    opened = linear(x, gate, b)
    return opened / (1 + np.exp(-opened)) * linear(x, up, c)


def keep_scale(shape: tuple[int, ...]) -> Any:
    """Return what the first dropout after `random.seed(5)` multiplies with; p is 0.3."""
    random.seed(5)
    keep = np.empty(shape, bool)
    philox.fill_keep(keep, random.next_key(), 0.7)
    return keep / 0.7


def dropped_gated_linear(*arrays: Any) -> Any:
    y = gated_linear(*arrays)
    return y * keep_scale(y.shape)


def seeded_gated_linear(*tensors: Tensor) -> Tensor:
    random.seed(5)
    return tg.gated_linear(*tensors, dropout=0.3)


def with_residual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return tg.linear(x, weight, bias, residual=residual)


def share(x: Any) -> Any:
    """Return the logistic function, which is gelu(x) / x for tanh's gelu up to a factor in x."""
    return 1 / (1 + np.exp(-x))


class Terms:
    """Sums of the absolute values of the terms of fused layers and of their gradients.

    The pre-activations h = x W^T + b are kept in the dtype, so an error of h counts too: by the
    derivative of the activation in a value, by the second derivative in a gradient.
    """

    @staticmethod
    def linear(x: Any, weight: Any, *rest: Any) -> list[Any]:
        *added, dy = rest
        y = linear(abs(x), abs(weight), *map(abs, added))
        dx, dweight, dbias = products(abs(dy), x, weight)
        return [y, dx, dweight, *[dbias, abs(dy)][: len(added)]]

    @staticmethod
    def linear_gelu(x: Any, weight: Any, *rest: Any) -> list[Any]:
        *bias, dy = rest
        h, size = linear(x, weight, *bias), linear(abs(x), abs(weight), *map(abs, bias))
        value, slope = of_gelu(h, size)
        dx, dweight, dbias = products(abs(dy) * slope, x, weight)
        return [value, dx, dweight, *[dbias][: len(bias)]]

    @staticmethod
    def feed_forward(x: Any, up: Any, b: Any, down: Any, c: Any, *rest: Any) -> list[Any]:
        *residual, dy = rest
        h, size = linear(x, up, b), linear(abs(x), abs(up), abs(b))
        inner, slope = of_gelu(h, size)
        y = linear(inner, abs(down), abs(c), *map(abs, residual))
        dinner, ddown, dc = products(abs(dy), inner, down)
        dx, dup, db = products(dinner * slope, x, up)
        return [y, dx, dup, db, ddown, dc, *[abs(dy)][: len(residual)]]

    @staticmethod
    def plain_feed_forward(x: Any, up: Any, down: Any, dy: Any) -> list[Any]:
        y, dx, dup, _, ddown, _ = Terms.feed_forward(x, up, np.zeros(len(up)), down,
                                                     np.zeros(len(down)), dy)  # fmt: skip
        return [y, dx, dup, ddown]

    @staticmethod
    def gated_linear(x: Any, gate: Any, up: Any, *rest: Any) -> list[Any]:
        *biases, dy = rest
        b, c = biases or (0.0, 0.0)
        opened, size = linear(x, gate, b), linear(abs(x), abs(gate), np.abs(b))
        u = linear(abs(x), abs(up), np.abs(c))
        part = share(opened)
        first = part + abs(opened) * part * (1 - part)
        s = first * size + abs(opened * part)
        slope = first + 2 * part * (1 - part) * size
        one, dgate, db = products(abs(dy) * u * slope, x, gate)
        two, dup, dc = products(abs(dy) * s, x, up)
        return [s * u, one + two, dgate, dup, *[db, dc][: len(biases)]]

    @staticmethod
    def dropped_gated_linear(*arrays: Any) -> list[Any]:
        *inputs, dy = arrays
        scale = keep_scale(dy.shape)
        y, *gradients = Terms.gated_linear(*inputs, dy * scale)
        return [y * scale, *gradients]


def of_gelu(h: Any, size: Any) -> tuple[Any, Any]:
    """Return what errors of gelu(h) and of its derivative are relative to; `size` is that of h.

    An eighth stands for 1 + tanh(...), which cancels far below zero.
    """
    density, below = np.exp(-h * h / 2) / math.sqrt(2 * math.pi), share(1.702 * h)
    slope = below + abs(h) * density
    value = slope * size + abs(gelu(h)) + abs(h) / 8
    return value, slope + density * abs(2 - h * h) * size + 1 / 8


def products(dh: Any, x: Any, weight: Any) -> tuple[Any, Any, Any]:
    """Return the sums of absolute values of dx, dweight and dbias for those of dh."""
    count = math.prod(x.shape[:-1])
    rows, x_rows = dh.reshape(count, dh.shape[-1]), abs(x).reshape(count, x.shape[-1])
    return dh @ abs(weight), rows.T @ x_rows, rows.sum(0)


def plain(inputs: list[Any], terms: int) -> Case:
    """Return a case of ops.linear; sizes that no kernel takes whole add to a rounded product."""
    residual = len(inputs) == 4
    return Case(with_residual if residual else tg.linear, inputs, linear, terms=terms,
                values=Ulps(1.5, "terms"), magnitudes=Terms.linear,
                name="linear-residual" if residual else "linear")  # fmt: skip


def fused(op: Any, inputs: list[Any], reference: Any, terms: int) -> Case:
    return Case(op, inputs, reference, values=Ulps(2, "terms"), terms=terms,
                magnitudes=getattr(Terms, reference.__name__))  # fmt: skip


def plain_feed_forward(x: Any, up: Any, down: Any) -> Any:
    return feed_forward(x, up, 0, down, 0)


CASES = [
    plain([(7,), (5, 7), (5,)], 8),
    plain([(31, 33), (65, 33), (65,)], 65),
    plain([(2, 3, 7), (5, 7), (5,)], 8),
    plain([(2, 3, 7), (5, 7)], 8),
    plain([(2, 24, 72), (136, 72), (136,)], 136),
    plain([(3, 0), (5, 0), (5,)], 8),
    plain([(3, 7), (0, 7), (0,)], 8),
    fused(tg.linear_gelu, [(3, 8), (16, 8)], linear_gelu, 16),
    fused(tg.gated_linear, [(2, 3, 8), (16, 8), (16, 8)], gated_linear, 32),
    fused(tg.gated_linear, [(0, 8), (16, 8), (16, 8)], gated_linear, 32),
    fused(lambda x, up, down: tg.feed_forward(x, up, None, down, None),
          [(3, 8), (16, 8), (24, 16)], plain_feed_forward, 24),
]  # fmt: skip
CASES[-1].name = "feed_forward-plain"
for rows, n in zip(ROWS, (5, 65, 5, 136, 264), strict=True):
    k = rows[-1]
    CASES += [
        plain([rows, (n, k), (n,), (*rows[:-1], n)], n),
        fused(tg.linear_gelu, [rows, (n, k), (n,)], linear_gelu, n),
        fused(tg.feed_forward, [rows, (n, k), (n,), (k, n), (k,), rows], feed_forward, n),
        fused(tg.gated_linear, [rows, (n, k), (n, k), (n,), (n,)], gated_linear, n),
        fused(seeded_gated_linear, [rows, (n, k), (n, k), (n,), (n,)], dropped_gated_linear, n),
    ]  # fmt: skip
for m, n, k in ((31, 5, 1), (1, 33, 2)):  # few terms, whose bounds are close
    CASES.append(
        fused(seeded_gated_linear, [(m, k), (n, k), (n, k), (n,), (n,)], dropped_gated_linear, n)
    )
for size in SIZES:
    for m, n, k in ((size, 5, 7), (3, size, 7), (3, 5, size)):
        CASES += [
            plain([(m, k), (n, k), (n,)], 1025),
            fused(tg.linear_gelu, [(m, k), (n, k), (n,)], linear_gelu, 1025),
            fused(tg.feed_forward, [(m, k), (n, k), (n,), (k, n), (k,)], feed_forward, 1025),
            fused(tg.gated_linear, [(m, k), (n, k), (n, k), (n,), (n,)], gated_linear, 1025),
        ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


def test_other_gelu() -> None:
    x, w = np.array([[0.5, -2.0]]), np.array([[1.0, 0.0], [0.25, 1.0]])
    y = tg.linear_gelu(x, w, approximate="none")
    np.testing.assert_array_equal(y.numpy(), tg.gelu(x @ w.T, approximate="none").numpy())
    with pytest.raises(ArgumentError, match="gelu: approximate is 'erf'"):
        tg.linear_gelu(x, w, approximate="erf")


def test_a_wide_residual_widens_the_result() -> None:
    x, w = np.ones((3, 4), bfloat16), np.full((2, 4), 0.3, bfloat16)
    residual = np.full((3, 2), 1e-3, np.float32)
    y = tg.linear(x, w, residual=residual)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y.numpy(), 4 * float(w[0, 0]) + 1e-3, rtol=1e-6)
    with amp.autocast("bfloat16"):
        y = tg.feed_forward(x.astype("float32"), w, None, w.T, None, x.astype("float32"))
    assert y.dtype == np.float32


@pytest.mark.parametrize("rows", [3, 40])
def test_the_sums_of_16_bits_may_stay_as_they_are(rows: int, device: str) -> None:
    rng = np.random.default_rng(rows)
    arrays = [rng.standard_normal(shape).astype(bfloat16) for shape in ((rows, 64), (24, 64))]
    x, w = (Tensor(backend.to_device(array, device), True) for array in arrays)
    expected = arrays[0].astype("float64") @ arrays[1].astype("float64").T
    y = tg.linear(x, w, dtype="float32")
    with no_grad():
        alone = tg.linear(x, w, dtype="float32")
    for found in (y, alone):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)
    y.sum().backward()
    assert w.grad is not None
    expected = np.tile(arrays[0].astype("float64").sum(0), (24, 1))
    np.testing.assert_allclose(backend.to_numpy(w.grad).astype("float64"), expected, rtol=0.01)
    with pytest.raises(DtypeError, match="linear: dtype is int64, expected a float"):
        tg.linear(x, w, dtype="int64")


@pytest.mark.parametrize("dtype", ["float64", "float32", bfloat16])
def test_a_gate_that_is_wide_open_passes_the_whole_gradient(dtype: Any, device: str) -> None:
    for opened in (40, 2.0**24, 1e8, 1e16):
        gate, up = (np.array([[v]]).astype(dtype) for v in (opened, 3))
        tensors = [
            Tensor(backend.to_device(a, device), requires_grad=True)
            for a in (np.ones((1, 1), dtype), gate, up)
        ]
        y = tg.gated_linear(*tensors)
        y.backward(backend.to_device(np.ones((1, 1), dtype), device))
        exact = float(gate[0, 0])
        found = [float(backend.to_numpy(t.grad)[0, 0]) for t in tensors]
        tolerance = {8: 1e-14, 4: 1e-6, 2: 0.01}[np.dtype(dtype).itemsize]
        np.testing.assert_allclose(found, [6 * exact, 3, exact], tolerance)


@pytest.mark.parametrize("dtype", ["float16", bfloat16])
@pytest.mark.parametrize("sizes", [(240, 2, 64), (7, 8, 3), (5, 24, 16), (16, 10, 8), (1, 1, 1)])
def test_a_wide_bias_fits_any_size(sizes: tuple[int, int, int], dtype: Any, device: str) -> None:
    rows, width, columns = sizes
    rng = np.random.default_rng(rows)
    x, w = (rng.standard_normal(s).astype(dtype) for s in ((rows, width), (columns, width)))
    bias = rng.standard_normal(columns).astype("float32")
    left, right, added = [Tensor(backend.to_device(array, device)) for array in (x, w, bias)]
    product = x.astype("float64") @ w.astype("float64").T + bias
    for op, expected in ((tg.linear, product), (tg.linear_gelu, gelu(product))):
        y = op(left, right, added)
        assert y.dtype == dtype
        np.testing.assert_allclose(y.numpy().astype("float64"), expected, rtol=1e-2, atol=2e-2)


def test_a_gated_pair_is_the_two_layers_it_is_made_of() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s) for s in ((2, 5, 4), (3, 4), (3, 4), (3,))]
    found = []
    for fused in (True, False):
        x, gate, up, bias = inputs = [Tensor(array, True) for array in arrays]
        gate.requires_grad = False
        if fused:
            y = tg.gated_linear(x, gate, up, None, bias)
        else:
            y = tg.swiglu(tg.linear(x, gate), tg.linear(x, up, bias))
        y.backward(np.ones((2, 5, 3)))
        assert gate.grad is None
        found.append([y.data, *[each.grad for each in inputs if each.requires_grad]])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    with amp.autocast("bfloat16"):
        narrow = [array.astype("float32") for array in arrays[:3]]
        assert tg.gated_linear(*narrow).dtype == bfloat16


@pytest.mark.parametrize("sizes", [(3, 8, 40), (40, 24, 264), (33, 7, 65), (0, 8, 16)])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", bfloat16], ids=str)
def test_dropout_of_a_gated_pair_has_the_bits_of_dropout_after_it(
    dtype: Any, sizes: tuple[int, int, int], device: str
) -> None:
    rows, width, hidden = sizes
    rng = np.random.default_rng(0)
    shapes = (rows, width), (hidden, width), (hidden, width), (hidden,), (hidden,), (rows, hidden)
    *arrays, dy = [
        backend.to_device(rng.standard_normal(shape).astype(dtype), device) for shape in shapes
    ]
    found: list[list[bytes]] = []
    for fused in (True, False):
        inputs = [Tensor(array, True) for array in arrays]
        values = []
        for context in (nullcontext(), no_grad()):
            random.seed(6)
            with context:
                y = tg.gated_linear(*inputs, dropout=0.4 if fused else 0.0)
                values.append(y if fused else tg.dropout(y, 0.4))
            assert random.get_state()["draw"] == 1
        values[0].backward(dy)
        found.append([y.numpy().tobytes() for y in values])
        found[-1] += [backend.to_numpy(each.grad).tobytes() for each in inputs]
        assert rows == 0 or 0.2 < (values[0].numpy() == 0).mean() < 0.6
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize(
    "shape", [(3, 8, 40), (2, 20, 24, 264), (33, 7, 65), (600, 64, 256), (0, 8, 16)], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "float16", bfloat16], ids=str)
def test_weights_side_by_side_give_one_product(
    dtype: Any, shape: tuple[int, ...], p: float
) -> None:
    *rows, width, hidden = shape
    rng = np.random.default_rng(0)
    x, both, dy = (
        backend.to_device(rng.standard_normal(s).astype(dtype), "cuda")
        for s in ((*rows, width), (2 * hidden, width), (*rows, hidden))
    )
    found: list[list[bytes]] = []
    errors = []
    for halves in (both[:hidden], both[hidden:]), (both[:hidden].copy(), both[hidden:].copy()):
        one = _in_one(*halves)
        assert (one is None) == bool(found)
        if one is not None:
            np.testing.assert_array_equal(one.get(), both.get())
        random.seed(6)
        inputs = [Tensor(array, True) for array in (x, *halves)]
        y = tg.gated_linear(*inputs, dropout=p)
        y.backward(dy)
        dx, *others = [backend.to_numpy(each.grad) for each in inputs]
        found.append([y.numpy().tobytes(), *[each.tobytes() for each in others]])
        random.seed(6)
        wide = [Tensor(each.data.astype("float64"), True) for each in inputs]
        tg.gated_linear(*wide, dropout=p).backward(dy.astype("float64"))
        expected = backend.to_numpy(wide[0].grad)
        errors.append(np.square(dx.astype("float64") - expected).sum())
        assert not dx.size or errors[-1] <= 1e-3 * np.square(expected).sum()
    assert found[0] == found[1]
    assert dx.size < 900 or errors[0] <= 1.1 * errors[1]  # errors of few elements are chance


def test_recomputed_dropout_of_a_gated_pair_is_the_same(device: str) -> None:
    rng = np.random.default_rng(0)
    arrays = [
        backend.to_device(rng.standard_normal(shape).astype("float32"), device)
        for shape in ((40, 24), (72, 24), (72, 24))
    ]
    found = []
    for recomputed in (True, False):
        random.seed(6)
        inputs = [Tensor(array, True) for array in arrays]
        op = partial(tg.gated_linear, dropout=0.4)
        (tg.checkpoint(op) if recomputed else op)(*inputs).sum().backward()
        found.append([backend.to_numpy(each.grad).tobytes() for each in inputs])
    assert found[0] == found[1]


def test_weight_gradients_are_added_to_wide_ones_and_hooks_see_the_sum() -> None:
    rng = np.random.default_rng(0)
    x, w = Tensor(rng.standard_normal((5, 4))), Tensor(rng.standard_normal((3, 4)), True)
    w.grad = before = np.ones((3, 4))
    seen = []
    on_grad_ready(w, lambda leaf: seen.append(np.array(leaf.grad)))
    (tg.linear(x, w) + tg.linear(x * 2, w)).backward(np.ones((5, 3)))
    expected = 1 + 3 * np.ones((3, 5)) @ x.data
    assert w.grad is before
    np.testing.assert_allclose(w.grad, expected, rtol=1e-12)
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0], w.grad)


def test_weight_gradients_of_16_bits_are_added_to_wide_ones_unrounded(device: str) -> None:
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(s).astype(bfloat16) for s in ((40, 8), (16, 8), (40, 16)))
    left, weight = (Tensor(backend.to_device(a, device), True) for a in (x, w))
    weight.grad = backend.to_device(np.ones((16, 8), np.float32), device)
    for _ in range(2):
        tg.linear(left, weight).backward(backend.to_device(dy, device))
    expected = 1 + 2 * dy.astype("float64").T @ x.astype("float64")
    assert weight.grad.dtype == np.float32
    np.testing.assert_allclose(backend.to_numpy(weight.grad), expected, rtol=1e-5, atol=1e-5)


X = np.ones((2, 3))
NOTHING: Any = None


@pytest.mark.parametrize("sizes", [(3, 1), (5, 31), (0, 4), (300, 64), (2100, 512), (4096, 12)])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float64])
def test_gradients_of_biases_are_added_to_what_is_there(
    sizes: tuple[int, int], dtype: Any, device: str
) -> None:
    width = sizes[1]
    rng = np.random.default_rng(0)
    x, dy = (backend.to_device(rng.normal(size=sizes).astype(dtype), device) for _ in range(2))
    weight = Tensor(backend.to_device(np.eye(width, dtype=dtype), device))
    grads = []
    for before in (0, 3):
        bias = Tensor(backend.to_device(np.zeros(width, dtype), device), requires_grad=True)
        wide = np.float64 if dtype is np.float64 else np.float32
        bias.grad = backend.to_device(np.full(width, before, wide), device)
        tg.linear(Tensor(x), weight, bias).backward(dy)
        grads.append(backend.to_numpy(bias.grad))
    expected = backend.to_numpy(dy).astype(np.float64).sum(0)
    np.testing.assert_allclose(grads[0], expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(grads[1], grads[0] + 3, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tg.linear(X, X, residual=X), ShapeError,
         r"linear: residual has shape \(2, 3\), expected \(2, 2\)"),
        (lambda: tg.linear_gelu(X, X.T), ShapeError, r"linear_gelu: weight has shape \(3, 2\), "),
        (lambda: tg.linear_gelu(X, X, X), ShapeError, r"linear_gelu: bias has shape \(2, 3\), "),
        (lambda: tg.linear_gelu(X, np.ones((2, 3), int)), DtypeError,
         "linear_gelu: weight has dtype int64, expected a float"),
        (lambda: tg.feed_forward(X, X, None, X, None), ShapeError,
         r"feed_forward: down has shape \(2, 3\), expected \(out, 2\) \(axis 0 of up\)"),
        (lambda: tg.gated_linear(X, X, X, dropout=1.0), ArgumentError,
         r"gated_linear: dropout is 1\.0, expected 0 <= dropout < 1"),
        (lambda: tg.linear(X, X, np.ones(2), kernel="tiled"), ArgumentError,
         "matmul: kernel is 'tiled', expected None for arrays on a CPU"),
        (lambda: tg.gated_linear(X, X, X, dropout="a"),  # type: ignore[arg-type]  # a user may
         ArgumentError, "gated_linear: dropout is 'a', expected a number"),
        (lambda: tg.gated_linear(NOTHING, X, X), DtypeError, "gated_linear: x is a NoneType"),
        (lambda: tg.gated_linear(X, X, np.ones((4, 3))), ShapeError,
         r"gated_linear: up has shape \(4, 3\), expected \(2, 3\) like gate"),
        (lambda: tg.gated_linear(X, X.T, X.T), ShapeError,
         r"gated_linear: gate has shape \(3, 2\), expected \(hidden, 3\) \(last axis of x\)"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_bias_and_a_residual_are_added_before_rounding() -> None:
    rng = np.random.default_rng(0)
    shapes = (9, 300), (5, 300), (5,), (9, 5)
    for dtype in ("float16", "bfloat16"):
        arrays = [tg.tensor(rng.standard_normal(shape), dtype).data for shape in shapes]
        x, weight, bias, residual = (array.astype("float32") for array in arrays)
        for options, added in (
            ({}, 0), ({"bias": arrays[2]}, bias), ({"residual": arrays[3]}, residual),
            ({"bias": arrays[2], "residual": arrays[3]}, bias + residual),
        ):  # fmt: skip
            exact = x @ weight.T + added
            found = tg.linear(arrays[0], arrays[1], **options).numpy()
            rounded = exact.astype(arrays[0].dtype)
            assert (found == rounded).mean() > 0.97  # but for the order of the sums
            wide = tg.linear(arrays[0], arrays[1], **options, dtype="float32").numpy()
            np.testing.assert_allclose(wide, exact, rtol=1e-4, atol=1e-4)


@np.errstate(all="ignore")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gelu_and_its_derivative_share_an_exponential(dtype: str) -> None:
    x = np.linspace(-30, 30, 2001).astype(dtype)
    x[:4] = 0, 1e30, -1e30, -1e5
    y, derivative = special.gelu_tanh_with_derivative(x)
    assert y.tobytes() == special.gelu_tanh(x).tobytes()
    exact = special.gelu_tanh_derivative(x.astype("float64"))
    assert abs(derivative - exact).max() < 4 * np.finfo(dtype).eps


def test_tiles_of_a_feed_forward_block_have_the_values_of_its_parts() -> None:
    rng = np.random.default_rng(0)
    shapes = (600, 24), (2100, 24), (2100,), (24, 2100), (24,), (600, 24)
    arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]
    found = []
    for whole in (True, False):
        inputs = x, up, up_bias, down, down_bias, residual = [Tensor(a, True) for a in arrays]
        if whole:
            y = tg.feed_forward(*inputs)
            assert y.node is not None
            assert y.node.name == "feed_forward"
        else:
            hidden = tg.linear_gelu(x, up, up_bias)
            y = tg.linear(hidden, down, down_bias, residual=residual)
        y.backward(arrays[-1])
        found.append([y.numpy(), *[tensor.grad for tensor in inputs]])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * abs(other).max())


def test_autocast_multiplies_in_16_bits() -> None:
    x, weight = (Tensor(np.ones(shape, "float32")) for shape in ((2, 3), (4, 3)))
    calls: list[Callable[[], Tensor]] = [
        lambda: tg.linear(x, weight),
        lambda: tg.linear_gelu(x, weight),
        lambda: tg.feed_forward(x, weight, None, weight.T, None),
        lambda: tg.gated_linear(x, weight, weight),
    ]
    for call in calls:
        assert call().dtype == np.float32
        with tg.autocast("bfloat16"):
            assert str(call().dtype) == "bfloat16"
