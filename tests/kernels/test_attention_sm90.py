"""The attention kernels for Hopper, on random inputs, against the NumPy path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, random
from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16
from tensorgrad.kernels.attention import sm90 as attention_sm90
from tensorgrad.kernels.attention.options import AttentionOptions
from tests.kernels.hopper import hopper
from tests.poisoned import poison_memory

pytestmark = [pytest.mark.gpu, hopper]


def draw(*shapes: tuple[int, ...], dtype: Any = bfloat16) -> list[Any]:
    rng = np.random.default_rng(sum(map(sum, shapes)))
    return [(1.5 * rng.standard_normal(shape)).astype("float32").astype(dtype) for shape in shapes]


def passes(device: str, arrays: list[Any], function: Any) -> list[Any]:
    """Return the result and the gradients, the last array being the result's gradient."""
    random.seed(5)
    *inputs, dy = (backend.to_device(array, device) for array in arrays)
    tensors = [Tensor(array, requires_grad=True) for array in inputs]
    y = function(*tensors)
    y.backward(dy)
    return [y.numpy(), *(backend.to_numpy(tensor.grad) for tensor in tensors)]


def compare(arrays: list[Any], function: Any) -> None:
    """Check that both devices agree but for rounding, and two runs on the GPU in every bit."""
    got, again = (passes("cuda", arrays, function) for _ in range(2))
    for one, two, expected in zip(got, again, passes("cpu", arrays, function), strict=True):
        assert one.tobytes() == two.tobytes()
        expected = expected.astype("float32")
        assert np.isfinite(one.astype("float32")).all()
        error = np.linalg.norm(one.astype("float32") - expected)
        assert error <= 8e-3 * np.linalg.norm(expected) + 1e-3


def dense(width: int, heads: int, kv_heads: int, tq: int, tk: int, dtype: Any) -> list[Any]:
    q, kv = (2, heads, tq, width), (2, kv_heads, tk, width)
    return draw(q, kv, kv, q, dtype=dtype)


def force_ordered(monkeypatch: pytest.MonkeyPatch, team: int) -> None:
    """Use the ordered kernel with teams of this size, in memory full of NaN."""
    attention_sm90._geometry_of.cache_clear()
    poison_memory(monkeypatch)
    monkeypatch.setattr(attention_sm90, "_best_team", lambda *_: (team, 0.0))
    monkeypatch.setattr(attention_sm90._Geometry, "backward_keys", None)  # not the other kernels


@pytest.fixture
def other_geometry() -> Iterator[None]:
    """Forget the launches of a test that changed how they are chosen."""
    yield
    attention_sm90._geometry_of.cache_clear()


SIZES = [(2, 2, 257, 257), (4, 1, 100, 333), (2, 1, 300, 129)]
WIDTHS = [8, 32, 40, 64, 96, 128, 200, 256]


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("size", SIZES)
def test_causal(size: tuple[int, int, int, int], width: int, dtype: Any) -> None:
    compare(dense(width, *size, dtype), lambda q, k, v: tg.attention(q, k, v, causal=True))


@pytest.mark.parametrize("tq", [1, 130, 300])
@pytest.mark.parametrize("width", [104, 128, 200, 256])
def test_pairs_of_blocks_that_share_keys(width: int, tq: int) -> None:
    compare(dense(width, 2, 1, tq, 2100, bfloat16), tg.attention)


