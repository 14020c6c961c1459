"""Several threads at once, with the result that one after the other would have."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tensorgrad import Tensor, on_grad_ready, random
from tensorgrad.core.nodes import VersionCounter
from tensorgrad.kernels.random import Key

THREADS = 4


@pytest.fixture(autouse=True)
def _busy() -> Iterator[None]:
    """Let threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(function: Callable[[int], object]) -> None:
    """Call a function in each thread with its number; raise what it raises."""
    errors: list[BaseException] = []
    start = threading.Barrier(THREADS)

    def run(number: int) -> None:
        try:
            start.wait()
            function(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_each_draw_has_a_key_of_its_own() -> None:
    generator, count = random.Generator(7), 3000
    found: list[list[Key]] = [[] for _ in range(THREADS)]
    at_once(lambda number: found[number].extend(generator.next_key() for _ in range(count)))
    draws = [key.draw for keys in found for key in keys]
    assert sorted(draws) == list(range(THREADS * count))
    assert generator.get_state() == {"seed": 7, "draw": THREADS * count, "stream": 0}


def test_backward_of_several_threads_adds_all_to_a_shared_leaf() -> None:
    size = 100_000  # NumPy lets other threads run while it adds many
    for _ in range(20):
        leaf = Tensor(np.ones(size), requires_grad=True)

        def run(number: int, leaf: Tensor = leaf) -> None:
            for _ in range(5):
                (leaf * 2.0**number).sum().backward()

        at_once(run)
        assert leaf.grad is not None
        np.testing.assert_array_equal(leaf.grad, np.full(size, 5.0 * (2**THREADS - 1)))


def test_backward_of_several_threads_adds_parts_of_a_shared_leaf() -> None:
    leaf = Tensor(np.ones((2, 200_000)), requires_grad=True)
    leaf.grad = np.zeros((2, 200_000))

    def run(number: int) -> None:
        for _ in range(50):
            leaf[1].sum().backward()

    at_once(run)
    assert leaf.grad is not None
    np.testing.assert_array_equal(leaf.grad[0], 0)
    np.testing.assert_array_equal(leaf.grad[1], 50 * THREADS)


def test_hooks_of_several_threads_are_all_kept_and_removed() -> None:
    leaf = Tensor(np.ones(3), requires_grad=True)
    called: list[int] = []
    removes: list[list[Callable[[], None]]] = [[] for _ in range(THREADS)]

    def add(number: int) -> None:
        for _ in range(300):
            removes[number].append(on_grad_ready(leaf, lambda _: called.append(number)))

    at_once(add)
    leaf.sum().backward()
    assert sorted(called) == sorted(300 * list(range(THREADS)))
    at_once(lambda number: [remove() for remove in removes[number]])
    assert leaf.hooks is None


def test_assignments_of_several_threads_are_all_noted() -> None:
    assigned, arrays = VersionCounter(), [[np.zeros(1) for _ in range(100)] for _ in range(THREADS)]

    def run(number: int) -> None:
        for array in arrays[number]:
            assigned.note(array)

    at_once(run)
    ticks = [version for version, _, _ in assigned.log]
    assert ticks == list(range(1, 100 * THREADS + 1))
    assert assigned.current == 100 * THREADS
