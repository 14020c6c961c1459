"""Tensor parallelism: `tensor_parallel` cuts a language model, so that ranks share each layer.

    blocks.*.attention.qkv      rows, by heads of queries, of keys and of values
    blocks.*.attention.proj     columns, by heads
    blocks.*.feed_forward       rows of up and gate, columns of down
    tokens, output              rows, by tokens
    norms, positions, proj.bias, down.bias      whole on each rank

Tests: tests/parallel/test_tensor.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tensorgrad import ops
from tensorgrad.errors import ArgumentError
from tensorgrad.models.gpt2 import GPT2
from tensorgrad.models.transformer_lm import TransformerLM
from tensorgrad.nn import FeedForward, LayerNorm, Linear, SwiGLU, TransformerBlock
from tensorgrad.parallel.collectives import Comm
from tensorgrad.parallel.placement import Placement
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
        comm: the ranks; their number divides heads, key and value heads, the hidden width and
            the rows of the table of tokens.
        sequence: let each rank keep 1 / ranks of the rows between the layers: less memory, for
            as many bytes sent. The number of ranks then divides the length T of sequences. Sum
            gradients of `TensorParts.summed` over the ranks, as the strategy `TensorParallel`
            does.
    Raises:
        ArgumentError: a size does not divide, or a layer is none that can be cut; nothing was
            changed then.
    """
    _check(model, comm.size)
    region = Region(comm, sequence and comm.size > 1)
    if comm.size > 1:
        model.tokens = VocabularyParallelEmbedding(model.tokens, region)
        model.dropout = ParallelDropout(model.dropout, region)
        for number, block in enumerate(model.blocks):
            assert isinstance(block, TransformerBlock)
            model.blocks[number] = ParallelBlock(block, region)
        _cut_head(model, region)
    placements = {
        f"{name}.{key}".lstrip("."): replace(placement, name=f"{name}.{key}".lstrip("."))
        for name, module in model.named_modules()
        for key, placement in getattr(module, "placements", {}).items()
    }
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


def _check(model: GPT2 | TransformerLM, ranks: int) -> None:
    """Raise ArgumentError unless the model can be cut for so many ranks."""
    if not isinstance(model, GPT2 | TransformerLM):
        raise ArgumentError(
            f"tensor_parallel: model is a {type(model).__name__}, expected a GPT2 or TransformerLM"
        )
    for name, size in _sizes(model):
        if size % ranks:
            more = "; see GPT2Config.vocab_multiple" if name.startswith("the table") else ""
            raise ArgumentError(
                f"tensor_parallel: {name} is {size}, expected a multiple of the {ranks} ranks{more}"
            )


def _sizes(model: GPT2 | TransformerLM) -> Iterator[tuple[str, int]]:
    """Yield what is cut, once it is known that it can be."""
    for number, block in enumerate(model.blocks):
        where = f"of block {number}"
        if type(block) is not TransformerBlock:
            kind = type(block).__name__
            raise ArgumentError(
                f"tensor_parallel: block {number} is a {kind}, expected a TransformerBlock that "
                "was not cut yet"
            )
        layer = block.feed_forward
        linears: list[Any] = [block.attention.qkv, block.attention.proj]
        if isinstance(layer, FeedForward | SwiGLU):
            linears += [layer.up, layer.down]
        if len(linears) < 4 or any(type(each) is not Linear for each in linears):
            raise ArgumentError(
                f"tensor_parallel: block {number} has layers {block!r}, expected Linear ones and "
                "a FeedForward or SwiGLU"
            )
        yield f"heads {where}", block.attention.heads
        yield f"kv_heads {where}", block.attention.kv_heads
        yield f"the hidden width {where}", linears[2].weight.shape[0]
    yield "the table of tokens (rows)", model.tokens.weight.shape[0]
