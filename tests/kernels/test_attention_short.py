"""The attention kernels for short sequences, on random inputs, against the NumPy path."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, random
from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16
from tensorgrad.kernels.attention import short as attention_short
from tensorgrad.kernels.attention import simple as attention_simple
from tensorgrad.kernels.attention.options import AttentionOptions
from tests.kernels.test_attention_sm90 import draw, passes
from tests.poisoned import poison_memory

pytestmark = pytest.mark.gpu

LENGTHS = [
    (1, 1),
    (5, 5),
    (16, 16),
    (24, 24),
    (32, 32),
    (33, 33),
    (48, 48),
    (64, 64),
    (7, 50),
    (40, 9),
]


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note which passes these kernels do."""
    array = backend.cupy.empty((1, 1, 1, 64), "float16")
    if not attention_short.supports((array, array, array), AttentionOptions(scale=1.0)):
        pytest.skip("needs a GPU of compute capability 8.0 or later")
    done: list[str] = []
    for name in ("forward", "backward"):
        own = getattr(attention_short, name)

        def noted(*arguments: Any, own: Any = own, name: str = name) -> Any:
            done.append(name)
            return own(*arguments)

        monkeypatch.setattr(attention_short, name, noted)
    return done


def compare(arrays: list[Any], function: Any, chosen: list[str]) -> None:
    """Check that both devices agree but for rounding, and two runs on the GPU in every bit."""
    got, again = (passes("cuda", arrays, function) for _ in range(2))
    assert chosen == ["forward", "backward"] * 2
    for one, two, expected in zip(got, again, passes("cpu", arrays, function), strict=True):
        assert one.tobytes() == two.tobytes()
        expected = expected.astype("float32")
        assert np.isfinite(one.astype("float32")).all()
        error = np.linalg.norm(one.astype("float32") - expected)
        size = np.linalg.norm(expected) + expected.size**0.5 / 8  # some gradients cancel to 0
        assert error <= 8e-3 * size


def dense(width: int, tq: int, tk: int, dtype: Any, heads: int = 3) -> list[Any]:
    q, kv = (5, heads, tq, width), (5, heads, tk, width)
    return draw(q, kv, kv, q, dtype=dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
@pytest.mark.parametrize("width", [8, 24, 32, 40, 64])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(
    lengths: tuple[int, int], width: int, dtype: Any, causal: bool, chosen: list[str]
) -> None:
    arrays = dense(width, *lengths, dtype)
    compare(arrays, lambda q, k, v: tg.attention(q, k, v, causal=causal), chosen)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 2, 17, 63])
def test_window(window: int, causal: bool, chosen: list[str]) -> None:
    compare(
        dense(64, 61, 64, bfloat16),
        lambda q, k, v: tg.attention(q, k, v, causal=causal, window=window),
        chosen,
    )


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(24, 24), (33, 61)])
@pytest.mark.parametrize("shape", ["all", "keys", "both", "one"])
def test_mask(
    shape: str, lengths: tuple[int, int], causal: bool, added: bool, chosen: list[str]
) -> None:
    tq, tk = lengths
    sizes = {"all": (5, 3, tq, tk), "keys": (5, 1, 1, tk), "both": (tq, tk), "one": (1, 1)}
    rng = np.random.default_rng(tq)
    mask: Any = rng.random(sizes[shape]) > 0.4
    mask[..., 0] = True
    if len(mask) > 1 and mask.shape[-2] > 1:
        mask[..., 1, :] = False  # a query without keys
    if added:
        mask = np.where(mask, 2 * rng.standard_normal(mask.shape), -np.inf).astype(np.float32)
    for width, dtype in ((64, bfloat16), (24, np.float16)):
        chosen.clear()
        compare(
            dense(width, *lengths, dtype),
            lambda q, k, v: tg.attention(
                q, k, v, Tensor(mask).to(q.device), causal=causal, dropout=0.1
            ),
            chosen,
        )


