"""Children, ModuleDict, Flatten and forward hooks."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor, nn
from tensorgrad.errors import ArgumentError, DtypeError

X = np.random.default_rng(1).standard_normal((2, 3, 8)).astype("float32")


def test_children_are_direct_and_each_comes_once() -> None:
    inner = nn.Linear(2, 2)
    model = nn.Sequential(inner, nn.Sequential(nn.ReLU()), inner)
    assert [name for name, _ in model.named_children()] == ["0", "1"]
    assert list(model.children()) == [inner, model[1]]


def test_a_module_dict_is_a_dict_and_a_module() -> None:
    first, second = nn.Linear(2, 3), nn.Linear(3, 4)
    model = nn.ModuleDict({"a": first}).update({"b": second})
    assert list(model) == list(model.keys()) == ["a", "b"]
    assert list(model.values()) == [first, second]
    assert dict(model.items()) == {"a": first, "b": second}
    assert len(model) == 2
    assert "a" in model
    assert "keys" not in model
    assert [name for name, _ in model.named_parameters()] == [
        "a.weight", "a.bias", "b.weight", "b.bias",
    ]  # fmt: skip
    model["a"] = second
    del model["b"]
    assert list(model.values()) == [second]
    for name in ("", "a.b", "keys", "training", 3):
        with pytest.raises(ArgumentError, match="expected text without dots"):
            model[name] = first  # type: ignore[index]
    with pytest.raises(DtypeError, match="got a int, expected a Module"):
        model["c"] = 3  # type: ignore[assignment]
    with pytest.raises(KeyError):
        del model["b"]


def test_flatten_joins_axes() -> None:
    assert nn.Flatten()(X).shape == (2, 24)
    assert nn.Flatten(0, 1)(X).shape == (6, 8)
    with pytest.raises(ArgumentError, match="start_axis is 2 and end_axis 1, expected them in"):
        nn.Flatten(2, 1)(X)
    with pytest.raises(ArgumentError, match="Flatten: start_axis is 1, expected -1 to 0"):
        nn.Flatten()(np.zeros(3, "float32"))


def test_arguments_may_be_replaced_and_results_kept() -> None:
    layer = nn.Identity()
    own = lambda x: x + 1  # noqa: E731
    layer.forward = own  # type: ignore[method-assign]
    removals = [
        layer.register_forward_pre_hook(lambda module, args: None),
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        layer.register_forward_pre_hook(lambda module, args: args[0] + 10),
        layer.register_forward_hook(lambda module, args, y: None),
    ]
    assert layer(3) == 17
    removals.pop()()
    assert layer(3) == 17
    removals.pop(0)()
    removals.pop()()
    assert layer(3) == 7
    removals.pop()()
    assert vars(layer)["forward"] is own
    assert layer(3) == 4
    for function in (layer.register_forward_pre_hook, layer.register_forward_hook):
        with pytest.raises(ArgumentError, match=f"{function.__name__}: f is a int, expected a fun"):
            function(3)  # type: ignore[arg-type]


def test_hooks_see_and_replace_inputs_and_results() -> None:
    layer = nn.Linear(8, 8)
    plain = layer(X)
    seen: list[Any] = []
    removals = [
        layer.register_forward_hook(lambda module, args, y: seen.append((module, args, y))),
        layer.register_forward_hook(lambda module, args, y: y * 2),
        layer.register_forward_pre_hook(lambda module, args: args[0] * 0),
    ]
    doubled = layer(X)
    module, (given,), y = seen[0]
    assert module is layer
    assert not given.any()
    np.testing.assert_array_equal(doubled.numpy(), 2 * y.numpy())
    assert copy.deepcopy(layer)(X).shape == plain.shape
    for remove in removals:
        remove()
        remove()  # a second time does nothing
    np.testing.assert_array_equal(layer(X).numpy(), plain.numpy())
    assert "forward" not in vars(layer)
    assert len(seen) == 2  # the copy too: it shares the hook


@pytest.mark.parametrize("name", ["norm1", "norm2", "attention", "feed_forward", "feed_forward.up"])
def test_hooks_run_inside_of_fused_ops(name: str) -> None:
    block = nn.TransformerBlock(8, 2)
    modules = dict(block.named_modules())
    plain = block(Tensor(X))
    seen: list[Any] = []
    modules[name].register_forward_hook(lambda module, args, y: seen.append((args, y)))
    hooked = block(Tensor(X))
    np.testing.assert_allclose(hooked.numpy(), plain.numpy(), rtol=1e-4, atol=1e-5)
    ((args, y),) = seen
    np.testing.assert_allclose(type(modules[name]).forward(modules[name], *args).numpy(), y.numpy())
    with pytest.raises(ArgumentError, match="register_forward_hook: f is a int, expected a func"):
        block.register_forward_hook(3)  # type: ignore[arg-type]
