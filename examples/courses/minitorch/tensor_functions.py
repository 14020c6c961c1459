"""Functions of tensors, whose gradients tensorgrad computes; and how tensors are made."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

import minitorch
import tensorgrad as tg
from minitorch.autodiff import Context, Recording
from minitorch.tensor_data import UserIndex
from minitorch.tensor_ops import OPS, SimpleBackend, TensorBackend

__all__ = [
    "EQ",
    "LT",
    "Add",
    "All",
    "Attn_Softmax",
    "Computed",
    "Copy",
    "Div",
    "Exp",
    "Function",
    "Inv",
    "IsClose",
    "LayerNorm",
    "Log",
    "MatMul",
    "Mul",
    "Neg",
    "Permute",
    "PowerScalar",
    "ReLU",
    "Sigmoid",
    "Sum",
    "Tanh",
    "View",
    "grad_central_difference",
    "grad_check",
    "integer",
    "ones",
    "ones_tensor_from_numpy",
    "rand",
    "tensor",
    "tensor_from_numpy",
    "zeros",
    "zeros_tensor_from_numpy",
]


class Function:
    """A function of tensors: subclasses have static methods `forward` and `backward`."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]

    @classmethod
    def _backward(cls, ctx: Context, grad_out: Any) -> tuple[Any, ...]:
        gradients = cls.backward(ctx, grad_out)
        return gradients if isinstance(gradients, tuple) else (gradients,)

    @classmethod
    def apply(cls, *vals: Any) -> Any:
        """Return the result for tensors, with its history; other arguments are handed on."""
        inputs = [v for v in vals if isinstance(v, minitorch.Tensor)]
        wanted = any(v.requires_grad() for v in inputs)
        ctx = Context(no_grad=not wanted)
        raw = [v.detach() if isinstance(v, minitorch.Tensor) else v for v in vals]
        result = cls.forward(ctx, *raw)
        result.history = minitorch.History(cls, ctx, inputs) if wanted else None
        return result


class Computed(Function):
    """A function of tensors that tensorgrad computes.

    Attributes:
        compute: takes tensors of tensorgrad, then arguments of other types.
    """

    compute: Callable[..., tg.Tensor]

    @classmethod
    def forward(cls, ctx: Context, *vals: Any) -> Any:
        """Return the result."""
        inputs = [v for v in vals if isinstance(v, minitorch.Tensor)]
        options = vals[len(inputs) :]
        values = [v.value for v in inputs]
        if ctx.no_grad:
            return inputs[0]._wrap(cls.compute(*values, *options))
        recording = Recording(lambda *leaves: cls.compute(*leaves, *options), values)
        ctx.save_for_backward(recording)
        return inputs[0]._wrap(recording.output)

    @classmethod
    def backward(cls, ctx: Context, grad_output: Any) -> tuple[Any, ...]:
        """Return the gradient of each tensor."""
        (recording,) = ctx.saved_values
        dy = grad_output.value.astype(recording.output.dtype)
        return tuple(map(grad_output._wrap, recording.gradients(dy)))


def integer(value: Any) -> int:
    """Return an axis or a length, which minitorch also passes as a tensor of one element."""
    return int(value.item() if hasattr(value, "item") else value)


def _integers(values: Any) -> tuple[int, ...]:
    return tuple(map(int, values.numpy() if isinstance(values, tg.Tensor) else values))


class Neg(Computed):
    """-a."""

    compute = staticmethod(OPS["neg_map"])


class Inv(Computed):
    """1 / a."""

    compute = staticmethod(OPS["inv_map"])


class Add(Computed):
    """a + b."""

    compute = staticmethod(OPS["add_zip"])


class Mul(Computed):
    """a b."""

    compute = staticmethod(OPS["mul_zip"])


class Div(Computed):
    """a / b."""

    compute = staticmethod(OPS["div_zip"])


class PowerScalar(Computed):
    """a to the power of one number."""

    compute = staticmethod(OPS["pow_scalar_zip"])


class Tanh(Computed):
    """tanh(a)."""

    compute = staticmethod(OPS["tanh_map"])


class Sigmoid(Computed):
    """1 / (1 + exp(-a))."""

    compute = staticmethod(OPS["sigmoid_map"])


class ReLU(Computed):
    """max(a, 0)."""

    compute = staticmethod(OPS["relu_map"])


class Log(Computed):
    """log(a + 1e-6)."""

    compute = staticmethod(OPS["log_map"])


class Exp(Computed):
    """exp(a)."""

    compute = staticmethod(OPS["exp_map"])


class LT(Computed):
    """1.0 where a < b, otherwise 0.0; its gradients are 0."""

    compute = staticmethod(OPS["lt_zip"])


