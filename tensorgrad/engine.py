"""Automatic differentiation: what an op records, and the walk back over the record.

An op computes an array and calls `record`. When an input needs a gradient, the result gets a
`Node`: the op's backward function, the arrays it saved, and one edge per input. An edge is the
input's own node, the input itself where it is a leaf, or None where no gradient is wanted. So
the graph holds what backward needs and nothing else: an intermediate array that no op saved is
freed as soon as the user lets go of it.

`_walk` counts how often each node is used, then visits a node once all its users have been
visited. It never recurses, adds contributions in an order that depends on the graph alone, and
drops saved arrays as it passes. Gradients on the way are read-only: they may be shared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tensorgrad.arrays import added, cast, converted, sum_to_shape
from tensorgrad.assignments import Assignments
from tensorgrad.backend import Array, Shape, add_into, namespace, same_device
from tensorgrad.checks import array_of
from tensorgrad.dtypes import Dtype, compute_dtype
from tensorgrad.errors import DtypeError, GradError, ShapeError
from tensorgrad.partial import Late, Part, Twin

if TYPE_CHECKING:
    from tensorgrad.amp import Casts
    from tensorgrad.tensor import Tensor

Backward = Callable[[Array, tuple[Any, ...], Sequence[bool]], "Sequence[Array | None]"]


class _Mode(threading.local):
    """What holds for the current thread."""

    grad_enabled = True
    inside_grad = False
    autocast: Casts | None = None  # of the operands of matrix products; see amp.py


mode = _Mode()


class Node:
    """One recorded op. `saved` is None once a walk has passed and freed it."""

    __slots__ = ("backward", "dtype", "edges", "name", "saved", "shape", "tick")

    def __init__(
        self,
        name: str,
        edges: Sequence[Node | Tensor | None],
        backward: Backward,
        saved: tuple[Any, ...] | None,
        data: Array,
    ) -> None:
        self.name = name
        self.edges = edges
        self.backward = backward
        self.saved = saved
        self.dtype: Dtype = data.dtype
        self.shape: Shape = data.shape
        self.tick = _assigned.tick


Edge: TypeAlias = "Node | Tensor"


def backward(root: Tensor, dy: Any = None, retain_graph: bool = False) -> None:
    """Add d(root)/d(leaf), weighted by `dy`, to the `grad` of every leaf that wants one.

    A leaf whose `grad` is an array already gets the sum in place, in that array's dtype; so a
    gradient buffer cut into views collects all gradients. Otherwise `grad` becomes a new array.
    Several threads may do so at once with graphs that have leaves in common.

    Args:
        root: any shape; with more than one element `dy` must be given.
        dy: the shape of `root`; default 1.
        retain_graph: keep the saved arrays, so that backward can run again.

    Raises:
        GradError: nothing to differentiate, the graph was freed, or an array it saved was
            assigned to since.
        ShapeError: `dy` has another shape than `root`.
        DtypeError: `dy` holds no real numbers.
        DeviceError: `dy` is a tensor on another device.
    """
    _walk(root, _seed(root, dy), _deliver, retain_graph)


def gradients(root: Tensor, dy: Array, edges: Sequence[Edge]) -> list[Array | None]:
    """Return d(root)/d(edge) for leaves or recorded ops; the walk ends there, no `grad` changes.

    Gradients of leaves may have a wider dtype than the leaf.
    """
    found: dict[Edge, Array | None] = {}

    def keep(edge: Edge, dx: Array | None, own: bool) -> None:
        found[edge] = dx

    if root.requires_grad:
        _walk(root, dy, keep, retain_graph=False, ends=frozenset(edges))
    return [found.get(edge) for edge in edges]


def frontier(root: Tensor, tick: int) -> list[Edge]:
    """Return the leaves and the ops recorded before `tick` that `root` depends on, in fixed order.

    A tick comes from `next_tick`.
    """
    if not root.requires_grad:
        return []
    start = edge_of(root)
    seen = {start}
    stack, found = [start], []
    while stack:
        edge = stack.pop()
        if type(edge) is not Node or edge.tick < tick:
            found.append(edge)
            continue
        for target in edge.edges:
            if target is not None and target not in seen:
                seen.add(target)
                stack.append(target)
    return found


def next_tick() -> int:
    """Begin a new tick and return it: what is recorded from now on is told from what was before."""
    return _assigned.advance()


def latest_tick() -> int:
    """Return the current tick: it is another one after each assignment."""
    return _assigned.tick


def edge_of(tensor: Tensor) -> Edge:
    """Return where gradients of a tensor go."""
    return tensor if tensor.node is None else tensor.node


def _seed(root: Tensor, dy: Any) -> Array:
    """Return the gradient to start with, checked."""
    if not root.requires_grad:
        raise GradError("backward: the tensor does not depend on anything that requires a gradient")
    if dy is None:
        if root.data.size != 1:
            raise GradError(f"backward: dy is missing; only a scalar starts at 1, got {root.shape}")
        return namespace(root.data).ones_like(root.data)
    if hasattr(dy, "requires_grad"):  # a tensor
        dy = dy.data
    else:
        dy = array_of("backward", "dy", dy, root.data.shape)
        dy = namespace(root.data).asarray(dy)
    same_device("backward", ("the tensor", "dy"), (root.data, dy))
    if dy.shape != root.data.shape:
        raise ShapeError(f"backward: dy has shape {dy.shape}, expected {root.data.shape}")
    if dy.dtype.kind in "cOUS":
        raise DtypeError(f"backward: dy has dtype {dy.dtype}, expected real numbers")
    return cast(dy, root.data.dtype)


@np.errstate(over="ignore", invalid="ignore")  # inf and NaN reach the gradients, as on the GPU
def _walk(
    root: Tensor,
    dy: Array,
    deliver: Callable[[Any, Array | None, bool], None],
    retain_graph: bool,
    ends: frozenset[Edge] = frozenset(),
) -> None:
    """Visit every node after all its users; hand leaves and `ends` their complete gradients.

    deliver: is also told whether nobody else holds the gradient.
    """
    start = edge_of(root)
    dx: Any
    waiting = {edge: uses for edge, uses in _count_uses(start, ends).items() if uses > 1}
    sums: dict[Edge, Array | None] = {}
    ready: list[tuple[Edge, Array | None]] = [(start, cast(dy, start.dtype))]
    found: Sequence[Array | None]
    while ready:
        edge, dy = ready.pop()
        if type(edge) is not Node or edge in ends:
            deliver(edge, dy, False)
            continue
        edges, saved = edge.edges, edge.saved
        if saved is None or edge.tick != _assigned.tick:
            _check_saved(edge)
        if dy is None:
            found = [None] * len(edges)
        else:
            found = edge.backward(dy, saved or (), [e is not None for e in edges])
        if not retain_graph:
            edge.saved, edge.edges = None, ()
        for target, dx in zip(edges, found, strict=True):
            if target is None:
                continue
            if dx is not None:
                shape = dx.shape
                if not shape or shape != target.shape or dx.dtype is not target.dtype:
                    dx = _fit(dx, target, target in waiting, deliver is _deliver)
            if target in waiting:  # used several times: add up until the last contribution
                other = sums.get(target)
                if other is not None:
                    if dx is None:
                        dx = other
                    elif type(other) is np.ndarray and dx.dtype is other.dtype is target.dtype:
                        dx = other + dx
                    else:
                        dx = _sum(other, dx, target)
                    if isinstance(dx, np.generic):
                        dx = np.asarray(dx)  # NumPy turns 0-d sums into scalars
                uses = waiting[target] - 1
                if uses:
                    waiting[target], sums[target] = uses, dx
                    continue
                sums.pop(target, None)
                if type(dx) is Part:
                    dx = dx.spread(target.shape)
                if dx is not None and type(dx) is not Twin and type(target) is Node:
                    dx = cast(dx, target.dtype)
            if type(target) is Node:
                ready.append((target, dx))
            else:  # at once: who waits for a gradient shall not wait for the rest of the walk
                leaf: Any = target
                first = leaf.grad is None and leaf not in waiting  # else it is added or copied
                own = first and _is_own(dx, (dy, *found, *(saved or ())))
                deliver(leaf, dx, own)
        found, saved, dx = (), (), None  # so that memory falls before the next backward runs


def _count_uses(start: Edge, ends: frozenset[Edge]) -> dict[Edge, int]:
    """Return how many recorded ops use each node and leaf between `start` and `ends`."""
    uses: dict[Edge, int] = {start: 0}
    stack = [start]
    while stack:
        edge = stack.pop()
        if type(edge) is Node and edge not in ends:
            for target in edge.edges:
                if target is None:
                    continue
                if target in uses:
                    uses[target] += 1
                else:
                    uses[target] = 1
                    if type(target) is Node:
                        stack.append(target)
    return uses


def _check_saved(node: Node) -> None:
    """Raise when what the node saved was freed or overwritten."""
    if node.saved is None:
        raise GradError(
            f"backward: the graph of {node.name} was freed by an earlier backward; "
            "pass retain_graph=True to that one"
        )
    _assigned.check(node)


def _fit(dx: Array, target: Any, more: bool, deliver: bool) -> Array | None:
    """Return a gradient in the shape of its input and, but for leaves, in its dtype.

    A leaf keeps the wider dtype until `_deliver` adds it to a gradient that may be wide too. What
    adds itself is added to such a gradient at once, or becomes it, and None is left to deliver.
    Where more follow, their sum is cast.
    """
    if type(dx) is Twin:
        return dx
    if type(dx) is Part or type(dx) is Late:
        if deliver and type(target) is not Node:
            with leaves:
                if _is_wide(target.grad):
                    dx.add_to(target.grad)
                    return None
                if type(dx) is Late and target.grad is None and not more:
                    dx = dx.spread(target.shape)
                    if dx.shape == target.shape:
                        target.grad = cast(dx, target.dtype)
                        return None
        if more and type(dx) is Part:
            return dx.cast(target.dtype) if type(target) is Node else dx
        if isinstance(dx, (Part, Late)):
            dx = dx.spread(target.shape)
    if isinstance(dx, np.generic):
        dx = np.asarray(dx)  # NumPy turns 0-d results into scalars
    if dx.shape != target.shape:
        dx = sum_to_shape(dx, target.shape)
    return cast(dx, target.dtype) if type(target) is Node and not more else dx


def _sum(a: Any, b: Any, target: Edge) -> Any:
    """Return the sum of two contributions, rounded once to the dtype of an op's result."""
    if isinstance(a, Part) or isinstance(b, Part):
        return a + b
    narrow = type(target) is Node
    return added(a, b, target.dtype if narrow else np.result_type(a, b, target.dtype))


