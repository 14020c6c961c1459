"""The namespace `tensorgrad` with new tensors on the GPU, for data-apis/array-api-tests.

ARRAY_API_TESTS_MODULE=tests.compat.array_api_gpu chooses it; see docs/guides/array-api.md.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import tensorgrad

DEVICE = "cuda"
_CREATION = {"arange", "asarray", "empty", "eye", "full", "linspace", "ones", "zeros"}


def __getattr__(name: str) -> Any:
    if name.startswith("__") and not name.startswith("__array"):
        raise AttributeError(name)
    value = getattr(tensorgrad, name)
    return partial(value, device=DEVICE) if name in _CREATION else value
