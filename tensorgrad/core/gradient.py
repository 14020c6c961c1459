"""Gradients on their way through the graph.

Most edges of the graph have one user: its backward function returns an array, which the walk hands
on. A `Gradient` is made where there is more to say: an edge has several users, whose contributions
add up; a leaf has a gradient, which contributions are added to; or an op has computed sums over the
columns of a gradient beside it.

For each input a backward function gets what is needed of its gradient: False, True, or a
`Gradient`, which the function may add to itself. A matrix product does so at no extra cost, in the
words of cuBLAS: y = product + beta y. What a function returns is added by the walk.
Tests: tests/core/test_gradient.py and tests/core/test_column_sums.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tensorgrad.core.arrays import add_into, added, cast
from tensorgrad.core.backend import Array, Shape, is_numpy, namespace
from tensorgrad.core.dtypes import Dtype, compute_dtype

Saved = tuple[Any, ...]  # arrays and settings that an op keeps for its backward function
Needs = Sequence[Any]  # for each input: False, True or a Gradient
Gradients = Sequence[Any]  # for each input an array or Gradient; None: not wanted, or added already
AddTogether = Callable[[list[Any]], None]  # adds what waits
_NDARRAY = np.ndarray
_MOST_WAITING_BYTES = 24 * 2**20  # so that they are still in the L2 cache
leaves = threading.RLock()  # held to add to the gradient of a leaf, as several threads may


class Gradient:
    """The gradient of one edge, or what an op returns of one.

    Args:
        array: None before the first contribution.
        column_sums: (N, C), N > 0, of the compute dtype; its rows add up to the sum of the array
            over all axes but the last. A linear layer takes it for the gradient of its bias.
        dtype: of the edge.
        rounds: whether a sum is rounded to that dtype; else it is as wide as its widest part.

    Attributes:
        is_leaf: whether the edge is a leaf.
        uses: contributions that are still to come.
        need: what an op gets as the need of its contribution: the gradient itself as soon as the
            sum may be added to.
        is_own: whether nobody else holds the array, so that it may be added to.
        adds_here: the dtype of contributions that are added in place, on the CPU.
    """

    __slots__ = (
        *("array", "column_sums", "dtype", "rounds"),
        *("adds_here", "is_leaf", "is_own", "need", "uses"),
    )
    shape = ()  # so that the walk looks closer

    def __init__(
        self,
        array: Any,
        column_sums: Array | None = None,
        *,
        dtype: Any = None,
        rounds: bool = False,
    ) -> None:
        self.array, self.column_sums, self.dtype, self.rounds = array, column_sums, dtype, rounds
        self.is_leaf = self.is_own = False
        self.need: Any = True
        self.adds_here: Any = None
        self.uses = 2  # uses of an edge that has several

    def collect(self, dx: Array | None, dy: Any, dxs: Gradients, saved: Saved) -> int:
        """Take what one user contributes, None for nothing; return how many others follow.

        The first contribution becomes the sum that others are added to, where the op gave it away.
        On the GPU products would add to it, and round once instead of twice: there only where it
        is wide, as the gradients of parameters are.

        Args:
            dx: a contribution in the shape of the edge.
            dy, dxs, saved: what else the op has, see `is_given_away`.
        """
        uses = self.uses = self.uses - 1
        if dx is None:
            return uses
        if dx.dtype is self.adds_here:
            self.array += dx
            return uses
        if self.array is not None:
            self.add(dx)
        else:
            self.array, on_cpu = dx, type(dx) is _NDARRAY
            if uses > 1 or self.is_leaf:
                is_wide = self.is_leaf and dx.dtype == compute_dtype(dx.dtype)
                grows = dx.dtype is self.dtype if on_cpu else is_wide
                self.is_own = grows and is_given_away(dx, dy, dxs, saved)
        if self.is_own:
            self.need = self
            self.adds_here = self.array.dtype if type(self.array) is _NDARRAY else None
        return uses

    def complete(self) -> Array | None:
        """Return the sum of the contributions, and let go of it."""
        total, self.array, self.need = self.array, None, None
        return total if total is None or not self.rounds else cast(total, self.dtype)

    def add(self, dx: Array) -> None:
        """Add a contribution, which stays as it is."""
        total = self.array
        if dx.dtype is total.dtype is self.dtype and type(total) is _NDARRAY:
            if self.is_own:
                total += dx
                return
            total = total + dx
            self.array = total if type(total) is _NDARRAY else np.asarray(total)  # 0-d: a scalar
        else:
            dtype = self.dtype if self.rounds else np.result_type(total, dx, self.dtype)
            self.array = added(total, dx, dtype)
        self.is_own = True

    def add_at(self, key: Any, dx: Array) -> None:
        """Add a contribution that is dx in the view [key] and zero elsewhere."""
        if self._begin() == 0:
            self.array.fill(0)
        add_into(self.array[key], dx)

    def add_by(self, write: Callable[[Array, int], None]) -> None:
        """Let `write(array, beta)` add its contribution on the CPU, or overwrite it with beta 0."""
        with leaves:
            write(self.array, self._begin())

    def out(self, dtype: Dtype, rounds: bool = False) -> tuple[Array, int] | None:
        """Return the array for a kernel that writes its contribution, and beta.

        With beta 0 the kernel overwrites the array, which then counts as zeros; with 1 it adds.

        Args:
            dtype: that the kernel writes.
            rounds: whether it can round to 16 bits instead.

        Returns:
            None where a kernel cannot: on the CPU, not contiguous, or of another dtype.
        """
        total = self.array
        fits = total.dtype is dtype or (rounds and compute_dtype(total.dtype) is dtype)
        if not fits or is_numpy(total) or not total.flags.c_contiguous:
            return None
        return total, self._begin()

    def waits(self, contribution: Any, nbytes: int, add: AddTogether) -> bool:
        """Let a contribution wait for those of other gradients, so that one kernel adds them all.

        Args:
            contribution: what `add` takes; it holds arrays of `nbytes`.
            nbytes: see there.
            add: adds a list of contributions; one function for all that one kernel can add.

        Returns:
            Whether it waits; else the caller adds it.
        """
        return False

    def _begin(self) -> int:
        """Return beta for somebody who now writes."""
        return 1


class LeafGradient(Gradient):
    """The gradient that a leaf holds: an array that stays where it is.

    Attributes:
        beta: 0 while the memory holds anything and counts as zeros, which saves writing and reading
            them; else 1.
        is_touched: whether something was added since an optimizer set it to 0.
        is_wide: whether it has more than 16 bits.
        waiting: a contribution that is added with those of other leaves at the end of the walk or
            before, its bytes, and what adds them.
        loan: of the memory, while it counts as zeros.
        tensor: the gradient with its history; see autograd/second.py.
    """

    __slots__ = ("beta", "is_touched", "is_wide", "loan", "tensor", "waiting")
    tensor: Any

    def __init__(self, array: Array) -> None:
        self.array, self.dtype, self.is_own = array, array.dtype, True
        self.beta, self.is_touched, self.is_wide = 1, False, array.dtype.itemsize > 2
        self.waiting: tuple[Any, int, AddTogether] | None = None
        self.loan: Loan | None = None

    def add(self, dx: Array) -> None:
        """Add a contribution in place; it is rounded to the dtype of the array."""
        with leaves:
            total, beta = self.array, self._begin()
            if beta and type(total) is _NDARRAY:
                np.add(total, dx, out=total, casting="unsafe")
            elif beta:
                add_into(total, dx)
            else:
                total[...] = dx

    def add_at(self, key: Any, dx: Array) -> None:
        """Add a contribution that is dx in the view [key] and zero elsewhere."""
        with leaves:
            super().add_at(key, dx)

    def plain(self) -> Array:
        """Return the array, settled; without a history from now on."""
        if self.waiting is not None or not self.beta:
            self.settle()
        return self.array

    def settle(self) -> None:
        """Add what waits, and write the zeros that the memory counts as."""
        if self.waiting is not None:
            add_waiting([self])
        if self.beta == 0:
            self.beta = 1
            self._end_loan()
            self.array.fill(0)

    def lend(self) -> Loan | None:
        """Lend the memory for a contribution that is computed before backward; None: it is used."""
        if self.beta or self.loan is not None:
            return None
        self.loan = Loan(self)
        return self.loan

    def waits(self, contribution: Any, nbytes: int, add: AddTogether) -> bool:
        """Let a contribution wait until somebody else adds to the gradient or may read it."""
        with leaves:
            if self.waiting is not None:  # another thread has left it
                add_waiting([self])
            self.waiting = contribution, nbytes, add
        return True

    def _begin(self) -> int:
        self.is_touched = True
        if self.waiting is not None:
            add_waiting([self])
        beta, self.beta = self.beta, 1
        if not beta:
            self._end_loan()
        return beta

    def _end_loan(self) -> None:
        if self.loan is not None:
            self.loan.leave()


class Waiting(list[LeafGradient]):
    """The gradients of a walk in which contributions wait, until there are too many."""

    nbytes = 0

    def note(self, gradient: LeafGradient) -> None:
        """Note one; add the contributions once they are `_MOST_WAITING_BYTES`."""
        self.append(gradient)
        self.nbytes += 0 if gradient.waiting is None else gradient.waiting[1]
        if self.nbytes > _MOST_WAITING_BYTES:
            self.add()

    def add(self) -> None:
        """Add the contributions."""
        add_waiting(self)
        self.clear()
        self.nbytes = 0


def add_waiting(gradients: Sequence[LeafGradient]) -> None:
    """Add the contributions that wait in some gradients."""
    together: dict[AddTogether, list[Any]] = {}
    with leaves:
        for gradient in gradients:
            if gradient.waiting is not None:  # otherwise another thread has added it
                contribution, _, add = gradient.waiting
                gradient.waiting = None
                together.setdefault(add, []).append(contribution)
        for add, contributions in together.items():
            add(contributions)


class Loan:
    """A contribution in the memory of the gradient that it belongs to, until others overwrite it.

    Attributes:
        array: the contribution, there or copied elsewhere since.
    """

    __slots__ = ("_of", "array")

    def __init__(self, of: LeafGradient) -> None:
        self._of: LeafGradient | None = of
        self.array: Array = of.array

    def leave(self) -> None:
        """Copy the contribution, so that the memory may be overwritten."""
        lender, self._of = self._of, None
        if lender is not None:
            lender.loan = None
            self.array = self.array.copy()

    def give_back(self, need: Any) -> Array | None:
        """Return the contribution, or None where it is the gradient now.

        Args:
            need: of the gradient that the contribution is added to.
        """
        lender = self._of
        if lender is not None and need is lender and lender.beta == 0:
            lender.loan, self._of = None, None
            lender.beta, lender.is_touched = 1, True
            return None
        self.leave()
        return self.array


class Early:
    """Gradients that forward has computed, for dy == 1; the first backward takes them.

    Args:
        arrays: one for each input, None where none is wanted; None once they are taken.
    """

    __slots__ = ("arrays",)

    def __init__(self, arrays: list[Array | None]) -> None:
        self.arrays: list[Array | None] | None = arrays

    def take(self) -> list[Array | None] | None:
        """Return the gradients, which may be overwritten; None once they are taken."""
        arrays, self.arrays = self.arrays, None
        return arrays


class Recompute:
    """An operand that an op saves as the way to compute it again.

    Args:
        function: of the arrays; returns the operand with the same bits whenever it is called.
        arrays: which may include None.
        shape: of the operand.
        version: of assignments when the operand was computed; see `nodes.latest_version`.
    """

    __slots__ = ("arrays", "function", "shape", "version")

    def __init__(
        self, function: Callable[..., Array], arrays: Saved, shape: Shape, version: int
    ) -> None:
        self.function, self.arrays, self.shape, self.version = function, arrays, shape, version

    def __call__(self) -> Array:
        """Return the operand."""
        return self.function(*self.arrays)


def accumulated(dx: Array, need: Any) -> Array | None:
    """Return a gradient, or None once it is added to the gradient so far.

    A wider gradient is returned: what it is added to would round it.
    """
    if not isinstance(need, Gradient) or need.array.dtype.itemsize < dx.dtype.itemsize:
        return dx
    need.add(dx)
    return None


def add_at(need: Any, key: Any, dx: Array, shape: Shape) -> Array | None:
    """Return the gradient that is dx in the view [key] and zero elsewhere; None once it is added.

    A loop over the T rows of an array so costs T rows, not T arrays.
    """
    if isinstance(need, Gradient):
        need.add_at(key, dx)
        return None
    whole: Array = namespace(dx).zeros(shape, dx.dtype)
    whole[key] = dx
    return whole


def out_of(need: Any, dtype: Dtype, rounds: bool = False) -> tuple[Array, int] | None:
    """Return what `Gradient.out` does; None where the gradient so far is unknown."""
    return need.out(dtype, rounds) if isinstance(need, Gradient) else None


def is_given_away(dx: Array, dy: Any, dxs: Gradients, saved: Saved) -> bool:
    """Whether only the receiver holds a gradient: it is not a view, and the op returned it once.

    Args:
        dx: a gradient.
        dy: that the op got.
        dxs: all gradients that it returned.
        saved: what it saved.
    """
    if dx.base is not None or not dx.flags.c_contiguous:
        return False
    holders = 0
    for value in (*(dy if type(dy) is list else (dy,)), *dxs, *saved):
        if value is dx or (type(value) is Gradient and value.array is dx):
            holders += 1
    return holders <= 1


def unwrapped(dy: Any) -> Any:
    """Return the array of a gradient that an op returned."""
    return dy.array if type(dy) is Gradient else dy


def parts_of(dy: Any) -> tuple[Array, Array | None]:
    """Return the array of a gradient, and its column sums if it has some."""
    return (dy.array, dy.column_sums) if type(dy) is Gradient else (dy, None)
