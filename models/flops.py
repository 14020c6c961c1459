"""FLOPs of training a model, for the model FLOPs utilization. Tests: tests/models/test_flops.py."""

from __future__ import annotations

__all__ = ["training_flops"]


def training_flops(elements: float, layers: int, width: int, keys: float) -> float:
    """Return the FLOPs of training on a token, three times those of the forward pass.

        forward = 2 elements + 4 L C keys

    That is matrix products and attention. Recomputation does not count, nor does padding.

    Args:
        elements: the number of elements of the matrices that a token is multiplied by.
        layers: L, the number of blocks.
        width: C, the width of all heads together.
        keys: the number of keys that a token attends to on average: T / 2 with a causal mask, T
            without.

    Returns:
        The number of floating-point operations.

    Example:
        >>> from tensorgrad.models import training_flops
        >>> training_flops(elements=1000, layers=2, width=8, keys=16)
        9072
    """
    return 3 * (2 * elements + 4 * layers * width * keys)
