"""Communication that overlaps with computation, and that which does not, by rank.

On GPUs the kernels of NCCL against all others; on the CPU each collective, from its begin until the
host knows that it is done, against the ops in the meantime. Tests: tests/profile/test_overlap.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensorgrad.profile.recording import Recording, clipped, intersection, length, union


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


def overlap(recording: Recording) -> CommunicationOverlap:
    """Return how much of a rank's communication overlaps with computation."""
    window, steps = recording.steps_window, recording.steps
    transfers = [each for each in recording.transfers if window[0] <= each.start < window[1]]
    if recording.kernels:
        sends = [each for each in recording.kernels if each.communicates]
        sent = [(each.start, each.end) for each in sends]
        computed = [(each.start, each.end) for each in recording.kernels if not each.communicates]
        calls = len(clipped(sent, window))
    else:
        sent = [(each.start, each.end) for each in transfers]
        computed = [(each.start, each.end) for each in recording.ranges if each.is_op]
        calls = len(transfers)
    communication = union(clipped(sent, window))
    both = intersection(communication, union(clipped(computed, window)))
    return CommunicationOverlap(
        recording.rank,
        length(communication) / 1e9 / steps,
        length(both) / 1e9 / steps,
        calls / steps,
        sum(each.nbytes for each in transfers) / steps,
        (window[1] - window[0]) / 1e9 / steps,
    )


def overlaps_to_markdown(overlaps: Sequence[CommunicationOverlap]) -> str:
    """Return a table with a row for each rank, times of one step."""
    lines = [
        "| rank | collectives | MB | communication ms | overlapped ms | exposed ms | % of step |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for each in overlaps:
        percent = 100 * each.exposed / each.step if each.step else 0.0
        lines.append(
            f"| {each.rank} | {each.calls:g} | {each.nbytes / 1e6:.1f} "
            f"| {1e3 * each.communication:.3f} | {1e3 * each.overlapped:.3f} "
            f"| {1e3 * each.exposed:.3f} | {percent:.1f} |"
        )
    return "\n".join(lines) + "\n"
