"""Costs of a language model on one rank of a mesh: parameters, FLOPs and bytes of a pipeline stage.

They are counted from a model of the rank's shapes, without values, whose layers have formulas for
the bytes that they save for backward (`Module.saved_bytes`): flash attention, which keeps no score
matrix, and a cross entropy that computes gradients in chunks and keeps no logits. The rank is the
fullest of the tp ranks that share a layer, as their tables (`shards`) say. The formulas are in
docs/chapters/planning.md; the tests compare them with models and graphs.

Under autocast the inputs of norms are float32, as the parameters are. The graph of each micro-batch
keeps 16-bit copies of the weights that matrix products take.

What an optimizer costs on one rank is bytes of state, bytes that a step moves, FLOPs and traffic:

    bytes of state a parameter     matrices of blocks     others
        adamw                      8                      8
        muon                       4                      8
        lion, sgd                  4                      4
        adafactor                  rows and columns of each matrix, and 4 of each vector element

Rows and columns are whole on every rank, all else is divided by ZeRO. 16-bit parameters add the low
bits of master weights. Tests: tests/parallel/planning/test_costs.py, and of optimizers
tests/parallel/planning/test_plan.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from tensorgrad.core.errors import ArgumentError
from tensorgrad.models.language_model import LanguageModel, model_of
from tensorgrad.nn import Module, Parameter, init
from tensorgrad.nn.rows import Rows
from tensorgrad.ops.linear_cross_entropy import rows_at_a_time
from tensorgrad.optim.muon import ITERATIONS
from tensorgrad.parallel.stages import block_costs, is_on, mixed_width, partition
from tensorgrad.parallel.tensor import ShardRow, rows_of, shared_rows
from tensorgrad.train.user_file import made

_IDS = 16  # bytes of a token and its target on the device
# Bytes of an optimizer's state for an element of the matrices of blocks, and for others.
_STATE = {"adamw": (8, 8), "muon": (4, 8), "lion": (4, 4), "adafactor": (0, 0), "sgd": (4, 4)}
_KERNEL = 16  # bytes of a clipped step beside the state: p both ways, the gradient twice
# Bytes of the array operations, of which each reads and writes what a kernel keeps in registers.
_ARRAYS = {"adafactor": (120, 120), "muon": (100, _KERNEL + 2 * 8)}


class BlockSizes(NamedTuple):
    """The counts of a block on a rank.

    Attributes:
        parameters: all of them.
        matrices: elements of the matrices.
        mixed: the width of what the heads of attention mix.
        sums: regions that ranks share, each of which ends in a sum.
        shapes: of the matrices.
        factors: rows and columns of the matrices, and elements of the vectors.
    """

    parameters: int
    matrices: int
    mixed: int
    sums: int
    shapes: list[tuple[int, ...]]
    factors: int


class CountedModel(NamedTuple):
    """A model with the shapes of the fullest of the ranks that share its layers, without values.

    Attributes:
        model: the model.
        blocks: the sizes of each block.
        flops: forward for a token, of each block; see `block_costs`.
        inner: the width of all results within the last layer of a block, such as the input of
            GELU; of the widest block.
        root: parameters outside the blocks of a stage with the first part, the last, or both.
        factors: rows and columns of their matrices, and elements of the vectors.
    """

    model: LanguageModel
    blocks: tuple[BlockSizes, ...]
    flops: list[int]
    inner: int
    root: dict[tuple[bool, bool], int]
    factors: dict[tuple[bool, bool], int]


@dataclass(frozen=True)
class Costs:
    """Sizes on a rank that shares each layer with others.

    Args:
        config: of the model.
        tp: number of tensor parallel ranks.
        sequence: whether these also share the rows between the layers.
        item: bytes of an activation inside the layers: 2 or 4.
        autocast: whether parameters and the residual stream are float32 all the same.
        kind: the class of the model; None: the one that has the config.
    Raises:
        ArgumentError: there is no such class, or tp ranks can share none of its layers.
    """

    config: Any
    tp: int = 1
    sequence: bool = False
    item: int = 2
    autocast: bool = False
    kind: Any = None

    @cached_property
    def counted(self) -> CountedModel:
        """The model with the shapes of the fullest rank."""
        return _counted(self.kind, self.config, self.tp)

    @property
    def model(self) -> LanguageModel:
        """The model with the shapes of the fullest rank, without values."""
        return self.counted.model

    @property
    def blocks(self) -> tuple[BlockSizes, ...]:
        """The sizes of each block."""
        return self.counted.blocks

    @property
    def wide(self) -> int:
        """Bytes of a parameter, and of an element of the residual stream and of a norm's output."""
        return 4 if self.autocast else self.item

    @property
    def width(self) -> int:
        """The width of the residual stream."""
        return self.model.head().shape[1]

    @property
    def head(self) -> int:
        """Elements of the head, which may also be the token embedding."""
        return self.model.head().size

    def root_parameters(self, first: bool, last: bool) -> int:
        """Return a stage's parameters outside the blocks: embeddings, last norm and head."""
        return self.counted.root[first, last]

    def flops(self, blocks: Sequence[BlockSizes], head: bool = False) -> tuple[float, float]:
        """Return the FLOPs of some blocks, and of the head, for a token, forward and backward.

        Forward: 2 for each element of a matrix, and 2 T H D for causal attention. Backward: twice
        the former, and 2.5 times the latter because flash attention recomputes the scores.
        """
        products = 2 * (sum(block.matrices for block in blocks) + head * self.head)
        attention = 2 * self.config.context * sum(block.mixed for block in blocks)
        return products + attention, 2 * products + 2.5 * attention

    def kept_by_blocks(self, blocks: range, tokens: int) -> float:
        """Return the bytes that the blocks with these numbers keep for backward."""
        return sum(_kept(self, tokens)[blocks.start : blocks.stop])

    def rows(self, tokens: int) -> Rows:
        """Return the rows of a micro-batch, from its number of tokens."""
        outside = tokens / (self.tp if self.sequence else 1)
        return Rows(tokens, outside, self.item, self.wide, self.tp > 1)

    def weight_copies(self, blocks: Sequence[BlockSizes], head: bool = False) -> float:
        """Return the bytes of the copies of weights that the graph of a micro-batch keeps."""
        if not self.autocast:
            return 0.0
        return self.item * (sum(block.matrices for block in blocks) + head * self.head)

    def kept_by_head(self, tokens: int) -> float:
        """Return the bytes that norm, head and loss keep: inputs, and gradients computed early.

        These are input and output of the norm, and the gradient of the output, C each, and the
        gradient of the head's matrix in float32.
        """
        activations = 2 * self.width * tokens * self.item
        return self.model.norm.saved_bytes(self.rows(tokens)) + activations + 4 * self.head

    def kept_by_embedding(self, tokens: int) -> float:
        """Return the bytes of the ids of tokens and targets."""
        return _IDS * tokens

    def chunk(self, tokens: int) -> float:
        """Return the bytes of a chunk of logits."""
        item = 4 if self.tp > 1 else self.item  # a shared head computes in float32
        size = self.model.head().shape[0] * item
        rows = rows_at_a_time("plan", None, tokens, size, on_host=False)
        return float(min(rows, tokens) * size)

    def head_work(self, tokens: int) -> float:
        """Return the bytes while the head computes: a chunk, and what autocast made 16 bits of."""
        source = self.width * tokens * self.wide if self.autocast else 0
        return self.chunk(tokens) + source

    def block_work(self, tokens: int) -> float:
        """Return the bytes of activation gradients during the backward pass of a block.

        These are the gradients of its output, of the results within its last layer, such as the
        input of GELU, and of two layers in between.
        """
        inside = 2 * self.width + self.counted.inner
        return (self.width * self.wide + inside * self.item) * tokens

    def boundary(self, tokens: int) -> float:
        """Return the bytes that a stage sends to the next for a micro-batch."""
        return self.width * self.rows(tokens).outside * self.wide

    def state_bytes(self, optimizer: str, numbers: Sequence[int], first: bool, last: bool) -> float:
        """Return the bytes of a stage's state that ZeRO divides, master weights not counted."""
        matrices, others = self._elements(numbers, first, last)
        inside, outside = _STATE[optimizer]
        return inside * matrices + outside * others

    def factor_bytes(
        self, optimizer: str, numbers: Sequence[int], first: bool, last: bool
    ) -> float:
        """Return the bytes of state of a stage that every rank has whole: those of Adafactor.

        A matrix (R, C) has R + C numbers. A rank that shares layers has those of the whole matrix.
        """
        if optimizer != "adafactor":
            return 0.0
        factors = replace(self, tp=1).counted.factors[first, last]
        return 4 * (factors + sum(block.factors for block in self._whole(numbers)))

    def moved_bytes(self, optimizer: str, numbers: Sequence[int], first: bool, last: bool) -> float:
        """Return the bytes that a clipped step of a stage moves, with float32 gradients."""
        matrices, others = self._elements(numbers, first, last)
        fused = tuple(_KERNEL + 2 * state for state in _STATE[optimizer])
        inside, outside = _ARRAYS.get(optimizer, fused)
        return inside * matrices + outside * others

    def update_flops(self, optimizer: str, numbers: Sequence[int]) -> float:
        """Return the FLOPs of a step's float32 products: those of Muon, of whole matrices.

        For a matrix with sides r <= c, 4 r^2 c + 2 r^3 in each iteration.
        """
        if optimizer != "muon":
            return 0.0
        sides = [sorted(shape) for block in self._whole(numbers) for shape in block.shapes]
        return ITERATIONS * sum(4 * r * r * c + 2 * r**3 for r, c in sides)

    def gathered_bytes(self, optimizer: str, numbers: Sequence[int]) -> float:
        """Return the bytes of a stage's matrices of which a step gathers shards: those of Muon."""
        matrices = sum(self.blocks[number].matrices for number in numbers)
        return 4 * matrices if optimizer == "muon" else 0.0

    def joined_bytes(self, optimizer: str, numbers: Sequence[int]) -> float:
        """Return the bytes of a stage's matrices that ranks which share layers put together."""
        matrices = sum(block.matrices for block in self._whole(numbers))
        return 4 * matrices if optimizer in ("muon", "adafactor") else 0.0

    def _elements(self, numbers: Sequence[int], first: bool, last: bool) -> tuple[int, int]:
        """Return the elements of the matrices in a stage's blocks, and of all else."""
        blocks = [self.blocks[number] for number in numbers]
        matrices = sum(block.matrices for block in blocks)
        others = sum(block.parameters for block in blocks) - matrices
        return matrices, others + self.root_parameters(first, last)

    def _whole(self, numbers: Sequence[int]) -> list[BlockSizes]:
        """Return the sizes of blocks that no ranks share."""
        whole = replace(self, tp=1).blocks
        return [whole[number] for number in numbers]


