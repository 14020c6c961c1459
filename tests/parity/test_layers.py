"""Layers and losses against PyTorch: values and gradients of equal inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, nn
from tensorgrad.ops.cross_entropy import Reduction

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

RNG = np.random.default_rng(4)
TOLERANCE = 1e-5  # fraction of the largest element


def compare(ours: Callable[..., Tensor], theirs: Callable[..., Any], *arrays: Any) -> None:
    """Compare the values of two functions of some arrays, and the gradients of all arrays."""
    leaves = [Tensor(a.copy(), requires_grad=True) for a in arrays]
    others = [torch.from_numpy(a.copy()).requires_grad_() for a in arrays]
    y, other = ours(*leaves), theirs(*others)
    close(y.numpy(), other.detach().numpy())
    dy = RNG.standard_normal(y.shape).astype(y.dtype)
    y.backward(dy)
    other.backward(torch.from_numpy(np.asarray(dy)))
    for leaf, one in zip(leaves, others, strict=True):
        close(leaf.grad, one.grad.numpy())


def close(got: Any, expected: Any) -> None:
    assert got.shape == expected.shape
    np.testing.assert_allclose(
        got, expected, rtol=TOLERANCE, atol=TOLERANCE * np.abs(expected).max(initial=0)
    )


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype("float32")


def test_linear() -> None:
    f = torch.nn.functional
    compare(tg.linear, f.linear, normal(3, 5, 33), normal(17, 33), normal(17))
    compare(tg.linear, f.linear, normal(4, 33), normal(17, 33))


@pytest.mark.parametrize("width", [5, 64, 1025])
def test_norms(width: int) -> None:
    f = torch.nn.functional
    compare(
        tg.layer_norm, lambda x, w, b: f.layer_norm(x, (width,), w, b),
        normal(3, 7, width), normal(width), normal(width),
    )  # fmt: skip
    compare(
        tg.rms_norm, lambda x, w: f.rms_norm(x, (width,), w),
        normal(3, 7, width), normal(width),
    )  # fmt: skip


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_softmax(axis: int) -> None:
    f = torch.nn.functional
    x = normal(5, 33, 7) * 5
    compare(lambda x: tg.softmax(x, axis), lambda x: f.softmax(x, axis), x)
    compare(lambda x: tg.log_softmax(x, axis), lambda x: f.log_softmax(x, axis), x)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [-100, 3])
def test_cross_entropy(reduction: Reduction, smoothing: float, ignored: int) -> None:
    targets = RNG.integers(0, 65, (4, 9))
    targets[0, :5] = ignored
    flat = torch.from_numpy(targets).flatten()

    def theirs(logits: Any) -> Any:
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), flat, ignore_index=ignored, reduction=reduction,
            label_smoothing=smoothing,
        )  # fmt: skip
        return loss.view(4, 9) if reduction == "none" else loss

    compare(
        lambda x: tg.cross_entropy(x, targets, None, ignored, reduction, smoothing),
        theirs,
        normal(4, 9, 65) * 3,
    )


def test_embedding() -> None:
    ids = RNG.integers(0, 50, (4, 60))
    compare(
        lambda w: tg.embedding(w, ids),
        lambda w: torch.nn.functional.embedding(torch.from_numpy(ids), w),
        normal(50, 40),
    )


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_attention(mask: str, causal: bool, kv_heads: int) -> None:
    length = 70
    allowed = RNG.random((2, 1, length, length)) > 0.3
    allowed[..., 0] = True  # PyTorch has NaN where nothing is allowed
    added = normal(2, 6, length, length)
    given = {"none": None, "bool": allowed, "float": added}[mask]
    bias = torch.zeros(length, length)
    if causal:
        bias = bias + torch.full((length, length), -torch.inf).triu(1)
    if mask == "bool":
        bias = bias + torch.where(torch.from_numpy(allowed), 0.0, -torch.inf)
    if mask == "float":
        bias = bias + torch.from_numpy(added)

    def theirs(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, enable_gqa=True
        )

    compare(
        lambda q, k, v: tg.attention(q, k, v, given, causal=causal), theirs,
        normal(2, 6, length, 32), normal(2, kv_heads, length, 32), normal(2, kv_heads, length, 32),
    )  # fmt: skip


def test_attention_with_a_learned_bias_and_another_value_width() -> None:
    compare(
        tg.attention,
        lambda q, k, v, bias: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias
        ),
        normal(2, 6, 20, 32), normal(2, 6, 20, 32), normal(2, 6, 20, 16), normal(1, 6, 20, 20),
    )  # fmt: skip


def test_multi_head_attention() -> None:
    layer = nn.MultiHeadAttention(48, 6, causal=True)
    weights = {
        n: torch.from_numpy(p.numpy().copy()).requires_grad_() for n, p in layer.named_parameters()
    }

    def theirs(x: Any) -> Any:
        qkv = x @ weights["qkv.weight"].T + weights["qkv.bias"]
        q, k, v = qkv.view(3, 29, 3, 6, 8).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(3, 29, 48)
        return y @ weights["proj.weight"].T + weights["proj.bias"]

    compare(layer, theirs, normal(3, 29, 48))
    for name, parameter in layer.named_parameters():
        close(parameter.grad, weights[name].grad.numpy())


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(interleaved: bool) -> None:
    rotary = nn.RotaryEmbedding(16, interleaved=interleaved)
    rates = 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    angles = torch.arange(2, 11)[:, None, None] * rates

    def theirs(x: Any) -> Any:
        a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        cos, sin = angles.cos().float(), angles.sin().float()
        turned = a * cos - b * sin, b * cos + a * sin
        return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)

    compare(lambda x: rotary(x, 2), theirs, normal(3, 9, 2, 16))


def test_gelu_and_swiglu() -> None:
    f = torch.nn.functional
    for ours, theirs in (
        (tg.gelu, f.gelu),
        (lambda x: tg.gelu(x, approximate="tanh"), lambda x: f.gelu(x, approximate="tanh")),
        (tg.silu, f.silu),
    ):
        compare(ours, theirs, normal(9, 33) * 3)
    layer = nn.SwiGLU(24)
    gate, up, down = (torch.from_numpy(p.numpy()) for p in layer.parameters())
    compare(layer, lambda x: (f.silu(x @ gate.T) * (x @ up.T)) @ down.T, normal(5, 24))
