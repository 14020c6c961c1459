"""Functions of functions: gradients, directional derivatives, products with Jacobians and Hessians.

Arguments and results are trees of tensors; see trees.py. A derivative runs its function on copies
of the arguments, and returns results without a graph, except inside of another derivative, where
they are recorded for it. Tests: tests/autograd/test_functions.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, Literal, NamedTuple, Protocol, TypeVar, overload

import numpy as np

from tensorgrad.autograd import second, trees
from tensorgrad.autograd.tangents import Op, reversible, run_along, tangent_of, tangents_of
from tensorgrad.core.arrays import cast
from tensorgrad.core.backend import Array, Shape, free_bytes, namespace, same_device
from tensorgrad.core.checks import check_flag, check_function, check_shape
from tensorgrad.core.dtypes import is_float
from tensorgrad.core.errors import ArgumentError, DtypeError, GradError
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.modes import mode, replaced
from tensorgrad.core.nodes import edge_of
from tensorgrad.core.operands import tensor_of
from tensorgrad.core.record import record
from tensorgrad.core.tensor import Tensor

__all__ = [
    "functional_call",
    "ggnvp",
    "grad",
    "hessian",
    "hvp",
    "jacobian",
    "jvp",
    "linearize",
    "value_and_grad",
    "vjp",
]

_Index = int | np.integer[Any]
_A = TypeVar("_A")
_Y = TypeVar("_Y")
_Aux = TypeVar("_Aux")
_Result = TypeVar("_Result", covariant=True)
_Primals = TypeVar("_Primals", bound="list[Any] | tuple[Any, ...]")


class _Derivative(Protocol[_Result]):
    """The result of `grad` and the like, as a type checker sees it: it takes arrays too."""

    @property
    def __wrapped__(self) -> Callable[..., Any]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> _Result: ...


class _Leaves(NamedTuple):
    """The tensors of a tree of arguments or results.

    Args:
        op: the derivative, for errors.
        tree: the structure.
        names: of the tensors, for errors.
        tensors: the leaves.
    """

    op: str
    tree: trees.Tree
    names: Sequence[str]
    tensors: Sequence[Tensor]

    def beside(self, name: str, value: Any) -> list[Tensor]:
        """Return the leaves of tangents or cotangents of the tree, checked."""
        leaves = self.tree.leaves_of(self.op, name, value)
        pairs = zip(self.tree.names(name), leaves, self.names, self.tensors, strict=True)
        return [_beside(self.op, *each) for each in pairs]


def _inputs(op: str, names: Sequence[str], values: Sequence[Any]) -> _Leaves:
    """Return the arguments that a function is differentiated by, trees with names for errors."""
    leaves, tree = trees.flatten(values)
    pairs = zip(names, tree.children.values(), strict=True)
    own = [leaf for name, child in pairs for leaf in child.names(name)]
    if not leaves:
        what = ", ".join(names) or "the function"
        raise GradError(f"{op}: {what} holds no tensors, expected some to differentiate by")
    return _Leaves(op, tree, own, [_float(op, *pair) for pair in zip(own, leaves, strict=True)])


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


def _outputs(op: str, y: Any) -> _Leaves:
    """Return what a function returned as tensors, checked."""
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
    return _Leaves(op, tree, tree.names("y"), leaves)


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


def _outside(x: Tensor) -> Tensor:
    """Return a result without a graph that leads nowhere."""
    return second.without_dead_graph(x) if _is_nested() else x.detach()


def _zeros(x: Tensor) -> Tensor:
    return Tensor(namespace(x.data).zeros_like(x.data))


def _argument(op: str, index: Any, count: int) -> int:
    """Return the index of a positional argument, counted from the first."""
    if not isinstance(index, int | np.integer) or not -count <= index < count:
        raise ArgumentError(
            f"{op}: argnums has {index!r}, expected indices of the {count} positional arguments"
        )
    return int(index) % count


@overload
def value_and_grad(
    f: _Derivative[Tensor], argnums: Literal[0] = 0
) -> _Derivative[tuple[Tensor, Tensor]]: ...
@overload  # which tells a type checker the parameter of a lambda
def value_and_grad(
    f: Callable[[Tensor], Tensor], argnums: Literal[0] = 0
) -> _Derivative[tuple[Tensor, Tensor]]: ...
@overload
def value_and_grad(
    f: Callable[[Tensor, Any], Tensor], argnums: Literal[0] = 0
) -> _Derivative[tuple[Tensor, Tensor]]: ...
@overload
def value_and_grad(
    f: Callable[Concatenate[Tensor, Any, Any, ...], Tensor], argnums: Literal[0] = 0
) -> _Derivative[tuple[Tensor, Tensor]]: ...
@overload
def value_and_grad(
    f: Callable[Concatenate[_A, ...], Tensor], argnums: Literal[0] = 0
) -> _Derivative[tuple[Tensor, _A]]: ...
@overload
def value_and_grad(
    f: Callable[Concatenate[Any, Tensor, ...], Tensor], argnums: Literal[1]
) -> _Derivative[tuple[Tensor, Tensor]]: ...
@overload
def value_and_grad(
    f: Callable[Concatenate[Tensor, Tensor, ...], Tensor], argnums: tuple[_Index, ...]
) -> _Derivative[tuple[Tensor, tuple[Tensor, ...]]]: ...
@overload
def value_and_grad(
    f: Callable[..., Tensor], argnums: tuple[_Index, ...], has_aux: Literal[False] = False
) -> _Derivative[tuple[Tensor, tuple[Any, ...]]]: ...
@overload
def value_and_grad(
    f: Callable[..., Tensor], argnums: _Index, has_aux: Literal[False] = False
) -> _Derivative[tuple[Tensor, Any]]: ...
@overload
def value_and_grad(
    f: Callable[..., tuple[Tensor, _Aux]],
    argnums: _Index | tuple[_Index, ...] = 0,
    *,
    has_aux: Literal[True],
) -> _Derivative[tuple[tuple[Tensor, _Aux], Any]]: ...
def value_and_grad(
    f: Callable[..., Any], argnums: _Index | tuple[_Index, ...] = 0, has_aux: bool = False
) -> _Derivative[Any]:
    """Return a function that computes f and its gradient for the arguments in `argnums`.

    Such an argument is a tensor, or a tree of them: nested dictionaries, lists, tuples and modules.
    The gradient has the same structure. No `.grad` is touched: `f` is treated as a function of
    those arguments alone. A gradient is zero where f does not depend on the argument.

    A module is an argument by its parameters that require a gradient: f gets a copy with other
    parameters, and the gradient is a module that holds the gradients in their place.

    Args:
        f: takes any arguments and returns a tensor with one element.
        argnums: index of the positional argument to differentiate by, or a tuple of several.
            Negative indices count from the last positional argument.
        has_aux: f returns a pair, of the tensor and anything else.

    Returns:
        A function with the arguments of f, which returns two results: the value of f, a tensor
        without a graph, or the pair with `has_aux`; and the gradient, of the argument's structure,
        shapes and dtypes; a tuple of gradients where `argnums` is a tuple. Inside of another
        derivative these results can be differentiated in turn.

    Raises:
        ArgumentError: f is not a function (the gradients of a tensor are those of `backward`).
        GradError: when called, f returns no scalar, or an op in it has no tangent, which a gradient
            inside of another derivative needs.
        ArgumentError: when called, there is no such positional argument.
        DtypeError: when called, such an argument holds what is not a tensor, array or number of a
            float dtype.

    Example:
        >>> f = tg.value_and_grad(lambda w, x: ((w * x) ** 2).sum())
        >>> f(tg.tensor([1.0, 2.0]), 3.0)
        (tensor(45., dtype=float32), tensor([18., 36.], dtype=float32))
        >>> loss = lambda p: (p["w"] ** 2).sum() * p["scale"]
        >>> tg.value_and_grad(loss)({"w": tg.tensor([1.0, 2.0]), "scale": 3.0})[1]
        {'w': tensor([ 6., 12.], dtype=float32), 'scale': tensor(5., dtype=float32)}
    """
    _check_call("value_and_grad", f, has_aux)

    @wraps(f)
    def with_grad(*args: Any, **kwargs: Any) -> Any:
        y, grads, aux = _gradient("value_and_grad", f, argnums, has_aux, args, kwargs)
        return ((y, aux) if has_aux else y), grads

    return with_grad


@overload
def grad(f: _Derivative[Tensor], argnums: Literal[0] = 0) -> _Derivative[Tensor]: ...
@overload  # which tells a type checker the parameter of a lambda
def grad(f: Callable[[Tensor], Tensor], argnums: Literal[0] = 0) -> _Derivative[Tensor]: ...
@overload
def grad(f: Callable[[Tensor, Any], Tensor], argnums: Literal[0] = 0) -> _Derivative[Tensor]: ...
@overload
def grad(
    f: Callable[Concatenate[Tensor, Any, Any, ...], Tensor], argnums: Literal[0] = 0
) -> _Derivative[Tensor]: ...
@overload
def grad(f: Callable[Concatenate[_A, ...], Tensor], argnums: Literal[0] = 0) -> _Derivative[_A]: ...
@overload
def grad(
    f: Callable[Concatenate[Any, Tensor, ...], Tensor], argnums: Literal[1]
) -> _Derivative[Tensor]: ...
@overload
def grad(
    f: Callable[Concatenate[Tensor, Tensor, ...], Tensor], argnums: tuple[_Index, ...]
) -> _Derivative[tuple[Tensor, ...]]: ...
@overload
def grad(
    f: Callable[..., Tensor], argnums: tuple[_Index, ...], has_aux: Literal[False] = False
) -> _Derivative[tuple[Any, ...]]: ...
@overload
def grad(
    f: Callable[..., Tensor], argnums: _Index, has_aux: Literal[False] = False
) -> _Derivative[Any]: ...
@overload
def grad(
    f: Callable[..., tuple[Tensor, _Aux]],
    argnums: _Index | tuple[_Index, ...] = 0,
    *,
    has_aux: Literal[True],
) -> _Derivative[tuple[Any, _Aux]]: ...
def grad(
    f: Callable[..., Any], argnums: _Index | tuple[_Index, ...] = 0, has_aux: bool = False
) -> _Derivative[Any]:
    """Return the function that computes the gradient of f; see `value_and_grad`.

    Args:
        f: takes any arguments and returns a tensor with one element.
        argnums: index of the positional argument to differentiate by, or a tuple of several.
        has_aux: f returns a pair, of the tensor and anything else.

    Returns:
        A function with the arguments of f, which returns a gradient of the argument's structure,
        shapes and dtypes; a tuple of them where `argnums` is a tuple; with `has_aux` a pair of this
        and what f returned beside the tensor.

    Raises:
        ArgumentError: f is not a function; call `loss.backward()` for the gradients of a tensor.

    Example:
        >>> tg.grad(lambda x: (x * x).sum())(tg.tensor([1.0, 2.0]))
        tensor([2., 4.], dtype=float32)
        >>> tg.grad(tg.grad(lambda x: x**3))(2.0)
        tensor(12., dtype=float32)
    """
    _check_call("grad", f, has_aux)

    @wraps(f)
    def only_grad(*args: Any, **kwargs: Any) -> Any:
        _, grads, aux = _gradient("grad", f, argnums, has_aux, args, kwargs)
        return (grads, aux) if has_aux else grads

    return only_grad


def _check_call(op: str, f: Any, has_aux: Any = False) -> None:
    """Raise ArgumentError unless f is a function."""
    check_function(
        op, f, f"{op}(f) returns a new function; for the gradients of a tensor call its backward()"
    )
    check_flag(op, "has_aux", has_aux)


@overload
def jvp(
    f: Callable[..., _Y],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    has_aux: Literal[False] = False,
) -> tuple[_Y, _Y]: ...
@overload
def jvp(
    f: Callable[..., tuple[_Y, _Aux]],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    has_aux: Literal[True],
) -> tuple[_Y, _Y, _Aux]: ...
def jvp(
    f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False
) -> Any:
    """Return f(*primals) and its derivative along the tangents, in forward mode.

    y = f(x), dy = J(x) t

    Each op of f computes its tangent beside its value, so that the whole costs two to three runs
    of f, whatever the number of inputs and outputs. `tensorgrad.grad` has the opposite price.

    Args:
        f: returns a tensor of floats, or a tree of them: nested dictionaries, lists, tuples and
            modules.
        primals: the arguments of f, a tuple of trees. A module is an argument by its parameters
            that require a gradient.
        tangents: one for each primal, of the same structure, shapes and dtypes. For a module it may
            be a dictionary of tensors by the names of the parameters.
        has_aux: f returns a pair, of what is differentiated and anything else.

    Returns:
        y and dy, of one structure; with `has_aux` y, dy and what f returned beside y. dy is zero
        where f does not depend on the primals. Gradients flow through both, to tensors that require
        them, unless under `no_grad`.

    Raises:
        ArgumentError: f is not a function, or the structure of the tangents differs.
        GradError: f returns what is not a tensor; an op in f has no tangent; f calls `backward`.
        DtypeError: a primal or a result does not hold floats, or a tangent has another dtype.
        ShapeError: a tangent has another shape than its primal.
        DeviceError: a tangent is on another device than its primal.

    Example:
        >>> x, t = tg.tensor([1.0, 2.0]), tg.tensor([1.0, 0.0])
        >>> tg.jvp(lambda x: x * x.sum(), (x,), (t,))
        (tensor([3., 6.], dtype=float32), tensor([4., 2.], dtype=float32))
    """
    check_flag("jvp", "has_aux", has_aux)
    y, dy, aux = _forward("jvp", f, primals, tangents, has_aux)
    return (y, dy, aux) if has_aux else (y, dy)


def _forward(
    op: str, f: Callable[..., Any], primals: Any, tangents: Any, has_aux: bool = False
) -> tuple[Any, Any, Any]:
    """Return f(*primals), its tangent, and its aux."""
    inputs, directions = _along(op, f, primals, tangents)
    level, (result, aux) = run_along(
        lambda *duals: _with_aux(op, f(*inputs.tree.build(duals)), has_aux),
        inputs.tensors,
        directions,
    )
    outputs = _outputs(op, result)
    ys, dys = zip(*[_parted(y, level) for y in outputs.tensors], strict=True)
    aux = trees.mapped(lambda x: _parted(x, level)[0], aux)
    return outputs.tree.build(ys), outputs.tree.build(dys, "results"), aux


def _along(
    op: str, f: Callable[..., Any], primals: Any, tangents: Any
) -> tuple[_Leaves, list[Tensor]]:
    """Return arguments and their tangents, checked."""
    check_function(op, f)
    primals, tangents = _several(op, "primals", primals), _several(op, "tangents", tangents)
    _check_count(op, tangents, primals)
    inputs = _inputs(op, [f"primals[{i}]" for i in range(len(primals))], primals)
    return inputs, inputs.beside("tangents", tangents)


def _check_count(op: str, tangents: Sequence[Any], primals: Sequence[Any]) -> None:
    if len(primals) != len(tangents):
        raise ArgumentError(
            f"{op}: tangents holds {len(tangents)}, expected {len(primals)}, one for each primal"
        )


def _parted(y: Tensor, level: object) -> tuple[Tensor, Tensor]:
    """Return a result of a function that jvp has run, and its tangent."""
    known = dict(tangents_of(y))
    t = known.pop(level, None)
    if not mode.grad_enabled:
        return y.detach(), _zeros(y) if t is None else t.detach()
    if t is not None:
        y = Tensor(y.data, True, y.node)
        y.tangents = known
    t = _zeros(y) if t is None else t
    return second.without_dead_graph(y), second.without_dead_graph(t)


class _RecordedRun:
    """A function that has run with its graph recorded, to go through in both directions.

    Args:
        once: the function returns a scalar, and its graph is gone through once, by `pull`.

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
        once: bool = False,
    ) -> None:
        names = names or [f"primals[{i}]" for i in range(len(primals))]
        self.inputs, self._once = _inputs(op, names, primals), once
        nested = _is_nested()
        self._constant = not nested  # then another derivative of a later call takes y for constant
        marked = nested or not once
        arguments = self.inputs.tree.build(
            [second.as_argument(x) if marked else Tensor(x.data, True) for x in self.inputs.tensors]
        )
        self._edges = [edge_of(x) for x in trees.flatten(arguments)[0]]
        with replaced(
            mode,
            inside_grad=True,
            grad_enabled=True,
            arguments=mode.arguments | {*self._edges},
            forward=reversible() if nested else None,
        ):
            result, aux = _with_aux(op, f(*arguments), has_aux)
        if once:
            _check_scalar(op, result)
        self.outputs = _outputs(op, result)
        self.y: Any = self.outputs.tree.build([_outside(y) for y in self.outputs.tensors])
        self.aux: Any = trees.mapped(_outside, aux)

    def pull(self, dys: Sequence[Tensor | None]) -> list[Tensor]:
        """Return J^T dy for each argument; a dy of None is zero."""
        pairs = zip(self.outputs.tensors, dys, strict=True)
        seeds = [(y, dy) for y, dy in pairs if dy is not None]
        grads: list[Tensor | None]
        if _is_nested():
            grads = second.gradients_of_results(seeds, self._edges, self._constant)
        else:
            with replaced(mode, forward=None):
                plain = [(y, dy.data) for y, dy in seeds]
                arrays = second.array_gradients(plain, self._edges, not self._once)
            grads = [
                None if g is None else Tensor(cast(g, x.dtype))
                for g, x in zip(arrays, self.inputs.tensors, strict=True)
            ]
        return [
            _zeros(x) if g is None else _outside(g)
            for g, x in zip(grads, self.inputs.tensors, strict=True)
        ]

    def gradient(self) -> list[Tensor]:
        """Return the gradient of a scalar for each argument."""
        (y,) = self.outputs.tensors
        return self.pull([Tensor(namespace(y.data).ones_like(y.data))])

    def push(self, tangents: Sequence[Tensor | None]) -> list[Tensor]:
        """Return J t for each output; a t of None is zero."""
        modes = {"autocast": None} if _is_nested() else {"grad_enabled": False, "forward": None}
        with replaced(mode, **modes):
            ys = self.outputs.tensors
            ts = second.tangents_along(ys, self._edges, tangents, self._constant)
        return [_zeros(y) if t is None else _outside(t) for t, y in zip(ts, ys, strict=True)]


