"""Errors of names that the library lacks on purpose; docs/guides/omitted.md lists them."""

from __future__ import annotations

import numpy as np

__all__ = ["missing"]

_PAGE = "docs/guides/omitted.md says why"
_OTHER_MODELS = ("conv", "pool", "lstm", "gru", "rnn", "batchnorm", "batch_norm")
# PyTorch's names of functions that have one of NumPy's, which is the only one here.
_OF_NUMPY = {
    "as_tensor": "asarray", "bmm": "matmul", "cat": "concatenate", "chunk": "array_split",
    "clamp": "clip", "dist": "linalg.norm", "div": "divide", "from_numpy": "asarray",
    "ger": "outer", "index_select": "take", "is_tensor": "isinstance(x, Tensor)",
    "masked_select": "x[mask]", "mm": "matmul", "movedim": "moveaxis", "mul": "multiply",
    "multinomial": "random.categorical", "mv": "matmul", "neg": "negative", "numel": "x.size",
    "rand": "random.random", "randint": "random.integers", "randn": "random.standard_normal",
    "randperm": "random.permutation", "sub": "subtract", "unbind": "unstack",
    "unsqueeze": "expand_dims",
}  # fmt: skip


def missing(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module does not have."""
    said = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):
        pass
    elif any(part in name.lower() for part in _OTHER_MODELS):
        said += f": convolutions, pooling and recurrent layers are omitted on purpose; {_PAGE}"
    elif name in _OF_NUMPY:
        said += f": it is named as in NumPy, {_OF_NUMPY[name]}"
    elif module == "tensorgrad" and name in np.__all__:
        said += f": this function of NumPy is omitted on purpose; {_PAGE}"
    return AttributeError(said, name=name)
