"""Automatic mixed precision: matrix products in 16 bits, all else as it stands.

Inside `autocast("bfloat16")` the operands of matmul, linear, einsum and attention are cast to
bfloat16; the casts are recorded, so gradients come back in the dtype of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tensorgrad.autograd import mode
from tensorgrad.dtypes import DtypeLike, as_dtype, bfloat16, float16, float64, is_float
from tensorgrad.errors import DtypeError
from tensorgrad.ops.shape import astype
from tensorgrad.tensor import Tensor


@contextmanager
def autocast(dtype: DtypeLike = "bfloat16", enabled: bool = True) -> Iterator[None]:
    """Compute matrix products in a 16-bit type inside the `with` block, in this thread.

    Blocks nest: the innermost decides; `enabled=False` computes in the operands' own types.

    Args:
        dtype: "bfloat16" or "float16".
        enabled: whether to cast at all.

    Raises:
        DtypeError: another dtype.
    """
    target = as_dtype(dtype)
    if target not in (bfloat16, float16):
        raise DtypeError(f"autocast: dtype is {target}, expected bfloat16 or float16")
    before = mode.autocast
    mode.autocast = target if enabled else None
    try:
        yield
    finally:
        mode.autocast = before


def cast_operands(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return float operands in the dtype of the enclosing `autocast`; float64 stays."""
    target = mode.autocast
    if target is None:
        return tensors
    return tuple(
        [
            astype(t, target, copy=False)
            if is_float(t.data.dtype) and t.data.dtype != float64
            else t
            for t in tensors
        ]
    )
