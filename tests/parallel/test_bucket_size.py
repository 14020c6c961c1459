from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorgrad.errors import ArgumentError
from tensorgrad.parallel.bucket_size import Overlap, all_reduce_bandwidth, default_bucket_bytes

OVERLAPS = st.builds(
    Overlap,
    gradients=st.floats(1e6, 1e10),
    backward=st.floats(1e-3, 1.0),
    bandwidth=st.floats(1e9, 1e12),
    latency=st.floats(0, 1e-3),
    call=st.floats(1e-7, 1e-3),
    last=st.sampled_from([0.0, 1e5, 9e5]),
)


def simulated(model: Overlap, count: int) -> float:
    """Send one bucket after the other, each when it is complete and the previous one was sent."""
    clock = 0.0
    last = max(model.last, model.gradients / (count + 1))
    size = (model.gradients - last) / max(count, 1)
    for number in range(1, count + 1):
        ready = number * size / model.gradients * model.backward
        clock = max(clock, ready) + model.latency + size / model.bandwidth
    clock = max(clock, model.backward) + model.latency + last / model.bandwidth
    return clock - model.backward + (count + 1) * model.call


@given(OVERLAPS, st.integers(1, 200))
def test_the_formula_is_what_a_simulation_finds(model: Overlap, count: int) -> None:
    found = model.overhead(model.size_of(count))
    assert found == pytest.approx(simulated(model, count - 1), rel=1e-6, abs=1e-9)


@settings(max_examples=30)
@given(OVERLAPS)
def test_no_size_is_better_than_the_best(model: Overlap) -> None:
    least = model.overhead(model.best)
    for count in range(1, 200):
        assert least <= model.overhead(model.size_of(count))


def test_where_sending_keeps_up_the_best_is_the_root() -> None:
    model = Overlap(498e6, 0.044, 280e9)
    assert model.best == pytest.approx(math.sqrt(498e6 * 10e-6 * 280e9), rel=0.05)
    assert model.overhead(25e6) < 1.1 * model.overhead(model.best)
    assert model.overhead(1e12) == model.overhead(498e6)  # a single bucket: everything at the end
    table = Overlap(498e6, 0.044, 280e9, last=154e6)  # nothing leaves before it is there
    assert table.best == pytest.approx((498e6 - 154e6) / 3)
    assert table.overhead(25e6) < 1.3 * table.overhead(table.best)


def test_the_usual_size_is_good_on_machines_that_differ() -> None:
    assert default_bucket_bytes(498e6) == pytest.approx(35e6, rel=0.01)
    for bandwidth in (100e9, 280e9, 400e9):
        for gradients, backward in ((498e6, 0.044), (6.2e9, 0.13)):
            model = Overlap(gradients, backward, bandwidth)
            assert model.overhead(default_bucket_bytes(gradients)) < 1.2 * model.overhead(
                model.best
            )


def test_a_ring_sends_nearly_twice() -> None:
    assert all_reduce_bandwidth(300e9, 2) == 300e9
    assert all_reduce_bandwidth(300e9, 4) == 200e9
    assert all_reduce_bandwidth(300e9, 1) == math.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Overlap(0, 1, 1), "gradients is 0, expected a positive number"),
        (lambda: Overlap(1, 1, math.inf), "bandwidth is inf"),
        (lambda: Overlap(1, 1, 1, -1), "latency is -1"),
        (lambda: Overlap(1, 1, 1, math.nan), "latency is nan"),
        (lambda: Overlap(1, 1, 1, last=2), "last is 2, expected at most gradients, 1"),
        (lambda: Overlap(1, 1, 1).overhead(0), "size is 0, expected a positive number"),
    ],
)
def test_what_is_out_of_range_is_an_error(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
