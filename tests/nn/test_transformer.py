"""Feed-forward layers and the transformer block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, nn, no_grad
from tensorgrad.errors import DtypeError
from tensorgrad.nn.rows import Rows
from tensorgrad.nn.shard import Shard

RNG = np.random.default_rng(2)


def tensor(*shape: int) -> Tensor:
    return Tensor(RNG.standard_normal(shape).astype("float32"))


def modern(width: int = 32) -> nn.TransformerBlock:
    return nn.TransformerBlock(
        width, 4, kv_heads=2, bias=False, rotary=nn.RotaryEmbedding(width // 4),
        norm=nn.RMSNorm, feed_forward=nn.SwiGLU,
    )  # fmt: skip


def test_feed_forward() -> None:
    layer, x = nn.FeedForward(8), tensor(2, 3, 8)
    expected = layer.down(tg.gelu(layer.up(x), approximate="tanh"))
    np.testing.assert_array_equal(layer(x).numpy(), expected.numpy())
    assert layer.up.weight.shape == (32, 8)
    exact = nn.FeedForward(8, hidden=5, bias=False, approximate="none")
    assert [n for n, _ in exact.named_parameters()] == ["up.weight", "down.weight"]
    assert exact(x).shape == x.shape


def test_swiglu() -> None:
    layer, x = nn.SwiGLU(24), tensor(2, 3, 24)
    expected = layer.down(tg.silu(layer.gate(x)) * layer.up(x))
    np.testing.assert_allclose(layer(x).numpy(), expected.numpy(), rtol=1e-6)
    assert layer.up.weight.shape == (64, 24)
    assert nn.SwiGLU(768).up.weight.shape == (2048, 768)
    assert [nn.SwiGLU.default_hidden(width) for width in (1, 24, 25, 48)] == [64, 64, 128, 128]
    names = [name for name, _ in layer.named_parameters()]
    assert names == ["gate.weight", "up.weight", "down.weight"]


@pytest.mark.parametrize("kind", [nn.FeedForward, nn.SwiGLU])
def test_dropout_of_what_is_inside(kind: Any) -> None:
    layer, x = kind(24, hidden=40, bias=False, dropout=0.4), tensor(2, 3, 24)
    layer.down.weight = nn.Parameter(np.eye(40, dtype="float32"))
    dropped, whole = layer(x).numpy(), layer.eval()(x).numpy()
    kept = dropped != 0
    assert 0.4 < kept.mean() < 0.8
    np.testing.assert_allclose(dropped[kept], whole[kept] / 0.6, rtol=1e-5)


def test_ranks_share_feed_forward_layers_and_count_their_bytes() -> None:
    layer, gated = nn.FeedForward(8, hidden=20), nn.SwiGLU(8, hidden=20)
    inside = [Shard("dropout", "inside"), Shard("down", "row")]
    assert layer.shards() == [Shard("up", "column"), *inside]
    assert gated.shards() == [Shard("gate", "column"), Shard("up", "column"), *inside]
    rows = Rows(inside=10, outside=5.0, item=2, wide=4)
    assert layer.saved_bytes(rows) == 10 * 2 * (8 + 20 + 20)
    assert gated.saved_bytes(rows) == 10 * 2 * (8 + 20 + 2 * 20)
    large = nn.FeedForward(256, hidden=1024)
    for many, item, wide, shared, saved in (
        (8192, 2, 2, False, 1),
        (8192, 2, 2, True, 2),
        (8192, 2, 4, False, 2),
        (8192, 4, 4, False, 4),
        (64, 2, 2, False, 2),
    ):
        found = large.saved_bytes(Rows(many, many, item, wide, shared))
        assert found == many * (item * (256 + 1024) + saved * 1024)
    assert rows.of_heads(3) == Rows(inside=10, outside=30, item=2, wide=2)
    assert not rows.shared


class Terms:
    """A region of two ranks that have the same terms."""

    def enter(self, x: Any) -> Any:
        return x

    def leave(self, y: Any, bias: Any = None, residual: Any = None) -> Any:
        y = y + y
        y = y if bias is None else y + bias
        return y if residual is None else y + residual


def test_terms_of_ranks_are_added_before_the_bias() -> None:
    x, residual = tensor(2, 3, 8), tensor(2, 3, 8)
    layer = nn.FeedForward(8)
    up = tg.gelu(layer.up(x), approximate="tanh")
    expected = 2 * (up @ layer.down.weight.T) + layer.down.bias + residual
    plain = nn.Linear(8, 8)
    shared = 2 * (x @ plain.weight.T) + plain.bias + residual
    for each in (layer.down, plain):
        each.after = Terms()  # type: ignore[assignment]
    np.testing.assert_allclose(layer(x, residual).numpy(), expected.numpy(), atol=1e-6)
    np.testing.assert_allclose(plain(x, residual).numpy(), shared.numpy(), atol=1e-6)


def test_a_gate_of_ones_own_is_called() -> None:
    layer, x = nn.SwiGLU(24, hidden=40), tensor(2, 3, 24)
    expected = layer(x).numpy()
    layer.gate.register_forward_hook(lambda module, args, y: y + 1)
    shifted = layer.down(tg.silu(tg.linear(x, layer.gate.weight) + 1) * layer.up(x))
    np.testing.assert_allclose(layer(x).numpy(), shifted.numpy(), rtol=1e-5, atol=1e-6)
    assert np.abs(layer(x).numpy() - expected).max() > 1e-4
    with pytest.raises(DtypeError, match="SwiGLU: x has dtype float64, expected float32"):
        nn.SwiGLU(24)(np.ones((1, 24)))
    for name in ("x", "residual"):
        given = {"x": x, "residual": x, name: x.astype("float64")}
        with pytest.raises(DtypeError, match=f"FeedForward: {name} has dtype float64, expected fl"):
            nn.FeedForward(24)(**given)


class OwnDropout(nn.Dropout):
    """A user's own dropout."""

    def forward(self, x: Any) -> Tensor:
        return super().forward(x) * 1


