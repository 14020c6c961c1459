"""Gradient checkpointing: save the inputs of a function and recompute the rest in backward.

Forward runs the function once and drops its graph; backward runs it again to rebuild the graph and
walks it at once. So the arrays saved inside exist for one call at a time, at the cost of one more
forward.

In forward mode the function runs with its tangents. These are further outputs of the same op, so
that its backward runs the function again with its tangents. A gradient that is differentiated again
runs it too, and goes on through its graph. Tests: tests/autograd/test_recompute.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

from tensorgrad import random
from tensorgrad.amp import Casts
from tensorgrad.autograd import second
from tensorgrad.autograd.tangents import (
    FORWARD_ONLY,
    Forward,
    Op,
    Tangents,
    tangent_of,
    tangents_of,
)
from tensorgrad.core import nodes
from tensorgrad.core.backend import Shape
from tensorgrad.core.checks import check_function
from tensorgrad.core.dtypes import Dtype
from tensorgrad.core.errors import GradError
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.modes import mode, replaced
from tensorgrad.core.nodes import Edge, Node, Output
from tensorgrad.core.tensor import Tensor


class _Call(NamedTuple):
    """A call and the state that are needed to repeat it."""

    f: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: Casts | None
    forward: Forward | None
    inside_grad: bool
    random: dict[str, int]
    edges: list[Edge]
    results: list[tuple[Shape, Dtype]]


def checkpoint(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return f as a function that saves only its arguments and runs again in backward.

    Results and gradients have the same bits as without, but for the order in which several calls
    of backward add up the gradients of a parameter that each of them uses more than once. Tensors
    that f uses without getting them as arguments (parameters, closures) receive their gradients
    too. Random draws and autocast are the same in both runs. In forward mode the arrays saved for
    the tangents of f are dropped too; a gradient that is differentiated again keeps those of f.

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
        results = _flowing(y) if mode.grad_enabled else []
        if not results:
            return y
        edges = _frontier(results, version)
        modes = mode.autocast, mode.forward, mode.inside_grad
        call = _Call(f, args, kwargs, *modes, state, edges, _kinds(results))
        # saved only so that the walk raises an error for arrays that were assigned to since
        arrays = [t.data for t in (*args, *kwargs.values(), *edges) if isinstance(t, Tensor)]
        known = tangents_of(y)
        node = Node(_name(f), edges, _backward, (call, *arrays), y.data, not known)
        if not known:
            return Tensor(y.data, True, node)
        outputs = [Output(node, i, len(results), x.data) for i, x in enumerate(results)]
        return _with_edges(y, dict(zip(map(id, results), outputs, strict=True)))

    return run


def _flowing(y: Tensor) -> list[Tensor]:
    """Return y, its tangents, theirs, and so on: those that gradients flow back from."""
    flowing = [y] if y.requires_grad and y.node is not FORWARD_ONLY else []
    for t in tangents_of(y).values():
        flowing += _flowing(t)
    return flowing


def _with_edges(x: Tensor, edges: dict[int, Output]) -> Tensor:
    """Return x and its tangents without their graphs, with the edges that they have by id."""
    y = Tensor(x.data, x.requires_grad, edges.get(id(x), x.node))
    y.tangents = {level: _with_edges(t, edges) for level, t in tangents_of(x).items()}
    return y


def _frontier(results: Sequence[Tensor], version: int) -> list[Edge]:
    """Return the edges that results of a function depend on; see `nodes.frontier`."""
    edges = [edge for x in results for edge in nodes.frontier(x, version)]
    return list(dict.fromkeys(edges))


def _backward(dy: Any, saved: Saved, needs: Needs) -> Gradients:
    call: _Call = saved[0]
    pairs = zip(_again(call), dy if type(dy) is list else [dy], strict=True)
    seeds = [(x, array) for x, array in pairs if array is not None]
    return second.array_gradients(seeds, call.edges, retain_graph=False)


def _walk(node: Node, dys: Tangents, needs: Needs) -> Sequence[Tensor | None]:
    """Return the gradients in recorded ops, through the graph of the function."""
    call: _Call = node.saved[0]._replace(inside_grad=True)
    seeds = [(x, dy) for x, dy in zip(_again(call), dys, strict=True) if dy is not None]
    return second.gradients(seeds, call.edges)


second.WALKS[_backward] = _walk


@tangent_of(_backward)
def _tangent(op: Op, *tangents: Tensor | None) -> list[Tensor | None]:
    """Return the tangents of the results through the graph of the function, for `linearize`."""
    call: _Call = op.saved[0]
    return second.tangents_along(_again(call), call.edges, tangents)


def _again(call: _Call) -> list[Tensor]:
    """Run the function again; return the results that gradients flow back from.

    Raises:
        GradError: they are not what they were.
    """
    with _same_conditions(call):
        version = nodes.next_version()
        results = _flowing(call.f(*call.args, **call.kwargs))
        edges = _frontier(results, version)
    same = len(edges) == len(call.edges) and all(map(operator.is_, edges, call.edges))
    if not same or _kinds(results) != call.results:
        got = ", ".join([f"shape {y.shape}, dtype {y.dtype}" for y in results]) or "no graph"
        shape, dtype = call.results[0]
        raise GradError(
            f"{_name(call.f)}: got {got} or a graph that differs from the first run, expected "
            f"{shape}, {dtype} and the same parameters"
        )
    return results


def _kinds(results: Sequence[Tensor]) -> list[tuple[Shape, Dtype]]:
    return [(y.shape, y.dtype) for y in results]


@contextmanager
def _same_conditions(call: _Call) -> Iterator[None]:
    """Restore the conditions of forward: recording, autocast and random state."""
    state = random.get_state()
    random.set_state(call.random)
    try:
        with replaced(
            mode,
            grad_enabled=True,
            autocast=call.autocast,
            forward=call.forward,
            inside_grad=call.inside_grad,
        ):
            yield
    finally:
        random.set_state(state)


def _name(f: Callable[..., Any]) -> str:
    return f"checkpoint({getattr(f, '__name__', type(f).__name__)})"
