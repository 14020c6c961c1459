"""Recording an op: a node with its backward function, the arrays it saved, and its inputs.

An op computes arrays and calls `record`. When an input needs a gradient, the result gets a `Node`.
So the graph holds what backward needs and nothing else: an intermediate array that no op saved is
freed as soon as the user lets go of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from tensorgrad.core import instrument
from tensorgrad.core.backend import Array
from tensorgrad.core.checks import check_function
from tensorgrad.core.errors import GradError
from tensorgrad.core.gradient import leaves
from tensorgrad.core.modes import mode
from tensorgrad.core.nodes import Backward, Node, Output, edge_of
from tensorgrad.core.tensor import Tensor

_NDARRAY = np.ndarray


def record(
    name: str,
    outputs: Any,
    inputs: Sequence[Tensor | None],
    backward: Backward,
    saved: tuple[Any, ...],
    *,
    takes_gradient: bool = False,
) -> Tensor:
    """Wrap the outputs of an op; remember how to differentiate it when an input needs a gradient.

    Args:
        name: the op, for error messages.
        outputs: the result, or a tuple of several.
        inputs: the tensors that it depends on; None for an optional one that was not given.
        backward: `backward(dy, saved, needs)` returns one gradient (or None) per input. `dy` has
            the shape and dtype of the output and must not be modified; of several outputs it is a
            list, of these or wider float dtypes, with None for one that nothing depends on. A need
            is False where no gradient is wanted, else True or a `Gradient`, to which the function
            may add instead of returning an array (see gradient.py). Where the op broadcast an
            input, the gradient may come in the broadcast shape: the walk sums it down. Where it
            has another float dtype than the input, the walk casts it. An array that is neither dy
            nor in `saved`, nor a view, is given away: it may be kept and added to.
        saved: what backward needs, most of all arrays; freed as the walk passes.
        takes_gradient: backward gets dy as a `Gradient`, with column sums, where the op after it
            returned one.

    Returns:
        A tensor; for a tuple of outputs a tuple of tensors, to be unpacked at once.

    Example:
        >>> from tensorgrad.autograd import record
        >>> x = tg.tensor([1.0, 2.0], requires_grad=True)
        >>> backward = lambda dy, saved, needs: [2 * saved[0] * dy]
        >>> y = record("square", x.data**2, [x], backward, (x.data,))
        >>> y.sum().backward()
        >>> x.grad
        array([2., 4.], dtype=float32)
    """
    if type(outputs) is not _NDARRAY:
        if type(outputs) is tuple:
            several: Tensor = _record_several(name, outputs, inputs, backward, saved)
            return several
        if isinstance(outputs, np.generic):
            outputs = np.asarray(outputs)  # NumPy turns 0-d results into scalars
    if mode.grad_enabled:
        edges: list[Any] = []
        wanted = False
        for tensor in inputs:
            if tensor is not None and tensor.requires_grad:
                edges.append(tensor if tensor.node is None else tensor.node)
                wanted = True
            else:
                edges.append(None)
        if wanted:
            if mode.forward is not None:
                return mode.forward.record(name, outputs, inputs, backward, saved, takes_gradient)  # type: ignore[no-any-return]
            node = Node(name, edges, backward, saved, outputs, takes_gradient)
            if instrument.observer is not None:
                instrument.observer.op(name, outputs, inputs, node, saved)
            return Tensor(outputs, True, node)
    if instrument.observer is not None:
        instrument.observer.op(name, outputs, inputs, None, saved)
    return Tensor(outputs)


def _record_several(
    name: str,
    outputs: tuple[Array, ...],
    inputs: Sequence[Tensor | None],
    backward: Backward,
    saved: tuple[Any, ...],
) -> Any:
    """Do as `record` for several outputs, which become edges of their own."""
    if (
        mode.grad_enabled
        and mode.forward
        and any([x is not None and x.requires_grad for x in inputs])
    ):
        return mode.forward.record(name, outputs, inputs, backward, saved, False)
    first = record(name, outputs[0], inputs, backward, saved)
    if instrument.observer is not None:
        instrument.observer.further_outputs(outputs[1:])
    node, count = first.node, len(outputs)
    if node is None:
        return tuple(map(Tensor, outputs))
    return tuple([Tensor(y, True, Output(node, i, count, y)) for i, y in enumerate(outputs)])


def cast_of(data: Array, source: Tensor) -> Tensor:
    """Wrap `data`, the values of `source` in another dtype.

    No op is recorded: a gradient of it is one of `source`, in a dtype that the walk casts.
    """
    wants = source.requires_grad and mode.grad_enabled
    node: Any = edge_of(source) if wants else None  # may be a leaf, which nobody else need know of
    y = Tensor(data, wants, node)
    return mode.forward.cast(y, source) if wants and mode.forward is not None else y


@contextmanager
def no_grad() -> Iterator[None]:
    """Record nothing in the `with` block, or in a function decorated `@no_grad()`.

    Other threads still record.

    Example:
        >>> w = tg.ones((2,), requires_grad=True)
        >>> with tg.no_grad():
        ...     y = w * 2
        >>> y.requires_grad
        False
    """
    before = mode.grad_enabled
    mode.grad_enabled = False
    try:
        yield
    finally:
        mode.grad_enabled = before


def on_grad_ready(leaf: Tensor, hook: Callable[[Tensor], None]) -> Callable[[], None]:
    """Call `hook(leaf)` in each backward as soon as the leaf's gradient is complete.

    Where several threads run backward at once, each calls the hook once, after its own part.

    Args:
        leaf: a tensor that `requires_grad` and is not the result of an op.
        hook: called with the leaf, whose `grad` is then complete.

    Returns:
        A function that removes the hook.

    Raises:
        GradError: `leaf` is the result of an op or wants no gradient.

    Example:
        >>> w = tg.tensor([1.0, 2.0], requires_grad=True)
        >>> remove = tg.on_grad_ready(w, lambda leaf: print(leaf.grad))
        >>> (3 * w).sum().backward()
        [3. 3.]
    """
    if not isinstance(leaf, Tensor) or leaf.node is not None or not leaf.requires_grad:
        raise GradError("on_grad_ready: the tensor is not a leaf, expected one that holds grad")
    check_function("on_grad_ready", hook, name="hook")
    own = partial(hook)  # the same hook may be there twice
    with leaves:
        leaf.hooks = [*(leaf.hooks or []), own]

    def remove() -> None:
        with leaves:
            leaf.hooks = [other for other in leaf.hooks or [] if other is not own] or None

    return remove