def _run_by(
    op: str, f: Callable[..., Any], argnums: Any, args: Any, kwargs: Any, **options: Any
) -> tuple[_RecordedRun, Callable[..., Any]]:
    """Run f, to be differentiated by the arguments in `argnums`.

    Returns:
        The run, and a function that returns an argument, or a tuple of several, with other tensors.
    """
    single = isinstance(argnums, int | np.integer)
    indices = [_argument(op, i, len(args)) for i in ((argnums,) if single else argnums)]
    distinct = list(dict.fromkeys(indices))

    def of_chosen(*chosen: Any) -> Any:
        given = dict(zip(distinct, chosen, strict=True))
        return f(*[given.get(i, arg) for i, arg in enumerate(args)], **kwargs)

    def build(tensors: Sequence[Tensor], how: trees.How) -> Any:
        built = dict(zip(distinct, run.inputs.tree.build(tensors, how), strict=True))
        return built[indices[0]] if single else tuple([built[i] for i in indices])

    names = [f"argument {i}" for i in distinct]
    run = _RecordedRun(op, of_chosen, [args[i] for i in distinct], names=names, **options)
    return run, build


def _gradient(
    op: str, f: Callable[..., Any], argnums: Any, has_aux: bool, args: Any, kwargs: Any
) -> tuple[Tensor, Any, Any]:
    """Return the value of f, its gradient by the arguments in `argnums`, and its aux."""
    run, build = _run_by(op, f, argnums, args, kwargs, has_aux=has_aux, once=True)
    return run.y, build(run.gradient(), "results"), run.aux


