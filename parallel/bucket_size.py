"""How large buckets of gradients should be: a model of what overlapped all-reduces cost.

Backward takes time T and completes G bytes of gradients at an even pace, which leave in n = G / s
buckets of s bytes. A bucket is on its way for t(s) = a + s / w, one after the other, and takes
c from the computation: calls of the host, and what its kernels keep from others. What a step
takes longer than without sending is

    overhead(s) = n c + max(t(s), s T / G + n t(s) - T)

The first of the two is the last bucket, whose sending begins when backward ends; the second counts
where sending all takes longer than backward. Where sending keeps up, small buckets cost calls and
large ones leave more to wait for at the end, and the best size is sqrt(G c w).
docs/parallel.md has a table and a picture. Tests: tests/parallel/test_bucket_size.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tensorgrad.errors import ArgumentError


@dataclass(frozen=True)
class Overlap:
    """The sending of gradients while backward goes on.

    Args:
        gradients: G, bytes.
        backward: T, seconds of the backward pass after which they are sent.
        bandwidth: w, bytes of gradients a second that an all-reduce gets through; of n ranks,
            n / (2 (n - 1)) of the bus bandwidth.
        latency: a, seconds of an all-reduce of nothing.
        call: c, seconds that each all-reduce takes from the computation.
    Raises:
        ArgumentError: one of them is not positive; latency and call may be 0.
    """

    gradients: float
    backward: float
    bandwidth: float
    latency: float = 20e-6
    call: float = 10e-6

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("gradients", "backward", "bandwidth", "latency", "call"):
            value = getattr(self, name)
            least = name in ("latency", "call")
            if not (value > 0 or (least and value == 0)) or math.isinf(value):
                raise ArgumentError(f"Overlap: {name} is {value}, expected a positive number")

    def overhead(self, size: float) -> float:
        """Return how many seconds longer a step takes with buckets of `size` bytes.

        Raises:
            ArgumentError: the size is not positive.
        """
        if not size > 0:
            raise ArgumentError(f"overhead: size is {size}, expected a positive number")
        size = min(size, self.gradients)
        count = self.gradients / size
        each = self.latency + size / self.bandwidth
        behind = size * self.backward / self.gradients + count * each - self.backward
        return count * self.call + max(each, behind)

    @property
    def best(self) -> float:
        """The size in bytes with the least overhead.

        Both terms of the maximum are convex in the logarithm of the size, so there is one lowest
        point: where one of them is lowest, or where they meet.
        """
        low, high = math.log(min(1e3, self.gradients)), math.log(self.gradients)
        for _ in range(100):
            third = (high - low) / 3
            if self.overhead(math.exp(low + third)) <= self.overhead(math.exp(high - third)):
                high -= third
            else:
                low += third
        return math.exp(high)


def all_reduce_bandwidth(bus: float, ranks: int) -> float:
    """Return the bytes a second that an all-reduce of `ranks` gets through, from the bus bandwidth.

    A ring sends 2 (n - 1) / n of the bytes over each link. With one rank nothing is sent: inf.
    """
    return bus * ranks / (2 * (ranks - 1)) if ranks > 1 else math.inf
