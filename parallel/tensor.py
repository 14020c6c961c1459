"""Tensor parallelism: `tensor_parallel` cuts a language model, so that ranks share each layer.

    blocks.*.attention.qkv      rows, by heads of queries, of keys and of values
    blocks.*.attention.proj     columns, by heads
    blocks.*.feed_forward       rows of up and gate, columns of down
    tokens, output              rows, by tokens
    norms, positions, proj.bias, down.bias      whole on each rank

Tests: tests/parallel/test_tensor.py.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from tensorgrad import backend, ops
from tensorgrad.backend import Array
from tensorgrad.errors import ArgumentError
from tensorgrad.models.gpt2 import GPT2
from tensorgrad.models.transformer_lm import TransformerLM
from tensorgrad.models.translation import TranslationModel
from tensorgrad.nn import (
    Dropout,
    Embedding,
    FeedForward,
    LayerNorm,
    Linear,
    Module,
    MultiHeadAttention,
    RMSNorm,
    SwiGLU,
    TransformerBlock,
)
from tensorgrad.optim import FlatParameters, LossScaler, Optimizer
from tensorgrad.optim.clip import sum_of_squares
from tensorgrad.optim.flat import ALIGNMENT, zeros
from tensorgrad.parallel.checkpoint import ShardedRanks
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.placement import Placement
from tensorgrad.parallel.stages import check_not_shared
from tensorgrad.parallel.tensor_layers import (
    ColumnParallelLinear,
    ParallelBlock,
    ParallelDropout,
    ParallelLayerNorm,
    ParallelRMSNorm,
    Region,
    VocabularyParallelEmbedding,
)
from tensorgrad.parallel.tensor_ops import all_gather_columns
from tensorgrad.parallel.vocabulary import vocabulary_parallel_cross_entropy
from tensorgrad.tensor import Tensor
from tensorgrad.train.ranks import Batch, Loss, MakeOptimizer, OneProcess, Ranks

_SAMPLE = 1024  # elements of each parameter by which ranks see whether they made the same model


@dataclass(frozen=True)
class TensorParts:
    """How a model was cut.

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
        """The parameters of whose gradient a rank's backward gives one term of a sum.

        With `sequence` those that every rank has: each applies them to its own rows.
        """
        return self.replicated if self.sequence else frozenset()


def tensor_parallel(model: GPT2 | TransformerLM, comm: Comm, sequence: bool = False) -> TensorParts:
    """Cut a whole model in place: afterwards this rank has its part, and all compute together.

    All ranks must have made the same model: from equal seeds, on any number of ranks, the parts
    put together are that model. Tokens and targets go to all ranks alike, and all get the same
    loss and logits. Without dropout, losses and gradients are those of the whole model, but for
    the order of sums.

    Args:
        model: not cut yet, before its optimizer is made; its parameters stay the same objects.
        comm: the ranks; their number divides the hidden width and the rows of the table of
            tokens, and is at most that of key and value heads. Where it does not divide these,
            some ranks have one more, and more to do.
        sequence: let each rank keep 1 / ranks of the rows between the layers: less memory, for
            as many bytes sent. The number of ranks then divides the length T of sequences. Sum
            gradients of `TensorParts.summed` over the ranks, as the strategy `TensorParallel`
            does.
    Raises:
        ArgumentError: a size does not divide, a layer or what makes the loss is not the library's,
            layers share a parameter, or a TranslationModel is to be cut with `sequence`; nothing
            was changed then.
        CommError: the ranks have made different models, or differ in `sequence`.
    """
    _check(model, comm.size, sequence)
    marks = {name: _mark(parameter) for name, parameter in model.named_parameters()}
    comm.agree("tensor_parallel", {"sequence": sequence, **marks})
    region = Region(comm, sequence and comm.size > 1)
    if comm.size > 1:
        model.tokens = VocabularyParallelEmbedding(model.tokens, region)
        model.dropout = ParallelDropout(model.dropout, region)
        for number, block in enumerate(model.blocks):
            assert isinstance(block, TransformerBlock)
            model.blocks[number] = ParallelBlock(block, region)
        _cut_head(model, region)
    placements = {}
    for prefix, module in model.named_modules():
        for key, placement in getattr(module, "placements", {}).items():
            name = f"{prefix}.{key}"
            placements[name] = replace(placement, name=name)
    for name, parameter in model.named_parameters():
        placements.setdefault(name, Placement(name, parameter.shape))
    return TensorParts(comm, region.sequence, placements)


def _cut_head(model: GPT2 | TransformerLM, region: Region) -> None:
    """Let the ranks make logits and loss together; a tied head was cut with the tokens."""
    if isinstance(model.norm, LayerNorm):
        model.norm = ParallelLayerNorm(model.norm, region)
    else:
        assert isinstance(model, TransformerLM)
        model.norm = ParallelRMSNorm(model.norm, region)
    if isinstance(model, TransformerLM) and model.output is not None:
        model.output = ColumnParallelLinear(model.output, region)
    model.linear = partial(_joined_linear, comm=region.comm)
    model.linear_cross_entropy = partial(vocabulary_parallel_cross_entropy, comm=region.comm)


