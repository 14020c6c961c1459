from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensorgrad.bench import memory
from tensorgrad.bench.memory import check_fits, free_bytes, is_out_of_memory, peak_memory
from tensorgrad.core import backend


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


def test_what_cannot_fit_is_an_error_before(device: str) -> None:
    check_fits(1, device)
    free = free_bytes(device)
    if free is not None:
        with pytest.raises(MemoryError, match=r"needs at least 1,000,000.0 GB, .* GB are free"):
            check_fits(1e15, device)


def test_unknown_memory_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", Path("/nowhere"))
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
