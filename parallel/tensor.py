"""Tensor parallelism: `tensor_parallel` shards a language model's layers over the ranks.

    blocks.*.attention.qkv      rows, by heads of queries, of keys and of values
    blocks.*.attention.proj     columns, by heads
    blocks.*.feed_forward       rows of up and gate, columns of down
    tokens, output              rows, by tokens
    norms, positions, proj.bias, down.bias      whole on each rank

`_sharded_layers` and `_shard_layers` are the one place that says which layers of a model are
sharded, and what replaces them. Models know nothing of it. Tests: tests/parallel/test_tensor.py.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from tensorgrad import backend, nn
from tensorgrad.backend import Array
from tensorgrad.dtypes import DtypeLike
from tensorgrad.errors import ArgumentError
from tensorgrad.models.gpt2 import GPT2
from tensorgrad.models.transformer_lm import TransformerLM
from tensorgrad.models.translation import TranslationModel
from tensorgrad.ops.linear import linear
from tensorgrad.ops.linear_cross_entropy import linear_cross_entropy
from tensorgrad.optim import FlatParameters, LossScaler, Optimizer
from tensorgrad.optim.clip import sum_of_squares
from tensorgrad.optim.flat import ALIGNMENT, zeros
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.nested import NestedRanks
from tensorgrad.parallel.stages import check_not_shared
from tensorgrad.parallel.tensor_layers import (
    ColumnParallelLinear,
    ParallelBlock,
    ParallelDropout,
    ParallelNorm,
    Region,
    ShardedLayer,
    VocabularyParallelEmbedding,
)
from tensorgrad.parallel.tensor_ops import all_gather_columns
from tensorgrad.parallel.vocabulary import vocabulary_parallel_cross_entropy
from tensorgrad.placement import Placement
from tensorgrad.tensor import Tensor
from tensorgrad.train.ranks import Batch, Count, Loss, MakeOptimizer, Ranks, count_targets

_SAMPLE = 1024  # elements of each parameter by which ranks compare their models


@dataclass(frozen=True)
class TensorParts:
    """How a model was sharded.

    Attributes:
        comm: the ranks that share its layers.
        sequence: whether they also share the rows between the layers.
        placements: which part of the whole model's parameter each of its parameters is, by name.
    """

    comm: Comm
    sequence: bool
    placements: dict[str, Placement]

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
        return self.replicated if self.sequence else frozenset()


class _Role(NamedTuple):
    """A layer that ranks share, and what may stand in its place in the whole model."""

    name: str
    layer: Any
    kinds: tuple[type[nn.Module], ...]
    in_region: bool  # its parallel form computes something else than the layer's own forward


def tensor_parallel(model: nn.Module, comm: Comm, sequence: bool = False) -> TensorParts:
    """Shard a whole model in place: afterwards this rank has its part, and all compute together.

    All ranks must have made the same model, from equal seeds; the parts put together are that
    model, for any number of ranks. Tokens and targets go to all ranks alike, and all get the same
    loss and logits. Without dropout, losses and gradients are those of the whole model, but for
    the order of sums.

    A layer of a subclass is sharded like its base. It must inherit its forward where the parallel
    form has another one: in attention, feed-forward layers, embedding and head.

    Args:
        model: a GPT2 or TransformerLM that is not sharded yet, before its optimizer is made; its
            parameters stay the same objects.
        comm: the ranks; their number divides the hidden width and the rows of the token embedding,
            and is at most that of key and value heads. Where it does not divide the heads, some
            ranks have one more, and more to compute.
        sequence: sequence parallelism: each rank keeps 1 / ranks of the rows between the layers.
            That needs less memory for as many bytes sent. The number of ranks must divide the
            length T of sequences. Sum gradients of `TensorParts.summed` over the ranks, as the
            strategy `TensorParallel` does.
    Raises:
        ArgumentError: a size does not divide, a layer or the function of the loss is not the
            library's, layers share a parameter, queries and keys have norms, or `sequence` is
            asked of a TranslationModel; nothing was changed then.
        CommError: the ranks have made different models, or differ in `sequence`.
    """
    if not isinstance(model, GPT2 | TransformerLM):
        raise ArgumentError(
            f"tensor_parallel: model is a {type(model).__name__}, expected a GPT2 or TransformerLM"
        )
    _check(model, comm.size, sequence)
    marks = {name: _fingerprint(parameter) for name, parameter in model.named_parameters()}
    comm.agree("tensor_parallel", {"sequence": sequence, **marks})
    region = Region(comm, sequence and comm.size > 1)
    if comm.size > 1:
        _shard_layers(model, region)
    placements = {}
    for prefix, module in model.named_modules():
        for key, placement in getattr(module, "placements", {}).items():
            name = f"{prefix}.{key}"
            placements[name] = replace(placement, name=name)
    for name, parameter in model.named_parameters():
        placements.setdefault(name, Placement(name, parameter.shape))
    return TensorParts(comm, region.sequence, placements)


def _shard_layers(model: Any, region: Region) -> None:
    """Replace the layers that `_sharded_layers` names, and the functions of the head."""
    model.tokens = VocabularyParallelEmbedding(model.tokens, region)
    model.dropout = ParallelDropout(model.dropout, region)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = ParallelBlock(block, region)
    model.norm = ParallelNorm(model.norm, region)
    if model.output is not None:  # else the head was sharded with the token embedding
        model.output = ColumnParallelLinear(model.output, region)
    model.captures = False
    model.linear = partial(_gathered_linear, comm=region.comm)
    model.linear_cross_entropy = partial(vocabulary_parallel_cross_entropy, comm=region.comm)


def _gathered_linear(x: Any, weight: Any, comm: Comm, dtype: DtypeLike | None = None) -> Tensor:
    """Return the logits of all ranks' rows of the head."""
    return all_gather_columns(linear(x, weight, dtype=dtype), comm)


