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
