"""Arrays of the library as tensors of PyTorch, without a copy."""

from __future__ import annotations

from typing import Any

from tensorgrad.dtypes import bfloat16


def to_torch(torch: Any, array: Any) -> Any:
    """Return an array of NumPy or CuPy as a tensor that shares its memory."""
    if array.dtype == bfloat16:  # which DLPack of the array library may not know
        return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(array)
