"""Automatic mixed precision: matrix products in 8 or 16 bits or TF32, all other ops unchanged.

Inside `autocast("bfloat16")` the operands of matmul, linear, einsum and attention are cast to
bfloat16, each tensor once however many products use it. Gradients come back in the dtype of the
parameters: a product adds the gradient of a weight to the float32 gradient without rounding first.

Inside `autocast("fp8")` so are those of attention, matmul and einsum; the products of linear layers
are computed in 8 bits, with a scale for each tensor (ops/fp8.py).

Inside `autocast("tf32")` nothing is cast: products of float32 operands run on tensor cores, which
round the operands to 10 bits of mantissa and add in float32. An op keeps the choice for its
backward, wherever that runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from tensorgrad.core import nodes
from tensorgrad.core.arrays import converted
from tensorgrad.core.backend import Array, is_numpy
from tensorgrad.core.dtypes import DtypeLike, as_dtype, float32, float64, is_float
from tensorgrad.core.errors import ArgumentError, DtypeError
from tensorgrad.core.modes import mode, replaced
from tensorgrad.core.record import cast_of
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels.device import has_tf32
from tensorgrad.kernels.matmul import TF32

__all__ = ["autocast"]

FP8 = "fp8"  # in place of a kernel: products of linear layers in 8 bits
AUTOCAST = (TF32, "bfloat16", "float16", FP8)  # the dtypes of `autocast`


@contextmanager
def autocast(
    dtype: DtypeLike = "bfloat16", enabled: bool = True, *, scales: Any = None
) -> Iterator[None]:
    """Compute matrix products in 8 or 16 bits or TF32 inside the `with` block, in this thread.

    Blocks nest: the innermost decides; `enabled=False` computes in the operands' own types. Tensors
    that an optimizer or an assignment changed are cast again; direct changes of `tensor.data` take
    effect in the next block.

    Args:
        dtype: "bfloat16" or "float16"; or "tf32": all arrays stay float32, and products of float32
            operands may round them to TF32. That is for GPUs of compute capability 8.0 and later;
            elsewhere, the CPU included, products stay in float32. Or "fp8": linear layers whose
            lengths are multiples of 16 multiply in 8 bits, on Hopper and on the CPU; all else as
            for "bfloat16".
        enabled: whether to do so at all.
        scales: with "fp8", an `optim.Fp8Scales`, which has scales for the layers of a model, chosen
            from earlier steps; other layers compute in bfloat16. None: each tensor is measured
            before it is rounded.

    Raises:
        DtypeError: another dtype.
        ArgumentError: scales with another dtype than "fp8", or something else than scales.

    Example:
        >>> x, w = tg.ones((2, 3)), tg.ones((3, 4))
        >>> with tg.autocast("bfloat16"):
        ...     y = x @ w
        >>> y.dtype, (x @ w).dtype
        (dtype(bfloat16), dtype('float32'))
    """
    is_name = isinstance(dtype, str) and dtype in (TF32, FP8)
    name = str(dtype) if is_name else as_dtype(dtype).name
    if name not in AUTOCAST:
        raise DtypeError(f"autocast: dtype is {name}, expected bfloat16, float16, fp8 or tf32")
    if scales is not None and name != FP8:
        raise ArgumentError(f"autocast: scales are given for {name}, expected None")
    if scales is not None and not hasattr(scales, "of"):
        raise ArgumentError(
            f"autocast: scales is {type(scales).__name__}, expected an optim.Fp8Scales or None"
        )
    with replaced(mode, autocast=Casts(name, scales) if enabled else None):
        yield


class Casts:
    """The precision of one `autocast` block, and its casts, reused while the tensors live.

    Args:
        precision: one of AUTOCAST.
        scales: of products in 8 bits; see `autocast`.

    Attributes:
        dtype: that operands are cast to; None for TF32.
        rounded_at: the number of the latest assignment before weights were rounded to 8 bits.
    """

    def __init__(self, precision: str, scales: Any = None) -> None:
        self.precision, self.scales = precision, scales
        dtype = "bfloat16" if precision == FP8 else precision
        self.dtype = None if precision == TF32 else as_dtype(dtype)
        self.rounded_at = -1
        self._version = -1  # number of the latest assignment to a tensor before them
        self._made: dict[int, tuple[Any, Tensor]] = {}  # by the id of the tensor that was cast

    def again(self) -> Casts:
        """Return casts for a block of the same precision, which have made none."""
        return Casts(self.precision, self.scales)

    def of(self, tensor: Tensor) -> Tensor:
        """Return a float tensor in the dtype; float64 and all else stays, as all does for TF32."""
        source = tensor.data.dtype
        if self.dtype is None or source is self.dtype or not is_float(source) or source == float64:
            return tensor
        if self._version != nodes.latest_version():
            self._version = nodes.latest_version()
            self._made.clear()
        key = id(tensor)
        wants = tensor.requires_grad and mode.grad_enabled
        found = self._made.get(key)
        if found is not None and found[1].requires_grad == wants:
            return found[1]
        cast = cast_of(converted(tensor.data, self.dtype), tensor)
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


def product_kernel(*arrays: Array | None) -> str | None:
    """Return the kernel of matrix products that the enclosing `autocast` asks for.

    That is "tf32" where all operands that are given are float32, on a GPU that has TF32; else None.
    """
    casts = mode.autocast
    if casts is None or casts.precision != TF32:
        return None
    given = [array for array in arrays if array is not None]
    if any([array.dtype != float32 or is_numpy(array) for array in given]):
        return None
    return TF32 if has_tf32(given[0].device.id) else None
