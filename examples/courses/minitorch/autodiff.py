"""Backpropagation over variables: the graph is minitorch's, the gradients are tensorgrad's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import tensorgrad as tg

__all__ = ["Context", "Variable", "backpropagate", "central_difference", "topological_sort"]


class Variable(Protocol):
    """A node of the graph: a Scalar or a Tensor."""

    @property
    def unique_id(self) -> int:
        """A number that no other variable has."""

    def is_leaf(self) -> bool:
        """Whether no function made it."""

    def is_constant(self) -> bool:
        """Whether it needs no derivative."""

    @property
    def parents(self) -> Iterable[Any]:
        """The inputs of the function that made it."""

    def chain_rule(self, d_output: Any) -> Iterable[tuple[Any, Any]]:
        """Return each parent with its derivative, given that of this variable."""

    def accumulate_derivative(self, x: Any) -> None:
        """Add to the derivative of a leaf."""


class Context:
    """What the forward of a function saves for its backward."""

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
            if not current.is_leaf():
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


class Recording:
    """One call of a tensorgrad function, whose gradients tensorgrad computes.

    Args:
        compute: takes tensors of tensorgrad and returns one.
        inputs: its arguments, without a graph of their own.
    """

    def __init__(self, compute: Callable[..., tg.Tensor], inputs: Sequence[tg.Tensor]) -> None:
        self.leaves = [x.detach().requires_grad_() for x in inputs]
        self.output = compute(*self.leaves)

    def gradients(self, dy: tg.Tensor) -> list[tg.Tensor]:
        """Return the gradient of each input, zeros where the output does not depend on it."""
        if self.output.requires_grad:
            self.output.backward(dy, retain_graph=True)
        grads = [tg.zeros_like(x) if x.grad is None else tg.Tensor(x.grad) for x in self.leaves]
        for x in self.leaves:
            x.grad = None
        return grads
