"""The adapters of CS336 that take and return PyTorch's tensors, against PyTorch itself."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from cs336 import basics, basics_2024, systems, training  # noqa: E402  they import PyTorch


def leaves(*shapes: tuple[int, ...]) -> list[Any]:
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def test_gradients_flow_to_features_and_weights() -> None:
    x, w1, w2, w3 = leaves((2, 3, 4), (6, 4), (4, 6), (6, 4))
    ours = basics.run_swiglu(4, 6, w1, w2, w3, x)
    theirs = (torch.nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
    torch.testing.assert_close(ours, theirs)
    tensors = (x, w1, w2, w3)
    found = torch.autograd.grad(ours.square().sum(), tensors)
    for one, other in zip(found, torch.autograd.grad(theirs.square().sum(), tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_saves_one_row_of_logsumexp(causal: bool) -> None:
    q, k, v = leaves((2, 8, 4), (2, 8, 4), (2, 8, 4))
    y = systems.get_flashattention_autograd_function_triton().apply(q, k, v, causal)
    scores = q @ k.mT / 2
    if causal:
        scores = scores.masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), -torch.inf)
    expected = scores.softmax(-1) @ v
    torch.testing.assert_close(y, expected)
    (saved,) = (t for t in y.grad_fn.saved_tensors if t.shape == (2, 8))
    torch.testing.assert_close(saved, scores.logsumexp(-1))
    found = torch.autograd.grad(y.square().sum(), (q, k, v))
    for one, other in zip(
        found, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_masks_of_the_two_years_mean_the_opposite() -> None:
    q, k, v = leaves((2, 3, 4), (2, 5, 4), (2, 5, 4))
    mask = torch.rand(3, 5) > 0.5
    mask[:, 0] = True
    ours = basics.run_scaled_dot_product_attention(q, k, v, mask)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        basics_2024.run_scaled_dot_product_attention(K=k, Q=q, V=v, mask=~mask), theirs
    )


def trained(optimizer_class: Any, model: Any, steps: int, optimizer: Any = None) -> Any:
    options = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = optimizer or optimizer_class(model.parameters(), **options)
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.rand(5, 3)).square().sum().backward()
        basics.run_gradient_clipping(model.parameters(), 0.5)
        optimizer.step()
    return optimizer


def model_of(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def test_adamw_steps_as_pytorchs() -> None:
    ours, theirs = model_of(0), model_of(0)
    trained(basics.get_adamw_cls(), ours, 10)
    trained(torch.optim.AdamW, theirs, 10)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer_class", [training.AdamW, torch.optim.AdamW])
@pytest.mark.parametrize("open_file", [False, True])
def test_training_goes_on_from_a_checkpoint(
    optimizer_class: Any, open_file: bool, tmp_path: Path
) -> None:
    model, whole = model_of(0), model_of(0)
    optimizer = trained(optimizer_class, model, 4)
    out: Any = io.BytesIO() if open_file else tmp_path / "checkpoint"
    basics.run_save_checkpoint(model, optimizer, 4, out)
    if open_file:
        out.seek(0)
    resumed = model_of(1)
    fresh = optimizer_class(resumed.parameters(), lr=0.05, betas=(0.8, 0.95), weight_decay=0.1)
    assert basics.run_load_checkpoint(out, resumed, fresh) == 4
    assert fresh.param_groups[0]["betas"] == (0.8, 0.95)
    trained(optimizer_class, resumed, 4, fresh)
    trained(optimizer_class, whole, 4, trained(optimizer_class, whole, 4))
    for one, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def test_batches_are_neighbours_from_all_places() -> None:
    seen = set()
    for _ in range(30):
        x, y = basics.run_get_batch(np.arange(12), 8, 4, "cpu")
        assert x.shape == y.shape == (8, 4)
        assert x.dtype == torch.int64
        assert torch.equal(x + 1, y)
        seen.update(x[:, 0].tolist())
    assert seen == set(range(8))


def reference_block(x: Any, w: dict[str, Any], heads: int, theta: float) -> Any:
    """The block of 2025, of PyTorch's ops."""
    batch, length, width = x.shape

    def normed(x: Any, weight: Any) -> Any:
        return torch.nn.functional.rms_norm(x, (width,), weight, 1e-5)

    def split(y: Any) -> Any:
        return y.view(batch, length, heads, -1).transpose(1, 2)

    def rotated(y: Any) -> Any:
        pairs = torch.view_as_complex(y.reshape(*y.shape[:-1], -1, 2))
        rates = theta ** (-torch.arange(pairs.shape[-1]) / pairs.shape[-1])
        turns = torch.exp(1j * torch.arange(length)[:, None] * rates)
        return torch.view_as_real(pairs * turns).flatten(-2)

    h = normed(x, w["ln1.weight"])
    q, k, v = (split(h @ w[f"attn.{name}_proj.weight"].T) for name in "qkv")
    y = torch.nn.functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
    x = x + y.transpose(1, 2).flatten(2) @ w["attn.output_proj.weight"].T
    h = normed(x, w["ln2.weight"])
    w1, w2, w3 = (w[f"ffn.w{number}.weight"] for number in (1, 2, 3))
    return x + (torch.nn.functional.silu(h @ w1.T) * (h @ w3.T)) @ w2.T


def test_the_language_model_of_2025_is_that_of_its_formulas() -> None:
    names = [f"attn.{name}_proj.weight" for name in ("q", "k", "v", "output")]
    shapes = dict.fromkeys(names, (8, 8)) | {"ln1.weight": (8,), "ln2.weight": (8,)}
    shapes |= {"ffn.w1.weight": (12, 8), "ffn.w2.weight": (8, 12), "ffn.w3.weight": (12, 8)}
    block = dict(zip(shapes, leaves(*shapes.values()), strict=True))
    embedding, head, norm = leaves((10, 8), (10, 8), (8,))
    weights = {f"layers.0.{name}": weight for name, weight in block.items()}
    weights |= {"token_embeddings.weight": embedding, "lm_head.weight": head}
    weights |= {"ln_final.weight": norm}
    ids = torch.tensor([[1, 5, 2, 9], [3, 3, 0, 7]])
    ours = basics.run_transformer_lm(10, 8, 8, 1, 2, 12, 100.0, weights, ids)
    x = reference_block(embedding[ids], block, 2, 100.0)
    theirs = torch.nn.functional.rms_norm(x, (8,), norm, 1e-5) @ head.T
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    tensors = list(weights.values())
    found = torch.autograd.grad(ours.square().mean(), tensors)
    expected = torch.autograd.grad(theirs.square().mean(), tensors)
    for name, one, other in zip(weights, found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, msg=name)
