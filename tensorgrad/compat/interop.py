"""Memory shared with other libraries, and gradients with PyTorch.

Tests: tests/compat/test_interop.py.

A Tensor speaks the DLPack and NumPy array protocols, so `torch.from_dlpack(tensor)`,
`cupy.from_dlpack(tensor)` and `numpy.asarray(tensor)` read its memory without a copy.
`from_dlpack` is the way back.

A function of one library becomes a function of the other, with its gradients:

    from tensorgrad.compat import interop

    norm = interop.as_torch_function(tg.rms_norm)  # call it in a PyTorch model
    conv = interop.from_torch_function(torch.nn.Conv1d(8, 8, 3))  # call it on our tensors

Nothing here imports PyTorch before one of them is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import numpy as np

from tensorgrad.autograd.second import hand_out
from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.compat import dlpack
from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.checks import check_flag, check_function
from tensorgrad.core.errors import ArgumentError, DtypeError, GradError
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.modes import mode, replaced
from tensorgrad.core.record import record
from tensorgrad.core.tensor import Tensor


def from_dlpack(x: Any, *, device: str | None = None, copy: bool | None = None) -> Tensor:
    """Return a tensor on the memory of an array of another library, without a copy.

    What one side writes the other reads. Read-only memory gives a tensor that rejects assignment.

    Args:
        x: an object with `__dlpack__`: of PyTorch, CuPy, JAX, NumPy, ... on the CPU or a GPU.
        device: where to move the tensor; default: where x is.
        copy: True copies, False raises an error where moving it needs a copy.

    Returns:
        A tensor of the same shape and dtype, without a gradient.

    Raises:
        ArgumentError: a copy is needed.
        DtypeError: x does not speak DLPack, or its dtype is none of the library's.
        DeviceError: x is neither on the CPU nor on a CUDA GPU, or CuPy is missing.

    Example:
        >>> x = np.arange(3.0)
        >>> y = tg.from_dlpack(x)
        >>> x[0] = 7
        >>> y
        tensor([7., 1., 2.], dtype=float64)
    """
    if copy is not None:
        check_flag("from_dlpack", "copy", copy)
    array = dlpack.from_dlpack(x)
    moved = array if device is None else backend.to_device(array, device)
    if copy is False and moved is not array:
        raise ArgumentError("from_dlpack: copy is False, expected the device of x")
    return Tensor(moved.copy() if copy and moved is array else moved)


def as_torch_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of PyTorch's tensors that computes with a function of ours, differentiably.

    Tensors are handed over without a copy, through DLPack; other arguments as they are. Backward
    in PyTorch also adds to the `grad` of the parameters that the function uses, such as those of
    a `tensorgrad.nn` module. A gradient is recorded where PyTorch records one; backward through the
    results runs once, and they cannot be differentiated twice.

    Args:
        function: takes tensors of ours, and returns one or a tuple or list of them. It may be a
            module.

    Returns:
        A function that takes PyTorch tensors and returns one, or a tuple.

    Raises:
        ArgumentError: `function` is none, or PyTorch is not installed.
        DtypeError: when called, the function returns something else, or a dtype is unknown to us.
        DeviceError: when called, a tensor is neither on the CPU nor on a CUDA GPU.
    """
    check_function("as_torch_function", function)
    torch = _torch("as_torch_function")
    op = _torch_op()

    @wraps(function, updated=())
    def call(*args: Any) -> Any:
        # An input that wants a gradient, so that backward comes here for the sake of parameters.
        anchor = torch.empty(0, requires_grad=torch.is_grad_enabled())
        results = op.apply(function, anchor, *args)
        return results if len(results) > 1 else results[0]

    return call


