"""Parameter groups: parts of a model with a learning rate or weight decay of their own.

    optim.AdamW([
        {"params": model.body.parameters()},
        {"params": model.head.parameters(), "lr": 1e-4, "weight_decay": 0.0},
    ], lr=1e-3)

Tests: tests/optim/test_groups.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tensorgrad.core.checks import check_range
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.tensor import Tensor
from tensorgrad.optim.flat import Decays, FlatParameters, named

Parameters = Iterable[tuple[str, Tensor] | Tensor | Mapping[str, Any]]
_KEYS = ("params", "lr", "weight_decay")


class ParameterGroup(NamedTuple):
    """The options of a group.

    Attributes:
        names: of its parameters.
        rate: its learning rate divided by that of the optimizer, which stays when that changes.
        weight_decay: of all its parameters; None: the optimizer's.

    Example:
        >>> body, head = tg.nn.Linear(2, 2), tg.nn.Linear(2, 1, bias=False)
        >>> groups = [{"params": body.parameters()}, {"params": head.parameters(), "lr": 1e-4}]
        >>> optimizer = tg.optim.AdamW(groups, lr=1e-3)
        >>> group: tg.optim.ParameterGroup = optimizer.groups[1]
        >>> group
        ParameterGroup(names=('2',), rate=0.1, weight_decay=None)
    """

    names: tuple[str, ...]
    rate: float = 1.0
    weight_decay: float | None = None


def read_groups(
    op: str, parameters: FlatParameters | Parameters, lr: float, decay: Decays | None
) -> tuple[FlatParameters, list[ParameterGroup]]:
    """Return the flat parameters, and their groups: one, or one for each bucket.

    Args:
        op: the optimizer, for errors.
        parameters: flat parameters, tensors, pairs (name, tensor), or a mapping for each group.
        lr: learning rate of the optimizer.
        decay: the optimizer's rule of weight decay; None: all parameters.

    Raises:
        ArgumentError: a group lacks "params", has an unknown key or a value outside its range, or
            a parameter is in two groups; see also FlatParameters.
    """
    if not isinstance(parameters, FlatParameters):
        items = list(parameters) if isinstance(parameters, Iterable) else parameters
        if isinstance(items, list) and any(isinstance(item, Mapping) for item in items):
            return _grouped(op, items, lr, decay)
        parameters = FlatParameters(items, decay)  # type: ignore[arg-type]  # which checks them
    return parameters, [ParameterGroup(tuple(parameters.slots))]


def _grouped(
    op: str, groups: list[Any], lr: float, decay: Decays | None
) -> tuple[FlatParameters, list[ParameterGroup]]:
    pairs: list[tuple[str, Tensor]] = []
    members: dict[str, int] = {}
    owners: dict[int, int] = {}
    for number, group in enumerate(groups):
        _check(op, number, group, lr)
        for name, tensor in named(group["params"], len(pairs)):
            if owners.setdefault(id(tensor), number) != number:
                raise ArgumentError(f"{op}: {name} is in two groups, expected it in one")
            pairs.append((name, tensor))
            members.setdefault(name, number)

    def decays(name: str, parameter: Tensor) -> bool:
        return decay is None or "weight_decay" in groups[members[name]] or decay(name, parameter)

    flat = FlatParameters(pairs, decays, groups=members.__getitem__)
    found = []
    for bucket in flat.buckets:
        group = groups[members[bucket.names[0]]]
        rate = group["lr"] / lr if "lr" in group else 1.0
        found.append(ParameterGroup(bucket.names, rate, group.get("weight_decay")))
    return flat, found


def _check(op: str, number: int, group: Any, lr: float) -> None:
    if not isinstance(group, Mapping) or "params" not in group:
        raise ArgumentError(
            f"{op}: group {number} is a {type(group).__name__} without 'params', expected "
            '{"params": parameters, ...}'
        )
    for key in group:
        if key not in _KEYS:
            raise ArgumentError(f"{op}: group {number} has {key!r}, expected one of {_KEYS}")
        if key != "params":
            check_range(op, f"{key} of group {number}", group[key])
    if "lr" in group and not lr > 0:
        raise ArgumentError(
            f"{op}: group {number} has a learning rate, and lr is {lr}, expected one above 0: that "
            "of the group keeps its proportion to lr"
        )
