"""Errors of names that the library lacks on purpose; docs/guides/omitted.md lists them."""

from __future__ import annotations

import numpy as np

__all__ = ["missing"]

_PAGE = "docs/guides/omitted.md says why"
_OTHER_MODELS = ("conv", "pool", "lstm", "gru", "rnn", "batchnorm", "batch_norm")


def missing(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module does not have."""
    said = f"module {module!r} has no attribute {name!r}"
    if not name.startswith("_") and any(part in name.lower() for part in _OTHER_MODELS):
        said += f": convolutions, pooling and recurrent layers are omitted on purpose; {_PAGE}"
    elif module == "tensorgrad" and name in np.__all__:
        said += f": this function of NumPy is omitted on purpose; {_PAGE}"
    return AttributeError(said, name=name)
