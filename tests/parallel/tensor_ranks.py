"""Checks of tensor parallel layers on every rank; run by test_tensor.py through mpirun.

mpirun -n 4 python tests/parallel/tensor_ranks.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, nn, no_grad, optim, parallel, random
from tensorgrad.amp import autocast
from tensorgrad.errors import ArgumentError, CommError, OutOfRangeError, ShapeError
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.language_model import LanguageModel, initialize
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig
from tensorgrad.models.translation import TranslationConfig, TranslationModel
from tensorgrad.nn import Module
from tensorgrad.parallel import Comm, TensorParallel
from tensorgrad.parallel.region import ParallelRegion
from tensorgrad.parallel.tensor import ShardRow, rows_of, shard, tensor_parallel
from tensorgrad.parallel.tensor_ops import (
    all_gather_columns,
    all_gather_rows,
    all_reduce,
    all_reduce_gradient,
    reduce_scatter_rows,
)
from tensorgrad.parallel.vocabulary import vocabulary_parallel_cross_entropy
from tensorgrad.train.placement import Placement, cut_box
from tensorgrad.train.strategy import OneProcess

Values = np.ndarray[Any, Any]
B, T, C = 2, 8, 16


def draw(shape: tuple[int, ...], number: int = 0, dtype: str = "float64") -> Values:
    """The same numbers on all ranks."""
    return np.random.default_rng([5, number]).standard_normal(shape).astype(dtype)


def close(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Compare relative to the largest element."""
    a, b = (np.asarray(each, "float64") for each in (found, expected))
    assert a.shape == b.shape, (a.shape, b.shape)
    assert np.abs(a - b).max(initial=0) <= tolerance * max(np.abs(b).max(initial=0), 1e-30)


