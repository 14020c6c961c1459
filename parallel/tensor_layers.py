"""Layers that the ranks of a group share: each has a part of their parameters.

    down(gelu(up(x)))       rank r has some rows of `up` and the same columns of `down`: what it
                            makes is one term of the result, which is the sum over the ranks
    proj(attention(qkv(x))) the same, by heads
    embedding               rank r has some rows of the table

What a rank computes alone is called a region. Outside, every rank has the same activations or,
with `sequence`, 1 / ranks of their rows, on which norms, dropout and residuals then work.
`tensor_parallel` in tensor.py makes a model of these layers. Tests: tests/parallel/test_tensor.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorgrad import backend, ops, random
from tensorgrad.errors import OutOfRangeError
from tensorgrad.nn import (
    Dropout,
    Embedding,
    FeedForward,
    KeyValueCache,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    Parameter,
    RMSNorm,
    SwiGLU,
    TransformerBlock,
)
from tensorgrad.ops.operand import integer_array
from tensorgrad.ops.row import Row
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.placement import Placement, cut_box, divide
from tensorgrad.parallel.tensor_ops import (
    all_gather_rows,
    all_reduce,
    all_reduce_gradient,
    reduce_scatter_rows,
)
from tensorgrad.tensor import Tensor

_STREAMS = 2**32  # apart from each other lie the streams of random numbers of the ranks

_ADD_BIAS = Row("add_bias", "x bias residual", "x + bias + residual", "dy", "dy", "dy")


@dataclass(frozen=True)
class Region:
    """Where ranks compute parts of a layer, and how activations come in and go out.

    Args:
        comm: the ranks.
        sequence: whether, outside, each rank has its part of the rows alone.
    """

    comm: Comm
    sequence: bool = False

    def enter(self, x: Any) -> Tensor:
        """Return all rows of x, (B, T, C), for this rank to take to its part of the layer."""
        return (all_gather_rows if self.sequence else all_reduce_gradient)(x, self.comm)

    def leave(self, y: Any) -> Tensor:
        """Return the sum of y over the ranks: all of it or, of a sequence, the own rows.

        The array of y, which nothing else may use, is written to.
        """
        if self.sequence:
            return reduce_scatter_rows(y, self.comm)
        return all_reduce(y, self.comm, overwrite=True)

    @contextmanager
    def rank_random_stream(self) -> Iterator[None]:
        """Draw other random numbers than the other ranks: for what is cut, as dropout of heads.

        Outside, ranks draw the same ones, from the stream that the training loop has set. Draws
        are counted alike on all ranks.
        """
        stream = random.get_state()["stream"]
        own = stream % _STREAMS + self.comm.rank * _STREAMS
        random.set_state({**random.get_state(), "stream": own})
        try:
            yield
        finally:
            random.set_state({**random.get_state(), "stream": stream})

    def drop(self, layer: Dropout, x: Tensor) -> Tensor:
        """Return dropout of what is cut."""
        if not layer.drops:
            return x
        with self.rank_random_stream():
            return layer.forward(x)

    def outer_random_stream(self) -> AbstractContextManager[None]:
        """Draw the random numbers of what is outside: the own ones if the rows are cut."""
        return self.rank_random_stream() if self.sequence else nullcontext()

    def cut(
        self,
        parameter: Parameter,
        axis: int,
        sections: Sequence[int] | None = None,
        units: int | None = None,
    ) -> Placement:
        """Leave this rank's part of a parameter in its place; see `divide`."""
        comm = self.comm
        placement = divide("", parameter.shape, axis, comm.rank, comm.size, sections, units)
        parameter.data = cut_box(parameter.data, placement).copy()
        parameter.grad = None
        return placement


class ColumnParallelLinear(Linear):
    """y = x W^T + b, of which this rank makes some columns: it has these rows of W and of b.

    Args:
        whole: takes over its parameters and cuts them, so that the ranks' parts are those of one
            layer when all ranks drew equal ones.
        region: the ranks, and whether x comes as rows of each.
        sections: lengths along y that are cut each for itself; see `divide`.
        units: of so many the outputs, or each section, consist; the ranks have whole ones.
    Attributes:
        placements: which part of each parameter is here.
    Raises:
        ShapeError: the outputs, or a section, are no multiple of the ranks, or of the units.
    """

    def __init__(
        self,
        whole: Linear,
        region: Region,
        sections: Sequence[int] | None = None,
        units: int | None = None,
    ) -> None:
        vars(self).update(vars(whole))
        self.region = region
        self.placements = {"weight": region.cut(self.weight, 0, sections, units)}
        if self.bias is not None:
            self.placements["bias"] = region.cut(self.bias, 0, sections, units)

    def forward(self, x: Any) -> Tensor:
        """Return (B, T, the own outputs) for x (B, T, inputs) or, of a sequence, its own rows."""
        return ops.linear(self.region.enter(x), self.weight, self.bias)


