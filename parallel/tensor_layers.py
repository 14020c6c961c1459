"""Tensor parallel layers: the ranks of a group share the parameters of each layer.

    down(gelu(up(x)))       column parallel `up`, row parallel `down`: rank r has some rows of W of
                            `up` and the same columns of W of `down`. What it computes is one term
                            of a sum over the ranks.
    proj(attention(qkv(x))) the same, by heads
    embedding               vocabulary parallel: rank r has some rows of the matrix

A parallel region is what a rank computes with its shard of a layer. Outside the regions every rank
has the same activations. With sequence parallelism (`sequence`) it has 1 / ranks of their rows
there, and norms, dropout and residuals work on these rows. `tensor_parallel` in tensor.py puts
these layers in place of a model's. Tests: tests/parallel/test_tensor.py.

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022,
    arXiv:2205.05198, section 4 (sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

from tensorgrad import backend, nn, random
from tensorgrad.operands import integer_array
from tensorgrad.ops.elementwise import where
from tensorgrad.ops.elementwise.row import Row
from tensorgrad.ops.embedding import check_ids, embedding
from tensorgrad.ops.linear import feed_forward, gated_linear, linear, linear_gelu
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.tensor_ops import (
    all_gather_rows,
    all_reduce,
    all_reduce_gradient,
    reduce_scatter_rows,
)
from tensorgrad.placement import Placement, cut_box, divide
from tensorgrad.tensor import Tensor

_STREAMS = 2**32  # distance between the random streams of two ranks

_ADD_BIAS = Row("add_bias", "x bias residual", "x + bias + residual", "dy", "dy", "dy")


@dataclass(frozen=True)
class Region:
    """A parallel region, and how activations enter and leave it.

    Args:
        comm: the ranks that share the layer.
        sequence: whether each rank has only its part of the rows outside the region.
    """

    comm: Comm
    sequence: bool = False

    def enter(self, x: Any) -> Tensor:
        """Return all rows of x, (B, T, C), as the input of this rank's shard."""
        return (all_gather_rows if self.sequence else all_reduce_gradient)(x, self.comm)

    def leave(self, y: Any) -> Tensor:
        """Return the sum of y over the ranks; with `sequence` this rank's rows of it.

        The array of y is overwritten, so nothing else may use it.
        """
        if self.sequence:
            return reduce_scatter_rows(y, self.comm)
        return all_reduce(y, self.comm, overwrite=True)

    @contextmanager
    def rank_random_stream(self) -> Iterator[None]:
        """Draw from a random stream of this rank: for dropout inside a region.

        Outside this context all ranks draw the same numbers, from the stream that the training
        loop has set. Every rank counts the same number of draws.
        """
        stream = random.get_state()["stream"]
        own = stream % _STREAMS + self.comm.rank * _STREAMS
        random.set_state({**random.get_state(), "stream": own})
        try:
            yield
        finally:
            random.set_state({**random.get_state(), "stream": stream})

    def drop(self, layer: nn.Dropout, x: Tensor) -> Tensor:
        """Return the dropout of an activation inside the region."""
        if not layer.drops:
            return x
        with self.rank_random_stream():
            return layer.forward(x)

    def outer_random_stream(self) -> AbstractContextManager[None]:
        """Draw the random numbers of layers outside: from this rank's stream with `sequence`."""
        return self.rank_random_stream() if self.sequence else nullcontext()

    def shard(
        self,
        parameter: nn.Parameter,
        axis: int,
        sections: Sequence[int] | None = None,
        units: int | None = None,
    ) -> Placement:
        """Replace a parameter's array by this rank's shard of it; see `divide`."""
        comm = self.comm
        placement = divide("", parameter.shape, axis, comm.rank, comm.size, sections, units)
        parameter.data = cut_box(parameter.data, placement).copy()
        parameter.grad = None
        return placement


class ShardedLayer(nn.Module):
    """Base of the layers that take the place of a whole layer on ranks that share it.

    The new layer has the parameters, sublayers and attributes of the whole one. Where that is of a
    subclass, say of nn.Linear, the new layer is too, so it keeps what the subclass adds.

    Args:
        whole: the layer to replace. All ranks must have drawn the same parameters.
        region: the ranks that share it.
    Attributes:
        placements: which part of a whole parameter this rank has, by name; the others are whole.
    """

    placements: dict[str, Placement]

    def __new__(cls, whole: nn.Module, *args: Any, **kwargs: Any) -> Self:
        """Return an object whose class also derives from the class of the whole layer."""
        if not issubclass(cls, type(whole)):
            cls = type(cls.__name__, (cls, type(whole)), {})
        return super().__new__(cls)

    def __init__(self, whole: nn.Module, region: Region) -> None:
        vars(self).update(vars(whole))
        self.region = region
        self.placements = {}


