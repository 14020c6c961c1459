"""Data parallelism: every rank has the whole model and its own part of each batch.

Ranks start from the parameters of rank 0. Each computes the gradient of the mean loss of its own
examples, weighted by its targets (`Strategy.shares`). So the mean of these gradients is the
gradient of the whole batch. All ranks take the same optimizer step, so parameters stay equal bit
for bit and are never sent again.

Gradients are in one flat buffer (optim/flat.py), so a step needs one all-reduce, or one for each
bucket of the buffer, which overlaps with backward (buckets.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np

from tensorgrad.autograd import trees
from tensorgrad.core.arrays import added, cast
from tensorgrad.core.backend import Array, empty
from tensorgrad.core.dtypes import Dtype, compute_dtype, float32
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.modes import mode
from tensorgrad.core.tensor import Tensor
from tensorgrad.nn import Module
from tensorgrad.nn.module import with_tensors
from tensorgrad.optim import FlatParameters, Optimizer
from tensorgrad.parallel.buckets import Buckets, assign_buckets, leading_embeddings
from tensorgrad.parallel.checkpoint import RankWriters
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.comm.handle import Handle
from tensorgrad.parallel.comm.peer_memory import SharedArray
from tensorgrad.train.strategy import MakeOptimizer, Strategy
from tensorgrad.train.strategy_settings import REDUCTIONS

_Tree = TypeVar("_Tree")


def broadcast_parameters(arrays: Iterable[Array], comm: Comm, root: int = 0) -> None:
    """Replace arrays on all ranks by those of `root`: parameters, buffers, optimizer state.

    Args:
        arrays: the same number, shapes and dtypes on all ranks; written in place. Flat buffers
            need the fewest calls.
        comm: the ranks.
        root: the rank that sends.

    Raises:
        CommError: the ranks have different arrays.

    Example:
        >>> x = np.array([1.0, 2.0])
        >>> tg.parallel.broadcast_parameters([x], tg.parallel.world())
        >>> x  # that of rank 0
        array([1., 2.])
    """
    arrays = list(arrays)
    comm.agree(
        "broadcast_parameters", {"arrays": [f"{array.dtype} {array.shape}" for array in arrays]}
    )
    for array in arrays:
        comm.broadcast(array, root)


def all_reduce_gradients(grad: Array, comm: Comm) -> None:
    """Replace the gradient on all ranks by its mean over the ranks, with one all-reduce.

    grad = 1/ranks * sum_r grad_r

    Args:
        grad: flat gradient buffer, (parameters,), float32; written in place.
        comm: the ranks.

    Raises:
        CommError: the ranks have different buffers.

    Example:
        >>> grad = np.array([1.0, 2.0], "float32")
        >>> tg.parallel.all_reduce_gradients(grad, tg.parallel.world())
        >>> grad  # the mean over the ranks, here one
        array([1., 2.], dtype=float32)
    """
    comm.all_reduce(grad, "mean")


def all_reduce_tree(values: _Tree, comm: Comm) -> _Tree:
    """Return a tree of tensors as its mean over the ranks, from one flat buffer for each dtype.

    So a Hessian-vector product, which each rank has computed on its part of the batch, becomes
    that of the whole batch, with equal bits on all ranks. 16-bit tensors are added in float32.

    Args:
        values: nested dictionaries, lists, tuples and modules of tensors, any shapes, the same on
            all ranks.
        comm: the ranks.

    Returns:
        A tree of the same structure, shapes and dtypes.

    Raises:
        CommError: the ranks have different trees.
        DtypeError: a tensor does not hold floats.

    Example:
        >>> product = {"weight": tg.tensor([1.0, 2.0])}
        >>> tg.parallel.all_reduce_tree(product, tg.parallel.world())
        {'weight': tensor([1., 2.], dtype=float32)}
    """
    tensors = list({id(leaf): leaf for leaf in _tensors(values)}.values())
    if comm.size == 1 or not tensors:
        return values
    means: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        means |= _flat_means([x for x in tensors if x.dtype == dtype], dtype, comm)
    result: _Tree = _replaced(values, means)
    return result


def _flat_means(tensors: Sequence[Tensor], dtype: Dtype, comm: Comm) -> dict[int, Tensor]:
    """Return the mean of each tensor by its id, as a part of one buffer."""
    size = sum(x.size for x in tensors)
    flat = empty((-(-size // comm.size) * comm.size,), dtype, tensors[0].data)
    flat[size:] = 0
    parts, begin = {}, 0
    for x in tensors:
        part = flat[begin : begin + x.size].reshape(x.shape)
        part[...] = x.data
        parts[id(x)], begin = Tensor(part), begin + x.size
    if compute_dtype(dtype) != dtype:
        _all_reduce_narrow(flat, comm)
    else:
        comm.all_reduce(flat, "mean")
    return parts


def _all_reduce_narrow(flat: Array, comm: Comm) -> None:
    """Replace 16-bit numbers by their mean, rounded once; float32 would be twice the traffic.

    Each rank adds its piece of all ranks in float32, in their order, and sends the mean.
    """
    pieces = empty((comm.size, flat.size // comm.size), flat.dtype, flat)
    comm.all_to_all(flat, pieces.reshape(-1))
    total = cast(pieces[0], float32)
    for piece in pieces[1:]:
        total = added(total, piece, float32)
    total /= float32.type(comm.size)
    comm.all_gather(cast(total, flat.dtype), flat)


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree: of a module its parameters, also those of results."""
    if isinstance(values, Module):
        yield from values.parameters()
    elif isinstance(values, Tensor):
        yield values
    elif (kind := trees.kind_of(values)) is not None:
        for child in kind.children(values).values():
            yield from _tensors(child)


