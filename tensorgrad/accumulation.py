"""Gradients that backward functions may add to.

For each input, a backward function gets whether the gradient is wanted: False, True, or an `Into`,
which is true as well and holds the gradient so far. A function that can add to it at no extra cost,
as a matrix product can, does so and returns None; any other returns its gradient as usual.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from tensorgrad.backend import Array, Shape, add_into, is_numpy, namespace
from tensorgrad.dtypes import Dtype, compute_dtype

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


# By id: gradients that were set to 0, and that nothing was added to since.
_untouched: dict[int, weakref.ref[Any]] = {}


def references(arrays: Sequence[Array]) -> dict[int, weakref.ref[Any]]:
    """Return what `note_zeros` takes: references, which do not keep the gradients alive."""
    return {id(array): weakref.ref(array, partial(_drop, id(array))) for array in arrays}


def _drop(key: int, _: object) -> None:
    """Forget a gradient that is gone."""
    _untouched.pop(key, None)


def note_zeros(gradients: Mapping[int, weakref.ref[Any]]) -> None:
    """Note that gradients are set to 0: they count as untouched until something is added."""
    _untouched.update(gradients)


def touch(leaves: Iterable[Any]) -> None:
    """Note that something was added to the gradients of leaves where `is_first` did not see it."""
    if _untouched:
        for leaf in leaves:
            _untouched.pop(id(leaf.grad), None)


def untouched(named: Iterable[tuple[str, Array]]) -> list[str]:
    """Return the names of the gradients that nothing was added to since they were set to 0."""
    return [name for name, gradient in named if id(gradient) in _untouched] if _untouched else []


def is_first(total: Array) -> bool:
    """Whether a gradient counts as zeros; no longer then: the caller overwrites it.

    Whoever adds to a gradient asks first, so what waits to be added to it is added here.
    """
    if _untouched:
        _untouched.pop(id(total), None)
    if id(total) in _waiting:
        add_waiting()
    if not _unwritten or _unwritten.pop(id(total), None) is None:
        return False
    _end_loan(total)
    return True


# By id of a gradient that counts as zeros: a function that copies elsewhere what its memory holds.
_lent: dict[int, Callable[[], None]] = {}


def borrow(total: Array, leave: Callable[[], None]) -> bool:
    """Borrow the memory of a gradient for a contribution to it that is computed before backward.

    Only while the gradient counts as zeros, and by one at a time. The borrower's backward calls
    `give_back`. If others add to the gradient before, they overwrite the memory.

    Args:
        total: see `count_as_zeros`.
        leave: called before others overwrite it: copies the contribution.

    Returns:
        Whether it is lent.
    """
    if id(total) not in _unwritten or id(total) in _lent:
        return False
    _lent[id(total)] = leave
    return True


def give_back(total: Array, need: Any) -> Array | None:
    """Return a contribution in memory that was borrowed, or None where it is the gradient now.

    Args:
        total: where the contribution is.
        need: of the gradient it belongs to.
    """
    if _lent.pop(id(total), None) is None:
        return total  # it was never borrowed, or has left
    if type(need) is Into and need.array is total and is_first(total):
        return None
    return total.copy()


def _end_loan(total: Array) -> None:
    """Have a borrower leave."""
    leave = _lent.pop(id(total), None)
    if leave is not None:
        leave()


# By id of the gradient: a contribution that waits, and the function that adds all such ones.
_waiting: dict[int, tuple[Any, Callable[[list[Any]], None]]] = {}
_waiting_bytes = 0
_MOST_WAITING_BYTES = 24 * 2**20  # so that they are still in the L2 cache


def wait_to_add(
    need: Any, contribution: Any, nbytes: int, add: Callable[[list[Any]], None]
) -> bool:
    """Let a contribution to a gradient wait for others, so that one kernel adds them all.

    For the many small gradients of biases and norms, in a step that becomes a CUDA graph. They
    wait if they go to the gradient of a leaf, until somebody else adds to it or may read it.

    Args:
        need: of the gradient, see `Into`.
        contribution: what `add` takes; it holds arrays of `nbytes`.
        add: adds a list of contributions; one function for all that one kernel can add.

    Returns:
        Whether it waits; else the caller adds it.
    """
    global _waiting_bytes
    if type(need) is not Into or not need.of_leaf:
        return False
    _waiting[id(need.array)] = contribution, add
    _waiting_bytes += nbytes
    if _waiting_bytes > _MOST_WAITING_BYTES:
        add_waiting()
    return True


def add_waiting() -> None:
    """Add the contributions that wait."""
    global _waiting_bytes
    together: dict[Any, list[Any]] = {}
    for contribution, add in _waiting.values():
        together.setdefault(add, []).append(contribution)
    _waiting.clear()
    _waiting_bytes = 0
    for add, contributions in together.items():
        add(contributions)


def settle() -> None:
    """Add what waits, and write the zeros of gradients that nothing was added to."""
    add_waiting()
    while _unwritten:
        total = _unwritten.popitem()[1]
        _end_loan(total)
        total.fill(0)


def forget() -> None:
    """Take gradients as they are again: the graph whose step they belong to has failed."""
    global _waiting_bytes
    _waiting_bytes = 0
    for pending in (_unwritten, _lent, _waiting):
        pending.clear()


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
        of_leaf: whether it is a leaf's; it may be of 16 bits then, and rounds each contribution.
    """

    array: Array
    of_leaf: bool


def into(array: Array, of_leaf: bool = False) -> Into:
    """Return the need with this gradient so far."""
    need = Into(True)
    need.array, need.of_leaf = array, of_leaf
    return need


def kernel_total(need: Any, dtype: Dtype, rounds: bool = False) -> tuple[Array | None, bool]:
    """Return the gradient so far if a kernel can add to it, and whether to overwrite it.

    It can if it is contiguous, on the GPU and of `dtype`.

    Args:
        need: see `Into`.
        dtype: that the kernel writes.
        rounds: whether it can round to 16 bits instead.
    """
    if type(need) is not Into:
        return None, False
    total = need.array
    fits = total.dtype is dtype or (rounds and compute_dtype(total.dtype) is dtype)
    if fits and not is_numpy(total) and total.flags.c_contiguous:
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