@pytest.mark.usefixtures("other_geometry")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [40, 64, 96, 128])
@pytest.mark.parametrize("team", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "size",
    [(2, 2, 700, 700), (4, 2, 641, 641), (2, 1, 650, 900), (1, 1, 1290, 650), (2, 1, 1000, 699)],
)
def test_ordered_backward(
    size: tuple[int, int, int, int],
    team: int,
    width: int,
    causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force_ordered(monkeypatch, team)
    dtype = np.float16 if team == 2 else bfloat16
    compare(dense(width, *size, dtype), lambda q, k, v: tg.attention(q, k, v, causal=causal))


@pytest.mark.usefixtures("other_geometry")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [40, 64, 128])
@pytest.mark.parametrize("team", [1, 4])
def test_ordered_backward_of_packed_arrays(
    team: int, width: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_ordered(monkeypatch, team)
    compare(
        draw((2, 515, 8 * width), (2, 515, 4 * width)),
        lambda qkv: tg.attention_packed(qkv, 4, kv_heads=2, causal=causal),
    )


@pytest.mark.usefixtures("other_geometry")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(32, 12, 1024, 64), (8, 16, 2047, 128)])
def test_ordered_backward_of_a_large_batch(
    shape: tuple[int, ...], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the two launches; each SM has several heads, and runs are equal."""
    draws = backend.cupy.random.default_rng(3)
    arrays = [
        Tensor(draws.standard_normal(shape, "float32")).astype(bfloat16).data for _ in range(4)
    ]

    def gradients() -> list[Any]:
        q, k, v = (Tensor(array, requires_grad=True) for array in arrays[:3])
        tg.attention(q, k, v, causal=causal).backward(arrays[3])
        return [q.grad, k.grad, v.grad]

    def bits(array: Any) -> Any:
        return array.view("int16")

    found = gradients()
    for _ in range(5):
        for one, two in zip(found, gradients(), strict=True):
            assert (bits(one) == bits(two)).all()
    attention_sm90._geometry_of.cache_clear()
    monkeypatch.setattr(attention_sm90._Geometry, "ordered", None)
    for one, expected in zip(found, gradients(), strict=True):
        one, expected = (Tensor(array).astype("float32").data for array in (one, expected))
        assert float(abs(one - expected).max()) <= 2e-2 * float(abs(expected).max())
        assert float(((one - expected) ** 2).sum()) <= 4e-5 * float((expected**2).sum())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("window", [None, 1, 70, 200])
def test_window(window: int | None, width: int, causal: bool) -> None:
    compare(
        dense(width, 2, 1, 513, 700, bfloat16),
        lambda q, k, v: tg.attention(q, k, v, causal=causal, window=window),
    )


@pytest.mark.parametrize("width", [40, 64, 128, 256])
@pytest.mark.parametrize("shape", [(2, 1, 1, 333), (2, 4, 100, 333), (100, 333), (1, 1)])
@pytest.mark.parametrize("added", [False, True])
def test_mask(added: bool, shape: tuple[int, ...], width: int) -> None:
    rng = np.random.default_rng(1)
    mask: Any = rng.random(shape) > 0.3
    if added:
        mask = np.where(mask, rng.standard_normal(shape), -3e38).astype("float32")

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = Tensor(backend.to_device(mask, q.device))
        return tg.attention(q, k, v, own, causal=not added)

    compare(dense(width, 4, 2, 100, 333, bfloat16), function)


keys = np.arange(733)
KEY_MASKS = {  # which keys the queries of two sequences see
    "padding": keys < np.array([[583], [733]]),
    "padding before": keys >= np.array([[200], [0]]),
    "nothing seen": keys < np.array([[0], [300]]),
    "holes": (keys // 140 % 2 == 1)[None],
    "one seen": keys == np.array([[0], [700]]),
    "random": np.random.default_rng(2).random((2, 733)) > 0.3,
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("width", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("seen", KEY_MASKS.values(), ids=KEY_MASKS)
def test_key_mask(seen: Any, width: int, dropout: float, causal: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = Tensor(backend.to_device(seen[:, None, None], q.device))
        return tg.attention(q, k, v, mask, causal=causal, dropout=dropout)

    compare(dense(width, 4, 2, 200, 733, bfloat16), function)


@pytest.mark.parametrize("columns", [64, 80, 128])
@pytest.mark.parametrize("keys", [1, 77, 733, 40_000])
def test_tiles_of_a_key_mask(keys: int, columns: int) -> None:
    seen = np.random.default_rng(keys).random((3, keys)) > 0.1
    seen[0, : keys // 2] = False
    seen[1] = True
    seen[2] = np.arange(keys) // 300 % 3 == 1
    bias = backend.to_device(np.where(seen, 0, -np.inf).astype("float32"), "cuda")
    options = AttentionOptions(scale=1.0, bias=bias[:, None, None])
    tiles, bits = map(backend.to_numpy, attention_sm90._key_mask(options, columns))
    padded = np.zeros((3, tiles.shape[1] * columns), bool)
    padded[:, :keys] = seen
    np.testing.assert_array_equal(np.packbits(padded, 1, "little").reshape(bits.shape), bits)
    counts = padded.reshape(3, -1, columns).sum(2)
    exist = np.minimum(columns, keys - columns * np.arange(tiles.shape[1]))
    entries = np.where(counts > 0, 2 * np.arange(tiles.shape[1]) + (counts == exist), -1)
    np.testing.assert_array_equal(tiles, np.maximum.accumulate(entries, 1))


@pytest.mark.parametrize("width", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("size", [(2, 2, 128, 256), (4, 2, 100, 333), (1, 1, 130, 77)])
@pytest.mark.parametrize("window", [None, 70])
def test_dropout(window: int | None, size: tuple[int, int, int, int], width: int) -> None:
    compare(
        dense(width, *size, bfloat16),
        lambda q, k, v: tg.attention(q, k, v, causal=True, dropout=0.3, window=window),
    )


@pytest.mark.parametrize("tk", [128, 77, 72])
def test_which_weights_are_dropped(tk: int) -> None:
    q, k, v, _ = dense(128, 1, 1, 70, tk, np.float16)
    v[...] = np.eye(tk, 128)

    def run(device: str) -> Any:
        random.seed(8)
        own = [Tensor(a).to(device) for a in (q, k, v)]
        return tg.attention(own[0], own[1], own[2], scale=0.01, dropout=0.5).numpy() == 0

    np.testing.assert_array_equal(run("cuda"), run("cpu"))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_scale(scale: float) -> None:
    compare(dense(64, 2, 2, 100, 200, bfloat16), lambda q, k, v: tg.attention(q, k, v, scale=scale))


LENGTHS = [(100, 1, 0, 300, 64), (256, 128), (3, 3, 3, 700), (0, 0, 5)]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("width", [40, 64, 128, 256])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_sequences(lengths: tuple[int, ...], width: int, dropout: float) -> None:
    total, starts = sum(lengths), np.cumsum([0, *lengths])
    kv = (total, 2, width)
    compare(
        draw((total, 4, width), kv, kv, (total, 4, width)),
        lambda q, k, v: tg.attention_varlen(q, k, v, starts, causal=True, dropout=dropout),
    )


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("width", [64, 128])
def test_sequences_whose_keys_have_other_lengths(width: int, window: int | None) -> None:
    starts, k_starts = np.array([0, 90, 100, 100, 300]), np.array([0, 200, 200, 220, 333])
    kv = (333, 2, width)
    compare(
        draw((300, 4, width), kv, kv, (300, 4, width)),
        lambda q, k, v: tg.attention_varlen(q, k, v, starts, k_starts, causal=True, window=window),
    )


@pytest.mark.parametrize("width", [40, 96, 128])
def test_packed(width: int) -> None:
    compare(
        draw((2, 200, 8 * width), (2, 200, 4 * width)),
        lambda qkv: tg.attention_packed(qkv, 4, kv_heads=2, causal=True, window=130),
    )


@pytest.mark.parametrize("width", [64, 128, 256])
def test_many_short_tiles_and_a_few_long_ones(width: int) -> None:
    """More tiles than SMs, so that blocks take several, in some order."""
    q, kv = (9, 8, 513, width), (9, 4, 513, width)
    arrays = draw(q, kv, kv, q)
    compare(arrays, lambda q, k, v: tg.attention(q, k, v, causal=True))
    compare(arrays, tg.attention)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("options", [{"causal": True}, {"dropout": 0.4}, {"window": 99}])
def test_captured_passes_give_the_bits_of_eager_ones(width: int, options: dict[str, Any]) -> None:
    cupy = backend.cupy
    arrays = [backend.to_device(a, "cuda") for a in dense(width, 4, 2, 300, 300, bfloat16)]
    *inputs, dy = arrays

    def step() -> list[Any]:
        random.seed(5)
        q, k, v = (Tensor(array, requires_grad=True) for array in inputs)
        y = tg.attention(q, k, v, **options)
        y.backward(dy)
        return [y.data, q.grad, k.grad, v.grad]

    expected = [backend.to_numpy(array).tobytes() for array in step()]
    pool = cupy.cuda.MemoryPool()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, cupy.cuda.using_allocator(pool.malloc):
        step()  # work that is done once only
        stream.begin_capture()
        captured = step()
        graph = stream.end_capture()
    for array in captured:
        array.fill(0)
    cupy.cuda.runtime.deviceSynchronize()
    for _ in range(2):
        graph.launch(stream)
    stream.synchronize()
    assert [backend.to_numpy(array).tobytes() for array in captured] == expected
