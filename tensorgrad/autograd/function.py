"""Ops of one's own: a forward, a backward, and what one saves for the other.

The class is that of `torch.autograd.Function`. Tests: tests/autograd/test_function.py.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tensorgrad.amp import Casts
from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.core.arrays import cast
from tensorgrad.core.backend import Array, Shape, device_of, is_numpy, namespace
from tensorgrad.core.dtypes import Dtype, is_float
from tensorgrad.core.errors import ArgumentError, DeviceError, DtypeError, GradError, ShapeError
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.modes import mode, replaced
from tensorgrad.core.record import record
from tensorgrad.core.tensor import Tensor


class Function:
    """Define an op by its forward and its backward, as with `torch.autograd.Function`.

    Subclass it and call `apply`. Neither method is recorded, whatever ops it calls. Backward has
    the autocast of forward. With a third method, `jvp`, which is recorded, the op has derivatives
    of every kind: `jvp`, and gradients of gradients.

    Example:
        >>> class Cube(tg.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x * x
        ...
        ...     @staticmethod
        ...     def backward(ctx, dy):
        ...         (x,) = ctx.saved_tensors
        ...         return 3 * x * x * dy
        >>> x = tg.tensor([1.0, 2.0], requires_grad=True)
        >>> Cube.apply(x).sum().backward()
        >>> x.grad
        array([ 3., 12.], dtype=float32)
    """

    def __init__(self) -> None:
        name = type(self).__name__
        raise ArgumentError(f"{name}: got a call of the class, expected {name}.apply(...)")

    @staticmethod
    def forward(*args: Any, **kwargs: Any) -> Any:
        """Return a tensor, or a tuple or list of tensors, given a `Context` and the arguments.

        Args:
            args: the context, then what `apply` was given: tensors and anything else.
        """
        raise NotImplementedError

    @staticmethod
    def backward(*args: Any, **kwargs: Any) -> Any:
        """Return one gradient for each argument of forward, a tuple where there are several.

        A gradient is a tensor of the argument's shape; or None, for an argument that is not a
        tensor, needs no gradient, or has a gradient of zero.

        Args:
            args: the context, then the gradient of each result of forward, of its shape and dtype;
                zeros for a result that nothing depends on. They must not be assigned to.
        """
        raise NotImplementedError

    @staticmethod
    def jvp(*args: Any) -> Any:
        """Return the tangent of each result of forward, a tuple where there are several; optional.

        In ops, which are recorded: derivatives beyond the first differentiate them. The inputs and
        results of forward in `ctx.saved_tensors` have their history there; what forward computed
        from them beside the results has none, and counts as constant.

        Args:
            args: the context, then for each argument of forward the tangent, a tensor of its shape
                and dtype; None for one that is not a tensor, or is constant.

        Returns:
            A tensor of the shape of the result, or None for a result that is constant.

        Example:
            >>> class Cube(tg.Function):
            ...     @staticmethod
            ...     def forward(ctx, x):
            ...         ctx.save_for_backward(x)
            ...         return x * x * x
            ...
            ...     @staticmethod
            ...     def jvp(ctx, t):
            ...         (x,) = ctx.saved_tensors
            ...         return 3 * x * x * t
            >>> tg.jvp(Cube.apply, (tg.tensor([2.0]),), (tg.tensor([1.0]),))
            (tensor([8.], dtype=float32), tensor([12.], dtype=float32))
        """
        raise NotImplementedError

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Return what forward returns, as tensors through which gradients flow to the arguments.

        A result that does not hold floats has no gradient.

        Args:
            args: of forward. Tensors inside of lists or other objects get no gradient.

        Raises:
            DtypeError: forward returns something other than tensors. In backward: a gradient is
                not a tensor of floats.
            GradError: in backward, the number of gradients is not that of the arguments.
            ShapeError: in backward, a gradient has another shape than its argument.
            DeviceError: in backward, a gradient is on another device than its argument.
            GradError: in a derivative beyond the first, or in forward mode, the op has no `jvp`, or
                that returned another number of tangents than there are results.
        """
        ctx = Context(cls, args)
        with replaced(mode, grad_enabled=False):
            result = cls.forward(ctx, *args)
        outputs = ctx._results_of(result)
        inputs = [argument if isinstance(argument, Tensor) else None for argument in args]
        saved = [tensor.data for tensor in ctx.saved_tensors if tensor is not None]
        several = isinstance(result, tuple | list)
        data: Any = tuple([y.data for y in outputs]) if several else outputs[0].data
        ys: Any = record(cls.__name__, data, inputs, _backward, (ctx, *saved))
        given = [y if is_float(y.dtype) else Tensor(y.data) for y in (ys if several else (ys,))]
        return tuple(given) if several else given[0]


class Context:
    """The context that forward keeps for backward; other attributes may be set too.

    Attributes:
        needs_input_grad: for each argument of forward whether its gradient is wanted.
        saved_tensors: what forward gave to `save_for_backward`.
    """

    def __init__(self, op: type[Function], args: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(
            [isinstance(x, Tensor) and x.requires_grad and mode.grad_enabled for x in args]
        )
        self.saved_tensors: tuple[Any, ...] = ()  # Any, not Tensor | None: most are tensors
        self._op, self._arguments = op, args
        self._saved: Sequence[Tensor | None] = ()
        self._places: list[tuple[bool, int] | None] = []  # whether each is an input; its index
        self._inputs = [
            (x.shape, device_of(x.data)) if isinstance(x, Tensor) else None for x in args
        ]
        self._results: list[tuple[Shape, Dtype]] = []
        self._autocast: Casts | None = mode.autocast

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for backward, which raises an error if one is assigned to before it runs.

        Raises:
            DtypeError: one is neither a tensor nor None; set other values as attributes.
        """
        for tensor in tensors:
            if tensor is not None and not isinstance(tensor, Tensor):
                kind = type(tensor).__name__
                raise DtypeError(
                    f"{self._op.__name__}: save_for_backward got a {kind}, expected tensors; set "
                    "another value as an attribute of ctx"
                )
        self._saved = tensors
        self.saved_tensors = tuple([None if x is None else Tensor(x.data) for x in tensors])

    if TYPE_CHECKING:  # attributes that an op sets

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def _results_of(self, result: Any) -> Sequence[Tensor]:
        """Return what forward returned as a sequence, checked."""
        outputs = result if isinstance(result, tuple | list) else (result,)
        wrong = [type(y).__name__ for y in outputs if not isinstance(y, Tensor)]
        if wrong or not outputs:
            got = wrong[0] if wrong else f"an empty {type(result).__name__}"
            raise DtypeError(f"{self._op.__name__}.forward returned {got}, expected tensors")
        self._results = [(y.shape, y.dtype) for y in outputs]
        places = {id(y): (False, i) for i, y in enumerate(outputs)}
        places |= {id(x): (True, i) for i, x in enumerate(self._arguments)}
        self._places = [places.get(id(x)) for x in self._saved]
        self._arguments = self._saved = ()
        return outputs

    def _with_history(self, op: Op) -> Context:
        """Return a context whose saved inputs and results are tensors with a history."""
        ctx = copy.copy(self)
        tensors = list(self.saved_tensors)
        for i, place in enumerate(self._places):
            if place is not None and tensors[i] is not None:
                is_input, index = place
                array = tensors[i].data
                tensors[i] = op.input(index, array) if is_input else op.output(array, index)
        ctx.saved_tensors = tuple(tensors)
        return ctx


def _backward(dys: Any, saved: Saved, needs: Needs) -> Gradients:
    """Return the gradients that the backward of a Function computes."""
    ctx: Context = saved[0]
    each = dys if isinstance(dys, list) else [dys]
    like = next(dy for dy in each if dy is not None)
    given = [
        namespace(like).zeros(shape, dtype) if dy is None else _read_only(cast(dy, dtype))
        for dy, (shape, dtype) in zip(each, ctx._results, strict=True)
    ]
    with replaced(mode, grad_enabled=False, autocast=ctx._autocast):
        result = ctx._op.backward(ctx, *map(Tensor, given))
    grads = result if isinstance(result, tuple | list) else (result,)
    if len(grads) != len(needs):
        raise GradError(
            f"{ctx._op.__name__}.backward returned {len(grads)} gradients, expected {len(needs)}: "
            "one for each argument of forward, None where there is none"
        )
    return [_gradient(ctx, i, dx) for i, dx in enumerate(grads)]


@tangent_of(_backward)
def _tangent(op: Op, *tangents: Tensor | None) -> Any:
    """Return the tangents that the `jvp` of a Function computes."""
    ctx: Context = op.saved[0]
    name = ctx._op.__name__
    if ctx._op.jvp is Function.jvp:
        raise GradError(
            f"{name}: the op has no tangent, expected a staticmethod {name}.jvp(ctx, *tangents) "
            "for this derivative; it returns the tangents of the results of forward, in ops"
        )
    with replaced(mode, autocast=ctx._autocast):
        result = ctx._op.jvp(ctx._with_history(op), *tangents)
    ts = result if isinstance(result, tuple | list) else (result,)
    if len(ts) != len(ctx._results):
        raise GradError(
            f"{name}.jvp returned {len(ts)} tangents, expected {len(ctx._results)}: one for "
            "each result of forward, None where there is none"
        )
    return [_checked_tangent(ctx, i, t) for i, t in enumerate(ts)]


def _checked_tangent(ctx: Context, index: int, t: Any) -> Tensor | None:
    """Return the tangent of one result, checked; None for one that does not hold floats."""
    shape, dtype = ctx._results[index]
    if t is None or not is_float(dtype):
        return None
    op = f"{ctx._op.__name__}.jvp"
    name = "the tangent" if len(ctx._results) == 1 else f"the tangent of result {index}"
    return _checked(op, name, t, shape)


def _checked(op: str, name: str, x: Any, shape: Shape) -> Tensor:
    """Return a gradient or a tangent, checked."""
    if not isinstance(x, Tensor):
        raise DtypeError(f"{op}: {name} is a {type(x).__name__}, expected a tensor or None")
    if not is_float(x.dtype):
        raise DtypeError(f"{op}: {name} has dtype {x.dtype}, expected a float")
    if x.shape != shape:
        raise ShapeError(f"{op}: {name} has shape {x.shape}, expected {shape}")
    return x


def _read_only(dy: Array) -> Array:
    """Return a view of a gradient, which others may hold too; on the CPU it rejects assignment."""
    dy = dy.view()
    if is_numpy(dy):
        dy.flags.writeable = False
    return dy


def _gradient(ctx: Context, index: int, dx: Any) -> Array | None:
    """Return the gradient of one argument as an array, checked."""
    place = ctx._inputs[index]
    if dx is None or (place is not None and not ctx.needs_input_grad[index]):
        return None
    op = f"{ctx._op.__name__}.backward"
    name = f"the gradient of {_argument(ctx._op, index)}"
    if place is None:
        raise GradError(f"{op}: {name} is a {type(dx).__name__}, expected None: it is not a tensor")
    shape, device = place
    dx = _checked(op, name, dx, shape)
    if dx.device != device:
        raise DeviceError(f"{op}: {name} is on {dx.device}, expected {device}")
    return dx.data.view()  # not given away: the op may hold the array itself


def _argument(op: type[Function], index: int) -> str:
    """Return the name of an argument of forward, or its number where it has none."""
    parameters = list(inspect.signature(op.forward).parameters.values())[1:]
    named = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    return named[index] if index < len(named) else f"argument {index}"
