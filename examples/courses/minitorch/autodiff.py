"""Variables and functions: the graph is minitorch's, the gradients are tensorgrad's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorgrad as tg

__all__ = [
    "Computed", "Context", "Function", "History", "Variable", "backpropagate", "central_difference",
    "function", "topological_sort",
]  # fmt: skip

_ids = itertools.count()


class Context:
    """The values that the forward of a function saves for its backward."""

    def __init__(self, no_grad: bool = False) -> None:
        self.no_grad = no_grad
        self.saved_values: tuple[Any, ...] = ()

    def save_for_backward(self, *values: Any) -> None:
        """Keep values, unless no gradient is wanted."""
        if not self.no_grad:
            self.saved_values = values

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The saved values."""
        return self.saved_values


@dataclass
class History:
    """The function call that made a variable; a leaf has none."""

    last_fn: type[Function] | None = None
    ctx: Context | None = None
    inputs: Sequence[Variable] = ()


class Variable:
    """A node of the graph: the base of Scalar and Tensor.

    Args:
        history: None for a constant, which needs no gradient.
        name: for messages; default: its id.

    Attributes:
        unique_id: a number that no other variable has.
        grad: the gradient of a leaf after `backward`, otherwise None.
    """

    value: tg.Tensor

    def __init__(self, history: History | None, name: str | None) -> None:
        self.unique_id = next(_ids)
        self.history = history
        self.grad: Any = None
        self.name = str(self.unique_id) if name is None else name

    def _wrap(self, value: tg.Tensor) -> Any:
        """Return a constant of the same kind."""
        raise NotImplementedError

    def _fit(self, gradient: Any) -> Any:
        """Return a gradient in the form in which this variable accumulates it."""
        raise NotImplementedError

    def detach(self) -> Any:
        """Return a constant with the same values."""
        return self._wrap(self.value)

    def requires_grad_(self, x: bool) -> None:
        """Make the variable a leaf. As in minitorch, False does so too."""
        self.history = History()

    def requires_grad(self) -> bool:
        """Return whether backward reaches the variable."""
        return self.history is not None

    def zero_grad_(self) -> None:
        """Forget the gradient."""
        self.grad = None

    def accumulate_derivative(self, x: Any) -> None:
        """Add to the gradient of a leaf."""
        assert self.is_leaf(), "only leaves have gradients"
        self.grad = x if self.grad is None else self.grad + x

    def is_leaf(self) -> bool:
        """Return whether the variable wants a gradient and no function made it."""
        return self.history is not None and self.history.last_fn is None

    def is_constant(self) -> bool:
        """Return whether the variable has no history."""
        return self.history is None

    @property
    def parents(self) -> Iterable[Any]:
        """The inputs of the function that made the variable."""
        assert self.history is not None
        return self.history.inputs

    def chain_rule(self, d_output: Any) -> Iterable[tuple[Any, Any]]:
        """Return each parent with its gradient, given that of this variable."""
        assert self.history is not None
        assert self.history.last_fn is not None
        gradients = self.history.last_fn.backward(self.history.ctx, self._fit(d_output))
        if not isinstance(gradients, tuple):
            gradients = (gradients,)
        pairs = zip(self.parents, gradients, strict=True)
        return [(parent, parent._fit(gradient)) for parent, gradient in pairs]


class Function:
    """A function of variables: subclasses have static methods `forward` and `backward`."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]

    @classmethod
    def apply(cls, *vals: Any, **options: Any) -> Any:
        """Return the result for variables, with its history; other arguments are handed on."""
        inputs = [v for v in vals if isinstance(v, Variable)]
        constant = all(v.is_constant() for v in inputs)
        ctx = Context(no_grad=constant)
        raw = [v.detach() if isinstance(v, Variable) else v for v in vals]
        result = cls.forward(ctx, *raw, **options)
        result.history = None if constant else History(cls, ctx, inputs)
        return result


class Computed(Function):
    """A function of variables that tensorgrad computes.

    Attributes:
        compute: takes tensors of tensorgrad in place of the variables.
    """

    compute: Callable[..., tg.Tensor]

    @classmethod
    def forward(cls, ctx: Context, *vals: Any, **options: Any) -> Any:
        """Return the result."""
        inputs = [v for v in vals if isinstance(v, Variable)]
        leaves = [v.value.detach().requires_grad_(not ctx.no_grad) for v in inputs]
        remaining = iter(leaves)
        args = [next(remaining) if isinstance(v, Variable) else v for v in vals]
        output = cls.compute(*args, **options)
        ctx.save_for_backward(output, leaves)
        return inputs[0]._wrap(output)

    @classmethod
    def backward(cls, ctx: Context, grad_output: Any) -> tuple[Any, ...]:
        """Return the gradient of each variable, zeros where the output does not depend on it."""
        output, leaves = ctx.saved_values
        if output.requires_grad:
            dy = tg.asarray(getattr(grad_output, "value", grad_output), output.dtype)
            output.backward(dy, retain_graph=True)
        wrap = getattr(grad_output, "_wrap", float)
        grads = [wrap(tg.zeros_like(x) if x.grad is None else tg.Tensor(x.grad)) for x in leaves]
        for x in leaves:
            x.grad = None
        return tuple(grads)


def function(compute: Callable[..., tg.Tensor]) -> type[Computed]:
    """Return the function of variables that computes with a function of tensorgrad's tensors."""
    return type("Computed", (Computed,), {"compute": staticmethod(compute)})


def central_difference(
    f: Callable[..., Any], *vals: Any, arg: int = 0, epsilon: float = 1e-6
) -> Any:
    """Return (f(x + epsilon) - f(x - epsilon)) / (2 epsilon), x the argument number `arg`."""
    ends = (f(*vals[:arg], vals[arg] + step, *vals[arg + 1 :]) for step in (epsilon, -epsilon))
    return (next(ends) - next(ends)) / (2 * epsilon)


def topological_sort(variable: Variable) -> list[Any]:
    """Return the variables without constants, each before its parents, `variable` first."""
    finished: list[Any] = []
    seen: set[int] = set()
    stack: list[tuple[Any, bool]] = [(variable, False)]
    while stack:
        current, parents_done = stack.pop()
        if parents_done:
            finished.append(current)
        elif not current.is_constant() and current.unique_id not in seen:
            seen.add(current.unique_id)
            stack.append((current, True))
            stack.extend((parent, False) for parent in current.parents)
    return finished[::-1]


def backpropagate(variable: Variable, deriv: Any) -> None:
    """Add the derivatives of `variable`, times `deriv`, to the leaves."""
    derivatives = {variable.unique_id: deriv}
    for current in topological_sort(variable):
        d_output = derivatives.pop(current.unique_id)
        if current.is_leaf():
            current.accumulate_derivative(d_output)
            continue
        for parent, d_parent in current.chain_rule(d_output):
            if not parent.is_constant():
                total = derivatives.get(parent.unique_id)
                derivatives[parent.unique_id] = d_parent if total is None else total + d_parent
