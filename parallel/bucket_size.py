"""Bucket size of gradients: a cost model of all-reduces that overlap with backward.

Backward takes time T and completes G bytes of gradients at an even pace. They are sent in buckets
of s bytes, one after the other. A bucket takes t(s) = a + s / w to send, and delays the computation
by c: calls of the host, and GPU resources that NCCL's kernels use. L bytes (a token embedding that
is also the head) are complete only at the end of backward and are sent together, with the rest of
the last bucket. The time that communication adds to a step is, with n = (G - L) / s + 1,

    overhead(s) = n c + max(t(L), t(s) + t(L) - T L / G, T s / G + (n - 1) t(s) + t(L) - T)

where s stands for L if it is larger. The first term of the maximum is the last bucket, which is
sent after backward. The last term applies where sending takes longer than backward. Where sending
keeps up, small buckets cost calls, and large ones leave more to send after backward. With L = 0 the
best size is sqrt(G c w). docs/chapters/planning.md has a table.
Tests: tests/parallel/test_bucket_size.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tensorgrad.core.errors import ArgumentError

CALL = 10e-6  # seconds, c
_BANDWIDTH = 250e9  # bytes a second, w
_MOST = 4096  # buckets


@dataclass(frozen=True)
class Overlap:
    """Gradients that are all-reduced during backward.

    Args:
        gradients: G, bytes.
        backward: T, seconds of the backward pass.
        bandwidth: w, bytes of gradients that an all-reduce completes in a second; for n ranks
            n / (2 (n - 1)) of the bus bandwidth.
        latency: a, seconds of an empty all-reduce.
        call: c, seconds by which each all-reduce delays the computation.
        last: L, bytes that are complete only when backward ends.
    Raises:
        ArgumentError: an argument is not positive (latency, call and last may be 0), or `last` is
            larger than all gradients.
    """

    gradients: float
    backward: float
    bandwidth: float
    latency: float = 20e-6
    call: float = CALL
    last: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, value in vars(self).items():
            may_be_zero = name in ("latency", "call", "last")
            if not (value > 0 or (may_be_zero and value == 0)) or value == math.inf:
                raise ArgumentError(f"Overlap: {name} is {value}, expected a positive number")
        if self.last > self.gradients:
            raise ArgumentError(
                f"Overlap: last is {self.last}, expected at most gradients, {self.gradients}"
            )

    def overhead(self, size: float) -> float:
        """Return the seconds that buckets of `size` bytes add to a step.

        Raises:
            ArgumentError: the size is not positive.
        """
        if not size > 0:
            raise ArgumentError(f"overhead: size is {size}, expected a positive number")
        size = min(size, self.gradients)
        last = max(size, self.last)
        rest = self.gradients - last
        end = self.latency + last / self.bandwidth
        if not rest:
            return self.call + end
        count, pace = rest / size, self.backward / self.gradients
        size = min(size, rest)
        each = self.latency + size / self.bandwidth
        behind = size * pace + count * each + end - self.backward
        return (count + 1) * self.call + max(end, behind, each + end - last * pace)

    @property
    def best(self) -> float:
        """The size in bytes with the least overhead, among those that give equal buckets."""
        return min(map(self.size_of, range(1, _MOST + 1)), key=self.overhead)

    def size_of(self, count: int) -> float:
        """Return the size that gives `count` buckets, the last of at least `last` bytes."""
        equal = self.gradients / count
        if equal >= self.last or count == 1:
            return equal
        return max((self.gradients - self.last) / (count - 1), 1.0)


def default_bucket_bytes(gradients: float) -> float:
    """Return a bucket size in bytes that suits most machines: sqrt(G c w), w as with NVLink.

    Twice or half this size has only a quarter more overhead, so machines need no tuning.

    Args:
        gradients: G, bytes.
    """
    return math.sqrt(max(gradients, 1.0) * CALL * _BANDWIDTH)


def all_reduce_bandwidth(bus: float, ranks: int) -> float:
    """Return the bytes that an all-reduce of `ranks` completes in a second, from the bus bandwidth.

    A ring sends 2 (n - 1) / n of the bytes over each link. One rank sends nothing: inf.
    """
    return bus * ranks / (2 * (ranks - 1)) if ranks > 1 else math.inf
