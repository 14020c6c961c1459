"""The Hessian, Gauss-Newton and Fisher matrices of a model as operators on its parameters.

A vector has the elements of all parameters that require a gradient, in the order of
`named_parameters`. Tests: tests/curvature/test_models.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tensorgrad import graph
from tensorgrad.autograd.functions import ggnvp, hvp
from tensorgrad.core.arrays import cast
from tensorgrad.core.backend import Array, to_device
from tensorgrad.core.dtypes import float32, float64
from tensorgrad.core.errors import ArgumentError, GraphError
from tensorgrad.core.tensor import Tensor
from tensorgrad.curvature.operators import Operator
from tensorgrad.nn import Module, evaluating

__all__ = ["model_fisher", "model_gauss_newton", "model_hessian"]

Batches = Iterable[tuple[Any, ...]]


def model_hessian(model: Module, loss: Callable[..., Tensor], batches: Batches) -> Operator:
    """Return the Hessian of a loss, the mean over batches.

    Args:
        model: the model, in whatever mode: dropout is off.
        loss: `loss(model, *batch)` returns a scalar. It must use the model that it gets, which is
            a copy of the first.
        batches: tuples of arrays, which are kept on the model's device; one or more.

    Returns:
        An operator of the size of all parameters that require a gradient; float64 where these are,
        float32 otherwise. A product takes a Hessian-vector product of each batch.

    Raises:
        ArgumentError: there are no batches, or no parameters that require a gradient.

    Example:
        >>> from tensorgrad.curvature import eigenpairs, model_hessian
        >>> model = tg.nn.Linear(2, 1, bias=False)
        >>> x = np.array([[3.0, 0.0], [0.0, 1.0]], "float32")
        >>> loss = lambda model, x: (model(x) ** 2).mean()
        >>> eigenpairs(model_hessian(model, loss, [(x,)]), k=2).values.round(4)
        array([9., 1.])
    """

    def product(tangents: Any, batch: tuple[Any, ...]) -> Module:
        return hvp(lambda copy: loss(copy, *batch), (model,), (tangents,))[0]

    return _operator("model_hessian", model, batches, product)


def model_gauss_newton(
    model: Module, outputs: Callable[..., Tensor], loss: Callable[..., Tensor], batches: Batches
) -> Operator:
    """Return the generalized Gauss-Newton matrix of a loss, the mean over batches.

    G = J^T H J, where J is the Jacobian of the outputs and H the Hessian of the loss by them. Of
    cross entropy it is the Fisher matrix with targets drawn from the model. It has no negative
    eigenvalues where the loss is convex in the outputs.

    Args:
        model: the model, in whatever mode: dropout is off.
        outputs: `outputs(model, *batch)` returns a tensor, such as logits. It must use the model
            that it gets, which is a copy of the first.
        loss: `loss(outputs, *batch)` returns a scalar.
        batches: as for `model_hessian`.

    Returns:
        An operator as that of `model_hessian`.

    Raises:
        ArgumentError: there are no batches, or no parameters that require a gradient.
    Source: Schraudolph 2002, doi:10.1162/08997660260028683; Martens 2020, arXiv:1412.1193.

    Example:
        >>> from tensorgrad.curvature import model_gauss_newton
        >>> model = tg.nn.Linear(2, 1, bias=False)
        >>> batch = np.eye(2, dtype="float32"), np.zeros((2, 1), "float32")
        >>> operator = model_gauss_newton(
        ...     model, lambda model, x, y: model(x), lambda z, x, y: ((z - y) ** 2).sum(), [batch]
        ... )
        >>> operator(np.ones(2, "float32"))
        array([2., 2.], dtype=float32)
    """

    def product(tangents: Any, batch: tuple[Any, ...]) -> Module:
        return ggnvp(
            lambda copy: outputs(copy, *batch), lambda z: loss(z, *batch), (model,), (tangents,)
        )[0]

    return _operator("model_gauss_newton", model, batches, product)


def model_fisher(model: Module, losses: Callable[..., Tensor], batches: Batches) -> Operator:
    """Return the empirical Fisher matrix, the mean over batches.

    F = mean(g g^T), where g is the gradient of the loss of an example. Where targets are drawn
    from the model, not from data, the matrix is `model_gauss_newton` of the cross entropy.

    Args:
        model: the model, in whatever mode: dropout is off.
        losses: `losses(model, *batch)` returns a tensor of any shape with a negative
            log-likelihood for each example, such as the cross entropy with reduction="none". It
            must use the model that it gets, which is a copy of the first.
        batches: as for `model_hessian`.

    Returns:
        An operator as that of `model_hessian`, without negative eigenvalues.

    Raises:
        ArgumentError: there are no batches, or no parameters that require a gradient.
    Source: on the difference: Kunstner et al. 2019, arXiv:1905.12558.

    Example:
        >>> from tensorgrad.curvature import model_fisher
        >>> model = tg.nn.Linear(2, 1, bias=False)
        >>> x = np.eye(2, dtype="float32")
        >>> operator = model_fisher(model, lambda model, x: model(x), [(x,)])
        >>> operator(np.ones(2, "float32"))
        array([0.5, 0.5], dtype=float32)
    """

    def product(tangents: Any, batch: tuple[Any, ...]) -> Module:
        def half_squares(losses: Tensor) -> Tensor:  # whose Hessian is 1 / examples
            return (losses * losses).sum() / (2 * losses.size)

        return ggnvp(lambda copy: losses(copy, *batch), half_squares, (model,), (tangents,))[0]

    return _operator("model_fisher", model, batches, product)


def _operator(
    op: str, model: Module, batches: Batches, product: Callable[[Any, tuple[Any, ...]], Module]
) -> Operator:
    """Return the mean over batches of products with a model's parameters."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ArgumentError(f"{op}: model has no parameters that require a gradient, expected some")
    device = next(iter(parameters.values())).device
    kept = [tuple(to_device(array, device) for array in batch) for batch in batches]
    if not kept:
        raise ArgumentError(f"{op}: batches is empty, expected one or more")
    size = sum(p.size for p in parameters.values())
    is_wide = all(p.dtype == float64 for p in parameters.values())

    def of_batch(v: Array, *batch: Array) -> Array:
        products = dict(product(_parts(v, parameters), batch).named_parameters())
        each = [cast(products[name].data, v.dtype).reshape(-1) for name in parameters]
        return operator.namespace.concatenate(each)

    run = _captured(of_batch, device)

    def apply(v: Array) -> Array:
        total = operator.namespace.zeros_like(v)
        with evaluating(model):
            for batch in kept:
                total += run(v, *batch)
        total /= v.dtype.type(len(kept))
        return total

    operator = Operator(apply, size, float64 if is_wide else float32, device)
    return operator


def _parts(v: Array, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a vector as a tensor for each parameter."""
    parts, start = {}, 0
    for name, p in parameters.items():
        parts[name] = Tensor(cast(v[start : start + p.size].reshape(p.shape), p.dtype))
        start += p.size
    return parts


def _captured(function: Callable[..., Array], device: str) -> Callable[..., Array]:
    """Return a function that runs as a CUDA graph where that is possible."""
    captured, eager = graph.capture(function, device), False

    def run(*arguments: Array) -> Array:
        nonlocal eager
        if not eager:
            try:
                result: Array = captured(*arguments)
                return result
            except GraphError:
                eager = True
        return function(*arguments)

    return run
