"""Automatic mixed precision: matrix products in 16 bits, all other ops unchanged.

Inside `autocast("bfloat16")` the operands of matmul, linear, einsum and attention are cast to
bfloat16, each tensor once however many products use it. Gradients come back in the dtype of the
parameters: a product adds the gradient of a weight to the float32 gradient without rounding first.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from tensorgrad import engine
from tensorgrad.arrays import converted
from tensorgrad.autograd import stand_in
from tensorgrad.dtypes import Dtype, DtypeLike, as_dtype, bfloat16, float16, float64, is_float
from tensorgrad.engine import mode, replaced
from tensorgrad.errors import DtypeError
from tensorgrad.tensor import Tensor


@contextmanager
def autocast(dtype: DtypeLike = "bfloat16", enabled: bool = True) -> Iterator[None]:
    """Compute matrix products in a 16-bit type inside the `with` block, in this thread.

    Blocks nest: the innermost decides; `enabled=False` computes in the operands' own types. Tensors
    that an optimizer or an assignment changed are cast again; direct changes of `tensor.data` take
    effect in the next block.

    Args:
        dtype: "bfloat16" or "float16".
        enabled: whether to cast at all.

    Raises:
        DtypeError: another dtype.
    """
    target = as_dtype(dtype)
    if target not in (bfloat16, float16):
        raise DtypeError(f"autocast: dtype is {target}, expected bfloat16 or float16")
    with replaced(mode, autocast=Casts(target) if enabled else None):
        yield


class Casts:
    """The casts to `dtype` of one `autocast` block, reused while the tensors live."""

    def __init__(self, dtype: Dtype) -> None:
        self.dtype = dtype
        self._version = -1  # of the latest assignment to a tensor before them
        self._made: dict[int, tuple[Any, Tensor]] = {}  # by the id of the tensor that was cast

    def of(self, tensor: Tensor) -> Tensor:
        """Return a float tensor in the dtype; float64 and all else stays."""
        source = tensor.data.dtype
        if source is self.dtype or not is_float(source) or source == float64:
            return tensor
        if self._version != engine.latest_version():
            self._version = engine.latest_version()
            self._made.clear()
        key = id(tensor)
        wants = tensor.requires_grad and mode.grad_enabled
        found = self._made.get(key)
        if found is not None and found[1].requires_grad == wants:
            return found[1]
        cast = stand_in(converted(tensor.data, self.dtype), tensor)
        forget = partial(_forget, weakref.ref(self), key)  # weak: no reference cycle
        self._made[key] = weakref.ref(tensor, forget), cast
        return cast


def _forget(casts: weakref.ref[Casts], key: int, _: Any) -> None:
    """Drop the cast of a tensor that is gone."""
    owner = casts()
    if owner is not None:
        owner._made.pop(key, None)


def cast_operands(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return float operands in the dtype of the enclosing `autocast`; float64 stays."""
    casts = mode.autocast
    return tensors if casts is None else tuple([casts.of(tensor) for tensor in tensors])
