"""The graph of recorded ops and the walk back over it.

A `Node` is one recorded op: its backward function, the arrays it saved, and one edge per input. An
edge is the input's own node, one of the `Output`s of a node that has several, the input itself
where it is a leaf, or None where no gradient is wanted.

`_walk` counts how often each edge is used, then visits a node once all its users have been visited.
It never recurses, adds contributions in an order that depends on the graph alone, and drops saved
arrays as it passes. Gradients on the way are read-only: they may be shared.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tensorgrad import ranges
from tensorgrad.arrays import cast, converted, sum_to_shape
from tensorgrad.backend import Array, Shape, byte_bounds, is_array, namespace, same_device
from tensorgrad.checks import array_of
from tensorgrad.dtypes import Dtype, compute_dtype, is_complex
from tensorgrad.errors import DtypeError, GradError, ShapeError
from tensorgrad.gradient import Gradient, LeafGradient, leaves, unwrapped

if TYPE_CHECKING:
    from tensorgrad.amp import Casts
    from tensorgrad.tensor import Tensor

# backward(dy, saved, needs) -> one gradient or None per input; of several outputs, dy is a list
Backward = Callable[[Any, tuple[Any, ...], Sequence[Any]], "Sequence[Array | None]"]


class _Mode(threading.local):
    """What holds for the current thread."""

    grad_enabled = True
    inside_grad = False
    autocast: Casts | None = None  # of the operands of matrix products; see amp.py
    recompute_norms = False  # backward of what takes their outputs; see ops/norm.py
    capture: Any = None  # what is noted of a step that becomes a CUDA graph; see graph.py


mode = _Mode()


@contextmanager
def replaced(target: object, **values: object) -> Iterator[None]:
    """Set attributes of an object in the `with` block, and restore them after it."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


class Changes:
    """Whether an attribute of a parameter, or the mode or a member of a module, was assigned to.

    A captured step depends on them, and compares them again after a note.

    Attributes:
        modes, attributes: another object after each note about a mode, or about the others; unlike
            with a counter, none is lost between threads.
    """

    def __init__(self) -> None:
        self.modes, self.attributes = object(), object()

    def note_mode(self) -> None:
        """Note that modes were set."""
        self.modes = object()

    def note(self) -> None:
        """Note an assignment to another attribute that has taken place."""
        self.attributes = object()


changes = Changes()


