"""Whatever one rank does wrong, all ranks end within seconds, and it is said once who and what."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.parallel import faults
from tests.ranks import run_ranks

pytestmark = pytest.mark.mpi


def run(fault: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    start = time.monotonic()
    result = run_ranks(Path(faults.__file__), ranks, [fault], check=False, timeout=30)
    assert time.monotonic() - start < 10
    return result


@pytest.mark.parametrize(
    ("fault", "title", "message", "status"),
    [
        ("one_raises", "rank 1 of 2: uncaught ValueError, all ranks end", "ValueError: boom", 1),
        ("all_raise", "rank 0 of 2: uncaught ValueError, all ranks end", "ValueError: boom 0", 1),
        ("thread_raises", "rank 1 of 2: uncaught ValueError", "ValueError: boom", 1),
        ("interrupted", "rank 1 of 2: uncaught KeyboardInterrupt", "KeyboardInterrupt", 130),
        (
            "ends_early",
            "rank 0 of 2: uncaught CommError",
            "float64 (3,) on the CPU on rank 0, the end of the program on rank 1",
            1,
        ),
        (
            "exits_early",
            "rank 0 of 2: uncaught CommError",
            "float64 (3,) on the CPU on rank 0, the end of the program on rank 1",
            1,
        ),
        (
            "another_version",
            "rank 0 of 2: uncaught CommError",
            "start: python is '3.12.1' on rank 0, '3.11.4' on rank 1; expected the same on all",
            1,
        ),
        ("disagree", "rank 0 of 2: uncaught CommError", "float64 (4,) on the CPU on rank 1", 1),
    ],
)
def test_all_ranks_end_with_one_traceback(
    fault: str, title: str, message: str, status: int
) -> None:
    result = run(fault)
    assert result.returncode == status, result.stderr
    assert result.stderr.count("Traceback (most recent call last)") == 1, result.stderr
    assert title in result.stderr
    assert message in result.stderr
    assert result.stdout == ("last words of rank 1\n" if fault == "one_raises" else "")


def test_a_rank_can_end_all_with_a_status() -> None:
    assert run("aborts").returncode == 7


def test_a_thread_may_end_itself() -> None:
    result = run("thread_exits")
    assert (result.returncode, result.stdout, result.stderr) == (0, "the end\n", "")