class ColumnParallelLinear(ShardedLayer, nn.Linear):
    """y = x W^T + b, where this rank computes some columns of y: it has these rows of W and b.

    Args:
        whole, region: as of `ShardedLayer`.
        sections: lengths along y that are divided separately; see `divide`.
        units: number of equal units of the outputs, or of each section; no unit is divided.
    Raises:
        ShapeError: the outputs, or a section, are not a multiple of the ranks, or of the units.
    """

    def __init__(
        self,
        whole: nn.Linear,
        region: Region,
        sections: Sequence[int] | None = None,
        units: int | None = None,
    ) -> None:
        super().__init__(whole, region)
        self.placements["weight"] = region.shard(self.weight, 0, sections, units)
        if self.bias is not None:
            self.placements["bias"] = region.shard(self.bias, 0, sections, units)

    def forward(self, x: Any) -> Tensor:  # type: ignore[override]
        """Return (B, T, this rank's outputs) for x, (B, T, inputs) or this rank's rows of it."""
        return linear(self.region.enter(x), self.weight, self.bias)


class RowParallelLinear(ShardedLayer, nn.Linear):
    """y = x W^T + b, where this rank has some columns of x: it has these columns of W, and b.

    Args:
        whole, region: as of `ShardedLayer`.
        units: number of equal units of the inputs; no unit is divided.
    Raises:
        ShapeError: the inputs are not a multiple of the ranks, or of the units.
    """

    def __init__(self, whole: nn.Linear, region: Region, units: int | None = None) -> None:
        super().__init__(whole, region)
        self.placements["weight"] = region.shard(self.weight, 1, units=units)

    def forward(self, x: Any, residual: Any = None) -> Tensor:
        """Return y + residual, (B, T, outputs) or this rank's rows, for x (B, T, its inputs)."""
        return self.reduce(linear(x, self.weight), residual)

    def reduce(self, y: Tensor, residual: Any = None) -> Tensor:
        """Return the sum of the ranks' products y, plus bias and residual."""
        y = self.region.leave(y)
        if self.bias is None:
            return y if residual is None else y + residual
        bias = self.bias.astype(y.dtype, copy=False)  # a float32 bias must not widen y
        return y + bias if residual is None else _ADD_BIAS(y, bias, residual)


class VocabularyParallelEmbedding(ShardedLayer, nn.Embedding):
    """An embedding of which this rank has some rows.

    Raises:
        ShapeError: the vocabulary is not a multiple of the ranks.
    """

    def __init__(self, whole: nn.Embedding, region: Region) -> None:
        super().__init__(whole, region)
        self.placements["weight"] = region.shard(self.weight, 0)

    def forward(self, ids: Any, positions: Any = None, start: Any = 0) -> Tensor:
        """Return (B, T, width) or this rank's rows; arguments as of `Embedding`, ids (B, T)."""
        comm, rows = self.region.comm, len(self.weight.data)
        ids = integer_array("VocabularyParallelEmbedding", "ids", ids)
        check_ids("VocabularyParallelEmbedding", ids, rows * comm.size)
        local = ids - comm.rank * rows
        here = (local >= 0) & (local < rows)
        # The ids of other ranks read rows whose results are dropped. `%` spreads them over all
        # rows: their gradients are 0, but adding many to one row would be slow.
        y = embedding(self.weight, local % rows)
        y = self.region.leave(where(here[..., None], y, 0.0))
        if positions is None:
            return y
        return y + embedding(positions, self._positions(ids, start))

    def _positions(self, ids: backend.Array, start: Any) -> backend.Array:
        """Return the position of each row of the result in its sequence."""
        xp, (batch, length) = backend.namespace(ids), ids.shape
        if backend.is_array(start):  # of sequences of any lengths, whose rows no ranks share
            return start[:, None] + xp.arange(length)
        if not self.region.sequence:
            return xp.arange(start, start + length)
        comm, local = self.region.comm, length // self.region.comm.size
        first = comm.rank * batch * local
        return start + xp.arange(first, first + batch * local).reshape(batch, local) % length