@overload
def vjp(
    f: Callable[..., _Y], *primals: Tensor, has_aux: Literal[False] = False
) -> tuple[_Y, Callable[[Any], tuple[Tensor, ...]]]: ...
@overload
def vjp(
    f: Callable[..., _Y], *primals: Any, has_aux: Literal[False] = False
) -> tuple[_Y, Callable[[Any], tuple[Any, ...]]]: ...
@overload
def vjp(
    f: Callable[..., tuple[_Y, _Aux]], *primals: Any, has_aux: Literal[True]
) -> tuple[_Y, Callable[[Any], tuple[Any, ...]], _Aux]: ...
def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Return f(*primals) and a function that computes gradients, in reverse mode.

    y = f(x), pullback(dy) = J(x)^T dy

    Args:
        f: returns a tensor of floats, or a tree of them; see `jvp`.
        primals: the arguments of f, trees of tensors.
        has_aux: f returns a pair, of what is differentiated and anything else.

    Returns:
        y; a function of dy, of the structure, shapes and dtypes of y, which returns a tuple of one
        gradient for each primal and may be called again; with `has_aux` what f returned beside y.
        The arrays that the ops of f saved stay as long as the function.

    Raises:
        ArgumentError: f is not a function; when the pullback is called, dy has another structure.
        GradError: f returns what is not a tensor; when the pullback is called, an array that the
            ops of f saved was assigned to.
        DtypeError: a primal or a result does not hold floats, or dy has another dtype.
        ShapeError, DeviceError: dy has another shape, or is on another device.

    Example:
        >>> y, pullback = tg.vjp(lambda a, b: a * b, tg.tensor([1.0, 2.0]), tg.tensor([3.0, 4.0]))
        >>> pullback(tg.tensor([1.0, 10.0]))
        (tensor([ 3., 40.], dtype=float32), tensor([ 1., 20.], dtype=float32))
    """
    check_function("vjp", f)
    check_flag("vjp", "has_aux", has_aux)
    run = _RecordedRun("vjp", f, primals, has_aux)

    def pullback(dy: Any) -> Any:
        grads = run.pull(run.outputs.beside("dy", dy))
        return run.inputs.tree.build(grads, "results")

    return (run.y, pullback, run.aux) if has_aux else (run.y, pullback)


@overload
def linearize(
    f: Callable[..., _Y], *primals: Any, has_aux: Literal[False] = False
) -> tuple[_Y, Callable[..., _Y]]: ...
@overload
def linearize(
    f: Callable[..., tuple[_Y, _Aux]], *primals: Any, has_aux: Literal[True]
) -> tuple[_Y, Callable[..., _Y], _Aux]: ...
def linearize(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Return f(*primals) and a function that computes its derivative along tangents.

    y = f(x), f_jvp(t) = J(x) t

    f runs once. Each call of `f_jvp` computes the tangents of its ops from what these have saved,
    so that several tangents at one point cost less than with `jvp`, and more memory.

    Args:
        f: returns a tensor of floats, or a tree of them; see `jvp`.
        primals: the arguments of f, trees of tensors.
        has_aux: f returns a pair, of what is differentiated and anything else.

    Returns:
        y; a function of one tangent for each primal, which returns dy and may be called again; with
        `has_aux` what f returned beside y.

    Raises:
        ArgumentError: f is not a function; when called, the structure of the tangents differs.
        GradError: f returns what is not a tensor; when called, an op in f has no tangent.
        DtypeError: a primal or a result does not hold floats, or a tangent has another dtype.
        ShapeError, DeviceError: a tangent has another shape, or is on another device.

    Example:
        >>> y, f_jvp = tg.linearize(lambda x: x * x, tg.tensor([1.0, 2.0]))
        >>> f_jvp(tg.tensor([1.0, 0.0])), f_jvp(tg.tensor([0.0, 1.0]))
        (tensor([2., 0.], dtype=float32), tensor([0., 4.], dtype=float32))
    """
    check_function("linearize", f)
    check_flag("linearize", "has_aux", has_aux)
    run = _RecordedRun("linearize", f, primals, has_aux)

    def f_jvp(*tangents: Any) -> Any:
        _check_count("linearize", tangents, primals)
        ts = run.push(run.inputs.beside("tangents", tangents))
        return run.outputs.tree.build(ts, "results")

    return (run.y, f_jvp, run.aux) if has_aux else (run.y, f_jvp)


