"""Tensor parallelism: `tensor_parallel` shards a language model's layers over the ranks.

    blocks.*.attention.qkv      rows, by heads of queries, of keys and of values
    blocks.*.attention.proj     columns, by heads
    blocks.*.feed_forward       rows of up and gate, columns of down
    tokens, output              rows, by tokens
    norms, positions, proj.bias, down.bias      whole on each rank

The layers say so, in the tables of their methods `shards`; region.py has the functions they call.
Tests: tests/parallel/test_tensor.py.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from tensorgrad import nn
from tensorgrad.core import backend
from tensorgrad.core.backend import Array, Shape
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.tensor import Tensor
from tensorgrad.optim import FlatParameters, LossScaler, Optimizer
from tensorgrad.optim.clip import sum_of_squares
from tensorgrad.optim.flat import ALIGNMENT, Boxes, NamedParameters, zeros
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.nested import NestedStrategy
from tensorgrad.parallel.region import ParallelRegion
from tensorgrad.parallel.stages import check_not_shared
from tensorgrad.train.placement import Placement, cut_box, divide, paste_box
from tensorgrad.train.strategy import Batch, Count, Loss, MakeOptimizer, Strategy, count_targets

_SAMPLE = 1024  # elements of each parameter by which ranks compare their models


@dataclass(frozen=True)
class TensorParts:
    """How a model was sharded.

    Attributes:
        comm: the ranks that share its layers.
        sequence: whether they also share the rows between the layers.
        placements: which part of the whole model's parameter each of its parameters is, by name.
        inside: the parameters that every rank has, but applies to its own shard alone.
    """

    comm: Comm
    sequence: bool
    placements: dict[str, Placement]
    inside: frozenset[str] = frozenset()

    @property
    def replicated(self) -> frozenset[str]:
        """The parameters that every rank has."""
        if self.comm.size == 1:
            return frozenset()
        return frozenset(name for name, part in self.placements.items() if part.ranges is None)

    @property
    def summed(self) -> frozenset[str]:
        """The parameters whose gradients must be summed over the ranks after backward.

        With `sequence` these are the replicated ones: each rank applies them to its own rows.
        """
        return self.replicated if self.sequence else self.replicated & self.inside


class ShardRow(NamedTuple):
    """A row of a module's table, with the module and the layer that it names."""

    owner: str  # the name of the module
    module: Any
    shard: nn.Shard
    layer: Any

    @property
    def name(self) -> str:
        """The name of the layer in the model."""
        return f"{self.owner}.{self.shard.layer}".lstrip(".")

    @property
    def axis(self) -> int:
        """The axis of the weight that ranks divide."""
        return 1 if self.shard.kind == "row" else 0


def tensor_parallel(model: nn.Module, comm: Comm, *, sequence: bool = False) -> TensorParts:
    """Shard a whole model in place: afterwards this rank has its part, and all compute together.

    Which layers ranks share is in the tables that the model and its layers return from `shards`;
    the others are whole on each rank. All ranks must have made the same model, from equal seeds;
    the parts put together are that model, for any number of ranks. Tokens and targets go to all
    ranks alike, and all get the same loss and logits. Without dropout, losses and gradients are
    those of the whole model, but for the order of sums.

    Args:
        model: a model that is not sharded yet, before its optimizer is made; its layers and
            parameters stay the same objects.
        comm: the ranks; their number divides the hidden width and the rows of the token embedding,
            and is at most that of key and value heads. Where it does not divide the heads, some
            ranks have one more, and more to compute.
        sequence: sequence parallelism: each rank keeps 1 / ranks of the rows between the layers.
            That needs less memory for as many bytes sent. The number of ranks must divide the
            length T of sequences. Sum gradients of `TensorParts.summed` over the ranks, as the
            strategy `TensorParallel` does.

    Returns:
        How the model was sharded: `placements`, which part of the whole model's parameter each
        parameter is, and `summed`.

    Raises:
        ArgumentError: the model has no table, a size does not divide, a layer of a table is of
            another kind or has a forward of its own, layers share a parameter, or `sequence` is
            asked of a model whose loss needs all rows; nothing was changed then.
        CommError: the ranks have made different models, or differ in `sequence`.

    Example:
        >>> model = tg.nn.FeedForward(8)
        >>> parts = tg.parallel.tensor_parallel(model, tg.parallel.world())
        >>> parts.placements["up.weight"].shape
        (32, 8)
    """
    rows = check_shares(model, comm.size, sequence)
    marks = {name: _fingerprint(parameter) for name, parameter in model.named_parameters()}
    comm.agree("tensor_parallel", {"sequence": sequence, **marks})
    region = ParallelRegion(comm, sequence and comm.size > 1)
    placements: dict[str, Placement] = {}
    if comm.size > 1:
        placements = shard(model, rows, region)
    for name, parameter in model.named_parameters():
        placements.setdefault(name, Placement(name, parameter.shape))
    inside = {
        f"{row.name}.{key}"
        for row in rows
        if row.shard.kind == "inside"
        for key, _ in row.layer.named_parameters()
    }
    return TensorParts(comm, region.sequence, placements, frozenset(inside))


