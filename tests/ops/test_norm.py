"""layer_norm and rms_norm against NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, nn
from tensorgrad.core import backend
from tensorgrad.core.modes import mode, replaced
from tensorgrad.dtypes import FLOATS, bfloat16
from tensorgrad.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.ops.norm import operand_to_save, saved_operand
from tensorgrad.testing import SIZES, Case, Ulps, check

RNG = np.random.default_rng(7)
SHAPES: list[tuple[int, ...]] = [(7,), (2, 33, 5), (70, 1023), (0, 4), *((3, n) for n in SIZES)]


def layer_norm(x: Any, weight: Any = 1, bias: Any = 0) -> Any:
    if not x.size:
        return x
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-5) * weight + bias


def rms_norm(x: Any, weight: Any = 1) -> Any:
    if not x.size:
        return x
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def rms_norm_of_1e6(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return tg.rms_norm(x, weight, eps=1e-6)


def add_rms_norm_of_1e6(
    x: Tensor, residual: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return tg.add_rms_norm(x, residual, weight, eps=1e-6)


def group_norm(x: Any, weight: Any = None, bias: Any = None) -> Any:
    if not x.size:
        return x
    groups = x.reshape(len(x), 2, -1)
    y = layer_norm(groups).reshape(x.shape)
    channels = (x.shape[1], *(1,) * (x.ndim - 2))
    if weight is not None:
        y = y * weight.reshape(channels) + bias.reshape(channels)
    return y


def layer_norm_without_weight(x: Tensor, bias: Tensor) -> Tensor:
    return tg.layer_norm(x, None, bias)


def add_layer_norm(x: Any, residual: Any, weight: Any = 1, bias: Any = 0) -> Any:
    return x + residual, layer_norm(x + residual, weight, bias)


def add_rms_norm(x: Any, residual: Any, weight: Any = 1) -> Any:
    return x + residual, rms_norm(x + residual, weight)


def both_used(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    added, normed = tg.add_layer_norm(x, residual, weight, bias)
    return added + normed * added[:1] + normed  # slices of the sum too


def both_used_numpy(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
    added, normed = add_layer_norm(x, residual, weight, bias)
    return added + normed * added[:1] + normed


def nothing_added(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    same, normed = tg.add_layer_norm(x, None, weight, bias)
    return same * 2 + normed * same[:1]


def nothing_added_numpy(x: Any, weight: Any, bias: Any) -> Any:
    return x * 2 + layer_norm(x, weight, bias) * x[:1]


def nothing_added_rms(x: Tensor, weight: Tensor) -> Tensor:
    same, normed = tg.add_rms_norm(x, weight=weight, eps=1e-6)
    return same + normed


def nothing_added_rms_numpy(x: Any, weight: Any) -> Any:
    return x + rms_norm(x, weight)


def bounded(op: Any, inputs: list[Any], reference: Any, name: str = "") -> Case:
    """Return a case whose gradients are bounded by the terms that they are sums of."""
    added, centre = op.__name__.startswith("add"), op.__name__.endswith("layer_norm")

    def magnitudes(*arrays: Any) -> list[Any]:
        x = arrays[0] + arrays[1] if added else arrays[0]
        parameters = arrays[2:-2] if added else arrays[1:-1]
        dsum, dy = (abs(arrays[-2]) if added else 0), abs(arrays[-1])
        weight = abs(parameters[0]) if parameters and not name.endswith("bias") else 1
        mean = x.mean(-1, keepdims=True) if centre and x.size else 0
        rstd = 1 / np.sqrt(((x - mean) ** 2).sum(-1, keepdims=True) / max(1, x.shape[-1]) + 1e-6)
        y, dy_weight = (abs(x) + abs(mean)) * rstd, dy * weight
        average = np.full(x.shape[-1:], 1 / max(1, x.shape[-1]))
        dx = dy_weight + centre * (dy_weight @ average)[..., None]
        dx = dsum + rstd * (dx + y * ((dy_weight * y) @ average)[..., None])
        axes = tuple(range(x.ndim - 1))
        rows = (dy * y).sum(axes), dy.sum(axes)
        last = rows[1:] if name.endswith("bias") else rows[: len(parameters)]
        shift = abs(parameters[-1]) if len(last) == 2 or name.endswith("bias") else 0
        values = [abs(x), y * weight + shift] if added else [y * weight + shift]
        return [*values, *[dx] * (1 + added), *last]

    return Case(
        layer_norm_without_weight if name else op, inputs, reference,
        values=ROW,
        gradients=Ulps(2, "terms"), magnitudes=magnitudes, terms=sum(inputs[0]),
        name=name or op.__name__.removesuffix("_of_1e6"),
    )  # fmt: skip


ROW = Ulps(2, "row")
SUMS = Ulps(3, "row")  # results that were rounded before
CASES = [
    *(bounded(tg.layer_norm, [s, s[-1:], s[-1:]], layer_norm) for s in SHAPES),
    *(bounded(rms_norm_of_1e6, [s, s[-1:]], rms_norm) for s in SHAPES),
    *(bounded(tg.add_layer_norm, [s, s, s[-1:], s[-1:]], add_layer_norm) for s in SHAPES),
    *(bounded(add_rms_norm_of_1e6, [s, s, s[-1:]], add_rms_norm) for s in SHAPES),
    bounded(add_rms_norm_of_1e6, [(2, 3, 264), (2, 3, 264)], add_rms_norm),
    bounded(tg.layer_norm, [(4, 9)], layer_norm),
    bounded(tg.layer_norm, [(4, 9), (9,)], layer_norm),
    bounded(rms_norm_of_1e6, [(4, 9)], rms_norm),
    bounded(tg.layer_norm, [(4, 9), (9,)], lambda x, b: layer_norm(x, 1, b), "layer_norm-bias"),
    Case(both_used, [(5, 40), (5, 40), (40,), (40,)], both_used_numpy, values=SUMS, terms=45,
         name="add_layer_norm-both"),
    Case(nothing_added, [(5, 40), (40,), (40,)], nothing_added_numpy, values=SUMS, terms=45),
    Case(nothing_added_rms, [(3, 2, 33), (33,)], nothing_added_rms_numpy, values=SUMS, terms=39),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


def test_a_large_mean_does_not_cancel_the_variance() -> None:
    x = np.random.default_rng(0).standard_normal((3, 512)).astype("float32")
    far = tg.layer_norm(Tensor(x + np.float32(4096))).numpy()
    np.testing.assert_allclose(far, layer_norm((x + np.float32(4096)).astype(float)), atol=5e-4)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_first_value_far_off_leaves_the_variance_right(dtype: Any, device: str) -> None:
    x = np.random.default_rng(0).standard_normal((5, 768)).astype(dtype)
    x[:, 0] = 300
    got = tg.layer_norm(Tensor(backend.to_device(x, device))).numpy().astype("float64")
    wide = x.astype("float64")
    expected = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    eps = {2: 2.0**-8 if dtype == bfloat16 else 2.0**-11, 4: 1e-6, 8: 1e-14}[dtype.itemsize]
    np.testing.assert_allclose(got, expected, rtol=1.01 * eps, atol=eps / 8)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("op", [tg.layer_norm, tg.rms_norm])
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_shows_in_the_whole_row(op: Any, dtype: Any, device: str) -> None:
    x = np.ones((3, 768)).astype(dtype)
    x[:, 1::2] = 2
    x[0, 5], x[1, 0] = np.nan, np.inf
    y = op(Tensor(backend.to_device(x, device))).numpy().astype("float64")
    assert np.isnan(y[0]).all()
    assert np.isnan(y[1, 0])  # inf / inf
    assert np.isnan(y[1]).all() if op is tg.layer_norm else not y[1, 1:].any()
    assert np.isfinite(y[2]).all()


def test_parameters_may_be_wider_than_x() -> None:
    x = np.random.default_rng(0).standard_normal((3, 8)).astype("float16")
    weight = Tensor(np.linspace(0, 1, 8, dtype="float32"), requires_grad=True)
    y = tg.layer_norm(Tensor(x), weight)
    assert y.dtype == np.float16
    y.backward(np.ones((3, 8), "float16"))
    assert weight.grad is not None
    assert weight.grad.dtype == np.float32


def test_the_sum_may_be_used_alone() -> None:
    x, residual, weight = (Tensor(np.ones(s), requires_grad=True) for s in ((2, 3), (2, 3), 3))
    added, normed = tg.add_layer_norm(x, residual, weight)
    added.backward(np.full((2, 3), 2.0))
    np.testing.assert_array_equal(x.grad, np.full((2, 3), 2.0))
    np.testing.assert_array_equal(residual.grad, x.grad)
    assert weight.grad is None
    assert normed.requires_grad


def test_what_is_normed_alone_is_itself_and_gets_both_gradients() -> None:
    x = Tensor(np.random.default_rng(1).standard_normal((3, 8)), requires_grad=True)
    same, normed = tg.add_layer_norm(x)
    assert same.data is x.data
    (same * 3).sum().backward()
    np.testing.assert_array_equal(x.grad, np.full((3, 8), 3.0))
    x.grad = None
    tg.add_layer_norm(x)[1].backward(x.data)
    alone = Tensor(x.data, requires_grad=True)
    tg.layer_norm(alone).backward(x.data)
    np.testing.assert_array_equal(x.grad, alone.grad)
    assert normed.requires_grad


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_default_eps_is_the_machine_epsilon(dtype: Any, device: str) -> None:
    x = Tensor(backend.to_device(np.full((2, 3), 2.0**-13).astype(dtype), device))
    eps = np.finfo("float64" if dtype == "float64" else "float32").eps
    for layer in (nn.RMSNorm(3), nn.RMSNorm(3, elementwise_affine=False)):
        layer.to(device, dtype)
        for y in (layer(x), layer.add(x, x * 0)[1], tg.rms_norm(x)):
            expected = 2.0**-13 / np.sqrt(2.0**-26 + eps)
            np.testing.assert_allclose(y.numpy().astype("float64"), expected, rtol=4e-3)


def test_layers_without_scale_and_shift() -> None:
    x = Tensor(np.arange(6.0).reshape(2, 3))
    for layer, f in ((nn.LayerNorm, tg.layer_norm), (nn.RMSNorm, tg.rms_norm)):
        norm = layer(3, 0.5, False)
        assert list(norm.parameters()) == []
        assert repr(norm) == f"{layer.__name__}(3, eps=0.5, elementwise_affine=False)"
        np.testing.assert_array_equal(norm(x).numpy(), f(x, eps=0.5).numpy())
        np.testing.assert_array_equal(norm.add(x, x)[1].numpy(), f(x + x, eps=0.5).numpy())
        with pytest.raises(ShapeError, match=r"x has shape \(2, 2\), expected \(\.\.\., 3\)"):
            norm(x[:, :2])


def test_dtypes_of_a_sum_promote() -> None:
    x = Tensor(np.ones((2, 4), "float16"), requires_grad=True)
    residual = Tensor(np.arange(8, dtype="float32").reshape(2, 4), requires_grad=True)
    added, normed = tg.add_rms_norm(x, residual)
    assert added.dtype == normed.dtype == np.float32
    (added * normed).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == np.float16


def test_arguments_that_do_not_fit() -> None:
    x = Tensor(np.ones((2, 4)))
    message = r"layer_norm: weight has shape \(3,\), expected \(4,\) \(last axis of x\)"
    with pytest.raises(ShapeError, match=message):
        tg.layer_norm(x, Tensor(np.ones(3)))
    with pytest.raises(ShapeError, match=r"layer_norm: bias has shape \(2, 4\), expected \(4,\)"):
        tg.layer_norm(x, None, x)
    with pytest.raises(ShapeError, match=r"rms_norm: x has shape \(\), expected \(..., C\)"):
        tg.rms_norm(Tensor(np.ones(())))
    with pytest.raises(ShapeError, match=r"residual has shape \(4,\), expected \(2, 4\) like x"):
        tg.add_layer_norm(x, Tensor(np.ones(4)))
    for eps in (-1e-5, math.nan, math.inf, "x"):
        for name in ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"):
            given = (x, x) if name.startswith("add") else (x,)
            with pytest.raises(
                ArgumentError, match=f"{name}: eps is .*, expected a (finite )?number"
            ):
                getattr(tg, name)(*given, eps=eps)
        for layer in (nn.LayerNorm, nn.RMSNorm):
            with pytest.raises(ArgumentError, match=f"{layer.__name__}: eps is .*, expected a"):
                layer(4, eps=eps)  # type: ignore[arg-type]  # a user may do it
    with pytest.raises(DtypeError, match="rms_norm: weight has dtype int64, expected a float"):
        tg.rms_norm(x, Tensor(np.arange(4)))
    with pytest.raises(DtypeError, match="layer_norm: x is a str, expected a tensor"):
        tg.layer_norm("x")


@pytest.mark.parametrize("shape", [(5, 31), (0, 4), (300, 64), (2100, 512)])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float64])
def test_gradients_of_parameters_are_added_to_what_is_there(
    shape: tuple[int, int], dtype: Any, device: str
) -> None:
    found = []
    for before in (None, 3.0):
        rng = np.random.default_rng(0)
        x, dy = (backend.to_device(rng.normal(size=shape).astype(dtype), device) for _ in range(2))
        ones = np.ones(shape[1], dtype)
        weight, bias = (Tensor(backend.to_device(ones, device), requires_grad=True) for _ in "ab")
        wide = np.float64 if dtype is np.float64 else np.float32
        for parameter in (weight, bias):
            start = np.full(shape[1], before or 0, wide)
            parameter.grad = backend.to_device(start, device)
        tg.layer_norm(Tensor(x), weight, bias).backward(dy)
        found.append([backend.to_numpy(parameter.grad) for parameter in (weight, bias)])
    for alone, added in zip(*found, strict=True):
        assert added.dtype == alone.dtype
        np.testing.assert_allclose(added, alone + 3, rtol=1e-6, atol=1e-5)


CASES += [
    Case(
        lambda x, *affine: tg.group_norm(x, 2, *affine),
        [shape, *affine],
        group_norm,
        values=Ulps(4, "row"),
        gradients=Ulps(4, "row"),
        terms=math.prod(shape),
        axis=None,  # groups are not rows
        name="group_norm",
    )
    for shape, affine in [
        ((2, 14), []),
        ((3, 6, 5), [(6,), (6,)]),
        ((2, 4, 3, 3), [(4,), (4,)]),
        *(((2, 16, n), [(16,), (16,)]) for n in SIZES),
    ]
]


def test_group_norm_takes_weight_and_bias_alone() -> None:
    x, numbers = RNG.standard_normal((2, 4, 3)), RNG.standard_normal(4)
    ones, zeros, plain = np.ones(4), np.zeros(4), group_norm(x)
    weighted, shifted = group_norm(x, numbers, zeros), group_norm(x, ones, numbers)
    for y, expected in (
        (tg.group_norm(x, 2), plain),
        (tg.group_norm(x, 2, numbers), weighted),
        (tg.group_norm(x, 2, bias=numbers), shifted),
        (tg.group_norm(x, 4), layer_norm(x)),
    ):
        np.testing.assert_allclose(y.numpy(), expected, 1e-12, 1e-12)


@pytest.mark.parametrize("op", [tg.layer_norm, tg.rms_norm, tg.add_layer_norm, tg.add_rms_norm])
def test_outputs_that_are_computed_again_have_the_same_bits(op: Any) -> None:
    found = []
    for again in (False, True):
        x, weight, scale = (
            Tensor(np.random.default_rng(n).standard_normal(s), requires_grad=True)
            for n, s in enumerate(((4, 6), (3, 6), (6,)))
        )
        with replaced(mode, recompute_norms=again):
            y = op(x, weight=scale)
            y = y[1] if type(y) is tuple else y
            assert (y.recompute is not None) == again
            saved, arrays = operand_to_save(y)
            assert (saved is not y.data) == again == (len(arrays) > 0)
            np.testing.assert_array_equal(saved_operand(saved), y.data)
            with tg.no_grad():
                assert (op(x)[1] if op.__name__.startswith("add") else op(x)).recompute is None
        (tg.linear(y, weight) ** 2).sum().backward()
        found.append([leaf.grad for leaf in (x, weight, scale)])
        with tg.no_grad():
            y[0] = 0
        assert operand_to_save(y)[0] is y.data  # not what it was
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)


def test_group_norm_refuses_what_does_not_fit() -> None:
    x = np.zeros((2, 6, 3), "float32")
    with pytest.raises(ShapeError, match=r"group_norm: x has shape \(6,\), expected \(B, C, ...\)"):
        tg.group_norm(x[0, :, 0], 2)
    with pytest.raises(ArgumentError, match="num_groups is 0, expected 1 or more"):
        tg.group_norm(x, 0)
    with pytest.raises(ShapeError, match=r"weight has shape \(3,\), expected \(6,\) \(axis 1 of x"):
        tg.group_norm(x, 2, np.zeros(3, "float32"))
    with pytest.raises(ArgumentError, match="num_groups is 4, expected a divisor of 6"):
        tg.group_norm(x, 4)
    with pytest.raises(ShapeError, match=r"bias has shape \(3,\), expected \(6,\)"):
        tg.group_norm(x, 2, bias=np.zeros(3, "float32"))
    with pytest.raises(ShapeError, match=r"GroupNorm: x has shape \(2, 6, 3\), expected \(B, 4"):
        nn.GroupNorm(2, 4)(x)
