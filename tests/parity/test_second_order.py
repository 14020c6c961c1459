"""Second derivatives against PyTorch, in float64: language models, and a penalty of a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, nn
from tensorgrad.models.gpt2 import GPT2
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from tests.parity import test_gpt2  # noqa: E402
from tests.parity.test_gpt2 import apart, copy_of, lively, without_key_bias  # noqa: E402

LLAMA = TransformerLMConfig(97, context=24, layers=2, heads=4, kv_heads=2, width=32, hidden=80)


def llama_loss(weights: dict[str, Any], x: Any, y: Any) -> tuple[Any, Any]:
    """Return logits and loss of a TransformerLM in plain PyTorch operations."""
    batch, length = x.shape
    heads, kv_heads, width = LLAMA.heads, LLAMA.kv_heads, LLAMA.width
    head = width // heads
    frequencies = LLAMA.rope_base ** (-torch.arange(0, head, 2, dtype=torch.float64) / head)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    # The library's tables are float32.
    cos, sin = (each.float().double() for each in (angles.cos(), angles.sin()))
    mask = torch.full((length, length), -math.inf, dtype=torch.float64).triu(1)

    def norm(x: Any, name: str) -> Any:
        return torch.nn.functional.rms_norm(x, (width,), weights[f"{name}.weight"], LLAMA.norm_eps)

    def rotated(x: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    h = weights["tokens.weight"][x]
    for number in range(LLAMA.layers):
        block = f"blocks.{number}"
        qkv = norm(h, f"{block}.norm1") @ weights[f"{block}.attention.qkv.weight"].T
        by_head = qkv.view(batch, length, -1, head).transpose(1, 2)
        q, k, v = by_head.split([heads, kv_heads, kv_heads], 1)
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (rotated(k), v))
        scores = rotated(q) @ k.transpose(-1, -2) / math.sqrt(head) + mask
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        h = h + mixed @ weights[f"{block}.attention.proj.weight"].T
        normed, feed = norm(h, f"{block}.norm2"), f"{block}.feed_forward"
        gate, up = (normed @ weights[f"{feed}.{name}.weight"].T for name in ("gate", "up"))
        h = h + (torch.nn.functional.silu(gate) * up) @ weights[f"{feed}.down.weight"].T
    logits = norm(h, "norm") @ weights["tokens.weight"].T
    return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


@pytest.mark.parametrize(
    ("make", "their_loss"),
    [
        (lambda: GPT2(test_gpt2.CONFIG), test_gpt2.torch_loss),
        (lambda: TransformerLM(LLAMA), llama_loss),
    ],
    ids=["gpt2", "llama"],
)
def test_hessian_vector_products(
    make: Callable[[], Any], their_loss: Callable[..., tuple[Any, Any]]
) -> None:
    model = lively(make()).to("cpu", "float64")
    rng, weights = np.random.default_rng(0), copy_of(model)
    x, y = rng.integers(0, model.config.vocab_size, (2, 2, model.config.context))
    vector = {name: rng.standard_normal(w.shape) for name, w in weights.items()}

    loss = their_loss(weights, torch.from_numpy(x), torch.from_numpy(y))[1]
    grads = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
    slope = sum(
        (g * torch.from_numpy(v)).sum() for g, v in zip(grads, vector.values(), strict=True)
    )
    products = torch.autograd.grad(slope, [*weights.values()])

    parameters, tangents = dict(model.named_parameters()), {n: Tensor(v) for n, v in vector.items()}
    _, ours = tg.jvp(lambda p: tg.functional_call(model, p, x, y), (parameters,), (tangents,))
    assert ours.item() == pytest.approx(slope.item(), rel=1e-10)
    found = tg.hvp(lambda p: tg.functional_call(model, p, x, y), (parameters,), (tangents,))[0]
    far = {
        name: distance
        for name, theirs in zip(weights, products, strict=True)
        if not (distance := apart(*without_key_bias(name, found[name].numpy(), theirs))) < 1e-10
    }
    assert far == {}


def test_a_penalty_of_the_gradient() -> None:
    """Wasserstein GANs: the critic's gradient by its input should have norm 1."""
    critic = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))
    critic.to("cpu", "float64")
    theirs = torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.SiLU(),
        torch.nn.Linear(8, 1),
    ).double()  # fmt: skip
    for p, q in zip(critic.parameters(), theirs.parameters(), strict=True):
        q.data = torch.from_numpy(p.numpy().copy())
    data = np.random.default_rng(0).standard_normal((6, 5))

    x = Tensor(data, requires_grad=True)
    critic(x).sum().backward(create_graph=True)
    slope = x.grad
    assert isinstance(slope, Tensor)
    critic.zero_grad()
    penalty = ((tg.norm(slope, 1) - 1) ** 2).mean() + critic(x).mean()
    penalty.backward()

    z = torch.from_numpy(data).requires_grad_()
    (g,) = torch.autograd.grad(theirs(z).sum(), z, create_graph=True)
    expected = ((g.norm(dim=1) - 1) ** 2).mean() + theirs(z).mean()
    expected.backward()
    assert penalty.item() == pytest.approx(expected.item(), rel=1e-12)
    for p, q in zip(critic.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(np.asarray(p.grad), q.grad.numpy(), rtol=1e-10, atol=1e-13)
