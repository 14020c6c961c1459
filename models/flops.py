"""FLOPs of training a model, for the model FLOPs utilization. Tests: tests/models/test_flops.py."""

from __future__ import annotations

__all__ = ["training_flops"]


def training_flops(elements: float, layers: int, width: int, keys: float) -> float:
    """Return the FLOPs of training on a token, three times those of the forward pass.

        forward = 2 elements + 4 L C keys

    That is matrix products and attention. What is recomputed does not count, nor does padding.

    Args:
        elements: of the matrices that a token is multiplied by.
        layers: L, blocks.
        width: C, of all heads together.
        keys: that a token attends to on average: T / 2 with a causal mask, T without.
    """
    return 3 * (2 * elements + 4 * layers * width * keys)