class RowParallelLinear(Linear):
    """y = x W^T + b, of whose x this rank has some columns: it has these columns of W, and b.

    Args:
        whole: takes over its parameters and cuts the weight; as for `ColumnParallelLinear`.
        region: the ranks, and whether y goes out as rows of each.
        units: of so many the inputs consist; the ranks have whole ones.
    Attributes:
        placements: which part of the weight is here.
    Raises:
        ShapeError: the inputs are no multiple of the ranks, or of the units.
    """

    def __init__(self, whole: Linear, region: Region, units: int | None = None) -> None:
        vars(self).update(vars(whole))
        self.region = region
        self.placements = {"weight": region.cut(self.weight, 1, units=units)}

    def forward(self, x: Any, residual: Any = None) -> Tensor:
        """Return (B, T, outputs), or the own rows, for x (B, T, own inputs), plus residual."""
        return self.outside(ops.linear(x, self.weight), residual)

    def outside(self, y: Tensor, residual: Any = None) -> Tensor:
        """Return the sum of y over the ranks, plus the bias and what is as large as that sum."""
        y = self.region.leave(y)
        if self.bias is None:
            return y if residual is None else y + residual
        bias = self.bias.astype(y.dtype, copy=False)  # its dtype shall not make y wider
        return y + bias if residual is None else _ADD_BIAS(y, bias, residual)


class VocabularyParallelEmbedding(Embedding):
    """A table of which this rank has some rows.

    Args:
        whole: takes over its table and cuts it; as for `ColumnParallelLinear`.
        region: the ranks, and whether rows of the result go to each.
    Attributes:
        placements: which part of the table is here.
    Raises:
        ShapeError: the vocabulary is no multiple of the ranks.
    """

    def __init__(self, whole: Embedding, region: Region) -> None:
        vars(self).update(vars(whole))
        self.region = region
        self.placements = {"weight": region.cut(self.weight, 0)}

    def forward(self, ids: Any, positions: Any = None, start: int = 0) -> Tensor:
        """Return (B, T, width), or the own rows; arguments as of `Embedding`, ids (B, T)."""
        comm, rows = self.region.comm, len(self.weight.data)
        ids = integer_array("VocabularyParallelEmbedding", "ids", ids)
        _check_ids(ids, rows * comm.size)
        local = ids - comm.rank * rows
        here = (local >= 0) & (local < rows)
        # An id of another rank stands for any row here, different ones for different rows: their
        # gradients are 0, and adding them up takes the longer the more go to one row.
        y = ops.embedding(self.weight, local % rows)
        y = self.region.leave(ops.where(here[..., None], y, 0.0))
        if positions is None:
            return y
        return y + ops.embedding(positions, self._places(ids, start))

    def _places(self, ids: backend.Array, start: int) -> backend.Array:
        """Return for each row of the result its place in the sequence."""
        xp, (batch, length) = backend.namespace(ids), ids.shape
        if not self.region.sequence:
            return xp.arange(start, start + length)
        comm, share = self.region.comm, length // self.region.comm.size
        first = comm.rank * batch * share
        return start + xp.arange(first, first + batch * share).reshape(batch, share) % length


def _check_ids(ids: backend.Array, vocabulary: int) -> None:
    """Raise OutOfRangeError for an id outside the vocabulary, on the CPU."""
    if not backend.is_numpy(ids):
        return
    outside = (ids < 0) | (ids >= vocabulary)
    if outside.any():
        place = tuple(int(i) for i in np.argwhere(outside)[0])
        raise OutOfRangeError(
            f"VocabularyParallelEmbedding: ids{list(place)} is {ids[place]}, expected 0 to "
            f"{vocabulary - 1} (a vocabulary of {vocabulary})"
        )


class ParallelAttention(MultiHeadAttention):
    """Attention of which this rank has some heads: of keys and values, and the queries of these.

    Where the ranks do not divide the heads some ranks have one head of keys and values more.

    Args:
        whole: takes over its layers and cuts them.
        region: the ranks; no more than there are heads of keys and values.
    Attributes:
        heads, kv_heads: how many of each are here.
    """

    def __init__(self, whole: MultiHeadAttention, region: Region) -> None:
        vars(self).update(vars(whole))
        self.region = region
        units = whole.kv_heads
        width = len(whole.qkv.weight.data) // (whole.heads + 2 * units)
        sections = [width * heads for heads in (whole.heads, units, units)]
        self.qkv = ColumnParallelLinear(whole.qkv, region, sections, units)
        self.proj = RowParallelLinear(whole.proj, region, units)
        comm = region.comm
        self.kv_heads = units * (comm.rank + 1) // comm.size - units * comm.rank // comm.size
        self.heads = whole.heads // units * self.kv_heads

    def forward(self, x: Any, mask: Any = None, cache: KeyValueCache | None = None) -> Tensor:
        """Return the shape of x; see `MultiHeadAttention`. The cache holds the heads of here."""
        with self.region.rank_random_stream():
            return super().forward(x, mask, cache)


