"""Communication that overlaps with computation, and that which does not, by rank.

On GPUs the kernels of NCCL against all others; on the CPU each collective, from its begin until the
host knows that it is done, against the ops in the meantime. Tests: tests/profile/test_overlap.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensorgrad.io import tables
from tensorgrad.profile.recording import Interval, Recording, clipped, intersection, length, union


@dataclass(frozen=True, slots=True)
class CommunicationOverlap:
    """Seconds of a step in which a rank communicates.

    Attributes:
        rank: the rank.
        communication: in which one or more collectives are under way.
        overlapped: of these, those in which the rank also computes.
        calls: the number of collectives of a step.
        nbytes: their bytes, where known.
        step: seconds of the step.
    """

    rank: int
    communication: float
    overlapped: float
    calls: float
    nbytes: float
    step: float

    @property
    def exposed(self) -> float:
        """The seconds in which the rank communicates and does not compute."""
        return self.communication - self.overlapped


@dataclass(frozen=True, slots=True)
class Timeline:
    """The computation and communication of a rank over time, in the last step of a recording.

    Attributes:
        rank: the rank.
        start: of the step, in ns since 1970: ranks have clocks of their own.
        length: of the step, in ns.
        computed: intervals in ns from the start, by phase, such as "backward".
        sent: intervals in which collectives are under way, in ns from the start.
    """

    rank: int
    start: int
    length: int
    computed: dict[str, list[Interval]]
    sent: list[Interval]


def timeline(recording: Recording) -> Timeline:
    """Return the timeline of the last step."""
    window = _last_step(recording)
    computed, sent = _activity(recording)

    def inside(intervals: list[Interval]) -> list[Interval]:
        return [(a - window[0], b - window[0]) for a, b in union(clipped(intervals, window))]

    return Timeline(
        recording.rank,
        recording.epoch + window[0] - recording.window[0],
        window[1] - window[0],
        {phase: inside(intervals) for phase, intervals in computed.items()},
        inside(sent),
    )


def _last_step(recording: Recording) -> Interval:
    """Return when the last step runs: on a GPU from its first kernel on, as the host is ahead."""
    steps = [span.start for span in recording.ranges if span.name == "step"]
    start, end = max(steps, default=recording.window[0]), recording.steps_window[1]
    launched = [(recording.range_of(kernel), kernel) for kernel in recording.kernels]
    own = [kernel.start for span, kernel in launched if span is not None and span.start >= start]
    return min(own, default=start), end


def _activity(recording: Recording) -> tuple[dict[str, list[Interval]], list[Interval]]:
    """Return when a rank computes, by phase, and when it communicates."""
    computed: dict[str, list[Interval]] = {}
    sent = []
    for kernel in recording.kernels:
        if kernel.communicates:
            sent.append((kernel.start, kernel.end))
        else:
            launched = recording.range_of(kernel)
            phase = launched.phase if launched is not None else ""
            computed.setdefault(phase, []).append((kernel.start, kernel.end))
    if not recording.kernels:
        sent = [(transfer.start, transfer.end) for transfer in recording.transfers]
        for op in recording.ranges:
            if op.is_op:
                computed.setdefault(op.phase, []).append((op.start, op.end))
    return computed, sent


def overlap(recording: Recording) -> CommunicationOverlap:
    """Return how much of a rank's communication overlaps with computation."""
    window, steps = recording.steps_window, recording.steps
    transfers = [
        transfer for transfer in recording.transfers if window[0] <= transfer.start < window[1]
    ]
    by_phase, sent = _activity(recording)
    calls = len(clipped(sent, window)) if recording.kernels else len(transfers)
    computed = [interval for intervals in by_phase.values() for interval in intervals]
    communication = union(clipped(sent, window))
    both = intersection(communication, union(clipped(computed, window)))
    return CommunicationOverlap(
        recording.rank,
        length(communication) / 1e9 / steps,
        length(both) / 1e9 / steps,
        calls / steps,
        sum(transfer.nbytes for transfer in transfers) / steps,
        (window[1] - window[0]) / 1e9 / steps,
    )


def overlaps_to_markdown(overlaps: Sequence[CommunicationOverlap]) -> str:
    """Return a table with a row for each rank, times of one step."""
    rows = []
    for overlap in overlaps:
        percent = 100 * overlap.exposed / overlap.step if overlap.step else 0.0
        times = (1e3 * t for t in (overlap.communication, overlap.overlapped, overlap.exposed))
        counts = f"{overlap.rank}", f"{overlap.calls:g}", f"{overlap.nbytes / 1e6:.1f}"
        rows.append((*counts, *(f"{ms:.3f}" for ms in times), f"{percent:.1f}"))
    head = "rank", "collectives", "MB", "communication ms", "overlapped ms", "exposed ms"
    return tables.to_markdown((*head, "% of step"), rows, 7)
