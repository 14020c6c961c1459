"""Tangents: one rule for each op, from which every derivative beyond the first follows.

The gradient of an op, its backward function, is J(x)^T dy. Its tangent is J(x) t, written in
recorded ops, so that it can be differentiated in turn:

    @tangent_of(_backward)
    def _tangent(op, t):
        y, axis = op.saved
        y = op.output(y)
        return y * (t - (y * t).sum(axis, keepdims=True))

Forward mode applies the rule as it records an op; see `Forward`. The gradient of a gradient needs
no second rule: for g = J(x)^T dy and a cotangent w of g, the gradient by dy is the tangent J(x) w,
and the gradient by x is the backward of the recorded tangent with cotangent dy; see second.py.
Tests: tests/autograd/test_tangents.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from tensorgrad.core.backend import Array, Shape, namespace
from tensorgrad.core.backward import check_saved
from tensorgrad.core.dtypes import Dtype
from tensorgrad.core.errors import GradError
from tensorgrad.core.modes import mode, replaced
from tensorgrad.core.nodes import Backward, Node, Output, edge_of
from tensorgrad.core.record import record
from tensorgrad.core.tensor import Tensor

Tangents: TypeAlias = "Sequence[Tensor | None]"  # None: the input is constant
# rule(op, tangents) -> the tangent of the output, or one for each of several; None: it is constant
Rule: TypeAlias = "Callable[..., Any]"
_AnyRule = TypeVar("_AnyRule", bound=Rule)
_Result = TypeVar("_Result")

_RULES: dict[Any, Rule] = {}
# The node of tensors that only forward mode differentiates: no gradient flows back from it.
FORWARD_ONLY = Node("jvp", (), lambda dy, saved, needs: (), (), np.empty(()))


def tangent_of(*backward: Callable[..., Any]) -> Callable[[_AnyRule], _AnyRule]:
    """Return a decorator: the function is the tangent of ops with these backward functions.

    Args:
        backward: what the op gives to `record`; of a method of an object, the method of the class.

    Returns:
        A decorator of `rule(op, *tangents)`. `op` is an `Op`. The tangents are tensors in the
        shape and dtype of the inputs that `record` got, None for one that is constant, but not all
        of them. The rule returns the tangent of the output in recorded ops, of several outputs a
        tuple, with None for one that is constant. It may broadcast to the output, and may have
        another float dtype.

    Example:
        >>> from tensorgrad.autograd import record, tangent_of
        >>> def backward(dy, saved, needs):
        ...     return (2 * saved[0] * dy,)
        >>> @tangent_of(backward)
        ... def tangent(op, t):
        ...     return 2 * op.input(0, op.saved[0]) * t
        >>> def square(x):
        ...     return record("square", x.data**2, [x], backward, (x.data,))
        >>> tg.jvp(square, (tg.tensor([3.0]),), (tg.tensor([1.0]),))
        (tensor([9.], dtype=float32), tensor([6.], dtype=float32))
    """

    def register(rule: _AnyRule) -> _AnyRule:
        for function in backward:
            _RULES[function] = rule
        return rule

    return register


@dataclass(slots=True)
class Op:
    """A recorded op, as its tangent rule sees it.

    Args:
        node: what the graph records of it.
        saved: what it saved for backward.
        inputs: the tensors that it depends on; None: only the node is left of them.
        tangents: of each output, see `tangents_of`.
        wanted: for each output whether its tangent is wanted.
    """

    node: Node
    saved: tuple[Any, ...]
    inputs: Sequence[Tensor | None] | None = None
    tangents: Sequence[dict[object, Tensor]] = ()
    wanted: Sequence[bool] = ()

    def input(self, index: int, array: Array) -> Tensor:
        """Return an input as a tensor that gradients flow through.

        Args:
            index: of the input.
            array: its values, which the op has saved, in the shape of the input.
        """
        if self.inputs is not None:
            x: Any = self.inputs[index]  # maybe a number
            is_marked = x.node is FORWARD_ONLY and mode.forward is None
            return x if x.requires_grad and not is_marked else Tensor(array)
        edge = self.node.edges[index]
        return Tensor(array) if edge is None else Tensor(array, True, edge)

    def output(self, array: Array, index: int = 0) -> Tensor:
        """Return an output as a tensor that gradients flow through.

        Args:
            array: its values, which the op has saved.
            index: of the output, where the op has several.
        """
        flows = any(edge is not None for edge in self.node.edges)
        if not flows and mode.forward is None:
            return Tensor(array)
        y = Tensor(array, True, FORWARD_ONLY)
        if flows:
            count = len(self.wanted)
            y.node = self.node if count == 1 else Output(self.node, index, count, array)
        if self.tangents:
            y.tangents = self.tangents[index]
        return y


def recorded(node: Node) -> Op:
    """Return the op of a node in a graph.

    Raises:
        GradError: the graph was freed, or an array that the op saved was assigned to since.
    """
    check_saved(node)
    return Op(node, node.saved, *getattr(node, "forward", ()))


def tangent(
    op: Op, given: Tangents, shapes: Sequence[tuple[Shape, Dtype] | None]
) -> list[Tensor | None]:
    """Return the tangents of the outputs of an op, in their shapes and dtypes.

    Args:
        op: what was recorded.
        given: the tangents of its inputs.
        shapes: shape and dtype of each output, None where its tangent is not wanted.
    Raises:
        GradError: the op has no rule.
    """
    rule = _RULES.get(getattr(op.node.backward, "__func__", op.node.backward))
    if rule is None:
        raise GradError(
            f"{op.node.name}: the op has a gradient and no tangent, expected one for this "
            "derivative; tensorgrad.autograd.tangent_of gives it one"
        )
    op.wanted = [shape is not None for shape in shapes]
    result = rule(op, *given)
    each = result if isinstance(result, tuple | list) else (result,)
    if len(each) != len(shapes):
        raise GradError(
            f"{op.node.name}: its rule returned {len(each)} tangents, expected {len(shapes)}, one "
            "for each output"
        )
    return [
        None if t is None or shape is None else _fitted(op.node.name, t, *shape)
        for t, shape in zip(each, shapes, strict=True)
    ]


def _fitted(name: str, t: Any, shape: Shape, dtype: Dtype) -> Tensor:
    """Return the tangent of an output in its shape and dtype."""
    if not isinstance(t, Tensor):
        raise GradError(f"{name}: its rule returned a {type(t).__name__}, expected a tensor")
    if t.shape != shape:
        try:
            data = namespace(t.data).broadcast_to(t.data, shape)
        except ValueError as error:
            raise GradError(
                f"{name}: its rule returned a tangent of shape {t.shape}, expected {shape}"
            ) from error
        t = record("broadcast_to", data, (t,), same, ())
    result: Tensor = t if t.dtype == dtype else t.astype(dtype)
    return result


def same(dy: Any, saved: tuple[Any, ...], needs: Sequence[Any]) -> Sequence[Any]:
    """Return dy: the backward function of an op that returns its input, or broadcasts it."""
    return (dy,)


@tangent_of(same)
def _same_tangent(op: Op, t: Tensor) -> Tensor:
    return t


def tangents_of(x: Tensor) -> dict[object, Tensor]:
    """Return the tangents of a tensor, by the level of the jvp that they belong to."""
    known: dict[object, Tensor] = getattr(x, "tangents", {})
    return known


class Forward(NamedTuple):
    """Forward mode: `mode.forward` while `jvp` runs a function.

    Args:
        levels: a new object for each jvp that runs, the outermost first. The tangent of a level is
            computed with those of the levels before it, so that these differentiate it too.
        is_recorded: whether results have a graph, too.
        keeps_inputs: whether ops keep their inputs, with tangents, for a gradient that is
            differentiated in forward mode.
    """

    levels: Sequence[object]
    is_recorded: bool = True
    keeps_inputs: bool = False

    def record(
        self,
        name: str,
        outputs: Any,
        inputs: Sequence[Tensor | None],
        backward: Backward,
        saved: tuple[Any, ...],
        takes_gradient: bool,
    ) -> Any:
        """Record an op, as `record` does, with the tangents of its outputs."""
        with replaced(mode, forward=None):
            result: Any = record(
                name, outputs, inputs, backward, saved, takes_gradient=takes_gradient
            )
        several = type(result) is tuple
        results = result if several else (result,)
        node = results[0].node.node if several else results[0].node
        node.edges = [
            None if edge is FORWARD_ONLY or not self.is_recorded else edge for edge in node.edges
        ]
        tangents = self._tangents(Op(node, saved, inputs, [{} for _ in results]), results)
        flows = any(edge is not None for edge in node.edges)
        for y, known in zip(results, tangents, strict=True):
            y.tangents = known
            if not flows:
                y.requires_grad, y.node = bool(known), FORWARD_ONLY if known else None
        if flows and self.keeps_inputs:
            node.forward = inputs, tangents
        return result

    def _tangents(self, op: Op, outputs: Sequence[Tensor]) -> Sequence[dict[object, Tensor]]:
        """Return the tangents of the outputs of an op, by level."""
        given = [{} if x is None else tangents_of(x) for x in op.inputs or ()]
        shapes = [(y.shape, y.dtype) for y in outputs]
        for place, level in enumerate(self.levels):
            own = [each.get(level) for each in given]
            if all(t is None for t in own):
                continue
            # Backward ignores them too.
            with np.errstate(over="ignore", invalid="ignore"), self._below(place):
                results = tangent(op, own, shapes)
            for known, t in zip(op.tangents, results, strict=True):
                if t is not None:
                    known[level] = t
        return op.tangents

    def _below(self, place: int) -> AbstractContextManager[None]:
        """Return the context in which the tangent of a level is computed."""
        below = self.levels[:place]
        if not below:
            return replaced(mode, forward=None, autocast=None, grad_enabled=self.is_recorded)
        forward = Forward(below, self.is_recorded, self.keeps_inputs)
        return replaced(mode, forward=forward, autocast=None)

    def cast(self, y: Tensor, x: Tensor) -> Tensor:
        """Return y, the values of x in another dtype, with the tangents of x in that dtype."""
        y.tangents = {level: t.astype(y.dtype) for level, t in tangents_of(x).items()}
        return y


def along(
    f: Callable[..., Any], primals: Sequence[Tensor | None], given: Tangents
) -> list[Tensor | None]:
    """Return the derivative of a function along some tangents, in forward mode.

    A rule can so follow from a definition of the op in other ops.

    Args:
        f: returns a tensor or a tuple of several.
        primals: the arguments of f.
        given: their tangents, None for those that are constant.

    Returns:
        The tangent of each result, None where it is constant.
    """
    level, results = run_along(f, primals, given)
    each = results if isinstance(results, tuple | list) else (results,)
    return [tangents_of(y).get(level) for y in each]


def run_along(
    f: Callable[..., _Result], primals: Sequence[Tensor | None], given: Tangents
) -> tuple[object, _Result]:
    """Return a new level of forward mode and the result of a function, with tangents there.

    The arguments are those of `along`.
    """
    level, outer = object(), mode.forward if mode.grad_enabled else None
    duals = [
        x if x is None or t is None else _dual(x, level, t)
        for x, t in zip(primals, given, strict=True)
    ]
    if outer is None:
        outer = Forward((), mode.grad_enabled)
    forward = Forward((*outer.levels, level), outer.is_recorded, outer.keeps_inputs)
    with replaced(mode, forward=forward, grad_enabled=True):
        return level, f(*duals)


def _dual(x: Tensor, level: object, t: Tensor) -> Tensor:
    """Return x with a tangent of a level; gradients flow to x."""
    flows = x.requires_grad and mode.grad_enabled
    y = Tensor(x.data, True, edge_of(x) if flows else FORWARD_ONLY)
    y.tangents = {**tangents_of(x), level: t}
    return y


def reversible() -> Forward | None:
    """Return the forward mode that a gradient of its own can go back through; None without one."""
    forward: Forward | None = mode.forward
    return None if forward is None else Forward(forward.levels, keeps_inputs=True)
