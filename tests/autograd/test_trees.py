"""Trees: their leaves and structure, and modules as trees."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, nn
from tensorgrad.autograd import trees
from tensorgrad.errors import ArgumentError


class Point(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (3, [""]),
        (None, []),
        ([], []),
        ([1, (2, None), "a"], ["[0]", "[1][0]", "[2]"]),
        ({"b": 1, "a": [2]}, ["['b']", "['a'][0]"]),
        (Point(1, Point(2, 3)), ["[0]", "[1][0]", "[1][1]"]),
        (OrderedDict(b=1, a=2), ["['b']", "['a']"]),
        (defaultdict(list, a=[1]), ["['a'][0]"]),
    ],
)
def test_a_tree_is_rebuilt_with_its_types(value: Any, names: list[str]) -> None:
    leaves, tree = trees.flatten(value)
    assert tree.names() == names
    built = tree.build(leaves)
    assert built == value
    assert type(built) is type(value)
    assert getattr(built, "default_factory", None) == getattr(value, "default_factory", None)


@pytest.mark.parametrize(
    ("value", "other", "error"),
    [
        (1, [1], "f: t is a list, expected a tensor"),
        (1, None, "f: t is None, expected a tensor"),
        ([1, 2], 1, "f: t is a int, expected a list as in the primals"),
        ([1, 2], [1], r"f: t lacks 1, expected the keys of the list"),
        ([1], [1, 2], r"f: t has 1, expected the keys of the list"),
        ({"a": {"b": 1}}, {"a": {"c": 1}}, r"f: t\['a'\] lacks 'b', expected the keys of the dict"),
        (None, 1, "f: t is a int, expected a NoneType"),
    ],
)
def test_another_structure_is_an_error_that_names_the_place(
    value: Any, other: Any, error: str
) -> None:
    with pytest.raises(ArgumentError, match=error):
        trees.flatten(value)[1].leaves_of("f", "t", other)


def test_structures_agree_whatever_the_order_of_keys() -> None:
    _, tree = trees.flatten({"a": 1, "b": (2, 3)})
    assert tree.leaves_of("f", "t", {"b": [5, 6], "a": 4}) == [4, 5, 6]


class Net(nn.Module):
    def __init__(self) -> None:
        self.inner = nn.Linear(2, 2)
        self.scale = nn.Parameter(np.array([1.0, 2.0], "float32"))
        self.tied = self.scale
        self.fixed = nn.Parameter(np.ones(2, "float32"), requires_grad=False)
        self.register_buffer("mean", tg.zeros(2))
        self.method: Any = self.forward

    def forward(self, x: Any) -> Tensor:
        return self.inner(x) * self.scale * self.tied * self.fixed


def test_a_module_is_a_tree_of_its_trainable_parameters() -> None:
    net = Net()
    leaves, tree = trees.flatten({"net": net})
    assert tree.names() == ["['net']['scale']", "['net']['inner.weight']", "['net']['inner.bias']"]
    assert leaves[0] is net.scale
    copy = tree.build([Tensor(x.data + 1, True) for x in leaves])["net"]
    assert type(copy) is Net
    assert copy.tied is copy.scale
    assert copy.inner is not net.inner
    assert dict(copy.named_buffers())["mean"] is dict(net.named_buffers())["mean"]
    assert copy.fixed is net.fixed
    assert copy.method.__self__ is copy
    assert [name for name, _ in copy.named_parameters()] == [n for n, _ in net.named_parameters()]
    assert net.scale.tolist() == [1, 2]
    assert copy.scale.tolist() == [2, 3]


def test_results_hold_zeros_for_frozen_parameters() -> None:
    net = Net()
    leaves, tree = trees.flatten(net)
    grads = tree.build([Tensor(x.data) for x in leaves], "results")
    assert grads.fixed.tolist() == [0, 0]
    assert not any(p.requires_grad for p in grads.parameters())
    assert net.fixed.tolist() == [1, 1]
    assert [x is y for x, y in zip(tree.leaves_of("f", "t", grads), leaves, strict=True)] == [
        False
    ] * 3


def test_tangents_of_a_module_may_be_a_dictionary() -> None:
    net = Net()
    _, tree = trees.flatten(net)
    names = {"tied": 3, "inner.bias": 2, "inner.weight": 1}
    assert tree.leaves_of("f", "t", names) == [3, 1, 2]
    for wrong, error in (
        ({"scale": 1}, "f: t lacks 'inner.weight', expected the keys of the Net"),
        ({**names, "fixed": 1}, "f: t has 'fixed', expected the keys of the Net"),
        (3, "f: t is a int, expected a Net as in the primals"),
    ):
        with pytest.raises(ArgumentError, match=error):
            tree.leaves_of("f", "t", wrong)


def test_hooks_of_a_module_run_in_its_copy() -> None:
    net, seen = Net(), list[Any]()
    net.inner.register_forward_hook(lambda module, args, y: seen.append(module))
    leaves, tree = trees.flatten(net)
    copy = tree.build(leaves)
    copy(tg.ones((1, 2)))
    assert seen == [copy.inner]


def total(net: Net) -> Tensor:
    return net(tg.ones((1, 2))).sum()


def test_a_forward_that_is_no_method_is_an_error() -> None:
    """It would use the parameters of the module that it was made for."""
    net = Net()
    net.inner.forward = tg.checkpoint(net.inner.forward)  # type: ignore[method-assign]
    net.inner.register_forward_hook(lambda module, args, y: None)
    with pytest.raises(ArgumentError, match="Linear: forward was replaced by a function, expected"):
        tg.grad(total)(net)
    free = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    free[1].forward = lambda x: x * 2
    leaves, tree = trees.flatten(free)
    assert tree.build(leaves)(tg.ones((1, 2))).tolist() == free(tg.ones((1, 2))).tolist()


def test_a_copy_with_plain_tensors_trains_as_the_module_does() -> None:
    net = Net()
    leaves, tree = trees.flatten(net)
    copy = tree.build([x.detach() for x in leaves])
    assert [p.requires_grad for p in copy.parameters()] == [
        p.requires_grad for p in net.parameters()
    ]
