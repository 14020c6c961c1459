"""Names of parameters to which PyTorch's wrappers have added parts.

Tests: tests/nn/test_module.py, tests/models/test_pretrained.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from typing import Any

__all__ = ["by_plain_names", "unwrapped"]

# The wrappers of PyTorch that add a part to the names of what they wrap: torch.compile, FSDP,
# activation checkpointing, and DistributedDataParallel or DataParallel.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"}


def unwrapped(name: str, known: Container[str] = ()) -> str:
    """Return the name of an array without what PyTorch's wrappers have added to it.

    "module._orig_mod.blocks.0.weight", as a compiled model in DistributedDataParallel has it, is
    "blocks.0.weight". Parts are dropped from the left until the name is a known one.

    Args:
        name: of an array, its parts joined by dots.
        known: the names of the module; parts are dropped until the name is one of them.

    Returns:
        The shorter name; without a known one the name without any part of a wrapper.

    Example:
        >>> from tensorgrad.nn.wrapped_names import unwrapped
        >>> unwrapped("module._orig_mod.blocks.0.weight")
        'blocks.0.weight'
    """
    parts = name.split(".")
    for wrapper in [part for part in parts if part in _WRAPPERS]:
        if ".".join(parts) in known:
            break
        parts.remove(wrapper)
    return ".".join(parts)


def by_plain_names(state: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """Return values by the module's names, where PyTorch's wrappers have added to them.

    Names that would be there twice are unchanged.

    Args:
        state: values by name, as a checkpoint has them.
        known: the names of the module.

    Returns:
        The same values in the same order.

    Example:
        >>> from tensorgrad.nn.wrapped_names import by_plain_names
        >>> by_plain_names({"module.weight": 1, "module.bias": 2}, {"weight", "bias"})
        {'weight': 1, 'bias': 2}
    """
    plain = {n: unwrapped(n, known) if isinstance(n, str) else n for n in state}
    counts = Counter(plain.values())
    return {
        new if new in known and counts[new] == 1 else name: state[name]
        for name, new in plain.items()
    }