def shared_rows(op: str, model: nn.Module) -> list[ShardRow]:
    """Return the rows of all tables of a model.

    Args:
        op: what shares the layers.
        model: whole.
    Raises:
        ArgumentError: no table names a layer to share.
    """
    rows = list(rows_of(model))
    if all(row.shard.kind == "inside" for row in rows):
        raise ArgumentError(
            f"{op}: model is a {type(model).__name__} without a table of the layers that ranks "
            "share, expected a method `shards` of the model or of its layers"
        )
    return rows


def rows_of(model: nn.Module) -> Iterator[ShardRow]:
    """Yield the rows of all tables of a model."""
    for owner, module in model.named_modules():
        for shard in getattr(module, "shards", list)():
            layer = getattr(module, shard.layer)
            if layer is not None:
                yield ShardRow(owner, module, shard, layer)


def shard(
    model: nn.Module, rows: Sequence[ShardRow], region: ParallelRegion
) -> dict[str, Placement]:
    """Cut the layers of tables and give them their region; return the parts of parameters."""
    comm, placements = region.comm, dict[str, Placement]()
    _draw(model, region.outer_stream)
    for row in rows:
        module, layer, (_, kind, sections, units, counts) = row.module, row.layer, row.shard
        if kind == "inside":
            _draw(layer, region.inner_stream)
            continue
        for key in ("weight",) if kind == "row" else ("weight", "bias"):
            parameter = getattr(layer, key, None)
            if parameter is not None:
                name = f"{row.name}.{key}".lstrip(".")
                placements[name] = divide(
                    name, parameter.shape, row.axis, comm.rank, comm.size, sections, units
                )
                parameter.data = cut_box(parameter.data, placements[name]).copy()
                parameter.grad = None
        for count in counts:
            assert units is not None  # the table of a layer with counts has their units
            own = units * (comm.rank + 1) // comm.size - units * comm.rank // comm.size
            setattr(module, count, getattr(module, count) // units * own)
        if kind == "vocabulary":
            layer.region = module.region = region
        else:
            setattr(layer, "after" if kind == "row" else "before", region)
    return placements


def _draw(module: nn.Module, stream: Callable[[], AbstractContextManager[None]]) -> None:
    """Let the dropout layers of a module draw from a stream."""
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.stream = stream


def check_shares(
    model: Any, ranks: int, sequence: bool = False, *, vocabulary: bool = True
) -> list[ShardRow]:
    """Check that a model can be sharded over a number of ranks; return the rows of its tables.

    Args:
        model: whole; values do not count.
        ranks: the number of ranks.
        sequence: as for `tensor_parallel`.
        vocabulary: whether the sizes of embeddings count.
    Raises:
        ArgumentError: it cannot.
    """
    rows = shared_rows("tensor_parallel", model)
    if sequence and ranks > 1 and not getattr(model, "loss_of_any_rows", True):
        raise ArgumentError(
            f"tensor_parallel: sequence is True, expected False: a {type(model).__name__} takes "
            "its loss of some rows alone, which are not the same of each rank's rows"
        )
    if ranks > 1:
        check_not_shared("tensor_parallel", model)
    for row in rows:
        if row.shard.kind != "inside":
            _check_layer(row)
            if vocabulary or row.shard.kind != "vocabulary":
                _check_sizes(row, ranks)
    return rows


def _check_layer(row: ShardRow) -> None:
    layer = row.layer
    kinds = (nn.Embedding, nn.Linear)[row.shard.kind != "vocabulary" :]
    base = next((kind for kind in kinds if isinstance(layer, kind)), None)
    overrides = base is not None and type(layer).forward is not base.forward
    own = " with a forward of its own" if overrides or "forward" in vars(layer) else ""
    regions = (getattr(layer, name, None) for name in ("region", "before", "after"))
    sharded = " that ranks share already" if any(region is not None for region in regions) else ""
    if base is None or own or sharded:
        raise ArgumentError(
            f"tensor_parallel: {row.name} is a {type(layer).__name__}{own}{sharded}, expected nn."
            f"{' or nn.'.join(kind.__name__ for kind in kinds)}, not sharded yet, or a subclass "
            "that keeps its forward"
        )


def _check_sizes(row: ShardRow, ranks: int) -> None:
    (_, kind, sections, units, counts), length = row.shard, row.layer.weight.shape[row.axis]
    if units is not None and units < ranks:
        what = f"{counts[-1]} of {row.owner}" if counts else f"the number of units of {row.name}"
        raise ArgumentError(
            f"tensor_parallel: {what} is {units}, expected one or more for each of the {ranks} "
            "ranks"
        )
    if units is None and any(size % ranks for size in sections or (length,)):
        what = {"column": "outputs", "row": "inputs", "vocabulary": "rows"}[kind]
        hint = "; see `vocab_multiple`" if kind == "vocabulary" else ""
        raise ArgumentError(
            f"tensor_parallel: {row.name} has {length} {what}, expected a multiple of the {ranks} "
            f"ranks{hint}"
        )


def _fingerprint(parameter: Tensor) -> str:
    """Return dtype, shape and a digest of the first elements, to compare parameters by."""
    sample = backend.to_numpy(parameter.data.reshape(-1)[:_SAMPLE])
    frozen = "" if parameter.requires_grad else " frozen"
    return f"{parameter.dtype} {parameter.shape} {zlib.crc32(sample.tobytes()):08x}{frozen}"


class TensorParallel(NestedStrategy):
    """Train a model whose layers the ranks share; another strategy works within.

    The ranks of a group get the same batches, compute the same loss, and take the same steps.
    Gradient norms count replicated parameters once.

    Args:
        comm: the ranks that share layers.
        inner: how ranks with the same part of the layers train together: those that differ from
            this one along the other axes of the mesh; None: there are no others.
        sequence: as for `tensor_parallel`.
        world: all ranks, which write checkpoints together; None: those of `comm`.

    Attributes:
        parts: how the model was sharded, set by `prepare`.

    Example:
        >>> model, strategy = tg.nn.FeedForward(8), tg.parallel.TensorParallel(tg.parallel.world())
        >>> optimizer = strategy.prepare(model, tg.optim.AdamW)
        >>> parts = [(np.ones((4, 8), "float32"),)]  # the same on all ranks that share layers
        >>> total = strategy.compute_gradients(lambda x: model(x).mean(), parts)
        >>> model.down.bias.grad  # 1 / 8
        array([0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125],
              dtype=float32)
    """

    parts: TensorParts

    def __init__(
        self,
        comm: Comm,
        inner: Strategy | None = None,
        *,
        sequence: bool = False,
        world: Comm | None = None,
    ) -> None:
        """Train on the ranks of `comm`, and on those of `inner`."""
        super().__init__(comm, inner, world)
        self._sequence = sequence
        self._terms: _JoinedGradients | None = None
        self._copies: _JoinedGradients | None = None

    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Optimizer:
        """Shard the model, and return the optimizer of this rank's part.

        Raises:
            ArgumentError, CommError: see `tensor_parallel`.
        """
        self.parts = tensor_parallel(model, self._comm, sequence=self._sequence)
        self._placements = self.parts.placements

        def make(parameters: FlatParameters | NamedParameters) -> Optimizer:
            if not isinstance(parameters, FlatParameters):
                parameters = FlatParameters(parameters)
            parameters.boxes = _LayerBoxes(self.parts)
            return make_optimizer(parameters)

        optimizer = self._inner.prepare(model, make)
        self._terms = _JoinedGradients(optimizer.flat, self.parts.summed)
        if self._comm.rank > 0:
            self._copies = _JoinedGradients(optimizer.flat, self.parts.replicated)
        return optimizer

    def compute_gradients(
        self,
        loss: Loss,
        parts: Sequence[Batch],
        scaler: LossScaler | None = None,
        count: Count = count_targets,
    ) -> Array:
        """Compute as the inner ranks do, then sum the gradients of `TensorParts.summed`."""
        total = self._inner.compute_gradients(loss, parts, scaler, count)
        if self._terms:
            terms = self._terms.read()
            self._comm.all_reduce(terms)
            self._inner.add_shards(terms)
            self._terms.write()
        return total

    def reduce_norm(self, squares: Array) -> None:
        """Add, in place, the squares of gradients of other ranks; replicated ones count once."""
        if self._copies:
            with np.errstate(invalid="ignore"):  # inf - inf: this step will be skipped
                squares -= sum_of_squares(self._copies.read())
        self._inner.reduce_norm(squares)
        self._comm.all_reduce(squares)

    def add_losses(
        self, loss: Loss, batches: Iterable[Batch], count: Count = count_targets
    ) -> tuple[float, float]:
        """Evaluate as the inner ranks do."""
        return self._inner.add_losses(loss, batches, count)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over the inner ranks of the mean over these ranks."""
        means = np.array(values, "float64")
        self._comm.all_reduce(means, "mean")
        return self._inner.sum([float(mean) for mean in means])


class _LayerBoxes(Boxes):
    """The boxes of parameters whose layers ranks share."""

    def __init__(self, parts: TensorParts) -> None:
        self._comm, self._placements = parts.comm, parts.placements

    def shape(self, name: str, own: Shape) -> Shape:
        """Return the shape in the whole model."""
        return self._placements[name].shape

    def join(self, name: str, own: Array) -> Array:
        """Return the sum of what each rank has in its place, and 0 elsewhere."""
        placement = self._placements[name]
        if placement.ranges is None:
            return own
        whole = zeros(math.prod(placement.shape), own.dtype, own).reshape(placement.shape)
        paste_box(own, whole, placement)
        self._comm.all_reduce(whole)
        return whole

    def cut(self, name: str, whole: Array) -> Array:
        """Return the box of a whole array."""
        return cut_box(whole, self._placements[name])

    def add(self, name: str, sums: Array) -> None:
        """Add the sums of other ranks, unless all of them have the whole parameter."""
        if self._placements[name].ranges is not None:
            self._comm.all_reduce(sums)


class _JoinedGradients:
    """The gradients of some parameters, of which this rank may have a part, as one array.

    The array has all of them in the model's order, so its layout is the same on all ranks, whatever
    the layout of flat buffers. Gradients of other ranks are 0 in it. Runs that are contiguous in
    both are copied together; if that is all of them, the array is a view.
    """

    def __init__(self, flat: FlatParameters, names: Collection[str]) -> None:
        places: dict[str, int] = {}
        length = 0
        for name in flat.parameters:
            if name in names:
                places[name] = -(-length // ALIGNMENT) * ALIGNMENT
                length = places[name] + math.prod(flat.slots[name].shape)
        self._parts: list[tuple[int, Array]] = []  # start in the array, and gradients
        apart = {name: flat.slots[name].offset - place for name, place in places.items()}
        ordered = sorted(flat.slots, key=lambda name: flat.slots[name].offset)
        for distance, run in groupby(ordered, apart.get):
            slots = [flat.slots[name].span for name in run]
            for part in flat.shards:
                first = max(slots[0].start, part.begin)
                last = min(slots[-1].stop, part.begin + int(part.grad.size))
                if distance is not None and first < last:
                    grad = part.grad[first - part.begin : last - part.begin]
                    self._parts.append((first - distance, grad))
        like = flat.shards[0].grad
        self._joined: Array | None = None
        if [int(grad.size) for _, grad in self._parts] != [length]:
            self._joined = zeros(length, like.dtype, like)

    def __bool__(self) -> bool:
        """Return whether there are any, on whatever rank."""
        return self._joined is None or self._joined.size > 0

    def read(self) -> Array:
        """Return the gradients as one array."""
        if self._joined is None:
            return self._parts[0][1]
        self._joined.fill(0)
        for begin, part in self._parts:
            self._joined[begin : begin + part.size] = part
        return self._joined

    def write(self) -> None:
        """Write the array that `read` returned back to the gradients."""
        if self._joined is None:
            return
        for begin, part in self._parts:
            part[...] = self._joined[begin : begin + part.size]
