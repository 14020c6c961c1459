"""Memory shared with other libraries. Tests: tests/test_interop.py.

A Tensor speaks the DLPack and NumPy array protocols, so `torch.from_dlpack(tensor)`,
`cupy.from_dlpack(tensor)` and `numpy.asarray(tensor)` read its memory without a copy.
`from_dlpack` is the way back.
"""

from __future__ import annotations

from typing import Any

from tensorgrad import backend, dlpack
from tensorgrad.errors import ArgumentError
from tensorgrad.tensor import Tensor


def from_dlpack(x: Any, *, device: str | None = None, copy: bool | None = None) -> Tensor:
    """Return a tensor on the memory of an array of another library, without a copy.

    What one side writes the other reads. Read-only memory gives a tensor that rejects assignment.

    Args:
        x: an object with `__dlpack__`: of PyTorch, CuPy, JAX, NumPy, ... on the CPU or a GPU.
        device: where to move the tensor; default: where x is.
        copy: True copies, False raises an error where moving it needs a copy.

    Raises:
        ArgumentError: a copy is needed.
        DtypeError: x does not speak DLPack, or its dtype is none of the library's.
        DeviceError: x is neither on the CPU nor on a CUDA GPU, or CuPy is missing.
    """
    array = dlpack.from_dlpack(x)
    moved = array if device is None else backend.to_device(array, device)
    if copy is False and moved is not array:
        raise ArgumentError("from_dlpack: copy is False, expected the device of x")
    return Tensor(moved.copy() if copy and moved is array else moved)