def test_dropout_is_part_of_swiglu_unless_it_is_a_layer_of_ones_own() -> None:
    layer, x = nn.SwiGLU(24, hidden=40, dropout=0.4), tensor(2, 3, 24)
    found = []
    for dropout in (layer.dropout, OwnDropout(0.4)):
        layer.dropout = dropout
        tg.random.seed(1)
        found.append(layer(x))
    assert "dropout" not in recorded(found[0])
    assert "dropout" in recorded(found[1])
    np.testing.assert_array_equal(found[0].numpy(), found[1].numpy())
    whole = layer.down(tg.gated_linear(x, layer.gate.weight, layer.up.weight))
    state = tg.random.get_state()
    layer.dropout = nn.Dropout(0.4)
    np.testing.assert_array_equal(layer.eval()(x).numpy(), whole.numpy())
    assert tg.random.get_state() == state


class Doubled(nn.LayerNorm):
    """A user's own norm."""

    def forward(self, x: Any) -> Tensor:
        return super().forward(x) * 2


def test_the_block_is_two_residual_branches() -> None:
    for block in (nn.TransformerBlock(32, 4), modern(), nn.TransformerBlock(32, 4, norm=Doubled)):
        x = tensor(2, 5, 32)
        middle = x + block.attention(block.norm1(x))
        expected = middle + block.feed_forward(block.norm2(middle))
        np.testing.assert_allclose(block(x).numpy(), expected.numpy(), rtol=1e-6, atol=1e-6)


def recorded(y: Tensor) -> list[str]:
    """Return the names of the ops of a graph, in the order of a walk."""
    names, stack, seen = [], [y.node], set()
    while stack:
        edge = stack.pop()
        edge = getattr(edge, "node", None) or edge
        if edge in seen or not hasattr(edge, "edges"):
            continue
        seen.add(edge)
        names.append(edge.name)
        stack += [target for target in edge.edges if target is not None]
    return names


