"""The recording of a profiler, as plain data.

Times are nanoseconds of `time.perf_counter_ns`, those of the GPU too. Tests:
tests/profile/test_tables.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["phase", "layer", "op", "backward"]
Interval = tuple[int, int]

# Phases that only hold others: their own time is Python between ops, which counts as a gap.
CONTAINERS = frozenset(("step", "forward", "backward", "evaluation", "sample"))


@dataclass(frozen=True, slots=True)
class Range:
    """A phase, the call of a layer, an op or the backward of an op, on the host.

    Attributes:
        number: of the range, unique; kernels name it.
        parent: the number of the range around it in the same thread, or -1.
        kind, name: what it is. That of a backward is the name of the op.
        start, end: in ns.
        thread: 0 for the thread that started the profiler, then 1, 2, ...
        phase: the innermost phase around it, or "".
        layer: path of the layer that the op belongs to, such as "blocks.3.attention", or "".
        shapes: of the inputs of an op; of a backward that of dy.
        dtype: of the output; of a backward that of dy.
        flops: of matrix products, known from the shapes; 0 where there are none.
        nbytes: of the operands and results, each counted once: the least that must move.
    """

    number: int
    parent: int
    kind: Kind
    name: str
    start: int
    end: int
    thread: int = 0
    phase: str = ""
    layer: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    flops: float = 0.0
    nbytes: int = 0

    @property
    def is_op(self) -> bool:
        """Whether it is an op or the backward of one."""
        return self.kind in ("op", "backward")

    @property
    def is_work(self) -> bool:
        """Whether its own time is work: that of an op, or of a phase that holds no ops."""
        return self.is_op or (self.kind == "phase" and self.name not in CONTAINERS)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, copy or fill on a GPU, or all of an op's where only events measure it.

    Attributes:
        name: of the kernel, demangled; or of the op.
        start, end: in ns.
        stream, device: numbers.
        range: the number of the range that launched it, or -1.
    """

    name: str
    start: int
    end: int
    stream: int = 0
    device: int = 0
    range: int = -1

    @property
    def communicates(self) -> bool:
        """Whether it belongs to NCCL."""
        return "nccl" in self.name.lower()


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective, from its begin to when the host knows that it is done.

    Attributes:
        call: such as "all_reduce(mean) of float32 (1000,)".
        start, end: in ns.
        nbytes: of the array.
    """

    call: str
    start: int
    end: int
    nbytes: int


@dataclass(frozen=True)
class Recording:
    """The ranges, kernels and transfers of one process.

    Attributes:
        ranges, kernels, transfers: in the order of their ends.
        window: when recording began and ended, in ns. On a GPU both wait for its work.
        epoch: `time.time_ns` at the start of the window.
        rank: of the process.
        device: "cpu" or the name of the GPU.
        source: what measured the device: "host", "cupti" or "events".
    """

    ranges: Sequence[Range]
    window: Interval
    kernels: Sequence[Kernel] = ()
    transfers: Sequence[Transfer] = ()
    epoch: int = 0
    rank: int = 0
    device: str = "cpu"
    source: str = "host"
    _by_number: dict[int, Range] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_number", {span.number: span for span in self.ranges})

    @property
    def steps(self) -> int:
        """The number of phases called "step"; 1 where there are none."""
        found = sum(span.kind == "phase" and span.name == "step" for span in self.ranges)
        return found or 1

    @property
    def steps_window(self) -> Interval:
        """From the start of the first step to the end of the work of the last one, in ns.

        The work of a GPU ends after the host has submitted it.
        """
        steps = [span for span in self.ranges if span.kind == "phase" and span.name == "step"]
        if not steps:
            return self.window
        start, end = min(step.start for step in steps), max(step.end for step in steps)
        late = [kernel.end for kernel in self.kernels]
        return start, max(end, *late) if late else end

    def range_of(self, kernel: Kernel) -> Range | None:
        """Return the range that launched a kernel, or None."""
        return self._by_number.get(kernel.range)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals, in order, that cover the same times."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > start:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> int:
    """Return the sum of the lengths, in ns."""
    return sum(end - start for start, end in intervals)


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the times that are in both of two results of `union`."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def clipped(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the parts of intervals that are inside a window."""
    inside = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    return [(start, end) for start, end in inside if start < end]
