"""The graph of recorded ops.

A `Node` is one recorded op: its backward function, the arrays it saved, and one edge per input. An
edge is the input's own node, one of the `Output`s of a node that has several, the input itself
where it is a leaf, or None where no gradient is wanted.

Memory that is assigned to gets a new version, so that backward never uses overwritten arrays.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from tensorgrad.core.backend import Array, Shape, byte_bounds, is_array
from tensorgrad.core.dtypes import Dtype
from tensorgrad.core.errors import GradError
from tensorgrad.core.modes import mode

if TYPE_CHECKING:
    from tensorgrad.core.tensor import Tensor

# backward(dy, saved, needs) -> one gradient or None per input; of several outputs, dy is a list
Backward = Callable[[Any, tuple[Any, ...], Sequence[Any]], "Sequence[Array | None]"]


class Node:
    """A recorded op. `saved` is None once a walk has passed and freed it.

    With `takes_gradient`, backward gets a `Gradient` as dy where the op after it returned one.
    """

    __slots__ = (
        *("backward", "dtype", "edges", "name", "saved", "shape", "takes_gradient", "version"),
        "forward",
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
        self.edges: Sequence[Any] = edges
        self.backward = backward
        self.saved: Any = saved
        self.dtype: Dtype = data.dtype
        self.shape: Shape = data.shape
        self.takes_gradient = takes_gradient
        self.version = versions.current

    forward: Any  # the inputs, and the tangents of the outputs; set by autograd/tangents.py alone


class Output:
    """An output of a node that has `count` of them; the node is its only edge."""

    __slots__ = ("count", "dtype", "edges", "index", "node", "shape")

    def __init__(self, node: Node, index: int, count: int, data: Array) -> None:
        self.node = node
        self.edges = (node,)
        self.index = index
        self.count = count
        self.dtype: Dtype = data.dtype
        self.shape: Shape = data.shape


Edge: TypeAlias = "Node | Output | Tensor"
RECORDED = frozenset((Node, Output))  # the types of all edges but leaves


def edge_of(tensor: Tensor) -> Edge:
    """Return where gradients of a tensor go."""
    return tensor if tensor.node is None else tensor.node


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
    return versions.advance()


def latest_version() -> int:
    """Return the current version: it is another one after each assignment."""
    return versions.current


def assigned_since(version: int, arrays: Sequence[Any]) -> bool:
    """Whether one of the arrays was assigned to after a version, see `latest_version`."""
    return version != versions.current and versions.assigned_since(version, arrays) is not None


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
            ]  # a single entry for memory that is assigned to again and again, as optimizers do
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


versions = VersionCounter()


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
        versions.note(array)