def own_rows(whole: Values, comm: Comm) -> Values:
    """Return this rank's rows."""
    batch, length = whole.shape[:2]
    part = np.asarray(whole.reshape(comm.size, -1)[comm.rank])
    return part.reshape(batch, length // comm.size, *whole.shape[2:])


def grad(tensor: Tensor) -> Values:
    """Return the gradient, which must exist."""
    assert tensor.grad is not None
    return np.asarray(tensor.grad)


def check_operations(comm: Comm) -> None:
    terms = [draw((B, T, 3), rank) for rank in range(comm.size)]
    dys = [draw((B, T, 3), 100 + rank) for rank in range(comm.size)]
    mine, dy = Tensor(terms[comm.rank], True), dys[comm.rank]
    rows = Tensor(own_rows(terms[0], comm), True)
    columns = draw((2, 3 * comm.size), 50)
    part = Tensor(columns[:, 3 * comm.rank : 3 * (comm.rank + 1)].copy(), True)
    wide = draw(columns.shape, 51)
    whole_sum, whole_dy = sum(terms), sum(dys)
    assert isinstance(whole_sum, np.ndarray)
    assert isinstance(whole_dy, np.ndarray)
    for x, y, value, given, dx in (
        (mine, all_reduce_gradient(mine, comm), terms[comm.rank], dy, whole_dy),
        (mine, all_reduce(mine, comm), whole_sum, dys[0], dys[0]),
        (rows, all_gather_rows(rows, comm), terms[0], dy, own_rows(whole_dy, comm)),
        (
            mine,
            reduce_scatter_rows(mine, comm),
            own_rows(whole_sum, comm),
            own_rows(dys[0], comm),
            dys[0],
        ),
        (
            part,
            all_gather_columns(part, comm),
            columns,
            wide,
            wide[:, 3 * comm.rank : 3 * (comm.rank + 1)],
        ),
    ):
        before = given.copy()
        close(y.data, value)
        x.grad = None
        y.backward(Tensor(given))
        close(x.grad, dx)
        np.testing.assert_array_equal(given, before)
    np.testing.assert_array_equal(mine.data, terms[comm.rank])
    again = all_reduce(mine.data.copy(), comm, overwrite=True)
    close(again.data, whole_sum)
    empty = Tensor(np.zeros((B, 0, 3)), True)
    all_gather_rows(reduce_scatter_rows(empty, comm), comm).sum().backward()
    assert grad(empty).shape == (B, 0, 3)
    with pytest.raises(
        ShapeError, match=r"all_gather_columns: x has shape \(\), expected \(\.\.\., n"
    ):
        all_gather_columns(np.ones(()), comm)
    with pytest.raises(ShapeError, match=rf"\(2, 9, 3\), .* a multiple of the {comm.size} ranks"):
        reduce_scatter_rows(np.zeros((2, 9, 3)), comm)


def double(module: Module, seed: int = 3) -> Module:
    """Give a module parameters of float64 that do not depend on its own initialisation."""
    module.to("float64")
    for number, parameter in enumerate(module.parameters()):
        parameter.data[...] = draw(parameter.shape, 1000 * seed + number) / 4
    return module


Placements = dict[str, Placement]


def cut(layer: Module, region: ParallelRegion, kind: Any = None) -> Placements:
    """Shard a layer by its table, or by one row; return the parts of its parameters."""
    rows = (
        list(rows_of(layer)) if kind is None else [ShardRow("", layer, nn.Shard("", kind), layer)]
    )
    return shard(layer, rows, region)


class Squared(Module):
    """A feed-forward layer of a user, with a norm inside."""

    def __init__(self) -> None:
        self.up = nn.Linear(C, 12)
        self.norm = nn.LayerNorm(1)
        self.down = nn.Linear(12, C)

    def forward(self, x: Any, residual: Any = None) -> Tensor:
        hidden = self.up(x)
        scaled = self.norm.bias * hidden + hidden**2
        y: Tensor = self.down(scaled, residual=residual)
        return y

    def shards(self) -> list[nn.Shard]:
        return [nn.Shard("up", "column"), nn.Shard("norm", "inside"), nn.Shard("down", "row")]


def layers() -> Iterator[tuple[Callable[[], Module], str | None]]:
    """Yield functions that make a whole layer, and how to shard those without a table."""
    yield lambda: nn.Linear(C, 8), "column"
    yield lambda: nn.Linear(C, 8, bias=False), "column"
    yield lambda: nn.FeedForward(C), None
    yield lambda: nn.FeedForward(C, 12, approximate="none", bias=False), None
    yield lambda: nn.SwiGLU(C, 12, bias=True), None
    yield Squared, None
    yield lambda: nn.MultiHeadAttention(C, 8, causal=True), None
    rotary = nn.RotaryEmbedding(2)
    yield lambda: nn.MultiHeadAttention(C, 8, kv_heads=4, rotary=rotary), None
    # 5 heads of keys and values, 2 of queries each, on 2 or 4 ranks
    yield lambda: nn.MultiHeadAttention(20, 10, kv_heads=5, causal=True, qk_norm=nn.RMSNorm), None


def check_layers(comm: Comm) -> None:
    for (make, kind), sequence in product(layers(), (False, True)):
        whole, is_cut = double(make()), kind is not None
        x = draw((B, T, next(whole.parameters()).shape[1]))
        inputs = Tensor(x, True)
        y = whole(inputs)
        dy = draw(y.shape, 1)
        y.backward(Tensor(dy))
        part = double(make())
        placements = cut(part, ParallelRegion(comm, sequence), kind)
        mine = Tensor(own_rows(x, comm) if sequence else x, True)
        out = part(mine)
        width = 8 // comm.size
        columns = (..., slice(comm.rank * width, (comm.rank + 1) * width))
        expected, given = (y.data[columns], dy[columns]) if is_cut else (y.data, dy)
        if sequence and not is_cut:
            expected, given = own_rows(expected, comm), own_rows(given, comm)
        close(out.data, expected)
        out.backward(Tensor(given))
        close(grad(mine), own_rows(grad(inputs), comm) if sequence else grad(inputs))
        same_gradients(part, whole, placements, comm, sequence)


def same_gradients(
    part: Module, whole: Module, placements: Placements, comm: Comm, sequence: bool
) -> None:
    """Compare the gradients of a rank's parameters with the parts of the whole layer's."""
    others = dict(whole.named_parameters())
    for name, parameter in part.named_parameters():
        found, expected = parameter.grad, others[name].grad
        if name in placements:
            close(parameter.data, cut_box(others[name].data, placements[name]))
            expected = cut_box(expected, placements[name])
        elif found is None:
            assert expected is None
            continue
        elif sequence or "norm" in name:
            comm.all_reduce(found)
        close(found, expected)


def check_row_parallel(comm: Comm) -> None:
    x, residual = draw((B, T, C)), draw((B, T, 6), 1)
    width = C // comm.size
    columns = (..., slice(comm.rank * width, (comm.rank + 1) * width))
    for bias, added, sequence in product((True, False), (True, False), (True, False)):
        whole, part = (double(nn.Linear(C, 6, bias)) for _ in range(2))
        assert isinstance(whole, nn.Linear)
        assert isinstance(part, nn.Linear)
        inputs = Tensor(x, True)
        y = tg.linear(inputs, whole.weight, whole.bias, residual=residual if added else None)
        dy = draw(y.shape, 2)
        y.backward(Tensor(dy))
        mine = Tensor(x[columns].copy(), True)
        rest = own_rows(residual, comm) if sequence else residual
        placements = cut(part, ParallelRegion(comm, sequence), "row")
        out = part(mine, rest if added else None)
        close(out.data, own_rows(y.data, comm) if sequence else y.data)
        out.backward(Tensor(own_rows(dy, comm) if sequence else dy))
        close(grad(mine), grad(inputs)[columns])
        same_gradients(part, whole, placements, comm, sequence)


def check_embedding(comm: Comm) -> None:
    ids = np.random.default_rng(0).integers(0, 12, (B, T))
    for with_positions, sequence in product((False, True), (False, True)):
        whole, part = (double(nn.Embedding(12, 5)) for _ in range(2))
        tables = [Tensor(draw((T + 3, 5), 9), True) for _ in range(2)]
        extra = [(table, 2) if with_positions else () for table in tables]
        y = whole(ids, *extra[0])
        dy = draw(y.shape, 2)
        y.backward(Tensor(dy))
        placements = cut(part, ParallelRegion(comm, sequence), "vocabulary")
        out = part(Tensor(ids), *extra[1])
        np.testing.assert_array_equal(out.data, own_rows(y.data, comm) if sequence else y.data)
        out.backward(Tensor(own_rows(dy, comm) if sequence else dy))
        same_gradients(part, whole, placements, comm, sequence)
        if with_positions:
            if sequence:
                comm.all_reduce(tables[1].grad)
            close(tables[1].grad, tables[0].grad)
        with pytest.raises(OutOfRangeError, match=r"ids\[1, 2\] is 12, expected 0 to 11"):
            part(np.where(np.arange(B * T).reshape(B, T) == T + 2, 12, ids))


def losses() -> Iterator[dict[str, Any]]:
    yield {}
    yield {"reduction": "sum", "chunk": 3}
    yield {"vocab_size": 15, "chunk": 5, "z_loss": 0.1}
    yield {"vocab_size": 7, "label_smoothing": 0.1, "z_loss": 0.01}  # a rank without any class
    yield {"ignore_index": None, "label_smoothing": 1.0}


def check_cross_entropy(comm: Comm) -> None:
    rows = 16 // comm.size
    mine = slice(comm.rank * rows, (comm.rank + 1) * rows)
    weights = draw((16, C), 1)
    for options, dtype in product(losses(), ("float64", "float32", "float16", "bfloat16")):
        targets = np.random.default_rng(1).integers(0, options.get("vocab_size", 16), (B, T))
        if "ignore_index" not in options:
            targets[0, :3] = -100
        scale = 4.0 if dtype == "float16" else 1.0
        found = []
        for many in (False, True):
            x = Tensor(draw((B, T, C)).astype(dtype), True)
            weight = Tensor(weights.astype(dtype)[mine if many else slice(None)], True)
            if many:
                loss = vocabulary_parallel_cross_entropy(
                    all_reduce_gradient(x, comm), weight, targets, comm, **options
                )
            else:
                loss = tg.linear_cross_entropy(x, weight, targets, **options)
            loss.backward(Tensor(np.asarray(scale, loss.dtype)), retain_graph=True)
            loss.backward()  # another dy
            weight_grad = grad(weight) if many else grad(weight)[mine]
            found.append((loss.data, grad(x), weight_grad))
        assert found[0][0].dtype == found[1][0].dtype
        tolerance = {"float64": 1e-13, "float32": 1e-5}.get(dtype, 0.05)
        for one, other in zip(*found, strict=True):
            close(other, one, tolerance)
    empty = Tensor(np.zeros((0, C)), True)
    head = Tensor(weights[mine].copy(), True)
    loss = vocabulary_parallel_cross_entropy(empty, head, np.zeros(0, int), comm)
    loss.backward()
    assert np.isnan(loss.item())
    assert not grad(head).any()
    ignored = np.full((B, T), -100)
    x = Tensor(draw((B, T, C)) * np.inf, True)
    with np.errstate(invalid="ignore"):
        loss = vocabulary_parallel_cross_entropy(x, head, ignored, comm)
        loss.backward()
    assert loss.item() == 0
    assert not grad(x).any()
    for change, message in (
        ({"vocab_size": 17}, rf"vocab_size is 17, expected 1 to 16 \({rows} rows on each"),
        ({"reduction": "none"}, "reduction is 'none', expected 'mean' or 'sum'"),
        ({"chunk": 0}, "chunk is 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            vocabulary_parallel_cross_entropy(x, head, ignored, comm, **change)
    with pytest.raises(OutOfRangeError, match="is 16, expected 0 to 15"):
        vocabulary_parallel_cross_entropy(x, head, np.full((B, T), 16), comm)
    with pytest.raises(ShapeError, match=r"expected \(n, 16\)"):
        vocabulary_parallel_cross_entropy(x, np.ones((3, 4)), ignored, comm)


def check_shared_offset(comm: Comm) -> None:
    """A common offset of the logits costs no precision; here products are exact in float32 too."""
    rows = 16 // comm.size
    mine = slice(comm.rank * rows, (comm.rank + 1) * rows)
    x = np.round(draw((B, T, C)) * 2) / 2
    weights = np.round(draw((16, C), 1) * 2) / 2
    x[..., 0], weights[:, 0] = 1, 2.0**15
    targets = np.random.default_rng(2).integers(0, 13, (B, T))
    for smoothing in (0.0, 0.1):
        found = []
        for dtype, many in (("float64", False), ("float32", True), ("float32", False)):
            a = Tensor(x.astype(dtype), True)
            head = Tensor(weights.astype(dtype)[mine if many else slice(None)], True)
            options: dict[str, Any] = {"vocab_size": 13, "label_smoothing": smoothing}
            if many:
                b = all_reduce_gradient(a, comm)
                loss = vocabulary_parallel_cross_entropy(b, head, targets, comm, **options)
            else:
                loss = tg.linear_cross_entropy(a, head, targets, **options)
            loss.backward()
            slopes = grad(head) if many else grad(head)[mine]
            found.append((loss.data, slopes, grad(a)[..., 1:]))
        for got in found[1:]:
            for one, other in zip(got, found[0], strict=True):
                close(one, other, 2e-6)


def small_gpt2(**changes: Any) -> GPT2:
    sizes = {"vocab_size": 37, "context": T, "layers": 2, "heads": 4, "width": C}
    random.seed(11)
    return GPT2(GPT2Config(**{**sizes, "vocab_multiple": 20, **changes}))


def small_llama(**changes: Any) -> TransformerLM:
    sizes = {"vocab_size": 40, "context": T, "layers": 2, "heads": 8, "kv_heads": 4, "width": 32}
    random.seed(11)
    return TransformerLM(TransformerLMConfig(**{**sizes, "hidden": 24, **changes}))


OF_PUBLISHED = {
    **dict.fromkeys(("qkv_bias", "proj_bias", "feed_forward_bias"), True),
    **{"tied": False, "head_width": 6, "window": 5, "qk_norm": True},
}
MODELS: tuple[Callable[..., Any], ...] = (
    small_gpt2,
    small_llama,
    lambda **changes: small_llama(**{**OF_PUBLISHED, **changes}),
)


class Plain(LanguageModel):
    """A model without positions, of which tensor parallelism knows nothing."""

    def __init__(self) -> None:
        random.seed(12)
        self.vocab_size, self.context = 40, T
        self.tokens = nn.Embedding(40, C)
        self.blocks = nn.ModuleList(nn.TransformerBlock(C, 4) for _ in range(2))
        self.norm = nn.LayerNorm(C)
        initialize(self)

    def embed(self, tokens: Any, cache: Any = None) -> Tensor:
        x: Tensor = self.tokens(self._checked(tokens, cache)[0])
        return x


def check_models(comm: Comm) -> None:
    for make, sequence in product((*MODELS, Plain), (False, True)):
        compare_with_whole(make, comm, sequence)


def compare_with_whole(make: Callable[..., Any], comm: Comm, sequence: bool) -> Any:
    """Compare one loss, its gradients and the logits, in float64; return the sharded model."""
    tokens = np.random.default_rng(2).integers(0, 37, (B, T + 1))
    whole, part = make().to("float64"), make().to("float64")
    parts = tensor_parallel(part, comm, sequence=sequence)
    assert set(parts.placements) == {name for name, _ in whole.named_parameters()}
    values = []
    for model in (whole, part):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        values.append(loss.item())
        if model is part:
            with no_grad():
                close(model(tokens[:, :-1]).data, whole(tokens[:, :-1]).data)
    close(values[1], values[0])
    others = dict(whole.named_parameters())
    for name, parameter in part.named_parameters():
        placement = parts.placements[name]
        assert placement.name == name
        assert placement.shape == others[name].shape
        close(parameter.data, cut_box(others[name].data, placement))
        if name in parts.summed:
            comm.all_reduce(parameter.grad)
        close(parameter.grad, cut_box(others[name].grad, placement), 1e-11)
    return part


def check_training(comm: Comm) -> None:
    """Clipped steps of the strategy are those of one process."""
    batch = np.random.default_rng(4).integers(0, 37, (2, B, T))
    makers: tuple[Callable[[], Any], ...] = small_gpt2, Squares
    for make, sequence in product(makers, (False, True)):
        whole, part = make(), make()
        strategies = OneProcess(), TensorParallel(comm, sequence=sequence)
        for model, strategy in zip((whole, part), strategies, strict=True):
            optimizer = strategy.prepare(model.to("float64"), partial(optim.SGD, lr=0.1))
            for _ in range(2):
                optimizer.zero_grad()
                strategy.compute_gradients(model, [tuple(batch)])
                optimizer.step(0.01, None, strategy.reduce_norm)
                strategy.after_step()
        others = dict(whole.named_parameters())
        for name, parameter in part.named_parameters():
            expected = cut_box(others[name].data, strategies[1].parts.placements[name])
            close(parameter.data, expected, 1e-9)
        losses = [
            s.add_losses(m, [tuple(batch)]) for s, m in zip(strategies, (whole, part), strict=True)
        ]
        close(losses[1], losses[0])
        assert strategies[1].sum([comm.rank, 0.5]) == [(comm.size - 1) / 2, 0.5]


class Squares(GPT2):
    """A GPT-2 whose feed-forward layers have a norm that each rank applies to its own shard."""

    def __init__(self) -> None:
        random.seed(11)
        super().__init__(GPT2Config(40, T, 2, 4, C))
        blocks: Any = self.blocks
        for block in blocks:
            block.feed_forward = Squared()


class NamedLinear(nn.Linear):
    def extra_repr(self) -> str:
        return "named"


class OwnBlock(nn.TransformerBlock):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) * 2


class OwnNorm(nn.RMSNorm):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x) * 3


class OwnAttention(nn.MultiHeadAttention): ...


class OwnSwiGLU(nn.SwiGLU): ...


class OwnEmbedding(nn.Embedding): ...


OWN: dict[type, type] = {kind.__mro__[1]: kind for kind in (NamedLinear, OwnBlock, OwnNorm)}
OWN |= {kind.__mro__[1]: kind for kind in (OwnAttention, OwnSwiGLU, OwnEmbedding)}


def check_subclasses(comm: Comm) -> None:
    """Layers of subclasses are sharded like their bases, and stay of the subclasses."""

    def make() -> TransformerLM:
        model = small_llama(tied=False)
        for layer in model.modules():
            layer.__class__ = OWN.get(type(layer), type(layer))
        return model

    for sequence in (False, True):
        model = compare_with_whole(make, comm, sequence)
        block: Any = model.blocks[1]
        assert isinstance(block, OwnBlock)
        assert isinstance(block.attention, OwnAttention)
        assert isinstance(block.feed_forward, OwnSwiGLU)
        assert isinstance(model.norm, OwnNorm)
        assert isinstance(model.tokens, OwnEmbedding)
        assert repr(block.feed_forward.gate) == "NamedLinear(named)"


def check_generation(comm: Comm) -> None:
    tokens = np.random.default_rng(2).integers(0, 37, (B, T))
    for make in MODELS:
        whole, part = make(), make()
        tensor_parallel(part, comm)
        found = []
        for model in (whole, part):
            model.eval()
            with no_grad():
                cache = model.new_cache(B)
                model.next_logits(tokens[:, :5], cache)
                found.append(model.next_logits(tokens[:, 5:], cache).data)
        close(found[1], found[0], 1e-5)


def check_dropout(comm: Comm) -> None:
    """Ranks draw the same dropout outside the regions, and different ones inside or on own rows."""
    x = Tensor(np.ones((B, T, C), "float32"))
    for sequence in (False, True):
        region = ParallelRegion(comm, sequence)
        random.seed(1)
        block = nn.TransformerBlock(C, 4, dropout=0.5)
        plain = nn.TransformerBlock(C, 4, dropout=0.5)
        for parameter in (*block.parameters(), *plain.parameters()):
            parameter.data[...] = 0.1
        cut(block, region)
        random.set_state({"seed": 3, "draw": 0, "stream": 2})
        draws = random.get_state()["draw"]
        y = block(x if not sequence else Tensor(own_rows(x.data, comm)))
        assert random.get_state()["stream"] == 2
        used = random.get_state()["draw"]
        random.set_state({"seed": 3, "draw": 0, "stream": 2})
        plain(x)
        assert used == random.get_state()["draw"] > draws
        ranks = comm.all_gather(np.ascontiguousarray(y.data))
        # Heads drop differently, but what is outside is the same on all ranks, or each one's own.
        assert all((each == ranks[0]).all() for each in ranks) != sequence
        block.attention.dropout = plain.attention.dropout = 0.0
        if not sequence:
            random.set_state({"seed": 3, "draw": 0, "stream": 2})
            y = block(x)
            random.set_state({"seed": 3, "draw": 0, "stream": 2})
            close(y.data, plain(x).data, 1e-6)
    random.set_state({"seed": 3, "draw": 0, "stream": 2})
    with ParallelRegion(comm).inner_stream(), ParallelRegion(comm).inner_stream():
        mine = random.uniform(size=4).numpy()
    everyone = comm.all_gather(mine)
    assert len({each.tobytes() for each in everyone}) == comm.size
    random.set_state({"seed": 3, "draw": 0, "stream": 2})
    np.testing.assert_array_equal(everyone[0], random.uniform(size=4).numpy())


def check_dropout_inside(comm: Comm) -> None:
    """Ranks draw different dropout of their hidden features."""
    x, hidden = Tensor(np.ones((B, T, C), "float32")), 16 * comm.size
    kinds: Any = (nn.FeedForward, nn.SwiGLU)
    for kind in kinds:
        layer = kind(C, hidden, bias=False, dropout=0.5)
        for parameter in layer.parameters():
            parameter.data[...] = 0.1
        each = layer.eval()(x).data.flat[0] / hidden  # the share of a feature
        cut(layer.train(), ParallelRegion(comm))
        kept = layer(x).data / (2 * each)
        close(kept, kept.round(), 1e-3)
        assert (kept.round() % comm.size).any()  # with equal numbers each would keep as many


def check_what_a_layer_sends(comm: Comm) -> None:
    """Check the calls of a layer against docs/chapters/parallel.md: a = B T C elements."""
    tokens = np.zeros((B, T), int)
    once = {"all_reduce": 4}, {"all_gather": 4, "reduce_scatter": 4}
    for make, sequence in product(MODELS, (False, True)):
        counts = []
        for layers in (1, 2):
            model, found = make(layers=layers), Counter[str]()
            tensor_parallel(model, comm, sequence=sequence)
            whole = B * T * model.config.width

            def counted(name: str, found: Counter[str], whole: int) -> Callable[..., Any]:
                def call(array: Any, *args: Any, **kwargs: Any) -> Any:
                    if array.size * (comm.size if name == "all_gather" else 1) == whole:
                        found[name] += 1
                    return getattr(Comm, name)(comm, array, *args, **kwargs)

                return call

            for name in ("all_reduce", "all_gather", "reduce_scatter"):
                vars(comm)[name] = counted(name, found, whole)
            try:
                model(tokens, tokens).backward()
            finally:
                for name in ("all_reduce", "all_gather", "reduce_scatter"):
                    del vars(comm)[name]
            counts.append(found)
        assert counts[1] - counts[0] == once[sequence]


def check_16_bits(comm: Comm) -> None:
    tokens = np.random.default_rng(2).integers(0, 37, (B, T + 1))
    for make, sequence in product(MODELS[:2], (False, True)):
        whole, part = make(), make()
        tensor_parallel(part, comm, sequence=sequence)
        with autocast("bfloat16"):
            a, b = (model(tokens[:, :-1], tokens[:, 1:]) for model in (whole, part))
            kinds = [model.embed(tokens[:, :-1]).dtype for model in (whole, part)]
            x = Tensor(draw((B, T, whole.config.width), dtype="float32"))
            rows = Tensor(own_rows(x.data, comm)) if sequence else x
            for name in ("attention", "feed_forward"):
                pair = zip((whole, part), (x, rows), strict=True)
                kinds += [getattr(model.blocks[0], name)(each).dtype for model, each in pair]
            assert kinds[::2] == kinds[1::2]
        close(b.item(), a.item(), 1e-2)
        b.backward()
        assert all(p.grad is not None and p.grad.dtype == "float32" for p in part.parameters())
        for model in (whole, part):
            model.to("bfloat16")
        a, b = (model(tokens[:, :-1], tokens[:, 1:]) for model in (whole, part))
        close(b.item(), a.item(), 1e-2)


def check_errors(comm: Comm) -> None:
    ranks = comm.size
    for model, message in (
        (small_gpt2(heads=1), f"kv_heads of blocks.0.attention is 1, .* of the {ranks} ranks"),
        (small_llama(hidden=25), "blocks.0.feed_forward.gate has 25 outputs, expected a multiple"),
        (
            small_gpt2(vocab_multiple=1),
            f"tokens has 37 rows, expected a multiple of the {ranks} ranks; see `vocab_multiple`",
        ),
    ):
        before = {name: tensor.data for name, tensor in model.named_parameters()}
        with pytest.raises(ArgumentError, match=message):
            tensor_parallel(model, comm)
        assert all(tensor.data is before[name] for name, tensor in model.named_parameters())
        assert type(model.tokens) is nn.Embedding
    model = small_gpt2()
    tensor_parallel(model, comm, sequence=True)
    with pytest.raises(ArgumentError, match=r"tokens is a Embedding that ranks share already"):
        tensor_parallel(model, comm)
    with pytest.raises(ShapeError, match=rf"\(2, 5, 16\), .*T a multiple of the {ranks} ranks"):
        model(np.zeros((2, 5), int))
    with pytest.raises(ShapeError, match=r"all_gather_rows: x has shape \(2, 16\), expected"):
        model.next_logits(np.zeros((2, 8), int))
    with pytest.raises(ArgumentError, match="model is a Linear without a table of the"):
        tensor_parallel(nn.Linear(2, 2), comm)
    with pytest.raises(ArgumentError, match="sequence is True, expected False: a Translation"):
        tensor_parallel(TranslationModel(TranslationConfig(40, layers=1)), comm, sequence=True)
    other = small_gpt2()
    other.tokens.weight.data[0, 0] = comm.rank
    with pytest.raises(CommError, match=r"tensor_parallel: tokens.weight is .* on rank 0"):
        tensor_parallel(other, comm)
    with pytest.raises(ShapeError, match=f"expected a multiple of the {ranks} parts"):
        cut(nn.Linear(4, 7), ParallelRegion(comm), "column")


CHECKS = tuple(check for name, check in sorted(globals().items()) if name.startswith("check_"))


def main() -> None:
    comm = parallel.world()
    comm.select_device("cpu")
    for check in CHECKS:
        check(comm)
        comm.barrier()
    if comm.rank == 0:
        print(f"{len(CHECKS)} checks on {comm.size} ranks")


if __name__ == "__main__":
    main()