def _joined_linear(x: Any, weight: Any, comm: Comm) -> Tensor:
    """Return the logits of all ranks' rows of the head."""
    return all_gather_columns(ops.linear(x, weight), comm)


def _check(model: GPT2 | TransformerLM, ranks: int, sequence: bool) -> None:
    """Raise ArgumentError unless the model can be cut for so many ranks."""
    if not isinstance(model, GPT2 | TransformerLM):
        raise ArgumentError(
            f"tensor_parallel: model is a {type(model).__name__}, expected a GPT2 or TransformerLM"
        )
    if sequence and ranks > 1 and isinstance(model, TranslationModel):
        raise ArgumentError(
            "tensor_parallel: sequence is True, expected False: a TranslationModel takes its loss "
            "of the last places alone, which are not the last of each rank's rows"
        )
    if ranks > 1:
        check_not_shared("tensor_parallel", model)
    for name, module, kinds in _cut_layers(model):
        own = " with a forward of its own" if "forward" in vars(module) else ""
        if own or type(module) not in kinds:
            raise ArgumentError(
                f"tensor_parallel: {name} is a {type(module).__name__}{own}, expected nn."
                f"{' or nn.'.join(kind.__name__ for kind in kinds)} as it is, not cut yet, since a "
                "layer that ranks share takes its place"
            )
    for name in ("linear", "linear_cross_entropy"):
        if getattr(model, name) is not getattr(ops, name):
            raise ArgumentError(
                f"tensor_parallel: {name} of the model is {getattr(model, name)!r}, expected "
                f"ops.{name}, since one that ranks share takes its place"
            )
    blocks: list[Any] = list(model.blocks)
    for number, block in enumerate(blocks):
        heads = block.attention.kv_heads
        if heads < ranks:
            raise ArgumentError(
                f"tensor_parallel: kv_heads of block {number} is {heads}, expected one or more "
                f"for each of the {ranks} ranks"
            )
    for name, size in _sizes(model):
        if size % ranks:
            more = "; see GPT2Config.vocab_multiple" if name.startswith("the table") else ""
            raise ArgumentError(
                f"tensor_parallel: {name} is {size}, expected a multiple of the {ranks} ranks{more}"
            )


def _cut_layers(model: GPT2 | TransformerLM) -> Iterator[tuple[str, Any, tuple[type, ...]]]:
    """Yield each layer that gives way to one that ranks share, its name and what it may be."""
    blocks: list[Any] = list(model.blocks)
    for number, block in enumerate(blocks):
        name = f"blocks.{number}"
        yield name, block, (TransformerBlock,)
        yield f"{name}.attention", block.attention, (MultiHeadAttention,)
        yield f"{name}.feed_forward", block.feed_forward, (FeedForward, SwiGLU)
        for part in ("attention", "feed_forward"):
            for key, layer in vars(getattr(block, part)).items():
                if key in ("qkv", "proj", "gate", "up", "down"):
                    yield f"{name}.{part}.{key}", layer, (Linear,)
    yield "tokens", model.tokens, (Embedding,)
    yield "dropout", model.dropout, (Dropout,)
    yield "norm", model.norm, (LayerNorm,) if isinstance(model, GPT2) else (LayerNorm, RMSNorm)
    if model.output is not None:
        yield "output", model.output, (Linear,)


def _sizes(model: GPT2 | TransformerLM) -> Iterator[tuple[str, int]]:
    """Yield what is cut into equal parts."""
    blocks: list[Any] = list(model.blocks)
    for number, block in enumerate(blocks):
        yield f"the hidden width of block {number}", block.feed_forward.up.weight.shape[0]
    yield "the table of tokens (rows)", model.tokens.weight.shape[0]


def _mark(parameter: Tensor) -> str:
    """Return what tells a parameter from others, most of the time."""
    sample = backend.to_numpy(parameter.data.reshape(-1)[:_SAMPLE])
    frozen = "" if parameter.requires_grad else " frozen"
    return f"{parameter.dtype} {parameter.shape} {zlib.crc32(sample.tobytes()):08x}{frozen}"


