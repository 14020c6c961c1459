"""Tangents and Hessian-vector products across ranks, which are threads here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.autograd.functions import jvp
from tensorgrad.parallel import Comm
from tensorgrad.parallel.tensor_ops import (
    all_gather_columns,
    all_gather_rows,
    all_reduce,
    all_reduce_gradient,
    reduce_scatter_rows,
)
from tensorgrad.parallel.vocabulary import vocabulary_parallel_cross_entropy
from tests.parallel.threads import Board

TARGETS = np.array([0, 2, -100, 2, 1])
Program = Callable[[Comm, Tensor, Tensor], Tensor]


class ArrayComm(Comm):
    """A rank of a thread, whose collectives move arrays."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self.rank, self.size = board, rank, len(board.values)

    def _arrays(self, array: Any) -> list[Any]:
        board = self._board
        board.values[self.rank] = array.copy()
        board.barrier.wait()
        arrays = list(board.values)
        board.barrier.wait()
        return arrays

    def all_reduce(self, array: Any, *_: Any, **__: Any) -> Any:
        array[...] = sum(self._arrays(array))

    def all_gather(self, array: Any, *_: Any, **__: Any) -> Any:
        return np.stack(self._arrays(array))

    def reduce_scatter(self, array: Any, out: Any, *_: Any, **__: Any) -> Any:
        out[...] = sum(self._arrays(array)).reshape(self.size, -1)[self.rank]


def derivatives(f: Callable[..., Tensor], arrays: Any, tangents: Any) -> tuple[float, Any, Any]:
    """Return the tangent of f, and its Hessian-vector product in two ways."""
    leaves = [Tensor(a, requires_grad=True) for a in arrays]
    moved = tuple(Tensor(t) for t in tangents)
    _, slope = jvp(f, tuple(leaves), moved)
    slope.backward()
    inputs = tuple(Tensor(a) for a in arrays)
    other = [
        jvp(lambda *xs, i=i: tg.grad(f, (0, 1))(*xs)[i], inputs, moved)[1].numpy() for i in (0, 1)
    ]
    return slope.item(), [leaf.grad for leaf in leaves], other


def check(size: int, program: Program, whole: Callable[..., Tensor], width: int = 3) -> None:
    """Compare a program of all ranks, each with some rows of w, with one of one rank."""
    rng = np.random.default_rng(3)
    x, tx = rng.standard_normal((2, 5, width))
    w, tw = rng.standard_normal((2, 6, width))
    rows = 6 // size

    def run(board: Board, rank: int) -> tuple[float, Any, Any]:
        comm, own = ArrayComm(board, rank), slice(rank * rows, (rank + 1) * rows)
        return derivatives(lambda x, w: program(comm, x, w), (x, w[own]), (tx, tw[own]))

    board = Board(size)
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(lambda rank: run(board, rank), range(size)))
    slope, (dx, dw), _ = derivatives(whole, (x, w), (tx, tw))
    for own_slope, first, second in found:
        assert own_slope == pytest.approx(slope)
        for own_dx, _ in (first, second):
            np.testing.assert_allclose(own_dx, dx, rtol=1e-9, atol=1e-12)
    for parts in ([each[1][1] for each in found], [each[2][1] for each in found]):
        np.testing.assert_allclose(np.concatenate(parts), dw, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"z_loss": 0.2, "label_smoothing": 0.1, "reduction": "sum"}, {"vocab_size": 3}],
    ids=str,
)
def test_vocabulary_parallel_cross_entropy(size: int, options: dict[str, Any]) -> None:
    def program(comm: Comm, x: Tensor, w: Tensor) -> Tensor:
        x = all_reduce_gradient(x, comm)
        return vocabulary_parallel_cross_entropy(x, w, TARGETS, comm, **options)

    check(size, program, lambda x, w: tg.linear_cross_entropy(x, w, TARGETS, **options))


def test_columns_and_rows() -> None:
    def gathered(comm: Comm, x: Tensor, w: Tensor) -> Tensor:
        hidden = tg.tanh(all_reduce_gradient(x, comm) @ w.swapaxes(0, 1))
        return (tg.sin(all_gather_columns(hidden, comm)) ** 2).sum()

    def reduced(comm: Comm, x: Tensor, w: Tensor) -> Tensor:
        hidden = tg.tanh(all_reduce_gradient(x, comm) @ w.swapaxes(0, 1))
        return (tg.sin(all_reduce(hidden @ w, comm)) ** 2).sum()

    check(2, gathered, lambda x, w: (tg.sin(tg.tanh(x @ w.swapaxes(0, 1))) ** 2).sum())
    check(2, reduced, lambda x, w: (tg.sin(tg.tanh(x @ w.swapaxes(0, 1)) @ w) ** 2).sum())


def test_parts_of_a_sequence() -> None:
    def program(comm: Comm, x: Tensor, w: Tensor) -> Tensor:
        x = tg.tanh(all_reduce_gradient(x[:4], comm))
        hidden = reduce_scatter_rows((x @ w.swapaxes(0, 1) @ w).reshape(2, 2, 3), comm)
        whole = all_gather_rows(tg.sin(hidden), comm)
        part = (whole.reshape(4, 3) @ w.swapaxes(0, 1)) ** 2
        return all_reduce(part.sum(), comm)

    def whole(x: Tensor, w: Tensor) -> Tensor:
        hidden = tg.sin(tg.tanh(x[:4]) @ w.swapaxes(0, 1) @ w)
        return ((hidden @ w.swapaxes(0, 1)) ** 2).sum()

    check(2, program, whole)
