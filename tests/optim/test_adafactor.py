"""Adafactor: its formula, factored state, skipped steps, 16 bits, groups and resuming."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor, nn, optim, random
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, CheckpointError
from tests.optim import toy

SHAPES = {**toy.SHAPES, "experts": (3, 5, 7), "row": (1, 6), "column": (6, 1)}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "decay": {"lr": 0.1, "weight_decay": 0.1, "beta2_decay": -0.5},
    "clipping": {"d": 0.1, "eps": (1e-30, 0.5)},
    "absolute": {"lr": 1.5, "relative_step": False, "scale_parameter": False},
}


def make(dtype: Any = "float32", device: str = "cpu", **options: Any) -> tuple[Any, Any]:
    tensors = toy.parameters(dtype, device, shapes=SHAPES)
    return tensors, optim.Adafactor(tensors.items(), **{"lr": 0.1, **options})


def everything(optimizer: optim.Optimizer) -> list[Any]:
    return [optimizer.flat.data, *optimizer.state.values()]


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: backend.to_numpy(value).copy() if backend.is_array(value) else value
        for name, value in state.items()
    }


def rms(array: Any) -> float:
    return math.sqrt((array**2).sum() / array.size)


class Reference:
    """The algorithm of the paper for one parameter, in float64, with loops over matrices."""

    def __init__(self, p: Any, options: Mapping[str, Any], eps1: float) -> None:
        self.p, self.t = p.astype("float64"), 0
        self.lr, self.decay = options.get("lr", 1e-2), options.get("weight_decay", 0.0)
        self.exponent, self.d = options.get("beta2_decay", -0.8), options.get("d", 1.0)
        given, self.eps2 = options.get("eps", (None, 1e-3))
        self.eps1 = eps1 if given is None else given
        self.relative = options.get("relative_step", True)
        self.scale = options.get("scale_parameter", True)
        matrices = p.reshape(-1, *p.shape[-2:]) if p.ndim > 1 else [p]
        self.rows = [np.zeros(m.shape[0]) for m in matrices] if p.ndim > 1 else []
        self.columns = [np.zeros(m.shape[1]) for m in matrices] if p.ndim > 1 else []
        self.v = np.zeros(p.shape)

    def step(self, g: Any) -> None:
        self.t += 1
        beta2 = 1 - self.t**self.exponent
        if g.ndim < 2:
            self.v = beta2 * self.v + (1 - beta2) * g**2
            v = self.v
        else:
            found = []
            for k, matrix in enumerate(g.reshape(-1, *g.shape[-2:])):
                mean = (matrix**2).mean(axis=1), (matrix**2).mean(axis=0)
                self.rows[k] = beta2 * self.rows[k] + (1 - beta2) * mean[0]
                self.columns[k] = beta2 * self.columns[k] + (1 - beta2) * mean[1]
                below = max(self.rows[k].mean(), self.eps1)
                found.append(np.outer(self.rows[k], self.columns[k]) / below)
            v = np.stack(found).reshape(g.shape)
        u = g / np.sqrt(np.maximum(v, self.eps1**2))
        u = u / max(1.0, rms(u) / self.d)
        rate = min(self.lr, self.t**-0.5) if self.relative else self.lr
        alpha = rate * max(self.eps2, rms(self.p)) if self.scale else rate
        self.p = self.p * (1 - self.lr * self.decay) - alpha * u


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-5)])
def test_steps_follow_the_formula(
    options: dict[str, Any], dtype: str, tolerance: float, device: str
) -> None:
    tensors = toy.parameters(dtype, device, shapes=SHAPES)
    optimizer = optim.Adafactor(tensors.items(), **options)
    eps1 = float(np.finfo(dtype).eps)
    peers = {n: Reference(p, options, eps1) for n, p in toy.values(tensors).items() if n != "empty"}
    for step in range(5):
        toy.set_gradients(tensors, step)
        optimizer.step()
        gradients = toy.gradients(SHAPES, step)
        for name, peer in peers.items():
            peer.step(gradients[name])
            np.testing.assert_allclose(
                tensors[name].numpy(), peer.p, tolerance, tolerance, err_msg=name
            )
    state = copied(optimizer.state_dict())
    assert state["step"] == 5
    np.testing.assert_allclose(state["row/experts"], peers["experts"].rows, rtol=tolerance * 10)
    np.testing.assert_allclose(
        state["column/experts"], peers["experts"].columns, rtol=tolerance * 10
    )


def test_the_state_of_a_matrix_is_a_row_and_a_column() -> None:
    _, optimizer = make("bfloat16")
    state = optimizer.state_dict()
    shapes = {name: value.shape for name, value in state.items() if "/" in name}
    assert shapes.pop("low_bits/wte") == (37, 11)
    assert {name: shape for name, shape in shapes.items() if "low_bits" not in name} == {
        **{"row/wte": (37,), "column/wte": (11,), "row/h.0.weight": (150,)},
        **{"column/h.0.weight": (257,), "row/experts": (3, 5), "column/experts": (3, 7)},
        **{"row/row": (1,), "column/row": (6,), "row/column": (6,), "column/column": (1,)},
        **{"v/scale": (), "v/h.0.bias": (257,), "v/norm": (1,), "v/empty": (0, 4)},
    }
    assert all(
        value.dtype == ("uint16" if "low_bits" in name else "float32")
        for name, value in state.items()
        if "/" in name
    )
    large = optim.Adafactor(nn.Linear(1000, 1000, bias=False).parameters())
    assert sum(array.nbytes for array in large.state.values()) < 4 * 2200
    assert "v" not in large.state


@pytest.mark.parametrize("options", ["plain", "clipped", "scaled"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_run_resumes_to_the_same_bits(dtype: str, options: str, device: str) -> None:
    def run(optimizer: Any, tensors: Any, scaler: Any, steps: range) -> None:
        for step in steps:
            toy.set_gradients(tensors, step)
            limit = None if options == "plain" else 0.5
            optimizer.step(max_norm=limit, scaler=scaler)

    def scaler() -> Any:
        return optim.LossScaler(8.0, interval=2) if options == "scaled" else None

    tensors, optimizer = make(dtype, device, weight_decay=0.1)
    scale = scaler()
    run(optimizer, tensors, scale, range(3))
    others, resumed = make(dtype, device, weight_decay=0.1)
    for name, tensor in tensors.items():
        others[name].data[...] = tensor.data
    resumed.load_state_dict(copied(optimizer.state_dict()))
    second = scaler()
    if second is not None:
        second.load_state_dict(scale.state_dict())
    for each, which, its in ((optimizer, tensors, scale), (resumed, others, second)):
        run(each, which, its, range(3, 6))
    assert toy.same_bits(everything(optimizer), everything(resumed))
    assert optimizer.numbers() == resumed.numbers() == {"step": 6, "lr": 0.1}


def test_the_layout_changes_no_bit_of_the_state(device: str) -> None:
    tensors, one = make(device=device)
    others = toy.parameters(device=device, shapes=SHAPES)
    flat = optim.FlatParameters(reversed(others.items()), groups=lambda name: name[0])
    other = optim.Adafactor(flat, lr=0.1)
    for step in range(3):
        for each, optimizer in ((tensors, one), (others, other)):
            toy.set_gradients(each, step)
            optimizer.step()
    assert toy.same_bits([tensors[n].data for n in tensors], [others[n].data for n in tensors])
    before, after = one.state_dict(), other.state_dict()
    arrays = [name for name in before if "/" in name]
    assert toy.same_bits([before[n] for n in arrays], [after[n] for n in arrays])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_is_not_finite_changes_nothing(dtype: str, device: str) -> None:
    tensors, optimizer = make(dtype, device)
    for finite in (False, True, False):  # the first step too
        before = [array.copy() for array in everything(optimizer)]
        toy.set_gradients(tensors, 0)
        if not finite:
            tensors["wte"].grad[3, 4] = np.nan
        optimizer.step(max_norm=1.0)
        assert toy.same_bits(before, everything(optimizer)) != finite
    assert optimizer.state_dict()["step"] == 1


def test_gradients_of_0_and_of_any_size_give_finite_steps(device: str) -> None:
    for eps in ((None, 1e-3), (0.0, 0.0), (1e-30, 1e-3)):
        for size in (0.0, 1e-30, 1e-10, 1e15):
            tensors, optimizer = make(device=device, eps=eps)
            toy.set_gradients(tensors, 0)
            optimizer.flat.grad[...] *= size
            before = toy.values(tensors)
            optimizer.step()
            for name, value in toy.values(tensors).items():
                assert np.isfinite(value).all(), (eps, size, name)
                if size == 0:
                    assert (value == before[name]).all(), (eps, name)


def test_clipping_equals_smaller_gradients(device: str) -> None:
    tensors, clipped = make("float64", device)
    others, scaled = make("float64", device)
    toy.set_gradients(tensors, 0)
    toy.set_gradients(others, 0)
    norm = clipped.step(max_norm=0.5)
    scaled.flat.grad *= 0.5 / (float(norm) + 1e-6)
    scaled.step()
    one, two = copied(clipped.state_dict()), copied(scaled.state_dict())
    np.testing.assert_allclose(one["row/wte"], two["row/wte"], rtol=1e-12)
    for name in tensors:
        np.testing.assert_allclose(tensors[name].numpy(), others[name].numpy(), rtol=1e-10)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_parameters_are_the_rounded_master(dtype: str, device: str) -> None:
    tensors, optimizer = make(dtype, device)
    toy.set_gradients(tensors, 0)
    optimizer.step()
    assert toy.same_bits([toy.rounded(toy.weights(optimizer), dtype)], [optimizer.flat.data])
    tensors["h.0.bias"].data[...] = 7
    optimizer.zero_grad()
    optimizer.step()
    assert (tensors["h.0.bias"].numpy() == 7).all()
    half_a_unit = 0.0 if dtype == "float16" else 2.0**-6
    master = optimizer.flat.views(toy.weights(optimizer))["h.0.bias"]
    assert (np.abs(master - 7) <= half_a_unit).all()


def test_groups_are_optimizers_of_their_own(device: str) -> None:
    def split(tensors: dict[str, Tensor]) -> tuple[Any, Any]:
        body = {name: tensors[name] for name in ("wte", "scale", "h.0.bias")}
        return body, {name: tensor for name, tensor in tensors.items() if name not in body}

    tensors, others = (toy.parameters(device=device, shapes=SHAPES) for _ in range(2))
    body, head = split(tensors)
    groups = [{"params": body.items()}, {"params": head.items(), "lr": 0.05, "weight_decay": 0.3}]
    both = optim.Adafactor(groups, lr=0.1, weight_decay=0.2)
    body, head = split(others)
    all_decay = optim.FlatParameters(head.items(), decay=lambda *_: True)
    separate = [
        optim.Adafactor(body.items(), lr=0.1, weight_decay=0.2),
        optim.Adafactor(all_decay, lr=0.05, weight_decay=0.3),
    ]
    for step in range(3):
        toy.set_gradients(tensors, step)
        toy.set_gradients(others, step)
        for optimizer in (both, *separate):
            optimizer.step()
    assert toy.same_bits([tensors[n].data for n in others], [others[n].data for n in others])


def test_ranks_that_shard_the_parameters_update_as_one() -> None:
    tensors = toy.parameters(np.float64, shapes=SHAPES)
    optimizer = optim.Adafactor(tensors.items(), 0.1, weight_decay=0.1)
    for step in range(3):
        toy.set_gradients(tensors, step)
        optimizer.step()
    together = toy.on_two_ranks(
        lambda p: optim.Adafactor(p, 0.1, weight_decay=0.1), 3, shapes=SHAPES
    )
    for name, found in together.items():
        np.testing.assert_allclose(found, tensors[name].numpy(), rtol=1e-9, err_msg=name)


def test_the_options_are_shown() -> None:
    assert repr(optim.Adafactor(nn.Linear(2, 3).parameters())) == (
        "Adafactor(parameters=2, elements=9, lr=0.01, weight_decay=0.0, beta2_decay=-0.8, "
        "d=1.0, eps=(None, 0.001), relative_step=True, scale_parameter=True)"
    )


def test_a_layer_learns() -> None:
    random.seed(0)
    rng = np.random.default_rng(0)
    x = Tensor(rng.standard_normal((64, 8)).astype("float32"))
    target = x @ Tensor(rng.standard_normal((8, 4)).astype("float32"))
    model = nn.Linear(8, 4)
    optimizer = optim.Adafactor(model.parameters(), lr=0.05)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]


def test_a_state_of_another_shape_is_refused() -> None:
    _, optimizer = make()
    state = copied(optimizer.state_dict())
    state["row/wte"] = np.zeros((37, 11), "float32")
    with pytest.raises(CheckpointError, match=r"row/wte has shape \(37, 11\) .* expected \(37,\)"):
        optimizer.load_state_dict(state)
    del state["row/wte"]
    with pytest.raises(CheckpointError, match="state lacks row/wte"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Adafactor: lr is -1.0, expected a finite number from 0"),
        ({"weight_decay": None}, "Adafactor: weight_decay is None, expected a number"),
        ({"beta2_decay": 0.8}, "beta2_decay is 0.8, expected a finite number up to 0"),
        ({"beta2_decay": -math.inf}, "beta2_decay is -inf, expected a finite"),
        ({"beta2_decay": "x"}, "beta2_decay is 'x', expected a number"),
        ({"eps": 1e-3}, "eps is 0.001, expected two numbers, eps1 and eps2"),
        ({"eps": (1e-30,)}, "eps is .*, expected two numbers"),
        ({"eps": (-1.0, 1e-3)}, "eps1 is -1.0, expected a finite number from 0"),
        ({"eps": (None, None)}, "eps2 is None, expected a number"),
        ({"d": 0.0}, "d is 0.0, expected a number above 0"),
        ({"d": math.nan}, "d is nan, expected a finite number"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        optim.Adafactor(nn.Linear(2, 3).parameters(), **options)
