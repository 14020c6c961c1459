"""Float32 master weights of 16-bit parameters. Tests: tests/optim/test_master.py.

A float16 parameter is the master weight rounded, and the optimizer keeps the whole master weight.

A bfloat16 parameter is the master weight p rounded to nearest, ties away from zero. Beside it the
optimizer keeps only the low 16 bits of p:

    parameter = (bits(p) + 0x8000) >> 16            low = bits(p) & 0xffff
    bits(p) = (parameter << 16) + low               low as a signed number, -0x8000 to 0x7fff

So p comes back exactly, and takes 4 bytes instead of 6. A NaN is 0x7fc0 and 0. An assignment to the
parameter changes only the high half: p is then the assigned value plus at most half a unit in its
last place, which rounds to the assigned value. Where both halves make a NaN (0 and -0x8000, say),
the low one is not of this parameter, and p is the parameter.

kernels/optim.cu has the same. See docs/chapters/optimizer.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import bfloat16, bool_, float32, int16, int32, uint16, uint32


def joined(parameters: Array, low: Array) -> Array:
    """Return the float32 master weights.

    Args:
        parameters: bfloat16.
        low: uint16, of the same shape.
    """
    out, in_float32, mask = _workspaces(parameters)
    join(parameters, low, out, in_float32, mask)
    return out


def halves(values: Array) -> tuple[Array, Array]:
    """Return master weights as bfloat16 parameters and the low 16 bits, uint16.

    Args:
        values: float32.
    """
    parameters = backend.empty(values.shape, bfloat16, values)
    low, (workspace, _, mask) = backend.empty(values.shape, uint16, values), _workspaces(values)
    split(values, parameters, low, workspace, mask)
    return parameters, low


def join(parameters: Array, low: Array, out: Array, in_float32: Array, mask: Array) -> None:
    """Write master weights to `out`; `in_float32` (float32) and `mask` (bool) are workspaces."""
    xp = backend.namespace(out)
    high, bits = in_float32.view(uint32), out.view(uint32)
    high[...] = parameters.view(uint16)
    high <<= 16
    out.view(int32)[...] = low.view(int16)
    bits += high
    xp.isnan(out, out=mask)
    xp.copyto(out, in_float32, where=mask)


def split(values: Array, parameters: Array, low: Array, workspace: Array, mask: Array) -> None:
    """Write master weights as halves; `workspace` (float32) and `mask` (bool) are workspaces."""
    xp = backend.namespace(values)
    xp.isnan(values, out=mask)
    workspace[...] = values
    bits = workspace.view(uint32)
    xp.copyto(bits, 0x7FC00000, where=mask)  # a GPU's 0x7fffffff would be rounded to -0
    low[...] = bits  # truncated
    bits += 0x8000
    bits >>= 16
    parameters.view(uint16)[...] = bits


def take_over(parameters: Array, master: Array, workspace: Array, mask: Array) -> None:
    """Copy float16 parameters that were assigned to, and differ from the rounded master weight."""
    rounded = workspace.view(parameters.dtype)[: parameters.size]
    np.copyto(rounded, master, casting="unsafe")
    np.not_equal(rounded.view(uint16), parameters.view(uint16), out=mask)
    if mask.any():
        np.copyto(master, parameters, casting="unsafe", where=mask)


def low_bits_of(master: Array) -> Array:
    """Return the low bits for master weights whose parameters are rounded with ties to even.

    Former checkpoints have these. Of a tie that was rounded down, the parameter and 0x8000 would be
    another number; the low bits of the float32 before it are taken.
    """
    bits = master.view(uint32)
    low: Array = (bits - ((bits & 0x1FFFF) == 0x8000)).astype(uint16)
    return low


def converted(state: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a state of bfloat16 parameters with "low_bits" where a former one has "master"."""
    found = dict(state)
    for name in names:
        old, new = f"master/{name}", f"low_bits/{name}"
        if new not in found and getattr(found.get(old), "dtype", None) == float32:
            found[new] = low_bits_of(found.pop(old))
    return found


def _workspaces(like: Array) -> tuple[Array, Array, Array]:
    """Return two float32 arrays and a mask of a shape."""
    one, two = (backend.empty(like.shape, float32, like) for _ in range(2))
    return one, two, backend.empty(like.shape, bool_, like)