@lru_cache(maxsize=1024)
def cut_blocks(costs: Costs, parts: int) -> tuple[range, ...]:
    """Return the blocks of each part of a pipeline, with the largest cost minimal.

    The last part also has the head, which costs as much as several blocks.

    Args:
        costs: of the model.
        parts: stages times parts on each stage.
    Raises:
        ArgumentError: there are more parts than blocks.
    """
    layers = len(costs.blocks)
    if not 1 <= parts <= layers:
        raise ArgumentError(f"plan: pp * chunks is {parts}, expected 1 to the {layers} layers")
    return tuple(partition(costs.counted.flops, parts))


def divides(row: ShardRow, ranks: int) -> bool:
    """Whether a number of ranks can divide a layer equally, or have whole units of it each."""
    _, kind, sections, units, _ = row.shard
    if units is not None:
        return units >= ranks
    lengths = sections or (row.layer.weight.shape[row.axis],) if kind != "inside" else ()
    return all(length % ranks == 0 for length in lengths)


@lru_cache(maxsize=64)
def _counted(kind: Any, config: Any, tp: int) -> CountedModel:
    """Count a model on tp ranks."""
    kind = kind or model_of(config)
    if kind is None:
        name = type(config).__name__
        raise ArgumentError(f"plan: config is a {name}, expected the Config of a LanguageModel")
    with init.without_values():
        model = made(kind, config)
        for row in shared_rows("plan", model) if tp > 1 else []:
            _shrink(row, tp)
    outside = [
        (name.partition(".")[0], parameter)
        for name, parameter in model.named_parameters()
        if not name.startswith("blocks.")
    ]
    root, factors = {}, {}
    for first, last in itertools.product((False, True), repeat=2):
        held = [
            parameter for name, parameter in outside if is_on(name, model, first=first, last=last)
        ]
        root[first, last] = sum(parameter.size for parameter in held)
        factors[first, last] = _factors(held)
    blocks, inner = tuple(map(_sizes, model.blocks)), max(map(_inner, model.blocks))
    return CountedModel(model, blocks, block_costs(model), inner, root, factors)