def _is_wide(grad: Array | None) -> bool:
    """Whether sums lose nothing when they are added to a gradient one by one."""
    return grad is not None and grad.dtype == compute_dtype(grad.dtype)


def _is_own(dx: Array | None, others: Sequence[Any]) -> bool:
    """Whether a gradient is an array of its own: no view, and among the others once at most."""
    if dx is None or dx.base is not None or not dx.flags.c_contiguous:
        return False
    return sum([other is dx for other in others]) <= 1


def _deliver(leaf: Tensor, dx: Array | None, own: bool) -> None:
    """Add a complete gradient to the leaf and tell those who wait for it."""
    if dx is not None:
        with leaves:
            if leaf.grad is None:
                keep = own and dx.dtype == leaf.data.dtype
                leaf.grad = dx if keep else converted(dx, leaf.data.dtype)
            else:
                add_into(leaf.grad, dx)
    for hook in leaf.hooks or ():
        hook(leaf)


_assigned = Assignments()
leaves = threading.RLock()  # of the gradients of all leaves, to which several threads may add


def assign(tensor: Tensor, key: Any, value: Any) -> None:
    """Carry out `tensor[key] = value`.

    Raises:
        GradError: the tensor is part of a graph (and gradients are enabled).
    """
    check_assignable("assignment", tensor)
    tensor.data[key] = value
    mark_assigned(tensor.data)


def check_assignable(op: str, tensor: Tensor) -> None:
    """Raise GradError where the tensor is part of a graph (and gradients are enabled)."""
    if tensor.requires_grad and mode.grad_enabled:
        kind = "is the result of an op" if tensor.node is not None else "requires a gradient"
        raise GradError(
            f"{op}: the tensor of shape {tensor.shape} {kind}; assign to a copy, "
            "use where(), or assign under no_grad()"
        )


def mark_assigned(array: Array) -> None:
    """Say that elements of an array changed, so that no graph that saved them is used on."""
    if array.size:
        _assigned.note(array)
