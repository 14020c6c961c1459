"""Layers: shapes, first values, and how containers call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, autocast, nn, random
from tensorgrad.dtypes import bfloat16, float32, float64
from tensorgrad.errors import ArgumentError, DeviceError, DtypeError, OutOfRangeError, ShapeError

RNG = np.random.default_rng(0)


def tensor(*shape: int) -> Tensor:
    return Tensor(RNG.standard_normal(shape).astype("float32"))


def test_linear_starts_as_in_pytorch() -> None:
    layer = nn.Linear(400, 300)
    assert layer.weight.shape == (300, 400)
    for values in (layer.weight.numpy(), layer.bias.numpy()):  # type: ignore[union-attr]
        assert np.abs(values).max() <= 1 / 20
        assert values.std() == pytest.approx(1 / 20 / np.sqrt(3), rel=0.1)
    assert layer(tensor(2, 5, 400)).shape == (2, 5, 300)


def test_layers_without_bias() -> None:
    assert nn.Linear(4, 3, bias=False).bias is None
    assert len(list(nn.Linear(4, 3, bias=False).parameters())) == 1
    assert [n for n, _ in nn.LayerNorm(3, bias=False).named_parameters()] == ["weight"]
    assert nn.LayerNorm(3, bias=False)(tensor(2, 3)).shape == (2, 3)


def test_norms_use_their_parameters() -> None:
    x = tensor(2, 6)
    layers = (nn.LayerNorm(6, eps=0.1), tg.layer_norm), (nn.RMSNorm(6, eps=0.1), tg.rms_norm)
    for layer, op in layers:
        np.testing.assert_allclose(layer(x).numpy(), op(x, eps=0.1).numpy(), rtol=1e-6)
        assert layer.weight is not None
        layer.weight.data[:] = 2
        np.testing.assert_allclose(layer(x).numpy(), 2 * op(x, eps=0.1).numpy(), rtol=1e-6)


LAYERS: dict[str, Callable[[], Any]] = {
    "Linear": lambda: nn.Linear(8, 8),
    "LayerNorm": lambda: nn.LayerNorm(8),
    "RMSNorm": lambda: nn.RMSNorm(8),
    "FeedForward": lambda: nn.FeedForward(8),
    "SwiGLU": lambda: nn.SwiGLU(8),
    "MultiHeadAttention": lambda: nn.MultiHeadAttention(8, 2),
    "TransformerBlock": lambda: nn.TransformerBlock(8, 2),
}


@pytest.mark.parametrize("name", list(LAYERS))
def test_wider_floats_than_a_layers_are_refused(name: str) -> None:
    layer, x = LAYERS[name](), RNG.standard_normal((2, 3, 8))  # float64, as NumPy makes it
    for given in (x, Tensor(x)):
        with pytest.raises(
            DtypeError,
            match=r"x has dtype float64, expected float32 as the layer; convert it, x\.asty",
        ):
            layer(given)
    y = layer(x.astype("float32"))
    assert y.dtype == float32
    wide = layer.to("float64")(x)
    assert wide.dtype == float64
    np.testing.assert_allclose(y, wide, rtol=1e-5, atol=1e-6)
    assert layer(x.astype("float32")).dtype in (float32, float64)  # norms keep a narrower one
    layer.to("bfloat16")
    assert layer(x.astype(bfloat16)).dtype == bfloat16
    with pytest.raises(DtypeError, match="x has dtype float32, expected bfloat16 as the layer"):
        layer(x.astype("float32"))


def test_wider_residuals_are_refused() -> None:
    x, wide = tensor(2, 8), RNG.standard_normal((2, 8))
    for layer in (nn.LayerNorm(8), nn.RMSNorm(8)):
        with pytest.raises(DtypeError, match="residual has dtype float64, expected float32"):
            layer.add(x, wide)
    for branch in (nn.FeedForward(8), nn.SwiGLU(8), nn.FeedForward(8, dropout=0.5)):
        with pytest.raises(DtypeError, match="residual has dtype float64, expected float32"):
            branch(x, residual=wide)


@pytest.mark.parametrize("name", list(LAYERS))
def test_autocast_decides_what_products_take(name: str) -> None:
    layer, x = LAYERS[name](), RNG.standard_normal((2, 3, 8)).astype("float32")
    with autocast("bfloat16"):
        layer(x)
        layer(x.astype(bfloat16))
        layer.to("bfloat16")(x)  # which products narrow
        with pytest.raises(DtypeError, match="x has dtype float64, expected bfloat16"):
            layer(x.astype(float64))  # which they do not
    with autocast("tf32"), pytest.raises(DtypeError, match="x has dtype float32, expected bfloat"):
        layer(x)  # which casts nothing


def test_functions_promote_as_numpy_does() -> None:
    x, layer = RNG.standard_normal((2, 8)), nn.Linear(8, 8)
    assert nn.functional.linear(x, layer.weight, layer.bias).dtype == float64
    assert (layer.weight * x[0]).dtype == float64


def test_embedding_starts_standard_normal() -> None:
    layer = nn.Embedding(500, 40)
    assert layer.weight.numpy().std() == pytest.approx(1, rel=0.03)
    assert layer([[0, 499]]).shape == (1, 2, 40)
    with pytest.raises(OutOfRangeError, match="is 500, expected 0 to 499"):
        layer([500])


def test_dropout_only_acts_in_training() -> None:
    layer, x = nn.Dropout(0.5), Tensor(np.ones((100, 100), "float32"))
    y = layer(x).numpy()
    assert set(np.unique(y)) == {0.0, 2.0}
    assert y.mean() == pytest.approx(1, abs=0.05)
    assert layer.eval()(x) is x
    assert nn.Dropout(0.0)(x) is x
    with pytest.raises(ArgumentError, match=r"Dropout: p is 1, expected 0 <= p < 1"):
        nn.Dropout(1)


def test_sequential_calls_in_order() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    x = tensor(3, 4)
    expected = model[2](model[1](model[0](x)))
    np.testing.assert_array_equal(model(x).numpy(), expected.numpy())
    assert [n for n, _ in model.named_parameters()][:2] == ["0.weight", "0.bias"]
    assert nn.Sequential()(x) is x


def test_module_list_is_a_list() -> None:
    modules = nn.ModuleList(nn.Linear(2, 2) for _ in range(11))
    assert len(modules) == 11
    assert [n for n, _ in modules.named_modules()][1:] == [str(i) for i in range(11)]
    assert list(modules)[10] is modules[10] is modules[-1]
    assert modules[1:3] == [modules[1], modules[2]]
    modules[-1] = last = nn.LayerNorm(2)
    assert modules[10] is last
    assert len(modules.append(nn.Linear(2, 2)).extend([nn.Linear(2, 2)])) == 13
    with pytest.raises(OutOfRangeError, match="ModuleList: index is 13, expected -13 to 12"):
        modules[13]
    with pytest.raises(DtypeError, match="ModuleList: got a int, expected a Module"):
        modules.append(3)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="ModuleList: got a str, expected a Module"):
        modules[0] = "x"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("fill", "mean", "std"),
    [
        (lambda t: nn.init.normal_(t, 2.0, 0.5), 2.0, 0.5),
        (lambda t: nn.init.uniform_(t, -1.0, 3.0), 1.0, 4 / np.sqrt(12)),
        (lambda t: nn.init.xavier_uniform_(t, gain=2.0), 0.0, 2 * np.sqrt(2 / 500)),
        (nn.init.xavier_normal_, 0.0, np.sqrt(2 / 500)),
        (lambda t: nn.init.kaiming_uniform_(t, a=np.sqrt(5)), 0.0, np.sqrt(1 / 600)),
        (lambda t: nn.init.kaiming_normal_(t, mode="fan_out"), 0.0, np.sqrt(2 / 300)),
        (lambda t: nn.init.constant_(t, 3.0), 3.0, 0.0),
        (nn.init.zeros_, 0.0, 0.0),
        (nn.init.ones_, 1.0, 0.0),
    ],
)
def test_initializers(fill: Any, mean: float, std: float) -> None:
    for dtype in ("float32", "float16"):
        parameter = nn.Parameter(np.full((300, 200), np.nan, dtype))
        held = parameter.data
        assert fill(parameter) is parameter
        assert parameter.data is held
        values = held.astype(float)
        assert values.mean() == pytest.approx(mean, abs=0.02 * std)
        assert values.std() == pytest.approx(std, rel=0.02)


def test_tensors_are_filled_where_it_is_said(device: str) -> None:
    def layer() -> nn.Linear:
        random.seed(4)
        linear = nn.Linear(50, 30)
        assert linear.bias is not None
        nn.init.zeros_(linear.bias)
        return linear

    expected = layer()
    with nn.init.on(device):
        found = layer()
    assert [parameter.device for parameter in found.parameters()] == [device, device]
    np.testing.assert_allclose(found.weight.numpy(), expected.weight.numpy(), rtol=1e-6)
    assert found.bias is not None
    assert not found.bias.numpy().any()
    assert layer().weight.device == "cpu"
    with pytest.raises(DeviceError, match="got 'gpu', expected 'cpu'"), nn.init.on("gpu"):
        pass


@pytest.mark.parametrize("size", ["x", 1.5, None, -1])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda size: nn.Linear(size, 3), "Linear: inputs"),
        (lambda size: nn.Linear(3, size), "Linear: outputs"),
        (lambda size: nn.Embedding(size, 3), "Embedding: vocabulary"),
        (lambda size: nn.Embedding(3, size), "Embedding: width"),
        (nn.LayerNorm, "LayerNorm: width"),
        (nn.RMSNorm, "RMSNorm: width"),
        (lambda size: nn.MultiHeadAttention(8, size), "MultiHeadAttention: heads"),
    ],
)
def test_a_wrong_size_is_named(make: Callable[[Any], nn.Module], name: str, size: Any) -> None:
    with pytest.raises(ArgumentError, match=f"{name} is .*, expected (an integer|[01] or more)"):
        make(size)


def test_initializers_name_what_does_not_fit() -> None:
    with pytest.raises(ShapeError, match=r"xavier_normal_: tensor has shape \(3,\), expected"):
        nn.init.xavier_normal_(nn.Parameter(np.ones(3)))
    with pytest.raises(ArgumentError, match="mode is 'in', expected 'fan_in' or 'fan_out'"):
        nn.init.kaiming_normal_(nn.Parameter(np.ones((3, 3))), mode="in")


def test_functional_is_the_ops() -> None:
    for name in nn.functional.__all__:
        function = getattr(nn.functional, name)
        homes = {module.__name__: module for module in (nn.loss, nn.pointwise)}
        assert getattr(homes.get(function.__module__, tg), name) is function
