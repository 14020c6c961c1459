from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.profile import Profiler
from tensorgrad.profile.recording import Range


def leaf(*shape: int) -> Tensor:
    return Tensor(np.ones(shape, "float32"), requires_grad=True)


def recorded(f: Any) -> dict[tuple[str, str], Range]:
    with Profiler() as found:
        f().sum().backward()
    return {(each.name, each.kind): each for each in found.recording.ranges}


@pytest.mark.parametrize(
    ("f", "name", "flops"),
    [
        (lambda: leaf(3, 4, 5) @ leaf(5, 6), "matmul", 2 * 12 * 5 * 6),
        (lambda: leaf(5) @ leaf(5), "matmul", 2 * 5),
        (lambda: tg.linear(leaf(3, 4), leaf(5, 4), leaf(5)), "linear", 2 * 3 * 4 * 5),
        (lambda: tg.einsum("ij,kj->ik", leaf(2, 3), leaf(4, 3)), "einsum", 2 * 2 * 3 * 4),
    ],
)
def test_products_and_their_gradients(f: Any, name: str, flops: int) -> None:
    found = recorded(f)
    assert found[name, "op"].flops == flops
    assert found[name, "backward"].flops == 2 * flops  # a product for each operand


def test_only_gradients_that_are_wanted_count() -> None:
    found = recorded(lambda: Tensor(np.ones((2, 3), "float32")) @ leaf(3, 4))
    assert found["matmul", "backward"].flops == 2 * 2 * 3 * 4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (3, 5)])
def test_attention_counts_pairs_that_a_mask_keeps(
    causal: bool, window: int | None, queries: int, keys: int
) -> None:
    q, k, v = leaf(2, 3, queries, 8), leaf(2, 3, keys, 8), leaf(2, 3, keys, 8)
    found = recorded(lambda: tg.attention(q, k, v, causal=causal, window=window))
    at = np.arange(queries)[:, None] + keys - queries
    other = np.arange(keys)
    kept = np.ones((queries, keys), bool)
    if causal:
        kept &= other <= at
    if window is not None:
        kept &= (other > at - window) & (other < at + window)
    flops = 4 * 2 * 3 * 8 * int(kept.sum())
    assert found["attention", "op"].flops == flops
    assert found["attention", "backward"].flops == 2.5 * flops


def test_the_fused_loss_computes_its_gradients_in_forward() -> None:
    targets = np.zeros(3, np.int64)
    found = recorded(lambda: tg.linear_cross_entropy(leaf(3, 4), leaf(7, 4), targets))
    assert found["linear_cross_entropy", "op"].flops == 3 * 2 * 3 * 4 * 7
    assert found["linear_cross_entropy", "backward"].flops == 0


def test_bytes_are_those_of_operands_and_results() -> None:
    x = leaf(10, 20)
    found = recorded(lambda: tg.exp(x))
    assert found["exp", "op"].nbytes == 2 * 800
    assert found["exp", "op"].flops == 0
    assert found["exp", "backward"].nbytes == 3 * 800  # dy, y, dx
    same = recorded(lambda: x * x)
    assert same["multiply", "op"].nbytes == 2 * 800  # x is read once
    w, b = leaf(20), leaf(20)
    both = recorded(lambda: tg.add_layer_norm(x, leaf(10, 20), w, b)[1])
    assert both["add_layer_norm", "op"].nbytes >= 4 * 800 + 160  # with both results
