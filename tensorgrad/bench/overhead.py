"""`tensorgrad bench overhead`: what an op takes beyond its array work, in microseconds.

Arrays have one element, so that NumPy's own work is small; its time is measured and subtracted.
Figures are minima over many repeats; run it while nothing else uses the machine.
Tests: tests/bench/test_small.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tensorgrad.bench.options import crossed
from tensorgrad.bench.pictures import bars
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.core.tensor import Tensor
from tensorgrad.ops import elementwise

_ONE = np.ones(1, np.float32)
# op -> ours of x and a leaf, NumPy's forward, NumPy's backward; an op of two adds up for the leaf
OPS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Any], Any], Any]] = {
    "add": (elementwise.add, lambda x: x + _ONE, lambda x: x + _ONE),
    "multiply": (elementwise.multiply, lambda x: x * _ONE, lambda x: x * _ONE * _ONE + _ONE),
    "negative": (lambda x, _: elementwise.negative(x), lambda x: -x, lambda x: -x),
    "tanh": (lambda x, _: elementwise.tanh(x), np.tanh, lambda x: x * (1 - _ONE * _ONE)),
}


def overhead_sweep(*, length: int = 1000, repeats: int = 60) -> Iterator[Sweep]:
    """Measure what an op takes on the CPU beyond NumPy's own work, in microseconds.

    Args:
        length: ops in a chain.
        repeats: of a chain; the fastest one counts.
    """
    cases = crossed(op=tuple(OPS), length=length, repeats=repeats, dtype="float32")
    results = tuple(
        f"{part}{what}_us" for part in ("forward", "backward") for what in ("", "_total", "_numpy")
    )
    draw = bars("Op beyond NumPy's own work", "us", ("op",), ("forward_us", "backward_us"))
    yield Sweep("overhead", cases, measure_overhead, results, draw)


def measure_overhead(case: Case) -> Row:
    """Return the results of a case: microseconds of an op, of NumPy's work, and the difference."""
    length = case["length"]
    ours, forward, backward = OPS[case["op"]]

    def chain() -> Tensor:
        leaf = Tensor(_ONE, requires_grad=True)
        x = Tensor(_ONE, requires_grad=True)
        for _ in range(length):
            x = ours(x, leaf)
        return x

    def numpy_chain(f: Callable[[Any], Any]) -> None:
        x = _ONE
        for _ in range(length):
            x = f(x)

    def best(prepare: Callable[[], Any], run: Callable[[Any], object]) -> float:
        times: list[float] = []
        for _ in range(case["repeats"]):
            value = prepare()
            began = time.perf_counter()
            run(value)
            times.append(time.perf_counter() - began)
        return 1e6 * min(times) / int(length)

    row: Row = {
        "forward_total_us": best(object, lambda _: chain()),
        "forward_numpy_us": best(object, lambda _: numpy_chain(forward)),
        "backward_total_us": best(chain, lambda y: y.backward()),
        "backward_numpy_us": best(object, lambda _: numpy_chain(backward)),
    }
    for part in ("forward", "backward"):
        row[f"{part}_us"] = row[f"{part}_total_us"] - row[f"{part}_numpy_us"]
    return row