def _replaced(values: Any, by_id: Mapping[int, Tensor]) -> Any:
    """Return a tree with other tensors."""
    if isinstance(values, Module):
        return with_tensors(values, by_id)
    kind = trees.kind_of(values)
    if kind is None:
        return by_id.get(id(values), values)
    children = {key: _replaced(x, by_id) for key, x in kind.children(values).items()}
    return kind.build(values, children, "build")


class DataParallel(Strategy):
    """Every rank computes the gradient of its part of the batch; all use the mean of these.

    Three ways to reduce the gradients, with the same result:

        "naive"     one all-reduce for each parameter, after backward
        "flat"      one all-reduce of the flat buffer, after backward
        "overlap"   one for each bucket of the buffer, during backward (buckets.py)

    Args:
        comm: the ranks.
        reduction: "naive", "flat" or "overlap".
        bucket_mb: size of a bucket in MB (10^6 bytes) of gradients. Small buckets cost the latency
            of many calls, large ones leave more to send after backward. None: a size that suits the
            number of parameters (bucket_size.py).

    Raises:
        ArgumentError: the reduction is unknown, or `bucket_mb` is not positive.

    Example:
        >>> model, strategy = tg.nn.Linear(2, 1), tg.parallel.DataParallel(tg.parallel.world())
        >>> optimizer = strategy.prepare(model, tg.optim.SGD)
        >>> parts = [(np.ones((4, 2), "float32"),)]  # this rank's rows of the batch
        >>> total = strategy.compute_gradients(lambda x: model(x).mean(), parts)
        >>> model.weight.grad
        array([[1., 1.]], dtype=float32)
    """

    def __init__(
        self, comm: Comm, reduction: str = "overlap", *, bucket_mb: float | None = None
    ) -> None:
        """Train on the ranks of `comm`."""
        if reduction not in REDUCTIONS:
            raise ArgumentError(
                f"DataParallel: reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}"
            )
        if bucket_mb is not None and not bucket_mb > 0:
            raise ArgumentError(f"DataParallel: bucket_mb is {bucket_mb}, expected more than 0")
        self._comm, self.writers = comm, RankWriters(comm)
        self._reduction, self._bucket_mb = reduction, bucket_mb
        self._flat: Any = None  # the FlatParameters of `prepare`
        self._buckets: Buckets | None = None
        self._shared: SharedArray | None = None  # keeps the gradients shared between GPUs
        self.rank, self.ranks, self.is_main = comm.rank, comm.size, comm.rank == 0
        self.processes = comm.size

    captures = True

    def prepare(self, model: Module, make_optimizer: MakeOptimizer) -> Optimizer:
        """Return the optimizer of the parameters, which are the same on all ranks.

        Raises:
            CommError: the ranks have different models.
        """
        parameters = self._agreed_parameters(model, {"reduction": self._reduction})
        if self._reduction == "overlap":
            buckets = self._assign_buckets(model, parameters)
            self._flat = FlatParameters(parameters.items(), groups=buckets.__getitem__)
            self._buckets = Buckets(self._flat.buckets, parameters, self._send)
            self._shared = self._comm.share(self._flat.grad)
        else:
            self._flat = FlatParameters(parameters.items())
        return make_optimizer(self._flat)

    def begin(
        self, step: int, arrays: Sequence[Array], facts: Mapping[str, Any] | None = None
    ) -> None:
        """Check that all ranks are at this step, with the same facts; broadcast rank 0's arrays.

        Raises:
            CommError: they are not, for instance because a host does not see the checkpoints of
                the others; or the ranks have different arrays.
        """
        self._comm.agree("train", {"step": step, **(facts or {})})
        broadcast_parameters(arrays, self._comm)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for every backward of a step but the last: no gradients are sent.

        with strategy.no_sync():
            loss(first half).backward()
        loss(second half).backward()
        strategy.reduce_gradients()
        """
        return nullcontext() if self._buckets is None else self._buckets.hold()

    def reduce_gradients(self) -> None:
        """Replace the gradients by their mean over the ranks, after the last backward of a step.

        It waits for buckets in flight; on a GPU only the stream waits.
        """
        flat = self._prepared()
        if self._buckets is not None:
            self._buckets.finish()
        elif self._reduction == "flat":
            all_reduce_gradients(flat.grad, self._comm)
        else:
            for grad in flat.views(flat.grad).values():
                all_reduce_gradients(grad, self._comm)
        self._share_untouched(flat)

    def reduce_largest(self, values: Array) -> None:
        """Replace integers by the largest over the ranks, in place."""
        self._comm.all_reduce(values, "max")

    def _prepared(self) -> Any:
        """Return the parameters of `prepare`."""
        if self._flat is None:
            name = type(self).__name__
            raise ArgumentError(f"{name}: prepare() was not called, expected it before training")
        return self._flat

    def _share_untouched(self, flat: FlatParameters) -> None:
        """Note which parameters have a gradient on other ranks alone.

        A captured step takes them from the step before it, which ran eagerly.
        """
        if self._comm.size == 1 or mode.capture is not None:
            return
        own = set(flat.untouched())
        touched = np.array([name not in own for name in flat.parameters])
        self._comm.all_reduce(touched, "max")
        names = zip(flat.parameters, touched, strict=True)
        flat.touched_elsewhere = frozenset(name for name, any_ in names if any_ and name in own)

    def add_counts(self, count: Array) -> None:
        """Add, in place, how many targets other ranks have of a batch."""
        self._comm.all_reduce(count)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over the ranks of some numbers, the same on every rank.

        For what the loop decides and shows: losses, rows, whether a rank was asked to stop. Ranks
        that left the loop after different steps would deadlock.
        """
        sums = np.array(values, "float64")
        self._comm.all_reduce(sums)
        return [float(part) for part in sums]

    def reset(self) -> None:
        """Forget a step that did not reach its end."""
        if self._buckets is not None:
            self._buckets.reset()

    def _agreed_parameters(self, model: Module, settings: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the trained parameters, after checking that all ranks have the same."""
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        kinds = {name: f"{p.dtype} {p.shape}" for name, p in parameters.items()}
        order = f"{zlib.crc32(' '.join(kinds).encode()):08x}"
        facts = {**settings, "bucket_mb": self._bucket_mb, **kinds, "order of parameters": order}
        self._comm.agree(type(self).__name__, facts)
        return dict(parameters)

    def _assign_buckets(self, model: Module, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the number of each parameter's bucket."""
        return assign_buckets(parameters, self._bucket_mb, leading_embeddings(model, parameters))

    def _send(self, number: int) -> Handle:
        """Start to replace the gradients of a bucket by their mean; the last runs alone."""
        flat = self._prepared()
        begin, _, end, _ = flat.buckets[number]
        return self._comm.all_reduce(flat.grad[begin:end], "mean", wait=number == 0)