def test_subclasses_that_keep_the_contract_are_fused_like_their_bases() -> None:
    class Norm(nn.LayerNorm):
        pass

    class Product(nn.Linear):
        def extra_repr(self) -> str:
            return "own"

    class Branch(nn.FeedForward):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.up, self.down = Product(width, 4 * width), Product(4 * width, width)

    x = tensor(2, 5, 32)
    plain = nn.TransformerBlock(32, 4)
    derived = nn.TransformerBlock(32, 4, norm=Norm, feed_forward=Branch)
    assert recorded(derived(x)) == recorded(plain(x))
    assert "add_layer_norm" in recorded(plain(x))
    other = nn.TransformerBlock(32, 4, norm=Doubled)
    assert "layer_norm" in recorded(other(x))


def test_a_layer_of_a_user_takes_part_without_the_protocol() -> None:
    class Scale(nn.Module):
        def __init__(self, width: int) -> None:
            self.factor = nn.Parameter(np.full(width, 2, "float32"))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    block, x = nn.TransformerBlock(32, 4, norm=Scale, feed_forward=Scale), tensor(2, 5, 32)
    middle = x + block.attention(x * 2)
    np.testing.assert_allclose(block(x).numpy(), (middle + middle * 4).numpy(), rtol=1e-6)
    block.dropout = nn.Dropout(0.5)
    assert block(x).shape == x.shape
    product = nn.Linear(4, 4)
    product.forward = lambda x: x  # type: ignore[method-assign, assignment, misc]
    branch = nn.FeedForward(4, hidden=4)
    branch.up = product
    y, given = tensor(2, 4), tensor(2, 4)
    np.testing.assert_array_equal(
        branch(y, given).numpy(), branch.down(tg.gelu(y, approximate="tanh"), given).numpy()
    )


def test_parameters_of_the_gpt2_block() -> None:
    names = dict(nn.TransformerBlock(8, 2).named_parameters())
    assert {name: p.shape for name, p in names.items()} == {
        "norm1.weight": (8,), "norm1.bias": (8,),
        "attention.qkv.weight": (24, 8), "attention.qkv.bias": (24,),
        "attention.proj.weight": (8, 8), "attention.proj.bias": (8,),
        "norm2.weight": (8,), "norm2.bias": (8,),
        "feed_forward.up.weight": (32, 8), "feed_forward.up.bias": (32,),
        "feed_forward.down.weight": (8, 32), "feed_forward.down.bias": (8,),
    }  # fmt: skip


def test_every_parameter_gets_a_gradient() -> None:
    for block in (nn.TransformerBlock(32, 4), modern()):
        block(tensor(2, 5, 32)).backward(tensor(2, 5, 32).data)
        for name, parameter in block.named_parameters():
            assert parameter.grad is not None, name
            if name != "attention.qkv.bias":  # the part for the keys changes no attention weight
                assert np.abs(parameter.grad).max() > 0, name


def test_a_block_continues_from_its_cache() -> None:
    block, x = modern(), tensor(1, 6, 32)
    with no_grad():
        cache = block.attention.new_cache(1, 6)
        parts = [block(x[:, i : i + 2], cache=cache).numpy() for i in (0, 2, 4)]
    np.testing.assert_allclose(np.concatenate(parts, 1), block(x).numpy(), atol=1e-5)


def test_masks_reach_the_attention() -> None:
    block, x = nn.TransformerBlock(16, 2, causal=False), tensor(1, 4, 16)
    mask = np.array([True, True, True, False])
    before = block(x, mask).numpy()
    x.data[:, 3] = 5
    np.testing.assert_array_equal(block(x, mask).numpy()[:, :3], before[:, :3])


def test_dropout_in_training_only() -> None:
    block, x = nn.TransformerBlock(16, 2, dropout=0.5), tensor(1, 4, 16)
    assert np.abs(block(x).numpy() - block(x).numpy()).max() > 0
    block.eval()
    np.testing.assert_array_equal(block(x).numpy(), block(x).numpy())


def test_sixteen_bit_blocks_stay_close() -> None:
    for block in (nn.TransformerBlock(32, 4), modern()):
        x = tensor(2, 5, 32)
        expected = block(x).numpy()
        for dtype, tolerance in (("float16", 4e-3), ("bfloat16", 4e-2)):
            block.to(dtype)
            got = block(x.astype(dtype))
            assert got.dtype == dtype
            np.testing.assert_allclose(
                got.numpy().astype("float32"), expected, atol=tolerance * np.abs(expected).max()
            )