def _shrink(row: ShardRow, ranks: int) -> None:
    """Give a layer the shapes that the fullest rank has of it."""
    module, layer, (_, kind, sections, units, counts) = row.module, row.layer, row.shard
    if kind == "inside":
        return
    most = 1 if units is None else -(-units // ranks)
    for key in ("weight",) if kind == "row" else ("weight", "bias"):
        parameter = getattr(layer, key, None)
        if parameter is not None:
            shape = list(parameter.shape)
            lengths: Sequence[int] = sections or (shape[row.axis],)
            shape[row.axis] = sum(
                -(-length // ranks) if units is None else length // units * most
                for length in lengths
            )
            parameter.data = init.empty(*shape)
    for count in counts:
        assert units is not None  # the table of a layer with counts has their units
        setattr(module, count, getattr(module, count) // units * most)


def _sizes(block: Module) -> BlockSizes:
    parameters = list(block.parameters())
    shapes = [parameter.shape for parameter in parameters if parameter.ndim == 2]
    return BlockSizes(
        sum(parameter.size for parameter in parameters),
        sum(math.prod(shape) for shape in shapes),
        mixed_width(block),
        sum(row.shard.kind == "row" for row in rows_of(block)),
        shapes,
        _factors(parameters),
    )


def _factors(parameters: Iterable[Parameter]) -> int:
    """Return the rows and columns of matrices, and the elements of vectors."""
    return sum(
        sum(parameter.shape) if parameter.ndim > 1 else parameter.size for parameter in parameters
    )


def _inner(block: Module) -> int:
    """Return the width of all results within the last layer of a block that has matrices."""
    for layer in reversed(list(block.children())):
        shapes = [parameter.shape for parameter in layer.parameters() if parameter.ndim == 2]
        if shapes:
            return max(shapes[-1][1], sum(outputs for outputs, _ in shapes[:-1]))
    return 0


@lru_cache(maxsize=4096)
def _kept(costs: Costs, tokens: int) -> tuple[float, ...]:
    """Return the bytes that each block keeps for backward."""
    rows = costs.rows(tokens)
    return tuple(block.saved_bytes(rows) for block in costs.model.blocks)
