from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import nn, random
from tensorgrad.core.nodes import Node
from tensorgrad.errors import ArgumentError, ShapeError
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.ops.attention_unfused import attention_unfused
from tensorgrad.testing import Case, check
from tests.ops.test_attention import ADDED, PADDING, case


def unfused(function: Any, fused: bool, q: Any, k: Any, v: Any) -> Any:
    """Run the function of a case of `attention`, with the ops in its place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, "attention", partial(attention_unfused, fused_softmax=fused))
        return function(q, k, v)


# Scores of 16 bits are rounded before the softmax, which `attention` avoids: see the losses below.
CASES = [
    replace(
        found,
        function=partial(unfused, found.function, fused),
        dtypes=(np.float32, np.float64),
        name=found.name.replace("attention", "attention_unfused"),
    )
    for fused in (False, True)
    for found in (
        case((2, 3, 5, 4)),
        case((2, 6, 33, 8), kv_heads=2, causal=True),
        case((2, 3, 7, 4), tk=17, causal=True),
        case((2, 3, 7, 4), tk=17, scale=0.3),
        case((2, 3, 31, 4), tk=33, mask=PADDING, causal=True),
        case((2, 3, 31, 4), tk=33, mask=ADDED),
        case((0, 3, 5, 4)),
        case((2, 3, 33, 4), causal=True, window=5),
        *(case((1, 1, n, 8), causal=True) for n in (1, 31, *[1023] * fused, 1025)),
    )
]

OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "causal window": {"causal": True, "window": 2},
    "scale": {"scale": 0.3, "causal": True},
    "bools": {"mask": "bools"},
    "floats": {"mask": "floats", "causal": True},
    "window and floats": {"mask": "floats", "window": 2},
    "window and bools": {"mask": "bools", "window": 2},
    "learned": {"mask": "learned", "scale": 0.3, "causal": True},
}


@pytest.mark.parametrize("found", CASES, ids=str)
def test_against_numpy(found: Case) -> None:
    check(found)


def results(run: Any, shapes: Any, dtype: str, options: dict[str, Any]) -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    q, k, v = (tg.tensor(generator.standard_normal(s).astype(dtype)) for s in shapes)
    options = dict(options)
    if "mask" in options:
        weights = generator.standard_normal((shapes[0][0], 1, shapes[0][2], shapes[1][2]))
        mask = weights > -0.5 if options["mask"] == "bools" else weights.astype(dtype)
        if mask.dtype == bool:
            mask[0, 0, 1] = False  # a query without any key
        learned = options["mask"] == "learned" and run is not tg.attention
        options["mask"] = tg.tensor(mask, requires_grad=True) if learned else mask
    for x in (q, k, v):
        x.requires_grad = True
    y = run(q, k, v, **options)
    (y * tg.tensor(generator.standard_normal(y.shape).astype(dtype))).sum().backward()
    return [y.numpy(), *(x.grad for x in (q, k, v))]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize("shapes", [((2, 4, 5, 8), (2, 2, 5, 8)), ((1, 3, 2, 4), (1, 3, 7, 4))])
def test_it_equals_attention(name: str, fused: bool, shapes: Any) -> None:
    shapes = (*shapes, shapes[1])

    unfused = partial(attention_unfused, fused_softmax=fused)
    expected = results(tg.attention, shapes, "float64", OPTIONS[name])
    for found, wanted in zip(
        results(unfused, shapes, "float64", OPTIONS[name]), expected, strict=True
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


def test_keys_and_values_without_a_batch() -> None:
    generator = np.random.default_rng(0)
    q = generator.standard_normal((2, 4, 3, 8))
    k, v = generator.standard_normal((2, 2, 5, 8))
    expected = tg.attention(q, np.stack([k, k]), np.stack([v, v])).numpy()
    for keys, values in ((k, v), (k[None], v), (k, np.stack([v, v]))):
        found = attention_unfused(q, keys, values).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def test_softmax_is_one_op_where_it_is_fused() -> None:
    q = tg.tensor(np.ones((1, 1, 2, 4)), requires_grad=True)
    for options, fused in (({}, False), ({"fused_softmax": True}, True)):
        names, nodes = set(), [attention_unfused(q, q, q, **options).node]
        while nodes:
            node = nodes.pop()
            names.add(node.name)
            nodes += [edge for edge in node.edges if isinstance(edge, Node)]
        assert ("softmax" in names) == fused
        assert ("exp" in names) != fused


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 3, 4), (2, 3, 4), (2, 3, 4)),
        ((1, 2, 3, 4), (3, 4), (3, 4)),
        ((2, 2, 3, 4), (3, 2, 3, 4), (2, 2, 3, 4)),
        ((2, 2, 3, 4), (2, 2, 3, 4), (3, 2, 3, 4)),
        ((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 4)),
        ((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 6, 4)),
        ((1, 3, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)),
    ],
)
def test_shapes_that_do_not_fit(q: Any, k: Any, v: Any) -> None:
    with pytest.raises(ShapeError, match=r"attention_unfused: q has shape .*, expected \(B, H, Tq"):
        attention_unfused(np.ones(q), np.ones(k), np.ones(v))


def test_errors_name_what_is_wrong() -> None:
    x = np.ones((1, 2, 3, 4))
    with pytest.raises(ArgumentError, match="dropout is 1, expected 0 <= dropout < 1"):
        attention_unfused(x, x, x, dropout=1)
    with pytest.raises(ShapeError, match=r"q has shape \(1, 2, 3, 4\), k \(1, 2, 3\)"):
        attention_unfused(x, x[..., 0], x)
    with pytest.raises(ShapeError, match="mask has shape"):
        attention_unfused(x, x, x, mask=np.ones((5, 5), bool))
    model = GPT2(GPT2Config(vocab_size=32, context=8, layers=1, heads=2, width=16))
    with pytest.raises(ArgumentError, match="kernel is 'fast', expected one of unfused, fused-"):
        nn.use_attention(model, "fast")
