"""Automatic differentiation of tensors: what an op records, and gradients of functions.

An op computes arrays and calls `record`. When an input needs a gradient, the result gets a `Node`:
the op's backward function, the arrays it saved, and one edge per input. So the graph holds what
backward needs and nothing else: an intermediate array that no op saved is freed as soon as the user
lets go of it. `engine.py` walks the graph. Tests: tests/test_autograd.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, overload

import numpy as np

from tensorgrad import ranges
from tensorgrad.arrays import cast
from tensorgrad.backend import Array, namespace
from tensorgrad.checks import check_function
from tensorgrad.engine import Backward, Node, Output, edge_of, gradients, mode, replaced
from tensorgrad.errors import ArgumentError, GradError
from tensorgrad.gradient import leaves
from tensorgrad.operands import tensor_of
from tensorgrad.tensor import Tensor

__all__ = ["grad", "no_grad", "on_grad_ready", "record", "value_and_grad"]

_Index = int | np.integer[Any]

_NDARRAY = np.ndarray


def record(
    name: str,
    outputs: Any,
    inputs: Sequence[Tensor | None],
    backward: Backward,
    saved: tuple[Any, ...],
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
    """
    if type(outputs) is not _NDARRAY:
        if type(outputs) is tuple:
            several: Tensor = _record_several(name, outputs, inputs, backward, saved)
            return several
        if isinstance(outputs, np.generic):
            outputs = np.asarray(outputs)  # NumPy turns 0-d results into scalars
    if mode.grad_enabled:
        edges = [
            (t if t.node is None else t.node) if t is not None and t.requires_grad else None
            for t in inputs
        ]
        for edge in edges:
            if edge is not None:
                node = Node(name, edges, backward, saved, outputs, takes_gradient)
                if ranges.active is not None:
                    ranges.active.op(name, outputs, inputs, node, saved)
                return Tensor(outputs, True, node)
    if ranges.active is not None:
        ranges.active.op(name, outputs, inputs, None, saved)
    return Tensor(outputs)


def _record_several(
    name: str,
    outputs: tuple[Array, ...],
    inputs: Sequence[Tensor | None],
    backward: Backward,
    saved: tuple[Any, ...],
) -> Any:
    """Do as `record` for several outputs, which become edges of their own."""
    first = record(name, outputs[0], inputs, backward, saved)
    if ranges.active is not None:
        ranges.active.further_outputs(outputs[1:])
    node, count = first.node, len(outputs)
    if node is None:
        return tuple(map(Tensor, outputs))
    return tuple([Tensor(y, True, Output(node, i, count, y)) for i, y in enumerate(outputs)])


def stand_in(data: Array, source: Tensor) -> Tensor:
    """Wrap `data`, the values of `source` in another dtype.

    No op is recorded: a gradient of it is one of `source`, in a dtype that the walk casts.
    """
    wants = source.requires_grad and mode.grad_enabled
    node: Any = edge_of(source) if wants else None  # may be a leaf, which nobody else need know of
    return Tensor(data, wants, node)


@contextmanager
def no_grad() -> Iterator[None]:
    """Record nothing in the `with` block, or in a function decorated `@no_grad()`.

    Other threads still record.
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

    Returns:
        A function that removes the hook.

    Raises:
        GradError: `leaf` is the result of an op or wants no gradient.
    """
    if leaf.node is not None or not leaf.requires_grad:
        raise GradError("on_grad_ready: the tensor is not a leaf, expected one that holds grad")
    own = partial(hook)  # the same hook may be there twice
    with leaves:
        leaf.hooks = [*(leaf.hooks or []), own]

    def remove() -> None:
        with leaves:
            leaf.hooks = [other for other in leaf.hooks or [] if other is not own] or None

    return remove