class ParallelAttention(ShardedLayer, nn.MultiHeadAttention):
    """Attention of which this rank has some key and value heads, and the queries of these.

    Where the number of ranks does not divide the heads, some ranks have one more.

    Args:
        whole, region: as of `ShardedLayer`; at most as many ranks as key and value heads.
    Attributes:
        heads, kv_heads: the heads of this rank.
    """

    def __init__(self, whole: nn.MultiHeadAttention, region: Region) -> None:
        super().__init__(whole, region)
        units, comm = whole.kv_heads, region.comm
        width = len(whole.qkv.weight.data) // (whole.heads + 2 * units)
        sections = [width * heads for heads in (whole.heads, units, units)]
        self.qkv = ColumnParallelLinear(whole.qkv, region, sections, units)
        self.proj = RowParallelLinear(whole.proj, region, units)
        self.kv_heads = units * (comm.rank + 1) // comm.size - units * comm.rank // comm.size
        self.heads = whole.heads // units * self.kv_heads

    def forward(self, x: Any, mask: Any = None, cache: nn.KeyValueCache | None = None) -> Tensor:
        """Return the shape of x; see `MultiHeadAttention`. The cache holds this rank's heads."""
        with self.region.rank_random_stream():
            return super().forward(x, mask, cache)


class ParallelFeedForward(ShardedLayer, nn.FeedForward):
    """down(gelu(up(x))), of whose hidden width this rank has a part."""

    down: RowParallelLinear

    def __init__(self, whole: nn.FeedForward, region: Region) -> None:
        super().__init__(whole, region)
        self.up = ColumnParallelLinear(whole.up, region)
        self.down = RowParallelLinear(whole.down, region)

    def forward(self, x: Any, residual: Any = None) -> Tensor:
        """Return the shape of x; a residual is added."""
        up, down = self.up, self.down
        x = self.region.enter(x)
        if self.dropout.drops:
            hidden = linear_gelu(x, up.weight, up.bias, self.approximate)
            return down.forward(self.region.drop(self.dropout, hidden), residual)
        y = feed_forward(x, up.weight, up.bias, down.weight, None, approximate=self.approximate)
        return down.reduce(y, residual)


class ParallelSwiGLU(ShardedLayer, nn.SwiGLU):
    """down(silu(gate(x)) * up(x)), of whose hidden width this rank has a part."""

    gate: ColumnParallelLinear
    up: ColumnParallelLinear
    down: RowParallelLinear

    def __init__(self, whole: nn.SwiGLU, region: Region) -> None:
        super().__init__(whole, region)
        self.gate = ColumnParallelLinear(whole.gate, region)
        self.up = ColumnParallelLinear(whole.up, region)
        self.down = RowParallelLinear(whole.down, region)

    def forward(self, x: Any, residual: Any = None) -> Tensor:
        """Return the shape of x; a residual is added."""
        x = self.region.enter(x)
        gate, up = self.gate, self.up
        hidden = gated_linear(x, gate.weight, up.weight, gate.bias, up.bias)
        return self.down.forward(self.region.drop(self.dropout, hidden), residual)


class ParallelBlock(ShardedLayer, nn.TransformerBlock):
    """A transformer block with tensor parallel attention and feed-forward layers."""

    def __init__(self, whole: nn.TransformerBlock, region: Region) -> None:
        super().__init__(whole, region)
        self.attention = ParallelAttention(whole.attention, region)
        layer = whole.feed_forward
        if isinstance(layer, nn.SwiGLU):
            self.feed_forward = ParallelSwiGLU(layer, region)
        elif isinstance(layer, nn.FeedForward):
            self.feed_forward = ParallelFeedForward(layer, region)

    def forward(self, x: Any, mask: Any = None, cache: nn.KeyValueCache | None = None) -> Tensor:
        """Return the shape of x: (B, T, C) or, with `sequence`, this rank's rows."""
        with self.region.outer_random_stream():
            return super().forward(x, mask, cache)


class ParallelDropout(ShardedLayer, nn.Dropout):
    """Dropout outside the regions: of all activations or, with `sequence`, of this rank's rows."""

    def forward(self, x: Any) -> Tensor:
        """Return the shape of x."""
        with self.region.outer_random_stream():
            return super().forward(x)


class ParallelNorm(ShardedLayer):
    """The last norm, whose result enters the region of the head.

    Args:
        whole, region: as of `ShardedLayer`; `whole` is a LayerNorm or RMSNorm.
    """

    def forward(self, x: Any) -> Tensor:
        """Return (B, T, C) for x of that shape or, with `sequence`, this rank's rows of it."""
        return self.region.enter(super().forward(x))
