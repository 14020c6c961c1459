"""Gradients that backward functions may add to.

For each input, a backward function gets whether the gradient is wanted: False, True, or an `Into`,
which is true as well and holds the gradient so far. A function that can add to it at no extra cost,
as a matrix product can, does so and returns None; any other returns its gradient as usual.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from tensorgrad.backend import Array, Shape, add_into, is_numpy, namespace
from tensorgrad.dtypes import Dtype

Saved = tuple[Any, ...]  # what an op keeps for its backward function
Needs = Sequence[Any]  # for each input: False, True or an Into
Gradients = Sequence[Array | None]  # for each input: None where not wanted, or added already


# By id: gradients that count as zeros while they hold anything, see `count_as_zeros`.
_unwritten: dict[int, Array] = {}


def count_as_zeros(arrays: Sequence[Array]) -> None:
    """Let gradients count as zeros without writing them, until the first is added or `settle`.

    What is added first overwrites, which saves writing zeros and reading them. For gradients that
    nothing else reads before: those of a step in a CUDA graph.
    """
    _unwritten.update((id(array), array) for array in arrays)


def is_first(total: Array) -> bool:
    """Whether a gradient counts as zeros; no longer then: the caller overwrites it."""
    return bool(_unwritten) and _unwritten.pop(id(total), None) is not None


def settle() -> None:
    """Write the zeros of gradients that nothing was added to."""
    while _unwritten:
        _unwritten.popitem()[1].fill(0)


def forget() -> None:
    """Take gradients as they are again: the graph whose step they belong to has failed."""
    _unwritten.clear()


# By id: gradients whose kernels have added up their rows beside, and these sums in parts.
_row_sums: dict[int, tuple[weakref.ref[Any], Array]] = {}


def keep_row_sums(gradient: Array, parts: Array) -> None:
    """Keep the sum over all axes of a gradient but the last, for the backward that wants it.

    It is the gradient of a bias, which a linear layer would else read the whole gradient for. It is
    kept as long as the gradient lives, which nobody modifies on its way through the graph.

    Args:
        gradient: (..., C), on the GPU.
        parts: (N, C), N > 0, rows contiguous, of the compute type; its rows add up to the sum.
    """
    key = id(gradient)
    _row_sums[key] = weakref.ref(gradient, lambda _: forget_row_sums(key)), parts


def row_sums_of(gradient: Array) -> Array | None:
    """Return the parts that `keep_row_sums` was given, or None."""
    found = _row_sums.get(id(gradient))
    return None if found is None else found[1]


def forget_row_sums(key: int) -> None:
    """Forget those of the gradient with this id: it is gone, or somebody may modify it now."""
    _row_sums.pop(key, None)


class Into(int):  # equal to True, also as a part of a key
    """A need that is true, with the gradient so far.

    Attributes:
        array: owned by the walk or by a leaf; the shape of the input, maybe of a wider dtype.
    """

    array: Array


def into(array: Array) -> Into:
    """Return the need with this gradient so far."""
    need = Into(True)
    need.array = array
    return need


def kernel_total(need: Any, dtype: Dtype) -> tuple[Array | None, bool]:
    """Return the gradient so far if a kernel can add to it, and whether to overwrite it.

    It is if it is contiguous, on the GPU and of `dtype`.
    """
    if type(need) is not Into:
        return None, False
    total = need.array
    if total.dtype is dtype and not is_numpy(total) and total.flags.c_contiguous:
        return total, is_first(total)
    return None, False


def kernel_sum(need: Any, dtype: Dtype) -> Array | None:
    """Return the gradient so far, as `kernel_total` does, for a kernel that adds in any case."""
    total, first = kernel_total(need, dtype)
    if total is not None and first:
        total.fill(0)
    return total


def accumulated(dx: Array, need: Any) -> Array | None:
    """Return a gradient, or None once it is added to the gradient so far.

    A wider gradient is returned: what it is added to would round it.
    """
    if type(need) is not Into or need.array.dtype.itemsize < dx.dtype.itemsize:
        return dx
    if is_first(need.array):
        need.array[...] = dx
    else:
        add_into(need.array, dx)
    return None


def accumulated_view(dx: Array, need: Any, shape: Shape, key: Any) -> Array | None:
    """Return a gradient that is dx in the view [key] and zero elsewhere, as `accumulated` does.

    A loop over the T rows of an array so costs T rows, not T arrays.
    """
    if type(need) is Into:
        if is_first(need.array):
            need.array.fill(0)
        add_into(need.array[key], dx)
        return None
    whole: Array = namespace(dx).zeros(shape, dx.dtype)
    whole[key] = dx
    return whole
