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
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tensorgrad import ranges
from tensorgrad.accumulation import add_waiting, forget_row_sums, into, is_first, settle
from tensorgrad.arrays import added, cast, converted, sum_to_shape
from tensorgrad.backend import Array, Shape, add_into, byte_bounds, is_array, namespace, same_device
from tensorgrad.checks import array_of
from tensorgrad.dtypes import Dtype, compute_dtype, is_complex
from tensorgrad.errors import DtypeError, GradError, ShapeError

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
        _walk(root, _seed(root, dy), _deliver, retain_graph, need=_need)
        settle()


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
    root: Tensor,
    dy: Array,
    deliver: Callable[[Any, Array | None, bool], None],
    retain_graph: bool,
    ends: frozenset[Edge] = frozenset(),
    need: Callable[[Any, list[Any], Any], Any] = lambda edge, offered, shared: True,
) -> None:
    """Visit every node after all its users; hand leaves and `ends` their complete gradients.

    deliver: is also told whether nobody else holds the gradient.
    need: returns the need for an edge; one that holds a leaf's gradient notes the leaf in a list.
        It is also given what has several uses.
    """
    start = edge_of(root)
    waiting = _shared_uses(start, ends)
    sums: dict[Edge, Any] = {}
    private: dict[Edge | None, Any] = {None: False}  # needs of edges whose sum nobody else holds
    offered: list[Any] = []
    ready: list[tuple[Edge, Any]] = [(start, cast(dy, start.dtype))]
    found: Sequence[Array | None]
    dx: Any
    observer = ranges.active
    while ready:
        edge, dy = ready.pop()
        if type(edge) is not Node or (ends and edge in ends):
            if type(edge) is Output and edge not in ends:
                _collect(edge, dy, waiting, sums, ready)
            else:
                forget_row_sums(id(dy))
                deliver(edge, dy, False)
            continue
        edges = edge.edges
        saved: Any = edge.saved
        if saved is None or edge.version != _versions.current:
            _check_saved(edge)
        if dy is None:
            found = [None] * len(edges)
        else:
            needs = [
                private[e] if e in private else type(e) is Node or need(e, offered, waiting)
                for e in edges
            ]
            if observer is not None:
                with leaves if offered else nullcontext():
                    found = observer.backward(edge, dy, saved or (), needs)
                offered.clear()
            elif offered:
                with leaves:
                    found = edge.backward(dy, saved, needs)
                offered.clear()
            else:
                found = edge.backward(dy, saved, needs)
        if not retain_graph:
            edge.saved, edge.edges = None, ()
        if len(found) != len(edges):
            raise GradError(
                f"backward: that of {edge.name} returned {len(found)} gradients, expected one or "
                f"None for each of its {len(edges)} inputs"
            )
        for target, dx in zip(edges, found):  # noqa: B905  checked above, in half the time
            if target is None:
                continue
            if dx is not None:
                shape = dx.shape
                if not shape or shape != target.shape or dx.dtype is not target.dtype:
                    dx = _fit(dx, target, target in waiting)
            if target in waiting:  # used several times: add up until the last contribution
                other = sums.get(target)
                if other is not None:
                    if dx is None:
                        dx = other
                    elif target in private and dx.dtype is other.dtype and type(other) is _NDARRAY:
                        other += dx
                        dx = other
                    elif type(other) is _NDARRAY and dx.dtype is other.dtype is target.dtype:
                        dx = other + dx
                        if type(dx) is not _NDARRAY:
                            dx = np.asarray(dx)  # NumPy turns 0-d sums into scalars
                    else:
                        dx = _sum(other, dx, target)
                uses = waiting[target] - 1
                if uses:
                    waiting[target] = uses
                    if dx is not other:
                        sums[target] = dx
                        # a new sum, or the first contribution: of many, or to a parameter
                        several = uses > 1 or type(target) not in _RECORDED
                        if other is not None or (
                            several and _can_grow(dx, target, (dy, *found, *saved))
                        ):
                            private[target] = into(dx)
                    continue
                sums.pop(target, None)
                private.pop(target, None)
                if dx is not None and type(target) is Node:
                    dx = cast(dx, target.dtype)
            if type(target) is Node or type(target) is Output:
                ready.append((target, dx))
            else:  # at once: who waits for a gradient need not wait for the rest of the walk
                leaf: Any = target
                first = leaf.grad is None and leaf not in waiting  # else it is added or copied
                own = first and _is_own(dx, (dy, *found, *saved))
                forget_row_sums(id(dx))  # who holds it now may modify it
                deliver(leaf, dx, own)
        found, saved, dx = (), (), None  # so that memory falls before the next backward runs


