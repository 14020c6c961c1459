from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tensorgrad.bench.memory import (
    PeakMemory,
    TorchAllocator,
    check_fits,
    is_out_of_memory,
    peak_memory,
)
from tensorgrad.core import backend
from tensorgrad.core.backend import free_bytes
from tensorgrad.profile.memory import Allocator


def test_the_peak_counts_what_was_freed_and_what_is_kept(device: str) -> None:
    xp = backend.namespace_on(device)
    with peak_memory(device) as peak:
        # On a CPU all of Python is traced, other threads of this process too: KB beside 16 MiB.
        kept = xp.ones(1 << 24, np.uint8)
        del_me = xp.ones(1 << 26, np.uint8)
        del del_me
        assert peak.bytes == pytest.approx(5 << 24, rel=0.02)
        peak.reset()
        assert peak.bytes == pytest.approx(kept.nbytes, rel=0.02)
    assert peak.bytes == pytest.approx(kept.nbytes, rel=0.02)


def test_the_peak_is_the_most_of_all_reads_since_a_reset() -> None:
    class Scripted(Allocator):
        """Readings of an allocator, in order: bytes in use, and the most since the last read."""

        reads = iter(((0, 0), (3, 7), (2, 5), (2, 4), (1, 3), (1, 2)))

        def read(self) -> tuple[int, int]:
            return next(self.reads)

    peak = PeakMemory(Scripted())
    assert [peak.bytes for _ in range(3)] == [0, 7, 7]
    peak.reset()
    assert peak.bytes == 3
    peak.end()
    assert [peak.bytes for _ in range(2)] == [3, 3]


def test_pytorchs_memory_is_what_it_has_allocated_since_the_start() -> None:
    counts = {"memory_allocated": 100, "max_memory_allocated": 500, "resets": 0}

    def reset() -> None:
        counts["resets"] += 1

    allocator = TorchAllocator(
        SimpleNamespace(
            memory_allocated=lambda: counts["memory_allocated"],
            max_memory_allocated=lambda: counts["max_memory_allocated"],
            reset_peak_memory_stats=reset,
        )
    )
    allocator.start()
    counts["memory_allocated"] = 130
    assert (allocator.read(), counts["resets"]) == ((30, 400), 2)
    allocator.stop()


def test_what_cannot_fit_is_an_error_before(device: str) -> None:
    check_fits(1, device)
    free = free_bytes(device)
    if free is not None:
        with pytest.raises(MemoryError, match=r"needs at least 1,000,000.0 GB, .* GB are free"):
            check_fits(1e15, device)


def test_free_memory_is_that_of_linux_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:  3000 kB\n")
    monkeypatch.setattr(backend, "_MEMINFO", tmp_path / "meminfo")
    assert free_bytes("cpu") == 3000 * 1024
    check_fits(3000 * 1024, "cpu")
    with pytest.raises(MemoryError, match=r"needs at least 0\.0 GB, 0\.0 GB are free"):
        check_fits(3000 * 1024 + 1, "cpu")


def test_unknown_memory_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_MEMINFO", Path("/nowhere"))
    assert free_bytes("cpu") is None
    check_fits(1e30, "cpu")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("cudaErrorMemoryAllocation: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("an illegal memory access"), False),
        (ValueError("memory"), False),
    ],
)
def test_which_errors_are_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