@pytest.mark.parametrize("added", [False, True])
def test_a_view_as_mask_with_a_window_and_a_scale(added: bool, chosen: list[str]) -> None:
    tq, tk = 41, 50
    rng = np.random.default_rng(3)
    base: Any = rng.random((5, 1, tk, 2 * tq)) > 0.4
    if added:
        base = np.where(base, rng.standard_normal(base.shape), -np.inf).astype(np.float32)

    def function(q: Any, k: Any, v: Any) -> Any:
        mask = Tensor(base).to(q.device).swapaxes(2, 3)[:, :, ::2]
        return tg.attention(q, k, v, mask, window=30, scale=0.3)

    compare(dense(40, tq, tk, bfloat16), function, chosen)


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
@pytest.mark.parametrize("lengths", [(24, 24), (32, 31), (33, 47), (64, 64), (64, 50)])
def test_dropout(lengths: tuple[int, int], dtype: Any, chosen: list[str]) -> None:
    for causal in (False, True):
        chosen.clear()
        compare(
            dense(64, *lengths, dtype),
            lambda q, k, v, causal=causal: tg.attention(q, k, v, causal=causal, dropout=0.3),
            chosen,
        )


@pytest.mark.parametrize("width", [32, 64])
def test_packed(width: int, chosen: list[str]) -> None:
    heads, steps = 4, 27
    qkv, dy = draw((3, steps, 3 * heads * width), (3, steps, heads * width), dtype=bfloat16)
    compare([qkv, dy], lambda x: tg.attention_packed(x, heads, causal=True), chosen)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
@pytest.mark.parametrize("steps", [1, 16, 27, 32, 33, 64])
@pytest.mark.parametrize("width", [8, 24, 32, 40, 64])
def test_rotation_in_the_kernels_has_the_bits_of_rotation_before(
    width: int, steps: int, dtype: Any, interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = 3
    qkv, dy = draw((4, steps, 3 * heads * width), (4, steps, heads * width), dtype=dtype)
    qkv, dy = (backend.to_device(each, "cuda") for each in (qkv, dy))
    angles = np.random.default_rng(0).uniform(-9, 9, (steps, 1, width // 2)).astype("float32")
    cos, sin = (Tensor(f(angles)).to("cuda") for f in (np.cos, np.sin))
    rotates, asked = attention_short.rotates, []

    def noted(*arguments: Any, inside: bool) -> bool:
        asked.append(rotates(*arguments))
        return inside and asked[-1]

    poison_memory(monkeypatch)
    found = []
    for inside in (True, False):
        monkeypatch.setattr(attention_short, "rotates", partial(noted, inside=inside))
        random.seed(1)
        x = Tensor(qkv, requires_grad=True)
        y = tg.attention_packed(
            x, heads, causal=True, dropout=0.1, angles=(cos, sin), interleaved=interleaved
        )
        y.backward(dy)
        found.append([y.numpy().tobytes(), backend.to_numpy(x.grad).tobytes()])
        assert np.isfinite(backend.to_numpy(x.grad).astype("float32")).all()
    assert asked == [True, True]
    assert found[0] == found[1]


def test_any_positive_scale(chosen: list[str]) -> None:
    arrays = dense(64, 30, 30, bfloat16)
    compare(arrays, lambda q, k, v: tg.attention(q, k, v, scale=0.5), chosen)


def test_gradients_from_views_that_are_not_aligned(chosen: list[str]) -> None:
    """The result may lie anywhere; q, k and v that do are for other kernels."""
    *inputs, _ = dense(32, 20, 20, bfloat16)
    (dy,) = draw((5, 3, 20, 33))

    def beside(q: Any, k: Any, v: Any) -> Any:
        return tg.concatenate([q[..., :1], tg.attention(q, k, v)], -1)

    compare([*inputs, dy], beside, chosen)


def test_what_these_kernels_are_not_for() -> None:
    array = backend.cupy.zeros((2, 4, 64, 64), "float16")
    few = array[:, :2]
    options = AttentionOptions(scale=1.0)
    assert attention_short.supports((array, array, array), options)
    assert not attention_short.supports((array, few, few), options)
    assert not attention_short.supports((array[..., 1:57],) * 3, options)
    assert not attention_short.supports((array[..., :60],) * 3, options)
    assert not attention_short.supports((array, array, array), AttentionOptions(scale=-1.0))
    long = backend.cupy.zeros((1, 1, 65, 64), "float16")
    assert not attention_short.supports((array[:1, :1], long, long), options)


def test_logsumexp() -> None:
    q, k, v = (backend.to_device(a, "cuda") for a in draw(*[(2, 3, 40, 64)] * 3))
    options = AttentionOptions(scale=0.125, after=0)
    own, other = (
        module.forward((q, k, v), options)[1] for module in (attention_short, attention_simple)
    )
    np.testing.assert_allclose(backend.to_numpy(own), backend.to_numpy(other), atol=2e-3)
