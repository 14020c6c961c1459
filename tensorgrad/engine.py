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
from tensorgrad.dtypes import Dtype, is_complex
from tensorgrad.errors import DtypeError, GradError, ShapeError
from tensorgrad.gradient import Gradient, LeafGradient, is_given_away, leaves, unwrapped

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
    """One recorded op. `saved` is None once a walk has passed and freed it.

    With `takes_gradient`, backward gets a `Gradient` as dy where the op after it returned one.
    """

    __slots__ = (
        *("backward", "dtype", "edges", "name", "saved", "shape", "takes_gradient", "version"),
    )

    def __init__(
        self,
        name: str,
        edges: Sequence[Edge | None],
        backward: Backward,
        saved: tuple[Any, ...] | None,
        data: Array,
        takes_gradient: bool = False,
    ) -> None:
        self.name = name
        self.edges = edges
        self.backward = backward
        self.saved = saved
        self.dtype: Dtype = data.dtype
        self.shape: Shape = data.shape
        self.takes_gradient = takes_gradient
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
_NDARRAY, _SCALAR = np.ndarray, np.generic
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
    dy = _seed(root, dy)
    start = root if root.node is None else root.node
    if ranges.active is None:
        _walk(start, dy, retain_graph)
    else:
        with ranges.active.phase("backward"):
            _walk(start, dy, retain_graph)
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
    complete: dict[Edge, Array | None] = {}
    _walk(start, dy, retain_graph, frozenset(edges), complete)
    return [complete.get(edge) for edge in edges]


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
def _walk(
    start: Any,
    dy: Any,
    retain_graph: bool,
    ends: frozenset[Edge] = frozenset(),
    complete: dict[Edge, Array | None] | None = None,
) -> None:
    """Visit every node after all its users, and complete the gradients of leaves and `ends`.

    Args:
        start, dy: where the walk starts, and with which gradient.
        retain_graph: keep what nodes have saved.
        ends: edges that the walk does not go beyond.
        complete: gets the gradients, by edge; None: leaves get them.
    """
    shared = _shared(start, ends, complete)
    sum_of = shared.get  # None for edges with one user
    parts: dict[Node, list[Any]] = {}  # gradients of the outputs of a node
    if type(dy) is not Gradient and dy.dtype is not start.dtype:
        dy = cast(dy, start.dtype)
    ready: list[tuple[Any, Any]] = [(start, dy)]
    observed = ranges.active is not None
    edge: Any
    saved: Any
    dxs: Any
    while ready:
        node, dy = ready.pop()
        if type(node) is not Node or (ends and node in ends):
            if type(node) is Output and node not in ends:
                ready += _collected(node, dy, shared, parts)
            else:
                _deliver(node, unwrapped(dy), None, complete)
            continue
        edges, saved = node.edges, node.saved
        if saved is None or node.version != _versions.current:
            _check_saved(node)
        needs, sums = [], [*map(sum_of, edges)]
        for edge, gradient in zip(edges, sums):  # noqa: B905  of one length
            if gradient is not None:
                needs.append(gradient.need)
            else:
                needs.append(type(edge) is Node or (edge is not None and _need(edge, complete)))
        if dy is None or observed or type(dy) is Gradient:
            dxs = _run(node, dy, needs)
        else:
            dxs = node.backward(dy, saved, needs)
        if len(dxs) != len(edges):
            raise _wrong_number(node, dxs)
        if not retain_graph:
            node.saved, node.edges = None, ()
        for edge, gradient, dx in zip(edges, sums, dxs):  # noqa: B905  checked in less time
            if edge is None:
                continue
            like = edge if type(edge) in _RECORDED else edge.data
            if dx is not None:
                shape = dx.shape
                if not shape or shape != like.shape or dx.dtype is not like.dtype:
                    dx = _fit(dx, like, gradient is not None or type(edge) is not Node)
            if gradient is not None:
                if gradient.collect(dx, dy, dxs, saved):
                    continue
                dx = gradient.complete()
            if like is edge:
                ready.append((edge, dx))
            else:  # at once: who waits for a gradient need not wait for the rest of the walk
                _deliver(edge, dx, None if gradient else (dy, dxs, saved), complete)
        dxs, saved, dx = (), (), None  # so that memory falls before the next backward runs


