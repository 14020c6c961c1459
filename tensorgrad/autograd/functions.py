"""Functions of functions: directional derivatives, products with Hessians."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensorgrad.autograd.tangents import FORWARD_ONLY, Forward, tangents_of
from tensorgrad.core.backend import namespace
from tensorgrad.core.modes import mode, replaced
from tensorgrad.core.nodes import edge_of
from tensorgrad.core.tensor import Tensor


def jvp(
    f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False
) -> Any:
    """Return f(*primals) and its derivative along the tangents."""
    level, outer = object(), mode.forward
    duals = []
    for x, t in zip(primals, tangents, strict=True):
        flows = x.requires_grad and mode.grad_enabled
        dual = Tensor(x.data, True, edge_of(x) if flows else FORWARD_ONLY)
        dual.tangents = {**tangents_of(x), level: t}
        duals.append(dual)
    levels = (*(outer.levels if outer is not None else ()), level)
    with replaced(mode, forward=Forward(*levels), grad_enabled=True):
        y = f(*duals)
    known = dict(tangents_of(y))
    t = known.pop(level, None)
    if t is None:
        t = Tensor(namespace(y.data).zeros_like(y.data))
    return _without(y, known), t


def _without(y: Tensor, known: dict[object, Tensor]) -> Tensor:
    """Return an output of a jvp without the tangent of its level."""
    if y.node is FORWARD_ONLY and not known:
        return Tensor(y.data)
    primal = Tensor(y.data, y.requires_grad, y.node)
    primal.tangents = known
    return primal