def hvp(f: Callable[..., Tensor], primals: _Primals, tangents: Sequence[Any]) -> _Primals:
    """Return the product of the Hessian of f with the tangents.

    H(x) t, H_ij = d^2 f / dx_i dx_j

    It is the gradient of the derivative of f along the tangents: reverse over forward mode. The
    Hessian itself is never computed. A product costs about as much time as three gradients, and
    twice the memory of one.

    Args:
        f: returns a tensor with one element.
        primals: the arguments of f, a tuple of trees; see `jvp`.
        tangents: one for each primal, of the same structure, shapes and dtypes. For a module it may
            be a dictionary of tensors by the names of the parameters.

    Returns:
        The product alone, of the structure of the primals.

    Raises:
        ArgumentError: f is not a function, or the structure of the tangents differs.
        GradError: f returns no scalar, or an op in f has no tangent.
        DtypeError: a primal does not hold floats, or a tangent has another dtype.
        ShapeError, DeviceError: a tangent has another shape, or is on another device.

    Source: Pearlmutter 1994, doi:10.1162/neco.1994.6.1.147.

    Example:
        >>> x, t = tg.tensor([1.0, 2.0]), tg.tensor([1.0, 0.0])
        >>> tg.hvp(lambda x: (x**3).sum() + x.sum() ** 2, (x,), (t,))
        (tensor([8., 2.], dtype=float32),)
    """
    return _hessian_product("hvp", f, primals, tangents)  # type: ignore[no-any-return]