def _run(node: Node, dy: Any, needs: Sequence[Any]) -> Sequence[Any]:
    """Return what a backward function returns where it gets no plain array, or is observed.

    An op that hands its gradient on, as `add` does, hands on its column sums.
    """
    if dy is None:
        return [None] * len(needs)
    operand = dy if node.takes_gradient else unwrapped(dy)
    observer = ranges.active
    if observer is None:
        dxs = node.backward(operand, node.saved or (), needs)
    else:
        dxs = observer.backward(node, operand, node.saved or (), needs)
    return [dy if dx is unwrapped(dy) else dx for dx in dxs] if type(dy) is Gradient else dxs


def _wrong_number(node: Node, found: Sequence[Any]) -> GradError:
    """Return the error of a backward function that returned too many gradients, or too few."""
    return GradError(
        f"backward: that of {node.name} returned {len(found)} gradients, expected one or None for "
        f"each of its {len(node.edges)} inputs"
    )


def _need(edge: Any, complete: Any, several: bool = False) -> Any:
    """Return the need for an edge whose gradient is not known yet.

    It is the gradient of a leaf, but not one of 16 bits where several ops contribute: what they
    return in float32 is added up in float32 and rounded once.
    """
    of_leaf = edge.gradient if complete is None and type(edge) not in _RECORDED else None
    return True if of_leaf is None or (several and not of_leaf.is_wide) else of_leaf


def _collected(
    output: Output, dy: Any, shared: dict[Any, Gradient], parts: dict[Node, list[Any]]
) -> list[tuple[Node, Any]]:
    """Keep the gradient of an output; return the node and all of them once they are complete."""
    node = output.node
    dys = parts.setdefault(node, [None] * output.count)
    dys[output.index] = unwrapped(dy)
    gradient = shared.get(node)
    if gradient is not None:
        gradient.uses -= 1
        if gradient.uses:
            return []
    del parts[node]
    return [(node, None if all(dy is None for dy in dys) else dys)]


def _shared(start: Any, ends: frozenset[Edge], complete: Any) -> dict[Any, Gradient]:
    """Return gradients for the nodes and leaves between `start` and `ends` with several users."""
    shared: dict[Any, Gradient] = {}
    seen = {start, None}
    stack: list[Any] = [start] if type(start) in _RECORDED else []
    while stack:
        edge = stack.pop()
        if ends and edge in ends:
            continue
        for target in edge.edges:
            if target not in seen:
                seen.add(target)
                if type(target) in _RECORDED:
                    stack.append(target)
            elif target in shared:
                shared[target].uses += 1
            elif target is not None:
                gradient = shared[target] = Gradient(None, dtype=target.dtype)
                gradient.rounds, gradient.is_leaf = (
                    type(target) is Node,
                    type(target) not in _RECORDED,
                )
                gradient.need = _need(target, complete, several=True)
    return shared


def _check_saved(node: Node) -> None:
    """Raise when what the node saved was freed or overwritten."""
    if node.saved is None:
        raise GradError(
            f"backward: the graph of {node.name} was freed by an earlier backward; "
            "pass retain_graph=True to that one"
        )
    _versions.check(node)


def _fit(dx: Any, like: Any, stays_wide: bool) -> Any:
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


def _deliver(
    edge: Any, dx: Array | None, beside: Any, complete: dict[Edge, Array | None] | None
) -> None:
    """Keep a complete gradient, or add it to the leaf and tell those who wait for it.

    Args:
        beside: what the op that returned the gradient has beside it, which may hold it too; None
            where it is not known that nobody else does.
    """
    if complete is not None:
        complete[edge] = dx
        return
    if dx is not None:
        with leaves:
            if edge.gradient is not None:
                edge.gradient.add(dx)
            elif beside and dx.dtype == edge.data.dtype and is_given_away(dx, *beside):
                edge.gradient = LeafGradient(dx)
            else:
                edge.gradient = LeafGradient(converted(dx, edge.data.dtype))
    if edge.hooks:
        if mode.capture is not None:
            mode.capture.add_waiting()
        for hook in edge.hooks:
            hook(edge)


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
