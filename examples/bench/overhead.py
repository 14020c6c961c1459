"""Overhead of tensorgrad on the array work of an op, in microseconds.

    python examples/bench/overhead.py

Arrays have one element, so that NumPy's own work is small; its time is measured and subtracted.
Figures are minima over many repeats; run it while nothing else uses the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import tensorgrad as tg
from tensorgrad import Tensor

LENGTH = 1000
REPEATS = 60


def chain(f: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply f LENGTH times, to a leaf."""
    x = Tensor(np.ones(1, "float32"), requires_grad=True)
    for _ in range(LENGTH):
        x = f(x)
    return x


def best(f: Callable[[], float]) -> float:
    """Return the smallest of many timings, in microseconds an op."""
    return min(f() for _ in range(REPEATS)) / LENGTH * 1e6


def forward_time(f: Callable[[Tensor], Tensor]) -> float:
    """Return the time of one forward op, in microseconds."""

    def once() -> float:
        start = time.perf_counter()
        chain(f)
        return time.perf_counter() - start

    return best(once)


def backward_time(f: Callable[[Tensor], Tensor]) -> float:
    """Return the time of one backward op, in microseconds."""

    def once() -> float:
        y = chain(f)
        start = time.perf_counter()
        y.backward()
        return time.perf_counter() - start

    return best(once)


def numpy_time(f: Callable[[Any], Any]) -> float:
    """Return the time of the array work alone, in microseconds."""
    a = np.ones(1, "float32")

    def once() -> float:
        x = a
        start = time.perf_counter()
        for _ in range(LENGTH):
            x = f(x)
        return time.perf_counter() - start

    return best(once)


def main() -> None:
    """Print one line an op."""
    one = Tensor(np.ones(1, "float32"), requires_grad=True)
    a = one.data
    rows: list[tuple[str, Callable[[Tensor], Tensor], Callable[[Any], Any], Callable[[Any], Any]]]
    rows = [
        ("add", lambda x: tg.add(x, one), lambda x: x + a, lambda x: x + a),  # + sums for `one`
        ("multiply", lambda x: tg.multiply(x, one), lambda x: x * a, lambda x: x * a * a + a),
        ("negative", tg.negative, lambda x: -x, lambda x: -x),
        ("tanh", tg.tanh, np.tanh, lambda x: x * (1 - a * a)),
    ]
    print("us an op   forward  NumPy  added   backward  NumPy  added")
    for name, f, forward, backward in rows:
        times = [forward_time(f), numpy_time(forward), backward_time(f), numpy_time(backward)]
        fw, fw_numpy, bw, bw_numpy = times
        print(
            f"{name:10} {fw:7.2f} {fw_numpy:6.2f} {fw - fw_numpy:6.2f} "
            f"{bw:10.2f} {bw_numpy:6.2f} {bw - bw_numpy:6.2f}"
        )


if __name__ == "__main__":
    main()
