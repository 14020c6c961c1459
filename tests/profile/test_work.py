from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.kernels.attention.options import AttentionOptions
from tensorgrad.ops.work import product_dtype
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
        (
            lambda: tg.gated_linear(leaf(2, 3, 4), leaf(5, 4), leaf(5, 4)),
            "gated_linear",
            2 * 2 * 6 * 4 * 5,
        ),
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


def test_bytes_that_are_not_read_do_not_count() -> None:
    table, ids = leaf(100, 8), np.zeros(5, np.int64)
    found = recorded(lambda: tg.embedding(table, ids))
    assert found["embedding", "op"].nbytes == 2 * 5 * 8 * 4  # rows of the table, and the result
    x, scale = leaf(10, 20), Tensor(np.ones((10, 20), "float32"))
    found = recorded(lambda: x * scale)
    assert found["multiply", "backward"].nbytes == 3 * 800  # dy, scale, dx


def test_the_dtype_of_a_product_is_that_of_its_operands() -> None:
    targets = np.zeros(3, np.int64)
    x, weight = [Tensor(np.ones(s), requires_grad=True) for s in ((3, 4), (7, 4))]
    x, weight = x.astype("bfloat16"), weight.astype("bfloat16")
    found = recorded(lambda: tg.linear_cross_entropy(x, weight, targets))
    assert found["linear_cross_entropy", "op"].dtype == "bfloat16"
    with tg.autocast("bfloat16"):
        found = recorded(lambda: leaf(3, 4) @ leaf(4, 5))
    assert found["matmul", "op"].dtype == found["matmul", "backward"].dtype == "bfloat16"


def test_products_in_tf32_are_told_from_those_of_float32() -> None:
    x, rounded = np.zeros(3, np.float32), AttentionOptions(1.0, tf32=True)
    loss = SimpleNamespace(kernel="tf32")
    asked: list[Any] = ["tf32", rounded, loss]
    others: list[Any] = [None, "tiled", AttentionOptions(1.0)]
    assert {product_dtype(x, (), (x, each)) for each in asked} == {"tf32"}
    assert {product_dtype(x, (), (x, each)) for each in others} == {"float32"}
