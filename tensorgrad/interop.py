"""Memory shared with other libraries. Tests: tests/test_interop.py.

A Tensor speaks the DLPack and NumPy array protocols, so `torch.from_dlpack(tensor)`,
`cupy.from_dlpack(tensor)` and `numpy.asarray(tensor)` read its memory without a copy.
`from_dlpack` is the way back.
"""

from __future__ import annotations

from typing import Any

from tensorgrad import dlpack
from tensorgrad.tensor import Tensor


def from_dlpack(x: Any) -> Tensor:
    """Return a tensor on the memory of an array of another library, without a copy.

    What one side writes the other reads. Read-only memory gives a tensor that rejects assignment.

    Args:
        x: an object with `__dlpack__`: of PyTorch, CuPy, JAX, NumPy, ... on the CPU or a GPU.

    Raises:
        DtypeError: x does not speak DLPack, or its dtype is none of the library's.
        DeviceError: x is neither on the CPU nor on a CUDA GPU, or CuPy is missing.
    """
    return Tensor(dlpack.from_dlpack(x))
