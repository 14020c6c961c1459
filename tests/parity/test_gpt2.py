"""GPT-2 against PyTorch: the same weights, the same tokens, the same numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad.models.generation import generate
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.pretrained import from_pretrained, save_pretrained
from tensorgrad.optim import AdamW, decays_matrices

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

CONFIG = GPT2Config(vocab_size=211, context=32, layers=3, heads=4, width=48)
STEPS = 10
# EPS: large enough that a gradient which is nothing but rounding error moves no weight by LR.
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-5, 0.1


def torch_loss(weights: dict[str, Any], x: Any, y: Any) -> tuple[Any, Any]:
    """Return logits and loss of the same model in plain PyTorch operations."""
    batch, length = x.shape
    width, heads = CONFIG.width, CONFIG.heads

    def norm(x: Any, name: str) -> Any:
        return torch.nn.functional.layer_norm(
            x, (width,), weights[f"{name}.weight"], weights[f"{name}.bias"]
        )

    def linear(x: Any, name: str) -> Any:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    mask = torch.full((length, length), -math.inf, dtype=weights["norm.weight"].dtype).triu(1)
    h = weights["tokens.weight"][x] + weights["positions.weight"][:length]
    for number in range(CONFIG.layers):
        block = f"blocks.{number}"
        qkv = linear(norm(h, f"{block}.norm1"), f"{block}.attention.qkv")
        q, k, v = qkv.view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // heads) + mask
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        h = h + linear(mixed, f"{block}.attention.proj")
        up = linear(norm(h, f"{block}.norm2"), f"{block}.feed_forward.up")
        hidden = torch.nn.functional.gelu(up, approximate="tanh")
        h = h + linear(hidden, f"{block}.feed_forward.down")
    logits = norm(h, "norm") @ weights["tokens.weight"].T
    return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def batches() -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, CONFIG.vocab_size, (2, 4, CONFIG.context)) for _ in range(STEPS)]


def copy_of(model: GPT2) -> dict[str, Any]:
    return {
        name: torch.from_numpy(p.numpy().copy()).requires_grad_()
        for name, p in model.named_parameters()
    }


def apart(ours: Any, theirs: Any) -> float:
    """Return the norm of the difference, relative to the norm."""
    theirs = theirs.detach().numpy()
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def without_key_bias(name: str, ours: Any, theirs: Any) -> tuple[Any, Any]:
    """Leave out a bias that the softmax cancels.

    It adds the same to all scores of a query, so its gradient is 0 but for rounding, and AdamW
    makes steps of full size out of that.
    """
    if not name.endswith("qkv.bias"):
        return ours, theirs
    keys = slice(CONFIG.width, 2 * CONFIG.width)
    return np.delete(ours, keys), torch.from_numpy(np.delete(theirs.detach().numpy(), keys))


def lively(model: GPT2) -> GPT2:
    """Give every parameter a size at which its gradient matters."""
    rng = np.random.default_rng(1)
    for parameter in model.parameters():
        parameter.data[...] += rng.normal(0, 0.1, parameter.shape)
    return model


def test_logits_loss_and_every_gradient() -> None:
    model = lively(GPT2(CONFIG))
    weights = copy_of(model)
    x, y = batches()[0]
    logits, loss = torch_loss(weights, torch.from_numpy(x), torch.from_numpy(y))
    loss.backward()
    assert apart(model(x).numpy(), logits) < 1e-5
    ours = model(x, y)
    assert abs(ours.item() / loss.item() - 1) < 1e-5
    ours.backward()
    far = {
        name: distance
        for name, p in model.named_parameters()
        if not (distance := apart(p.grad, weights[name].grad)) < 1e-5
    }
    assert far == {}


def test_ten_steps_of_adamw() -> None:
    model = lively(GPT2(CONFIG))
    weights = copy_of(model)
    groups = [
        {"params": [w for w in weights.values() if w.ndim >= 2], "weight_decay": DECAY},
        {"params": [w for w in weights.values() if w.ndim < 2], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    ours = AdamW(model.named_parameters(), LR, BETAS, EPS, DECAY, decay=decays_matrices)
    losses = []
    for x, y in batches():
        ours.zero_grad()
        loss = model(x, y)
        loss.backward()
        ours.step(max_norm=1.0)
        theirs.zero_grad()
        expected = torch_loss(weights, torch.from_numpy(x), torch.from_numpy(y))[1]
        expected.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        theirs.step()
        losses.append(abs(loss.item() / expected.item() - 1))
    assert max(losses) < 1e-5
    far = {
        name: distance
        for name, p in model.named_parameters()
        if not (distance := apart(*without_key_bias(name, p.numpy(), weights[name]))) < 1e-5
    }
    assert far == {}


def test_weights_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 101, "n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 3}
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    for parameter in theirs.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "theirs")
    x = np.random.default_rng(0).integers(0, 101, (2, 32))

    def logits(model: Any) -> Any:
        with torch.no_grad():
            return model(torch.from_numpy(x)).logits

    ours = from_pretrained(tmp_path / "theirs", vocab_multiple=64)
    assert apart(ours(x).numpy(), logits(theirs)) < 1e-5

    save_pretrained(ours, tmp_path / "ours")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(logits(again), logits(theirs))

    prompt = x[:1, :5]
    expected = theirs.generate(torch.from_numpy(prompt), max_new_tokens=20, do_sample=False)
    assert generate(ours, prompt[0], 20, temperature=0) == expected[0, 5:].tolist()
