"""The backward pass: a walk over the graph from its end.

`_walk` counts how often each edge is used, then visits a node once all its users have been visited.
It never recurses, adds contributions in an order that depends on the graph alone, and drops saved
arrays as it passes. Gradients on the way are read-only: they may be shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tensorgrad.core import instrument
from tensorgrad.core.arrays import added, array_of, cast, converted, sum_to_shape
from tensorgrad.core.backend import Array, namespace, same_device
from tensorgrad.core.dtypes import is_complex
from tensorgrad.core.errors import DtypeError, GradError, ShapeError
from tensorgrad.core.gradient import (
    Gradient,
    LeafGradient,
    Waiting,
    is_given_away,
    leaves,
    unwrapped,
)
from tensorgrad.core.modes import mode
from tensorgrad.core.nodes import RECORDED, Edge, Node, Output, edge_of, versions

if TYPE_CHECKING:
    from tensorgrad.core.tensor import Tensor

# Where a walk puts gradients: a dictionary, or leaves, of which it notes those that wait.
Into: TypeAlias = "dict[Edge, Array | None] | Waiting"
_NDARRAY, _SCALAR = np.ndarray, np.generic
_NOWHERE: frozenset[Edge] = frozenset()


class Recorded:
    """How gradients get a history; set when `tensorgrad.autograd` is imported.

    Attributes:
        backward: (tensor, dy, retain_graph) -> None; adds gradients with a history to the leaves.
        gradient: (tensor) -> the gradient of a leaf, with the history of a tensor.
    """

    backward: Callable[[Tensor, Any, bool | None], None]
    gradient: Callable[[Tensor], LeafGradient]


recorded = Recorded()


def backward(
    self: Tensor, dy: Any = None, retain_graph: bool | None = None, create_graph: bool = False
) -> None:
    """Add d(self)/d(leaf), weighted by `dy`, to the `grad` of every leaf that wants one.

    A leaf whose `grad` is an array already gets the sum in place, in that array's dtype; so a
    gradient buffer cut into views collects all gradients. Otherwise `grad` becomes a new array.
    Several threads may do so at once with graphs that have leaves in common.

    Args:
        self: any shape; with more than one element `dy` must be given.
        dy: the shape of the tensor; default 1. With `create_graph` its history is kept.
        retain_graph: keep the saved arrays, so that backward can run again. Default: False, or
            True with `create_graph`.
        create_graph: record the gradients, so that they can be differentiated in turn. The `grad`
            of a leaf becomes a tensor with a history, until something else is added to it.

    Raises:
        GradError: nothing to differentiate, the graph was freed, or an array it saved was
            assigned to since; the call is inside of a function that `jvp` differentiates; or an op
            has a gradient and no tangent, with `create_graph`.
        ArgumentError: `create_graph` with `retain_graph=False`.
        ShapeError: `dy` has another shape than the tensor.
        DtypeError: `dy` holds no real numbers.
        DeviceError: `dy` is a tensor on another device.
    """
    if mode.forward is not None:
        raise GradError(
            "backward: got a call inside of a function that jvp differentiates, expected "
            "tensorgrad.grad or vjp there: the tangents of `grad` would be lost"
        )
    if create_graph:
        recorded.backward(self, dy, retain_graph)
    else:
        dy = seed_of(self, dy)
        start = self if self.node is None else self.node
        if dy.dtype is not start.dtype:  # a cast of a leaf
            dy = cast(dy, start.dtype)
        if instrument.observer is None:
            _walk_to_leaves(start, dy, retain_graph)
        else:
            with instrument.observer.phase("backward"):
                _walk_to_leaves(start, dy, retain_graph)
    if mode.capture is not None:
        mode.capture.settle()


def _walk_to_leaves(start: Any, dy: Any, retain_graph: bool | None) -> None:
    """Add gradients to the leaves, at the end those that have waited for others."""
    waiting = Waiting()
    try:
        _walk(start, dy, retain_graph, _NOWHERE, waiting)
    except BaseException:
        if mode.capture is not None:
            waiting.clear()  # kernels of a step that is not captured never run
        raise
    finally:
        if waiting:
            waiting.add()


def gradients(root: Tensor, dy: Array | Gradient, edges: Sequence[Edge]) -> list[Array | None]:
    """Return d(root)/d(edge) for leaves or recorded ops; the walk ends there, no `grad` changes.

    Gradients of leaves may have a wider dtype than the leaf.
    """
    if not root.requires_grad:
        return [None] * len(edges)
    return gradients_from(edge_of(root), dy, edges, retain_graph=False)


def gradients_within(node: Node, dy: Array) -> list[Array | None]:
    """Return the gradients of the inputs of an op that another op has recorded and saved.

    The other op's backward calls this; what was saved stays for another call.
    """
    return gradients_from(node, dy, [edge for edge in node.edges if edge is not None])


def gradients_from(
    start: Edge, dy: Array | Gradient, edges: Sequence[Edge], retain_graph: bool = True
) -> list[Array | None]:
    """Return the gradients of leaves or recorded ops in a walk from an edge; see `gradients`."""
    complete: dict[Edge, Array | None] = {}
    if type(dy) is not Gradient:
        dy = cast(dy, start.dtype)
    _walk(start, dy, retain_graph, frozenset(edges), complete)
    return [complete.get(edge) for edge in edges]


def seed_of(root: Tensor, dy: Any) -> Array:
    """Return the gradient to start with, checked."""
    data = root.data
    if not root.requires_grad:
        raise GradError("backward: the tensor does not depend on anything that requires a gradient")
    if dy is None:
        if data.size != 1:
            raise GradError(f"backward: dy is missing; only a scalar starts at 1, got {root.shape}")
        if type(data) is _NDARRAY:
            return np.array(1, data.dtype, ndmin=data.ndim)
        return namespace(data).ones_like(data)
    if hasattr(dy, "requires_grad"):  # a tensor
        dy = dy.data
    elif type(dy) is not _NDARRAY or type(data) is not _NDARRAY:
        dy = namespace(data).asarray(array_of("backward", "dy", dy, data.shape))
    if type(dy) is not _NDARRAY or type(data) is not _NDARRAY:
        same_device("backward", ("the tensor", "dy"), (data, dy))
    if dy.shape != data.shape:
        raise ShapeError(f"backward: dy has shape {dy.shape}, expected {data.shape}")
    if dy.dtype.kind in "cOUS":
        raise DtypeError(f"backward: dy has dtype {dy.dtype}, expected real numbers")
    return dy if dy.dtype is data.dtype else cast(dy, data.dtype)


@np.errstate(over="ignore", invalid="ignore")  # inf and NaN reach the gradients, as on the GPU
def _walk(start: Any, dy: Any, retain_graph: bool | None, ends: Set[Edge], into: Into) -> None:
    """Visit nodes after all their users, up to leaves and `ends`, whose gradients it completes."""
    shared = _shared(start, ends, into)
    sum_of, observer = shared.get, instrument.observer
    parts: dict[Node, list[Any]] = {}  # gradients of the outputs of a node
    ready: list[tuple[Any, Any]] = [(start, dy)]
    while ready:
        node, dy = ready.pop()
        if type(node) is not Node or (ends and node in ends):
            ready += _arrived(node, dy, shared, parts, ends, into)
            continue
        edges, saved = node.edges, node.saved
        if saved is None or node.version != versions.current:
            check_saved(node)
        needs = []
        for edge in edges:
            total = sum_of(edge)
            if total is not None:
                needs.append(total.need)
            else:
                needs.append(type(edge) is Node or (edge is not None and _need(edge, into)))
        if dy is None or type(dy) is Gradient:
            dxs = _run(node, dy, needs)
        elif observer is not None:
            dxs = observer.backward(node, dy, saved, needs)
        else:
            dxs = node.backward(dy, saved, needs)
        if len(dxs) != len(edges):
            raise _wrong_number(node, dxs)
        if not retain_graph:
            node.saved, node.edges = None, ()
        for edge, dx in zip(edges, dxs):  # noqa: B905  checked in less time
            if edge is None:
                continue
            total = sum_of(edge)
            like = edge if type(edge) in RECORDED else edge.data
            if dx is not None:
                shape = dx.shape
                if not shape or shape != like.shape or dx.dtype is not like.dtype:
                    dx = fit(dx, like, total is not None or type(edge) is not Node)
            if total is not None:
                if total.collect(dx, dy, dxs, saved):
                    continue
                dx = total.complete()
            if like is edge:
                ready.append((edge, dx))
            else:  # at once: who waits for a gradient need not wait for the rest of the walk
                _deliver(edge, dx, None if total else (dy, dxs, saved), into)
        dxs, saved, dx = (), (), None  # so that memory falls before the next backward runs


def _run(node: Node, dy: Gradient | None, needs: Sequence[Any]) -> Sequence[Any]:
    """Return what a backward function returns where it gets no plain array.

    An op that hands its gradient on, as `add` does, hands on its column sums.
    """
    if dy is None:
        return [None] * len(needs)
    operand, observer = dy if node.takes_gradient else dy.array, instrument.observer
    run = node.backward if observer is None else partial(observer.backward, node)
    return [dy if dx is dy.array else dx for dx in run(operand, node.saved or (), needs)]


def _wrong_number(node: Node, found: Sequence[Any]) -> GradError:
    """Return the error of a backward function that returned too many gradients, or too few."""
    return GradError(
        f"backward: that of {node.name} returned {len(found)} gradients, expected one or None for "
        f"each of its {len(node.edges)} inputs"
    )


def _need(edge: Any, into: Into, several: bool = False) -> Any:
    """Return the need for an edge whose gradient is not known yet.

    It is the gradient of a leaf, but not one of 16 bits where several ops contribute: what they
    return in float32 is added up in float32 and rounded once.
    """
    of_leaf = edge.gradient if type(into) is Waiting and type(edge) not in RECORDED else None
    return True if of_leaf is None or (several and not of_leaf.is_wide) else of_leaf


def _arrived(
    edge: Any,
    dy: Any,
    shared: dict[Any, Gradient],
    parts: dict[Node, list[Any]],
    ends: Set[Edge],
    into: Into,
) -> list[tuple[Node, Any]]:
    """Deliver the gradient of an end, or keep that of an output.

    Returns:
        The node of the outputs and a list of all their gradients, once these are complete.
    """
    if type(edge) is not Output or edge in ends:
        _deliver(edge, unwrapped(dy), None, into)
        return []
    node = edge.node
    dys, own = parts.setdefault(node, [None] * edge.count), unwrapped(dy)
    before = dys[edge.index]
    if before is not None and own is not None:  # tangents make further edges to an output
        own = added(before, own, np.result_type(before, own))
    dys[edge.index] = before if own is None else own
    gradient = shared.get(node)
    if gradient is not None:
        gradient.uses -= 1
        if gradient.uses:
            return []
    del parts[node]
    return [(node, None if all(dy is None for dy in dys) else dys)]


def _shared(start: Any, ends: Set[Edge], into: Into) -> dict[Any, Gradient]:
    """Return gradients for the nodes and leaves between `start` and `ends` with several users."""
    shared: dict[Any, Gradient] = {}
    seen = {start, None}
    stack: list[Any] = [start] if type(start) in RECORDED else []
    while stack:
        edge = stack.pop()
        if ends and edge in ends:
            continue
        for target in edge.edges:
            if target not in seen:
                seen.add(target)
                if type(target) in RECORDED:
                    stack.append(target)
            elif target in shared:
                shared[target].uses += 1
            elif target is not None:
                gradient = shared[target] = Gradient(None, dtype=target.dtype)
                gradient.rounds, gradient.is_leaf = (
                    type(target) is Node,
                    type(target) not in RECORDED,
                )
                gradient.need = _need(target, into, several=True)
    return shared


def check_saved(node: Node) -> None:
    """Raise when what the node saved was freed or overwritten."""
    if node.saved is None:
        raise GradError(
            f"backward: the graph of {node.name} was freed by an earlier backward; "
            "pass retain_graph=True to that one"
        )
    versions.check(node)


def fit(dx: Any, like: Any, stays_wide: bool) -> Any:
    """Return a gradient in the shape of its input and, unless it stays wide, in its dtype.

    A leaf keeps the wider dtype until `_deliver` adds it to a gradient that may be wide too; an
    output keeps it for the node that adds up what its outputs get. Where more follow, their sum is
    cast.

    Raises:
        GradError: the gradient is complex, or the input is.
    """
    array: Any = dx.array if type(dx) is Gradient else dx
    if isinstance(array, _SCALAR):
        array = dx = np.asarray(array)  # NumPy turns 0-d results into scalars
    if array.dtype is like.dtype and array.shape == like.shape:
        return array if stays_wide else dx
    if is_complex(array.dtype) is not is_complex(like.dtype):
        raise GradError(
            f"backward: the gradient of an input of {like.dtype} has dtype {array.dtype}, expected "
            "real numbers: complex ones carry no gradient; use detach()"
        )
    if array.shape != like.shape:
        array = sum_to_shape(array, like.shape)
    return array if stays_wide else cast(array, like.dtype)


def _deliver(edge: Any, dx: Array | None, beside: Any, into: Into) -> None:
    """Keep a complete gradient, or add it to the leaf and tell those who wait for it.

    Args:
        beside: what the op that returned the gradient has beside it, which may hold it too; None
            where it is not known that nobody else does.
    """
    if isinstance(into, dict):
        into[edge] = dx
        return
    if dx is not None:
        with leaves:
            if edge.gradient is not None:
                edge.gradient.add(dx)
            elif beside and dx.dtype == edge.data.dtype and is_given_away(dx, *beside):
                edge.gradient = LeafGradient(dx)
            else:
                edge.gradient = LeafGradient(converted(dx, edge.data.dtype))
    if edge.gradient is not None and edge.gradient.waiting is not None:
        into.note(edge.gradient)
    if edge.hooks:
        into.add()
        for hook in edge.hooks:
            hook(edge)
