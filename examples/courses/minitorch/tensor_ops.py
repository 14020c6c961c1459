"""Backends: where the tensors of minitorch live, and the functions by minitorch's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorgrad as tg
from minitorch import tensor_functions as functions
from minitorch.autodiff import Computed, Variable, function
from minitorch.operators import EPS
from tensorgrad import backend

__all__ = [
    "CudaKernelOps", "CudaOps", "FastOps", "SimpleBackend", "SimpleOps", "TensorBackend",
    "TensorOps",
]  # fmt: skip

OPS: dict[str, type[Computed]] = {
    "neg_map": functions.Neg,
    "id_map": functions.Copy,
    "inv_map": functions.Inv,
    "log_map": functions.Log,
    "exp_map": functions.Exp,
    "sigmoid_map": functions.Sigmoid,
    "relu_map": functions.ReLU,
    "tanh_map": functions.Tanh,
    "add_zip": functions.Add,
    "mul_zip": functions.Mul,
    "div_zip": functions.Div,
    "lt_zip": functions.LT,
    "eq_zip": functions.EQ,
    "is_close_zip": functions.IsClose,
    "pow_scalar_zip": functions.PowerScalar,
    "relu_back_zip": function(lambda a, d: tg.where(a > 0, d, 0.0 * d)),
    "log_back_zip": function(lambda a, d: d / (a + EPS)),
    "inv_back_zip": function(lambda a, d: -d / (a * a)),
    "add_reduce": functions.Sum,
    "mul_reduce": functions.All,
    "max_reduce": function(lambda a, dim: a.max(axis=dim, keepdims=True)),
    "matrix_multiply": functions.MatMul,
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
        return lambda *args: OPS[name].apply(
            *(arg.detach() if isinstance(arg, Variable) else arg for arg in args)
        )


SimpleBackend = TensorBackend(SimpleOps)
