"""Automatic differentiation of tensors: what an op records, and gradients of functions.

An op computes arrays and calls `record`; see core/record.py.
Tests: tests/autograd/test_autograd.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, overload

import numpy as np

from tensorgrad.autograd import second
from tensorgrad.core.arrays import cast
from tensorgrad.core.backend import namespace
from tensorgrad.core.backward import gradients
from tensorgrad.core.checks import check_function
from tensorgrad.core.errors import ArgumentError, GradError
from tensorgrad.core.modes import mode, replaced
from tensorgrad.core.nodes import edge_of
from tensorgrad.core.operands import tensor_of
from tensorgrad.core.record import no_grad, on_grad_ready, record
from tensorgrad.core.tensor import Tensor

__all__ = ["grad", "no_grad", "on_grad_ready", "record", "value_and_grad"]

_Index = int | np.integer[Any]


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
) -> Callable[..., tuple[Tensor, Tensor | tuple[Tensor, ...]]]:
    """Return a function that computes f and its gradient for the arguments in `argnums`.

    Gradients come back as tensors and no `.grad` is touched: `f` is treated as a function of
    those arguments alone. A gradient is zero where f does not depend on the argument. Negative
    indices are counted from the last positional argument.

    Args:
        f: takes any arguments and returns a tensor with one element.
        argnums: index of the positional argument to differentiate by, or a tuple of several.
            Negative indices count from the last positional argument.

    Returns:
        A function with the arguments of f, which returns two results: the value of f, a tensor
        without a graph, and the gradient, a tensor of the argument's shape and dtype; a tuple of
        gradients where `argnums` is a tuple.

    Raises:
        ArgumentError: f is not a function (the gradients of a tensor are those of `backward`).
        GradError: when called, f returns no scalar, or gradients are nested (second derivatives).
        ArgumentError: when called, there is no such positional argument.
        DtypeError: when called, such an argument is not a tensor, array or number of a float dtype.

    Example:
        >>> f = tg.value_and_grad(lambda w, x: ((w * x) ** 2).sum())
        >>> f(tg.tensor([1.0, 2.0]), 3.0)
        (tensor(45., dtype=float32), tensor([18., 36.], dtype=float32))
    """
    _check_differentiable("value_and_grad", f)
    single = isinstance(argnums, int | np.integer)
    wanted: Any = (argnums,) if single else argnums

    @wraps(f)
    def with_grad(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | tuple[Tensor, ...]]:
        nested = mode.inside_grad or mode.forward is not None
        indices = [_argument(i, len(args)) for i in wanted]
        inputs = [(i, tensor_of("grad", f"argument {i}", args[i])) for i in indices]
        leaves = {
            i: second.as_argument(tensor) if nested else Tensor(tensor.data, True)
            for i, tensor in inputs
        }
        with replaced(mode, inside_grad=True, grad_enabled=True):
            y = f(*[leaves.get(i, arg) for i, arg in enumerate(args)], **kwargs)
        if not isinstance(y, Tensor) or y.data.size != 1:
            got = f"shape {y.shape}" if isinstance(y, Tensor) else type(y).__name__
            raise GradError(f"grad: the function returned {got}, expected a scalar tensor")
        if nested:
            seed = Tensor(namespace(y.data).ones_like(y.data))
            edges = [edge_of(x) for x in leaves.values()]
            tensors = second.gradients([(y, seed)], edges)
            grads = {
                i: Tensor(namespace(x.data).zeros_like(x.data)) if dx is None else dx
                for dx, (i, x) in zip(tensors, leaves.items(), strict=True)
            }
            each = tuple([grads[i] for i in indices])
            return y, each[0] if single else each
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


@overload  # for the same reason
def grad(f: Callable[[Tensor], Tensor], argnums: _Index = 0) -> Callable[..., Tensor]: ...
@overload
def grad(f: Callable[..., Tensor], argnums: _Index = 0) -> Callable[..., Tensor]: ...
@overload
def grad(
    f: Callable[..., Tensor], argnums: tuple[_Index, ...]
) -> Callable[..., tuple[Tensor, ...]]: ...
def grad(
    f: Callable[..., Tensor], argnums: _Index | tuple[_Index, ...] = 0
) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Return the function that computes the gradient of f; see `value_and_grad`.

    Args:
        f: takes any arguments and returns a tensor with one element.
        argnums: index of the positional argument to differentiate by, or a tuple of several.

    Returns:
        A function with the arguments of f, which returns a tensor of the argument's shape and
        dtype; a tuple of them where `argnums` is a tuple.

    Raises:
        ArgumentError: f is not a function; call `loss.backward()` for the gradients of a tensor.

    Example:
        >>> tg.grad(lambda x: (x * x).sum())(tg.tensor([1.0, 2.0]))
        tensor([2., 4.], dtype=float32)
    """
    _check_differentiable("grad", f)
    with_value: Callable[..., tuple[Tensor, Tensor | tuple[Tensor, ...]]] = value_and_grad(
        f, argnums
    )

    @wraps(f)
    def only_grad(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        return with_value(*args, **kwargs)[1]

    return only_grad
