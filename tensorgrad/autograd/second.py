"""Gradients that can be differentiated again: a walk over the graph in recorded ops.

core/backward.py walks with arrays. This walk does the same with tensors: the gradient of each op
is an op of its own, whose inputs are dy and the inputs of the op. Its gradient and its tangent
follow from the tangent of the op; see tangents.py. Tests: tests/autograd/test_second.py.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from tensorgrad.autograd.tangents import (
    FORWARD_ONLY,
    Op,
    Tangents,
    recorded,
    same,
    tangent,
    tangent_of,
    tangents_of,
)
from tensorgrad.core import backward
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.modes import mode, replaced
from tensorgrad.core.nodes import RECORDED, Edge, Node, Output, edge_of
from tensorgrad.core.record import record
from tensorgrad.core.tensor import Tensor

Seeds = Sequence[tuple[Tensor, Tensor]]  # y and dy of each


def gradients(seeds: Seeds, edges: Sequence[Edge]) -> list[Tensor | None]:
    """Return the sum of dy d(y)/d(edge) over all y, as tensors with a history.

    Args:
        seeds: tensors y, and dy in the shape of each.
        edges: leaves or recorded ops, at which the walk ends.
    """
    ends, totals = frozenset(edges), dict[Any, Tensor]()
    for y, dy in seeds:
        if y.requires_grad:
            _add(totals, edge_of(y), dy)
    parts: dict[Node, Any] = {}  # gradients of the outputs of a node
    order = _order(list(totals), ends)
    wanted = ends.union(order)
    for edge in order:
        total: Any = totals.pop(edge, None)
        if type(edge) is Output:
            if total is not None:
                parts.setdefault(edge.node, [None] * edge.count)[edge.index] = total
        elif type(edge) is Node and (total is not None or edge in parts):
            needs = [target in wanted for target in edge.edges]
            dxs = pulled_back(edge, parts.pop(edge, total), needs)
            for target, dx in zip(edge.edges, dxs, strict=True):
                if dx is not None:
                    _add(totals, target, dx)
    return [totals.get(edge) for edge in edges]


def as_argument(x: Tensor) -> Tensor:
    """Return x as the result of an op of its own, at which a walk can end."""
    edge = edge_of(x) if x.requires_grad and x.node is not FORWARD_ONLY else None
    y = Tensor(x.data, True, Node("argument", [edge], same, (), x.data))
    y.tangents = tangents_of(x)
    if mode.forward is not None:
        y.node.forward = [x], [y.tangents]
    return y


def _order(starts: Sequence[Edge], ends: Set[Edge]) -> list[Edge]:
    """Return the nodes and outputs that lead from `starts` to an end, users first; no ends."""
    leads: dict[Edge | None, bool] = {None: False, **dict.fromkeys(ends, True)}
    order: list[Edge] = []
    stack: list[tuple[Any, bool]] = [(start, False) for start in starts]
    while stack:
        edge, is_done = stack.pop()
        if is_done:
            leads[edge] = any([leads.get(target, False) for target in edge.edges])
            if leads[edge]:
                order.append(edge)
        elif edge not in leads:
            leads[edge] = False
            if type(edge) in RECORDED:
                stack += [(edge, True), *[(target, False) for target in edge.edges]]
    return order[::-1]


def _add(totals: dict[Any, Tensor], edge: Any, dx: Tensor) -> None:
    """Add a contribution to the gradient of an edge."""
    before = totals.get(edge)
    totals[edge] = dx if before is None else before + dx


def pulled_back(node: Node, dy: Any, needs: Needs) -> list[Tensor | None]:
    """Return the gradients of the inputs of a recorded op, as an op with a gradient of its own.

    Args:
        node: of the op.
        dy: the gradient of its output; of several outputs a list, with None for one that nothing
            depends on.
        needs: for each input whether its gradient is wanted.
    """
    op = recorded(node)
    dys = _listed(dy)
    arrays = [None if each is None else each.data for each in dys]
    with np.errstate(over="ignore", invalid="ignore"), replaced(mode, autocast=None):
        found = node.backward(arrays if type(dy) is list else arrays[0], op.saved, needs)
        given = {
            place: backward.fit(dx, edge if type(edge) in RECORDED else edge.data, False)
            for place, (dx, edge, need) in enumerate(zip(found, node.edges, needs, strict=True))
            if need and dx is not None
        }
        dxs: list[Tensor | None] = [None] * len(found)
        if given:
            inputs = [*dys, *(op.inputs or map(_like, node.edges))]
            saved = (node, dy, list(given), *arrays, *op.saved)
            name = f"gradient of {node.name}"
            results: Any = record(name, tuple(given.values()), inputs, _backward, saved)
            for place, dx in zip(given, results, strict=True):
                dxs[place] = dx
    return dxs


def _listed(dy: Any) -> list[Tensor | None]:
    """Return the gradients of the outputs of an op as a list."""
    return dy if type(dy) is list else [dy]


def _like(edge: Any) -> Tensor | None:
    """Return a tensor with the history of an edge; its values are not used."""
    if edge is None or type(edge) not in RECORDED:
        return edge  # type: ignore[no-any-return]
    return Tensor(np.broadcast_to(np.zeros((), edge.dtype), edge.shape), True, edge)


def _backward(ws: Sequence[Any], saved: Saved, needs: Needs) -> Gradients:
    node, dys, places = saved[0], _listed(saved[1]), saved[2]
    known = {place: None if w is None else Tensor(w) for place, w in zip(places, ws, strict=True)}
    # An input given twice may have one sum: the cotangent is that of both.
    shared = {node.edges[place]: w for place, w in known.items()}
    given = [known.get(place, shared.get(edge)) for place, edge in enumerate(node.edges)]
    with replaced(mode, grad_enabled=True, forward=None, autocast=None):
        pairs = _along(node, given, dys)
    by_dy = [None if pair is None else pair[0].data for pair in pairs]
    seeds = [pair for pair in pairs if pair is not None and pair[0].requires_grad]
    wanted = [edge for edge, need in zip(node.edges, needs[len(dys) :], strict=True) if need]
    by_input = [None] * len(node.edges)
    if seeds and wanted:
        start = Node("sum", [edge_of(t) for t, _ in seeds], _hand_out, (), np.empty(()))
        start.saved = [dy.data for _, dy in seeds]
        totals = backward.gradients_from(start, np.zeros(()), wanted)
        found = dict(zip(wanted, totals, strict=True))
        for place, edge in enumerate(node.edges):
            by_input[place] = found.pop(edge, None)
    return [*by_dy, *by_input]


def _hand_out(dy: Any, saved: Saved, needs: Needs) -> Gradients:
    return saved


@tangent_of(_backward)
def _tangent(op: Op, *given: Tensor | None) -> Sequence[Tensor | None]:
    node, dys, places = op.saved[0], _listed(op.saved[1]), op.saved[2]
    tdys, txs = list(given[: len(dys)]), given[len(dys) :]
    found: list[Tensor | None] = [None] * len(txs)
    needs = [place in places for place in range(len(txs))]
    if any(t is not None for t in tdys):
        found = pulled_back(node, tdys if type(op.saved[1]) is list else tdys[0], needs)
    if any(t is not None for t in txs):
        constant = [None if t is None else as_argument(t) for t in txs]
        with replaced(mode, inside_grad=True):
            seeds = [pair for pair in _along(node, constant, dys) if pair is not None]
        targets = [node.edges[place] for place in places]
        ends = [*targets, *[edge_of(t) for t in constant if t is not None]]
        totals = dict(zip(targets, gradients(seeds, ends)[: len(targets)], strict=True))
        for place in places:
            dx, before = totals.pop(node.edges[place], None), found[place]
            if dx is not None:
                found[place] = dx if before is None else before + dx
    return [found[place] for place in places]


def _along(node: Node, given: Tangents, dys: Sequence[Tensor | None]) -> list[Any]:
    """Return for each output of an op its tangent and its gradient; None without one of them."""
    shapes = [None if dy is None else (dy.shape, dy.dtype) for dy in dys]
    found = tangent(recorded(node), given, shapes)
    return [None if t is None or dy is None else (t, dy) for t, dy in zip(found, dys, strict=True)]
