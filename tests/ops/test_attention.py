"""Attention against a plain NumPy reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, gradcheck, random
from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16, float16
from tensorgrad.errors import ArgumentError, DtypeError, GradError, ShapeError
from tensorgrad.ops import attention_numpy
from tensorgrad.testing import Case, Ulps, check, spacing
from tests.ops import test_rotary as rotary
from tests.ops.test_dropout import attention_keep_mask

RNG = np.random.default_rng(11)
BOUND = Ulps(2, "terms")


def weights_of(
    q: Any,
    k: Any,
    mask: Any = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    keep: Any = 1,
) -> Any:
    """Return what each query weighs each value with."""
    tq, tk = q.shape[2], k.shape[2]
    scores = q @ repeated(k, q).swapaxes(-1, -2) * scale_of(q, scale)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    if causal:
        scores = np.where(np.tril(np.ones((tq, tk), bool), tk - tq), scores, -np.inf)
    if window is not None:
        distance = np.arange(tk) - np.arange(tk - tq, tk)[:, None]
        scores = np.where(abs(distance) < window, scores, -np.inf)
    largest = scores.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(largest == -np.inf, 0, largest))
    total = weights.sum(-1, keepdims=True)
    weights /= np.where(total == 0, 1, total)
    if dropout:
        random.seed(3)
        weights *= attention_keep_mask(weights.shape, dropout, like=q) / (1 - dropout)
    return weights * keep


def scale_of(q: Any, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def repeated(k: Any, q: Any) -> Any:
    """Return one head of keys or values for each head of queries."""
    return np.repeat(k, q.shape[1] // k.shape[1], axis=1)


def reference(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return weights_of(q, k, **options) @ repeated(v, q)


def magnitudes(q: Any, k: Any, v: Any, dy: Any, **options: Any) -> list[Any]:
    """Return the sums of the absolute values of the terms of y, dq, dk and dv."""
    weights, scale = weights_of(q, k, **options), scale_of(q, options.get("scale"))
    undropped = weights_of(q, k, **{**options, "dropout": 0, "keep": 1})
    q, dy = abs(q), abs(dy)
    y = weights @ abs(repeated(v, q))
    dweights = weights * (dy @ abs(repeated(v, q)).swapaxes(-1, -2))
    dscores = (dweights + undropped * (dy * y).sum(-1, keepdims=True)) * scale
    dk, dv = dscores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ dy
    groups = (*k.shape[:2], q.shape[1] // k.shape[1], *k.shape[2:])
    return [y, dscores @ abs(repeated(k, q)), *(a.reshape(groups).sum(2) for a in (dk, dv))]


def unpacked(qkv: Any, heads: int) -> Any:
    """Return (B, T, heads * D) as (B, heads, T, D)."""
    return qkv.reshape(*qkv.shape[:2], heads, qkv.shape[2] // heads).swapaxes(1, 2)


def packed(heads: Any) -> Any:
    """Return (B, heads, T, D) as (B, T, heads * D)."""
    batch, count, length, width = heads.shape
    return heads.swapaxes(1, 2).reshape(batch, length, count * width)


def packed_reference(qkv: Any, heads: int, kv_heads: int, **options: Any) -> Any:
    each = np.split(unpacked(qkv, heads + 2 * kv_heads), [heads, heads + kv_heads], axis=1)
    return packed(reference(*each, **options))


def packed_magnitudes(qkv: Any, dy: Any, heads: int, kv_heads: int, **options: Any) -> list[Any]:
    each = np.split(unpacked(qkv, heads + 2 * kv_heads), [heads, heads + kv_heads], axis=1)
    y, *grads = magnitudes(each[0], each[1], each[2], unpacked(dy, heads), **options)
    return [packed(y), packed(np.concatenate(grads, 1))]


def placed(options: dict[str, Any]) -> Callable[[Tensor], dict[str, Any]]:
    """Return what gives the options with the mask where a tensor is, copied there once."""

    @cache
    def on_device(device: str) -> dict[str, Any]:
        mask = options.get("mask")
        return options if mask is None else {**options, "mask": Tensor(mask).to(device)}

    return lambda like: on_device(like.device)


def case(
    q: tuple[int, int, int, int], kv_heads: int = 0, tk: int | None = None, **options: Any
) -> Case:
    batch, heads, tq, width = q
    on_device = placed(options)
    kv = (batch, kv_heads or heads, tq if tk is None else tk, width)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        random.seed(3)
        y: Tensor = tg.attention(q, k, v, **on_device(q))
        return y

    return Case(
        function,
        [q, kv, kv],
        lambda q, k, v: reference(q, k, v, **options),
        values=BOUND,
        magnitudes=lambda *arrays: magnitudes(*arrays, **options),
        terms=max(1, tq, kv[2]) * width,
        name="attention-" + "-".join(options),
    )


def packed_case(shape: tuple[int, int, int], heads: int, kv_heads: int, **options: Any) -> Case:
    on_device = placed(options)
    return Case(
        lambda qkv: tg.attention_packed(qkv, heads, kv_heads=kv_heads, **on_device(qkv)),
        [shape],
        lambda qkv: packed_reference(qkv, heads, kv_heads, **options),
        values=BOUND,
        magnitudes=lambda qkv, dy: packed_magnitudes(qkv, dy, heads, kv_heads, **options),
        terms=shape[1] * 8,
        name="attention_packed-" + "-".join(options),
    )


def rotary_case(
    shape: tuple[int, int, int], heads: int, kv_heads: int, angles: tuple[int, ...], **options: Any
) -> Case:
    """Return a case of packed queries and keys that are rotated, by angles of this shape."""
    values, parts = RNG.uniform(-9, 9, angles), heads + 2 * kv_heads
    interleaved = options.pop("interleaved", False)

    @cache
    def tables(dtype: str, device: str) -> tuple[Tensor, Tensor]:
        cos, sin = (Tensor(f(values)).astype(dtype).to(device) for f in (np.cos, np.sin))
        return cos, sin

    def function(qkv: Tensor) -> Tensor:
        angles = tables(rotary.wide(qkv), qkv.device)
        return tg.attention_packed(
            qkv, heads, kv_heads=kv_heads, angles=angles, interleaved=interleaved, **options
        )

    def turned(qkv: Any) -> Any:
        each = unpacked(qkv, parts).swapaxes(1, 2)
        return rotary.reference(each, values, heads + kv_heads, interleaved).reshape(qkv.shape)

    def turned_magnitudes(qkv: Any, dy: Any) -> list[Any]:
        y, dqkv = packed_magnitudes(turned(qkv), dy, heads, kv_heads, **options)
        # each element of a pair gets at most the length of both
        return [y, np.sqrt(dqkv**2 + turned_pairs(dqkv) ** 2)]

    def turned_pairs(dqkv: Any) -> Any:
        each = unpacked(dqkv, parts).swapaxes(1, 2)
        width = each.shape[-1]
        pairs = (*each.shape[:-1], *((width // 2, 2) if interleaved else (2, width // 2)))
        swapped = np.flip(each.reshape(pairs), -1 if interleaved else -2)
        return swapped.reshape(dqkv.shape)

    return Case(
        function,
        [shape],
        lambda qkv: packed_reference(turned(qkv), heads, kv_heads, **options),
        values=Ulps(4, "terms"),  # rotated queries and keys are rounded before the scores
        magnitudes=turned_magnitudes,
        terms=shape[1] * 8,
        name="attention_packed-rotary",
    )


def sequences(
    function: Any, q: Any, arrays: Any, lengths: Any, k_lengths: Any, dropout: float, options: Any
) -> list[Any]:
    """Return what a dense function gives for each sequence, joined.

    Arrays as long as the queries stand before and after those as long as the keys: q, k, v, dy.
    Dropout is cut from that of padded sequences.
    """
    k_lengths = lengths if k_lengths is None else k_lengths
    shape = len(lengths), q.shape[1], max(lengths), max(k_lengths)
    random.seed(3)
    keep = (
        attention_keep_mask(shape, dropout, like=q) / (1 - dropout) if dropout else np.ones(shape)
    )
    found, row, key = [], 0, 0
    for s, (tq, tk) in enumerate(zip(lengths, k_lengths, strict=True)):
        rows, keys = slice(row, row + tq), slice(key, key + tk)
        each = [a[keys if i in (1, 2) else rows] for i, a in enumerate(arrays)]
        heads = (a.swapaxes(0, 1)[None] for a in each)
        own: dict[str, Any] = {**options, "keep": keep[s : s + 1, :, :tq, :tk]}
        found.append([a[0].swapaxes(0, 1) for a in function(*heads, **own)])
        row, key = row + tq, key + tk
    return [np.concatenate(parts) for parts in zip(*found, strict=True)]


def varlen_case(
    lengths: list[int],
    heads: tuple[int, int],
    width: int,
    k_lengths: list[int] | None = None,
    **options: Any,
) -> Case:
    starts = [0, *np.cumsum(lengths).tolist()]
    k_starts = None if k_lengths is None else [0, *np.cumsum(k_lengths).tolist()]
    rows, keys = sum(lengths), sum(lengths if k_lengths is None else k_lengths)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        random.seed(3)
        return tg.attention_varlen(q, k, v, starts, k_starts, **options)

    kv = (keys, heads[1], width)
    dense = {name: value for name, value in options.items() if name != "dropout"}
    how = lengths, k_lengths, options.get("dropout", 0.0), dense
    return Case(
        function,
        [(rows, heads[0], width), kv, kv],
        lambda *qkv: sequences(lambda *a, **o: [reference(*a, **o)], qkv[0], qkv, *how)[0],
        values=BOUND,
        captured=False,  # lengths of the host are checked and copied
        magnitudes=lambda *arrays: sequences(magnitudes, arrays[0], arrays, *how),
        terms=max(lengths) * width,
        name="attention_varlen-" + "-".join(options),
    )


def masked(shape: tuple[int, ...], seed: int = 0) -> Any:
    """Return a mask that forbids a third of all, and one row altogether."""
    mask = np.random.default_rng(seed).random(shape) > 0.33
    mask[..., 0, :] = False
    return mask


PADDING = np.arange(33) < np.array([33, 5])[:, None, None, None]
ADDED = np.where(masked((3, 31, 33)), RNG.standard_normal((3, 31, 33)), -np.inf)
CASES = [
    case((2, 3, 5, 4)),
    case((2, 3, 5, 4), causal=True),
    case((1, 2, 129, 33), causal=True),
    case((1, 1, 300, 8), causal=True),
    case((1, 1, 1, 1)),
    *(case((1, 1, n, 8), causal=True) for n in (1023, 1025)),
    case((2, 6, 33, 8), kv_heads=2, causal=True),
    case((1, 4, 257, 16), kv_heads=1, causal=True),
    case((2, 3, 1, 4), tk=17, causal=True),
    case((2, 3, 7, 4), tk=17, causal=True),
    case((2, 3, 17, 4), tk=7, causal=True),
    case((2, 3, 7, 4), tk=17, scale=0.3),
    case((2, 3, 31, 4), tk=33, mask=PADDING),
    case((2, 3, 31, 4), tk=33, mask=PADDING, causal=True),
    case((2, 3, 31, 4), tk=33, mask=ADDED),
    case((2, 6, 31, 4), kv_heads=2, tk=33, mask=masked((2, 6, 31, 33)), causal=True),
    case((2, 3, 9, 4), mask=np.array(False)),
    case((2, 3, 31, 4), dropout=0.3),
    case((2, 6, 33, 4), kv_heads=2, dropout=0.5, causal=True, mask=PADDING),
    case((0, 3, 5, 4)),
    case((2, 3, 0, 4)),
    case((2, 3, 5, 4), tk=0),
    case((1, 2, 129, 64), causal=True),
    case((1, 4, 70, 64), kv_heads=2, tk=200, causal=True),
    case((1, 2, 200, 64), tk=70, causal=True, scale=0.2),
    case((1, 2, 65, 128), tk=31),
    case((2, 3, 33, 4), causal=True, window=5),
    case((2, 3, 33, 4), window=5),
    case((1, 2, 300, 8), causal=True, window=70),
    case((1, 2, 300, 8), window=2),
    case((1, 2, 5, 8), tk=200, causal=True, window=70),
    case((1, 2, 200, 8), tk=70, causal=True, window=40),
    case((1, 2, 200, 8), tk=70, window=200),
    case((2, 6, 31, 4), kv_heads=2, tk=33, mask=PADDING, causal=True, window=9, dropout=0.2),
    varlen_case([5, 1, 0, 70, 3], (2, 2), 4),
    *(varlen_case([n], (2, 2), 4) for n in (31, 33)),
    varlen_case([1023], (1, 1), 8, causal=True),
    varlen_case([1025], (1, 1), 8, causal=True),
    varlen_case([5, 1, 0, 70, 3], (4, 2), 8, causal=True),
    varlen_case([65, 2, 130], (4, 1), 8, causal=True, window=33),
    varlen_case([65, 2, 0, 4], (2, 2), 8, k_lengths=[3, 0, 5, 129], causal=True),
    varlen_case([33, 2, 48], (4, 2), 8, causal=True, dropout=0.4),
    varlen_case([33, 2], (3, 3), 64, k_lengths=[48, 17], dropout=0.4, scale=0.2),
    varlen_case([0], (2, 2), 8),
    packed_case((2, 5, 3 * 12), 3, 3),
    *(packed_case((1, n, 3 * 8), 1, 1, causal=True) for n in (31, 1023, 1025)),
    packed_case((2, 130, 3 * 12), 3, 3, causal=True, window=64),
    packed_case((1, 130, 4 * 128), 2, 1, causal=True),
    packed_case((2, 129, 3 * 12), 3, 3, causal=True),
    packed_case((2, 33, 8 * 4), 4, 2, causal=True, mask=PADDING),
    rotary_case((2, 5, 3 * 12), 1, 1, (5, 1, 6)),
    rotary_case((2, 33, 8 * 4), 4, 2, (33, 1, 2), causal=True, interleaved=True),
    rotary_case((2, 31, 4 * 16), 2, 1, (2, 31, 1, 8), window=7),
    rotary_case((1, 129, 3 * 64), 1, 1, (129, 1, 32), causal=True),
    rotary_case((2, 64, 6 * 64), 2, 2, (64, 1, 32), interleaved=True),
    rotary_case((0, 5, 36), 3, 3, (5, 1, 2)),
    packed_case((0, 5, 36), 3, 3),
    packed_case((2, 0, 36), 3, 3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tq", "tk"),
    [
        (2, 2, 1024, 1024),
        (4, 1, 1000, 1000),
        (2, 2, 1, 700),
        (3, 3, 333, 2049),
        (2, 1, 300, 129),
        (1, 1, 70, 8200),
    ],
)
def test_kernels_of_16_bits_agree_with_float32(
    heads: int, kv_heads: int, tq: int, tk: int, dtype: str, width: int, causal: bool
) -> None:
    rng = np.random.default_rng(tq)
    kept = np.dtype(dtype) if dtype == "float16" else bfloat16
    drawn = [
        2 * rng.standard_normal((2, length, count, width)).astype("float32").swapaxes(1, 2)
        for length, count in ((tq, heads), (tk, kv_heads), (tk, kv_heads), (tq, heads))
    ]
    arrays = [backend.to_device(a.astype(kept), "cuda") for a in drawn]

    def run(arrays: list[Any]) -> list[Any]:
        q, k, v = (Tensor(a, requires_grad=True) for a in arrays[:3])
        y = tg.attention(q, k, v, causal=causal)
        y.backward(arrays[3])
        return [y.numpy(), *(backend.to_numpy(t.grad) for t in (q, k, v))]

    got, again = run(arrays), run(arrays)
    for one, two in zip(got, again, strict=True):
        assert one.tobytes() == two.tobytes()
    for narrow, wide in zip(got, run([a.astype("float32") for a in arrays]), strict=True):
        error = np.linalg.norm(narrow.astype("float32") - wide)
        assert error <= 6e-3 * np.linalg.norm(wide)


def test_rows_with_nothing_to_attend_to_give_zeros_and_no_gradient() -> None:
    q, k, v = (Tensor(RNG.standard_normal((1, 1, 3, 4)), requires_grad=True) for _ in range(3))
    mask = np.array([[True, True, True], [False, False, False], [True, False, True]])
    y = tg.attention(q, k, v, mask)
    y.backward(np.ones(y.shape))
    assert np.isfinite(y.numpy()).all()
    np.testing.assert_array_equal(y.numpy()[0, 0, 1], np.zeros(4))
    for tensor in (q, k, v):
        assert tensor.grad is not None
        assert np.isfinite(tensor.grad).all()
    assert q.grad is not None
    np.testing.assert_array_equal(q.grad[0, 0, 1], np.zeros(4))


def test_forbidden_keys_may_hold_anything_finite() -> None:
    q, k, v = (RNG.standard_normal((1, 1, 2, 4)).astype("float32") for _ in range(3))
    mask = np.array([True, False])
    expected = tg.attention(Tensor(q), Tensor(k), Tensor(v), mask).numpy()
    k[:, :, 1], v[:, :, 1] = 1e30, -1e30
    got = tg.attention(Tensor(q), Tensor(k), Tensor(v), mask).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_large_scores_do_not_overflow() -> None:
    q = Tensor(np.full((1, 1, 2, 4), 1e4, "float32"), requires_grad=True)
    y = tg.attention(q, q, q)
    y.backward(np.ones(y.shape, "float32"))
    np.testing.assert_array_equal(y.numpy(), q.numpy())
    assert q.grad is not None
    assert np.isfinite(q.grad).all()


def test_a_large_bias_that_all_keys_share_changes_nothing() -> None:
    q = Tensor(RNG.standard_normal((1, 2, 3, 4)))
    expected = tg.attention(q, q, q).numpy()
    for bias in (-1e4, 800.0, 1e4):
        found = tg.attention(q, q, q, np.full((3, 3), bias)).numpy()
        # beside 1e4 scores are rounded to 1e4 * 2^-53
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-11)


def test_logsumexp() -> None:
    q, k = RNG.standard_normal((2, 6, 9, 4)), RNG.standard_normal((2, 3, 7, 4))
    y, got = tg.attention(q, k, k, causal=True, scale=0.7, window=4, return_logsumexp=True)
    scores = 0.7 * q @ np.repeat(k, 2, 1).swapaxes(-1, -2)
    distance = np.arange(7) - np.arange(-2, 7)[:, None]
    scores = np.where((distance <= 0) & (distance > -4), scores, -np.inf)
    with np.errstate(divide="ignore"):  # the first two queries see nothing
        expected = np.log(np.exp(scores).sum(-1))
    np.testing.assert_allclose(got.numpy(), expected)
    assert np.isneginf(got.numpy()[:, :, :2]).all()
    np.testing.assert_array_equal(
        y.numpy(), tg.attention(q, k, k, None, causal=True, scale=0.7, dropout=0, window=4).numpy()
    )
    half, empty = Tensor(np.ones((1, 1, 2, 3), "float16")), Tensor(np.ones((1, 1, 0, 3), "float16"))
    _, narrow = tg.attention(half, half, half, return_logsumexp=True)
    assert narrow.dtype == np.float32
    _, nothing = tg.attention(half, empty, empty, return_logsumexp=True)
    assert np.isneginf(nothing.numpy()).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_lengths_may_live_beside_the_tensors(device: str) -> None:
    q = Tensor(RNG.standard_normal((9, 2, 4))).to(device)
    expected = tg.attention_varlen(q, q, q, [0, 3, 9], causal=True).numpy()
    starts = backend.to_device(np.array([0, 3, 9], "int32"), device)
    for longest in (None, 6, 100):
        y = tg.attention_varlen(q, q, q, starts, max_length=longest, causal=True)
        np.testing.assert_array_equal(y.numpy(), expected)


def test_the_result_is_laid_out_for_the_projection_that_follows() -> None:
    q = Tensor(np.ones((2, 3, 5, 4)))
    y = tg.attention(q, q, q).numpy().swapaxes(1, 2)
    assert y.flags.c_contiguous


def test_assigning_to_a_mask_before_backward_is_noticed() -> None:
    q = Tensor(np.ones((1, 1, 3, 2)), requires_grad=True)
    mask = Tensor(np.zeros((3, 3)))
    y = tg.attention(q, q, q, mask)
    mask[0, 0] = 1.0
    with pytest.raises(GradError, match=r"attention needs an array .* assigned to after"):
        y.backward(np.ones(y.shape))


def test_arguments_that_do_not_fit() -> None:
    def tensor(*shape: int, dtype: str = "float32") -> Tensor:
        return Tensor(np.ones(shape, dtype))

    q = tensor(2, 4, 5, 8)
    with pytest.raises(ShapeError, match=r"q has shape \(4, 5, 8\), expected \(B, H, Tq, D\)"):
        tg.attention(tensor(4, 5, 8), q, q)
    with pytest.raises(ShapeError, match=r"shape \(2, 4, 5, 7\), expected \(..., Hkv, Tk, 8\)"):
        tg.attention(q, tensor(2, 4, 5, 7), q)
    with pytest.raises(ShapeError, match=r"v has shape \(2, 4, 6, 8\), expected \(..., 4, 5, Dv"):
        tg.attention(q, q, tensor(2, 4, 6, 8))
    with pytest.raises(ShapeError, match="got 4 query heads and 3 heads of keys and values"):
        tg.attention(q, tensor(2, 3, 5, 8), tensor(2, 3, 5, 8))
    with pytest.raises(ShapeError, match="expected heads of width 1 or more"):
        tg.attention(tensor(2, 4, 5, 0), tensor(2, 4, 5, 0), tensor(2, 4, 5, 0))
    with pytest.raises(ShapeError, match=r"mask has shape \(5, 6\), expected one that broadcasts"):
        tg.attention(q, q, q, np.ones((5, 6), bool))
    with pytest.raises(DtypeError, match="mask has dtype int64, expected bool or a float"):
        tg.attention(q, q, q, np.ones((5, 5), "int64"))
    with pytest.raises(DtypeError, match="k has dtype float64, expected float32 like q"):
        tg.attention(q, tensor(2, 4, 5, 8, dtype="float64"), q)
    with pytest.raises(ShapeError, match=r"mask has shape \(5, 6\), expected one that broadcasts"):
        tg.attention(q, q, q, Tensor(np.ones((5, 6), "float32"), requires_grad=True))
    with pytest.raises(ShapeError, match=r"k has shape \(3, 4, 5, 8\), expected \(2, 4, 5, 8\)"):
        tg.attention(q, tensor(3, 4, 5, 8), tensor(3, 4, 5, 8))
    with pytest.raises(ArgumentError, match="return_logsumexp is True, expected False with a mask"):
        tg.attention(q, q, tensor(2, 4, 5, 3), return_logsumexp=True)
    with pytest.raises(ArgumentError, match=r"dropout is 1\.0, expected 0 <= dropout < 1"):
        tg.attention(q, q, q, dropout=1.0)
    with pytest.raises(ShapeError, match=r"qkv has shape \(2, 5, 35\), expected \(B, T, 9 \* D\)"):
        tg.attention_packed(tensor(2, 5, 35), 3)
    with pytest.raises(ArgumentError, match="window is 0, expected 1 or more"):
        tg.attention(q, q, q, window=0)


def angles_of(length: int, half: int, device: str, heads: int = 1) -> tuple[Tensor, Tensor]:
    values = np.random.default_rng(1).uniform(-9, 9, (length, heads, half)).astype("float32")
    cos, sin = (Tensor(f(values)).to(device) for f in (np.cos, np.sin))
    return cos, sin


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("shape", "heads", "kv_heads", "options"),
    [
        ((2, 7, 3 * 12), 3, 3, {"causal": True, "interleaved": True}),
        ((3, 24, 24 * 64), 8, 8, {"dropout": 0.3}),
        ((3, 61, 6 * 64), 2, 2, {"causal": True, "mask": True}),
        ((3, 64, 6 * 32), 2, 2, {"interleaved": True}),
        ((2, 64, 8 * 64), 4, 2, {"causal": True}),
        ((2, 33, 6 * 64), 2, 2, {"causal": True, "each_head": True}),
        ((2, 130, 6 * 64), 2, 2, {"causal": True, "mask": True, "dropout": 0.2}),
        ((2, 300, 6 * 64), 2, 2, {"window": 70, "interleaved": True}),
        ((1, 1000, 4 * 128), 2, 1, {"causal": True}),
        ((0, 5, 36), 3, 3, {}),
        ((2, 0, 36), 3, 3, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_rotated_queries_and_keys_have_the_bits_of_rotary_before(
    shape: Any, heads: int, kv_heads: int, options: dict[str, Any], dtype: str, overwrite: bool,
    device: str,
) -> None:  # fmt: skip
    rng = np.random.default_rng(0)
    parts, options = heads + 2 * kv_heads, dict(options)
    interleaved = options.pop("interleaved", False)
    width = shape[2] // parts
    if options.get("mask"):
        mask = rng.random((shape[0], 1, shape[1], shape[1])) > 0.3
        options["mask"] = Tensor(mask).to(device)
    each_head = heads + kv_heads if options.pop("each_head", False) else 1
    angles = angles_of(shape[1], width // 2, device, each_head)
    qkv, dy = (
        backend.to_device(
            rng.standard_normal((*shape[:2], channels)).astype(tg.dtypes.as_dtype(dtype)), device
        )
        for channels in (shape[2], heads * width)
    )

    def run(fused: bool) -> list[bytes]:
        random.seed(3)
        x = Tensor(qkv, requires_grad=True)
        rotated = x * 1  # an array that may be overwritten
        each: dict[str, Any] = dict(options)
        if fused:
            each |= {"angles": angles, "interleaved": interleaved, "overwrite": overwrite}
        else:
            separated = rotated.reshape(*shape[:2], parts, width)
            rotated = tg.rotary(separated, *angles, heads=heads + kv_heads, interleaved=interleaved)
            rotated = rotated.reshape(shape)
        before = rotated.numpy().tobytes()
        y = tg.attention_packed(rotated, heads, kv_heads=kv_heads, **each)
        assert overwrite or not fused or rotated.numpy().tobytes() == before
        y.backward(dy)
        assert x.grad is not None
        return [y.numpy().tobytes(), backend.to_numpy(x.grad).tobytes()]

    assert run(True) == run(False)


@pytest.mark.parametrize("amp", [False, True])
def test_rotation_beside_a_mask_that_requires_a_gradient_or_autocast(amp: bool) -> None:
    rng = np.random.default_rng(0)
    qkv, bias = rng.standard_normal((2, 5, 24)).astype("float32"), np.ones((5, 5), "float32")
    angles = angles_of(5, 2, "cpu")
    found = []
    for fused in (True, False):
        x, mask = Tensor(qkv, requires_grad=True), Tensor(bias, requires_grad=not amp)
        rotated, options = x, {"angles": angles, "overwrite": True} if fused else {}
        if not fused:
            rotated = tg.rotary(x.reshape(2, 5, 6, 4), *angles, heads=4).reshape(x.shape)
        with tg.autocast("bfloat16", enabled=amp):
            y = tg.attention_packed(rotated, 2, mask=mask, **options)  # type: ignore[arg-type]
        y.astype("float32").sum().backward()
        assert y.dtype == ("bfloat16" if amp else "float32")
        found.append([each.numpy().tobytes() for each in (y, Tensor(x.grad))])
        np.testing.assert_array_equal(x.data, qkv)
    assert found[0] == found[1]


def test_assigning_to_angles_before_backward_is_noticed() -> None:
    qkv, angles = Tensor(np.ones((1, 3, 12)), requires_grad=True), angles_of(3, 2, "cpu")
    y = tg.attention_packed(qkv, 1, angles=angles)
    angles[1][0] = 1.0
    with pytest.raises(GradError, match=r"attention_packed needs an array .* assigned to after"):
        y.backward(np.ones(y.shape))


@pytest.mark.parametrize(
    ("shape", "angles", "error", "message"),
    [
        ((2, 5, 36), np.ones(2), ArgumentError, "angles is array.*, expected a pair: cosines and"),
        ((2, 5, 36), (np.ones(2),), ArgumentError, "angles is .*, expected a pair: cosines and"),
        ((2, 5, 27), (np.ones(1), np.ones(1)), ShapeError,
         r"attention_packed: qkv has shape \(2, 5, 9, 3\), expected \(..., H, D\), D even"),
        ((2, 5, 36), (np.ones(2), np.ones(3)), ShapeError,
         r"attention_packed: sin has shape \(3,\), .* broadcasts to \(2, 5, 6, 2\)"),
        ((2, 5, 36), (np.ones(2, int), np.ones(2)), DtypeError,
         "cosines has dtype int64, expected a"),
    ],
)  # fmt: skip
def test_angles_that_do_not_fit(shape: Any, angles: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        tg.attention_packed(Tensor(np.ones(shape)), 3, angles=angles)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_short_sequences_together_are_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    q, k, v, dy = (
        tg.tensor(RNG.standard_normal((5, heads, steps, 4)), dtype)
        for heads, steps in ((4, 6), (2, 7), (2, 7), (4, 6))
    )
    mask = np.arange(7) < RNG.integers(0, 8, (5, 1, 1, 1))
    found = []
    for short in (0, 1 << 14):
        monkeypatch.setattr(attention_numpy, "_SHORT", short)
        random.seed(3)
        one, two, three = (Tensor(x.data, requires_grad=True) for x in (q, k, v))
        y, logsumexp = tg.attention(
            one, two, three, mask, causal=True, window=5, dropout=0.2, return_logsumexp=True
        )
        y.backward(dy.data)
        found.append([y.data, logsumexp.data, one.grad, two.grad, three.grad])
    for alone, together in zip(*found, strict=True):
        np.testing.assert_array_equal(alone, together)
    assert found[0][0].strides == found[1][0].strides


def test_sequences_that_do_not_fit() -> None:
    q = Tensor(np.ones((5, 4, 8), "float32"))
    k = Tensor(np.ones((6, 2, 8), "float32"))
    run = tg.attention_varlen
    with pytest.raises(ShapeError, match=r"q has shape \(1, 5, 4, 8\), expected \(total, H, D\)"):
        run(q[None], q, q, [0, 5])
    with pytest.raises(ShapeError, match=r"k has shape \(5, 4, 7\), expected \(keys, Hkv, 8\)"):
        run(q, q[:, :, :7], q, [0, 5])
    with pytest.raises(ShapeError, match=r"v has shape \(4, 4, 8\), expected \(5, 4, 8\) like k"):
        run(q, q, q[1:], [0, 5])
    with pytest.raises(ShapeError, match="k has 6 rows, expected 5 like q"):
        run(q, k, k, [0, 5])
    with pytest.raises(ShapeError, match=r"k_starts has shape \(3,\), expected \(2,\) like starts"):
        run(q, k, k, [0, 5], [0, 2, 6])
    for starts in ([0, 4], [1, 5], [0, 3, 2, 5]):
        with pytest.raises(ShapeError, match=r"starts is .*, expected to rise from 0 to 5"):
            run(q, q, q, starts)
    for odd in ([], [[0, 5]]):
        with pytest.raises(ShapeError, match=r"starts has shape .*, expected \(sequences \+ 1,\)"):
            run(q, q, q, np.array(odd, int))
    with pytest.raises(DtypeError, match="starts has dtype float64, expected integers"):
        run(q, q, q, [0.0, 5.0])
    with pytest.raises(ArgumentError, match="max_length is 2, expected at least 3"):
        run(q, q, q, [0, 2, 5], max_length=2)
    with pytest.raises(ArgumentError, match="max_k_length is 3, expected at least 4"):
        run(q, k, k, [0, 2, 5], [0, 2, 6], max_k_length=3)
    with pytest.raises(ArgumentError, match="max_length is 0, expected 1 or more"):
        run(q, q, q, [0, 5], max_length=0)
    with pytest.raises(ArgumentError, match=r"heads is 4\.0, expected an integer"):
        tg.attention_packed(q[None].reshape(1, 5, 32), 4.0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"kv_heads is 2\.0, expected an integer"):
        tg.attention_packed(q[None].reshape(1, 5, 32), 4, kv_heads=2.0)  # type: ignore[arg-type]
    random.seed(4)
    longer = run(q, q, q, [0, 2, 5], max_length=9, dropout=0.5).numpy()
    random.seed(4)
    kept = attention_keep_mask((2, 4, 9, 9), 0.5, like=q.data)  # sequences of the given length
    rows = [kept[0, :, :2, :2], kept[1, :, :3, :3]]
    weights = [2 * row.mean(-1).T for row in rows]  # all scores are equal
    np.testing.assert_allclose(longer, np.concatenate(weights)[..., None] * np.ones(8), 1e-6)
    empty = run(q[:0], q[:0], q[:0], [0])
    assert empty.shape == (0, 4, 8)


def in_numpys_16_bits(dtype: Any, *arrays: Any) -> Any:
    """Return attention as NumPy computes it where every result is of 16 bits."""
    q, k, v = (array.astype(dtype) for array in arrays)
    scores = (q @ k.swapaxes(-1, -2)).astype(dtype) * dtype.type(1 / math.sqrt(q.shape[-1]))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True, dtype="float32").astype(dtype)
    return (weights @ v).astype(dtype)


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 2, 129, 64)])
def test_the_bound_is_tight_beside_numpys_16_bits(shape: Any, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(dtype).astype("float64") for _ in range(3))
    exact, size = reference(q, k, v), magnitudes(q, k, v, np.ones(shape))[0]
    error = np.abs(in_numpys_16_bits(dtype, q, k, v).astype("float64") - exact)
    assert 2.5 * (error / spacing(size, dtype)).max() >= BOUND.count


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_learned_bias_value_width_and_broadcast_batch(
    causal: bool, kv_heads: int, device: str
) -> None:
    rng = np.random.default_rng(5)
    shapes = (3, 4, 5, 8), (kv_heads, 7, 8), (1, kv_heads, 7, 6), (4, 1, 7)
    q, k, v, bias = (tg.tensor(rng.standard_normal(shape), device=device) for shape in shapes)
    keys, values = (
        np.repeat(x.numpy().reshape(1, kv_heads, 7, -1), 4 // kv_heads, 1) for x in (k, v)
    )
    scores = q.numpy() @ keys.swapaxes(2, 3) / 8**0.5 + bias.numpy()
    if causal:
        scores = np.where(np.tri(5, 7, 2, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ values
    bias.requires_grad = True
    np.testing.assert_allclose(
        tg.attention(q, k, v, bias, causal=causal).numpy(), expected, rtol=1e-10, atol=1e-12
    )
    gradcheck(lambda q, k, v, bias: tg.attention(q, k, v, bias, causal=causal), [q, k, v, bias])


def test_learned_bias_of_packed_operands() -> None:
    packed, bias = RNG.standard_normal((2, 3, 8 * 4)), RNG.standard_normal((3, 3))
    expected = tg.attention_packed(packed, 4, kv_heads=2, mask=bias, causal=True).numpy()
    learned = tg.attention_packed(
        packed, 4, kv_heads=2, mask=Tensor(bias, requires_grad=True), causal=True
    )
    np.testing.assert_allclose(learned.numpy(), expected, atol=1e-12)


def test_autocast_casts_the_operands() -> None:
    q = Tensor(RNG.standard_normal((1, 2, 3, 4)).astype("float32"))
    packed = q.reshape(1, 2, 12)
    with tg.autocast("bfloat16"):
        assert tg.attention(q, q, q).dtype == tg.attention_packed(packed, 2).dtype == "bfloat16"
    assert tg.attention(q, q, q).dtype == tg.attention_packed(packed, 2).dtype == "float32"


def test_learned_bias_with_a_query_without_keys() -> None:
    q = Tensor(RNG.standard_normal((1, 2, 3, 4)), requires_grad=True)
    bias = np.zeros((3, 3))
    bias[1] = -np.inf
    learned = Tensor(bias, requires_grad=True)
    y = tg.attention(q, q, q, learned)
    np.testing.assert_allclose(y.numpy(), tg.attention(q, q, q, bias).numpy(), atol=1e-12)
    y.sum().backward()
    assert (y.numpy()[:, :, 1] == 0).all()
    for tensor in (learned, q):
        assert tensor.grad is not None
        assert np.isfinite(tensor.grad).all()
