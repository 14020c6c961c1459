"""PyTorch's tensors as tensorgrad's, and calls with them through which gradients flow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorgrad as tg
from tensorgrad.compat import interop


def shared(tensor: Any) -> tg.Tensor:
    """Return a tensor of tensorgrad on the memory of PyTorch's."""
    return tg.from_dlpack(tensor.detach())


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function of tensorgrad's tensors gives for PyTorch's, also in dictionaries."""
    flat = [x for arg in args for x in (arg.values() if isinstance(arg, Mapping) else [arg])]

    def nested(*values: Any) -> Any:
        remaining = iter(values)
        return function(
            *(
                {name: next(remaining) for name in arg}
                if isinstance(arg, Mapping)
                else next(remaining)
                for arg in args
            )
        )

    return interop.as_torch_function(nested)(*flat)
