"""Parameter groups: each is updated as by an optimizer of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor, nn, optim
from tensorgrad.errors import ArgumentError
from tests.optim import toy

MAKE: dict[str, Any] = {
    "sgd": lambda p, lr, decay: optim.SGD(p, lr, momentum=0.9, weight_decay=decay),
    "adamw": lambda p, lr, decay: optim.AdamW(p, lr, weight_decay=decay),
    "lion": lambda p, lr, decay: optim.Lion(p, lr, weight_decay=decay),
}


def split(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    body = {name: tensors[name] for name in ("wte", "scale", "h.0.bias")}
    return body, {name: tensor for name, tensor in tensors.items() if name not in body}


def grouped(make: Any, tensors: dict[str, Tensor]) -> Any:
    body, head = split(tensors)
    groups = [{"params": body.items()}, {"params": head.items(), "lr": 0.05, "weight_decay": 0.3}]
    return make(groups, 0.1, 0.2)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_groups_are_optimizers_of_their_own(make: Any, dtype: str, device: str) -> None:
    tensors, others = (toy.parameters(dtype, device) for _ in range(2))
    both = grouped(make, tensors)
    body, head = split(others)
    all_decay = optim.FlatParameters(head.items(), decay=lambda *_: True)
    separate = [make(body.items(), 0.1, 0.2), make(all_decay, 0.05, 0.3)]
    for step in range(3):
        toy.set_gradients(tensors, step)
        toy.set_gradients(others, step)
        both.lr = 0.1 / (step + 1)
        separate[0].lr, separate[1].lr = 0.1 / (step + 1), 0.05 / (step + 1)
        for optimizer in (both, *separate):
            optimizer.step()
    assert toy.same_bits([tensors[n].data for n in others], [others[n].data for n in others])


def test_a_grouped_state_resumes_to_the_same_bits() -> None:
    tensors = toy.parameters()
    first = grouped(MAKE["adamw"], tensors)
    for step in range(4):
        if step == 2:
            saved = {
                k: np.copy(v) if isinstance(v, np.ndarray) else v
                for k, v in first.state_dict().items()
            }
            saved |= {"lr": first.lr, "step": 2}
            values = toy.values(tensors)
        toy.set_gradients(tensors, step)
        first.step(max_norm=1.0)
    others = toy.parameters(seed=3)
    second = grouped(MAKE["adamw"], others)
    for name, tensor in others.items():
        tensor.data[...] = values[name]
    second.load_state_dict(saved)
    for step in (2, 3):
        toy.set_gradients(others, step)
        second.step(max_norm=1.0)
    assert toy.same_bits([first.flat.data], [second.flat.data])


def test_parameters_without_names_are_numbered() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = optim.AdamW(model.parameters())
    assert list(optimizer.flat.slots) == ["0", "1", "2", "3"]
    groups: list[Any] = [
        {"params": model[1].parameters()},
        {"params": model[0].parameters(), "lr": 1.0},
    ]
    optimizer = optim.AdamW(groups)
    assert [group.names for group in optimizer.groups] == [("0", "1"), ("2", "3")]
    assert "m/3" in optimizer.state_dict()
    assert [(group.rate, group.weight_decay) for group in optimizer.groups] == [
        (1.0, None), (1000.0, None),
    ]  # fmt: skip


def test_the_rule_of_decay_leaves_groups_with_one_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    groups: list[Any] = [
        {"params": model[0].parameters()},
        {"params": model[1].parameters(), "weight_decay": 0.5},
    ]
    rule = optim.decays_matrices
    optimizer = optim.AdamW(groups, 0.1, weight_decay=0.1, decay=rule)
    before = [np.array(parameter.data) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.gradient.is_touched = True  # type: ignore[union-attr]
    optimizer.step()
    for parameter, old, factor in zip(
        model.parameters(), before, (0.99, 1.0, 0.95, 0.95), strict=True
    ):
        np.testing.assert_allclose(parameter.numpy(), old * factor, rtol=1e-6)


def test_wrong_groups_are_named() -> None:
    model = nn.Linear(3, 2)
    cases: list[tuple[Any, str]] = [
        ([{"lr": 1.0}], "group 0 is a dict without 'params'"),
        ([{"params": model.parameters(), "betas": (0, 0)}], "group 0 has 'betas', expected one of"),
        ([{"params": model.parameters(), "lr": -1}], "lr of group 0 is -1, expected a finite"),
        ([{"params": list(model.parameters())}] * 2, "2 is in two groups, expected it in one"),
        ([{"params": model.parameters()}, 3], "group 1 is a int without 'params', expected"),
        ([{"params": model.parameters(), "weight_decay": -1}], "weight_decay of group 0 is -1, e"),
    ]
    for groups, message in cases:
        with pytest.raises(ArgumentError, match=message):
            optim.AdamW(groups)
    with pytest.raises(ArgumentError, match="group 0 has a learning rate, and lr is 0"):
        optim.AdamW([{"params": model.parameters(), "lr": 1.0}], lr=0)
