"""Gradient checkpointing: save the inputs of a function and recompute the rest in backward.

Forward runs the function once and drops its graph; backward runs it again to rebuild the graph and
walks it at once. So the arrays saved inside exist for one call at a time, at the cost of one more
forward. Tests: tests/autograd/test_recompute.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

from tensorgrad import random
from tensorgrad.amp import Casts
from tensorgrad.core import backward, nodes
from tensorgrad.core.checks import check_function
from tensorgrad.core.errors import GradError
from tensorgrad.core.gradient import Gradients, Needs, Saved, unwrapped
from tensorgrad.core.modes import mode, replaced
from tensorgrad.core.nodes import Edge, Node
from tensorgrad.core.tensor import Tensor


class _Call(NamedTuple):
    """A call and the state that are needed to repeat it."""

    f: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: Casts | None
    random: dict[str, int]
    edges: list[Edge]


def checkpoint(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return f as a function that saves only its arguments and runs again in backward.

    Results and gradients have the same bits as without, but for the order in which several calls
    of backward add up the gradients of a parameter that each of them uses more than once. Tensors
    that f uses without getting them as arguments (parameters, closures) receive their gradients
    too. Random draws and autocast are the same in both runs.

    Args:
        f: returns one tensor, which depends on nothing that changes until backward but the
            random generator. It may contain checkpointed functions.

    Returns:
        A function with the arguments and the result of f.

    Raises:
        ArgumentError: f is not a function.
        GradError: when called, f does not return a tensor; in backward, f does not
            return the same again.

    Source: Chen et al. 2016, arXiv:1604.06174.

    Example:
        >>> x = tg.tensor([0.0, 1.0], requires_grad=True)
        >>> block = tg.checkpoint(lambda x: tg.exp(tg.sin(x)))  # its two ops save nothing
        >>> block(x).sum().backward()
        >>> x.grad.round(3)
        array([1.   , 1.253], dtype=float32)
    """

    check_function("checkpoint", f, "give it the function first: checkpoint(f)(x)")

    @wraps(f, updated=())
    def run(*args: Any, **kwargs: Any) -> Tensor:
        version = nodes.next_version()
        state = random.get_state()
        y = f(*args, **kwargs)
        if not isinstance(y, Tensor):
            raise GradError(f"{_name(f)} returned a {type(y).__name__}, expected one tensor")
        if not mode.grad_enabled or not y.requires_grad:
            return y
        call = _Call(f, args, kwargs, mode.autocast, state, nodes.frontier(y, version))
        # saved only so that the walk raises an error for arrays that were assigned to since
        arrays = [t.data for t in (*args, *kwargs.values(), *call.edges) if isinstance(t, Tensor)]
        saved = (call, *arrays)
        return Tensor(y.data, True, Node(_name(f), call.edges, _backward, saved, y.data, True))

    return run


def _backward(dy: Any, saved: Saved, needs: Needs) -> Gradients:
    call: _Call = saved[0]
    array = unwrapped(dy)
    with _same_conditions(call):
        version = nodes.next_version()
        y = call.f(*call.args, **call.kwargs)
        edges = nodes.frontier(y, version)
        same = len(edges) == len(call.edges) and all(map(operator.is_, edges, call.edges))
        if y.dtype != array.dtype or y.shape != array.shape or not same:
            raise GradError(
                f"{_name(call.f)}: got shape {y.shape}, dtype {y.dtype} or a graph that differs "
                f"from the first run, expected {array.shape}, {array.dtype} and the same parameters"
            )
    return backward.gradients(y, dy, call.edges)


@contextmanager
def _same_conditions(call: _Call) -> Iterator[None]:
    """Restore the conditions of forward: recording, autocast and random state."""
    state = random.get_state()
    random.set_state(call.random)
    try:
        with replaced(mode, grad_enabled=True, autocast=call.autocast):
            yield
    finally:
        random.set_state(state)


def _name(f: Callable[..., Any]) -> str:
    return f"checkpoint({getattr(f, '__name__', type(f).__name__)})"
