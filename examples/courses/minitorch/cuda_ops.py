"""The module in which the course has CudaOps."""

import importlib
from contextlib import suppress

from minitorch.tensor_ops import CudaOps

__all__ = ["CudaOps"]

with suppress(ImportError):  # the course's tests read numba.cuda after `import numba` alone
    importlib.import_module("numba.cuda")
