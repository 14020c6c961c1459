"""Muon: its formula, singular values, skipped steps, 16 bits and resuming."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor, nn, optim, random
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.sentiment import MeanClassifier, MeanConfig
from tensorgrad.optim.muon import orthogonalized
from tests.optim import toy

SHAPES = {"wide": (16, 40), "tall": (33, 8), "one": (1, 5)}


def make(dtype: Any = "float32", device: str = "cpu", **options: Any) -> tuple[Any, Any]:
    tensors = toy.parameters(dtype, device, shapes=SHAPES)
    return tensors, optim.Muon(tensors.items(), lr=0.1, **options)


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (7, 7)])
def test_singular_values_become_about_1(shape: tuple[int, int], device: str) -> None:
    rng = np.random.default_rng(3)
    matrix = backend.to_device(rng.standard_normal(shape).astype("float32"), device)
    values = np.linalg.svd(backend.to_numpy(orthogonalized(matrix)), compute_uv=False)
    assert values.min() > 0.3
    assert values.max() < 1.3
    u, _, v = np.linalg.svd(backend.to_numpy(matrix), full_matrices=False)
    cosine = (backend.to_numpy(orthogonalized(matrix)) * (u @ v)).sum() / values.sum()
    assert cosine > 0.98
    expected = np.linalg.svd(backend.to_numpy(matrix), compute_uv=False)
    expected /= np.linalg.norm(expected)
    for _ in range(5):
        expected = 3.4445 * expected - 4.775 * expected**3 + 2.0315 * expected**5
    np.testing.assert_allclose(np.sort(values), np.sort(expected), rtol=1e-3)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("match", [False, True])
def test_steps_follow_the_formula(nesterov: bool, match: bool, device: str) -> None:
    tensors, optimizer = make("float64", device, nesterov=nesterov, match_adamw=match)
    expected = toy.values(tensors)
    moments = {name: np.zeros_like(value) for name, value in expected.items()}
    for step in range(3):
        toy.set_gradients(tensors, step)
        optimizer.step()
        for name, g in toy.gradients(SHAPES, step).items():
            moments[name] = 0.95 * moments[name] + 0.05 * g
            u = 0.95 * moments[name] + 0.05 * g if nesterov else moments[name]
            rows, columns = u.shape
            scale = 0.2 * max(rows, columns) ** 0.5 if match else max(1, rows / columns) ** 0.5
            expected[name] *= 1 - 0.1 * 0.1
            expected[name] -= 0.1 * scale * orthogonalized(u)
    for name, value in toy.values(tensors).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-10)
    assert optimizer.state_dict()["step"] == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_is_not_finite_changes_nothing(dtype: str, device: str) -> None:
    tensors, optimizer = make(dtype, device)
    toy.set_gradients(tensors, 0)
    optimizer.step(max_norm=1.0)
    before = [optimizer.flat.data.copy(), *(each.copy() for each in optimizer.state.values())]
    tensors["tall"].grad[0, 0] = np.inf
    optimizer.step(max_norm=1.0)
    assert toy.same_bits(before, [optimizer.flat.data, *optimizer.state.values()])
    assert optimizer.state_dict()["step"] == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_resumes_to_the_same_bits(dtype: str, device: str) -> None:
    tensors, optimizer = make(dtype, device)
    others, resumed = make(dtype, device)
    for step in range(4):
        if step == 2:
            resumed.load_state_dict(optimizer.state_dict())
            resumed.flat.data[...] = optimizer.flat.data
        for each in (tensors, others)[: 1 + (step >= 2)]:
            toy.set_gradients(each, step)
        optimizer.step()
        if step >= 2:
            resumed.step()
    assert toy.same_bits([optimizer.flat.data], [resumed.flat.data])


def test_the_loss_of_a_linear_layer_falls() -> None:
    random.seed(0)
    rng = np.random.default_rng(0)
    x = Tensor(rng.standard_normal((64, 8)).astype("float32"))
    target = x @ Tensor(rng.standard_normal((8, 4)).astype("float32"))
    model = nn.Linear(8, 4, bias=False)
    optimizer = optim.Muon(model.parameters(), lr=0.05, weight_decay=0.0)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]


def is_inside(name: str, _: Any) -> bool:
    return name == "h.0.weight"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_rest_is_updated_as_by_adamw_alone(dtype: str, device: str) -> None:
    """Equal bits, with a state that lacks what Muon does not need, and after resuming."""

    def make_both() -> tuple[dict[str, Tensor], optim.Muon]:
        tensors = toy.parameters(dtype, device)
        return tensors, optim.Muon(
            tensors.items(), 0.1, betas=(0.8, 0.9), matrices=is_inside, decay=optim.decays_matrices
        )

    (tensors, both), (others, resumed) = make_both(), make_both()
    alone = toy.parameters(dtype, device)
    matrix = {"h.0.weight": alone.pop("h.0.weight")}
    muon = optim.Muon(matrix.items(), lr=0.1)
    adamw = optim.AdamW(
        alone.items(), 0.1, (0.8, 0.9), weight_decay=0.1, decay=optim.decays_matrices
    )
    for step in range(4):
        if step == 2:
            state = both.state_dict()
            resumed.load_state_dict({n: v.copy() if "/" in n else v for n, v in state.items()})
            resumed.flat.data[...] = both.flat.data
        gradients = toy.gradients(step=step)
        for each in (tensors, others, matrix, alone):
            for name, tensor in each.items():
                assert tensor.grad is not None
                tensor.grad[...] = backend.asarray_like(gradients[name], tensor.data)
        for optimizer in (both, muon, adamw, *([resumed] if step >= 2 else [])):
            optimizer.step()
    for name, tensor in {**matrix, **alone}.items():
        assert toy.same_bits([tensors[name].data, others[name].data], [tensor.data] * 2)
    state, parts = both.state_dict(), {**muon.state_dict(), **adamw.state_dict()}
    assert state.keys() == parts.keys()
    arrays = [name for name in state if "/" in name]
    assert toy.same_bits([state[n] for n in arrays], [parts[n] for n in arrays])
    assert "v/wte" in state
    assert "v/h.0.weight" not in state
    parts["v/h.0.weight"] = parts["m/h.0.weight"]
    with pytest.raises(CheckpointError, match=r"has an unknown v/h\.0\.weight"):
        both.load_state_dict(parts)


def test_a_step_with_nan_moves_neither_the_matrices_nor_the_rest(device: str) -> None:
    tensors = toy.parameters("bfloat16", device)
    optimizer = optim.Muon(tensors.items(), 0.1, matrices=is_inside)
    toy.set_gradients(tensors, 0)
    optimizer.step(max_norm=1.0)
    before = [array.copy() for array in (optimizer.flat.data, *optimizer.state.values())]
    for name in ("wte", "h.0.weight"):
        toy.set_gradients(tensors, 1)
        tensors[name].grad[0, 0] = np.nan  # type: ignore[index]
        optimizer.step(max_norm=1.0)
        assert toy.same_bits(before, [optimizer.flat.data, *optimizer.state.values()])
    optimizer.zero_grad()
    toy.set_gradients({"h.0.weight": tensors["h.0.weight"]}, 1)
    optimizer.step()
    idle = optimizer.flat.views(optimizer.flat.data)["wte"]
    assert toy.same_bits([idle], [optimizer.flat.views(before[0])["wte"]])
    assert not toy.same_bits([optimizer.flat.data], before[:1])


@pytest.mark.parametrize("matrices", [is_inside, lambda name, _: name in ("wte", "h.0.weight")])
def test_ranks_that_shard_the_parameters_update_as_one(matrices: Any) -> None:
    def make_one(parameters: Any) -> optim.Muon:
        return optim.Muon(parameters, 0.1, matrices=matrices)

    tensors = toy.parameters(np.float64)
    optimizer = make_one(tensors.items())
    for step in range(3):
        toy.set_gradients(tensors, step)
        optimizer.step()
    for name, found in toy.on_two_ranks(make_one, 3).items():
        np.testing.assert_allclose(found, tensors[name].numpy(), rtol=1e-9, err_msg=name)


def test_the_options_are_shown() -> None:
    assert repr(optim.Muon(nn.Linear(2, 3, bias=False).parameters())) == (
        "Muon(parameters=1, elements=6, lr=0.001, weight_decay=0.1, betas=(0.9, 0.999), "
        "eps=1e-08, momentum=0.95, nesterov=True, iterations=5, match_adamw=False)"
    )
    with pytest.raises(ArgumentError, match=r"Muon: momentum is 1, expected 0 <= momentum < 1"):
        optim.Muon(nn.Linear(2, 3, bias=False).parameters(), momentum=1)


def test_matrices_of_blocks_are_known_by_name() -> None:
    chosen = {
        name
        for model in (GPT2(GPT2Config(32, 8, 1, 2, 16)), MeanClassifier(MeanConfig(vocab_size=9)))
        for name, parameter in model.named_parameters()
        if optim.in_blocks(name, parameter)
    }
    layers = ("attention.qkv", "attention.proj", "feed_forward.up", "feed_forward.down")
    assert chosen == {*(f"blocks.0.{layer}.weight" for layer in layers), "hidden.0.weight"}


def test_other_parameters_than_matrices_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"norm has shape \(1,\), expected a matrix"):
        optim.Muon(toy.parameters().items(), matrices=lambda name, _: name == "norm")
    with pytest.raises(ArgumentError, match="Muon: matrices: f is a int, expected a function"):
        optim.Muon(toy.parameters().items(), matrices=3)  # type: ignore[arg-type]
    with pytest.raises(
        ArgumentError, match=r"bias has shape \(3,\), expected a matrix; `matrices`"
    ):
        optim.Muon(nn.Linear(2, 3).named_parameters())
    with pytest.raises(ArgumentError, match="iterations is 0, expected 1 or more"):
        optim.Muon(nn.Linear(2, 3, bias=False).parameters(), iterations=0)