def from_torch_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of our tensors that computes with a function of PyTorch's, differentiably.

    Tensors are handed over without a copy, through DLPack; other arguments as they are. Backward
    also adds to the `grad` of PyTorch's parameters that the function uses. A gradient is recorded
    unless `no_grad` is on.

    Args:
        function: takes PyTorch tensors, and returns one or a tuple or list of them. It may be a
            `torch.nn.Module`.

    Returns:
        A function that takes tensors of ours and returns one, or a tuple.

    Raises:
        ArgumentError: `function` is none, or PyTorch is not installed.
        DtypeError: when called, the function returns something else, or a dtype is unknown to us.
        DeviceError: when called, a result is neither on the CPU nor on a CUDA GPU.
    """
    check_function("from_torch_function", function)
    torch = _torch("from_torch_function")
    name = f"from_torch_function({getattr(function, '__name__', type(function).__name__)})"

    @wraps(function, updated=())
    def call(*args: Any) -> Any:
        tensors = [argument for argument in args if isinstance(argument, Tensor)]
        leaves = [_torch_leaf(torch, tensor) for tensor in tensors]
        ours = iter(leaves)
        given = [next(ours) if isinstance(argument, Tensor) else argument for argument in args]
        with torch.set_grad_enabled(mode.grad_enabled):
            result = function(*given)
        results = _several(name, result, torch.Tensor, "PyTorch tensors")
        arrays = tuple(dlpack.from_dlpack(result.detach()) for result in results)
        # Backward comes here for the sake of PyTorch's parameters too.
        wants = any(result.requires_grad for result in results)
        inputs = [*tensors, Tensor(np.zeros(0), requires_grad=True)] if wants else []
        outputs = record(name, arrays, inputs, _torch_backward, (results, leaves))
        return outputs if len(results) > 1 else outputs[0]

    return call


def _torch_backward(dys: list[Array | None], saved: Saved, needs: Needs) -> Gradients:
    """Return the gradients of the inputs of a PyTorch function; its parameters get theirs."""
    torch = _torch("from_torch_function")
    results, leaves = saved
    pairs = [
        (y, torch.from_dlpack(Tensor(dy)).to(y.dtype))
        for y, dy in zip(results, dys, strict=True)
        if dy is not None and y.requires_grad
    ]
    torch.autograd.backward([y for y, _ in pairs], [dy for _, dy in pairs])
    grads = (None if leaf.grad is None else dlpack.from_dlpack(leaf.grad) for leaf in leaves)
    return (*grads, None)


@tangent_of(_torch_backward)
def _torch_tangent(op: Op, *tangents: Tensor | None) -> None:
    raise GradError(
        f"{op.node.name}: the function of PyTorch has gradients and no tangent, expected one of "
        "ours for this derivative; a tensorgrad.Function with a jvp can call it"
    )


def _torch_leaf(torch: Any, tensor: Tensor) -> Any:
    """Return a PyTorch tensor on the memory of ours, that holds its gradient where it wants one."""
    leaf = torch.from_dlpack(tensor.detach())
    return leaf.requires_grad_(tensor.requires_grad and mode.grad_enabled)


@cache
def _torch_op() -> Any:
    """Return the `torch.autograd.Function` that calls a function of ours."""
    torch = _torch("as_torch_function")

    class TensorgradFunction(torch.autograd.Function):  # type: ignore[misc,name-defined]
        @staticmethod
        def forward(ctx: Any, function: Any, anchor: Any, *args: Any) -> Any:
            ctx.leaves = [
                _leaf(argument, wanted) if isinstance(argument, torch.Tensor) else None
                for argument, wanted in zip(args, ctx.needs_input_grad[2:], strict=True)
            ]
            given = (
                argument if leaf is None else leaf
                for leaf, argument in zip(ctx.leaves, args, strict=True)
            )
            with replaced(mode, grad_enabled=ctx.needs_input_grad[1]):
                result = function(*given)
            ctx.outputs = _several("as_torch_function", result, Tensor, "tensors")
            results = tuple(torch.from_dlpack(output.detach()) for output in ctx.outputs)
            pairs = zip(results, ctx.outputs, strict=True)
            ctx.mark_non_differentiable(*(result for result, y in pairs if not y.requires_grad))
            ctx.set_materialize_grads(False)
            return results

        @staticmethod
        @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
        def backward(ctx: Any, *dys: Any) -> Any:
            if ctx.outputs is None:
                raise GradError(
                    "as_torch_function: backward came a second time, expected once: the first "
                    "frees the graph; call the function again"
                )
            arrays = [None if dy is None else dlpack.from_dlpack(dy) for dy in dys]
            _backward_from(ctx.outputs, arrays)
            ctx.outputs = None
            grads = [None if leaf is None else leaf.grad for leaf in ctx.leaves]
            found = (
                None if gradient is None else torch.from_dlpack(Tensor(gradient))
                for gradient in grads
            )
            return (None, None, *found)

    return TensorgradFunction


def _leaf(tensor: Any, wanted: bool) -> Tensor:
    """Return a tensor of ours on the memory of PyTorch's."""
    array = dlpack.from_dlpack(tensor.detach())
    return Tensor(array, requires_grad=wanted)


def _backward_from(outputs: Sequence[Tensor], dys: Sequence[Array | None]) -> None:
    """Add the gradients of several outputs at once to the leaves."""
    pairs = [(y, dy) for y, dy in zip(outputs, dys, strict=True) if dy is not None]
    with replaced(mode, grad_enabled=True):
        end = record("as_torch_function", np.zeros(()), [y for y, _ in pairs],
                     hand_out, tuple(dy for _, dy in pairs))  # fmt: skip
    end.backward()


def _several(name: str, result: Any, kind: type, words: str) -> tuple[Any, ...]:
    """Return the result of a function as a tuple of tensors; raise DtypeError where it is none."""
    results = tuple(result) if isinstance(result, tuple | list) else (result,)
    wrong = [type(result).__name__ for result in results if not isinstance(result, kind)]
    if wrong or not results:
        got = wrong[0] if wrong else type(result).__name__
        raise DtypeError(f"{name}: the function returned {got}, expected {words}")
    return results


def _torch(op: str) -> Any:
    """Return the module torch."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise ArgumentError(f"{op}: PyTorch is not installed; run `pip install torch`") from error
