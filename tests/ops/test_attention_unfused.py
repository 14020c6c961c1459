from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import nn, random
from tensorgrad.errors import ArgumentError, ShapeError
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.ops.attention_unfused import attention_unfused

CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "causal window": {"causal": True, "window": 2},
    "scale": {"scale": 0.3, "causal": True},
    "bools": {"mask": "bools"},
    "floats": {"mask": "floats", "causal": True},
    "window and floats": {"mask": "floats", "window": 2},
    "window and bools": {"mask": "bools", "window": 2},
}


def results(run: Any, shapes: Any, dtype: str, options: dict[str, Any]) -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    q, k, v = (tg.tensor(generator.standard_normal(s).astype(dtype)) for s in shapes)
    options = dict(options)
    if "mask" in options:
        weights = generator.standard_normal((shapes[0][0], 1, shapes[0][2], shapes[1][2]))
        mask = weights > -0.5 if options["mask"] == "bools" else weights.astype(dtype)
        if mask.dtype == bool:
            mask[0, 0, 1] = False  # a query without any key
        options["mask"] = mask
    for x in (q, k, v):
        x.requires_grad = True
    y = run(q, k, v, **options)
    (y * tg.tensor(generator.standard_normal(y.shape).astype(dtype))).sum().backward()
    return [y.numpy(), *(x.grad for x in (q, k, v))]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("shapes", [((2, 4, 5, 8), (2, 2, 5, 8)), ((1, 3, 2, 4), (1, 3, 7, 4))])
def test_it_equals_attention(name: str, fused: bool, shapes: Any) -> None:
    shapes = (*shapes, shapes[1])

    unfused = partial(attention_unfused, fused_softmax=fused)
    expected = results(tg.attention, shapes, "float64", CASES[name])
    for found, wanted in zip(
        results(unfused, shapes, "float64", CASES[name]), expected, strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kernel", nn.ATTENTION_KERNELS)
def test_a_model_has_the_loss_of_any_kernel(kernel: str, dtype: str) -> None:
    random.seed(1)
    model = GPT2(GPT2Config(vocab_size=32, context=8, layers=2, heads=2, width=16))
    tokens = np.arange(16).reshape(2, 8)
    model.to("cpu", dtype)
    expected = model(tokens, tokens).item()
    nn.use_attention(model, kernel)
    loss = model(tokens, tokens)
    loss.backward()
    bound = 1e-5 if dtype == "float32" else 5e-3
    assert abs(loss.item() - expected) < bound
    assert all(p.grad is not None for p in model.parameters())


def test_dropout_drops_weights() -> None:
    random.seed(0)
    x = np.ones((1, 1, 64, 64))
    kept = attention_unfused(x, x, np.eye(64)[None, None], dropout=0.25).numpy() != 0
    assert 0.7 < kept.mean() < 0.8


def test_errors_name_what_is_wrong() -> None:
    x = np.ones((1, 2, 3, 4))
    with pytest.raises(ShapeError, match=r"q has shape \(1, 2, 3, 4\), k \(1, 2, 3\)"):
        attention_unfused(x, x[..., 0], x)
    with pytest.raises(ShapeError, match="mask has shape"):
        attention_unfused(x, x, x, mask=np.ones((5, 5), bool))
    model = GPT2(GPT2Config(vocab_size=32, context=8, layers=1, heads=2, width=16))
    with pytest.raises(ArgumentError, match="kernel is 'fast', expected one of unfused, fused-"):
        nn.use_attention(model, "fast")
