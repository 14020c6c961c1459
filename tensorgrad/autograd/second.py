"""Gradients that can be differentiated again: a walk over the graph in recorded ops.

core/backward.py walks with arrays. This walk does the same with tensors: the gradient of each op
is an op of its own, whose inputs are dy and the inputs of the op. Its gradient and its tangent
follow from the tangent of the op; see tangents.py. Tests: tests/autograd/test_second.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np

from tensorgrad.autograd.tangents import (
    FORWARD_ONLY,
    Forward,
    Op,
    Tangents,
    recorded,
    reversible,
    same,
    tangent,
    tangent_of,
    tangents_of,
)
from tensorgrad.core import backward
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import Dtype
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.gradient import (
    AddTogether,
    Gradients,
    LeafGradient,
    Needs,
    Saved,
    leaves,
    unwrapped,
)
from tensorgrad.core.modes import mode, replaced
from tensorgrad.core.nodes import RECORDED, Edge, Node, Output, edge_of, frontier
from tensorgrad.core.record import record
from tensorgrad.core.tensor import Tensor

Seeds = Sequence[tuple[Tensor, Tensor]]  # y and dy of each
# By the backward function of an op whose gradient in recorded ops is a walk over another graph: the
# function of its node, of a gradient or None for each output, and of needs, that returns them.
WALKS: dict[Any, Callable[[Node, Tangents, Needs], Sequence[Tensor | None]]] = {}


def gradients(seeds: Seeds, edges: Sequence[Edge], constant: bool = False) -> list[Tensor | None]:
    """Return the sum of dy d(y)/d(edge) over all y, as tensors with a history.

    Args:
        seeds: tensors y, and dy in the shape of each.
        edges: leaves or recorded ops, at which the walk ends.
        constant: the history is that of dy alone: nothing that the graph depends on varies.
    """
    ends, totals = frozenset(edges), dict[Any, Tensor]()
    for y, dy in seeds:
        if y.requires_grad:
            edge = edge_of(y)  # may have another dtype, where y is a cast of a leaf
            _add(totals, edge, dy if dy.dtype == edge.dtype else dy.astype(edge.dtype))
    parts: dict[Node, Any] = {}  # gradients of the outputs of a node
    order = _order(list(totals), ends)
    wanted = ends.union(order)
    for edge in order:
        total: Any = totals.pop(edge, None)
        if type(edge) is Output:
            if total is not None:
                dys = parts.setdefault(edge.node, [None] * edge.count)
                before = dys[edge.index]  # `Op.output` makes further edges to an output
                dys[edge.index] = total if before is None else before + total
        elif type(edge) is Node and (total is not None or edge in parts):
            needs = [target in wanted for target in edge.edges]
            dxs = pulled_back(edge, parts.pop(edge, total), needs, constant)
            for target, dx in zip(edge.edges, dxs, strict=True):
                if dx is not None:
                    _add(totals, target, dx)
    return [totals.get(edge) for edge in edges]


def _backward_to_leaves(y: Tensor, dy: Any, retain_graph: bool | None) -> None:
    """Add gradients with a history to the `grad` of every leaf; see `Tensor.backward`."""
    if retain_graph is False:
        raise ArgumentError(
            "backward: retain_graph is False, expected True with create_graph: the gradients "
            "need the graph"
        )
    array = backward.seed_of(y, dy)
    seed = dy if isinstance(dy, Tensor) and dy.data is array else Tensor(array)
    ends: list[Any] = frontier(y, 0)  # no op is older, so that all are leaves
    with replaced(mode, grad_enabled=True):
        for leaf, dx in zip(ends, gradients([(y, seed)], ends), strict=True):
            if dx is not None:
                with leaves:
                    _add_to_leaf(leaf, dx)
    for leaf in ends:
        for hook in leaf.hooks or ():
            hook(leaf)


def _add_to_leaf(leaf: Tensor, dx: Tensor) -> None:
    """Add a gradient with its history to that of a leaf, whose array stays where it is."""
    gradient, before = leaf.gradient, leaf.grad
    if gradient is None:
        leaf.gradient = RecordedGradient.of(dx)
        return
    total = (before if isinstance(before, Tensor) else Tensor(gradient.array)) + dx
    gradient.add(dx.data)
    RecordedGradient.hold(gradient, total)


class RecordedGradient(LeafGradient):
    """The gradient of a leaf with its history, until something is added to it.

    The graph may have saved the memory of the tensor, which the array shares until somebody writes.
    """

    __slots__ = ()

    @classmethod
    def of(cls, tensor: Tensor) -> LeafGradient:
        """Return the gradient that a tensor is."""
        gradient = LeafGradient(tensor.data)
        if tensor.requires_grad:
            cls.hold(gradient, tensor)
        return gradient

    @classmethod
    def hold(cls, gradient: LeafGradient, tensor: Tensor) -> None:
        """Give a gradient a history: that of a tensor of the same values."""
        gradient.tensor, gradient.is_touched = tensor, True
        gradient.__class__ = cls

    def plain(self) -> Array:
        """Return an array that may be written; the gradient has no history from now on."""
        tensor, self.__class__ = self.tensor, LeafGradient  # type: ignore[assignment]
        del self.tensor
        if self.array is tensor.data:
            self.array = self.array.copy()
        return self.array

    def add(self, dx: Array) -> None:
        """Add a contribution in place."""
        self.plain()
        self.add(dx)

    def add_at(self, key: Any, dx: Array) -> None:
        """Add a contribution that is dx in the view [key] and zero elsewhere."""
        self.plain()
        self.add_at(key, dx)

    def add_by(self, write: Callable[[Array, int], None]) -> None:
        """Let `write(array, beta)` add its contribution on the CPU."""
        self.plain()
        self.add_by(write)

    def out(self, dtype: Dtype, rounds: bool = False) -> tuple[Array, int] | None:
        """Return the array for a kernel that adds to it."""
        self.plain()
        return self.out(dtype, rounds)

    def waits(self, contribution: Any, nbytes: int, add: AddTogether) -> bool:
        """Let a contribution wait until somebody else adds to the gradient or may read it."""
        self.plain()
        return self.waits(contribution, nbytes, add)


backward.recorded.backward = _backward_to_leaves
backward.recorded.gradient = RecordedGradient.of


def as_argument(x: Tensor) -> Tensor:
    """Return x as the result of an op of its own, at which a walk can end."""
    flows = mode.grad_enabled and x.requires_grad and x.node is not FORWARD_ONLY
    y = Tensor(x.data, True, Node("argument", [edge_of(x) if flows else None], same, (), x.data))
    if mode.grad_enabled and mode.forward is not None:
        y.tangents = tangents_of(x)
        y.node.forward = [x], [y.tangents]
    return y


def without_dead_graph(x: Tensor) -> Tensor:
    """Return a result of a derivative, without a graph where it leads nowhere.

    A graph leads to leaves that require a gradient, and to the arguments of the gradients that run.
    """
    if not x.requires_grad:
        return x
    flows, known = _leads_on(x), {k: without_dead_graph(t) for k, t in tangents_of(x).items()}
    if not known:
        return x if flows else Tensor(x.data)
    y = Tensor(x.data, True, edge_of(x) if flows else FORWARD_ONLY)
    y.tangents = known
    return y


def gradients_of_results(
    seeds: Seeds, edges: Sequence[Edge], constant: bool = False
) -> list[Tensor | None]:
    """Return what `gradients` does, with a history only where the graph leads on."""
    starts = [x for y, dy in seeds for x in ((dy,) if constant else (y, dy))]
    flows = any([_leads_on(x) for x in starts if x.requires_grad])
    forward: Forward | None = mode.forward
    if forward is not None and not flows:
        forward = forward._replace(is_recorded=False)
    with replaced(mode, forward=forward, grad_enabled=flows or forward is not None):
        return gradients(seeds, edges, constant)


def _leads_on(x: Tensor) -> bool:
    """Whether the graph of a tensor leads on."""
    seen: set[Edge | None] = {None}
    stack: list[Any] = [edge_of(x)]
    while stack:
        edge = stack.pop()
        if edge in mode.arguments or type(edge) not in RECORDED:
            return True
        seen.add(edge)
        stack += [other for other in edge.edges if other not in seen]
    return False


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
            if type(edge) is Node and edge.saved is None:
                backward.check_saved(edge)
            if type(edge) in RECORDED:
                stack += [(edge, True), *[(target, False) for target in edge.edges]]
    return order[::-1]


def _add(totals: dict[Any, Tensor], edge: Any, dx: Tensor) -> None:
    """Add a contribution to the gradient of an edge."""
    before = totals.get(edge)
    totals[edge] = dx if before is None else before + dx


def pulled_back(node: Node, dy: Any, needs: Needs, constant: bool = False) -> list[Tensor | None]:
    """Return the gradients of the inputs of a recorded op, as an op with a gradient of its own.

    Args:
        node: of the op.
        dy: the gradient of its output; of several outputs a list, with None for one that nothing
            depends on.
        needs: for each input whether its gradient is wanted.
        constant: the inputs of the op do not vary.
    """
    op = _constant(node) if constant else recorded(node)
    held = op.node if constant else _copy(node, node.edges)
    if op.inputs is not None:
        held.forward = op.inputs, op.tangents
    dys = _listed(dy)
    walk = WALKS.get(node.backward)
    if walk is not None:
        return list(walk(node, dys, needs))
    arrays = [None if each is None else each.data for each in dys]
    with np.errstate(over="ignore", invalid="ignore"), replaced(mode, autocast=None):
        grads = node.backward(arrays if type(dy) is list else arrays[0], op.saved, needs)
        given = {
            place: backward.fit(unwrapped(dx), edge, False)
            for place, (dx, edge, need) in enumerate(zip(grads, node.edges, needs, strict=True))
            if need and dx is not None
        }
        dxs: list[Tensor | None] = [None] * len(grads)
        if given:
            varying = [None] * len(grads) if constant else (op.inputs or map(_like, node.edges))
            saved = (held, dy, list(given), *arrays, *op.saved)
            name = f"gradient of {node.name}"
            results: Any = record(name, tuple(given.values()), [*dys, *varying], _backward, saved)
            for place, dx in zip(given, results, strict=True):
                dxs[place] = dx
    return dxs


def _copy(node: Node, edges: Sequence[Any]) -> Node:
    """Return a copy of a node, which a walk over the graph that passes the node does not free."""
    copy = Node(node.name, edges, node.backward, node.saved, node)
    copy.version = node.version
    return copy


def _constant(node: Node) -> Op:
    """Return the op of a node, with inputs that do not vary."""
    backward.check_saved(node)
    ends = [
        None if edge is None else Node("constant", [None], same, (), edge) for edge in node.edges
    ]
    return Op(_copy(node, ends), node.saved)  # all walks end there


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
    cotangents = dict(zip(places, ws, strict=True))
    # An input that occurs repeatedly may have got its whole gradient in one place.
    of_edges = {node.edges[place]: w for place, w in cotangents.items()}
    by_edge = [cotangents.get(i, of_edges.get(edge)) for i, edge in enumerate(node.edges)]
    given = [None if w is None else Tensor(w) for w in by_edge]
    with replaced(mode, grad_enabled=True, forward=None, autocast=None):
        pairs = _along(node, given, dys)
    by_dy = [None if pair is None else pair[0].data for pair in pairs]
    seeds = [pair for pair in pairs if pair is not None and pair[0].requires_grad]
    wanted = [edge for edge, need in zip(node.edges, needs[len(dys) :], strict=True) if need]
    by_input = [None] * len(node.edges)
    if seeds and wanted:
        totals = array_gradients([(t, dy.data) for t, dy in seeds], wanted)
        of_inputs = dict(zip(wanted, totals, strict=True))
        for place, edge in enumerate(node.edges):
            by_input[place] = of_inputs.pop(edge, None)
    return [*by_dy, *by_input]


def array_gradients(
    seeds: Sequence[tuple[Tensor, Any]], edges: Sequence[Edge], retain_graph: bool = True
) -> list[Array | None]:
    """Return what `gradients` does, as arrays."""
    flowing = [(edge_of(y), dy) for y, dy in seeds if y.requires_grad]
    if len(flowing) == 1:
        return backward.gradients_from(*flowing[0], edges, retain_graph)
    start = Node("sum", [edge for edge, _ in flowing], hand_out, (), np.empty(()))
    start.saved = [dy for _, dy in flowing]
    return backward.gradients_from(start, np.zeros(()), edges, retain_graph)


def hand_out(dy: Any, saved: Saved, needs: Needs) -> Gradients:
    """Return the gradients that were saved: the backward function of a walk's start."""
    return saved


