"""The module in which the course has CudaKernelOps."""

from minitorch.tensor_ops import CudaKernelOps

__all__ = ["CudaKernelOps"]
