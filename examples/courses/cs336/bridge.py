"""Calls of tensorgrad's functions with PyTorch's tensors, through which gradients flow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensorgrad import interop


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function of tensorgrad's tensors gives for PyTorch's."""
    return interop.as_torch_function(function)(*args)


def call_with_weights(
    function: Callable[..., Any], weights: Mapping[str, Any], x: Any, *others: Any
) -> Any:
    """Return function(x, weights, *others), with the tensors of a dictionary too."""
    names, rest = list(weights), len(weights)

    def flat(x: Any, *tensors: Any) -> Any:
        return function(x, dict(zip(names, tensors[:rest], strict=True)), *tensors[rest:])

    return call(flat, x, *weights.values(), *others)