def _hessian_product(op: str, f: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    """Return H t: the gradient of the tangent of f."""
    _along(op, f, primals, tangents)

    def along_tangents(*arguments: Any) -> Tensor:
        y, dy, _ = _forward(op, f, arguments, tangents)
        _check_scalar(op, y)
        slope: Tensor = dy
        return slope

    run = _RecordedRun(op, along_tangents, primals, once=True)
    return run.inputs.tree.build(run.gradient(), "results")


def ggnvp(
    f: Callable[..., Any], loss: Callable[[Any], Tensor], primals: _Primals, tangents: Sequence[Any]
) -> _Primals:
    """Return the product of the Gauss-Newton matrix of loss(f(x)) with the tangents.

    J^T H J t, J the Jacobian of f, H the Hessian of loss at f(x)

    For a convex loss the matrix has no negative eigenvalues; for cross entropy of logits it is the
    Fisher matrix.

    Args:
        f: returns a tensor of floats, such as logits, or a tree of them.
        loss: takes what f returns, and returns a tensor with one element.
        primals: the arguments of f, a tuple of trees; see `jvp`.
        tangents: one for each primal, as for `hvp`.

    Returns:
        The product alone, of the structure of the primals.

    Raises:
        ArgumentError: f or loss is not a function, or the structure of the tangents differs.
        GradError: f returns what is not a tensor, or loss no scalar; an op has no tangent.
        DtypeError: a primal does not hold floats, or a tangent has another dtype.
        ShapeError, DeviceError: a tangent has another shape, or is on another device.

    Source: Schraudolph 2002, doi:10.1162/08997660260028683.

    Example:
        >>> x, t = tg.tensor([1.0, 2.0]), tg.tensor([1.0, 1.0])
        >>> tg.ggnvp(lambda x: 3.0 * x, lambda y: (y * y).sum(), (x,), (t,))
        (tensor([18., 18.], dtype=float32),)
    """
    check_function("ggnvp", loss, name="loss")
    _, directions = _along("ggnvp", f, primals, tangents)
    run = _RecordedRun("ggnvp", f, primals)
    dy = run.outputs.tree.build(run.push(directions), "results")
    (product,) = _hessian_product("ggnvp", loss, (run.y,), (dy,))
    grads = run.pull(run.outputs.beside("the product with the Hessian of loss", product))
    return run.inputs.tree.build(grads, "results")  # type: ignore[no-any-return]


@overload
def jacobian(f: _Derivative[Tensor], argnums: Literal[0] = 0) -> _Derivative[Tensor]: ...
@overload
def jacobian(f: Callable[[Tensor], Tensor], argnums: Literal[0] = 0) -> _Derivative[Tensor]: ...
@overload
def jacobian(
    f: Callable[Concatenate[Tensor, Any, ...], Tensor], argnums: Literal[0] = 0
) -> _Derivative[Tensor]: ...
@overload
def jacobian(
    f: Callable[..., Any], argnums: _Index | tuple[_Index, ...] = 0
) -> _Derivative[Any]: ...
def jacobian(f: Callable[..., Any], argnums: _Index | tuple[_Index, ...] = 0) -> _Derivative[Any]:
    """Return a function that computes the Jacobian of f for the arguments in `argnums`.

    J[i, j] = d f(x)[i] / d x[j]

    f runs once. Then each row takes a walk back over its graph, or each column one forward, if the
    inputs have fewer elements than the outputs.

    Args:
        f: returns a tensor of floats, or a tree of them; see `jvp`.
        argnums: index of the positional argument to differentiate by, or a tuple of several.

    Returns:
        A function with the arguments of f. Its result has the structure of what f returns, with the
        structure of the argument in the place of each tensor, or a tuple of several. Its tensors
        have the shape of the output, then that of the input, and the dtype of the input. A module
        counts as a dictionary of its parameters by name.

    Raises:
        ArgumentError: f is not a function; when called, there is no such positional argument.
        GradError: when called, f returns what is not a tensor, or an op has no tangent.
        DtypeError: when called, such an argument or a result does not hold floats.
        MemoryError: when called, the result does not fit into memory; the error says its size.

    Example:
        >>> tg.jacobian(lambda x: x * x.sum())(tg.tensor([1.0, 2.0]))
        tensor([[4., 1.],
                [2., 5.]], dtype=float32)
    """
    return _jacobian("jacobian", f, argnums)


def _jacobian(op: str, f: Callable[..., Any], argnums: Any) -> _Derivative[Any]:
    _check_call(op, f)

    @wraps(f)
    def with_jacobian(*args: Any, **kwargs: Any) -> Any:
        def without_modules(*args: Any, **kwargs: Any) -> Any:
            return trees.without_modules(f(*args, **kwargs))

        run, build = _run_by(op, without_modules, argnums, args, kwargs)
        return run.outputs.tree.build([build(row, "plain") for row in _blocks(op, run)])

    return with_jacobian


def _blocks(op: str, run: _RecordedRun) -> list[list[Tensor]]:
    """Return the Jacobian of each output by each input."""
    inputs, outputs = run.inputs.tensors, run.outputs.tensors
    rows, columns = (sum([x.size for x in tensors]) for tensors in (outputs, inputs))
    _check_fits(op, rows, inputs)
    by_column = columns < rows
    blocks = [[_JacobianBlock(y.shape, x, by_column) for x in inputs] for y in outputs]
    for i, start in enumerate(inputs if by_column else outputs):
        units: list[Tensor | None] = [None] * len(inputs if by_column else outputs)
        for k in range(start.size):
            unit = units[i] = _zeros(start)
            unit.data.reshape(-1)[k] = 1
            slices = run.push(units) if by_column else run.pull(units)
            own = [row[i] for row in blocks] if by_column else blocks[i]
            for block, t in zip(own, slices, strict=True):
                block.put(k, t)
    return [[block.tensor() for block in row] for row in blocks]


def _check_fits(op: str, rows: int, inputs: Sequence[Tensor]) -> None:
    """Raise MemoryError where a Jacobian with this many rows surely does not fit."""
    size, free = rows * sum([x.nbytes for x in inputs]), free_bytes(inputs[0].device)
    if free is not None and size > free:
        columns = sum([x.size for x in inputs])
        instead = "hvp" if op == "hessian" else "jvp or vjp"
        raise MemoryError(
            f"{op}: the result has {rows:,} x {columns:,} elements, {size / 1e9:,.1f} GB, expected "
            f"at most the {free / 1e9:,.1f} GB that are free; {instead} gives products with it"
        )


class _JacobianBlock:
    """The Jacobian of one output by one input, while its rows or columns are computed.

    Args:
        shape: of the output.
        x: a tensor as the input.
        by_column: whether columns are computed.
    """

    def __init__(self, shape: Shape, x: Tensor, by_column: bool) -> None:
        self._array = namespace(x.data).zeros((*shape, *x.shape), x.dtype)
        self._saved = shape, Tensor(x.data), by_column
        self._slices = _slices(self._array, self._saved)
        self._recorded: list[Tensor | None] = [None] * len(self._slices)

    def put(self, k: int, t: Tensor) -> None:
        """Set a row or column."""
        self._slices[k] = t.data.reshape(-1)
        if t.requires_grad:
            self._recorded[k] = t

    def tensor(self) -> Tensor:
        """Return the whole."""
        return record("jacobian", self._array, self._recorded, _block_backward, self._saved)


def _slices(block: Array, saved: Saved) -> Array:
    """Return the rows or columns of a block, flattened."""
    shape, x, by_column = saved
    flat = block.reshape(math.prod(shape), x.size)
    return flat.T if by_column else flat


def _block_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    shape, x, by_column = saved
    return [
        row.reshape(shape if by_column else x.shape) if need else None
        for row, need in zip(_slices(dy, saved), needs, strict=True)
    ]


@tangent_of(_block_backward)
def _block_tangent(op: Op, *given: Tensor | None) -> Tensor:
    block = _JacobianBlock(*op.saved)
    for k, t in enumerate(given):
        if t is not None:
            block.put(k, t)
    return block.tensor()


@overload
def hessian(f: _Derivative[Tensor], argnums: Literal[0] = 0) -> _Derivative[Tensor]: ...
@overload
def hessian(f: Callable[[Tensor], Tensor], argnums: Literal[0] = 0) -> _Derivative[Tensor]: ...
@overload
def hessian(
    f: Callable[Concatenate[Tensor, Any, ...], Tensor], argnums: Literal[0] = 0
) -> _Derivative[Tensor]: ...
@overload
def hessian(
    f: Callable[..., Any], argnums: _Index | tuple[_Index, ...] = 0
) -> _Derivative[Any]: ...
def hessian(f: Callable[..., Any], argnums: _Index | tuple[_Index, ...] = 0) -> _Derivative[Any]:
    """Return a function that computes the Hessian of f for the arguments in `argnums`.

    H[i, j] = d^2 f(x) / d x[i] d x[j]

    It is the Jacobian of the gradient. Each row costs about two gradients; `hvp` multiplies with
    the Hessian without computing it.

    Args:
        f: returns a tensor of floats, as a rule with one element; its shape comes before the axes
            of the Hessian.
        argnums: index of the positional argument to differentiate by, or a tuple of several.

    Returns:
        A function with the arguments of f. Its result has the structure of the argument, or a tuple
        of several, twice: H[a][b] has the shape of argument a, then that of argument b. A module
        counts as a dictionary of its parameters by name.

    Raises:
        ArgumentError: f is not a function; when called, there is no such positional argument.
        GradError: when called, f returns what is not a tensor, or an op has no tangent.
        DtypeError: when called, such an argument does not hold floats.
        MemoryError: when called, the result does not fit into memory; the error says its size.

    Example:
        >>> tg.hessian(lambda x: (x**3).sum() + x.sum() ** 2)(tg.tensor([1.0, 2.0]))
        tensor([[ 8.,  2.],
                [ 2., 14.]], dtype=float32)
    """
    twice = _jacobian("hessian", _jacobian("hessian", f, argnums), argnums)

    @wraps(f)
    def with_hessian(*args: Any, **kwargs: Any) -> Any:
        wanted = (argnums,) if isinstance(argnums, int | np.integer) else argnums
        indices = sorted({_argument("hessian", i, len(args)) for i in wanted})
        names = [f"argument {i}" for i in indices]
        inputs = _inputs("hessian", names, [args[i] for i in indices]).tensors
        _check_fits("hessian", sum([x.size for x in inputs]), inputs)
        return twice(*args, **kwargs)

    return with_hessian


def functional_call(model: Callable[..., _Y], parameters: Any, /, *args: Any, **kwargs: Any) -> _Y:
    """Return model(*args, **kwargs) with other tensors in the place of some parameters or buffers.

    The model does not change: the call is one of a copy, which shares the other parameters and
    buffers with it. Gradients flow to the given tensors.

    Args:
        model: a Module.
        parameters: tensors by name, as `named_parameters` and `named_buffers` give them, in the
            shape of what they replace; or a tuple of several such dictionaries. A parameter with
            several names is replaced under all of them.
        args, kwargs: of the model.

    Returns:
        What the model returns.

    Raises:
        ArgumentError: model is not a Module; it has no such name; or names that share a parameter
            have different tensors.
        ShapeError, DeviceError: a tensor has another shape, or is on another device.

    Example:
        >>> model, x = tg.nn.Linear(2, 1), tg.tensor([[1.0, 2.0]])
        >>> weights = {"weight": tg.tensor([[3.0, 4.0]]), "bias": tg.tensor([0.5])}
        >>> tg.functional_call(model, weights, x)
        tensor([[11.5]], dtype=float32)
        >>> tg.grad(lambda w: tg.functional_call(model, w, x).sum())(weights)["weight"]
        tensor([[1., 2.]], dtype=float32)
    """
    call = getattr(type(model), "_with_named", None)
    if call is None:
        kind = type(model).__name__
        raise ArgumentError(f"functional_call: model is a {kind}, expected a Module")
    result: _Y = call(model, "functional_call", parameters)(*args, **kwargs)
    return result