class ParallelFeedForward(FeedForward):
    """down(gelu(up(x))), of whose hidden width this rank has a part.

    Args:
        whole: takes over its layers and cuts them.
        region: the ranks.
    """

    down: RowParallelLinear

    def __init__(self, whole: FeedForward, region: Region) -> None:
        vars(self).update(vars(whole))
        self.region = region
        self.up = ColumnParallelLinear(whole.up, region)
        self.down = RowParallelLinear(whole.down, region)

    def forward(self, x: Any, residual: Any = None) -> Tensor:
        """Return the shape of x; a residual is added."""
        up, down = self.up, self.down
        x = self.region.enter(x)
        if self.dropout.drops:
            hidden = ops.linear_gelu(x, up.weight, up.bias, self.approximate)
            return down.forward(self.region.drop(self.dropout, hidden), residual)
        y = ops.feed_forward(x, up.weight, up.bias, down.weight, None, approximate=self.approximate)
        return down.outside(y, residual)


class ParallelSwiGLU(SwiGLU):
    """down(silu(gate(x)) * up(x)), of whose hidden width this rank has a part.

    Args:
        whole: takes over its layers and cuts them.
        region: the ranks.
    """

    gate: ColumnParallelLinear
    up: ColumnParallelLinear
    down: RowParallelLinear

    def __init__(self, whole: SwiGLU, region: Region) -> None:
        vars(self).update(vars(whole))
        self.region = region
        self.gate = ColumnParallelLinear(whole.gate, region)
        self.up = ColumnParallelLinear(whole.up, region)
        self.down = RowParallelLinear(whole.down, region)

    def forward(self, x: Any, residual: Any = None) -> Tensor:
        """Return the shape of x; a residual is added."""
        x = self.region.enter(x)
        gate, up = self.gate, self.up
        hidden = ops.gated_linear(x, gate.weight, up.weight, gate.bias, up.bias)
        return self.down.forward(self.region.drop(self.dropout, hidden), residual)


class ParallelBlock(TransformerBlock):
    """A transformer block whose layers ranks share.

    Args:
        whole: takes over its layers and cuts them.
        region: the ranks.
    """

    def __init__(self, whole: TransformerBlock, region: Region) -> None:
        vars(self).update(vars(whole))
        self.region = region
        self.attention = ParallelAttention(whole.attention, region)
        layer = whole.feed_forward
        if isinstance(layer, SwiGLU):
            self.feed_forward = ParallelSwiGLU(layer, region)
        elif isinstance(layer, FeedForward):
            self.feed_forward = ParallelFeedForward(layer, region)

    def forward(self, x: Any, mask: Any = None, cache: KeyValueCache | None = None) -> Tensor:
        """Return the shape of x: (B, T, C) or, of a sequence, the own rows."""
        with self.region.outer_random_stream():
            return super().forward(x, mask, cache)


class ParallelDropout(Dropout):
    """Dropout of what is outside the regions: all of it or, of a sequence, the own rows.

    Args:
        whole: as which it drops.
        region: the ranks.
    """

    def __init__(self, whole: Dropout, region: Region) -> None:
        vars(self).update(vars(whole))
        self.region = region

    def forward(self, x: Any) -> Tensor:
        """Return the shape of x."""
        with self.region.outer_random_stream():
            return super().forward(x)


class ParallelLayerNorm(LayerNorm):
    """The norm before a region that nothing leaves, as that of the head.

    Args:
        whole: takes over its parameters.
        region: the ranks.
    """

    def __init__(self, whole: LayerNorm, region: Region) -> None:
        vars(self).update(vars(whole))
        self.region = region

    def forward(self, x: Any) -> Tensor:
        """Return (B, T, C), inside the region, for that shape or the own rows."""
        return self.region.enter(super().forward(x))


class ParallelRMSNorm(RMSNorm):
    """The norm before a region that nothing leaves, as that of the head.

    Args:
        whole: takes over its parameters.
        region: the ranks.
    """

    def __init__(self, whole: RMSNorm, region: Region) -> None:
        vars(self).update(vars(whole))
        self.region = region

    def forward(self, x: Any) -> Tensor:
        """Return (B, T, C), inside the region, for that shape or the own rows."""
        return self.region.enter(super().forward(x))
