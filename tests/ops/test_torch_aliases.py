"""PyTorch's names: the values and gradients of the ops behind them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, nn
from tensorgrad.errors import ArgumentError, DeviceError, DtypeError, GradError, ShapeError

RNG = np.random.default_rng(8)
X = RNG.standard_normal((3, 4, 5)).astype("float32")
MASK = RNG.uniform(size=(4, 5)) < 0.5
INDEX = RNG.integers(0, 4, (2, 6, 5))

ALIASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "permute": (lambda x: x.permute(2, 0, 1), lambda x: tg.transpose(x, (2, 0, 1))),
    "view": (lambda x: x.view(-1, 10), lambda x: tg.reshape(x, (-1, 10))),
    "view-tuple": (lambda x: x.view((6, 10)), lambda x: tg.reshape(x, (6, 10))),
    "unsqueeze": (lambda x: x.unsqueeze(1), lambda x: tg.expand_dims(x, 1)),
    "masked_fill": (lambda x: x.masked_fill(MASK, -2), lambda x: tg.where(MASK, -2.0, x)),
    "gather": (lambda x: x.gather(1, INDEX), lambda x: tg.take_along_axis(x[:2], INDEX, 1)),
    "scatter": (
        lambda x: x.scatter(1, INDEX[:, :1], 2),
        lambda x: tg.scatter(x, 1, INDEX[:, :1], 2),
    ),
    "scatter_add": (
        lambda x: x[0].scatter_add(0, INDEX[0], x[1, :1].reshape(1, 5).repeat(6, 0)),
        lambda x: tg.scatter_add(x[0], 0, INDEX[0], tg.repeat(x[1, :1], 6, 0)),
    ),
    "index_add": (
        lambda x: x.index_add(1, [0, 0], x[:, :2], alpha=3),
        lambda x: tg.index_add(x, 1, [0, 0], x[:, :2] * 3),
    ),
    "unfold": (lambda x: x.unfold(1, 2, 2), lambda x: x.reshape(3, 2, 2, 5).transpose(0, 1, 3, 2)),
    "unfold-1": (lambda x: x.unfold(-1, 2, 3), lambda x: tg.stack([x[..., :2], x[..., 3:]], 2)),
    "clone": (lambda x: x.clone(), lambda x: x * 1),
    "float": (lambda x: x.double().float(), lambda x: x * 1),
    "double": (lambda x: x.double(), lambda x: x.astype("float64")),
    "half": (lambda x: x.half(), lambda x: x.astype("float16")),
    "bfloat16": (lambda x: x.bfloat16(), lambda x: x.astype("bfloat16")),
    "to": (lambda x: x.to("cpu", "float64"), lambda x: x.astype("float64")),
    "to-dtype": (lambda x: x.to(np.float16).to(dtype="float32"), lambda x: x.half().float()),
}


@pytest.mark.parametrize(("alias", "op"), ALIASES.values(), ids=ALIASES)
def test_values_and_gradients(
    alias: Callable[[Tensor], Tensor], op: Callable[[Tensor], Tensor]
) -> None:
    leaves = [Tensor(X.copy(), requires_grad=True) for _ in range(2)]
    ys = [f(leaf) for f, leaf in zip((alias, op), leaves, strict=True)]
    assert ys[0].dtype == ys[1].dtype
    np.testing.assert_array_equal(ys[0].numpy(), ys[1].numpy())
    dy = RNG.standard_normal(ys[0].shape).astype(ys[0].dtype)
    for y in ys:
        y.backward(dy)
    assert leaves[0].grad is not None
    np.testing.assert_array_equal(leaves[0].grad, leaves[1].grad)


def test_what_changes_nothing_returns_the_tensor() -> None:
    x = Tensor(X.copy())
    assert x.to("cpu") is x.to("float32") is x.cpu() is x.float() is x
    assert x.to() is x
    assert x.clone().data is not x.data
    assert x.numel() == 60


@pytest.mark.gpu
def test_devices() -> None:
    x = Tensor(X.copy(), requires_grad=True)
    y = x.cuda()
    assert y.device == x.cuda(0).device == x.to("cuda").device == "cuda:0"
    assert y.cuda() is y
    half = x.to("cuda", "float16")
    assert half.device == "cuda:0"
    assert half.dtype == np.float16
    (y.masked_fill(Tensor(MASK).cuda(), 0).cpu() * 2).sum().backward()
    np.testing.assert_array_equal(x.grad, np.broadcast_to(np.where(MASK, 0, 2), X.shape))


def test_windows_of_numbers_and_of_every_step() -> None:
    x = Tensor(np.arange(4.0))
    assert x.unfold(0, 3).tolist() == [[0, 1, 2], [1, 2, 3]]
    assert x.unfold(0, 4).tolist() == [[0, 1, 2, 3]]
    assert x.unfold(0, 0, 2).shape == (3, 0)
    assert x[0].unfold(0, 1).tolist() == [0]
    assert x[0].unfold(0, 0).shape == (0,)


def test_leaves() -> None:
    x = Tensor(X.copy())
    assert x.requires_grad_() is x
    y = x * 2
    assert x.is_leaf
    assert not y.is_leaf
    with pytest.raises(GradError, match="requires_grad_: the tensor is the result of an op"):
        y.requires_grad_(False)
    with pytest.raises(DtypeError, match="has dtype int64, expected a float"):
        Tensor(np.arange(3)).requires_grad_()
    assert not x.requires_grad_(False).requires_grad


def test_arguments_that_do_not_fit() -> None:
    x = Tensor(X)
    with pytest.raises(ShapeError, match=r"mask has shape \(2, 3, 4, 5\), expected one that"):
        x.masked_fill(np.ones((2, 3, 4, 5), bool), 0)
    with pytest.raises(DtypeError, match="mask has dtype float64, expected bool"):
        x.masked_fill(np.ones((4, 5)), 0)
    with pytest.raises(ShapeError, match=r"value has shape \(5,\), expected \(\)"):
        x.masked_fill(MASK, np.ones(5))
    with pytest.raises(ShapeError, match=r"index has shape \(4, 2, 5\), expected at most \(3, 4"):
        x.gather(1, np.zeros((4, 2, 5), int))
    with pytest.raises(
        ShapeError, match=r"index has shape \(3, 6, 6\), expected at most \(3, 4, 5\)"
    ):
        x.gather(1, np.zeros((3, 6, 6), int))
    with pytest.raises(ShapeError, match=r"index has shape \(2, 5\), expected at most \(3, 4, 5\)"):
        x.gather(1, np.zeros((2, 5), int))
    for size in (-1, 5):
        with pytest.raises(ArgumentError, match=f"unfold: size is {size}, expected 0 to 4, the le"):
            x.unfold(1, size, 1)
    with pytest.raises(ArgumentError, match="unfold: step is 0, expected 1 or more"):
        x.unfold(1, 2, 0)
    with pytest.raises(ArgumentError, match="masked_fill: value is 300, expected int8"):
        Tensor(np.ones(2, "int8")).masked_fill(np.array([True, False]), 300)
    with pytest.raises(ArgumentError, match=r"view: shape is 'int32', expected integers; for an"):
        x.view("int32")
    with pytest.raises(DeviceError):
        x.to("cpu:x")


def test_formats() -> None:
    assert f"{Tensor(np.array(1.23456)):.3f}" == "1.235"
    assert f"{Tensor(np.array([7])):04d}" == "0007"
    assert f"{Tensor(X)}" == str(Tensor(X))
    with pytest.raises(ValueError, match="size"):
        f"{Tensor(X):.3f}"


def test_html() -> None:
    table = Tensor(np.arange(30.0).reshape(30, 1) @ np.ones((1, 12)))._repr_html_()
    assert table.startswith("<code>tensor (30, 12), float64, cpu</code><table><tr><td>0</td>")
    assert table.count("<tr>") == 21
    assert table.count("…") == 11 + 2 * 10
    assert "<pre>" in Tensor(X)._repr_html_()
    assert "<pre>1.5</pre>" in Tensor(np.array(1.5))._repr_html_()


def test_a_leaf_can_be_pickled_and_the_result_of_an_op_cannot() -> None:
    x = nn.Parameter(X.copy())
    twin = pickle.loads(pickle.dumps(x))
    assert type(twin) is nn.Parameter
    np.testing.assert_array_equal(twin.numpy(), X)
    for f in (pickle.dumps, copy.deepcopy):
        with pytest.raises(GradError, match=r"result of an op, expected a leaf; detach\(\) it"):
            f(x * 2)


def test_a_shallow_copy_has_the_same_array_and_graph() -> None:
    x = nn.Parameter(X.copy())
    twin = copy.copy(x)
    assert type(twin) is nn.Parameter
    assert twin.data is x.data
    copy.copy(x * 2).sum().backward()
    assert x.grad is not None
    assert (x.grad == 2).all()


def test_no_grad_decorates_and_a_seed_repeats() -> None:
    x = Tensor(X.copy(), requires_grad=True)

    @tg.no_grad()
    def double() -> Tensor:
        return x * 2

    assert [double().requires_grad, (x * 2).requires_grad] == [False, True]
    tg.manual_seed(3)
    first = tg.random.normal(size=4).tolist()
    tg.manual_seed(3)
    assert tg.random.normal(size=4).tolist() == first