@tangent_of(_backward)
def _tangent(op: Op, *given: Tensor | None) -> Sequence[Tensor | None]:
    node, dys, places = op.saved[0], _listed(op.saved[1]), op.saved[2]
    tdys, txs = list(given[: len(dys)]), given[len(dys) :]
    dxs: list[Tensor | None] = [None] * len(txs)
    needs = [place in places for place in range(len(txs))]
    if any(t is not None for t in tdys):
        dxs = pulled_back(node, tdys if type(op.saved[1]) is list else tdys[0], needs)
    if any(t is not None for t in txs):
        with replaced(mode, grad_enabled=True, forward=reversible()):
            constant = [None if t is None else as_argument(t) for t in txs]
            seeds = [pair for pair in _along(node, constant, dys) if pair is not None]
        targets = [node.edges[place] for place in places]
        ends = [*targets, *[edge_of(t) for t in constant if t is not None]]
        totals = dict(zip(targets, gradients(seeds, ends)[: len(targets)], strict=True))
        for place in places:
            dx, before = totals.pop(node.edges[place], None), dxs[place]
            if dx is not None:
                dxs[place] = dx if before is None else before + dx
    return [dxs[place] for place in places]


def _along(node: Node, given: Tangents, dys: Sequence[Tensor | None]) -> list[Any]:
    """Return for each output of an op its tangent and its gradient; None without one of them."""
    shapes = [None if dy is None else (dy.shape, dy.dtype) for dy in dys]
    ts = tangent(recorded(node), given, shapes)
    return [None if t is None or dy is None else (t, dy) for t, dy in zip(ts, dys, strict=True)]