class TensorParallel(ShardedRanks):
    """Training on ranks that share each layer; other strategies work within.

    The ranks of a group get the same batches, compute the same loss, and step alike. Gradient
    norms count what every rank has once.

    Args:
        comm: the ranks that share layers.
        inner: how ranks with the same part of the layers train together: all that differ from
            this one in another axis of the mesh.
        sequence: as of `tensor_parallel`.
        world: all ranks, where there are more than those of `comm`: they write checkpoints
            together.
    Attributes:
        parts: how the model was cut, once `prepare` has done it.
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
        self._comm, self._sequence, self._world = comm, sequence, world or comm
        self._inner = OneProcess() if inner is None else inner
        self.rank, self.ranks = self._inner.rank, self._inner.ranks
        self.is_main = self._inner.is_main and comm.rank == 0
        self._terms: _JoinedGradients | None = None
        self._copies: _JoinedGradients | None = None

    def prepare(self, model: Module, make_optimizer: MakeOptimizer) -> Optimizer:
        """Cut the model, and return the optimizer of this rank's part.

        Raises:
            ArgumentError, CommError: see `tensor_parallel`.
        """
        if not isinstance(model, GPT2 | TransformerLM):
            raise ArgumentError(
                f"TensorParallel: model is a {type(model).__name__}, expected a GPT2 or "
                "TransformerLM"
            )
        self.parts = tensor_parallel(model, self._comm, self._sequence)
        self._placements = self.parts.placements
        optimizer = self._inner.prepare(model, make_optimizer)
        self._terms = _JoinedGradients(optimizer.flat, self.parts.summed)
        if self._comm.rank > 0:
            self._copies = _JoinedGradients(optimizer.flat, self.parts.replicated)
        return optimizer

    def begin(
        self, step: int, arrays: Sequence[Array], facts: Mapping[str, Any] | None = None
    ) -> None:
        """Check that all ranks are at this step; the inner ones may exchange arrays.

        Raises:
            CommError: they are not.
        """
        self._comm.agree("train", {"step": step, **(facts or {})})
        self._inner.begin(step, arrays, facts)

    def compute_gradients(
        self, loss: Loss, parts: Sequence[Batch], scaler: LossScaler | None = None
    ) -> Array:
        """Compute as the inner ranks do; then sum what each of these ranks has a term of."""
        total = self._inner.compute_gradients(loss, parts, scaler)
        if self._terms:
            terms = self._terms.read()
            self._comm.all_reduce(terms)
            self._inner.add_shards(terms)
            self._terms.write()
        return total

    def reduce_norm(self, squares: Array) -> None:
        """Add, in place, the squares of gradients that other ranks alone have."""
        if self._copies:
            with np.errstate(invalid="ignore"):  # inf - inf: this step will be skipped
                squares -= sum_of_squares(self._copies.read())
        self._inner.reduce_norm(squares)
        self._comm.all_reduce(squares)

    def after_step(self) -> None:
        """Let the inner ranks give each other what they have updated."""
        self._inner.after_step()

    def add_losses(self, loss: Loss, batches: Iterable[Batch]) -> tuple[float, int]:
        """Evaluate as the inner ranks do."""
        return self._inner.add_losses(loss, batches)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over the inner ranks; of these ranks, which have the same, the mean."""
        means = np.array(values, "float64")
        self._comm.all_reduce(means, "mean")
        return self._inner.sum([float(each) for each in means])


class _JoinedGradients:
    """Gradients of some parameters, of which this rank may have a part, as one array.

    The array has room for all of them, in the order in which the model has them, so it is the same
    on all ranks, however each has laid out and shared what else it has; what others have is 0.
    Those that follow each other in both are one stretch, and worked on in place if it is all.
    """

    def __init__(self, flat: FlatParameters, names: Collection[str]) -> None:
        places: dict[str, int] = {}
        length = 0
        for name in flat.parameters:
            if name in names:
                places[name] = -(-length // ALIGNMENT) * ALIGNMENT
                length = places[name] + math.prod(flat.slots[name].shape)
        self._parts: list[tuple[int, Array]] = []  # where each begins in the array
        slots = sorted(flat.slots.items(), key=lambda item: item[1].offset)
        for piece in flat.pieces:
            stop = piece.begin + int(piece.grad.size)
            inside = [
                (
                    slot.offset - places[name] if name in places else None,
                    max(slot.offset, piece.begin),
                    min(slot.piece.stop, stop),
                )
                for name, slot in slots
                if slot.offset < stop and piece.begin < slot.piece.stop
            ]
            for apart, run in groupby(inside, itemgetter(0)):
                if apart is not None:
                    bounds = [each[1:] for each in run]
                    first, last = bounds[0][0], bounds[-1][1]
                    grad = piece.grad[first - piece.begin : last - piece.begin]
                    self._parts.append((first - apart, grad))
        like = flat.pieces[0].grad
        self._joined: Array | None = None
        if [int(grad.size) for _, grad in self._parts] != [length]:
            self._joined = zeros(length, like.dtype, like)

    def __bool__(self) -> bool:
        """Whether there are any, on whatever rank."""
        return self._joined is None or self._joined.size > 0

    def read(self) -> Array:
        """Return what they hold now, as one array."""
        if self._joined is None:
            return self._parts[0][1]
        self._joined.fill(0)
        for begin, part in self._parts:
            self._joined[begin : begin + part.size] = part
        return self._joined

    def write(self) -> None:
        """Put back what was done to the array that `read` gave."""
        if self._joined is None:
            return
        for begin, part in self._parts:
            part[...] = self._joined[begin : begin + part.size]
