from __future__ import annotations

import pytest

from tensorgrad.profile.overlap import CommunicationOverlap, overlap, overlaps_to_markdown, timeline
from tensorgrad.profile.recording import Kernel, Range, Recording, Transfer


def step(start: int, end: int) -> Range:
    return Range(0, -1, "phase", "step", start, end)


def op(start: int, end: int) -> Range:
    return Range(start + 1, 0, "op", "matmul", start, end)


def test_transfers_of_the_cpu_against_its_ops() -> None:
    ranges = (step(0, 1000), op(0, 300), op(400, 600))
    transfers = (Transfer("a", 200, 500, 8), Transfer("b", 450, 700, 4), Transfer("c", -9, -1, 1))
    found = overlap(Recording(ranges, (0, 1000), (), transfers, rank=3))
    assert found.rank == 3
    assert found.calls == 2  # another one was before the step
    assert found.nbytes == 12
    assert found.communication == pytest.approx(500e-9)
    assert found.overlapped == pytest.approx((100 + 200) * 1e-9)
    assert found.exposed == pytest.approx(200e-9)


def test_kernels_of_nccl_against_all_others() -> None:
    kernels = (
        Kernel("gemm", 0, 500),
        Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 400, 900, 7),
        Kernel("adamw", 900, 1000),
    )
    found = overlap(Recording((step(0, 100),), (0, 1000), kernels, source="cupti"))
    assert (found.communication, found.overlapped) == pytest.approx((500e-9, 100e-9))
    assert found.step == pytest.approx(1e-6)


def test_the_timeline_of_the_last_step() -> None:
    kernels = (
        Kernel("gemm", 10, 550, range=2),
        Kernel("gemm", 600, 800, range=3),
        Kernel("ncclDevKernel_AllReduce", 700, 950, 7),
    )
    ranges = (
        step(0, 450),
        Range(1, -1, "phase", "step", 500, 560),
        Range(2, 0, "backward", "matmul", 5, 9, phase="backward"),
        Range(3, 1, "backward", "matmul", 510, 520, phase="backward"),
    )
    found = timeline(Recording(ranges, (0, 1000), kernels, epoch=5000, rank=2, source="cupti"))
    assert (found.rank, found.start, found.length) == (2, 5600, 350)  # 100 after the host
    assert found.computed == {"backward": [(0, 200)]}
    assert found.sent == [(100, 350)]


def test_figures_are_of_one_step() -> None:
    ranges = (
        step(0, 1000),
        op(0, 300),
        Range(9, -1, "phase", "step", 1000, 2_000_000),
        Range(10, 9, "phase", "optimizer", 1_500_000, 1_600_000),
    )
    transfers = (
        Transfer("a", 100, 600, 4_000_000),
        Transfer("b", 1_000_000, 2_000_000, 2_000_000),
        Transfer("c", 2_000_000, 2_000_001, 1),  # after the steps
    )
    recording = Recording(ranges, (0, 3_000_000), (), transfers, rank=3)
    found = overlap(recording)
    assert found == CommunicationOverlap(3, 500.25e-6, 0.1e-6, 1, 3_000_000, 1e-3)
    assert overlaps_to_markdown([found]).splitlines()[-1] == (
        "| 3 | 1 | 3.0 | 0.500 | 0.000 | 0.500 | 50.0 |"
    )
    last = timeline(recording)
    assert (last.start, last.length) == (1000, 1_999_000)
    assert last.computed == {"": []}
    assert last.sent == [(999_000, 1_999_000)]
    whole = timeline(Recording((op(100, 200),), (50, 400), (), (Transfer("a", 0, 500, 1),), 7))
    assert (whole.start, whole.length) == (7, 350)
    assert (whole.computed, whole.sent) == ({"": [(50, 150)]}, [(0, 350)])


def test_without_communication() -> None:
    found = overlap(Recording((step(0, 100), op(0, 50)), (0, 100)))
    assert (found.communication, found.exposed, found.calls) == (0, 0, 0)
    assert "| 0 | 0 | 0.0 | 0.000 | 0.000 | 0.000 | 0.0 |" in overlaps_to_markdown([found])