def tangents_along(
    ys: Sequence[Tensor], edges: Sequence[Edge], given: Tangents, constant: bool = False
) -> list[Tensor | None]:
    """Return the tangents of results, in a walk over their graph from its arguments.

    Args:
        ys: the results, whose graph is there.
        edges: of the arguments.
        given: the tangents of the arguments.
        constant: as for `gradients`.
    """
    tangents: dict[Any, Tensor | None] = dict(zip(edges, given, strict=True))
    order = _order([edge_of(y) for y in ys if y.requires_grad], frozenset(edges))[::-1]
    outputs: dict[Node, list[Output]] = {}
    for edge in order:
        if type(edge) is Output:
            outputs.setdefault(edge.node, []).append(edge)
    for node in order:
        if type(node) is not Node:
            continue
        own = [tangents.get(edge) for edge in node.edges]
        if all(t is None for t in own):
            continue
        several, op = outputs.get(node), _constant(node) if constant else recorded(node)
        if several is None:
            (tangents[node],) = tangent(op, own, [(node.shape, node.dtype)])
            continue
        shapes: list[Any] = [None] * several[0].count
        for output in several:
            shapes[output.index] = output.shape, output.dtype
        ts = tangent(op, own, shapes)
        tangents.update({output: ts[output.index] for output in several})
    ts = [tangents.get(edge_of(y)) if y.requires_grad else None for y in ys]
    return [
        t if t is None or t.dtype == y.dtype else t.astype(y.dtype)
        for t, y in zip(ts, ys, strict=True)
    ]
