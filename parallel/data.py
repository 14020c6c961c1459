"""Data parallelism: every rank has the whole model and its own part of each batch.

Ranks start from the parameters of rank 0. Each computes the gradient of the mean loss over its
own examples; the mean of these gradients over the ranks is the gradient of the joint batch, when
all ranks have equally many examples. All then take the same optimizer step, so parameters stay
equal bit for bit and are never sent again.

Gradients lie in one flat buffer (optim/flat.py), so that a step is one all-reduce, or a few of
parts of the buffer, each sent as soon as backward has left it (buckets.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad.backend import Array
from tensorgrad.errors import ArgumentError
from tensorgrad.nn import Module
from tensorgrad.optim import FlatParameters, Optimizer
from tensorgrad.parallel.buckets import Buckets, assign_buckets, leading_tables
from tensorgrad.parallel.checkpoint import load_latest, load_pieces
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.comm.handle import Handle
from tensorgrad.tensor import Tensor
from tensorgrad.train.checkpoint import Checkpoint
from tensorgrad.train.ranks import MakeOptimizer, Ranks

REDUCTIONS = ("naive", "flat", "overlap")


def broadcast_parameters(arrays: Iterable[Array], comm: Comm, root: int = 0) -> None:
    """Replace arrays on all ranks by those of `root`: parameters, buffers, optimizer state.

    Args:
        arrays: the same number, shapes and dtypes on all ranks; written in place. Flat buffers
            are the fewest calls.
        comm: the ranks.
        root: the rank that sends.
    Raises:
        CommError: the ranks have different arrays.
    """
    arrays = list(arrays)
    comm.agree(
        "broadcast_parameters", {"arrays": [f"{each.dtype} {each.shape}" for each in arrays]}
    )
    for array in arrays:
        comm.broadcast(array, root)


def all_reduce_gradients(grad: Array, comm: Comm) -> None:
    """Replace the gradient on all ranks by the mean over the ranks, with one all-reduce.

    grad = 1/ranks * sum_r grad_r

    Args:
        grad: flat gradient buffer, (parameters,), float32; written in place.
        comm: the ranks.
    Raises:
        CommError: the ranks have different buffers.
    """
    comm.all_reduce(grad, "mean")


class DataParallel(Ranks):
    """Every rank computes the gradient of its part of the batch; all take the mean of these.

    Three ways to add up the gradients, with the same result:

        "naive"     one all-reduce for each parameter, after backward
        "flat"      one all-reduce of the flat buffer, after backward
        "overlap"   one for each bucket of the buffer, sent while backward goes on (buckets.py)

    Args:
        comm: the ranks.
        reduction: which of them.
        bucket_mb: size of a bucket in MB (10^6 bytes) of gradients. Small ones cost the latency
            of many calls, large ones leave more to wait for at the end. None: what suits the
            number of parameters (bucket_size.py).
    Raises:
        ArgumentError: there is no such reduction, or `bucket_mb` is not positive.
    """

    def __init__(
        self, comm: Comm, reduction: str = "overlap", bucket_mb: float | None = None
    ) -> None:
        """Train on the ranks of `comm`."""
        if reduction not in REDUCTIONS:
            raise ArgumentError(
                f"DataParallel: reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}"
            )
        if bucket_mb is not None and not bucket_mb > 0:
            raise ArgumentError(f"DataParallel: bucket_mb is {bucket_mb}, expected more than 0")
        self._comm = comm
        self._reduction, self._bucket_mb = reduction, bucket_mb
        self._flat: FlatParameters | None = None
        self._buckets: Buckets | None = None
        self.rank, self.ranks, self.is_main = comm.rank, comm.size, comm.rank == 0

    def prepare(self, model: Module, make_optimizer: MakeOptimizer) -> Optimizer:
        """Return the optimizer of the parameters, which are the same on all ranks.

        Raises:
            CommError: the ranks have different models.
        """
        parameters = self._agreed_parameters(model, {"reduction": self._reduction})
        if self._reduction == "overlap":
            buckets = self._assign_buckets(model, parameters)
            self._flat = FlatParameters(parameters.items(), groups=buckets.__getitem__)
            self._buckets = Buckets(self._flat.segments, parameters, self._send)
        else:
            self._flat = FlatParameters(parameters.items())
        return make_optimizer(self._flat)

    def begin(
        self, step: int, arrays: Sequence[Array], facts: Mapping[str, Any] | None = None
    ) -> None:
        """Check that all ranks are at this step, with the same facts; give all rank 0's arrays.

        Raises:
            CommError: they are not, as where a host does not see the checkpoints of the others;
                or the ranks have different arrays.
        """
        self._comm.agree("train", {"step": step, **(facts or {})})
        broadcast_parameters(arrays, self._comm)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for backward after which more gradients will be added: none are sent.

        with ranks.no_sync():
            loss(first half).backward()
        loss(second half).backward()
        ranks.reduce_gradients()
        """
        return nullcontext() if self._buckets is None else self._buckets.hold()

    def reduce_gradients(self) -> None:
        """After the last backward of a step: replace the gradients by their mean over the ranks.

        Those that are on their way already are waited for, on a GPU by its stream alone.
        """
        if self._buckets is not None:
            self._buckets.finish()
        elif self._flat is None:
            raise ArgumentError("DataParallel: the optimizer is not from prepare(), expected that")
        elif self._reduction == "flat":
            all_reduce_gradients(self._flat.grad, self._comm)
        else:
            for grad in self._flat.views(self._flat.grad).values():
                all_reduce_gradients(grad, self._comm)

    def load_latest(self, folder: Path) -> Checkpoint | None:
        """Open the newest checkpoint that is whole, the same on all ranks; None without any."""
        return load_latest(folder, self._comm)

    def load(self, checkpoint: Checkpoint, model: Module, optimizer: Optimizer) -> None:
        """Take over a checkpoint of one process, or of which any number of ranks have pieces."""
        load_pieces(self._comm, checkpoint, model, optimizer)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over the ranks of some numbers, the same on every rank.

        For what the loop decides and shows: losses, rows, whether any rank was asked to stop.
        Ranks that leave a loop after different steps would wait for each other for ever.
        """
        sums = np.array(values, "float64")
        self._comm.all_reduce(sums)
        return [float(each) for each in sums]

    def _agreed_parameters(self, model: Module, settings: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the parameters that are trained, once all ranks have the same."""
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        kinds = {name: f"{p.dtype} {p.shape}" for name, p in parameters.items()}
        order = f"{zlib.crc32(' '.join(kinds).encode()):08x}"
        facts = {**settings, "bucket_mb": self._bucket_mb, **kinds, "order of parameters": order}
        self._comm.agree(type(self).__name__, facts)
        return dict(parameters)

    def _assign_buckets(self, model: Module, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the number of each parameter's bucket."""
        return assign_buckets(parameters, self._bucket_mb, leading_tables(model, parameters))

    def _send(self, number: int) -> Handle:
        """Begin to replace the gradients of a segment by their mean."""
        assert self._flat is not None
        begin, _, end, _ = self._flat.segments[number]
        return self._comm.all_reduce(self._flat.grad[begin:end], "mean", wait=False)
