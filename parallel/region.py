"""Tensor parallel regions: what a rank computes with its shard of a layer.

    down(gelu(up(x)))       "column" `up`, "row" `down`: rank r has some rows of W of `up` and the
                            same columns of W of `down`. What it computes is one term of a sum over
                            the ranks.
    proj(attention(qkv(x))) the same, by heads
    embedding               "vocabulary": rank r has some rows of the matrix

Layers enter and leave a region themselves, where `shard` has given them one; their tables say which
do (tensorgrad/nn/shard.py). Outside the regions every rank has the same activations. With sequence
parallelism (`sequence`) it has 1 / ranks of their rows there, and norms, dropout and residuals work
on these rows. Tests: tests/parallel/test_tensor.py.

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022,
    arXiv:2205.05198, section 4 (sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from tensorgrad import random
from tensorgrad.core import backend
from tensorgrad.core.dtypes import DtypeLike
from tensorgrad.core.operands import integer_array
from tensorgrad.core.tensor import Tensor
from tensorgrad.ops.elementwise import where
from tensorgrad.ops.elementwise.row import Row
from tensorgrad.ops.embedding import check_ids, embedding
from tensorgrad.ops.linear import linear
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.tensor_ops import (
    all_gather_columns,
    all_gather_rows,
    all_reduce,
    all_reduce_gradient,
    reduce_scatter_rows,
)
from tensorgrad.parallel.vocabulary import vocabulary_parallel_cross_entropy

_STREAMS = 2**32  # distance between the random streams of two ranks

_ADD_BIAS = Row("add_bias", "x bias residual", "x + bias + residual", "dy", "dy", "dy")


@dataclass(frozen=True)
class ParallelRegion:
    """The ranks that share layers, and how activations enter and leave what each computes alone.

    Args:
        comm: the ranks.
        sequence: whether each rank has only its part of the rows outside the region.
    """

    comm: Comm
    sequence: bool = False

    def enter(self, x: Any) -> Tensor:
        """Return all rows of x, (B, T, C), as the input of this rank's shard."""
        return (all_gather_rows if self.sequence else all_reduce_gradient)(x, self.comm)

    def leave(self, y: Any, bias: Any = None, residual: Any = None) -> Tensor:
        """Return the sum of the terms y of the ranks, plus bias and residual.

        With `sequence` the result and the residual are this rank's rows. The array of y is
        overwritten, so nothing else may use it.
        """
        if self.sequence:
            z = reduce_scatter_rows(y, self.comm)
        else:
            z = all_reduce(y, self.comm, overwrite=True)
        if bias is None:
            return z if residual is None else z + residual
        bias = bias.astype(z.dtype, copy=False)  # a float32 bias must not widen z
        return z + bias if residual is None else _ADD_BIAS(z, bias, residual)

    def embed(self, weight: Tensor, ids: Any, positions: Any = None, start: Any = 0) -> Tensor:
        """Return (B, T, width) or this rank's rows, where this rank has some rows of the weight.

        Args:
            weight: (n, width), rows n r to n (r + 1) of the whole weight on rank r.
            ids, positions, start: as for `nn.Embedding`, ids (B, T).
        """
        comm, rows = self.comm, len(weight.data)
        ids = integer_array("embedding", "ids", ids)
        check_ids("embedding", ids, rows * comm.size)
        local = ids - comm.rank * rows
        is_own = (local >= 0) & (local < rows)
        # The ids of other ranks read rows whose results are dropped. `%` spreads them over all
        # rows: their gradients are 0, but adding many to one row would be slow.
        y = embedding(weight, local % rows)
        y = self.leave(where(is_own[..., None], y, 0.0))
        if positions is None:
            return y
        return y + embedding(positions, self._positions(ids, start))

    def _positions(self, ids: backend.Array, start: Any) -> backend.Array:
        """Return the position of each row of the result in its sequence."""
        xp, (batch, length) = backend.namespace(ids), ids.shape
        if backend.is_array(start):  # sequences of any lengths, whose rows no ranks share
            return start[:, None] + xp.arange(length)
        if not self.sequence:
            return xp.arange(start, start + length)
        comm, local = self.comm, length // self.comm.size
        first = comm.rank * batch * local
        return start + xp.arange(first, first + batch * local).reshape(batch, local) % length

    def logits(self, x: Any, weight: Tensor, dtype: DtypeLike | None = None) -> Tensor:
        """Return (..., V) logits of x, (..., C), of which this rank has some rows of the head."""
        return all_gather_columns(linear(x, weight, dtype=dtype), self.comm)

    def cross_entropy(self, x: Any, weight: Tensor, targets: Any, **options: Any) -> Tensor:
        """Return the loss; see `vocabulary_parallel_cross_entropy`."""
        return vocabulary_parallel_cross_entropy(x, weight, targets, self.comm, **options)

    @contextmanager
    def inner_stream(self) -> Iterator[None]:
        """Draw from a random stream of this rank: for dropout inside the region.

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

    def outer_stream(self) -> AbstractContextManager[None]:
        """Draw the random numbers of layers outside: from this rank's stream with `sequence`."""
        return self.inner_stream() if self.sequence else nullcontext()
