"""Pipeline stages: dividing a language model into consecutive parts of about equal cost.

A part is a range of blocks. The first part also embeds the tokens. The last also computes logits
and loss, which cost as much as several blocks. Tests: tests/parallel/test_stages.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tensorgrad.errors import ArgumentError
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.nn import Module, Parameter


def block_costs(model: LanguageModel) -> list[int]:
    """Return the forward FLOPs of each block for a token, with embedding and head at the ends.

    block:     2 for each element of a matrix, 2 T C for the products of causal attention
    embedding: C
    head:      2 V C

    Backward takes twice as many, except for the embedding.
    """
    rows, width = model.head().shape
    costs = [
        sum(2 * each.size for each in block.parameters() if each.ndim == 2)
        + 2 * model.context * width
        for block in model.blocks
    ]
    costs[0] += width
    costs[-1] += 2 * rows * width
    return costs


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
    least, _ = _best(costs, parts, max)
    _, cuts = _best(costs, parts, lambda sum, cost: sum + cost**2 if cost <= least else math.inf)
    return [range(begin, end) for begin, end in itertools.pairwise(cuts)]


def _best(
    costs: Sequence[float], parts: int, join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Return the least value and its cuts; `join` adds the cost of a part to a value."""
    count = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    found = {0: (0.0, [0])}  # for each number of first layers: the least value, and its cuts
    for part in range(1, parts + 1):
        longer = {}
        for end in range(part, count - (parts - part) + 1):
            longer[end] = min(
                (join(value, sums[end] - sums[begin]), [*cuts, end])
                for begin, (value, cuts) in found.items()
                if begin < end
            )
        found = longer
    return found[count]


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
    ends = {"norm", "output"}
    kept = {"blocks"}
    if len(parts) - 1 in mine:
        kept |= ends if model.output is not None else {*ends, "tokens"}
    for name, child in list(vars(model).items()):
        if isinstance(child, Module | Parameter) and name not in kept:
            if 0 in mine and name not in ends:
                continue
            setattr(model, name, RemoteLayer(name))