class Node:
    """One recorded op. `saved` is None once a walk has passed and freed it."""

    __slots__ = ("backward", "dtype", "edges", "name", "saved", "shape", "version")

    def __init__(
        self,
        name: str,
        edges: Sequence[Edge | None],
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
        self.version = _versions.current


class Output:
    """One of the `count` outputs of a node, which is its only edge."""

    __slots__ = ("count", "dtype", "edges", "index", "node", "shape")

    def __init__(self, node: Node, index: int, count: int, data: Array) -> None:
        self.node = node
        self.edges = (node,)
        self.index = index
        self.count = count
        self.dtype: Dtype = data.dtype
        self.shape: Shape = data.shape


Edge: TypeAlias = "Node | Output | Tensor"
_NDARRAY = np.ndarray
_RECORDED = frozenset((Node, Output))  # all edges but leaves


class VersionCounter:
    """Which memory was assigned to, and when; so that backward never uses overwritten arrays.

    `current` counts assignments. A node remembers the version it was recorded at; only when the
    count has moved since does the walk compare the node's saved arrays with what was assigned.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.current = 0
        self.log: list[tuple[int, tuple[int, int], weakref.ref[Any]]] = []

    def note(self, array: Array) -> None:
        """Remember that the elements of `array` changed."""
        owner = array
        while getattr(owner, "base", None) is not None and is_array(owner.base):
            owner = owner.base
        begin, end = bounds = byte_bounds(array)
        reference = weakref.ref(owner)
        with self._lock:
            others = [
                entry
                for entry in self.log
                if entry[2]() is not None and not (begin <= entry[1][0] and entry[1][1] <= end)
            ]  # one entry for memory that is assigned to again and again, as optimizers do
            self.log = [*others, (self.current + 1, bounds, reference)]
            self.current += 1

    def advance(self) -> int:
        """Begin a new version and return it."""
        with self._lock:
            self.current += 1
            return self.current

    def check(self, node: Node) -> None:
        """Raise GradError when an array that the node saved was assigned to since."""
        changed = self.assigned_since(node.version, node.saved or ())
        if changed is not None:
            raise GradError(
                f"backward: {node.name} needs an array of shape {changed.shape} that was "
                "assigned to after the op ran; assign to a copy instead"
            )

    def assigned_since(self, version: int, values: Sequence[Any]) -> Array | None:
        """Return the first of the arrays that was assigned to after a version, or None."""
        recent = [
            bounds for later, bounds, owner in self.log if later > version and owner() is not None
        ]
        if not recent:
            return None
        for value in values:
            if is_array(value) and value.size:
                begin, end = byte_bounds(value)
                if any(low < end and begin < high for low, high in recent):
                    return value
        return None


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
    with ranges.phase("backward"):
        _walk(edge_of(root), _seed(root, dy), _deliver, retain_graph, into_leaves=True)
        if mode.capture is not None:
            mode.capture.settle()


def gradients(root: Tensor, dy: Array | Gradient, edges: Sequence[Edge]) -> list[Array | None]:
    """Return d(root)/d(edge) for leaves or recorded ops; the walk ends there, no `grad` changes.

    Gradients of leaves may have a wider dtype than the leaf.
    """
    if not root.requires_grad:
        return [None] * len(edges)
    return _gradients(edge_of(root), dy, edges, retain_graph=False)


def gradients_within(node: Node, dy: Array) -> list[Array | None]:
    """Return the gradients of the inputs of an op that another op has recorded and saved.

    The other op's backward calls this; what was saved stays for another call.
    """
    return _gradients(node, dy, [edge for edge in node.edges if edge is not None], True)


def _gradients(
    start: Edge, dy: Array | Gradient, edges: Sequence[Edge], retain_graph: bool
) -> list[Array | None]:
    found: dict[Edge, Array | None] = {}

    def keep(edge: Edge, dx: Array | None, own: bool) -> None:
        found[edge] = dx

    _walk(start, dy, keep, retain_graph, ends=frozenset(edges))
    return [found.get(edge) for edge in edges]


def frontier(root: Tensor, version: int) -> list[Edge]:
    """Return the leaves and the ops recorded before a version that `root` depends on, in order.

    A version comes from `next_version`.
    """
    if not root.requires_grad:
        return []
    start = edge_of(root)
    seen = {start}
    stack, found = [start], []
    while stack:
        edge = stack.pop()
        node = edge.node if type(edge) is Output else edge
        if type(node) is not Node or node.version < version:
            found.append(edge)
            continue
        for target in node.edges:
            if target is not None and target not in seen:
                seen.add(target)
                stack.append(target)
    return found


def next_version() -> int:
    """Begin a new version: what is recorded from now on is told from what was before."""
    return _versions.advance()


def latest_version() -> int:
    """Return the current version: it is another one after each assignment."""
    return _versions.current


def assigned_since(version: int, arrays: Sequence[Any]) -> bool:
    """Whether one of the arrays was assigned to after a version, see `latest_version`."""
    return version != _versions.current and _versions.assigned_since(version, arrays) is not None


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
    start: Edge,
    dy: Any,
    deliver: Callable[[Any, Array | None, bool], None],
    retain_graph: bool,
    ends: frozenset[Edge] = frozenset(),
    into_leaves: bool = False,
) -> None:
    """Visit every node after all its users; hand leaves and `ends` their complete gradients.

    Args:
        start, dy: where the walk starts, and with which gradient.
        deliver: is also told whether nobody else holds the gradient.
        retain_graph: keep what nodes have saved.
        ends: edges that the walk does not go beyond.
        into_leaves: let contributions be added to the gradients that leaves have.
    """
    shared = _shared(start, ends)
    known: dict[Edge | None, Any] = {None: False}  # needs, of sums that nobody else holds too
    parts: dict[Node, list[Any]] = {}  # gradients of the outputs of a node
    first = dy if type(dy) is Gradient else cast(dy, start.dtype)
    ready: list[tuple[Edge, Any]] = [(start, first)]
    observer = ranges.active
    found: Sequence[Any]
    saved: Any
    dx: Any
    while ready:
        edge, dy = ready.pop()
        if type(edge) is not Node or (ends and edge in ends):
            if type(edge) is Output and edge not in ends:
                _collect(edge, dy, shared, parts, ready)
            else:
                deliver(edge, unwrapped(dy), False)
            continue
        edges, saved = edge.edges, edge.saved
        if saved is None or edge.version != _versions.current:
            _check_saved(edge)
        needs = [
            known[e] if e in known else type(e) is Node or _need(e, known, shared, into_leaves)
            for e in edges
        ]
        if dy is None or type(dy) is Gradient:
            found = _run(edge, dy, needs)
        elif observer is not None:
            found = observer.backward(edge, dy, saved, needs)
        else:
            found = edge.backward(dy, saved, needs)
        if len(found) != len(edges):
            raise _wrong_number(edge, found)
        if not retain_graph:
            edge.saved, edge.edges = None, ()
        for target, need, dx in zip(edges, needs, found):  # noqa: B905  checked in less time
            if target is None:
                continue
            gradient = shared.get(target)
            if dx is not None:
                shape = dx.shape  # (): a `Gradient`, or 0-d, which may be a NumPy scalar
                if not shape or shape != target.shape or dx.dtype is not target.dtype:
                    dx = _fit(dx, target, gradient)
            if gradient is not None:
                uses = gradient.uses = gradient.uses - 1
                total = gradient.array
                if dx is None:
                    pass  # it is added, or there is none
                elif need is gradient and dx.dtype is total.dtype and type(total) is _NDARRAY:
                    total += dx
                elif total is not None:
                    gradient.add(dx)
                    known[target] = gradient
                else:
                    gradient.array = dx  # the first contribution: of many, or to a parameter
                    several = uses > 1 or type(target) not in _RECORDED
                    if several and _can_grow(dx, target, (dy, *found, *saved)):
                        gradient.is_own, known[target] = True, gradient
                if uses:
                    continue
                dx, gradient.array = gradient.array, None
                if dx is not None and type(target) is Node:
                    dx = cast(dx, target.dtype)
            if type(target) is Node or type(target) is Output:
                ready.append((target, dx))
            else:  # at once: who waits for a gradient need not wait for the rest of the walk
                leaf: Any = target
                own = gradient is None and leaf.gradient is None and _is_own(
                    dx, (dy, *found, *saved)
                )  # fmt: skip
                deliver(leaf, dx, own)
        found, saved, dx = (), (), None  # so that memory falls before the next backward runs


def _run(node: Node, dy: Gradient | None, needs: Sequence[Any]) -> Sequence[Any]:
    """Return what a backward function returns where it gets no plain array.

    An op that hands its gradient on, as `add` does, hands on its column sums.
    """
    if dy is None:
        return [None] * len(needs)
    array = dy.array
    operand: Any = dy if hasattr(node.backward, "takes_gradient") else array
    if ranges.active is None:
        found = node.backward(operand, node.saved or (), needs)
    else:
        found = ranges.active.backward(node, operand, node.saved or (), needs)
    return [dy if dx is array else dx for dx in found]


def _wrong_number(node: Node, found: Sequence[Any]) -> GradError:
    """Return the error of a backward function that returned too many gradients, or too few."""
    return GradError(
        f"backward: that of {node.name} returned {len(found)} gradients, expected one or None for "
        f"each of its {len(node.edges)} inputs"
    )


def _need(
    edge: Any, known: dict[Edge | None, Any], shared: dict[Edge, Gradient], into_leaves: bool
) -> Any:
    """Return the need for an edge that is not a node: for a leaf with a gradient, that gradient.

    Not with one of 16 bits where more than one op contributes: what they return in float32 is added
    up in float32 and rounded once.
    """
    of_leaf = edge.gradient if into_leaves and type(edge) is not Output else None
    known[edge] = need = of_leaf if of_leaf is not None and (
        of_leaf.is_wide or edge not in shared
    ) else True  # fmt: skip
    return need


def _collect(
    output: Output,
    dy: Any,
    shared: dict[Edge, Gradient],
    parts: dict[Node, list[Any]],
    ready: list[tuple[Edge, Any]],
) -> None:
    """Keep the gradient of an output until those of the node's other outputs are there."""
    node = output.node
    dys = parts.setdefault(node, [None] * output.count)
    dys[output.index] = unwrapped(dy)
    gradient = shared.get(node)
    if gradient is not None:
        gradient.uses -= 1
        if gradient.uses:
            return
    del parts[node]
    ready.append((node, None if all(dy is None for dy in dys) else dys))


def _shared(start: Edge, ends: frozenset[Edge]) -> dict[Edge, Gradient]:
    """Return gradients for the nodes and leaves between `start` and `ends` with several users."""
    uses: dict[Edge, int] = {}
    seen = {start}
    stack: list[Any] = [start] if type(start) in _RECORDED else []
    while stack:
        edge = stack.pop()
        if ends and edge in ends:
            continue
        for target in edge.edges:
            if target is None:
                continue
            if target in seen:
                uses[target] = uses.get(target, 1) + 1
            else:
                seen.add(target)
                if type(target) is Node or type(target) is Output:
                    stack.append(target)
    return {
        edge: Gradient(None, dtype=edge.dtype, rounds=type(edge) is Node, uses=count)
        for edge, count in uses.items()
    }


def _check_saved(node: Node) -> None:
    """Raise when what the node saved was freed or overwritten."""
    if node.saved is None:
        raise GradError(
            f"backward: the graph of {node.name} was freed by an earlier backward; "
            "pass retain_graph=True to that one"
        )
    _versions.check(node)


def _fit(dx: Any, target: Edge, gradient: Gradient | None) -> Any:
    """Return a gradient in the shape of its input and, for a node, in its dtype.

    A leaf keeps the wider dtype until `_deliver` adds it to a gradient that may be wide too; an
    output keeps it for the node that adds up what its outputs get. Where more follow, their sum is
    cast.

    Raises:
        GradError: the gradient is complex, or the input is.
    """
    array = dx.array if type(dx) is Gradient else dx
    if array.shape and array.shape == target.shape and array.dtype is target.dtype:
        return dx if gradient is None and type(target) is Node else array
    dx = array
    if isinstance(dx, np.generic):
        dx = np.asarray(dx)  # NumPy turns 0-d results into scalars
    if is_complex(dx.dtype) is not is_complex(target.dtype):
        raise GradError(
            f"backward: the gradient of an input of {target.dtype} has dtype {dx.dtype}, expected "
            "real numbers: complex ones carry no gradient; use detach()"
        )
    if dx.shape != target.shape:
        dx = sum_to_shape(dx, target.shape)
    return cast(dx, target.dtype) if type(target) is Node and gradient is None else dx


def _is_own(dx: Array | None, others: Sequence[Any]) -> bool:
    """Whether a gradient is an array of its own: no view, and among the others once at most."""
    if dx is None or dx.base is not None or not dx.flags.c_contiguous:
        return False
    return sum([unwrapped(other) is dx for other in others]) <= 1


def _can_grow(dx: Array, target: Edge, others: Sequence[Any]) -> bool:
    """Whether others may be added to the first contribution, which the op gave away.

    On the GPU products would add to it, and round once instead of twice: only where it is wide, as
    the gradients of parameters are.
    """
    if not _is_own(dx, others):
        return False
    if type(dx) is _NDARRAY:
        return dx.dtype is target.dtype
    return type(target) not in _RECORDED and dx.dtype == compute_dtype(dx.dtype)


def _deliver(leaf: Tensor, dx: Array | None, own: bool) -> None:
    """Add a complete gradient to the leaf and tell those who wait for it."""
    if dx is not None:
        with leaves:
            if leaf.gradient is not None:
                leaf.gradient.add(dx)
            elif own and dx.dtype == leaf.data.dtype:
                leaf.gradient = LeafGradient(dx)
            else:
                leaf.gradient = LeafGradient(converted(dx, leaf.data.dtype))
    if leaf.hooks:
        if mode.capture is not None:
            mode.capture.add_waiting()
        for hook in leaf.hooks:
            hook(leaf)


_versions = VersionCounter()


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
    """Note that elements of an array changed, so that no graph that saved them is used on."""
    if mode.capture is not None:
        mode.capture.assigned.append(array)
    if array.size:
        _versions.note(array)
