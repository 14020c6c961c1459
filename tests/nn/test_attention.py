"""Multi-head attention: masks, grouped heads, rotary positions, and the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, nn, no_grad
from tensorgrad.errors import ArgumentError, GradError, ShapeError
from tensorgrad.nn.rows import Rows
from tensorgrad.nn.shard import Shard

RNG = np.random.default_rng(1)


def tensor(*shape: int) -> Tensor:
    return Tensor(RNG.standard_normal(shape).astype("float32"))


def by_hand(layer: nn.MultiHeadAttention, x: Tensor, mask: Any = None) -> Any:
    """Return the same from ops on separate heads."""
    batch, length, width = x.shape
    heads, kv_heads = layer.heads, layer.kv_heads
    each = layer.qkv(x).reshape(batch, length, heads + 2 * kv_heads, width // heads)
    q, k, v = tg.split(each, [heads, heads + kv_heads], axis=2)
    if layer.rotary is not None:
        q, k = layer.rotary(q), layer.rotary(k)
    q, k, v = (t.swapaxes(1, 2) for t in (q, k, v))
    y = tg.attention(q, k, v, mask, causal=layer.causal, window=layer.window)
    return layer.proj(y.swapaxes(1, 2).reshape(batch, length, width))


LAYERS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "kv_heads": 2, "bias": False},
    {"causal": True, "kv_heads": 1, "rotary": nn.RotaryEmbedding(8)},
    {"rotary": nn.RotaryEmbedding(8, base=500.0, interleaved=True)},
    {"causal": True, "window": 3},
    {"window": 2, "kv_heads": 2},
]


@pytest.mark.parametrize("options", LAYERS, ids=lambda o: "-".join(o) or "plain")
def test_equals_ops_on_separate_heads(options: dict[str, Any]) -> None:
    layer, x = nn.MultiHeadAttention(32, 4, **options), tensor(2, 7, 32)
    mask = np.arange(7) < np.array([7, 4])[:, None, None, None]
    for given in (None, mask, np.where(mask, 0.5, -np.inf).astype("float32")):
        got, expected = layer(x, given), by_hand(layer, x, given)
        np.testing.assert_allclose(got.numpy(), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("options", LAYERS, ids=lambda o: "-".join(o) or "plain")
def test_all_parameters_and_the_input_get_gradients(options: dict[str, Any]) -> None:
    layer = nn.MultiHeadAttention(32, 4, **options)
    x = tensor(2, 7, 32)
    x.requires_grad = True
    layer(x).backward(tensor(2, 7, 32).data)
    grads = [np.asarray(t.grad) for t in (x, *layer.parameters())]
    expected_x = Tensor(x.data, requires_grad=True)
    for parameter in layer.parameters():
        parameter.grad = None
    again = by_hand(layer, expected_x)
    dy = tensor(2, 7, 32).data
    again.backward(dy)
    for t in (x, *layer.parameters()):
        t.grad = None
    layer(x).backward(dy)
    assert all(np.abs(g).max() > 0 for g in grads)
    np.testing.assert_allclose(np.asarray(x.grad), np.asarray(expected_x.grad), atol=1e-5)


class Kept(nn.Linear):
    """A linear layer that keeps its result."""

    def forward(self, x: Any, residual: Any = None) -> Tensor:
        self.result = super().forward(x, residual)
        return self.result


@pytest.mark.parametrize("norms", [False, True])
def test_queries_and_keys_that_others_hold_are_not_overwritten(norms: bool) -> None:
    rotary, norm = nn.RotaryEmbedding(8), nn.RMSNorm if norms else None
    layer, x = nn.MultiHeadAttention(16, 2, rotary=rotary, qk_norm=norm), tensor(2, 5, 16)
    expected, held = layer(x).numpy(), nn.Linear.forward(layer.qkv, x).numpy()
    seen = []
    remove = layer.qkv.register_forward_hook(lambda module, args, y: seen.append(y))
    np.testing.assert_array_equal(layer(x).numpy(), expected)
    np.testing.assert_array_equal(seen[0].numpy(), held)
    remove()
    keeps = Kept(16, 48)
    keeps.weight, keeps.bias, layer.qkv = layer.qkv.weight, layer.qkv.bias, keeps
    np.testing.assert_array_equal(layer(x).numpy(), expected)
    np.testing.assert_array_equal(keeps.result.numpy(), held)


class Offers(nn.Linear):
    """A linear layer with a forward of its own, which says that its result may be overwritten."""

    may_be_overwritten = True

    def forward(self, x: Any, residual: Any = None) -> Tensor:
        self.result = super().forward(x, residual)
        return self.result


def test_attention_asks_its_projection_whether_it_may_overwrite() -> None:
    layer = nn.MultiHeadAttention(16, 2, rotary=nn.RotaryEmbedding(8))
    layer.qkv, x = Offers(16, 48), tensor(2, 5, 16)
    layer(x)
    held = nn.Linear.forward(layer.qkv, x).numpy()
    assert layer.qkv.result.numpy().tobytes() != held.tobytes()


def test_a_causal_step_does_not_see_later_ones() -> None:
    layer, x = nn.MultiHeadAttention(16, 2, causal=True), tensor(1, 6, 16)
    before = layer(x).numpy()
    x.data[:, 4:] = 9
    after = layer(x).numpy()
    np.testing.assert_allclose(before[:, :4], after[:, :4], atol=1e-6)
    assert np.abs(before[:, 4:] - after[:, 4:]).max() > 0.01


@pytest.mark.parametrize("options", LAYERS[1:4], ids=lambda o: "-".join(o))
@pytest.mark.parametrize("steps", [[1] * 7, [4, 1, 2], [7]])
def test_the_cache_continues_a_sequence(options: dict[str, Any], steps: list[int]) -> None:
    layer, x = nn.MultiHeadAttention(32, 4, **options), tensor(2, 7, 32)
    expected = layer(x).numpy()
    with no_grad():
        cache = layer.new_cache(2, 9)
        done, parts = 0, []
        for count in steps:
            parts.append(layer(x[:, done : done + count], cache=cache).numpy())
            done += count
    assert cache.length == 7
    assert cache.steps == 9
    np.testing.assert_allclose(np.concatenate(parts, 1), expected, atol=2e-6)


@pytest.mark.parametrize("options", LAYERS[1:], ids=lambda o: "-".join(o))
def test_sequences_of_different_lengths_take_a_step_at_once(options: dict[str, Any]) -> None:
    layer, x = nn.MultiHeadAttention(32, 4, **{**options, "causal": True}), tensor(2, 7, 32)
    with no_grad():
        cache = layer.new_cache(2, 9)
        layer(x[:, :6], cache=cache)
        cache.lengths = np.array([6, 3], np.int32)
        found = layer(x[:, 6:], cache=cache).numpy()
        for row, length in enumerate((6, 3)):
            whole = tg.concatenate([x[row : row + 1, :length], x[row : row + 1, 6:]], axis=1)
            expected = layer(whole).numpy()[0, -1:]
            np.testing.assert_allclose(found[row], expected, atol=2e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("proj_bias", [None, False, True])
def test_both_linear_layers_may_have_a_bias(bias: bool, proj_bias: bool | None) -> None:
    layer = nn.MultiHeadAttention(8, 2, bias=bias, proj_bias=proj_bias)
    assert (layer.qkv.bias is not None) == bias
    assert (layer.proj.bias is not None) == (bias if proj_bias is None else proj_bias)


def test_the_cache_forgets_when_its_length_is_set_back() -> None:
    layer, x = nn.MultiHeadAttention(16, 2, causal=True), tensor(1, 4, 16)
    with no_grad():
        cache = layer.new_cache(1, 4)
        layer(x, cache=cache)
        cache.length = 2
        again = layer(x[:, 2:], cache=cache).numpy()
    np.testing.assert_allclose(again, layer(x).numpy()[:, 2:], atol=1e-6)


def test_the_cache_names_what_does_not_fit() -> None:
    layer = nn.MultiHeadAttention(16, 2, causal=True)
    with no_grad():
        cache = layer.new_cache(1, 4)
        layer(tensor(1, 3, 16), cache=cache)
        with pytest.raises(ShapeError, match="cache: 3 steps are held and 2 come, expected at mos"):
            layer(tensor(1, 2, 16), cache=cache)
        with pytest.raises(ShapeError, match=r"cache: k has shape \(2, 2, 1, 8\), .* \(1, 2, 1, 8"):
            layer(tensor(2, 1, 16), cache=cache)
    assert cache.length == 3
    with pytest.raises(GradError, match=r"cache: .* generate under no_grad"):
        layer(tensor(1, 1, 16), cache=cache)


def test_rotary_scores_depend_on_distance_alone() -> None:
    rotary = nn.RotaryEmbedding(16)
    q, k = tensor(1, 1, 1, 16), tensor(1, 1, 1, 16)

    def score(i: int, j: int) -> float:
        return float((rotary(q, i).numpy() * rotary(k, j).numpy()).sum())

    assert score(5, 2) == pytest.approx(score(105, 102), rel=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 3), rel=1e-3)


def test_rotary_positions_may_be_given_one_by_one() -> None:
    rotary, x = nn.RotaryEmbedding(8), tensor(2, 5, 3, 8)
    start = rotary(x, 3).numpy()
    np.testing.assert_allclose(rotary(x, np.arange(3, 8)).numpy(), start, atol=1e-6)
    each = np.array([[3, 4, 5, 6, 7], [0, 0, 0, 1, 2]])
    got = rotary(x, Tensor(each)).numpy()
    np.testing.assert_allclose(got[0], start[0], atol=1e-6)
    np.testing.assert_array_equal(got[1, 0], x.numpy()[1, 0])


def test_settings_of_rotary_positions_that_do_not_fit() -> None:
    for width, base, message in (
        (4.0, 10.0, "width is 4.0, expected an integer"),
        (3, 10.0, "width is 3, expected an even number"),
        (4, "x", "base is 'x', expected a number"),
        (4, -1.0, "base is -1.0, expected a finite number from 0"),
        (4, 0, "base is 0, expected a number above 0"),
    ):
        with pytest.raises(ArgumentError, match=f"RotaryEmbedding: {message}"):
            nn.RotaryEmbedding(width, base=base)  # type: ignore[arg-type]


def test_another_base_of_rotary_positions_is_seen() -> None:
    rotary, x = nn.RotaryEmbedding(8), tensor(2, 5, 3, 8)
    before, table = rotary(x).numpy(), rotary.table(5, x.data)
    rotary.base = 100.0
    other = nn.RotaryEmbedding(8, base=100.0)
    np.testing.assert_array_equal(rotary(x).numpy(), other(x).numpy())
    np.testing.assert_array_equal(rotary.table(5, x.data), other.table(5, x.data))
    assert (before != rotary(x).numpy()).any()
    assert (table[0] != rotary.table(5, x.data)[0]).any()


def test_rotary_angles_stay_exact_in_16_bit_models() -> None:
    layer = nn.MultiHeadAttention(16, 2, rotary=nn.RotaryEmbedding(8)).to("bfloat16")
    assert layer.rotary is not None
    cos, _ = layer.rotary._angles(tensor(1, 5, 1, 8), 1000)
    np.testing.assert_allclose(cos[:, 0, 0], np.cos(np.arange(1000, 1005)), rtol=1e-6)


def test_dropout_on_the_weights_only_in_training() -> None:
    layer, x = nn.MultiHeadAttention(16, 2, dropout=0.5), tensor(2, 9, 16)
    assert np.abs(layer(x).numpy() - layer(x).numpy()).max() > 0
    layer.eval()
    np.testing.assert_array_equal(layer(x).numpy(), layer(x).numpy())


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ArgumentError, match="width is 30, expected a multiple of 4 heads"):
        nn.MultiHeadAttention(30, 4)
    with pytest.raises(ArgumentError, match="kv_heads is 3, expected a divisor of 4 heads"):
        nn.MultiHeadAttention(32, 4, kv_heads=3)
    with pytest.raises(ArgumentError, match="RotaryEmbedding: width is 5, expected an even"):
        nn.RotaryEmbedding(5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "yarn"}, "kind is 'yarn', expected 'linear' or 'llama3'"),
        ({"factor": 0.5}, "factor is 0.5, expected 1 or more"),
        ({"factor": "x"}, "factor is 'x', expected a number"),
        ({"low_freq_factor": 0.0}, "low_freq_factor is 0.0, expected above 0 and below high_freq"),
        ({"low_freq_factor": 4.0}, "low_freq_factor is 4.0, .* below high_freq_factor, 4.0"),
        ({"low_freq_factor": -1.0}, "low_freq_factor is -1.0"),
        ({"high_freq_factor": float("nan")}, "high_freq_factor is nan"),
        ({"original_context": 0}, "original_context is 0, expected 1 or more"),
    ],
)
def test_settings_of_longer_contexts_that_do_not_fit(options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"RopeScaling: {message}"):
        nn.RopeScaling(**{"kind": "llama3", "factor": 2.0, **options})


def test_longer_contexts_turn_more_slowly() -> None:
    frequencies = np.array([1.0, 0.5, 0.1])
    linear = nn.RopeScaling("linear", 4.0)
    assert repr(linear) == (
        "RopeScaling(kind='linear', factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, "
        "original_context=8192)"
    )
    np.testing.assert_array_equal(linear.scaled(frequencies), frequencies / 4)
    assert nn.RopeScaling("linear", 1, low_freq_factor=3.9).factor == 1
    # In 100 tokens: more than 4 turns, just between 1 and 4, and fewer than 1.
    turns = np.array([5.0, 2.5, 0.9])
    found = nn.RopeScaling("llama3", 3.0, original_context=100).scaled(turns * 2 * np.pi / 100)
    expected = np.array([5.0, 2.5 * (0.5 + 0.5 / 3), 0.9 / 3]) * 2 * np.pi / 100
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    rotary = nn.RotaryEmbedding(4, base=10.0, interleaved=True, scaling=linear)
    cos, sin = rotary.table(3, np.zeros(1))
    angles = np.arange(3)[:, None] * np.array([1, 10**-0.5]) / 4
    np.testing.assert_allclose(cos, np.cos(angles), rtol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=1e-6)
    assert rotary.extra_repr() == f"4, base=10.0, interleaved=True, scaling={linear}"
    assert nn.RotaryEmbedding(4).extra_repr() == "4, base=10000.0"


def test_positions_may_begin_before_0() -> None:
    rotary, x = nn.RotaryEmbedding(8), tensor(1, 4, 2, 8)
    expected = rotary(x, np.arange(-2, 2)).numpy()
    np.testing.assert_allclose(rotary(x, -2).numpy(), expected, atol=1e-6)
    np.testing.assert_array_equal(rotary(x, -2).numpy()[:, 2], x.numpy()[:, 2])
    one = rotary(x, 3, heads=1).numpy()
    np.testing.assert_array_equal(one[:, :, 1], x.numpy()[:, :, 1])
    np.testing.assert_allclose(one[:, :, 0], rotary(x, 3).numpy()[:, :, 0], atol=1e-6)


def test_a_part_of_a_cache_and_a_selection() -> None:
    layer, x = nn.MultiHeadAttention(16, 2, causal=True), tensor(3, 4, 16)
    with no_grad():
        cache = layer.new_cache(3, 6)
        layer(x, cache=cache)
        cache.lengths = np.full(3, 4, np.int32)
        part = cache.part(slice(1, 3))
        assert (part.length, part.lengths, part.counters, part.steps) == (0, None, None, 6)
        layer(x[1:] * 2, cache=part)
        keys, values = (array.copy() for array in cache.arrays)
        for one, other in zip(part.arrays, (keys, values), strict=True):
            np.testing.assert_array_equal(one[:, :, :4], other[1:, :, :4])
        cache.select(np.array([2, 0, 2, 1]))
    assert cache.length == 4
    for one, other in zip(cache.arrays, (keys, values), strict=True):
        assert one.shape == (4, 2, 6, 8)
        np.testing.assert_array_equal(one[:, :, :4], other[[2, 0, 2, 1], :, :4])


@pytest.mark.parametrize("kernel", ["unfused", "fused-softmax", "flash"])
def test_kernels_of_attention_agree(kernel: str) -> None:
    layer = nn.MultiHeadAttention(
        32, 4, kv_heads=2, causal=True, rotary=nn.RotaryEmbedding(8), window=3
    )
    model, x = nn.Sequential(nn.Identity(), layer), tensor(2, 7, 32)
    expected = model(x).numpy()
    nn.use_attention(model, kernel)
    assert layer.kernel == kernel
    np.testing.assert_allclose(model(x).numpy(), expected, atol=2e-6)
    layer.dropout = 0.5
    assert np.abs(model(x).numpy() - model(x).numpy()).max() > 0
    with pytest.raises(
        ArgumentError, match="kernel is 'fast', expected one of unfused, fused-soft"
    ):
        nn.use_attention(model, "fast")
    assert layer.kernel == kernel


def test_ranks_divide_heads_and_count_the_bytes() -> None:
    layer = nn.MultiHeadAttention(16, 4, kv_heads=2, head_width=6, qk_norm=nn.RMSNorm)
    counts = ("heads", "kv_heads")
    assert str(layer.shards()[0].sections) == "[24, 12, 12]"
    assert layer.shards() == [
        Shard("qkv", "column", [24, 12, 12], 2, counts),
        Shard("q_norm", "inside"),
        Shard("k_norm", "inside"),
        Shard("proj", "row", None, 2),
    ]
    rows = Rows(inside=10, outside=5.0, item=2, wide=4)
    packed = 10 * 2 * 48
    plain = 10 * 2 * (16 + 24) + packed + 4 * 10 * 4
    norms = 10 * 4 * (6 * 2 + 4) + packed * 2 / 8 + 10 * 2 * (6 * 2 + 4)
    assert layer.saved_bytes(rows) == plain + norms
    layer.q_norm = None
    assert layer.saved_bytes(rows) == plain


def test_the_settings_are_shown() -> None:
    assert nn.MultiHeadAttention(16, 4).extra_repr() == "heads=4, causal=False"
    layer = nn.MultiHeadAttention(16, 4, kv_heads=2, dropout=0.1, causal=True, window=3)
    assert layer.extra_repr() == "heads=4, kv_heads=2, causal=True, dropout=0.1, window=3"
    for options, message in (
        ({"width": 0}, "width is 0, expected 1 or more"),
        ({"heads": 0}, "heads is 0, expected 1 or more"),
        ({"kv_heads": 0}, "kv_heads is 0, expected 1 or more"),
        ({"head_width": 0}, "head_width is 0, expected 1 or more"),
        ({"window": 0}, "window is 0, expected 1 or more"),
        ({"dropout": 1.0}, "dropout is 1.0, expected 0 <= dropout < 1"),
    ):
        with pytest.raises(ArgumentError, match=f"MultiHeadAttention: {message}"):
            nn.MultiHeadAttention(**{"width": 4, "heads": 4, **options})  # type: ignore[arg-type]
    least = nn.MultiHeadAttention(1, 1, kv_heads=1, window=1, head_width=1)
    assert least(tensor(1, 2, 1)).shape == (1, 2, 1)


class OwnRotary(nn.RotaryEmbedding):
    """A rotation that fused ops do not know."""

    def forward(self, x: Any, positions: Any = 0, heads: int | None = None) -> Tensor:
        return super().forward(x, positions, heads)


def test_a_rotation_of_ones_own_has_the_place_of_each_sequence() -> None:
    layer = nn.MultiHeadAttention(16, 2, causal=True, rotary=nn.RotaryEmbedding(8))
    own = nn.MultiHeadAttention(16, 2, causal=True, rotary=OwnRotary(8))
    own.load_state_dict(layer.state_dict())
    x, found = tensor(2, 5, 16), []
    with no_grad():
        for each in (layer, own):
            cache = each.new_cache(2, 6)
            before = each(x[:, :4], cache=cache).numpy()
            cache.lengths = np.array([4, 2], np.int32)
            found.append((before, each(x[:, 4:], cache=cache).numpy()))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.gpu
def test_the_cache_and_rotary_positions_on_the_gpu() -> None:
    layer = nn.MultiHeadAttention(32, 4, kv_heads=2, causal=True, rotary=nn.RotaryEmbedding(8))
    x = tensor(2, 7, 32)
    expected = layer(x).numpy()
    layer.to("cuda")
    with no_grad():
        cache = layer.new_cache(2, 7)
        parts = [layer(x[:, i : i + 1].to("cuda"), cache=cache).numpy() for i in range(7)]
    np.testing.assert_allclose(np.concatenate(parts, 1), expected, atol=1e-5)


def test_learned_bias_has_a_gradient(device: str) -> None:
    layer = nn.MultiHeadAttention(8, 4, kv_heads=2, causal=True).to(device)
    rng = np.random.default_rng(2)
    x = tg.tensor(rng.standard_normal((2, 5, 8)).astype("float32"), device=device)
    bias = tg.tensor(rng.standard_normal((4, 5, 5)).astype("float32"), device=device)
    expected = layer(x, bias)
    bias.requires_grad = True
    y = layer(x, bias)
    np.testing.assert_allclose(y.numpy(), expected.numpy(), atol=1e-5)
    (y * y).sum().backward()
    gradient = tg.tensor(bias.grad).numpy()
    assert (gradient[:, ~np.tri(5, dtype=bool)] == 0).all()
    assert (gradient[:, 1, :2] != 0).all()