def _check(model: Any, ranks: int, sequence: bool) -> None:
    """Raise ArgumentError unless the model can be sharded over this number of ranks."""
    if sequence and ranks > 1 and isinstance(model, TranslationModel):
        raise ArgumentError(
            "tensor_parallel: sequence is True, expected False: a TranslationModel takes its loss "
            "of the last places alone, which are not the last of each rank's rows"
        )
    if ranks > 1:
        check_not_shared("tensor_parallel", model)
    for name, layer, kinds, in_region in _sharded_layers(model):
        base = next((kind for kind in kinds if isinstance(layer, kind)), None)
        overrides = in_region and base is not None and type(layer).forward is not base.forward
        own = " with a forward of its own" if overrides or "forward" in vars(layer) else ""
        if base is None or own or isinstance(layer, ShardedLayer):
            raise ArgumentError(
                f"tensor_parallel: {name} is a {type(layer).__name__}{own}, expected nn."
                f"{' or nn.'.join(kind.__name__ for kind in kinds)}, not sharded yet, or a "
                "subclass that keeps its forward: a layer that ranks share takes its place"
            )
    for name, op in (("linear", linear), ("linear_cross_entropy", linear_cross_entropy)):
        if getattr(model, name) is not op:
            raise ArgumentError(
                f"tensor_parallel: {name} of the model is {getattr(model, name)!r}, expected "
                f"tensorgrad.{name}, since one that ranks share takes its place"
            )
    for number, block in enumerate(model.blocks):
        heads = block.attention.kv_heads
        if heads < ranks:
            raise ArgumentError(
                f"tensor_parallel: kv_heads of block {number} is {heads}, expected one or more "
                f"for each of the {ranks} ranks"
            )
        if ranks > 1 and block.attention.q_norm is not None:
            raise ArgumentError(
                f"tensor_parallel: attention of block {number} has norms of queries and keys, "
                "expected none: each rank would have the gradient of its own heads alone"
            )
        hidden = block.feed_forward.up.weight.shape[0]
        _check_divides(f"the hidden width of block {number}", hidden, ranks)
    rows, hint = model.tokens.weight.shape[0], "; see GPT2Config.vocab_multiple"
    _check_divides("the number of rows of the token embedding", rows, ranks, hint)


def _check_divides(name: str, size: int, ranks: int, hint: str = "") -> None:
    if size % ranks:
        raise ArgumentError(
            f"tensor_parallel: {name} is {size}, expected a multiple of the {ranks} ranks{hint}"
        )


def _sharded_layers(model: Any) -> Iterator[_Role]:
    """Yield the layers that ranks share."""
    for number, block in enumerate(model.blocks):
        name = f"blocks.{number}"
        yield _Role(name, block, (nn.TransformerBlock,), False)
        yield _Role(f"{name}.attention", block.attention, (nn.MultiHeadAttention,), True)
        yield _Role(f"{name}.feed_forward", block.feed_forward, (nn.FeedForward, nn.SwiGLU), True)
        for part in ("attention", "feed_forward"):
            for key, layer in vars(getattr(block, part)).items():
                if key in ("qkv", "proj", "gate", "up", "down"):
                    yield _Role(f"{name}.{part}.{key}", layer, (nn.Linear,), True)
    yield _Role("tokens", model.tokens, (nn.Embedding,), True)
    yield _Role("dropout", model.dropout, (nn.Dropout,), False)
    yield _Role("norm", model.norm, (nn.LayerNorm, nn.RMSNorm), False)
    if model.output is not None:
        yield _Role("output", model.output, (nn.Linear,), True)


def _fingerprint(parameter: Tensor) -> str:
    """Return dtype, shape and a digest of the first elements, to compare parameters by."""
    sample = backend.to_numpy(parameter.data.reshape(-1)[:_SAMPLE])
    frozen = "" if parameter.requires_grad else " frozen"
    return f"{parameter.dtype} {parameter.shape} {zlib.crc32(sample.tobytes()):08x}{frozen}"


class TensorParallel(NestedRanks):
    """Trains a model whose layers the ranks share; another strategy works within.

    The ranks of a group get the same batches, compute the same loss, and take the same steps.
    Gradient norms count replicated parameters once.

    Args:
        comm: the ranks that share layers.
        inner: how ranks with the same part of the layers train together: those that differ from
            this one along the other axes of the mesh.
        sequence: as of `tensor_parallel`.
        world: all ranks, which write checkpoints together; None: those of `comm`.
    Attributes:
        parts: how the model was sharded, set by `prepare`.
    """

    parts: TensorParts

    def __init__(
        self,
        comm: Comm,
        inner: Ranks | None = None,
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
            ArgumentError, CommError: see `tensor_parallel`. Also where the optimizer updates whole
                matrices, of which ranks have parts: Muon and Adafactor.
        """
        self.parts = tensor_parallel(model, self._comm, self._sequence)
        self._placements = self.parts.placements
        optimizer = self._inner.prepare(model, make_optimizer)
        if optimizer.matrices and self._comm.size > 1:
            raise ArgumentError(
                f"TensorParallel: the optimizer is {type(optimizer).__name__}, which updates whole "
                "matrices, expected one that updates element by element, such as AdamW"
            )
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
        return self._inner.sum([float(each) for each in means])


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
            slots = [flat.slots[name].piece for name in run]
            for piece in flat.pieces:
                first = max(slots[0].start, piece.begin)
                last = min(slots[-1].stop, piece.begin + int(piece.grad.size))
                if distance is not None and first < last:
                    grad = piece.grad[first - piece.begin : last - piece.begin]
                    self._parts.append((first - distance, grad))
        like = flat.pieces[0].grad
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
