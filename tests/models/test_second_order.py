"""Hessian-vector products of whole models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, backend, graph, nn, random
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig

MODELS: dict[str, Any] = {
    "gpt2": lambda: GPT2(GPT2Config(vocab_size=19, context=8, layers=2, heads=2, width=16)),
    "llama": lambda: TransformerLM(
        TransformerLMConfig(vocab_size=19, context=8, layers=2, heads=4, kv_heads=2, width=16)
    ),
}
TOLERANCES = {"float32": 1e-4, "tf32": 2e-2, "bfloat16": 0.1, "bfloat16-parameters": 0.1}


def tokens(config: Any, device: str = "cpu") -> list[Tensor]:
    rng = np.random.default_rng(0)
    arrays = rng.integers(0, config.vocab_size, (2, 2, config.context), np.int32)
    return [Tensor(backend.to_device(array, device)) for array in arrays]


def directions(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    return {n: np.asarray(rng.standard_normal(p.shape)) for n, p in model.named_parameters()}


def exact(model: Any, vector: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the product by differences of gradients."""
    x, y = tokens(model.config)
    values = {n: p.data for n, p in model.named_parameters()}
    loss = tg.grad(lambda p: tg.functional_call(model, p, x, y))
    step = 1e-5
    ends = [
        loss({n: Tensor(value + sign * step * vector[n]) for n, value in values.items()})
        for sign in (1, -1)
    ]
    return {n: (ends[0][n].numpy() - ends[1][n].numpy()) / (2 * step) for n in values}


def largest_error(found: Any, right: dict[str, Any]) -> float:
    scale = max(float(np.abs(value).max()) for value in right.values())
    return (
        max(
            float(np.abs(backend.to_numpy(found[n].data).astype("float64") - right[n]).max())
            for n in right
        )
        / scale
    )


def hvp(model: Any, vector: dict[str, Any], device: str) -> Any:
    x, y = tokens(model.config, device)
    parameters = dict(model.named_parameters())
    given = {
        n: Tensor(backend.to_device(v, device).astype(parameters[n].dtype))
        for n, v in vector.items()
    }

    def loss(p: Any) -> Tensor:
        value: Tensor = tg.functional_call(model, p, x, y)
        return value

    return tg.hvp(loss, (parameters,), (given,))[0]


@pytest.mark.parametrize("name", MODELS)
def test_products_match_differences(name: str) -> None:
    random.seed(0)
    model = MODELS[name]().to("cpu", "float64")
    vector = directions(model)
    right = exact(model, vector)
    assert largest_error(hvp(model, vector, "cpu"), right) < 1e-5
    assert all(p.grad is None for p in model.parameters())


def test_products_of_recomputed_blocks_are_equal() -> None:
    random.seed(0)
    config = GPT2Config(vocab_size=19, context=8, layers=2, heads=2, width=16)
    model = GPT2(config).to("cpu", "float64")
    vector = directions(model)
    right = {n: t.numpy() for n, t in hvp(model, vector, "cpu").items()}
    model.recompute = True
    assert largest_error(hvp(model, vector, "cpu"), right) < 1e-14


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_products_on_a_gpu_match_the_cpu(name: str, dtype: str) -> None:
    random.seed(0)
    sizes: dict[str, Any] = {"vocab_size": 130, "context": 96, "layers": 2, "heads": 2}
    model: Any = (
        GPT2(GPT2Config(**sizes, width=128))
        if name == "gpt2"
        else TransformerLM(TransformerLMConfig(**sizes, kv_heads=1, width=128))
    )
    model.to("cpu", "float64")
    vector = directions(model)
    right = {n: t.numpy() for n, t in hvp(model, vector, "cpu").items()}
    model.to("cuda", "bfloat16" if dtype == "bfloat16-parameters" else "float32")
    cast = dtype if dtype in ("tf32", "bfloat16") else None

    def product() -> Any:
        if cast is None:
            return hvp(model, vector, "cuda")
        with tg.autocast(cast):
            return hvp(model, vector, "cuda")

    found = product()
    assert largest_error(found, right) < TOLERANCES[dtype]
    again = product()
    assert all(bool((again[n].data == found[n].data).all()) for n in found)


@pytest.mark.gpu
def test_a_captured_product_has_the_same_bits() -> None:
    random.seed(0)
    sizes: dict[str, Any] = {"vocab_size": 130, "context": 96, "layers": 2, "heads": 2}
    model = GPT2(GPT2Config(**sizes, width=128)).to("cuda", "bfloat16")
    x, y = tokens(model.config, "cuda")
    parameters = dict(model.named_parameters())
    vector = {
        n: Tensor(backend.to_device(v, "cuda").astype(parameters[n].dtype))
        for n, v in directions(model).items()
    }

    def product(x: Tensor, y: Tensor) -> Any:
        return tg.hvp(lambda p: tg.functional_call(model, p, x, y), (parameters,), (vector,))[0]

    right, captured = product(x, y), graph.capture(product)
    for _ in range(4):
        found = captured(x, y)
    assert captured.graphs == 1
    assert all(bool((found[n].data == right[n].data).all()) for n in right)
