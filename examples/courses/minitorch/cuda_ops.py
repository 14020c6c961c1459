"""The module in which the course has CudaOps."""

import importlib
import warnings
from contextlib import suppress

from minitorch.tensor_ops import CudaOps

__all__ = ["CudaOps"]

# The course's tests read numba.cuda after `import numba` alone.
with suppress(ImportError), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    importlib.import_module("numba.cuda")