@overload  # which tells a type checker the parameter of a lambda
def value_and_grad(
    f: Callable[[Tensor], Tensor], argnums: _Index = 0
) -> Callable[..., tuple[Tensor, Tensor]]: ...
@overload
def value_and_grad(
    f: Callable[..., Tensor], argnums: _Index = 0
) -> Callable[..., tuple[Tensor, Tensor]]: ...
@overload
def value_and_grad(
    f: Callable[..., Tensor], argnums: tuple[_Index, ...]
) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]]: ...
def value_and_grad(
    f: Callable[..., Tensor], argnums: _Index | tuple[_Index, ...] = 0
) -> Callable[..., tuple[Tensor, Any]]:
    """Return a function that computes f and its gradient for the arguments in `argnums`.

    Gradients come back as tensors and no `.grad` is touched: `f` is treated as a function of
    those arguments alone. A gradient is zero where f does not depend on the argument. Negative
    indices are counted from the last positional argument.

    Raises:
        ArgumentError: f is not a function (the gradients of a tensor are those of `backward`).
        GradError: when called, f returns no scalar, or gradients are nested (second derivatives).
        ArgumentError: when called, there is no such positional argument.
        DtypeError: when called, such an argument is not a tensor, array or number of a float dtype.
    """
    _check_differentiable("value_and_grad", f)
    single = isinstance(argnums, int | np.integer)
    wanted: Any = (argnums,) if single else argnums

    @wraps(f)
    def with_grad(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        if mode.inside_grad:
            raise GradError("grad: got a nested call, expected one level: second derivatives "
                            "are not supported")  # fmt: skip
        indices = [_argument(i, len(args)) for i in wanted]
        inputs = [(i, tensor_of("grad", f"argument {i}", args[i])) for i in indices]
        leaves = {i: Tensor(tensor.data, True) for i, tensor in inputs}
        with replaced(mode, inside_grad=True, grad_enabled=True):
            y = f(*[leaves.get(i, arg) for i, arg in enumerate(args)], **kwargs)
        if not isinstance(y, Tensor) or y.data.size != 1:
            got = f"shape {y.shape}" if isinstance(y, Tensor) else type(y).__name__
            raise GradError(f"grad: the function returned {got}, expected a scalar tensor")
        found = gradients(y, namespace(y.data).ones_like(y.data), list(leaves.values()))
        grads = {
            i: Tensor(namespace(t.data).zeros_like(t.data) if g is None else cast(g, t.dtype))
            for g, (i, t) in zip(found, leaves.items(), strict=True)
        }
        each = tuple([grads[i] for i in indices])
        return y.detach(), each[0] if single else each

    return with_grad


def _check_differentiable(op: str, f: Any) -> None:
    """Raise ArgumentError unless f is a function."""
    check_function(
        op, f, f"{op}(f) returns a new function; for the gradients of a tensor call its backward()"
    )


def _argument(index: Any, count: int) -> int:
    """Return the index of a positional argument, counted from the first."""
    if not isinstance(index, int | np.integer) or not -count <= index < count:
        raise ArgumentError(
            f"grad: argnums has {index!r}, expected indices of the {count} positional arguments"
        )
    return int(index) % count


@overload  # as above
def grad(f: Callable[[Tensor], Tensor], argnums: _Index = 0) -> Callable[..., Tensor]: ...
@overload
def grad(f: Callable[..., Tensor], argnums: _Index = 0) -> Callable[..., Tensor]: ...
@overload
def grad(
    f: Callable[..., Tensor], argnums: tuple[_Index, ...]
) -> Callable[..., tuple[Tensor, ...]]: ...
def grad(f: Callable[..., Tensor], argnums: _Index | tuple[_Index, ...] = 0) -> Callable[..., Any]:
    """Return the function that computes the gradient of f; see `value_and_grad`.

        dx = tensorgrad.grad(lambda x: (x * x).sum())(x)

    Raises:
        ArgumentError: f is not a function; call `loss.backward()` for the gradients of a tensor.
    """
    _check_differentiable("grad", f)
    with_value: Callable[..., tuple[Tensor, Any]] = value_and_grad(f, argnums)

    @wraps(f)
    def only_grad(*args: Any, **kwargs: Any) -> Any:
        return with_value(*args, **kwargs)[1]

    return only_grad