class EQ(Computed):
    """1.0 where a equals b, otherwise 0.0; its gradients are 0."""

    compute = staticmethod(OPS["eq_zip"])


class IsClose(Computed):
    """1.0 where a and b differ by less than 0.01, otherwise 0.0; its gradients are 0."""

    compute = staticmethod(OPS["is_close_zip"])


class Copy(Computed):
    """A copy in C order."""

    compute = staticmethod(OPS["id_map"])


class MatMul(Computed):
    """The product of matrices, batches of them broadcast."""

    compute = staticmethod(OPS["matrix_multiply"])


class Sum(Computed):
    """The sum over an axis, which stays with length 1."""

    compute = staticmethod(lambda a, dim: OPS["add_reduce"](a, integer(dim)))


class All(Computed):
    """The product over an axis, which stays with length 1."""

    compute = staticmethod(lambda a, dim: OPS["mul_reduce"](a, integer(dim)))


class Permute(Computed):
    """The axes in another order."""

    compute = staticmethod(lambda a, order: tg.transpose(a, _integers(order)))


class View(Computed):
    """Another shape."""

    compute = staticmethod(lambda a, shape: a.reshape(_integers(shape)))


class Attn_Softmax(Computed):
    """softmax(a + mask) over the last axis; the gradient of the mask is 0."""

    compute = staticmethod(lambda a, mask: tg.softmax(a, mask=mask.detach()))


class LayerNorm(Computed):
    """a normalised over its last axis, times gamma, plus beta."""

    compute = staticmethod(lambda a, gamma, beta: tg.layer_norm(a, gamma, beta, eps=1e-8))


def _leaf(value: Any, backend: TensorBackend, requires_grad: bool) -> Any:
    made = minitorch.Tensor(tg.tensor(value, np.float32), backend=backend)
    made.requires_grad_(requires_grad)
    return made


def zeros(shape: tuple[int, ...], backend: TensorBackend = SimpleBackend) -> Any:
    """Return zeros, a constant."""
    return minitorch.Tensor(tg.zeros(shape), backend=backend)


def ones(shape: tuple[int, ...], backend: TensorBackend = SimpleBackend) -> Any:
    """Return ones, a constant."""
    return minitorch.Tensor(tg.ones(shape), backend=backend)


def rand(
    shape: tuple[int, ...], backend: TensorBackend = SimpleBackend, requires_grad: bool = False
) -> Any:
    """Return a leaf of uniform numbers in [0, 1), drawn one by one by Python's `random`."""
    numbers = [random.random() for _ in range(math.prod(shape))]
    return _leaf(np.reshape(numbers, shape), backend, requires_grad)


def tensor(ls: Any, backend: TensorBackend = SimpleBackend, requires_grad: bool = False) -> Any:
    """Return a leaf with the values of nested lists, float32."""
    return _leaf(np.asarray(ls, np.float32), backend, requires_grad)


def tensor_from_numpy(
    ls: Any, backend: TensorBackend = SimpleBackend, requires_grad: bool = False
) -> Any:
    """Return a leaf with the values of an array, float32."""
    return _leaf(ls, backend, requires_grad)


def zeros_tensor_from_numpy(shape: tuple[int, ...], backend: TensorBackend = SimpleBackend) -> Any:
    """Return zeros, a constant."""
    return zeros(shape, backend)


def ones_tensor_from_numpy(shape: tuple[int, ...], backend: TensorBackend = SimpleBackend) -> Any:
    """Return ones, a constant."""
    return ones(shape, backend)


def grad_central_difference(
    f: Callable[..., Any], *vals: Any, arg: int = 0, epsilon: float = 1e-6, ind: UserIndex
) -> float:
    """Return the derivative of the sum of f by one element, from differences in float64."""

    def total(step: float) -> float:
        moved = [v._wrap(v.value.astype(np.float64)) for v in vals]
        moved[arg][ind] = moved[arg].value[tuple(ind)].item() + step
        return float(f(*moved).value.sum())

    return (total(epsilon) - total(-epsilon)) / (2 * epsilon)


def grad_check(f: Callable[..., Any], *vals: Any, tol: float = 1e-6) -> None:
    """Raise AssertionError unless the gradients of f are those of differences."""
    for v in vals:
        v.requires_grad_(True)
        v.zero_grad_()
    f(*vals).sum().backward()
    for i, v in enumerate(vals):
        ind = v._tensor.sample()
        expected = grad_central_difference(f, *vals, arg=i, ind=ind)
        np.testing.assert_allclose(
            v.grad[ind], expected, 1e-2, 1e-2, err_msg=f"grad_check: argument {i}, index {ind}"
        )