def _collect(
    output: Output,
    dy: Array | None,
    waiting: dict[Edge, int],
    sums: dict[Edge, Any],
    ready: list[tuple[Edge, Any]],
) -> None:
    """Keep the gradient of an output until those of the node's other outputs are there."""
    node = output.node
    dys = sums.pop(node, None) or [None] * output.count
    dys[output.index] = dy
    uses = waiting.get(node, 1) - 1
    if uses:
        waiting[node], sums[node] = uses, dys
    else:
        ready.append((node, None if all(dy is None for dy in dys) else dys))


def _shared_uses(start: Edge, ends: frozenset[Edge]) -> dict[Edge, int]:
    """Return the uses of each node and leaf between `start` and `ends` that has several."""
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
    return uses


def _check_saved(node: Node) -> None:
    """Raise when what the node saved was freed or overwritten."""
    if node.saved is None:
        raise GradError(
            f"backward: the graph of {node.name} was freed by an earlier backward; "
            "pass retain_graph=True to that one"
        )
    _versions.check(node)


def _fit(dx: Array, target: Edge, more: bool) -> Array:
    """Return a gradient in the shape of its input and, for a node, in its dtype.

    A leaf keeps the wider dtype until `_deliver` adds it to a gradient that may be wide too; an
    output keeps it for the node that adds up what its outputs get. Where more follow, their sum is
    cast.

    Raises:
        GradError: the gradient is complex, or the input is.
    """
    if isinstance(dx, np.generic):
        dx = np.asarray(dx)  # NumPy turns 0-d results into scalars
    if is_complex(dx.dtype) is not is_complex(target.dtype):
        raise GradError(
            f"backward: the gradient of an input of {target.dtype} has dtype {dx.dtype}, expected "
            "real numbers: complex ones carry no gradient; use detach()"
        )
    if dx.shape != target.shape:
        dx = sum_to_shape(dx, target.shape)
    return cast(dx, target.dtype) if type(target) is Node and not more else dx


def _sum(a: Array, b: Array, target: Edge) -> Array:
    """Return the sum of two contributions, rounded once to the dtype of an op's result."""
    narrow = type(target) is Node
    return added(a, b, target.dtype if narrow else np.result_type(a, b, target.dtype))


def _need(edge: Any, offered: list[Any], shared: Any) -> Any:
    """Return the need for an edge, for a leaf with its gradient.

    Not with one of 16 bits where more than one op contributes: what they return in float32 is added
    up in float32 and rounded once.
    """
    grad = None if type(edge) in _RECORDED else edge.grad
    if grad is None or (grad.dtype != compute_dtype(grad.dtype) and edge in shared):
        return True
    offered.append(edge)
    return into(grad, of_leaf=True)


def _is_own(dx: Array | None, others: Sequence[Any]) -> bool:
    """Whether a gradient is an array of its own: no view, and among the others once at most."""
    if dx is None or dx.base is not None or not dx.flags.c_contiguous:
        return False
    return sum([other is dx for other in others]) <= 1


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
            if leaf.grad is None:
                keep = own and dx.dtype == leaf.data.dtype
                leaf.grad = dx if keep else converted(dx, leaf.data.dtype)
            elif is_first(leaf.grad):
                leaf.grad[...] = dx
            else:
                add_into(leaf.grad, dx)
    if leaf.hooks:
        add_waiting()
        for hook in leaf.hooks:
            hook(leaf)


_versions = VersionCounter()
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
    """Note that elements of an array changed, so that no graph that saved them is used on."""
    if mode.capture is not None:
        mode.capture.assigned.append(array)
    if array.size:
        _versions.note(array)
