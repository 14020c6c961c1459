"""Backends: where the tensors of minitorch live. Each op is a function of tensorgrad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorgrad as tg
from minitorch.operators import EPS
from tensorgrad import backend

__all__ = [
    "CudaKernelOps",
    "CudaOps",
    "FastOps",
    "SimpleBackend",
    "SimpleOps",
    "TensorBackend",
    "TensorOps",
]


def _zeros_ones(condition: tg.Tensor, like: tg.Tensor) -> tg.Tensor:
    return condition.astype(like.dtype)


# What `backend.<name>` computes; the functions of `tensor_functions` are made of them.
OPS: dict[str, Callable[..., tg.Tensor]] = {
    "neg_map": lambda a: -a,
    "id_map": lambda a: a.copy(),
    "inv_map": lambda a: 1 / a,
    "log_map": lambda a: tg.log(a + EPS),
    "exp_map": tg.exp,
    "sigmoid_map": tg.sigmoid,
    "relu_map": tg.relu,
    "tanh_map": tg.tanh,
    "add_zip": lambda a, b: a + b,
    "mul_zip": lambda a, b: a * b,
    "div_zip": lambda a, b: a / b,
    "lt_zip": lambda a, b: _zeros_ones(a < b, a),
    "eq_zip": lambda a, b: _zeros_ones(a == b, a),
    "is_close_zip": lambda a, b: _zeros_ones(abs(a - b) < 1e-2, a),
    "pow_scalar_zip": lambda a, b: a**b,
    "relu_back_zip": lambda a, d: tg.where(a > 0, d, 0.0 * d),
    "log_back_zip": lambda a, d: d / (a + EPS),
    "inv_back_zip": lambda a, d: -d / (a * a),
    "add_reduce": lambda a, dim: a.sum(axis=dim, keepdims=True),
    "mul_reduce": lambda a, dim: a.prod(axis=dim, keepdims=True),
    "max_reduce": lambda a, dim: a.max(axis=dim, keepdims=True),
    "matrix_multiply": lambda a, b: a @ b,
}


class TensorOps:
    """The ops of a backend; the subclasses say on which device they run."""

    cuda = False


class SimpleOps(TensorOps):
    """Ops on the CPU, by NumPy."""


class FastOps(TensorOps):
    """Ops on the CPU, by NumPy: the same as SimpleOps."""


class CudaOps(TensorOps):
    """Ops on the GPU, by tensorgrad's kernels; by NumPy on a machine without one."""

    cuda = True


class CudaKernelOps(CudaOps):
    """Ops on the GPU, by tensorgrad's kernels; by NumPy on a machine without one."""


class TensorBackend:
    """The ops of tensors, and where they are computed.

    Args:
        ops: SimpleOps, FastOps, CudaOps or CudaKernelOps.

    Attributes:
        device: tensorgrad's name of the device.
    """

    def __init__(self, ops: type[TensorOps] = SimpleOps) -> None:
        self.ops = ops
        self.cuda = False  # in minitorch: whether numba holds the storage
        self.device = "cuda" if ops.cuda and backend.gpu_count() else "cpu"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a map, zip or reduction by minitorch's name, of tensors that are not recorded."""
        if name not in OPS:
            raise AttributeError(f"TensorBackend has no {name!r}, expected one of {sorted(OPS)}")

        def call(*args: Any) -> Any:
            values = [getattr(arg, "value", arg) for arg in args]
            return args[0]._wrap(OPS[name](*values))

        return call


SimpleBackend = TensorBackend(SimpleOps)
