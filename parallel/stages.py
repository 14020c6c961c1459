"""Pipeline stages: dividing a language model into consecutive parts of about equal cost.

A part is a range of blocks. The first part also embeds the tokens. The last also computes logits
and loss, which cost as much as several blocks. Tests: tests/parallel/test_stages.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tensorgrad.core.errors import ArgumentError
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.nn import Module, MultiHeadAttention, Parameter


def block_costs(model: LanguageModel) -> list[int]:
    """Return the forward FLOPs of each block for a token, with embedding and head at the ends.

    block:     2 for each element of a matrix, 2 T H D for the products of causal attention
    embedding: C
    head:      2 V C

    Backward takes twice as many, except for the embedding.
    """
    costs = [2 * (matrices(block) + model.context * mixed_width(block)) for block in model.blocks]
    costs[0] += model.head().shape[1]
    costs[-1] += 2 * model.head().size
    return costs


def matrices(block: Module) -> int:
    """Return the number of elements of the matrices that a block multiplies by."""
    return sum(parameter.size for parameter in block.parameters() if parameter.ndim == 2)


def mixed_width(block: Module) -> int:
    """Return H D, the width of what all heads of a block mix."""
    layers = (layer for layer in block.modules() if isinstance(layer, MultiHeadAttention))
    return sum(layer.proj.weight.shape[1] for layer in layers)


def partition(costs: Sequence[float], parts: int) -> list[range]:
    """Divide a sequence of layers into non-empty parts so that the largest cost is minimal.

    Among the minima it chooses the most even one, with the least sum of squares.

    Args:
        costs: of each layer.
        parts: number of parts.
    Returns:
        The numbers of the layers of each part.
    Raises:
        ArgumentError: there are more parts than layers.
    """
    if not 1 <= parts <= len(costs):
        raise ArgumentError(f"partition: parts is {parts}, expected 1 to the {len(costs)} layers")
    cost, least = _ranges(tuple(costs))
    squares = np.where(cost <= least[parts - 1], cost**2, np.inf)
    rows, value, ends = np.arange(len(cost)), squares[:, -1], []
    for _ in range(parts - 1):  # where there are 2, 3, ... parts: the first part, by its begin
        values = squares + value
        ends.append(values.argmin(1))
        value = values[rows, ends[-1]]
    cuts = [0]
    for end in reversed(ends):
        cuts.append(int(end[cuts[-1]]))
    return [range(begin, end) for begin, end in itertools.pairwise([*cuts, len(costs)])]


@lru_cache(maxsize=64)
def _ranges(costs: tuple[float, ...]) -> tuple[Any, list[float]]:
    """Return the costs of all ranges, and the least of the largest ones of 1, 2, ... parts.

    The cost of a range is in the row of its begin and the column of its end; others are infinite.
    """
    sums = np.cumsum([0.0, *costs])
    cost = np.where(np.tri(len(sums), dtype=bool), np.inf, sums - sums[:, None])
    value, least = cost[:, -1], []
    for _ in costs:
        least.append(float(value[0]))
        value = np.maximum(cost, value).min(1)
    return cost, least


class RemoteLayer(Module):
    """Stands for a layer of another stage.

    Args:
        name: of the layer.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ArgumentError."""
        raise ArgumentError(f"{self.name}: is on another stage of the pipeline, expected here")

    def extra_repr(self) -> str:
        """Return the name of the layer."""
        return self.name


def check_not_shared(op: str, model: LanguageModel) -> None:
    """Raise ArgumentError if layers share a parameter: on different ranks each would have its own.

    Args:
        op: what divides the model.
        model: the whole model.
    """
    layers = [(f"blocks.{number}", block) for number, block in enumerate(model.blocks)]
    for name, child in vars(model).items():
        if isinstance(child, Module) and child is not model.blocks:
            layers.append((name, child))
    names: dict[int, str] = {}
    for layer, module in layers:
        for key, parameter in module.named_parameters():
            name = f"{layer}.{key}"
            if names.setdefault(id(parameter), name) != name:
                raise ArgumentError(
                    f"{op}: {name} is {names[id(parameter)]} too, expected layers that share no "
                    "parameter; a model with a tied head has no `output`"
                )


def keep_parts(model: LanguageModel, parts: Sequence[range], mine: Collection[int]) -> None:
    """Remove everything from a model, in place, that the given parts do not need.

    The rest keeps its names. The first and the last part both need a token embedding that is also
    the head.

    Args:
        model: the whole model.
        parts: its blocks by part, from `partition`.
        mine: the parts to keep.
    """
    for part, blocks in enumerate(parts):
        if part not in mine:
            for number in blocks:
                model.blocks[number] = RemoteLayer(f"blocks.{number}")
    for name, child in list(vars(model).items()):
        if isinstance(child, Module | Parameter) and not is_on(
            name, model, first=0 in mine, last=len(parts) - 1 in mine
        ):
            setattr(model, name, RemoteLayer(name))


def is_on(name: str, model: LanguageModel, *, first: bool, last: bool) -> bool:
    """Whether a stage has an attribute of a model, such as the norm, or those blocks of it.

    Args:
        name: of the attribute.
        model: the whole model.
        first, last: whether the stage has the first or the last part.
    """
    place = model.stage_table().get(name, "first")
    return name == "blocks" or (first and place != "last") or (last and place != "first")
