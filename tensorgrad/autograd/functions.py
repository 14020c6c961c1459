"""Functions of functions: gradients, directional derivatives, products with Jacobians and Hessians.

Arguments and results are trees of tensors; see trees.py. A derivative runs its function on copies
of the arguments, and returns results without a graph, except inside of another derivative, where
they are recorded for it. Tests: tests/autograd/test_functions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np

from tensorgrad.autograd import second, trees
from tensorgrad.autograd.tangents import FORWARD_ONLY, Forward, reversible, tangents_of
from tensorgrad.core.arrays import cast
from tensorgrad.core.backend import namespace, same_device
from tensorgrad.core.backward import gradients
from tensorgrad.core.checks import check_flag, check_function, check_shape
from tensorgrad.core.dtypes import is_float
from tensorgrad.core.errors import ArgumentError, DtypeError, GradError
from tensorgrad.core.modes import mode, replaced
from tensorgrad.core.nodes import Edge, edge_of
from tensorgrad.core.operands import tensor_of
from tensorgrad.core.tensor import Tensor

_Index = int | np.integer[Any]


class _Inputs:
    """The arguments that a function is differentiated by.

    Args:
        op: the derivative, for errors.
        names: of the arguments, for errors.
        values: trees.

    Attributes:
        tensors: the leaves.
    """

    def __init__(self, op: str, names: Sequence[str], values: Sequence[Any]) -> None:
        self._op = op
        flat = [trees.flatten(value) for value in values]
        self._trees = [tree for _, tree in flat]
        pairs = zip(names, self._trees, strict=True)
        self._names = [leaf for name, tree in pairs for leaf in tree.names(name)]
        leaves = [leaf for leaves, _ in flat for leaf in leaves]
        self.tensors = [
            _float(op, name, leaf) for name, leaf in zip(self._names, leaves, strict=True)
        ]
        if not leaves:
            what = ", ".join(names) or "the function"
            raise GradError(f"{op}: {what} holds no tensors, expected some to differentiate by")

    def build(self, leaves: Sequence[Tensor], results: bool = False) -> list[Any]:
        """Return the arguments with other tensors, or results of their structure."""
        remaining = iter(leaves)
        return [
            tree.build([next(remaining) for _ in tree.names()], results) for tree in self._trees
        ]

    def tangents(self, name: str, values: Any) -> list[Tensor]:
        """Return the leaves of tangents, checked."""
        op, primals = self._op, iter(zip(self._names, self.tensors, strict=True))
        found = []
        for i, (tree, value) in enumerate(zip(self._trees, values, strict=True)):
            names = tree.names(f"{name}[{i}]")
            for own, leaf in zip(names, tree.leaves_of(op, f"{name}[{i}]", value), strict=True):
                found.append(_beside(op, own, leaf, *next(primals)))
        return found


def _float(op: str, name: str, value: Any) -> Tensor:
    """Return an argument to differentiate by as a tensor."""
    x = tensor_of(op, name, value)
    if not is_float(x.dtype):
        raise DtypeError(
            f"{op}: {name} has dtype {x.dtype}, expected floats; convert it with astype, or let "
            "the function take it from outside"
        )
    return x


def _beside(op: str, name: str, value: Any, of: str, x: Tensor) -> Tensor:
    """Return a tangent or a cotangent of x as a tensor."""
    t = tensor_of(op, name, value, x)
    same_device(op, (of, name), (x.data, t.data))
    check_shape(op, name, t, x.shape, f", that of {of}")
    if t.dtype != x.dtype:
        raise DtypeError(f"{op}: {name} has dtype {t.dtype}, expected {x.dtype}, that of {of}")
    return t


def _several(op: str, name: str, values: Any) -> Sequence[Any]:
    """Return a list or tuple of arguments, checked."""
    if not isinstance(values, list | tuple):
        kind = type(values).__name__
        raise ArgumentError(
            f"{op}: {name} is a {kind}, expected a tuple of one for each argument, such as (x,)"
        )
    return values


def _outputs(op: str, y: Any) -> tuple[list[Tensor], trees.Tree]:
    """Return what a function returned as tensors, checked, and the structure."""
    leaves, tree = trees.flatten(y)
    for name, leaf in zip(tree.names(), leaves, strict=True):
        where = f" at {name}" if name else ""
        if not isinstance(leaf, Tensor):
            kind = type(leaf).__name__
            raise GradError(f"{op}: the function returned {kind}{where}, expected tensors")
        if not is_float(leaf.dtype):
            raise DtypeError(
                f"{op}: the function returned {leaf.dtype}{where}, expected floats; it may return "
                "other results beside them with has_aux=True"
            )
    if not leaves:
        raise GradError(f"{op}: the function returned {y!r:.80}, expected tensors")
    return leaves, tree


def _with_aux(op: str, result: Any, has_aux: bool) -> tuple[Any, Any]:
    """Return what a function returned and its aux, None without one."""
    if not has_aux:
        return result, None
    if not isinstance(result, tuple) or len(result) != 2:
        kind = type(result).__name__
        raise GradError(
            f"{op}: the function returned {kind}, expected a pair (result, aux) with has_aux=True"
        )
    return result


def _check_scalar(op: str, y: Any) -> None:
    if not isinstance(y, Tensor) or y.data.size != 1:
        got = f"shape {y.shape}" if isinstance(y, Tensor) else type(y).__name__
        raise GradError(f"{op}: the function returned {got}, expected a scalar tensor")


def _is_nested() -> bool:
    """Whether results are recorded for another derivative."""
    return mode.grad_enabled and (mode.inside_grad or mode.forward is not None)


@contextmanager
def _differentiating(edges: Sequence[Edge], nested: bool) -> Iterator[None]:
    """Record what a function does in the `with` block, whose arguments have these edges."""
    with replaced(
        mode,
        inside_grad=True,
        grad_enabled=True,
        arguments=mode.arguments | {*edges},
        forward=reversible() if nested else None,
    ):
        yield


def _edges(arguments: Sequence[Any]) -> list[Edge]:
    """Return where gradients of rebuilt arguments go."""
    return [edge_of(x) for argument in arguments for x in trees.flatten(argument)[0]]


def _outside(x: Tensor) -> Tensor:
    """Return a result without a graph that leads nowhere."""
    return second.without_dead_graphs([x])[0] if _is_nested() else x.detach()


def _zeros(x: Tensor) -> Tensor:
    return Tensor(namespace(x.data).zeros_like(x.data))


def _ones(x: Tensor) -> Tensor:
    return Tensor(namespace(x.data).ones_like(x.data))


def _gradient(
    op: str, f: Callable[..., Any], argnums: Any, has_aux: bool, args: Any, kwargs: Any
) -> tuple[Tensor, list[Any], Any]:
    """Return the value of f, its gradient for each of `argnums`, and its aux."""
    indices = [_argument(op, i, len(args)) for i in argnums]
    distinct = list(dict.fromkeys(indices))
    inputs = _Inputs(op, [f"argument {i}" for i in distinct], [args[i] for i in distinct])
    nested, given = _is_nested(), list(args)
    arguments = inputs.build(
        [second.as_argument(x) if nested else Tensor(x.data, True) for x in inputs.tensors]
    )
    for i, argument in zip(distinct, arguments, strict=True):
        given[i] = argument
    edges = _edges(arguments)
    with _differentiating(edges, nested):
        y, aux = _with_aux(op, f(*given, **kwargs), has_aux)
    _check_scalar(op, y)
    _outputs(op, y)
    found: list[Tensor | None]
    if nested:
        found = second.gradients_of_results([(y, _ones(y))], edges)
    else:
        with replaced(mode, forward=None):
            arrays = gradients(y, _ones(y).data, edges)
        pairs = zip(arrays, inputs.tensors, strict=True)
        found = [None if g is None else Tensor(cast(g, x.dtype)) for g, x in pairs]
    pairs = zip(found, inputs.tensors, strict=True)
    grads = [_zeros(x) if g is None else _outside(g) for g, x in pairs]
    each = dict(zip(distinct, inputs.build(grads, results=True), strict=True))
    return _outside(y), [each[i] for i in indices], trees.mapped(_outside, aux)


def _argument(op: str, index: Any, count: int) -> int:
    """Return the index of a positional argument, counted from the first."""
    if not isinstance(index, int | np.integer) or not -count <= index < count:
        raise ArgumentError(
            f"{op}: argnums has {index!r}, expected indices of the {count} positional arguments"
        )
    return int(index) % count


def value_and_grad(f: Callable[..., Any], argnums: Any = 0, has_aux: bool = False) -> Any:
    _check_differentiable("value_and_grad", f)
    check_flag("value_and_grad", "has_aux", has_aux)
    single = isinstance(argnums, int | np.integer)
    wanted: Any = (argnums,) if single else argnums

    @wraps(f)
    def with_grad(*args: Any, **kwargs: Any) -> Any:
        y, grads, aux = _gradient("value_and_grad", f, wanted, has_aux, args, kwargs)
        grad = grads[0] if single else tuple(grads)
        return ((y, aux) if has_aux else y), grad

    return with_grad


def grad(f: Callable[..., Any], argnums: Any = 0, has_aux: bool = False) -> Any:
    _check_differentiable("grad", f)
    check_flag("grad", "has_aux", has_aux)
    single = isinstance(argnums, int | np.integer)
    wanted: Any = (argnums,) if single else argnums

    @wraps(f)
    def only_grad(*args: Any, **kwargs: Any) -> Any:
        _, grads, aux = _gradient("grad", f, wanted, has_aux, args, kwargs)
        grad = grads[0] if single else tuple(grads)
        return (grad, aux) if has_aux else grad

    return only_grad


def _check_differentiable(op: str, f: Any) -> None:
    """Raise ArgumentError unless f is a function."""
    check_function(
        op, f, f"{op}(f) returns a new function; for the gradients of a tensor call its backward()"
    )


def jvp(
    f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False
) -> Any:
    """Return f(*primals) and its derivative along the tangents."""
    check_flag("jvp", "has_aux", has_aux)
    y, dy, aux = _forward("jvp", f, primals, tangents, has_aux)
    return (y, dy, aux) if has_aux else (y, dy)


def _forward(
    op: str, f: Callable[..., Any], primals: Any, tangents: Any, has_aux: bool = False
) -> tuple[Any, Any, Any]:
    """Return f(*primals), its tangent, and its aux."""
    inputs, directions = _along(op, f, primals, tangents)
    level, outer = object(), mode.forward if mode.grad_enabled else None
    duals = [_dual(x, level, t) for x, t in zip(inputs.tensors, directions, strict=True)]
    forward = Forward(
        (*(() if outer is None else outer.levels), level),
        mode.grad_enabled and (outer is None or outer.is_recorded),
        outer is not None and outer.keeps_inputs,
    )
    arguments = inputs.build(duals)
    with replaced(mode, forward=forward, grad_enabled=True):
        result, aux = _with_aux(op, f(*arguments), has_aux)
    ys, tree = _outputs(op, result)
    pairs = [_parted(y, level) for y in ys]
    y, dy = (tree.build([pair[i] for pair in pairs], results=i == 1) for i in range(2))
    return y, dy, trees.mapped(lambda x: _parted(x, level)[0], aux)


def _along(
    op: str, f: Callable[..., Any], primals: Any, tangents: Any
) -> tuple[_Inputs, list[Tensor]]:
    """Return arguments and their tangents, checked."""
    check_function(op, f)
    primals, tangents = _several(op, "primals", primals), _several(op, "tangents", tangents)
    if len(primals) != len(tangents):
        raise ArgumentError(
            f"{op}: tangents holds {len(tangents)}, expected {len(primals)}, one for each primal"
        )
    inputs = _Inputs(op, [f"primals[{i}]" for i in range(len(primals))], primals)
    return inputs, inputs.tangents("tangents", tangents)


def _dual(x: Tensor, level: object, t: Tensor) -> Tensor:
    """Return an argument of a function that jvp differentiates."""
    flows = x.requires_grad and mode.grad_enabled
    dual = Tensor(x.data, True, edge_of(x) if flows else FORWARD_ONLY)
    dual.tangents = {**(tangents_of(x) if mode.grad_enabled else {}), level: t}
    return dual


def _parted(y: Tensor, level: object) -> tuple[Tensor, Tensor]:
    """Return a result of a function that jvp has run, and its tangent."""
    known = dict(tangents_of(y))
    t = known.pop(level, None)
    if not mode.grad_enabled:
        return y.detach(), _zeros(y) if t is None else t.detach()
    if t is not None:
        flows = y.node is not FORWARD_ONLY
        value = Tensor(y.data, flows or bool(known), edge_of(y) if flows or known else None)
        if known:
            value.tangents = known
        y = value
    y, t = second.without_dead_graphs([y, _zeros(y) if t is None else t])
    return y, t


class _Trace:
    """A function that has run with its graph recorded, to go through in both directions.

    Attributes:
        y: what the function returned.
        aux: what it returned beside that.
    """

    def __init__(
        self,
        op: str,
        f: Callable[..., Any],
        primals: Sequence[Any],
        has_aux: bool = False,
        names: Sequence[str] = (),
    ) -> None:
        names = names or [f"primals[{i}]" for i in range(len(primals))]
        self.op, self.inputs = op, _Inputs(op, names, primals)
        nested = _is_nested()
        arguments = self.inputs.build([second.as_argument(x) for x in self.inputs.tensors])
        self._edges = _edges(arguments)
        with _differentiating(self._edges, nested):
            result, aux = _with_aux(op, f(*arguments), has_aux)
        self.outputs, self.tree = _outputs(op, result)
        self.y: Any = self.tree.build([_outside(y) for y in self.outputs])
        self.aux: Any = trees.mapped(_outside, aux)

    def cotangents(self, name: str, dy: Any) -> list[Tensor]:
        """Return the leaves of a gradient of the outputs, checked."""
        leaves = self.tree.leaves_of(self.op, name, dy)
        names = zip(self.tree.names(name), self.tree.names("y"), strict=True)
        triples = zip(names, leaves, self.outputs, strict=True)
        return [_beside(self.op, own, leaf, of, y) for (own, of), leaf, y in triples]

    def pull(self, dys: Sequence[Tensor]) -> list[Tensor]:
        """Return J^T dy for each argument."""
        seeds = list(zip(self.outputs, dys, strict=True))
        found: list[Tensor | None]
        if _is_nested():
            found = second.gradients_of_results(seeds, self._edges)
        else:
            with replaced(mode, forward=None):
                arrays = second.array_gradients([(y, dy.data) for y, dy in seeds], self._edges)
            found = [None if g is None else Tensor(g) for g in arrays]
        pairs = zip(found, self.inputs.tensors, strict=True)
        return [_zeros(x) if g is None else _outside(g) for g, x in pairs]

    def push(self, tangents: Sequence[Tensor | None]) -> list[Tensor]:
        """Return J t for each output."""
        modes = {"autocast": None} if _is_nested() else {"grad_enabled": False, "forward": None}
        with replaced(mode, **modes):
            found = second.tangents_along(self.outputs, self._edges, tangents)
        pairs = zip(found, self.outputs, strict=True)
        return [_zeros(y) if t is None else _outside(t) for t, y in pairs]


def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    check_function("vjp", f)
    check_flag("vjp", "has_aux", has_aux)
    trace = _Trace("vjp", f, primals, has_aux)

    def pullback(dy: Any) -> Any:
        grads = trace.pull(trace.cotangents("dy", dy))
        return tuple(trace.inputs.build(grads, results=True))

    return (trace.y, pullback, trace.aux) if has_aux else (trace.y, pullback)


def linearize(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    check_function("linearize", f)
    check_flag("linearize", "has_aux", has_aux)
    trace = _Trace("linearize", f, primals, has_aux)

    def f_jvp(*tangents: Any) -> Any:
        if len(tangents) != len(primals):
            raise ArgumentError(
                f"linearize: got {len(tangents)} tangents, expected {len(primals)}, one for each "
                "primal"
            )
        ts = trace.push(trace.inputs.tangents("tangents", tangents))
        return trace.tree.build(ts, results=True)

    return (trace.y, f_jvp, trace.aux) if has_aux else (trace.y, f_jvp)


def hvp(f: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    return _hessian_product("hvp", f, primals, tangents)


def _hessian_product(op: str, f: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    """Return H t: the gradient of the tangent of f."""
    _along(op, f, primals, tangents)

    def slope(*arguments: Any) -> Tensor:
        y, dy, _ = _forward(op, f, arguments, tangents)
        _check_scalar(op, y)
        return dy

    _, grads, _ = _gradient(op, slope, range(len(primals)), False, tuple(primals), {})
    return trees.rebuilt(primals, grads)


def ggnvp(f: Callable[..., Any], loss: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    check_function("ggnvp", loss, name="loss")
    _, directions = _along("ggnvp", f, primals, tangents)
    trace = _Trace("ggnvp", f, primals)
    dy = trace.tree.build(trace.push(directions), results=True)
    (product,) = _hessian_product("ggnvp", loss, (trace.y,), (dy,))
    grads = trace.pull(trace.cotangents("the product with the Hessian of loss", product))
    return trees.rebuilt(primals, trace.inputs.build(grads, results=True))
