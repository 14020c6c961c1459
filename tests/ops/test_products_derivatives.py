"""Tangents and second derivatives of products, dropout, rotary embeddings and lookups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.autograd.functions import jvp
from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.core.modes import mode, replaced
from tensorgrad.core.record import record
from tensorgrad.dtypes import FLOATS, bfloat16, float16, float32, float64
from tensorgrad.kernels import dropout as dropout_cuda
from tensorgrad.kernels import special
from tensorgrad.kernels.dropout import KeepMask
from tensorgrad.ops import dropout as dropout_ops
from tensorgrad.ops import linear as linear_ops
from tests.derivatives import check_derivatives

rng = np.random.default_rng(0)
IDS = np.array([[2, 0, 2], [1, 4, 4]])


def values(*shape: int) -> Any:
    return rng.standard_normal(shape)


def seeded(f: Any) -> Any:
    """Return a function with the same random numbers in each call."""

    def run(*xs: Tensor) -> Tensor:
        tg.manual_seed(5)
        y: Tensor = f(*xs)
        return y

    return run


X, W, B, R = values(2, 3, 4), values(5, 4), values(5), values(2, 3, 5)
UP, UP_BIAS, DOWN, DOWN_BIAS = values(6, 4), values(6), values(4, 6), values(4)
HEADS, ANGLES = values(3, 2, 4), (values(3, 1, 2), values(3, 1, 2))
CASES: dict[str, tuple[Any, ...]] = {
    "matmul": (tg.matmul, values(3, 4), values(4, 5)),
    "matmul batch": (tg.matmul, values(2, 1, 3, 4), values(3, 4, 2)),
    "matmul one matrix": (tg.matmul, values(2, 3, 4), values(4, 5)),
    "matmul vectors": (tg.matmul, values(4), values(4)),
    "matmul vector left": (tg.matmul, values(4), values(2, 4, 3)),
    "matmul vector right": (tg.matmul, values(2, 3, 4), values(4)),
    "matmul empty": (tg.matmul, values(3, 0), values(0, 2)),
    "matmul twice": (lambda a: a @ (a @ a), values(3, 3)),
    "matmul views": (lambda a, b: tg.matmul(a, b) @ W[::-1, ::2], values(3, 5).T, values(3, 5)),
    "matmul left": (lambda a: a @ UP.T, values(3, 4)),
    "matmul right": (lambda b: Tensor(UP) @ b, values(4, 3)),
    "einsum": (lambda a, b: tg.einsum("bik,bkj->bij", a, b), values(2, 3, 4), values(2, 4, 2)),
    "einsum outer": (lambda a, b: tg.einsum("i,j->ij", a, b), values(3), values(2)),
    "einsum three": (lambda a, b, c: tg.einsum("ij,jk,kl->l", a, b, c),
                     values(2, 3), values(3, 4), values(4, 2)),
    "einsum one": (lambda a: tg.einsum("iij->j", a) ** 2, values(3, 3, 2)),
    "einsum ellipsis": (lambda a, b: tg.einsum("...i,...ij->...j", a, b),
                        values(2, 3), values(3, 4)),
    "einsum length 1": (lambda a, b: tg.einsum("ij,ij->i", a, b), values(3, 1), values(3, 4)),
    "einsum right": (lambda b: tg.einsum("ij,jk->ki", X[0], b), values(4, 2)),
    "tensordot": (tg.tensordot, values(2, 3, 4), values(3, 4, 2)),
    "outer": (tg.outer, values(2, 2), values(3)),
    "dot": (tg.dot, values(2, 3), values(4, 3, 2)),
    "dot scalar": (tg.dot, values(), values(3)),
    "linear": (tg.linear, X, W),
    "linear all": (lambda x, w, b, r: tg.linear(x, w, b, residual=r), X, W, B, R),
    "linear vector": (tg.linear, values(4), W, B),
    "linear x": (lambda x: tg.linear(x, W, B) ** 2, X),
    "linear weight": (lambda w: tg.linear(X, w, B) ** 2, W),
    "linear bias": (lambda b: tg.linear(X, W, b) ** 2, B),
    "linear residual": (lambda r: tg.linear(X, W, residual=r) ** 2, R),
    "linear bias residual": (lambda b, r: tg.linear(X, W, b, residual=r) ** 2, B, R),
    "linear_gelu": (tg.linear_gelu, X, W, B),
    "linear_gelu exact": (lambda x, w: tg.linear_gelu(x, w, approximate="none"), X, W),
    "feed_forward": (tg.feed_forward, X, UP, UP_BIAS, DOWN, DOWN_BIAS, X / 2),
    "feed_forward up": (lambda u: tg.feed_forward(X, u, UP_BIAS, DOWN, None), UP),
    "gated_linear": (tg.gated_linear, X, UP, UP[::-1], UP_BIAS, UP_BIAS[::-1]),
    "gated_linear no bias": (tg.gated_linear, X, UP, UP[::-1]),
    "gated_linear x": (lambda x: tg.gated_linear(x, UP, UP + 1), X),
    "gated_linear gate": (lambda g: tg.gated_linear(X, g, UP), UP),
    "gated_linear up bias": (lambda c: tg.gated_linear(X, UP, UP, None, c) ** 2, UP_BIAS),
    "gated_linear dropout": (seeded(lambda *xs: tg.gated_linear(*xs, dropout=0.4)),
                             X, UP, UP[::-1], UP_BIAS, UP_BIAS),
    "dropout": (seeded(lambda x: tg.dropout(x * x, 0.4)), values(5, 7)),
    "dropout_add": (seeded(lambda x, r, b: tg.dropout_add(x * x, r * r, p=0.4, bias=b * b)),
                    X, X + 1, values(4)),
    "dropout_add bias": (seeded(lambda b: tg.dropout_add(X, X, p=0.4, bias=b * b)), values(4)),
    "dropout_add residual": (seeded(lambda r: tg.dropout_add(X, r * r, p=0.4)), X),
    "dropout_add x": (seeded(lambda x: tg.dropout_add(x * x, X, p=0.4, bias=X[0, 0])), X),
    "rotary": (lambda x: tg.rotary(x, *ANGLES) ** 2, values(2, 3, 2, 4)),
    "rotary angles": (tg.rotary, values(2, 3, 2, 4), *ANGLES),
    "rotary some heads": (lambda *xs: tg.rotary(*xs, heads=2, interleaved=True),
                          values(3, 3, 4), *ANGLES),
    "rotary cos": (lambda c: tg.rotary(HEADS, c, ANGLES[1], heads=1) ** 2, ANGLES[0]),
    "rotary no heads": (lambda *xs: tg.rotary(*xs, heads=0) ** 2, values(3, 2, 4), *ANGLES),
    "embedding": (lambda w: tg.embedding(w, IDS) ** 2, values(5, 4)),
    "embedding positions": (lambda w, p: tg.embedding(w, IDS, p, start=1) ** 2,
                            values(5, 4), values(6, 4)),
    "embedding starts": (lambda w, p: tg.embedding(w, IDS, p, start=np.array([2, 0])) ** 2,
                         values(5, 4), values(6, 4)),
    "positions": (lambda p: tg.embedding(UP, IDS, p, start=2) ** 2, values(5, 4)),
    "positions starts": (lambda p: tg.embedding(UP, IDS, p, start=np.array([1, 2])) ** 2,
                         values(5, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_derivatives_match_differences(name: str) -> None:
    check_derivatives(*CASES[name])


@pytest.mark.parametrize("name", ["linear all", "gated_linear", "feed_forward", "matmul twice"])
def test_third_derivatives(name: str) -> None:
    f, *arrays = CASES[name]
    directions = [values(*x.shape) for x in arrays]

    def along(t: Tensor) -> Tensor:
        xs = [Tensor(x) + t * Tensor(v) for x, v in zip(arrays, directions, strict=True)]
        y: Tensor = f(*xs)
        return (y * y).sum()

    first = tg.grad(along)
    second = tg.grad(lambda t: first(t))
    ends = [second(Tensor(np.array(step))).item() for step in (1e-5, -1e-5)]
    found, expected = (
        tg.grad(lambda t: second(t))(Tensor(np.zeros(()))).item(), (ends[0] - ends[1]) / 2e-5,
    )  # fmt: skip
    assert abs(found - expected) < 1e-5 * abs(expected)


Derivatives = list[np.ndarray[Any, Any]]


def products_with_hessian(loss: Any, arrays: list[Any], directions: list[Any]) -> list[Derivatives]:
    """Return the tangent of a loss, and its Hessian-vector product in three ways."""
    xs, vs = [Tensor(x) for x in arrays], [Tensor(v) for v in directions]
    places = tuple(range(len(xs)))
    gradient = tg.grad(loss, places)

    def slope(*xs: Tensor) -> Tensor:
        t: Tensor = jvp(loss, xs, vs)[1]
        return t

    def product(*xs: Tensor) -> Tensor:
        parts = [(g * v).sum() for g, v in zip(gradient(*xs), vs, strict=True)]
        total: Tensor = sum(parts[1:], parts[0])
        return total

    forward = [jvp(lambda *xs, i=i: gradient(*xs)[i], xs, vs)[1] for i in places]
    found = [[slope(*xs)], tg.grad(slope, places)(*xs), tg.grad(product, places)(*xs), forward]
    return [[each.numpy().astype(np.float64) for each in tensors] for tensors in found]


def assert_close(found: list[Derivatives], expected: list[Derivatives], bound: float) -> None:
    for given, wanted in zip(found, expected, strict=True):
        for x, y in zip(given, wanted, strict=True):
            assert abs(x - y).max() <= bound * max(abs(y).max(), 10)  # a sum may cancel


@pytest.mark.parametrize("name", ["linear all", "linear_gelu", "feed_forward", "gated_linear",
                                  "matmul", "einsum"])  # fmt: skip
def test_derivatives_under_autocast(name: str) -> None:
    f, *arrays = CASES[name]
    arrays = [x.astype(bfloat16).astype(np.float32) for x in arrays]
    directions = [rng.standard_normal(x.shape).astype(bfloat16).astype(np.float32) for x in arrays]

    def loss(*xs: Tensor) -> Tensor:
        with tg.autocast("bfloat16", enabled=xs[0].dtype == np.float32):
            y: Tensor = f(*xs)
            return (y.astype(xs[0].dtype) ** 2).sum()

    found = products_with_hessian(loss, arrays, directions)
    exact = [[x.astype(np.float64) for x in each] for each in (arrays, directions)]
    assert_close(found, products_with_hessian(loss, *exact), 0.03)
    assert tg.grad(loss)(*map(Tensor, arrays)).dtype == np.float32


def test_rules_compute_in_the_dtypes_of_their_operands() -> None:
    matrix = Tensor(values(4, 4).astype(float32))

    def backward(dy: Any, saved: Any, needs: Any) -> Any:
        return (matrix.data.T @ dy,)

    @tangent_of(backward)
    def tangent(op: Op, t: Tensor) -> Tensor:
        return matrix @ t

    x = Tensor(values(4).astype(float32))
    with tg.autocast("bfloat16"):
        _, t = jvp(lambda x: record("product", matrix.data @ x.data, [x], backward, ()), (x,), (x,))
    np.testing.assert_allclose(t.numpy(), matrix.data @ x.data, rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_tangents_have_the_dtype_of_the_result(dtype: Any) -> None:
    for name in ("matmul", "einsum", "linear all", "feed_forward", "gated_linear", "rotary angles"):
        f, *arrays = CASES[name]
        xs = [Tensor(x.astype(dtype)) for x in arrays]
        _, t = jvp(f, xs, xs)
        wide = [Tensor(x.numpy().astype(np.float64)) for x in xs]
        _, exact = jvp(f, wide, wide)
        assert t.dtype == dtype
        bound = {float16: 4e-3, bfloat16: 3e-2, float32: 2e-6, float64: 1e-14}[np.dtype(dtype)]
        assert abs(t.numpy() - exact.numpy()).max() <= bound * abs(exact.numpy()).max()


def test_wide_results_of_narrow_operands() -> None:
    x, w, r = (Tensor(values(3, 3).astype(bfloat16)) for _ in range(3))
    y, t = jvp(lambda x, w: tg.linear(x, w, dtype="float32"), (x, w), (r, r))
    assert y.dtype == t.dtype == float32
    a, b, c = (each.numpy().astype(float32) for each in (x, w, r))
    assert abs(t.numpy() - c @ b.T - a @ c.T).max() < 1e-5


def test_tangents_drop_the_same_elements() -> None:
    x = tg.ones((40, 5))
    for f in (
        lambda x: tg.dropout(x, 0.5),
        lambda x: tg.dropout_add(x, tg.zeros_like(x), p=0.5),
        lambda x: tg.gated_linear(x, UP[:, :1] + np.ones(5), UP[:, :1] + np.ones(5), dropout=0.5),
    ):
        y, t = jvp(f, (x,), (x,))
        assert ((y.numpy() == 0) == (t.numpy() == 0)).all()
        assert 0.3 < (t.numpy() == 0).mean() < 0.7


def plain_affine(rows: Any, weight: Any, bias: Any, residual: Any, *_: Any) -> Any:
    y = rows @ weight.T if bias is None else rows @ weight.T + bias
    return y if residual is None else y + residual.reshape(y.shape)


def fused_gelu(rows: Any, weight: Any, bias: Any, *options: Any) -> tuple[Any, Any, bool]:
    before = plain_affine(rows, weight, bias, None)
    is_derivative = options[-1]
    kept = special.gelu_tanh_derivative(before) if is_derivative else before
    return special.gelu_tanh(before), kept, is_derivative


def run_epilogue(p: tuple[Any, ...], kernel: str | None) -> None:
    a, b, y, epilogue = p
    np.matmul(a, b, out=y)
    if "gelu_of" in epilogue:
        y *= special.gelu_tanh_derivative(epilogue["gelu_of"])
    y += epilogue.get("residual", 0)


def fused_swiglu(gate: Tensor, up: Tensor, p: float) -> Tensor:
    a, b = gate.data, up.data
    mask = KeepMask(tg.random.next_key(), 1 - p, a.dtype) if p else None
    y = a / (1 + np.exp(-a)) * b
    y = y if mask is None else dropout_ops._forward(y, mask)
    return record("swiglu", y, (gate, up), dropout_ops._swiglu_backward, (a, b, mask))


def fused_swiglu_backward(mask: Any, dy: Any, gate: Any, up: Any, *_: Any) -> tuple[Any, ...]:
    dy = dy if mask is None else dropout_ops._forward(dy, mask)
    return dy * up * special.silu_derivative(gate), dy * gate / (1 + np.exp(-gate)), None


@pytest.fixture(params=[False, True], ids=["before_gelu", "derivative"])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ops take their ways on a GPU, with kernels of NumPy."""

    def activated(*arguments: Any) -> tuple[Any, Any, bool]:
        return fused_gelu(*arguments[:-1], arguments[-1] and request.param)

    kernels = SimpleNamespace(
        run=run_epilogue, times_derivative=lambda a, b, kept: (a @ b * kept, None)
    )
    for name, replacement in {
        "_is_fused": lambda *_: True,
        "_affine": plain_affine,
        "_activated": activated,
        "_in_one": lambda *_: None,
        "problem": lambda a, b, y, **epilogue: (a, b, y, epilogue),
        "matmul_cuda": kernels,
        "swiglu_dropout": fused_swiglu,
    }.items():
        monkeypatch.setattr(linear_ops, name, replacement)
    monkeypatch.setattr(dropout_cuda, "swiglu_backward", fused_swiglu_backward)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", [name for name in CASES if "linear" in name or "feed" in name])
def test_derivatives_of_fused_products(name: str) -> None:
    check_derivatives(*CASES[name])


def test_the_output_of_a_norm_is_recomputed() -> None:
    x, w = values(6, 4), Tensor(UP)

    def loss(w: Tensor) -> Tensor:
        y = tg.layer_norm(Tensor(x), tg.ones(4, dtype="float64"))
        return (tg.linear(y, w) ** 3 + tg.gated_linear(y, w, w) ** 2).sum()

    def product(w: Tensor) -> Tensor:
        return (tg.grad(loss)(w) * w).sum()

    expected = tg.grad(product)(w).numpy()
    with replaced(mode, recompute_norms=True):
        found = tg.grad(product)(w).numpy()
    assert found.tobytes() == expected.tobytes()
