"""NumPy arrays that pass for CuPy's, to see without a GPU what is done with those."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


class GpuArray(np.ndarray[Any, Any]):
    """An array that has what launches ask of CuPy's."""

    device = SimpleNamespace(id=0)  # type: ignore[assignment]  # NumPy has a name there

    @property
    def data(self) -> Any:
        """Where it lies."""
        return SimpleNamespace(ptr=self.ctypes.data)


def on_gpu(array: Any) -> GpuArray:
    """Return the array as one of them."""
    return array.view(GpuArray)  # type: ignore[no-any-return]
