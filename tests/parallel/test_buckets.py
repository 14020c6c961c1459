from __future__ import annotations

import numpy as np
import pytest

from tensorgrad import Tensor, dtypes, nn
from tensorgrad.errors import ArgumentError, GradError
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.optim import FlatParameters
from tensorgrad.parallel.bucket_size import default_bucket_bytes
from tensorgrad.parallel.buckets import Buckets, assign_buckets, leading_embeddings
from tensorgrad.parallel.comm.handle import Handle
from tensorgrad.parallel.units import find_units


def tensors(*sizes: int, dtype: object = np.float32) -> dict[str, Tensor]:
    return {f"p{i}": Tensor(np.ones(n, dtype), True) for i, n in enumerate(sizes)}


@pytest.mark.parametrize(
    ("sizes", "kilobytes", "buckets"),
    [
        ((100, 100, 100, 100), 0.8, [1, 1, 0, 0]),
        ((100, 100, 100, 100, 100), 0.8, [2, 1, 1, 0, 0]),
        ((100, 1000, 100, 0), 0.8, [2, 1, 0, 0]),
        ((1000, 1000), 0.001, [1, 0]),
        ((10, 10, 10), 1e6, [0, 0, 0]),
    ],
)
def test_buckets_are_filled_from_the_last_parameter_on(
    sizes: tuple[int, ...], kilobytes: float, buckets: list[int]
) -> None:
    found = assign_buckets(tensors(*sizes), kilobytes / 1000)
    assert [found[f"p{i}"] for i in range(len(sizes))] == buckets


def test_the_parameters_of_a_module_stay_together() -> None:
    layers = ("first.weight", "first.bias", "second.weight", "second.bias", "third.weight")
    sizes = dict(zip(layers, (100, 10, 100, 10, 100), strict=True))
    found = assign_buckets({n: Tensor(np.ones(s, "f4"), True) for n, s in sizes.items()}, 0.00045)
    assert [found[name] for name in layers] == [2, 2, 1, 1, 0]


def test_late_gradients_delay_no_other_bucket() -> None:
    model = GPT2(GPT2Config(vocab_size=9, context=4, layers=2, heads=1, width=4))
    parameters = dict(model.named_parameters())
    tables = leading_embeddings(model, parameters)
    assert tables == ["tokens.weight", "positions.weight"]
    found = assign_buckets(parameters, 1.0, tables)
    assert [name for name in parameters if found[name] == 1] == tables
    assert set(found.values()) == {0, 1}
    alone = {name: parameters[name] for name in tables}
    assert set(assign_buckets(alone, 1.0, tables)) == {*tables}
    later = {name: parameters[name] for name in ("norm.weight", *tables)}
    assert leading_embeddings(model, later) == []  # where forward may use them last


def test_sizes_are_those_of_the_gradients() -> None:
    halves = tensors(100, 100, 100, 100, dtype=dtypes.bfloat16)
    assert sorted(assign_buckets(halves, 0.0008).values()) == [0, 0, 1, 1]


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan")])
def test_a_size_that_is_not_positive_is_refused(size: float) -> None:
    with pytest.raises(ArgumentError, match=r"megabytes is .*, expected a number above 0"):
        assign_buckets(tensors(3), size)


def test_the_default_size_is_that_of_all_gradients() -> None:
    parameters = tensors(*[100_000] * 12, dtype=dtypes.bfloat16)
    size = default_bucket_bytes(12 * 400_000) / 1e6
    found = assign_buckets(parameters, None)
    assert found == assign_buckets(parameters, size)
    assert len(set(found.values())) > 1
    assert assign_buckets(tensors(3, 3, 3), 1.0, ["p0"]) == {"p0": 1, "p1": 0, "p2": 0}


def test_a_gradient_that_is_on_its_way_gets_no_more_until_all_begin_again() -> None:
    parameters = tensors(3, 3)
    flat = FlatParameters(parameters.items(), groups=lambda name: name)
    sent: list[int] = []
    abandoned: list[int] = []

    class Sent(Handle):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number
            sent.append(number)

        def abandon(self) -> None:
            abandoned.append(self.number)

    buckets = Buckets(flat.buckets, parameters, Sent)
    last = parameters["p1"]
    last.sum().backward()
    with pytest.raises(GradError, match=r"gradient of p1 is already on its way .* no_sync\(\)"):
        last.sum().backward()
    buckets.reset()
    assert abandoned == [1]
    buckets.reset()
    assert abandoned == [1]
    last.sum().backward()
    assert sent == [1, 1]


def test_buckets_go_in_one_order_whatever_order_gradients_come_in() -> None:
    parameters = tensors(3, 3, 3)
    flat = FlatParameters(parameters.items(), groups=lambda name: name)
    sent: list[int] = []

    def send(number: int) -> Handle:
        sent.append(number)
        return Handle()

    buckets = Buckets(flat.buckets, parameters, send)
    first, second, third = parameters.values()
    for _ in range(2):
        sent.clear()
        second.sum().backward()
        assert sent == []
        third.sum().backward()
        assert sent == [2, 1]
        buckets.finish()  # the first had no gradient
        assert sent == [2, 1, 0]
    with buckets.hold():
        (first + second + third).sum().backward()
    assert sent == [2, 1, 0]


def test_units_are_the_members_of_module_lists() -> None:
    model = GPT2(GPT2Config(vocab_size=9, context=4, layers=3, heads=1, width=4))
    shared = nn.Parameter(np.ones(3, "float32"))
    vars(model)["shared"] = vars(model.blocks[0])["also_shared"] = shared
    between = nn.Parameter(np.ones(3, "float32"))
    vars(model.blocks[0])["between"] = vars(model.blocks[2])["between"] = between
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad = False
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    units, places = find_units(model, trained)
    assert units == [model.blocks[0], model.blocks[2]]
    inside = {name: int(name.split(".")[1]) // 2 for name in trained if name.startswith("blocks.")}
    expected = dict.fromkeys(trained) | inside | {"shared": None, "blocks.0.between": None}
    expected.pop("blocks.0.also_shared", None)
    assert {name: places[name] for name in expected} == expected


def test_a_model_without_blocks_is_refused() -> None:
    layer = nn.Linear(3, 2)
    with pytest.raises(ArgumentError, match="Linear has no parameters in a ModuleList"):
        find_units(layer, dict(layer.named_parameters()))
